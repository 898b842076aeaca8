"""The sections of the reproduction page, each as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradmem import published
from gradmem.reports import Estimate
from gradmem.reports.markdown import (
    command_text,
    interval_text,
    machine_text,
    measured,
    paragraphs,
    settings_text,
    table,
)
from gradmem.reproduction.compare import OUTSIDE, TRIAL, Cells, Comparison
from gradmem.reproduction.kept import Kept
from gradmem.reproduction.numbers import Number, second_values
from gradmem.reproduction.plan import N_TASKS, SHUFFLED, SHUFFLED_LR, Setting
from gradmem.reproduction.text import number_text, setting_text, title

__all__ = [
    "ORDER",
    "PICTURES",
    "appendix_b",
    "figure_1",
    "matrices",
    "outside",
    "searches",
    "table_1",
    "table_2",
    "table_3",
    "what_was_run",
]

#: The folder of the pictures, beside the page.
PICTURES = "reproduction"

ORDER = ("mnist-permutations", "mnist-rotations", "cifar100-incremental")

COLUMNS = ["mean", "one more run", "published", "mark"]


def figure_1(kept: Mapping[Setting, Kept]) -> str:
    shown = [b for b in ORDER if any(s in kept for s in matrices(b))]
    missing = [b for b in ORDER if b not in shown]
    lines = [
        "## Figure 1",
        "The figure prints no numbers: it draws those of Appendix B, which are compared below. "
        "Diamonds and dotted lines are published. Whiskers are the interval of the mean, which is "
        "narrower than the one the marks below go by.",
    ]
    for benchmark in shown:
        lines.append(
            f"![ACC, BWT and FWT on {title(benchmark)}]({PICTURES}/bars-{benchmark}.png)\n"
            f"![First task on {title(benchmark)}]({PICTURES}/first-task-{benchmark}.png)"
        )
    lines += [f"{title(benchmark)}: not run." for benchmark in missing]
    return paragraphs(*lines)


def table_1(comparisons: Sequence[Comparison], kept: Mapping[Setting, Kept]) -> str:
    own = [c for c in comparisons if c.number.part == "table-1"]
    rows = [
        [
            title(c.number.setting.benchmark),
            title(c.number.setting.learner),
            measured(c.estimate, ".1f"),
            number_text(c.number),
            _ratio(c),
            f"**{OUTSIDE}**: another machine" if c.mark == OUTSIDE else c.mark,
        ]
        for c in own
    ]
    runs = [kept[c.number.setting] for c in own if c.number.setting in kept]
    machines = dict.fromkeys(machine_text(one.about["machines"][0], one.about) for one in runs)
    where = f" They were made on: {'; '.join(machines)}." if machines else ""
    return paragraphs(
        "## Table 1: seconds of a whole run",
        "Training and all evaluations. Runs made here had the machine to themselves, one after "
        f"another, with all its cores.{where} The published times are of another machine: "
        "compare the learners within a column, not the columns.",
        table(["benchmark", "learner", "mean", "published", "published / mean", "mark"], rows),
    )


def table_2(comparisons: Sequence[Comparison], notes: Mapping[Number, int]) -> str:
    rows = [
        [title(c.number.setting.learner), f"{_memory(c.number.setting):,}", *_columns(c, notes)]
        for c in comparisons
        if c.number.part == "table-2"
    ]
    return paragraphs(
        "## Table 2: ACC and memory on incremental CIFAR-100",
        table(["learner", "examples remembered", *COLUMNS], rows),
    )


def table_3(comparisons: Sequence[Comparison], notes: Mapping[Number, int]) -> str:
    rows = [
        [
            title(SHUFFLED if c.number.setting.shuffled else c.number.setting.learner),
            str(c.number.setting.epochs),
            c.number.metric.upper(),
            *_columns(c, notes),
        ]
        for c in comparisons
        if c.number.part == "table-3"
    ]
    return paragraphs(
        "## Table 3: passes over each task of MNIST rotations",
        f"The learning rate for shuffled data is not published. Here it is {SHUFFLED_LR}, the "
        "best of single's grid on held-out shuffled data (three seeds, one epoch).",
        table(["learner", "epochs", "", *COLUMNS], rows),
    )


def appendix_b(
    comparisons: Sequence[Comparison], cells: Sequence[Cells], notes: Mapping[Number, int]
) -> str:
    own = [c for c in comparisons if c.number.part == "appendix-b"]
    lines = ["## Appendix B: the matrices R"]
    for benchmark in ORDER:
        rows = [
            [title(c.number.setting.learner), c.number.metric.upper(), *_columns(c, notes)]
            for c in own
            if c.number.setting.benchmark == benchmark
        ]
        lines += [f"### {title(benchmark)}", table(["learner", "", *COLUMNS], rows)]
        rows = [
            [title(c.setting.learner), *_cell_columns(c)]
            for c in cells
            if c.setting.benchmark == benchmark
        ]
        lines += [
            "Cell by cell:",
            table(["learner", "inside", "of the last row", "mean difference"], rows),
        ]
    return paragraphs(*lines)


def outside(found: Sequence[Comparison]) -> str:
    if not found:
        return ""
    lines = []
    for i, c in enumerate(found):
        assert c.estimate is not None
        spec = _spec(c.number.metric)
        reasons = [*c.why, *(["Perhaps: " + " ".join(c.perhaps)] if c.perhaps else [])]
        why = " ".join(reasons) if reasons else "Reason not known."
        lines.append(
            f"{i + 1}. {title(c.number.part)}, {setting_text(c.number.setting)}, "
            f"{c.number.metric.upper()}: published {number_text(c.number)}, here "
            f"{measured(c.estimate, spec)}, one more run {interval_text(c.low, c.high, spec)}. "
            f"{why}"
        )
    return "## Outside, and why\n\n" + "\n".join(lines)


def searches(made: Sequence[Mapping[str, Any]], kept: Mapping[Setting, Kept]) -> str:
    if not made:
        return ""
    rows = []
    for found in made:
        benchmark = found["benchmark"]
        for choice in found["choices"]:
            learner = choice["learner"]
            names = published.grids()[benchmark].get(learner, choice["settings"])
            best = kept.get(Setting(benchmark, learner))
            theirs = best.about["settings"] if best else {}
            accs = [run["acc"] for run in choice["test"]]
            rows.append(
                [
                    title(benchmark),
                    title(learner),
                    settings_text({n: theirs[n] for n in names if n in theirs}) or "–",
                    settings_text({n: choice["settings"][n] for n in names}),
                    _tried(choice),
                    measured(best.row.estimate("acc") if best else None, ".3f"),
                    measured(Estimate.of(accs) if accs else None, ".3f"),
                ]
            )
    headings = ["benchmark", "learner", "published best", "chosen here", "tried"]
    headings += ["ACC with published", "ACC with chosen"]
    trial = any(found["trial"] for found in made)
    commands = dict.fromkeys(
        f"{command_text(found['command'])} on {machine_text(found['machine'], found)}."
        for found in made
        if found["machine"]  # if there was a run
    )
    return paragraphs(
        "## The search for settings",
        "The grids of Appendix A, searched again. Settings are chosen by ACC on examples held "
        "out of the training sets and then run on the test sets with other seeds; the paper "
        "chose by the test sets. A setting failed if a run of it did not finish, most often "
        "because the loss did not stay finite. The column before the last has the runs of the "
        "tables above, with seeds and a machine of their own."
        + (" This one is a trial, smaller than the paper's." if trial else ""),
        table(headings, rows),
        *commands,
    )


def _tried(choice: Mapping[str, Any]) -> str:
    tried, failed = choice["considered"] + choice["failed"], choice["failed"]
    return f"{tried}, {failed} failed" if failed else str(tried)


def what_was_run(kept: Mapping[Setting, Kept]) -> str:
    """The settings behind the numbers, by the command and the machine that made them."""
    made: dict[tuple[str, str], list[list[str]]] = {}
    for setting in sorted(kept, key=lambda s: (ORDER.index(s.benchmark), s.slug)):
        one = kept[setting]
        about = one.about
        size = f", {about['n_tasks']} tasks of {about['examples_per_task']}" if one.is_trial else ""
        machines = dict.fromkeys(machine_text(machine, about) for machine in about["machines"])
        made.setdefault((about["command"], "; ".join(machines)), []).append(
            [
                f"{setting_text(setting)}{size}",
                str(one.seeds),
                measured(one.row.estimate("acc"), ".3f"),
                settings_text(about["settings"]),
            ]
        )
    lines = ["## What was run"]
    for (command, machines_used), rows in made.items():
        lines.append(f"{command_text(command)} on {machines_used}:")
        lines.append(table(["setting", "seeds", "ACC", "settings"], rows))
    return paragraphs(*lines) if made else paragraphs(*lines, "Nothing yet.")


def _columns(c: Comparison, notes: Mapping[Number, int]) -> list[str]:
    spec = _spec(c.number.metric)
    others = [f"{title(other.part)}: {number_text(other)}" for other in second_values(c.number)]
    note = f" ({notes[c.number]})" if c.number in notes else ""
    return [
        measured(c.estimate, spec),
        interval_text(c.low, c.high, spec),
        "; ".join([number_text(c.number, printed=True), *others]),
        f"**{c.mark}**{note}" if c.mark == OUTSIDE else c.mark,
    ]


def _cell_columns(c: Cells) -> list[str]:
    if c.mark:
        return [c.mark, "", ""]
    return [f"{c.inside} of {c.cells}", f"{c.last_inside} of {c.last}", f"{c.difference:.3f}"]


def _ratio(c: Comparison) -> str:
    if c.estimate is None or c.mark == TRIAL:
        return "–"
    return f"{c.number.value / c.estimate.mean:.1f}"


def _spec(metric: str) -> str:
    return ".3f" if metric == "acc" else "+.3f"


def _memory(setting: Setting) -> int:
    changes = dict(setting.changes)
    if "memories" in changes:
        return int(changes["memories"]) * N_TASKS
    return int(changes.get("budget", 5120))


def matrices(benchmark: str) -> list[Setting]:
    return [Setting(benchmark, learner) for learner in published.appendix_b()[benchmark]]
