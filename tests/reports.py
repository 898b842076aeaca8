"""Rows of made-up runs, for tests of tables, pictures and the page."""

import json

import numpy as np

from gradmem.evaluation.metrics import transfer_metrics
from gradmem.files import write_json
from gradmem.reports import summarize
from gradmem.runs.read_folder import find_runs

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


def write_scored(folder, seeds=2, scale=1.0, score="minus_error", **changes):
    """Runs like `write_several`'s, with scores from −scale to 0."""
    write_several(folder, ("single", "gem"), seeds, **changes)
    for path in folder.rglob("result.json"):
        result = json.loads(path.read_text())
        scored = {name: scale * (np.array(result[name]) - 1) for name in ("R", "baseline")}
        curves = {
            "examples": result["curves"]["examples"],
            "accuracy": scale * (np.array(result["curves"]["accuracy"]) - 1),
        }
        metrics = transfer_metrics(scored["R"], scored["baseline"])
        found = {name: getattr(metrics, name) for name in ("acc", "bwt", "fwt")}
        write_json(path, result | scored | found | {"curves": curves, "score": score})
