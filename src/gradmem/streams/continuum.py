"""The continuum of data (equation 1): an ordered stream of triplets (x, t, y) and its test sets."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from gradmem.streams.examples import Pair
from gradmem.streams.split import tasks_by_class, tasks_by_value, tasks_of_datasets
from gradmem.streams.task import (
    Source,
    Task,
    as_description,
    as_examples,
    check_labels,
    hold_out,
)
from gradmem.trees import Tree
from gradmem.validation import class_ids, descriptor, non_negative_int, positive_int

__all__ = ["IID", "Continuum"]

Batch = tuple[Tree, Hashable, Tree]

#: The descriptor of a continuum whose tasks were mixed by `Continuum.shuffled`.
IID = "iid"

# Part of the seed, so that held-out examples are drawn independently of the order of the others.
_HELD_OUT = 0x5E7A51DE


class Stream(TypedDict, total=False):
    """How a continuum goes through its tasks; see `Continuum`."""

    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    descriptions: Mapping[Hashable, Any] | None


class Continuum:
    """An ordered, repeatable stream of mini-batches `(x, t, y)` with its tasks' test sets.

    Iterating yields the mini-batches, `len` counts them; indexing and slicing are by task and give
    a smaller continuum; `+` puts one after another. A task may come back: its descriptor then
    stands twice in `tasks`, and once in `tests`. `from_arrays`, `split_by`, `split_by_class` and
    `from_datasets` make the tasks, too.

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
    descriptions
        Descriptor → description (see `Task`), for test sets of which no task is in `tasks`, and for
        tasks that were made without.

    Attributes
    ----------
    descriptions
        Descriptor → description: (k,), those of the tasks and those given. Empty if there are none.
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
        tests: Mapping[Hashable, Source | Pair] | None = None,
        outputs: Mapping[Hashable, Sequence[int]] | None = None,
        descriptions: Mapping[Hashable, Any] | None = None,
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
        self.tests = {descriptor(t): as_examples("tests", test) for t, test in given.items()}
        self.outputs = _outputs(self.tasks, outputs or {})
        self.descriptions = _descriptions(self.tasks, descriptions or {})
        for t, test in self.tests.items():
            if t in self.outputs:
                check_labels(t, self.outputs[t], "test", test)
        # A slice keeps each task's place in the whole, and with it its order of examples.
        self._places: tuple[int, ...] = tuple(range(len(self.tasks)))

    @classmethod
    def from_arrays(
        cls,
        x: Tree,
        y: Tree,
        t: Iterable[Any],
        test: tuple[Tree, Tree, Iterable[Any]] | float,
        *,
        sort: bool = False,
        divisor: float | None = None,
        **stream: Unpack[Stream],
    ) -> Continuum:
        """A continuum of arrays in which each example has its task descriptor.

        Parameters
        ----------
        x, y
            Inputs and targets, an example per row: arrays (numpy, pandas, …), tensors, or dicts,
            tuples and lists of these. Float64 arrays become torch's default dtype.
        t
            The task descriptor of each example: a list, array or tensor.
        test
            The same three for the test sets, (x, y, t); or the fraction of each task's examples
            that tests it and is not trained on.
        sort
            Whether tasks come in sorted order of their descriptors, not in that of their first
            examples.
        divisor
            See `Examples`.
        stream
            `batch_size`, `epochs`, `shuffle`, `seed` and `descriptions` of the continuum.

        Examples
        --------
        >>> x, y = np.random.rand(12, 2), np.arange(12) % 2
        >>> t = ["mon"] * 4 + ["tue"] * 8
        >>> continuum = Continuum.from_arrays(x, y, t, test=0.25, batch_size=3)
        >>> continuum.tasks, continuum.labels()
        ((Task('mon', 3 examples), Task('tue', 6 examples)), ['task mon', 'task tue'])
        """
        seed = stream.get("seed", 0)
        return cls(tasks_by_value(x, y, t, test, sort, divisor, seed), **stream)

    @classmethod
    def split_by(
        cls,
        values: Iterable[Any],
        x: Tree,
        y: Tree,
        test: tuple[Iterable[Any], Tree, Tree] | float,
        *,
        name: str = "",
        divisor: float | None = None,
        **stream: Unpack[Stream],
    ) -> Continuum:
        """A continuum with one task for each distinct value of a column, in sorted order.

        Parameters
        ----------
        values
            The column: a value per example, in a list, array, tensor or pandas column. The values
            are the task descriptors.
        x, y, divisor, stream
            See `from_arrays`.
        test
            The same three for the test sets, (values, x, y); or the fraction of each task's
            examples that tests it and is not trained on.
        name
            The column's name, for the tasks' labels; if left out, that of a pandas column.

        Examples
        --------
        >>> years = np.array([2021, 2020, 2021, 2020])
        >>> x, y = torch.rand(4, 3), torch.rand(4, 1)
        >>> continuum = Continuum.split_by(years, x, y, test=0.5, name="year")
        >>> continuum.labels()
        ['year 2020', 'year 2021']
        """
        label = name or str(getattr(values, "name", None) or "")
        if isinstance(test, tuple | list):
            test = (*test[1:], test[0])
        seed = stream.get("seed", 0)
        return cls(tasks_by_value(x, y, values, test, True, divisor, seed, label), **stream)

    @classmethod
    def split_by_class(
        cls,
        x: Tree,
        y: Any,
        n_tasks: int | None = None,
        *,
        test: tuple[Tree, Any] | float,
        classes: int | Sequence[Sequence[int]] | None = None,
        own_outputs: bool = True,
        divisor: float | None = None,
        **stream: Unpack[Stream],
    ) -> Continuum:
        """A class-incremental continuum: tasks 0, 1, … bring some classes each.

        Parameters
        ----------
        x, divisor, stream
            See `from_arrays`.
        y
            (n,) class ids; they stay what they are in every task.
        n_tasks
            Number of tasks, of as many classes each, in the order of their ids.
        test
            The test examples, (x, y); or the fraction of each task's examples that tests it and is
            not trained on.
        classes
            Instead of `n_tasks`: the number of classes per task, or a list of each task's class
            ids. Examples of classes that are in no list are left out.
        own_outputs
            Whether a task's classes are its own outputs (see `Task`). False: all tasks share all
            outputs, and classes must be told apart across tasks.

        Examples
        --------
        >>> x, y = torch.rand(60, 5), torch.arange(60) % 6
        >>> continuum = Continuum.split_by_class(x, y, 3, test=0.2)
        >>> continuum.outputs
        {0: (0, 1), 1: (2, 3), 2: (4, 5)}
        >>> shared = Continuum.split_by_class(
        ...     x, y, classes=[[0, 5], [1, 2, 3]], test=(x, y), own_outputs=False)
        >>> shared.labels(), shared.n_examples, shared.outputs
        (['classes 0, 5', 'classes 1–3'], 50, {})
        """
        seed = stream.get("seed", 0)
        tasks = tasks_by_class(x, y, n_tasks, classes, test, own_outputs, divisor, seed)
        return cls(tasks, **stream)

    @classmethod
    def from_datasets(
        cls,
        datasets: Mapping[Any, Any] | Iterable[Sequence[Any]],
        *,
        test: float | None = None,
        classes: Mapping[Hashable, Sequence[int]] | None = None,
        batch_size: int = 10,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        **loader: Any,
    ) -> Continuum:
        """A continuum of PyTorch datasets that are never read whole: see `DatasetExamples`.

        The order of examples is that of a continuum of the same data in memory.

        Parameters
        ----------
        datasets
            Map-style datasets whose items are pairs (x, y). Either a dict, t → training dataset or
            t → (training dataset, test dataset), or a list of (t, training dataset, test dataset),
            in which a task may come back (with the same test dataset).
        test
            If there are no test datasets, the fraction of each task's examples that tests it and is
            not trained on.
        classes
            t → class ids, for tasks that have their own outputs (see `Task`).
        batch_size, epochs, shuffle, seed
            See `Continuum`.
        loader
            Further arguments of `torch.utils.data.DataLoader`, such as `num_workers`, for training
            and test sets.

        Examples
        --------
        >>> from torch.utils.data import TensorDataset
        >>> days = {day: TensorDataset(torch.rand(20, 2), torch.arange(20) % 2) for day in "ab"}
        >>> continuum = Continuum.from_datasets(days, test=0.25, batch_size=5, num_workers=0)
        >>> [(t, x.shape[0]) for x, t, y in continuum]
        [('a', 5), ('a', 5), ('a', 5), ('b', 5), ('b', 5), ('b', 5)]
        """
        tasks = tasks_of_datasets(datasets, classes, test, loader, seed)
        return cls(tasks, batch_size, epochs, shuffle, seed)

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
        for task, seed in self._passes():
            for x, y in task.train.batches(self.batch_size, self.shuffle, seed):
                yield x, task.t, y

    def fetches(self) -> Iterator[Batch]:
        """The same, several whole batches of a task at a time where they are in memory."""
        for task, seed in self._passes():
            for x, y in task.train.fetches(self.batch_size, self.shuffle, seed):
                yield x, task.t, y

    def _passes(self) -> Iterator[tuple[Task, list[int]]]:
        """Each task as often as it is gone through in a row, with the seed of its order."""
        for place, task in zip(self._places, self.tasks, strict=True):
            yield from ((task, [self.seed, place, epoch]) for epoch in range(self.epochs))

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
        if any(getattr(self, n) != getattr(other, n) for n in ("batch_size", "epochs", "shuffle")):
            raise ValueError("continuums must agree in batch_size, epochs and shuffle to be joined")
        for t, test in self.tests.items():
            if not test.is_same(other.tests.get(t, test)):
                raise ValueError(f"task {t!r} comes back with another test set")
        return Continuum(
            self.tasks + other.tasks,
            self.batch_size,
            self.epochs,
            self.shuffle,
            self.seed,
            self.tests | other.tests,
            self.outputs | other.outputs,
            _joined(self.descriptions, other.descriptions),
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
        first, *others = (task.train for task in self.tasks)
        mixed = first.joined(*others)
        own = [task.classes for task in self.tasks if task.classes is not None]
        classes = sorted({*chain(*own)}) if len(own) == self.n_tasks else None
        return Continuum(
            [Task(IID, mixed, label="all tasks, shuffled", classes=classes)],
            self.batch_size,
            self.epochs,
            seed=self.seed,
            tests=self.tests,
            outputs=self.outputs,
            descriptions=self.descriptions,
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
        seed = self.seed if seed is None else non_negative_int("seed", seed)
        tasks = hold_out(self.tasks, fraction, [seed, _HELD_OUT], self._places)
        return self._having(tasks, {task.t: task.test for task in tasks if task.test is not None})

    def to(self, device: torch.device | str) -> Continuum:
        """The same continuum, whose batches are on a device; itself if they are already.

        Examples in memory are copied there; batches of a dataset are as they are read.
        """
        tests = {t: test.to(device) for t, test in self.tests.items()}
        tasks = [task.having(task.train.to(device), tests.get(task.t)) for task in self.tasks]
        same = all(new.train is old.train for new, old in zip(tasks, self.tasks, strict=True))
        if same and all(tests[t] is self.tests[t] for t in tests):
            return self
        return self._having(tasks, tests)

    def _having(self, tasks: Sequence[Task], tests: Mapping[Hashable, Source]) -> Continuum:
        """The same continuum with other examples of the same tasks."""
        other = copy.copy(self)
        other.tasks, other.tests = tuple(tasks), dict(tests)
        return other

    def _part(self, places: Sequence[int]) -> Continuum:
        if not places:
            raise ValueError("a continuum needs at least one task, got none")
        tasks = [self.tasks[i] for i in places]
        # A shuffled continuum keeps the tests of what it mixed.
        tests = {task.t: self.tests[task.t] for task in tasks if task.t in self.tests} or self.tests
        part = self._having(tasks, tests)
        known = {*tests, *(task.t for task in tasks)}
        part.outputs = {t: classes for t, classes in self.outputs.items() if t in known}
        part.descriptions = {t: own for t, own in self.descriptions.items() if t in known}
        part._places = tuple(self._places[i] for i in places)
        return part


def _tests(tasks: Sequence[Task]) -> dict[Hashable, Source]:
    tests: dict[Hashable, Source] = {}
    for task in tasks:
        if task.test is not None and not tests.setdefault(task.t, task.test).is_same(task.test):
            raise ValueError(f"task {task.t!r} comes back with another test set")
    if not tests:
        raise ValueError("at least one task needs a test set, got none")
    return tests


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


def _descriptions(tasks: Sequence[Task], given: Mapping[Hashable, Any]) -> dict[Hashable, Tensor]:
    found: dict[Hashable, Tensor] = {}
    for task in tasks:
        if task.description is not None:
            found = _joined(found, {task.t: task.description})
    found = _joined(found, {descriptor(t): as_description(t, own) for t, own in given.items()})
    for t, own in found.items():
        size = len(next(iter(found.values())))
        if len(own) != size:
            raise ValueError(
                f"all descriptions must have one size, got {size} numbers and {len(own)} for task "
                f"{t!r}"
            )
    return found


def _joined(
    some: Mapping[Hashable, Tensor], others: Mapping[Hashable, Tensor]
) -> dict[Hashable, Tensor]:
    for t, own in others.items():
        if t in some and not torch.equal(some[t], own):
            raise ValueError(
                f"task {t!r} comes back with another description: {own.tolist()}, not "
                f"{some[t].tolist()}"
            )
    return {**some, **others}
