"""The sections of the board's page, each as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradmem.benchmarks import lookup
from gradmem.board.compare import OUTSIDE, difference, verdict
from gradmem.board.entries import ENTRIES
from gradmem.board.kept import Kept
from gradmem.board.plan import BENCHMARKS, REPRODUCED, Cell, Column, cells_of
from gradmem.reports.markdown import (
    command_lines,
    interval_text,
    machine_text,
    measured,
    paragraphs,
    settings_text,
    signed,
    table,
)
from gradmem.reports.pictures.frontier import Point
from gradmem.reports.table import literal
from gradmem.runs.experiment import settings_key

__all__ = [
    "PICTURES",
    "ablations",
    "column",
    "column_title",
    "columns",
    "machines_of",
    "points",
    "published_numbers",
    "searches",
    "summary",
    "what_was_run",
]

#: The folder of the pictures, beside the page.
PICTURES = "board"

TITLES = {
    "mnist-rotations": "MNIST rotations",
    "mnist-permutations": "MNIST permutations",
    "mnist-many-permutations": "MNIST many permutations",
    "cifar100-incremental": "incremental CIFAR-100",
    "permuted-mnist": "Permuted MNIST",
    "rotated-mnist": "Rotated MNIST",
    "permuted-mnist-17": "Permuted MNIST of 17 tasks",
    "agem": "A-GEM",
    "cmaml": "C-MAML",
    "derpp": "DER++",
    "er": "ER",
    "ewc": "EWC",
    "gem": "GEM",
    "icarl": "iCaRL",
    "lamaml": "La-MAML",
    "mega": "MEGA",
    "mer": "MER",
    "softgem": "SoftGEM",
    "steadygem": "SteadyGEM",
}

#: What learning cost, as tables and pictures call it.
COSTS = {
    "steps": "steps per example",
    "example_gradients": "example gradients per example",
}


def title(name: str) -> str:
    """What a benchmark or an entry is called.

    Examples
    --------
    >>> title("gem"), title("gem without margin"), title("mine")
    ('GEM', 'GEM without margin', 'mine')
    """
    whole, space, part = name.partition(" ")
    return (TITLES.get(whole) or literal(whole)) + space + literal(part)


def column_title(column: Column) -> str:
    """A column in words."""
    name = title(column.benchmark)
    return name if column.memories is None else f"{name}, {column.memories:,} memories"


def columns(kept: Sequence[Kept]) -> dict[Column, list[Kept]]:
    """The board's columns with their rows, the highest ACC first.

    Entries whose memory does not depend on the column are in all of their benchmark. Parts of an
    entry are not among them, nor are columns without a row of their own, nor other papers' streams.
    """
    found = {}
    side_by_side = {name: BENCHMARKS[name] for name in BENCHMARKS if name not in REPRODUCED}
    for benchmark, sizes in side_by_side.items():
        for memories in sizes:
            own = Column(benchmark, memories)
            fitting = (own, Column(benchmark, None))
            rows = [one for one in kept if one.column in fitting and _is_row(one)]
            if any(one.column == own for one in rows):
                found[own] = sorted(rows, key=lambda one: (-one.estimate("acc").mean, one.entry))
    return found


def points(rows: Sequence[Kept]) -> list[Point]:
    """A column's rows as points of a picture."""
    return [
        Point(
            title(one.entry),
            one.entry,
            one.estimate("acc"),
            {text: one.per_example(cost) for cost, text in COSTS.items()},
        )
        for one in rows
    ]


def summary(kept: Sequence[Kept]) -> str:
    """The first of those that remember in each column, and how far it is before the second."""
    lines = []
    for own, rows in columns(kept).items():
        first, *others = [one for one in rows if one.column == own]
        cells = [column_title(own), _name(first), measured(first.estimate("acc"), ".3f")]
        cells += [_cost(first.per_example(cost)) for cost in COSTS]
        more = difference(first, others[0]) if others else None
        cells += [_name(others[0]), measured(more, "+.3f")] if others else ["–", "–"]
        planned = sum(cell.column == own for cell in _rows_planned())
        lines.append([*cells, f"{1 + len(others)} of {max(planned, 1 + len(others))}"])
    headings = ["column", "first", "ACC", *COSTS.values(), "second", "ACC before the second"]
    parts = [table([*headings, "learners run"], lines)]
    if trials := sum(one.is_trial for one in kept):
        parts.append(
            f"{trials} of {len(kept)} results are trials, on other data or streams than the "
            "board's, and are compared with nothing published."
        )
    return paragraphs(*parts)


def learner(kept: Sequence[Kept], name: str) -> str:
    """A learner's places in all columns; nothing if it has none."""
    lines = []
    for own, rows in columns(kept).items():
        for place, one in enumerate(rows, 1):
            if one.about["learner"] == name:
                costs = [_cost(one.per_example(cost)) for cost in COSTS]
                acc = measured(one.estimate("acc"), ".3f")
                shown = [acc, f"{place} of {len(rows)}", *costs, _settings(one)]
                lines.append([column_title(own), _name(one), *shown])
    headings = ["column", "entry", "ACC", "place", *COSTS.values(), "settings"]
    return table(headings, lines) if lines else ""


def column(own: Column, rows: Sequence[Kept], machines: Mapping[str, str]) -> str:
    """A column's table and picture; `machines` has the letters of those of the whole page."""
    lines = []
    for one in rows:
        found = verdict(one)
        lines.append(
            [
                _name(one),
                measured(one.estimate("acc"), ".3f"),
                measured(one.estimate("bwt"), "+.3f"),
                measured(one.estimate("fwt"), "+.3f"),
                *(_cost(one.per_example(cost)) for cost in COSTS),
                _seconds(one, machines),
                _bytes(one.runs[-1]["memory_bytes"]),
                "–" if found is None else f"{found.acc:.{found.digits}f} {_mark(found.mark)}",
            ]
        )
    headings = ["learner", "ACC", "BWT", "FWT", *COSTS.values(), "seconds", "memory"]
    name = column_title(own)
    own_machines = {_machine(one, run["machine"]) for one in rows for run in one.runs}
    letters = {machine: letter for machine, letter in machines.items() if machine in own_machines}
    return paragraphs(
        f"## {name}",
        table([*headings, "published ACC"], lines),
        f"Seconds on: {_machine_list(letters, len(machines))}.",
        f"![ACC against cost: {name}]({PICTURES}/frontier-{own.slug}.png)",
    )


def ablations(kept: Sequence[Kept]) -> str:
    """What each entry loses without one of its parts, seed by seed."""
    parts = [one for one in kept if one.about["part_of"] is not None]
    whole = {(one.column, one.entry): one for one in kept}
    lines = []
    for one in sorted(parts, key=_place):
        base = whole.get((one.column, one.about["part_of"]))
        more = None if base is None else difference(one, base)
        if base is not None and more is not None:
            same = one.about["settings"] == base.about["settings"]
            lines.append(
                [
                    column_title(one.column),
                    title(one.entry),
                    measured(one.estimate("acc"), ".3f"),
                    title(base.entry),
                    measured(base.estimate("acc"), ".3f"),
                    "0" if same else measured(more, "+.3f"),
                ]
            )
    if not lines:
        return ""
    headings = ["column", "without a part", "ACC", "whole", "ACC", "difference"]
    return paragraphs(
        "## What each part is worth",
        "The settings are those chosen for the whole, but for the part that is missing. The "
        "difference is the mean over seeds, on the same streams, with its 95% interval. It is 0 "
        "without an interval where the chosen settings do without the part themselves.",
        table(headings, lines),
    )


def published_numbers(kept: Sequence[Kept]) -> str:
    """Every published number beside what was measured."""
    lines = []
    for one in sorted(kept, key=_place):
        if (found := verdict(one)) is not None:
            lines.append(
                [
                    column_title(one.column),
                    title(one.entry),
                    measured(one.estimate("acc"), ".3f"),
                    interval_text(found.low, found.high, ".3f"),
                    f"{found.acc:.{found.digits}f}",
                    _mark(found.mark),
                    found.source,
                    found.differs or "–",
                ]
            )
    if not lines:
        return ""
    headings = ["column", "learner", "ACC", "one more run", "published", "mark", "source"]
    return paragraphs(
        "## Published numbers",
        "Permuted and Rotated MNIST are the streams of the paper on dark experience: 20 tasks with "
        "all 60,000 images each, in mini-batches of 128, angles in no order. Permuted MNIST of 17 "
        "tasks is that of the papers on A-GEM and MEGA: 55,000 images each, in mini-batches of "
        "ten, a network with 256 hidden units in each layer. On these, learners are run that were "
        "published there, with the settings published for them.",
        table([*headings, "what differs there"], lines),
    )


def searches(kept: Sequence[Kept]) -> str:
    """What settings were chosen from, and how the chosen ones did where they were chosen."""
    lines = []
    for one in sorted(filter(_is_row, kept), key=_place):
        cells = [column_title(one.column), title(one.entry)]
        if one.tried:
            sound = [s for s in one.tried if None not in s["acc"]]
            chosen = _chosen(one)
            acc = "–" if chosen is None else f"{_mean(chosen['acc']):.3f}"
            cells += [str(len(one.tried)), str(len(one.tried) - len(sound)), acc]
        else:
            cells += ["one, not searched", "–", "–"]
        lines.append([*cells, measured(one.estimate("acc"), ".3f"), _settings(one)])
    headings = ["column", "learner", "settings tried", "of these failed"]
    headings += ["held-out ACC of the chosen", "test ACC", "chosen"]
    return paragraphs(
        "## How settings were chosen",
        "On held-out data, by the mean over the seeds that were tried. The test sets had no part "
        "in it. Held-out and test ACC are of other seeds and other numbers of training examples.",
        table(headings, lines),
        *_notes(kept),
    )


def what_was_run(kept: Sequence[Kept]) -> str:
    """Commands and machines."""
    lines = []
    for one in sorted(kept, key=_place):
        made = dict.fromkeys(machine_text(m, one.about) for m in one.about["machines"])
        size = f"{one.about['n_tasks']} × {one.about['examples_per_task']:,}"
        seeds = f"{len(one.seeds)} ({min(one.seeds)} to {max(one.seeds)})"
        data = one.about["data"]
        lines.append([f"{one.slug}.json", size, data, seeds, "; ".join(made)])
    return paragraphs(
        "## What was run",
        command_lines(one.about["command"] for one in kept),
        "Each row is a file in `results/board`.",
        table(["file", "tasks × examples", "data", "seeds", "on"], lines),
        *_not_run(kept),
    )


def _not_run(kept: Sequence[Kept]) -> list[str]:
    """What the board is to have and has not yet, a line for each column."""
    there = {one.slug for one in kept}
    missing: dict[Column, list[str]] = {}
    for cell in _rows_planned():
        if cell.slug not in there:
            missing.setdefault(cell.column, []).append(title(cell.entry.name))
    lines = [f"- {column_title(own)}: {', '.join(names)}" for own, names in missing.items()]
    return ["Not run yet:", "\n".join(lines)] if lines else []


def _rows_planned() -> list[Cell]:
    """All that the board is to have, but for parts of an entry."""
    return [cell for cell in cells_of() if cell.entry.part_of is None]


def _is_row(one: Kept) -> bool:
    return one.about["part_of"] is None


def _name(one: Kept) -> str:
    return f"{title(one.entry)} (trial)" if one.is_trial else title(one.entry)


def _place(one: Kept) -> tuple[Any, ...]:
    """Columns in the board's order, entries in theirs."""
    names = list(ENTRIES)
    place = names.index(one.entry) if one.entry in names else len(names)
    memories = one.column.memories
    size = (0, 0) if memories is None else (1, -memories)
    return list(BENCHMARKS).index(one.column.benchmark), size, place, one.entry


def _mark(mark: str) -> str:
    return f"**{mark}**" if mark == OUTSIDE else mark


def _cost(value: float) -> str:
    """Three digits, more of large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:.2f} MB"


def _settings(one: Kept) -> str:
    """The settings of a learner, without those that the column or the benchmark decides."""
    return settings_text(_decided(one))


def _decided(one: Kept) -> Mapping[str, Any]:
    entry, settings = ENTRIES.get(one.entry), one.about["settings"]
    usual = lookup.find_benchmark(one.column.benchmark).settings.get(one.about["learner"], {})
    grid = None if entry is None else entry.grid(one.column.benchmark, one.column.memories)
    left = {"budget", "memories", "groups"} if one.column.memories is not None else set()
    names = [name for name in settings if (name in grid if grid else name not in usual)]
    return {name: settings[name] for name in names if name not in left}


def _chosen(one: Kept) -> dict[str, Any] | None:
    key = settings_key(one.about["settings"])
    return next((s for s in one.tried if settings_key(s["settings"]) == key), None)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def _notes(kept: Sequence[Kept]) -> list[str]:
    """What is to be said about entries, a line for each."""
    there = {one.entry for one in kept}
    notes = [(name, entry.notes) for name, entry in ENTRIES.items() if name in there]
    lines = [f"- {title(name)}: {literal(text)}" for name, text in notes if text]
    return ["About the learners:", "\n".join(lines)] if lines else []


def machines_of(kept: Sequence[Kept]) -> dict[str, str]:
    """What rows were made on → a letter."""
    found = {_machine(one, run["machine"]) for one in kept for run in one.runs}
    return {machine: chr(ord("A") + i % 26) for i, machine in enumerate(sorted(found))}


def _machine(one: Kept, i: int) -> str:
    return machine_text(one.about["machines"][i], one.about)


def _machine_list(machines: Mapping[str, str], on_page: int) -> str:
    if on_page == 1:
        return next(iter(machines))
    return "; ".join(f"{letter}: {machine}" for machine, letter in machines.items())


def _seconds(one: Kept, machines: Mapping[str, str]) -> str:
    letters = sorted({machines[_machine(one, run["machine"])] for run in one.runs})
    text = signed(one.estimate("seconds").mean, ".1f")
    return text if len(machines) == 1 else f"{text} ({', '.join(letters)})"
