"""The paper in small for tests: runs that are made up, and the command."""

import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gradmem.benchmarks import BENCHMARKS as KNOWN
from gradmem.evaluation.metrics import transfer_metrics
from gradmem.published import appendix_b
from gradmem.reproduction.compare import compare
from gradmem.reproduction.kept import keep, load
from gradmem.reproduction.numbers import numbers
from gradmem.reproduction.plan import (
    BENCHMARKS,
    Conditions,
    Setting,
    settings_of,
)
from gradmem.runs.read_folder import Run
from gradmem.sweeps import Store

MNIST = ["mnist-rotations", "mnist-permutations"]
TINY = Conditions(data="sample", n_tasks=2, examples_per_task=20)
GEM = Setting("mnist-rotations", "gem")
VERSIONS = {"gradmem": "1", "torch": "2", "processor": "a processor", "threads": 2, "gpu": None}
RESULTS = Path(__file__).parents[1] / "results" / "paper"
PAGE = Path(__file__).parents[1] / "docs" / "REPRODUCTION.md"


def paper(monkeypatch, *arguments):
    """`gradmem paper` in this process; its exit code."""
    from gradmem.cli import main

    monkeypatch.setattr(sys, "argv", ["gradmem", "paper", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


def started(out):
    """How often each run was started, in both folders."""
    return Counter(
        (name, entry["key"])
        for name in ("alone", "others")
        for entry in Store(out / name).log()
        if entry["event"] == "started"
    )


def made_up(setting, seed, R, baseline, seconds=10.0, **changes):
    """A run that never was."""
    config = {
        "benchmark": setting.benchmark,
        "learner": setting.learner,
        "settings": KNOWN[setting.benchmark].settings.get(setting.learner, {"lr": 0.1})
        | dict(setting.changes),
        "seed": seed,
        "data": None,
        "n_tasks": 20,
        "examples_per_task": BENCHMARKS[setting.benchmark],
        "batch_size": 10,
        "epochs": setting.epochs,
        "shuffled": setting.shuffled,
        "device": "cpu",
    }
    config |= changes
    R, baseline = np.array(R).round(4), np.array(baseline).round(4)
    metrics = transfer_metrics(R, baseline, [None] if setting.shuffled else None)
    result = {
        "acc": metrics.acc,
        "bwt": None if math.isnan(metrics.bwt) else metrics.bwt,
        "fwt": None if math.isnan(metrics.fwt) else metrics.fwt,
        "seconds": seconds,
        "steps": 2000,
        "baseline": baseline.tolist(),
        "R": R.tolist(),
        "curves": {"examples": [i * 1000 for i in range(len(R) + 1)]},
        "versions": VERSIONS,
    }
    return Run(Path("nowhere"), config, result)


def keep_like_published(folder, settings, seeds=5, shift=0.0, noise=0.02, **changes):
    """Keep runs scattered about the published matrix, or about one of the same kind."""
    random = np.random.default_rng(0)
    for setting in settings:
        entry = appendix_b()[setting.benchmark][setting.learner]
        T = changes.get("n_tasks", 20)
        R = np.array(entry["R"][-1:] if setting.shuffled else entry["R"])[:T, :T]
        runs = [
            made_up(
                setting,
                seed,
                np.clip(R + shift + random.normal(0, noise, R.shape), 0, 1),
                np.clip(np.array(entry["baseline"][:T]) + random.normal(0, noise, T), 0, 1),
                seconds=10 + random.random(),
                **changes,
            )
            for seed in range(seeds)
        ]
        timed = setting in settings_of(["table-1"])
        keep(folder, setting, [(run, timed) for run in runs], "gradmem paper")


def comparisons(folder):
    found = compare(numbers(), load(folder))
    return {(c.number.part, c.number.setting, c.number.metric): c for c in found}
