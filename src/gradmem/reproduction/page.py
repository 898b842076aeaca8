"""The reproduction page, Markdown and pictures, made from the kept results alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradmem.files import write_whole
from gradmem.published import appendix_b
from gradmem.reports import draw_bars, draw_first_task
from gradmem.reports.styles import styles
from gradmem.reproduction import sections
from gradmem.reproduction.compare import (
    INSIDE,
    NOT_RUN,
    ONE_SEED,
    OUTSIDE,
    TRIAL,
    Cells,
    Comparison,
    compare,
    compare_cells,
)
from gradmem.reproduction.kept import load
from gradmem.reproduction.numbers import numbers
from gradmem.reproduction.plan import N_TASKS
from gradmem.reproduction.search import load_searches

__all__ = ["page_text", "summary", "write_reproduction"]

PAGE = "REPRODUCTION.md"

HEAD = """\
<!-- Made by `gradmem paper --from results/paper --out docs`, never by hand: edits are lost. -->"""

HOW = f"""\
Every published number is one run with one seed; here a setting is run with several. "Mean" has the
95% confidence interval of the mean over seeds: how well the mean is known. "One more run" is the
95% prediction interval, mean ± t · s · √(1 + 1/n): where a single further run would lie, with s the
standard deviation of n seeds. A published number is marked **inside** if it lies in the prediction
interval, for that is its like: a run among runs. Its rounding is allowed for (0.53 stands for 0.525
to 0.535). If nothing differed, 95 of 100 would be inside. Few seeds make the interval wide, so that
being inside says less than being outside.

BWT and FWT are divided by T − 1 = {N_TASKS - 1}, as in equations 3 and 4. Those printed below the
matrices of Appendix B are divided by T, so they are computed again from R. Where the paper has two
values for one thing, and rounding does not explain it, both are shown."""


def write_reproduction(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[Path]:
    """Write the page and its pictures to `out`, from what is kept in `folder`."""
    kept = load(folder)
    if not kept:
        raise ValueError(f"{folder} has no kept results: files that `gradmem paper --keep` wrote")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    page = out / PAGE
    write_whole(page, page_text(folder))
    written = [page]
    for benchmark in sections.ORDER:
        rows = [kept[s].row for s in sections.matrices(benchmark) if s in kept]
        if rows:
            look = styles(row.learner for row in rows)
            for draw in (draw_bars, draw_first_task):
                written += draw(benchmark, rows, out / sections.PICTURES, look, ("png",))
    return written


def page_text(folder: str | os.PathLike[str]) -> str:
    """The page as Markdown: the same text for the same kept results."""
    kept = load(folder)
    comparisons = compare(numbers(), kept)
    cells = [
        compare_cells(setting, appendix_b()[benchmark][setting.learner]["R"], kept.get(setting))
        for benchmark in sections.ORDER
        for setting in sections.matrices(benchmark)
    ]
    outside = [c for c in comparisons if c.mark == OUTSIDE and c.number.metric != "seconds"]
    notes = {c.number: i + 1 for i, c in enumerate(outside)}
    parts = [
        HEAD,
        "# The paper, run again",
        summary(comparisons, cells),
        HOW,
        sections.figure_1(kept),
        sections.table_1(comparisons, kept),
        sections.table_2(comparisons, notes),
        sections.table_3(comparisons, notes),
        sections.appendix_b(comparisons, cells, notes),
        sections.outside(outside),
        sections.searches(load_searches(folder), kept),
        sections.what_was_run(kept),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def summary(comparisons: Sequence[Comparison], cells: Sequence[Cells] = ()) -> str:
    """How many published numbers are inside, how many outside, how many were not run."""
    scores = [c for c in comparisons if c.number.metric != "seconds"]
    times = [c for c in comparisons if c.number.metric == "seconds"]
    inside, outside = (sum(c.mark == mark for c in scores) for mark in (INSIDE, OUTSIDE))
    known = sum(bool(c.why) for c in scores)
    possible = sum(bool(c.perhaps) and not c.why for c in scores)
    what, compared = "values of ACC, BWT and FWT", inside + outside
    some = f"Of the paper's {len(scores)} {what}, {compared} have been compared"
    whole = f"All {len(scores)} {what} in the paper have been compared"
    lines = [
        f"{whole if compared == len(scores) else some}: **{inside} are inside the 95% interval "
        f"for one more run, {outside} outside**"
        + (f" ({known} of them for a known reason, {possible} for a possible one)" * bool(outside))
        + "."
    ]
    rest = {mark: sum(c.mark == mark for c in scores) for mark in (NOT_RUN, ONE_SEED, TRIAL)}
    texts = {
        NOT_RUN: "not been run",
        ONE_SEED: "been run with one seed only",
        TRIAL: "been run only in a trial, smaller than the paper's, and are not compared",
    }
    lines += [f"{n} have {texts[mark]}." for mark, n in rest.items() if n]
    run = [c for c in cells if not c.mark]
    if run:
        hits, total = sum(c.inside for c in run), sum(c.cells for c in run)
        lines.append(
            f"Of the {total:,} accuracies in the {len(run)} matrices of Appendix B that were "
            f"run again, {hits:,} ({hits / total:.1%}) are inside."
        )
    timed = [c for c in times if c.mark in (INSIDE, OUTSIDE)]
    if timed:
        lines.append("Table 1's times are of another machine and are not counted.")
    return " ".join(lines)
