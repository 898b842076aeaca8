"""Scores on all test sets, which a GPU may still be computing when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.evaluation.result import Matrix
from gradmem.evaluation.scores import Score, totals
from gradmem.learners import Learner
from gradmem.streams import Examples
from gradmem.trees import kind, leaves, size

__all__ = ["Measurement"]

#: Test examples predicted at once: enough to keep the processor busy, few enough for its caches.
BATCH = 2000

#: On a GPU, bytes of the inputs of several test sets that are predicted at once.
TOGETHER = 2**29


class Measurement:
    """The mean scores on all test sets, as the learner is now.

    On a GPU the work is under way when this returns: `means` waits for it, and for nothing that is
    asked of the GPU later.

    Parameters
    ----------
    learner
        Whose predictions they are.
    predict
        `predict(x, t)`, its method or one that does without something.
    tests
        Descriptor → test set.
    score
        See `run`.
    """

    def __init__(
        self,
        learner: Any,
        predict: Callable[..., Any],
        tests: Mapping[Any, Any],
        score: Score,
    ) -> None:
        sums: list[Tensor] = []
        #: For each test set its size, and how many of the sums are its own.
        self._counts: list[tuple[int, int]] = []
        for t, some in _predicted_together(learner, tests):
            if len(some) > 1:
                x, y = some[0].joined(*some[1:])[:]
                sizes = [len(test) for test in some]
                sums.append(totals(score, predict(x, t), y, sizes))
                self._counts += [(n, 1) for n in sizes]
                continue
            (test,) = some
            n = len(test) if _is_on_gpu(learner) and isinstance(test, Examples) else BATCH
            for x, y in test.batches(n):
                sums.append(totals(score, predict(x, t), y, [size(y)]))
            self._counts.append((len(test), -(-len(test) // n)))
        self._sums = torch.cat(sums)
        held = learner.held if isinstance(learner, Learner) else None
        self._held = torch.zeros(()) if held is None else held
        self._copied: torch.cuda.Event | None = None
        if self._sums.is_cuda:
            with torch.cuda.device(self._sums.device):
                self._sums, self._held = _to_host(self._sums), _to_host(self._held)
                self._copied = torch.cuda.Event()
                self._copied.record()

    def means(self) -> Matrix:
        """The mean scores: (T,)."""
        self._wait()
        values = iter(self._sums.tolist())
        return np.array([sum(next(values) for _ in range(n)) / whole for whole, n in self._counts])

    @property
    def stopped(self) -> bool:
        """Whether the learner no longer changes, after a step on a GPU that was not finite."""
        self._wait()
        return bool(self._held)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the GPU gets there."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _is_on_gpu(learner: Any) -> bool:
    return torch.device(getattr(learner, "device", None) or "cpu").type == "cuda"


def _predicted_together(learner: Any, tests: Mapping[Any, Any]) -> list[tuple[Any, list[Any]]]:
    """Neighbouring test sets that are one prediction, each group with its first descriptor.

    On a GPU, where they are in memory, of one kind, and predicted alike whatever the task.
    """
    alone = [(t, [test]) for t, test in tests.items()]
    if not isinstance(learner, Learner) or not _is_on_gpu(learner):
        return alone
    if not learner.predicts_alike or not all(isinstance(test, Examples) for _, (test,) in alone):
        return alone
    groups: list[tuple[Any, list[Any]]] = []
    for t, (test,) in alone:
        if groups:
            _, known = groups[-1]
            alike = kind((known[0].x, known[0].y)) == kind((test.x, test.y))
            inside = sum(map(len, known)) + len(test) <= TOGETHER // _bytes_each(test)
            if alike and inside and known[0].divisor == test.divisor:
                known.append(test)
                continue
        groups.append((t, [test]))
    return groups


def _bytes_each(test: Examples) -> int:
    """Bytes of an example's inputs as they are served."""
    return sum(leaf[0].numel() * max(4, leaf.element_size()) for leaf in leaves(test.x))
