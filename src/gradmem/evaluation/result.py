"""What a run measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.evaluation.machine import versions
from gradmem.evaluation.metrics import TransferMetrics, transfer_metrics
from gradmem.evaluation.result_folder import ResultFolder

__all__ = ["Matrix", "Result"]

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Result:
    """What a run measured.

    Attributes
    ----------
    R
        (rows, T): row i holds the test scores on all tasks after the i-th stretch of training.
        Scores are accuracies unless `run` was given another `score`.
    baseline
        (T,): b̄, the same before training.
    curve_examples, curves
        The fine-grained R: `curves` (points, T) holds the test scores after `curve_examples`
        (points,) observed examples. Its columns are learning curves.
    learned
        The column that each row learned; see `transfer_metrics`.
    labels
        A name for each task.
    seconds_training, seconds_evaluation
        Where the time went: on the wall, or by the clock of a GPU that the host is ahead of.
    statistics
        The learner's counts: steps, examples, example gradients, for GEM also violations; with
        `boundaries`, the first example of each task that was found.
    score
        The name of what R holds.
    config
        What is known of the run: benchmark, learner, its settings, batch size and so on. Tables
        and pages name the run by it; change an entry to name it otherwise.
    """

    R: Matrix
    baseline: Matrix
    curve_examples: list[int]
    curves: Matrix
    learned: list[int | None]
    labels: list[str]
    seconds_training: float
    seconds_evaluation: float
    statistics: dict[str, Any] = field(default_factory=dict)
    score: str = "accuracy"
    config: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> TransferMetrics:
        """ACC, BWT and FWT, and forgetting and learning accuracy per task."""
        return transfer_metrics(self.R, self.baseline, self.learned)

    @property
    def acc(self) -> float:
        """Average accuracy at the end (equation 2)."""
        return self.metrics.acc

    @property
    def bwt(self) -> float:
        """Backward transfer (equation 3); below 0 is forgetting."""
        return self.metrics.bwt

    @property
    def fwt(self) -> float:
        """Forward transfer (equation 4)."""
        return self.metrics.fwt

    @property
    def seconds(self) -> float:
        """Training and evaluation together."""
        return self.seconds_training + self.seconds_evaluation

    def __repr__(self) -> str:
        score = "" if self.score == "accuracy" else f"score={self.score!r}, "
        return (
            f"Result({score}acc={self.acc:.4f}, bwt={self.bwt:+.4f}, fwt={self.fwt:+.4f}, "
            f"seconds={self.seconds:.1f})"
        )

    def save(
        self, folder: str | os.PathLike[str], *, overwrite: bool = False, **about: Any
    ) -> Path:
        """Write config.json and result.json, the folder that `gradmem run` writes.

        `gradmem.report` and `gradmem report` make a page, a table and pictures of such folders.

        Parameters
        ----------
        folder
            Made if need be. A folder with the result of another run is refused.
        overwrite
            Replace another run's result instead.
        **about
            Entries of config.json to add or change: `benchmark="my-digits"`, `learner="mine"`,
            `seed=3`. Runs that differ in nothing but their seed become one row of a table.

        Returns
        -------
        Path
            The folder.

        Examples
        --------
        >>> import gradmem as gm, tempfile
        >>> continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=50, data="sample")
        >>> result = gm.run(gm.Single(gm.mlp()), continuum)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = result.save(folder, benchmark="two rotations", seed=0)
        ...     sorted(file.name for file in saved.iterdir())
        ['config.json', 'result.json']
        """
        target = ResultFolder(folder, self.config | about)
        target.check(overwrite)
        target.check_same(self.R, overwrite)
        target.open(overwrite)
        target.write(self.described(target.config))
        return target.path

    def described(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What result.json holds; `config` replaces this result's own."""
        config = self.config if config is None else config
        metrics = self.metrics
        found = {
            **{name: config.get(name) for name in ("learner", "benchmark", "seed")},
            "score": self.score,
            "acc": metrics.acc,
            "bwt": metrics.bwt,
            "fwt": metrics.fwt,
            "forgetting": metrics.forgetting,
            "learning_accuracy": metrics.learning_accuracy,
            "baseline": self.baseline,
            "R": self.R,
            "learned": self.learned,
            "tasks": self.labels,
            "curves": {"examples": self.curve_examples, "accuracy": self.curves},
            "seconds": self.seconds,
            "seconds_training": self.seconds_training,
            "seconds_evaluation": self.seconds_evaluation,
            "versions": versions(),
        }
        return found | {name: v for name, v in self.statistics.items() if name not in found}
