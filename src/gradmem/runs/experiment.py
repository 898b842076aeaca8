"""An experiment: everything that determines a run, written down as data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from gradmem.benchmarks import BENCHMARKS
from gradmem.benchmarks.recipes import build_learner, settings_for
from gradmem.evaluation.protocol import Progress, Result, run
from gradmem.learners import Learner
from gradmem.streams.continuum import Continuum
from gradmem.validation import non_negative_int, one_of, positive, positive_int

__all__ = ["Experiment", "keep_continuums"]


@dataclass(frozen=True)
class Experiment:
    """One learner on one benchmark with one seed.

    `settings` left out are the paper's for that learner and benchmark, `examples_per_task` the
    benchmark's own. For choosing settings there
    are `first_tasks`, which ends the continuum after so many tasks, and `held_out`, which tests on
    that fraction of every task's training examples and leaves the test sets alone.

    Examples
    --------
    >>> experiment = Experiment("mnist-rotations", "single", {"lr": 0.01}, data="sample",
    ...                         n_tasks=2, examples_per_task=50)
    >>> experiment.settings
    {'lr': 0.01}
    >>> experiment.run().R.shape
    (2, 2)
    """

    benchmark: str
    learner: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    data: str | None = None
    n_tasks: int = 20
    examples_per_task: int | None = None
    batch_size: int = 10
    epochs: int = 1
    order: str | tuple[int, ...] | None = None
    shuffled: bool = False
    every: int | None = None
    device: str = "cpu"
    held_out: float | None = None
    first_tasks: int | None = None

    def __post_init__(self) -> None:
        one_of("benchmark", self.benchmark, BENCHMARKS)
        settings = settings_for(self.benchmark, self.learner, **self.settings)
        object.__setattr__(self, "settings", settings)
        non_negative_int("seed", self.seed)
        if self.examples_per_task is None:
            usual = inspect.signature(BENCHMARKS[self.benchmark]).parameters["examples_per_task"]
            object.__setattr__(self, "examples_per_task", usual.default)
        for name in ("n_tasks", "batch_size", "epochs"):
            positive_int(name, getattr(self, name))
        for name in ("examples_per_task", "every"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        if self.held_out is not None and positive("held_out", self.held_out) >= 1:
            raise ValueError(f"held_out must be below 1, got {self.held_out!r}")
        if self.first_tasks is not None and (
            positive_int("first_tasks", self.first_tasks) > self.n_tasks
        ):
            raise ValueError(
                f"first_tasks must be at most n_tasks, {self.n_tasks}, got {self.first_tasks}"
            )
        if isinstance(self.order, list):
            object.__setattr__(self, "order", tuple(self.order))
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here: {error}") from None
        self.new_learner()  # so that a wrong setting is found before any data is read

    def config(self) -> dict[str, Any]:
        """This experiment as plain data, for `config.json`."""
        config = asdict(self)
        for name in ("held_out", "first_tasks"):  # other runs keep the config they always had
            if config[name] is None:
                del config[name]
        return config

    def continuum(self) -> Continuum:
        """What is learned, on this experiment's device; kept for the next experiment on it."""
        return _continuum(
            self.benchmark,
            self.n_tasks,
            self.examples_per_task,
            self.batch_size,
            self.epochs,
            self.order,
            self.seed,
            self.data,
            first_tasks=self.first_tasks,
            held_out=self.held_out,
            shuffled=self.shuffled,
            device=self.device,
        )

    def new_learner(self) -> Learner:
        settings = dict(self.settings)
        return build_learner(
            self.benchmark, self.learner, settings, self.n_tasks, self.seed, self.device
        )

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        learner: Learner | None = None,
    ) -> Result:
        """Train a new learner and measure it; or `learner`, in the state of a new one."""
        learner = self.new_learner() if learner is None else learner
        return run(learner, self.continuum(), self.every, on_progress=on_progress)


def keep_continuums(n: int) -> None:
    """Keep the last `n` continuums in this process, not just one, for runs that come back to them.

    One of MNIST's takes 170 MB with all its tasks.
    """
    global _continuum
    if positive_int("n", n) != _continuum.cache_parameters()["maxsize"]:
        _continuum = lru_cache(maxsize=n)(_new_continuum)


def _new_continuum(
    benchmark: str,
    *arguments: Any,
    first_tasks: int | None,
    held_out: float | None,
    shuffled: bool,
    device: str,
) -> Continuum:
    continuum = BENCHMARKS[benchmark](*arguments)
    if first_tasks is not None:
        continuum = continuum[:first_tasks]
    if held_out is not None:
        continuum = continuum.held_out(held_out)
    if shuffled:
        continuum = continuum.shuffled()
    return continuum.to(device)


#: The last continuum is kept: comparing learners means giving them the same one.
_continuum = lru_cache(maxsize=1)(_new_continuum)
