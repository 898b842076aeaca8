"""Logging runs for TensorBoard, which is an extra: `pip install "gradmem[tensorboard]"`."""

from __future__ import annotations

import os
from typing import Any

from gradmem.evaluation.callback import Callback, Progress
from gradmem.evaluation.result import Result

__all__ = ["TensorBoardLog"]

#: How often in a run the speed and the loss are written down.
POINTS = 100


class TensorBoardLog(Callback):
    """A callback of `run` that writes what TensorBoard shows, over examples observed.

    ACC over the tasks learned so far and the score on every task whenever they are measured; the
    examples per second and, where the learner's `observe` returns it, the loss, a hundred times in
    a run.

    Parameters
    ----------
    folder
        This run's own folder; TensorBoard is given one of the folders above it.

    Examples
    --------
    >>> def watched(learner, continuum, folder):
    ...     with TensorBoardLog(folder) as log:
    ...         return gradmem.run(learner, continuum, callbacks=[log])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = _summary_writer()(os.fspath(folder))
        self._points = 0  # of the learning curves that are written
        self._hundredth = -1

    def on_batch(self, progress: Progress) -> None:
        """Write the speed and the loss, now and then."""
        hundredth = progress.examples * POINTS // progress.n_examples
        if hundredth <= self._hundredth or progress.seconds <= 0:
            return
        self._hundredth = hundredth
        rate = progress.examples / progress.seconds
        self._writer.add_scalar("examples per second", rate, progress.examples)
        if progress.loss is not None:
            self._writer.add_scalar("loss", float(progress.loss), progress.examples)

    def on_task(self, progress: Progress) -> None:
        """Write the scores that are new."""
        if progress.acc is not None:
            self._writer.add_scalar("ACC so far", progress.acc, progress.examples)
        if progress.partial is not None:
            self._add_curves(progress.partial)
        self._writer.flush()  # a run is watched while it goes on

    def _add_curves(self, result: Result) -> None:
        digits = len(str(len(result.labels)))  # task 02 is before task 10
        for i in range(self._points, len(result.curve_examples)):
            for j, label in enumerate(result.labels):
                name = f"{result.score}/task {j + 1:0{digits}} {label}"
                self._writer.add_scalar(name, float(result.curves[i, j]), result.curve_examples[i])
        self._points = len(result.curve_examples)

    def on_end(self, result: Result) -> None:
        """Close the log."""
        self.close()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f'logging for TensorBoard needs an extra ({error}): pip install "gradmem[tensorboard]"'
        ) from error
    return SummaryWriter
