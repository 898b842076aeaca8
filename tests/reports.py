"""Rows of made-up runs, for tests of tables, pictures and the page."""

from gradmem.reports import summarize
from gradmem.runs.folder import find_runs

from .synthetic import write_run


def rows_of(folder):
    return summarize(find_runs([folder]))


def write_several(folder, learners=("single", "ewc", "gem"), seeds=3, **changes):
    for learner in learners:
        for seed in range(seeds):
            write_run(folder / f"{learner}-{seed}", learner, seed, **changes)


def write_held_out(folder):
    """The same learner on test sets, on held-out data, and on those of the first tasks."""
    write_run(folder / "test", n_tasks=20)
    write_run(folder / "held-out", n_tasks=20, held_out=0.1)
    write_run(folder / "first", n_tasks=20, held_out=0.1, first_tasks=3)
