"""The board's page, Markdown and pictures, made from the kept results alone."""

from __future__ import annotations

import os
from pathlib import Path

from gradmem.board import sections
from gradmem.board.kept import load
from gradmem.files import write_whole
from gradmem.reports.pictures.frontier import draw_frontier
from gradmem.reports.styles import styles

__all__ = ["learner_text", "page_text", "write_board"]

PAGE = "BOARD.md"

HEAD = """\
<!-- Made by `gradmem board --from results/board --out docs`, never by hand: edits are lost. -->"""

HOW = """\
Every learner has the same streams, network and number of remembered examples in a column. Where
several settings were tried, one was chosen on a tenth of the training examples that was held out,
with other seeds than those of the runs below, which learn from all training examples and are
measured on the test sets. What was tried, and how each did on the held-out data, is in the files
that this page is made from. Where one setting is all there is, it was published for the stream or
chosen before, as the notes about the learners say.
ACC, BWT and FWT are means over seeds with 95% confidence intervals.

The table above is of learners that remember as many examples as the column says. Below, learners
without such a memory stand beside them: single and EWC, and independent and multimodal, which are
told the task when they predict and have weights of their own for each, multimodal twenty first
layers in place of one.

A **step** is a change of the weights along a gradient; steps come one after another, those inside
an algorithm among them (the steps on single examples of MER and La-MAML). An **example gradient**
is counted whenever the gradient of the loss at an example is computed, of the stream or of the
memory, in one pass with others or alone. Both are divided by the examples of the stream: 0.1 steps
per example are one step for each mini-batch of ten, 0.3 are three steps for each; 2 example
gradients per example are one for the example and one for a memory. The setting glances is the
number of gradient steps per mini-batch. Seconds are of a whole run with its evaluations; runs may
have shared their machine, so that seconds show an order of magnitude. Memory is what the remembered
examples take, with room for more, and averages of the weights. A **published** ACC is marked inside
if it lies in the 95% prediction interval for one more run, mean ± t · s · √(1 + 1/n); its rounding
is allowed for.

SteadyGEM and the learners "with averages" are told the task when they predict, too, as GEM's
protocol has it: by how long ago the task was learned they choose one of four averages of their
weights. "SteadyGEM with one average", among its parts, is the same without that choice."""


def write_board(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[Path]:
    """Write the page and its pictures to `out`, from what is kept in `folder`."""
    kept = load(folder)
    if not kept:
        raise ValueError(f"{folder} has no kept results: files that `gradmem board --keep` wrote")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    page = out / PAGE
    write_whole(page, page_text(folder))
    written = [page]
    look = styles(name for name in sorted({one.entry for one in kept}))
    for column, rows in sections.columns(kept).items():
        name, points = f"frontier-{column.slug}", sections.points(rows)
        title = f"ACC against cost: {sections.column_title(column)}"
        folder_of = out / sections.PICTURES
        written += draw_frontier(title, points, folder_of, name, look, ("png",))
    return written


def learner_text(folder: str | os.PathLike[str], learner: str) -> str:
    """A table of a learner's places on the board; nothing if it has none."""
    return sections.learner(load(folder), learner)


def page_text(folder: str | os.PathLike[str]) -> str:
    """The page as Markdown: the same text for the same kept results."""
    kept = load(folder)
    columns, machines = sections.columns(kept), sections.machines_of(kept)
    parts = [
        HEAD,
        "# The board",
        sections.summary(kept),
        HOW,
        *(sections.column(column, rows, machines) for column, rows in columns.items()),
        sections.ablations(kept),
        sections.published_numbers(kept),
        sections.searches(kept),
        sections.what_was_run(kept),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
