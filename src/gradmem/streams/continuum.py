"""The continuum of data (equation 1): an ordered stream of triplets (x, t, y) and its test sets."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.validation import class_ids, descriptor, non_negative_int, positive, positive_int

__all__ = ["Continuum", "Examples", "Task"]

Batch = tuple[Tensor, Hashable, Tensor]
Pair = tuple[Tensor, Tensor]

BATCHES_PER_FETCH = 64

#: The descriptor of a continuum whose tasks were mixed by `Continuum.shuffled`.
IID = "iid"

# Part of a seed: what is held out has nothing to do with the order of what is left.
_HELD_OUT = 0x5E7A51DE


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and labels, kept as they are stored and turned to floats only when they are used.

    Parameters
    ----------
    x
        (n, …) inputs, in any dtype; a byte a pixel is four times smaller than a float.
    y
        (n,) class ids.
    divisor
        If given, inputs are served as float32 divided by it (255 for pixels).

    Examples
    --------
    >>> digits = Examples(torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8),
    ...                   torch.tensor([7, 3]), divisor=255)
    >>> digits[1:]
    (tensor([[0.2000, 0.4000]]), tensor([3]))
    """

    x: Tensor
    y: Tensor
    divisor: float | None = None

    def __post_init__(self) -> None:
        for name, values in (("x", self.x), ("y", self.y)):
            if not isinstance(values, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
        if self.y.dtype == torch.bool or self.y.is_floating_point() or self.y.is_complex():
            raise TypeError(f"y must hold whole numbers, got {self.y.dtype}")
        if self.x.ndim < 1 or self.y.ndim != 1 or len(self.x) != len(self.y):
            raise ValueError(
                f"x must be (n, …) and y (n,), got {tuple(self.x.shape)} and {tuple(self.y.shape)}"
            )
        if len(self.y) == 0:
            raise ValueError("there must be at least one example, got none")
        if self.divisor is not None:
            positive("divisor", self.divisor)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Any) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a slice, a mask or a tensor of positions, ready to be used."""
        x, y = self.x[which], self.y[which].long()
        return (x if self.divisor is None else torch.div(x, self.divisor)), y

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device; itself if they are there already."""
        x, y = self.x.to(device), self.y.to(device)
        return self if x is self.x and y is self.y else Examples(x, y, self.divisor)

    def _part(self, which: Tensor) -> Examples:
        """The examples at these positions, as they are stored."""
        which = which.to(self.y.device)
        return Examples(self.x[which], self.y[which], self.divisor)

    def _with(self, other: Examples) -> Examples:
        return Examples(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), self.divisor)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


class Task:
    """One stretch of a continuum: a descriptor, what is learned, and what tests it.

    Parameters
    ----------
    t
        The task descriptor: any hashable value.
    train, test
        `Examples`, or plain pairs (x, y).
    label
        A name for people, in tables and pictures.
    classes
        The outputs that are this task's, if it has its own: class ids, all labels among them.
        None: all outputs.
    """

    def __init__(
        self,
        t: Hashable,
        train: Examples | Pair,
        test: Examples | Pair | None = None,
        label: str = "",
        classes: Sequence[int] | None = None,
    ) -> None:
        self.t = descriptor(t)
        self.train = _examples("train", train)
        self.test = None if test is None else _examples("test", test)
        self.label = label or f"task {t}"
        self.classes = None if classes is None else class_ids(f"classes of task {t!r}", classes)
        if self.classes is not None:
            _check_labels(t, self.classes, "train", self.train)
            if self.test is not None:
                _check_labels(t, self.classes, "test", self.test)

    def __repr__(self) -> str:
        return f"Task({self.t!r}, {len(self.train)} examples)"


class Continuum:
    """An ordered, repeatable stream of mini-batches `(x, t, y)` with its tasks' test sets.

    Iterating yields the mini-batches, `len` counts them; indexing and slicing are by task and give
    a smaller continuum; `+` puts one after another. A task may come back: its descriptor then
    stands twice in `tasks`, and once in `tests`.

    Parameters
    ----------
    tasks
        The `Task`s in the order they are learned.
    batch_size
        Examples per mini-batch. A task's last one may be shorter; none spans two tasks.
    epochs
        Passes over a task before the next begins, each in another order.
    shuffle
        Whether a pass goes through a task's examples in random order (tasks are "locally iid").
    seed
        Governs that order. The same seed gives the same stream, each time it is iterated.
    tests
        Descriptor → test set, R's columns. If left out, those of the tasks, in the order the tasks
        are first met.
    outputs
        Descriptor → classes, for test sets of which no task is in `tasks`. A task's own classes
        need not be repeated.

    Attributes
    ----------
    outputs
        Descriptor → the classes it may be told apart by, sorted: those of the tasks that have their
        own, and those given. Empty if there are none; a descriptor that is not in it has all.

    Examples
    --------
    >>> def task(t):
    ...     x = torch.full((25, 2), float(t))
    ...     return Task(t, (x, torch.arange(25) % 2), (x, torch.arange(25) % 2))
    >>> continuum = Continuum([task(0), task(1), task(2)], batch_size=10)
    >>> len(continuum), continuum.n_examples, list(continuum.tests)
    (9, 75, [0, 1, 2])
    >>> [(t, len(y)) for x, t, y in continuum[1]]
    [(1, 10), (1, 10), (1, 5)]
    >>> [task.t for task in (continuum[:2] + continuum[0]).tasks]
    [0, 1, 0]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        batch_size: int = 10,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        tests: Mapping[Hashable, Examples | Pair] | None = None,
        outputs: Mapping[Hashable, Sequence[int]] | None = None,
    ) -> None:
        self.tasks = tuple(tasks)
        if not self.tasks:
            raise ValueError("a continuum needs at least one task, got none")
        for task in self.tasks:
            if not isinstance(task, Task):
                raise TypeError(f"tasks must hold Task objects, got {task!r}")
        self.batch_size = positive_int("batch_size", batch_size)
        self.epochs = positive_int("epochs", epochs)
        self.shuffle = shuffle
        self.seed = non_negative_int("seed", seed)
        given = _tests(self.tasks) if tests is None else tests
        self.tests = {descriptor(t): _examples("tests", test) for t, test in given.items()}
        self.outputs = _outputs(self.tasks, outputs or {})
        for t, test in self.tests.items():
            if t in self.outputs:
                _check_labels(t, self.outputs[t], "test", test)
        # A slice keeps each task's place in the whole, and with it its order of examples.
        self._places: tuple[int, ...] = tuple(range(len(self.tasks)))

    @property
    def n_tasks(self) -> int:
        """Stretches of training; a task that comes back counts again."""
        return len(self.tasks)

    @property
    def n_examples(self) -> int:
        """Examples that will be observed, epochs included."""
        return self.epochs * sum(len(task.train) for task in self.tasks)

    @property
    def learned(self) -> list[int | None]:
        """The column of R that each stretch of training learns (see `transfer_metrics`)."""
        column = {t: j for j, t in enumerate(self.tests)}
        return [column.get(task.t) for task in self.tasks]

    def labels(self) -> list[str]:
        """A name for each column of R."""
        names = {task.t: task.label for task in self.tasks}
        return [names.get(t, f"task {t}") for t in self.tests]

    def __len__(self) -> int:
        return self.epochs * sum(-(-len(task.train) // self.batch_size) for task in self.tasks)

    def __iter__(self) -> Iterator[Batch]:
        for place, task in zip(self._places, self.tasks, strict=True):
            for epoch in range(self.epochs):
                order = self._order(len(task.train), place, epoch).to(task.train.x.device)
                # Many mini-batches at a time: on a GPU, every fetch costs the host time.
                for some in torch.split(order, self.batch_size * BATCHES_PER_FETCH):
                    x, y = task.train[some]
                    for start in range(0, len(y), self.batch_size):
                        stop = start + self.batch_size
                        yield x[start:stop], task.t, y[start:stop]

    def __getitem__(self, which: int | slice) -> Continuum:
        if isinstance(which, slice):
            return self._part(range(self.n_tasks)[which])
        if isinstance(which, bool) or not isinstance(which, int | np.integer):
            raise TypeError(f"a continuum is indexed by a task's position, got {which!r}")
        if not -self.n_tasks <= which < self.n_tasks:
            raise IndexError(f"task {which} of a continuum of {self.n_tasks}")
        return self._part([int(which) % self.n_tasks])

    def __add__(self, other: Continuum) -> Continuum:
        if not isinstance(other, Continuum):
            return NotImplemented
        for name in ("batch_size", "epochs", "shuffle"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    "continuums must agree in batch_size, epochs and shuffle to be joined"
                )
        for t, test in self.tests.items():
            if not _are_same(other.tests.get(t, test), test):
                raise ValueError(f"task {t!r} comes back with another test set")
        return Continuum(
            self.tasks + other.tasks,
            self.batch_size,
            self.epochs,
            self.shuffle,
            self.seed,
            self.tests | other.tests,
            self.outputs | other.outputs,
        )

    def __repr__(self) -> str:
        return (
            f"Continuum({self.n_tasks} tasks, {self.n_examples} examples, "
            f"batch_size={self.batch_size}, epochs={self.epochs}, seed={self.seed})"
        )

    def shuffled(self) -> Continuum:
        """The same examples in iid order: every mini-batch mixes the tasks (the paper's oracle).

        To the learner this is one task with the descriptor "iid"; the test sets stay those of the
        tasks, so R has one row and a column per task. Each epoch goes through all examples. If
        every task has its own classes, "iid" has them all, and the tests keep their own.
        """
        if len({task.train.divisor for task in self.tasks}) > 1:
            raise ValueError("tasks must agree in their divisor to be shuffled together")
        mixed = Examples(
            torch.cat([task.train.x for task in self.tasks]),
            torch.cat([task.train.y for task in self.tasks]),
            self.tasks[0].train.divisor,
        )
        own = [task.classes for task in self.tasks if task.classes is not None]
        classes = sorted({*chain(*own)}) if len(own) == self.n_tasks else None
        return Continuum(
            [Task(IID, mixed, label="all tasks, shuffled", classes=classes)],
            self.batch_size,
            self.epochs,
            seed=self.seed,
            tests=self.tests,
            outputs=self.outputs,
        )

    def held_out(self, fraction: float = 0.1, seed: int | None = None) -> Continuum:
        """A continuum for choosing settings: tested on a part of each task's training examples.

        Every task loses `fraction` of its training examples (at least one), and these become its
        test set. The test sets of this continuum are not looked at, so what is chosen here can be
        reported there. A task that comes back is tested on what all its visits lose.

        Parameters
        ----------
        fraction
            Of each task's training examples, above 0 and below 1.
        seed
            Governs which examples are held out; if left out, the continuum's own. A task loses the
            same ones whether the continuum is sliced before or after.

        Examples
        --------
        >>> x, y = torch.arange(20.0)[:, None], torch.arange(20) % 2
        >>> continuum = Continuum([Task("a", (x, y), (x, y))])
        >>> chosen_on = continuum.held_out(0.25)
        >>> len(chosen_on.tasks[0].train), len(chosen_on.tests["a"])
        (15, 5)
        """
        if positive("fraction", fraction) >= 1:
            raise ValueError(f"fraction must be below 1, got {fraction!r}")
        seed = self.seed if seed is None else non_negative_int("seed", seed)
        tasks: list[Task] = []
        kept_back: dict[Hashable, Examples] = {}
        for place, task in zip(self._places, self.tasks, strict=True):
            n = len(task.train)
            lost = max(1, round(fraction * n))
            if lost >= n:
                raise ValueError(
                    f"{task.label} has {n} training examples: too few to hold out {fraction!r}"
                )
            drawn = np.random.default_rng([seed, _HELD_OUT, place, 0]).permutation(n)
            out, left = (torch.from_numpy(np.sort(part)) for part in np.split(drawn, [lost]))
            rest = copy.copy(task)
            rest.train, part = task.train._part(left), task.train._part(out)
            before = kept_back.get(task.t)
            kept_back[task.t] = part if before is None else before._with(part)
            tasks.append(rest)
        for task in tasks:
            task.test = kept_back[task.t]
        continuum = copy.copy(self)
        continuum.tasks, continuum.tests = tuple(tasks), kept_back
        return continuum

    def to(self, device: torch.device | str) -> Continuum:
        """The same continuum with its data on a device; itself if it is there already."""
        tests = {t: test.to(device) for t, test in self.tests.items()}
        tasks = [
            Task(task.t, task.train.to(device), tests.get(task.t), task.label, task.classes)
            for task in self.tasks
        ]
        same = all(new.train is old.train for new, old in zip(tasks, self.tasks, strict=True))
        if same and all(tests[t] is self.tests[t] for t in tests):
            return self
        moved = Continuum(
            tasks, self.batch_size, self.epochs, self.shuffle, self.seed, tests, self.outputs
        )
        moved._places = self._places
        return moved

    def _part(self, places: Sequence[int]) -> Continuum:
        tasks = [self.tasks[i] for i in places]
        # A shuffled continuum keeps the tests of what it mixed.
        tests = {task.t: self.tests[task.t] for task in tasks if task.t in self.tests} or self.tests
        part = Continuum(
            tasks,
            self.batch_size,
            self.epochs,
            self.shuffle,
            self.seed,
            tests,
            {t: self.outputs[t] for t in tests if t in self.outputs},
        )
        part._places = tuple(self._places[i] for i in places)
        return part

    def _order(self, n: int, place: int, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(n)
        return torch.from_numpy(np.random.default_rng([self.seed, place, epoch]).permutation(n))


def _examples(name: str, given: Examples | Pair) -> Examples:
    if isinstance(given, Examples):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"{name} must be Examples or a pair (x, y), got {type(given).__name__}")
    return Examples(*given)


def _tests(tasks: Sequence[Task]) -> dict[Hashable, Examples]:
    tests: dict[Hashable, Examples] = {}
    for task in tasks:
        if task.test is not None and not _are_same(tests.setdefault(task.t, task.test), task.test):
            raise ValueError(f"task {task.t!r} comes back with another test set")
    if not tests:
        raise ValueError("at least one task needs a test set, got none")
    return tests


def _are_same(one: Examples, other: Examples) -> bool:
    return one.x is other.x and one.y is other.y and one.divisor == other.divisor


def _outputs(
    tasks: Sequence[Task], given: Mapping[Hashable, Sequence[int]]
) -> dict[Hashable, tuple[int, ...]]:
    outputs: dict[Hashable, tuple[int, ...]] = {}
    met: dict[Hashable, tuple[int, ...] | None] = {}
    for task in tasks:
        if met.setdefault(task.t, task.classes) != task.classes:
            raise ValueError(
                f"task {task.t!r} comes back with other classes: {task.classes}, not {met[task.t]}"
            )
        if task.classes is not None:
            outputs[task.t] = task.classes
    for t, classes in given.items():
        ids = class_ids(f"classes of task {t!r}", classes)
        if met.get(t, ids) != ids:
            raise ValueError(f"outputs of task {t!r} must be its own classes, {met[t]}, got {ids}")
        outputs[descriptor(t)] = ids
    return outputs


def _check_labels(t: Hashable, classes: tuple[int, ...], part: str, examples: Examples) -> None:
    if wrong := sorted({*examples.y.unique().tolist()} - {*classes}):
        raise ValueError(
            f"the {part} labels of task {t!r} must be among its classes {list(classes)}, "
            f"got {wrong[:10]}"
        )
