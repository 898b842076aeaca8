"""An experiment: everything that determines a run, written down as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from gradmem.benchmarks import BENCHMARKS
from gradmem.continuum import Continuum
from gradmem.learners import Learner
from gradmem.protocol import Progress, Result, run
from gradmem.recipes import build_learner, settings_for
from gradmem.validation import non_negative_int, one_of, positive_int

__all__ = ["Experiment"]


@dataclass(frozen=True)
class Experiment:
    """One learner on one benchmark with one seed.

    `settings` left out are the paper's for that learner and benchmark.

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
    examples_per_task: int = 1000
    batch_size: int = 10
    epochs: int = 1
    order: str | tuple[int, ...] | None = None
    shuffled: bool = False
    every: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        one_of("benchmark", self.benchmark, BENCHMARKS)
        settings = settings_for(self.benchmark, self.learner, **self.settings)
        object.__setattr__(self, "settings", settings)
        non_negative_int("seed", self.seed)
        for name in ("n_tasks", "examples_per_task", "batch_size", "epochs"):
            positive_int(name, getattr(self, name))
        if self.every is not None:
            positive_int("every", self.every)
        if isinstance(self.order, list):
            object.__setattr__(self, "order", tuple(self.order))
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here: {error}") from None
        self.new_learner()  # so that a wrong setting is found before any data is read

    def config(self) -> dict[str, Any]:
        """This experiment as plain data, for `config.json`."""
        return asdict(self)

    def continuum(self) -> Continuum:
        continuum = _continuum(
            self.benchmark,
            self.n_tasks,
            self.examples_per_task,
            self.batch_size,
            self.epochs,
            self.order,
            self.seed,
            self.data,
        )
        return continuum.shuffled() if self.shuffled else continuum

    def new_learner(self) -> Learner:
        return build_learner(
            self.learner, dict(self.settings), self.n_tasks, self.seed, self.device
        )

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> Result:
        return run(self.new_learner(), self.continuum(), self.every, on_progress)


@lru_cache(maxsize=1)
def _continuum(benchmark: str, *arguments: Any) -> Continuum:
    """The last continuum is kept: comparing learners means giving them the same one."""
    return BENCHMARKS[benchmark](*arguments)
