"""A task: its descriptor, what is learned, and what tests it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.streams.datasets import DatasetExamples
from gradmem.streams.examples import Examples, Pair, are_class_ids, served, tensors
from gradmem.validation import class_ids, descriptor, positive

__all__ = ["Source", "Task", "as_description", "as_examples", "check_labels", "hold_out"]

#: Where batches come from: examples in memory, or those of a dataset.
Source = Examples | DatasetExamples


class Task:
    """One stretch of a continuum: a descriptor, what is learned, and what tests it.

    Parameters
    ----------
    t
        The task descriptor: any hashable value.
    train, test
        `Examples`, `DatasetExamples`, or pairs (x, y). In a pair, x and y are tensors, arrays, or
        dicts, tuples and lists of these, with one example per row.
    label
        A name for people, in tables and pictures.
    classes
        The outputs that are this task's, if it has its own: class ids, all labels in memory among
        them. None: all outputs.
    describe
        A description of the task for networks that take one (`gradmem.networks.conditioned`): (k,)
        finite numbers such as an angle's cosine and sine, attributes, or an embedding. All tasks of
        a continuum have descriptions of one size.

    Examples
    --------
    >>> x = {"image": torch.rand(4, 8), "age": torch.rand(4, 1)}
    >>> Task("heights", train=(x, torch.rand(4, 2)), test=(x, torch.rand(4, 2)))
    Task('heights', 4 examples)
    """

    def __init__(
        self,
        t: Hashable,
        train: Source | Pair,
        test: Source | Pair | None = None,
        label: str = "",
        classes: Sequence[int] | None = None,
        describe: Any = None,
    ) -> None:
        self.t = descriptor(t)
        self.train = as_examples("train", train)
        self.test = None if test is None else as_examples("test", test)
        self.label = label or f"task {t}"
        self.classes = None if classes is None else class_ids(f"classes of task {t!r}", classes)
        if self.classes is not None:
            check_labels(t, self.classes, "train", self.train)
            if self.test is not None:
                check_labels(t, self.classes, "test", self.test)
        self.description = None if describe is None else as_description(t, describe)

    def __repr__(self) -> str:
        return f"Task({self.t!r}, {len(self.train)} examples)"

    def having(self, train: Source, test: Source | None) -> Task:
        """The same task with these `train` and `test` examples, whose labels are not checked."""
        other = copy.copy(self)
        other.train, other.test = train, test
        return other


def as_description(t: Hashable, values: Any) -> Tensor:
    """The description of task t: (k,) finite floats, from a tensor, an array or a list of numbers.

    Examples
    --------
    >>> as_description("a", [1, 0.5])
    tensor([1.0000, 0.5000])
    """
    try:
        found = torch.as_tensor(values)
        found = found.detach() if found.is_floating_point() else found.to(torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the description of task {t!r} must be numbers, got {values!r}") from error
    if found.ndim != 1 or not len(found):
        raise ValueError(
            f"the description of task {t!r} must have shape (k,) with k ≥ 1, got "
            f"{tuple(found.shape)}"
        )
    if not found.isfinite().all():
        raise ValueError(f"the description of task {t!r} must be finite, got {found.tolist()}")
    return found


def as_examples(name: str, given: Source | Pair) -> Source:
    """What a caller gave as examples: `Examples`, `DatasetExamples` or a pair (x, y)."""
    if isinstance(given, Examples | DatasetExamples):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(
            f"{name} must be Examples, DatasetExamples or a pair (x, y), got {type(given).__name__}"
        )
    return Examples(tensors("x", given[0]), tensors("y", given[1]))


def check_labels(t: Hashable, classes: tuple[int, ...], part: str, examples: Source) -> None:
    """ValueError if class ids in memory are not among the classes of task `t`."""
    if not isinstance(examples, Examples) or not are_class_ids(examples.y):
        return
    if wrong := sorted({*served(examples.y).unique().tolist()} - {*classes}):
        raise ValueError(
            f"the {part} labels of task {t!r} must be among its classes {list(classes)}, "
            f"got {wrong[:10]}"
        )


def hold_out(
    tasks: Sequence[Task],
    fraction: float,
    seed: Sequence[int],
    places: Sequence[int],
    name: str = "fraction",
) -> list[Task]:
    """The tasks, tested on a fraction of their training examples, which they lose.

    At least one example of each task is lost. Which ones is drawn by `seed` and the task's place. A
    task that comes back is tested on what all its visits lose; with the very same examples, it
    loses the same ones again. `name` is what the caller calls the fraction.
    """
    if positive(name, fraction) >= 1:
        raise ValueError(f"{name} must be below 1, got {fraction!r}")
    left: list[Source] = []
    tests: dict[Hashable, Source] = {}
    visits: dict[Hashable, list[tuple[Source, Source]]] = {}  # examples of a visit, what is left
    for place, task in zip(places, tasks, strict=True):
        earlier = visits.setdefault(task.t, [])
        again = next((rest for known, rest in earlier if _is_same(known, task.train)), None)
        if again is not None:
            left.append(again)
            continue
        n = len(task.train)
        lost = max(1, round(fraction * n))
        if lost >= n:
            raise ValueError(
                f"{task.label} has {n} training examples: too few to hold out {fraction!r}"
            )
        drawn = np.random.default_rng([*seed, place, 0]).permutation(n)
        out, rest = (torch.from_numpy(np.sort(some)) for some in np.split(drawn, [lost]))
        part, before = task.train.part(out), tests.get(task.t)
        tests[task.t] = part if before is None else before.joined(part)
        left.append(task.train.part(rest))
        earlier.append((task.train, left[-1]))
    return [task.having(train, tests[task.t]) for task, train in zip(tasks, left, strict=True)]


def _is_same(one: Source, other: Source) -> bool:
    """Whether two visits of a task have the very same training examples."""
    return one is other or one.is_same(other)
