"""The training and evaluation protocol (Algorithm 1): a learner, a continuum, a matrix R."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.evaluation.metrics import TransferMetrics, transfer_metrics
from gradmem.learners.learner import Learner
from gradmem.streams import Continuum, Examples
from gradmem.validation import positive_int

__all__ = ["Progress", "Result", "run"]

Matrix = np.ndarray[Any, np.dtype[np.float64]]

#: Test examples predicted at once: enough to keep the processor busy, few enough for its caches.
EVALUATION_BATCH = 2000


@dataclass
class Result:
    """What a run measured.

    Attributes
    ----------
    R
        (rows, T): row i holds the test accuracies on all tasks after the i-th stretch of training.
    baseline
        (T,): b̄, the same before training.
    curve_examples, curves
        The fine-grained R: `curves` (points, T) holds the test accuracies after `curve_examples`
        (points,) observed examples. Its columns are learning curves.
    learned
        The column that each row learned; see `transfer_metrics`.
    labels
        A name for each task.
    seconds_training, seconds_evaluation
        Where the time went.
    statistics
        The learner's counts: steps, examples, for GEM also violations.
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

    @cached_property
    def metrics(self) -> TransferMetrics:
        return transfer_metrics(self.R, self.baseline, self.learned)

    @property
    def acc(self) -> float:
        return self.metrics.acc

    @property
    def bwt(self) -> float:
        return self.metrics.bwt

    @property
    def fwt(self) -> float:
        return self.metrics.fwt

    @property
    def seconds(self) -> float:
        """Training and evaluation together."""
        return self.seconds_training + self.seconds_evaluation

    def __repr__(self) -> str:
        return (
            f"Result(acc={self.acc:.4f}, bwt={self.bwt:+.4f}, fwt={self.fwt:+.4f}, "
            f"seconds={self.seconds:.1f})"
        )


@dataclass(frozen=True)
class Progress:
    """How far a run is: given to `run`'s `on_progress` after every mini-batch and every row."""

    task: int
    n_tasks: int
    label: str
    examples: int
    n_examples: int
    seconds: float
    acc: float | None
    """Mean accuracy on the tasks learned so far, at the last row of R."""
    partial: Result | None
    """What has been measured so far; only when a row of R has just been added."""


def run(
    learner: Learner,
    continuum: Continuum,
    every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Train `learner` on `continuum` and measure it on all tasks as it goes (Algorithm 1).

    Parameters
    ----------
    learner
        Anything that answers `observe` and `predict`; it is trained in place. It is told which
        outputs are which task's (`Learner.outputs`), unless it knows. The baseline of FWT is what
        it can do when the run begins.
    continuum
        The data and the test sets.
    every
        If given, all tasks are also evaluated every so many examples inside tasks: a learning
        curve per task. The rows of R themselves are always part of the curves.
    on_progress
        Called with a `Progress` after every mini-batch and every row of R.

    Examples
    --------
    >>> import gradmem as gm
    >>> continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=100, data="sample")
    >>> result = gm.run(gm.GEM(gm.mlp(), memories=20), continuum)
    >>> result.R.shape, result.baseline.shape
    ((2, 2), (2,))
    """
    if every is not None:
        positive_int("every", every)
    if not isinstance(continuum, Continuum):
        raise TypeError(f"run takes a learner and a Continuum, got {type(continuum).__name__}")
    continuum = continuum.to(getattr(learner, "device", torch.device("cpu")))
    if isinstance(learner, Learner):
        learner.outputs = {**continuum.outputs, **learner.outputs}
        _look_at(learner, continuum)
    clock = _Clock()
    with clock.evaluation:
        baseline = evaluate(learner, continuum)
    R: list[Matrix] = []
    curves: list[tuple[int, Matrix]] = [(0, baseline)]
    examples = 0

    def so_far() -> Result:
        rows = len(R)
        return Result(
            R=np.array(R),
            baseline=baseline,
            curve_examples=[n for n, _ in curves],
            curves=np.array([row for _, row in curves]),
            learned=continuum.learned[:rows],
            labels=continuum.labels(),
            seconds_training=clock.training.seconds,
            seconds_evaluation=clock.evaluation.seconds,
            statistics=_statistics(learner),
        )

    def report(i: int, partial: Result | None = None) -> None:
        if on_progress is not None:
            on_progress(
                Progress(
                    task=i,
                    n_tasks=continuum.n_tasks,
                    label=continuum.tasks[i].label,
                    examples=examples,
                    n_examples=continuum.n_examples,
                    seconds=clock.training.seconds + clock.evaluation.seconds,
                    acc=_acc_so_far(R, continuum.learned),
                    partial=partial,
                )
            )

    for i in range(continuum.n_tasks):
        for x, t, y in continuum[i]:
            with clock.training:
                _observe(learner, x, t, y)
            seen = examples + len(y)
            if every is not None and seen // every > examples // every:
                with clock.training:
                    _wait(continuum)
                with clock.evaluation:
                    curves.append((seen, evaluate(learner, continuum)))
            examples = seen
            report(i)
        if curves[-1][0] < examples:
            with clock.training:
                _wait(continuum)
            with clock.evaluation:
                curves.append((examples, evaluate(learner, continuum)))
        if isinstance(learner, Learner):
            learner.settle()
        R.append(curves[-1][1])
        report(i, so_far())
    return so_far()


def evaluate(learner: Learner, continuum: Continuum) -> Matrix:
    """Test accuracies on all tasks: (T,). Every example counts; the device is waited for once."""
    right, sizes = [], []
    for t, test in continuum.tests.items():
        size = EVALUATION_BATCH
        if isinstance(test, Examples) and test.device.type == "cuda":
            size = len(test)
        right += [(_predict(learner, x, t) == y).sum() for x, y in test.batches(size)]
        sizes += [(len(test), -(-len(test) // size))]
    counts = iter(torch.stack(right).tolist())
    return np.array([sum(next(counts) for _ in range(n)) / total for total, n in sizes])


def _wait(continuum: Continuum) -> None:
    """Steps on a GPU are only begun when `observe` returns; their time is training's."""
    device = continuum.tasks[0].train.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _look_at(learner: Learner, continuum: Continuum) -> None:
    """Check the data as a whole, before the run, and without waiting for a GPU at every batch."""
    trains = [(task.t, task.train, learner.check) for task in continuum.tasks]
    tests = [(t, test, learner.check_test) for t, test in continuum.tests.items()]
    for t, examples, check in trains + tests:
        stored = examples if isinstance(examples, Examples) else None
        whole = stored and stored.x.is_floating_point()  # pixels stored as bytes are finite
        x, y = examples[:] if whole else examples[:2]
        check(x, t, y)
        if stored and not whole:
            learner.check_labels(x, t, stored.y)
    known = [task.train.y for task in continuum.tasks if isinstance(task.train, Examples)]
    classes = {c for y in known for c in y.unique().tolist()}
    learner.check_all([task.t for task in continuum.tasks], classes)


def _observe(learner: Learner, x: Tensor, t: Hashable, y: Tensor) -> None:
    if x.is_cuda and isinstance(learner, Learner):
        learner.observe(x, t, y, check=False)
    else:
        learner.observe(x, t, y)


def _predict(learner: Learner, x: Tensor, t: Hashable) -> Any:
    if x.is_cuda and isinstance(learner, Learner):
        return learner.predict(x, t, check=False)
    return learner.predict(x, t)


def _acc_so_far(R: list[Matrix], learned: list[int | None]) -> float | None:
    if not R:
        return None
    seen = {j for j in learned[: len(R)] if j is not None}
    return float(R[-1][sorted(seen)].mean() if seen else R[-1].mean())


def _statistics(learner: Learner) -> dict[str, Any]:
    statistics: Callable[[], dict[str, Any]] | None = getattr(learner, "statistics", None)
    return statistics() if statistics else {}


class _Clock:
    """Stop-watches for the two things a run does."""

    def __init__(self) -> None:
        self.training, self.evaluation = _StopWatch(), _StopWatch()


class _StopWatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start
