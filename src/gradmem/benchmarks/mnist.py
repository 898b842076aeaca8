"""MNIST Rotations and MNIST Permutations: the same digits, moved another way in every task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gradmem.benchmarks.benchmark import paper_benchmark, shares
from gradmem.benchmarks.order import EXAMPLES, TASK, Data, Order, visits
from gradmem.data import load_mnist
from gradmem.networks import mlp
from gradmem.streams import Continuum, Examples, Task
from gradmem.validation import non_negative_int, positive_int

__all__ = ["MNIST_PERMUTATIONS", "MNIST_ROTATIONS", "mnist_permutations", "mnist_rotations"]

#: Hidden units of the paper's network, in each of two layers.
HIDDEN = 100


def mnist_rotations(
    n_tasks: int = 20,
    examples_per_task: int = 1000,
    batch_size: int = 10,
    epochs: int = 1,
    order: Order = None,
    seed: int = 0,
    data: Data = None,
) -> Continuum:
    """Digits turned by one angle per task.

    Task k's angle is drawn from the k-th of `n_tasks` equal slices of 0 to 180 degrees. Pixels are
    taken from the nearest neighbour; what comes from outside the image is black.

    Parameters
    ----------
    n_tasks
        Number of different tasks; their descriptors are 0, 1, …
    examples_per_task
        Training examples per task, drawn without replacement, differently for each task.
    batch_size, epochs
        See `Continuum`.
    order
        The order of the tasks: None for 0, 1, …, "random", or a list of descriptors, in which a
        task may come back (with other examples) or be left out.
    seed
        Governs angles, examples and order.
    data
        "sample" for the bundled digits, a folder with MNIST's files, or None for the folder in
        `GRADMEM_DATA`, the cache, or a download.

    Examples
    --------
    >>> continuum = mnist_rotations(n_tasks=3, examples_per_task=25, data="sample")
    >>> continuum
    Continuum(3 tasks, 75 examples, batch_size=10, epochs=1, seed=0)
    >>> x, t, y = next(iter(continuum))
    >>> x.shape, t, y.shape
    (torch.Size([10, 784]), 0, torch.Size([10]))
    """

    def turned(k: int, rng: np.random.Generator) -> tuple[Tensor, str]:
        angle = (k + rng.random()) * 180 / n_tasks
        return _rotation(angle), f"{angle:.1f}°"

    return _mnist(turned, n_tasks, examples_per_task, batch_size, epochs, order, seed, data)


def mnist_permutations(
    n_tasks: int = 20,
    examples_per_task: int = 1000,
    batch_size: int = 10,
    epochs: int = 1,
    order: Order = None,
    seed: int = 0,
    data: Data = None,
) -> Continuum:
    """Digits whose pixels are shuffled by one permutation per task.

    Takes what `mnist_rotations` takes.
    """

    def permuted(k: int, rng: np.random.Generator) -> tuple[Tensor, str]:
        return torch.from_numpy(rng.permutation(784)), f"permutation {k}"

    return _mnist(permuted, n_tasks, examples_per_task, batch_size, epochs, order, seed, data)


def mnist_network(seed: int = 0, learner: object = None, n_tasks: int = 20) -> nn.Module:
    """The paper's network; independent learners share its hidden units out among the tasks."""
    hidden = max(1, round(HIDDEN / shares(learner, n_tasks)))
    return mlp([784, hidden, hidden, 10], seed=seed)


MNIST_ROTATIONS = paper_benchmark("mnist-rotations", mnist_rotations, mnist_network)

MNIST_PERMUTATIONS = paper_benchmark("mnist-permutations", mnist_permutations, mnist_network)


def _mnist(
    move: Callable[[int, np.random.Generator], tuple[Tensor, str]],
    n_tasks: int,
    examples_per_task: int,
    batch_size: int,
    epochs: int,
    order: Order,
    seed: int,
    data: Data,
) -> Continuum:
    """A continuum in which task k's pixels come from `move(k, rng)`: (784,) positions, a label."""
    n_tasks = positive_int("n_tasks", n_tasks)
    seed = non_negative_int("seed", seed)
    visited = visits(order, n_tasks, seed)
    images = load_mnist(data)
    if images.train_x.shape[1:] != (28, 28):
        raise ValueError(f"MNIST's images are 28 × 28, got {tuple(images.train_x.shape[1:])}")
    n = positive_int("examples_per_task", examples_per_task)
    if n > len(images.train_y):
        raise ValueError(
            f"examples_per_task must be at most the {len(images.train_y)} training images, got {n}"
        )
    # (n, 785): one black pixel more, at position 784, for what lies outside the image.
    train_x, test_x = (pad(x.flatten(1), (0, 1)) for x in (images.train_x, images.test_x))

    moves = {k: move(k, np.random.default_rng([seed, TASK, k])) for k in {k for k, _ in visited}}
    tests = {
        k: Examples(test_x[:, pixels], images.test_y, divisor=255)
        for k, (pixels, _) in moves.items()
    }
    tasks = []
    for k, again in visited:
        pixels, label = moves[k]
        drawn = np.random.default_rng([seed, EXAMPLES, k, again]).permutation(len(train_x))[:n]
        train = Examples(train_x[drawn][:, pixels], images.train_y[drawn], divisor=255)
        tasks.append(Task(k, train, tests[k], label))
    return Continuum(tasks, batch_size, epochs, seed=seed)


def _rotation(angle: float) -> Tensor:
    """Where each of 784 pixels comes from when an image is turned by `angle` degrees; 784: outside.

    Pillow turns one image of positions per task, so that the nearest neighbours are Pillow's,
    without turning each of 11,000 images.
    """
    from PIL import Image

    positions = Image.fromarray(np.arange(784, dtype=np.int32).reshape(28, 28))
    turned = positions.rotate(angle, resample=Image.Resampling.NEAREST, fillcolor=784)
    return torch.from_numpy(np.array(turned).reshape(-1)).long()
