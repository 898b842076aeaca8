"""Scores on all test sets, which a GPU may still be computing when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.cuda.copies import copy_to_host
from gradmem.evaluation.result import Matrix
from gradmem.evaluation.scores import Score, totals
from gradmem.learners import Learner
from gradmem.streams import Examples
from gradmem.trees import kind, leaves, size

__all__ = ["Measurement", "TestSets", "is_on_gpu"]

#: A descriptor, the examples that are predicted for it, and the sizes of the test sets they are of.
TestSet = tuple[Any, Any, list[int]]

#: Test examples predicted at once, at most and, if they are in memory, at least.
BATCH, FEWEST = 2000, 32

#: On a CPU, bytes of the inputs for each thread that are predicted at once: what a network for
#: images makes of more of them does not fit the caches.
CACHED = 2**20

#: On a GPU, bytes of the inputs of several test sets that are predicted at once.
TOGETHER = 2**29


class TestSets:
    """The test sets of a continuum, those that can be predicted together as one.

    Parameters
    ----------
    tests
        Descriptor → test set.
    """

    __test__ = False  # pytest takes its name for that of a test

    def __init__(self, tests: Mapping[Any, Any]) -> None:
        self._alone = [(t, test, [len(test)]) for t, test in tests.items()]
        self._together: list[TestSet] | None = None

    def of(self, learner: Any) -> list[TestSet]:
        """The test sets as the learner can predict them.

        On a GPU neighbouring ones become one, where they are in memory, of one kind, and predicted
        alike whatever the task. That takes their memory a second time.
        """
        if not isinstance(learner, Learner) or not is_on_gpu(learner):
            return self._alone
        in_memory = all(isinstance(test, Examples) for _, test, _ in self._alone)
        if not learner.predicts_alike or not in_memory:
            return self._alone
        if self._together is None:
            groups = _neighbours([(t, test) for t, test, _ in self._alone])
            self._together = [
                (t, first.joined(*others) if others else first, [len(first), *map(len, others)])
                for t, (first, *others) in groups
            ]
        return self._together


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
        The test sets.
    score
        See `run`.
    """

    def __init__(
        self, learner: Any, predict: Callable[..., Any], tests: TestSets, score: Score
    ) -> None:
        sums: list[Tensor] = []
        #: For each test set its size, and how many of the sums are its own.
        self._counts: list[tuple[int, int]] = []
        for t, test, sizes in tests.of(learner):
            n = sum(sizes) if len(sizes) > 1 else _at_once(test, is_on_gpu(learner))
            for x, y in test.batches(n):
                parts = sizes if len(sizes) > 1 else [size(y)]
                sums.append(totals(score, predict(x, t), y, parts))
            self._counts += [(own, -(-own // n)) for own in sizes]
        held = learner.held if isinstance(learner, Learner) else None
        self._sums = copy_to_host(torch.cat(sums))
        self._held = None if held is None else copy_to_host(held)
        self._copied: torch.cuda.Event | None = None
        on_gpu = [part for part in (*sums, held) if part is not None and part.is_cuda]
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))

    def means(self) -> Matrix:
        """The mean scores: (T,)."""
        self._wait()
        values = iter(self._sums.tolist())
        return np.array([sum(next(values) for _ in range(n)) / whole for whole, n in self._counts])

    @property
    def stopped(self) -> bool:
        """Whether the learner no longer changes, after a step on a GPU that was not finite."""
        self._wait()
        return self._held is not None and bool(self._held)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def is_on_gpu(learner: Any) -> bool:
    """Whether a learner, of any kind, says that it is on a GPU."""
    return torch.device(getattr(learner, "device", None) or "cpu").type == "cuda"


def _at_once(test: Any, on_gpu: bool) -> int:
    """How many examples of a test set are predicted at once."""
    if not isinstance(test, Examples):
        return BATCH
    if on_gpu:
        return len(test)
    fitting = torch.get_num_threads() * CACHED // _bytes_each(test)
    return max(FEWEST, min(fitting, BATCH))


def _neighbours(tests: Sequence[tuple[Any, Examples]]) -> list[tuple[Any, list[Examples]]]:
    """Neighbouring test sets of one kind, as many as go into one prediction, with the first's t."""
    groups: list[tuple[Any, list[Examples]]] = []
    for t, test in tests:
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
    """Bytes of an example's inputs as they are served, and at least one."""
    return sum(leaf[0].numel() * max(4, leaf.element_size()) for leaf in leaves(test.x)) or 1
