"""Callbacks of a run, and the progress that they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradmem.evaluation.result import Result

__all__ = ["Callback", "Progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is: given to callbacks after every mini-batch and every row of R.

    Attributes
    ----------
    task, n_tasks, label
        Which stretch of training this is, from 0 on, of how many, and the task's name.
    examples, n_examples
        Examples observed so far, and in the whole run.
    seconds
        Training and evaluation so far.
    acc
        Mean score on the tasks learned so far, at the last row of R.
    partial
        What has been measured so far; only when a row of R has just been added.
    loss
        What the last `observe` returned. On a GPU, reading its value waits for the device.
    learner
        The learner, as it is now.
    """

    task: int
    n_tasks: int
    label: str
    examples: int
    n_examples: int
    seconds: float
    acc: float | None
    partial: Result | None
    loss: Tensor | None = None
    learner: Any = None


class Callback:
    """Something that follows a run: override what is of interest.

    Any object with one or more of these methods can be given to `run`'s `callbacks`; this class
    only saves writing the others.

    Examples
    --------
    >>> import gradmem as gm
    >>> class Rows(gm.Callback):
    ...     def on_task(self, progress):
    ...         print(f"task {progress.task + 1}: R is {progress.partial.R.shape}")
    >>> continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=50, data="sample")
    >>> result = gm.run(gm.Single(gm.mlp()), continuum, callbacks=[Rows()])
    task 1: R is (1, 2)
    task 2: R is (2, 2)
    """

    def on_resume(self, progress: Progress) -> None:
        """Called once if the run goes on from a checkpoint, with how far it was."""

    def on_batch(self, progress: Progress) -> None:
        """Called after every mini-batch."""

    def on_task(self, progress: Progress) -> None:
        """Called when a task has been learned and R has a new row, in `progress.partial`."""

    def on_end(self, result: Result) -> None:
        """Called once with the whole result; not if the run was ended by an error."""
