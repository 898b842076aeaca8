"""Finished runs without training: made-up accuracies in real run folders."""

from __future__ import annotations

import numpy as np

from gradmem.evaluation import Result
from gradmem.runs.experiment import Experiment
from gradmem.runs.write_folder import RunFolder

#: Where a learner's accuracies end up: what it learns of a task, and what it keeps.
SKILL = {
    "single": (0.72, 0.55),
    "independent": (0.55, 0.55),
    "multimodal": (0.78, 0.75),
    "ewc": (0.7, 0.6),
    "gem": (0.84, 0.86),
    "agem": (0.8, 0.7),
}


def write_run(folder, learner="gem", seed=0, benchmark="mnist-rotations", points=0, **changes):
    """Write the folder of a run that never was; `points`: how often tasks are looked at between.

    `changes` go to `Experiment`: settings, n_tasks (5), shuffled, …
    """
    changes = {"n_tasks": 5} | changes
    experiment = Experiment(benchmark, learner, seed=seed, **changes)
    target = RunFolder(folder, experiment)
    target.open()
    target.save(_result(experiment, points))


def _result(experiment: Experiment, points: int) -> Result:
    settings = experiment.settings
    T = experiment.stream["n_tasks"]
    random = np.random.default_rng([experiment.seed, len(experiment.benchmark)])
    learned, kept = SKILL[experiment.learner]
    kept += 0.04 * np.log10(settings.get("memories", 256) / 256)
    kept -= 0.05 * abs(np.log10(settings["lr"] / 0.1)) if experiment.learner == "gem" else 0
    baseline = random.normal(0.1, 0.02, T)
    between = points + 1
    n_rows = 1 if experiment.shuffled else T
    curves = [baseline]
    for i in range(n_rows):
        for part in range(1, between + 1):
            age = np.maximum(0, i + part / between - np.arange(T) - 1)
            known = np.arange(T) < i if n_rows == T else np.full(T, True)
            new = baseline + (learned - baseline) * part / between * (np.arange(T) == i)
            old = kept + (learned - kept) * np.exp(-age / 3)
            curves.append(np.where(known, old, new) + random.normal(0, 0.015, T))
    curves = np.clip(curves, 0, 1).round(4)
    n, batch_size = experiment.stream["examples_per_task"], experiment.stream["batch_size"]
    steps = T * n // batch_size
    statistics = {"steps": steps, "examples": steps * batch_size}
    if experiment.learner in ("gem", "agem"):
        violations = int(steps * random.uniform(0.2, 0.4))
        statistics |= {
            "violations": violations,
            "violated_constraints": violations * 2,
            "active_constraints": int(violations * 1.3),
            "solver_steps": int(violations * 1.4),
        }
    every = n * (T if experiment.shuffled else 1) / between
    return Result(
        R=curves[between::between],
        baseline=curves[0],
        curve_examples=[round(i * every) for i in range(len(curves))],
        curves=curves,
        learned=[None] if experiment.shuffled else list(range(T)),
        labels=[f"{10 * i}°" for i in range(T)],
        seconds_training=T * (5.0 if experiment.learner == "gem" else 1.0) * random.uniform(1, 1.1),
        seconds_evaluation=T * 0.1,
        statistics=statistics,
    )
