"""Incremental CIFAR-100: each task brings new classes, which are its outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gradmem.benchmarks.benchmark import paper_benchmark, shares
from gradmem.benchmarks.order import EXAMPLES, TASK, Data, Order, visits
from gradmem.data import Cifar100, Images, load_cifar100
from gradmem.networks import resnet18
from gradmem.streams import Continuum, Examples, Task
from gradmem.streams.split import class_label
from gradmem.validation import non_negative_int, one_of, positive_int

__all__ = ["CIFAR100_INCREMENTAL", "cifar100_incremental"]

FINE, COARSE = 100, 20
#: Bytes of each image that are put in order at a time: few, since each time needs a copy.
COLUMNS = 128

Key = TypeVar("Key", bound=Hashable)
#: Feature maps of the first layer of the paper's network.
FEATURE_MAPS = 20


def cifar100_incremental(
    n_tasks: int = 20,
    examples_per_task: int | None = None,
    batch_size: int = 10,
    epochs: int = 1,
    order: Order = None,
    seed: int = 0,
    data: Data = None,
    classes: str = "in order",
    tasks: str = "fine",
) -> Continuum:
    """CIFAR-100's classes, a few at a time.

    Each task has as many classes as any other, and they are its outputs (see `Task`). Labels are
    the fine ones, 0 to 99, in every task.

    Parameters
    ----------
    n_tasks
        Number of different tasks; their descriptors are 0, 1, … It must divide the 100 classes.
    examples_per_task
        Training examples per task, drawn without replacement; None for all (2,500 with 20 tasks).
    batch_size, epochs
        See `Continuum`.
    order
        The order of the tasks: None for 0, 1, …, "random", or a list of descriptors, in which a
        task may come back (with other examples, if they are drawn) or be left out.
    seed
        Governs examples and order, and which classes make a task if they are shuffled.
    data
        A folder with CIFAR-100's files or archive, the archive, or None for the folder in
        `GRADMEM_DATA`, the cache, or a download.
    classes
        "in order": task 0 has the first classes, task 1 the next. "shuffled": any, by the seed.
    tasks
        "fine": classes make up tasks as they come. "coarse": superclasses do, each with its five
        classes, so that `n_tasks` must divide 20.

    Examples
    --------
    >>> x, y = torch.zeros(200, 3, 32, 32, dtype=torch.uint8), torch.arange(200) % 100
    >>> continuum = cifar100_incremental(n_tasks=20, data=Images(x, y, x[:100], y[:100]))
    >>> continuum
    Continuum(20 tasks, 200 examples, batch_size=10, epochs=1, seed=0)
    >>> continuum.outputs[1], continuum.labels()[1]
    ((5, 6, 7, 8, 9), 'classes 5–9')
    >>> x, t, y = next(iter(continuum))
    >>> x.shape, t, y.unique()
    (torch.Size([10, 3, 32, 32]), 0, tensor([0, 1, 2, 3, 4]))
    """
    n_tasks = positive_int("n_tasks", n_tasks)
    seed = non_negative_int("seed", seed)
    one_of("classes", classes, ("in order", "shuffled"))
    coarse = one_of("tasks", tasks, ("fine", "coarse")) == "coarse"
    n_groups, what = (COARSE, "superclasses") if coarse else (FINE, "classes")
    if n_groups % n_tasks:
        raise ValueError(f"n_tasks must divide the {n_groups} {what}, got {n_tasks}")
    if examples_per_task is not None:
        positive_int("examples_per_task", examples_per_task)
    visited = visits(order, n_tasks, seed)
    if examples_per_task is None:  # a task that comes back has the same examples
        visited = [(k, 0) for k, _ in visited]
    images = load_cifar100(data)
    _check(images)
    groups = np.arange(n_groups)
    if classes == "shuffled":
        groups = np.random.default_rng([seed, TASK]).permutation(n_groups)
    contents = _contents(images, groups.reshape(n_tasks, -1).tolist(), coarse)

    drawn: dict[tuple[int, int], Tensor] = {}
    for k, again in dict.fromkeys(visited):
        found = _where(images.train_y, *contents[k], "training")
        rng = np.random.default_rng([seed, EXAMPLES, k, again])
        drawn[k, again] = _draw(found, examples_per_task, rng, contents[k][1])
    tested = {k: _where(images.test_y, *contents[k], "test") for k, _ in visited}
    own = images is not data  # images of the caller's are left as they are
    train = _examples(images.train_x, images.train_y, drawn, in_place=own)
    test = _examples(images.test_x, images.test_y, tested, in_place=own)
    learned = []
    for k, again in visited:
        outputs, label = contents[k]
        learned.append(Task(k, train[k, again], test[k], label, outputs))
    return Continuum(learned, batch_size, epochs, seed=seed)


def cifar_network(seed: int = 0, learner: object = None, n_tasks: int = 20) -> nn.Module:
    """The paper's network; independent learners share its feature maps out among the tasks."""
    feature_maps = max(1, round(FEATURE_MAPS / shares(learner, n_tasks)))
    network: nn.Module = resnet18(FINE, feature_maps, seed=seed)
    if feature_maps > 1:  # in the layout that convolutions are fastest in, also on a CPU
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


CIFAR100_INCREMENTAL = paper_benchmark("cifar100-incremental", cifar100_incremental, cifar_network)


def _check(images: Images) -> None:
    if images.train_x.ndim != 4:
        raise ValueError(f"images must be (N, 3, 32, 32), got {tuple(images.train_x.shape)}")
    for part, y in (("train_y", images.train_y), ("test_y", images.test_y)):
        lowest, highest = int(y.min()), int(y.max())
        if lowest < 0 or highest >= FINE:
            raise ValueError(f"{part} must be from 0 to {FINE - 1}, got {lowest} to {highest}")


def _contents(
    images: Images, shares: Sequence[Sequence[int]], coarse: bool
) -> list[tuple[list[int], str]]:
    """Classes and label of each task, from its share of the classes or superclasses."""
    if not coarse:
        return [(sorted(share), class_label(sorted(share))) for share in shares]
    if not isinstance(images, Cifar100):
        raise ValueError('tasks="coarse" needs superclasses: pass data as Cifar100, not as Images')
    names = [name.replace("_", " ") for name in images.coarse_names]
    return [
        (_classes_of(images, share), ", ".join(names[one] for one in share)) for share in shares
    ]


def _classes_of(images: Cifar100, superclasses: Sequence[int]) -> list[int]:
    """The classes whose images have these superclasses."""
    y = torch.cat([images.train_y, images.test_y])
    inside = torch.isin(
        torch.cat([images.train_coarse, images.test_coarse]), torch.tensor(superclasses)
    )
    own = {*y[inside].tolist()}
    if shared := own & {*y[~inside].tolist()}:
        raise ValueError(f"a class must be in one superclass; in several: {sorted(shared)}")
    return sorted(own)


def _where(y: Tensor, classes: Sequence[int], label: str, part: str) -> Tensor:
    """Positions of the images of some classes."""
    found = torch.isin(y, torch.tensor(classes, dtype=y.dtype)).nonzero()[:, 0]
    if len(found) == 0:
        raise ValueError(f"there must be {part} images of every task, got none of {label}")
    return found


def _draw(found: Tensor, n: int | None, rng: np.random.Generator, label: str) -> Tensor:
    if n is None:
        return found
    if n > len(found):
        raise ValueError(
            f"examples_per_task must be at most the {len(found)} training images of {label}, "
            f"got {n}"
        )
    return found[rng.permutation(len(found))[:n]]


def _examples(
    x: Tensor, y: Tensor, positions: Mapping[Key, Tensor], in_place: bool
) -> dict[Key, Examples]:
    """The images at each key's positions, as slices of one tensor."""
    order = torch.cat([*positions.values()])
    if in_place and len(order) == len(x):
        # All images, so a copy would double them. A few bytes of each are moved at a time.
        for columns in x.view(len(x), -1).split(COLUMNS, dim=1):
            columns.copy_(columns[order])
    else:
        x = x[order]
    sizes = [len(some) for some in positions.values()]
    parts = zip(positions, x.split(sizes), y[order].split(sizes), strict=True)
    return {key: Examples(images, labels, divisor=255) for key, images, labels in parts}
