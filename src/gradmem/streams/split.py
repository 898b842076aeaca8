"""Tasks made from arrays or datasets: the work behind `Continuum`'s constructors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradmem.streams.datasets import DatasetExamples
from gradmem.streams.examples import Examples, are_class_ids, served, tensors
from gradmem.streams.task import Task, hold_out
from gradmem.trees import Tree, kind
from gradmem.validation import class_ids, descriptor, non_negative_int, positive_int

__all__ = ["class_label", "tasks_by_class", "tasks_by_value", "tasks_of_datasets"]

# Part of the seed, so that test examples are drawn independently of everything else.
_TESTS = 0x7E575


def tasks_by_value(
    x: Tree,
    y: Tree,
    t: Iterable[Any],
    test: Sequence[Any] | float,
    sort: bool,
    divisor: float | None,
    seed: int,
    name: str = "",
) -> list[Task]:
    """A task for each value of `t`, which has one for each example."""
    train = _by_value(divisor, x, y, t)
    given = _given(test, "x, y, one task descriptor per example")
    tests = {} if given is None else _by_value(divisor, *given)
    if unknown := [value for value in tests if value not in train]:
        raise ValueError(
            f"tasks of test must have training examples, as {_some(train)} do; got {_some(unknown)}"
        )
    tasks = [
        Task(value, train[value], tests.get(value), f"{name} {value}" if name else "")
        for value in (sorted(train) if sort else train)  # type: ignore[type-var]
    ]
    return _tested(tasks, test, seed)


def tasks_by_class(
    x: Tree,
    y: Tree,
    n_tasks: int | None,
    classes: int | Sequence[Sequence[int]] | None,
    test: Sequence[Any] | float,
    own_outputs: bool,
    divisor: float | None,
    seed: int,
) -> list[Task]:
    """Tasks 0, 1, … of some classes each."""
    train = _labelled("y", divisor, x, y)
    given = _given(test, "x, y")
    tested = None if given is None else _labelled("test", divisor, *given)
    tasks = []
    for t, ids in enumerate(_shares(train.y.unique().tolist(), n_tasks, classes)):
        label = class_label(ids)
        test_part = None if tested is None else _of_classes("test", tested, ids, label)
        train_part = _of_classes("training", train, ids, label)
        tasks.append(Task(t, train_part, test_part, label, ids if own_outputs else None))
    return _tested(tasks, test, seed)


def tasks_of_datasets(
    datasets: Mapping[Any, Any] | Iterable[Sequence[Any]],
    classes: Mapping[Hashable, Sequence[int]] | None,
    test: float | None,
    loader: Mapping[str, Any],
    seed: int,
) -> list[Task]:
    """A task for each descriptor with its dataset, and its test dataset if it has one."""
    if isinstance(datasets, Mapping):
        datasets = [
            (t, *given) if isinstance(given, tuple) else (t, given) for t, given in datasets.items()
        ]
    tasks = []
    for entry in datasets:
        if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
            raise TypeError(f"datasets must hold (t, train) or (t, train, test), got {entry!r}")
        t, train, tested = (*entry, None)[:3]
        examples = None if tested is None else DatasetExamples(tested, **loader)
        own = (classes or {}).get(descriptor(t))
        tasks.append(Task(t, DatasetExamples(train, **loader), examples, classes=own))
    met = [task.t for task in tasks]
    if unknown := [t for t in classes or {} if t not in met]:
        raise ValueError(f"classes must be those of tasks ({_some(met)}), got {_some(unknown)}")
    if test is not None and any(task.test is not None for task in tasks):
        raise ValueError(f"test must be left out where test sets are given, got {test!r}")
    return _tested(tasks, test, seed)


def class_label(classes: Sequence[int]) -> str:
    """A name for some classes, sorted.

    Examples
    --------
    >>> class_label([3]), class_label([5, 6, 7]), class_label([1, 4])
    ('class 3', 'classes 5–7', 'classes 1, 4')
    """
    first, last = classes[0], classes[-1]
    if first == last:
        return f"class {first}"
    if last - first == len(classes) - 1:
        return f"classes {first}–{last}"
    return f"classes {', '.join(map(str, classes[:5]))}{', …' if len(classes) > 5 else ''}"


def _given(test: Any, parts: str) -> Sequence[Any] | None:
    """`test` if it holds the test sets' parts; None if it is a fraction of the training sets."""
    if not isinstance(test, tuple | list):
        return None
    if len(test) != len(parts.split(", ")):
        raise TypeError(f"test must be ({parts}) or a fraction, got {len(test)} parts")
    return test


def _tested(tasks: list[Task], test: Any, seed: int) -> list[Task]:
    """The tasks, with a fraction of their examples as test sets if `test` is one."""
    if test is None or isinstance(test, tuple | list):
        return tasks
    seeds = [non_negative_int("seed", seed), _TESTS]
    return hold_out(tasks, test, seeds, range(len(tasks)), name="test")


def _by_value(divisor: float | None, x: Tree, y: Tree, t: Any) -> dict[Hashable, Examples]:
    whole = Examples(tensors("x", x), tensors("y", y), divisor)
    values = t.tolist() if hasattr(t, "tolist") else [*t]
    if len(values) != len(whole):
        raise ValueError(
            f"there must be one task descriptor per example, got {len(values)} for {len(whole)}"
        )
    places: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(descriptor(value), []).append(place)
    return {value: whole.part(torch.tensor(some)) for value, some in places.items()}


def _labelled(name: str, divisor: float | None, x: Tree, y: Tree) -> Examples:
    examples = Examples(tensors("x", x), tensors("y", y), divisor)
    if not are_class_ids(examples.y):
        raise TypeError(f"{name} must hold one class id per example, got {kind(examples.y)}")
    return Examples(examples.x, served(examples.y), divisor)


def _of_classes(part: str, whole: Examples, ids: Sequence[int], label: str) -> Examples:
    found = torch.isin(whole.y, torch.tensor(ids, device=whole.device)).nonzero()[:, 0]
    if len(found) == 0:
        raise ValueError(f"there must be {part} examples of every task, got none of {label}")
    return whole.part(found)


def _shares(
    found: list[int], n_tasks: int | None, classes: int | Sequence[Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """The classes of each task."""
    if (n_tasks is None) == (classes is None):
        raise ValueError(
            f"give either n_tasks or classes, got n_tasks={n_tasks!r} and classes={classes!r}"
        )
    if classes is not None and not isinstance(classes, int):
        return [class_ids(f"classes of task {t}", some) for t, some in enumerate(classes)]
    name, given = ("n_tasks", n_tasks) if classes is None else ("classes", classes)
    number = positive_int(name, given)
    if len(found) % number:
        raise ValueError(f"{name} must divide the {len(found)} classes, got {number}")
    each = len(found) // number if classes is None else number
    return [class_ids("y", found[i : i + each]) for i in range(0, len(found), each)]


def _some(values: Iterable[Hashable]) -> str:
    first = [repr(value) for value in values]
    return ", ".join(first[:5]) + (", …" if len(first) > 5 else "")
