"""MNIST's digits, changed in another way in every task: turned, permuted, or composed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gradmem.benchmarks.benchmark import Benchmark, paper_benchmark, shares
from gradmem.benchmarks.order import COMBINATIONS, EXAMPLES, TASK, Data, Order, visits
from gradmem.data import load_mnist
from gradmem.learners import Multimodal
from gradmem.networks import conditioned, mlp
from gradmem.streams import Continuum, Examples, Task
from gradmem.validation import non_negative_int, positive_int

__all__ = [
    "MNIST_COMPOSED",
    "MNIST_MANY_PERMUTATIONS",
    "MNIST_PERMUTATIONS",
    "MNIST_ROTATIONS",
    "PERMUTED_MNIST",
    "PERMUTED_MNIST_17",
    "ROTATED_MNIST",
    "mnist_composed",
    "mnist_permutations",
    "mnist_rotations",
    "rotated_mnist",
]

#: Hidden units of the paper's network, in each of two layers.
HIDDEN = 100
#: Attributes of composed tasks: angles in degrees, whether the background is gray, and digits.
ANGLES = (0, 30, 60, 90, 120, 150)
GRAY = (False, True)
DIGITS = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
COMBINED = [*product(ANGLES, GRAY, DIGITS)]
#: Numbers in the description of a rotation or a permutation.
DESCRIPTION = 4


@dataclass(frozen=True)
class _Change:
    """What a task makes of the digits: where its (784,) pixels come from, and the rest."""

    pixels: Tensor
    label: str
    description: Sequence[float]
    gray: bool = False
    classes: tuple[int, ...] | None = None

    def examples(self, images: Tensor, y: Tensor) -> Examples:
        """The changed examples of images: (n, 785), whose last pixel is black."""
        x = images[:, self.pixels]
        return Examples((255 - x) // 2 if self.gray else x, y, divisor=255)

    def among(self, y: Tensor) -> Tensor:
        """Where the examples of its classes are."""
        if self.classes is None:
            return torch.arange(len(y))
        return torch.isin(y, torch.tensor(self.classes)).nonzero().flatten()


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
    taken from the nearest neighbour; what comes from outside the image is black. A task's
    description is the cosine and sine of its angle, and of twice its angle.

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

    def turned(k: int, rng: np.random.Generator) -> _Change:
        return _turned((k + rng.random()) * 180 / n_tasks)

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

    A task's description is four random numbers: a name that says nothing about the permutation.

    Parameters
    ----------
    n_tasks, examples_per_task, batch_size, epochs, order, seed, data
        See `mnist_rotations`.
    """

    def permuted(k: int, rng: np.random.Generator) -> _Change:
        pixels = torch.from_numpy(rng.permutation(784))
        return _Change(pixels, f"permutation {k}", rng.standard_normal(DESCRIPTION).tolist())

    return _mnist(permuted, n_tasks, examples_per_task, batch_size, epochs, order, seed, data)


def rotated_mnist(
    n_tasks: int = 20,
    examples_per_task: int = 60_000,
    batch_size: int = 128,
    epochs: int = 1,
    order: Order = None,
    seed: int = 0,
    data: Data = None,
) -> Continuum:
    """MNIST rotations by any angles, all images in each task: the stream of the paper on DER++.

    Angles are drawn from 0 to 180 degrees, for each task anew: they neither grow from task to task
    nor are spread evenly, as those of `mnist_rotations` do and are.

    Parameters
    ----------
    n_tasks, examples_per_task, batch_size, epochs, order, seed, data
        See `mnist_rotations`.
    """

    def turned(k: int, rng: np.random.Generator) -> _Change:
        return _turned(180 * rng.random())

    return _mnist(turned, n_tasks, examples_per_task, batch_size, epochs, order, seed, data)


def mnist_composed(
    n_tasks: int = 20,
    examples_per_task: int = 1000,
    batch_size: int = 10,
    epochs: int = 1,
    order: Order = None,
    seed: int = 0,
    data: Data = None,
) -> Continuum:
    """Digits turned by one of six angles, on one of two backgrounds, half of the classes per task.

    A task is a combination of an angle (0, 30, …, 150 degrees), a background (black with a white
    digit, or gray with a black one), and digits (0 to 4 or 5 to 9), which are its outputs. There
    are 24, numbered in an order drawn by `seed`. A task's description is its angle's as in
    `mnist_rotations`, 1 for a gray and −1 for a black background, and the products of both.

    Parameters
    ----------
    n_tasks, examples_per_task, batch_size, epochs, order, seed, data
        See `mnist_rotations`. `n_tasks` is at most 24. Tasks that are left out of `order` are new
        combinations of attributes that were seen.

    Examples
    --------
    >>> continuum = mnist_composed(examples_per_task=20, data="sample")
    >>> continuum.labels()[0], continuum.outputs[0], len(continuum.descriptions[0])
    ('60°, black, 0–4', (0, 1, 2, 3, 4), 9)
    """
    if positive_int("n_tasks", n_tasks) > len(COMBINED):
        raise ValueError(f"n_tasks must be at most {len(COMBINED)}, got {n_tasks}")
    rng = np.random.default_rng([non_negative_int("seed", seed), COMBINATIONS])
    places = rng.permutation(len(COMBINED))

    def composed(k: int, rng: np.random.Generator) -> _Change:
        angle, gray, digits = COMBINED[places[k]]
        turned, sign = _harmonics(angle), 1.0 if gray else -1.0
        background = "gray" if gray else "black"
        return _Change(
            _rotation(angle),
            f"{angle}°, {background}, {digits[0]}–{digits[-1]}",
            [*turned, sign, *(sign * value for value in turned)],
            gray,
            digits,
        )

    return _mnist(composed, n_tasks, examples_per_task, batch_size, epochs, order, seed, data)


def mnist_network(seed: int = 0, learner: object = None, n_tasks: int = 20) -> nn.Module:
    """The paper's network; independent learners share its hidden units out among the tasks."""
    hidden = max(1, round(HIDDEN / shares(learner, n_tasks)))
    return mlp([784, hidden, hidden, 10], seed=seed)


MNIST_ROTATIONS = paper_benchmark("mnist-rotations", mnist_rotations, mnist_network)

MNIST_PERMUTATIONS = paper_benchmark("mnist-permutations", mnist_permutations, mnist_network)


def _permutations(about: str, **sizes: Any) -> Callable[..., Continuum]:
    """`mnist_permutations` of other sizes."""
    made: Callable[..., Continuum] = partial(mnist_permutations, **sizes)
    made.__doc__ = about
    return made


# The settings of permutations; as many memories in all are fewer for each of the tasks.
MNIST_MANY_PERMUTATIONS = Benchmark(
    "mnist-many-permutations",
    _permutations(
        "MNIST permutations with five times as many tasks, each with a fifth of the examples.",
        n_tasks=100,
        examples_per_task=200,
    ),
    mnist_network,
    {
        name: {**settings, **({"memories": 51} if name in ("gem", "agem") else {})}
        for name, settings in MNIST_PERMUTATIONS.settings.items()
    },
    grid=MNIST_PERMUTATIONS.grid,
)


#: With the settings that were published for 500 memories, as ROTATED_MNIST.
PERMUTED_MNIST = Benchmark(
    "permuted-mnist",
    _permutations(
        "MNIST permutations with all images in each task: the stream of the paper on DER++.",
        examples_per_task=60_000,
        batch_size=128,
    ),
    mnist_network,
    {
        "single": {"lr": 0.2},
        "agem": {"lr": 0.1, "memories": 25, "sample": 128},
        "gem": {"lr": 0.1, "memories": 25, "margin": 0.5},
    },
)

ROTATED_MNIST = Benchmark(
    "rotated-mnist",
    rotated_mnist,
    mnist_network,
    {
        "single": {"lr": 0.2},
        "agem": {"lr": 0.3, "memories": 25, "sample": 128},
        "gem": {"lr": 0.01, "memories": 25, "margin": 0.5},
    },
)


def wide_network(seed: int = 0) -> nn.Module:
    """Two layers of 256 hidden units that start as in the released code for A-GEM and MEGA."""
    network, generator = mlp([784, 256, 256, 10]), torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, 0.0, 0.1, -0.2, 0.2, generator)
        else:
            nn.init.constant_(parameter, 0.1)
    return network


PERMUTED_MNIST_17 = Benchmark(
    "permuted-mnist-17",
    _permutations(
        "MNIST permutations, 17 of 55,000 images: the stream of the papers on A-GEM and MEGA.",
        n_tasks=17,
        examples_per_task=55_000,
    ),
    wide_network,
    {
        "single": {"lr": 0.03},
        "agem": {"lr": 0.1, "memories": 250, "sample": 256},
        "mega": {"lr": 0.1, "memories": 250, "sample": 256},
    },
)


def composed_network(seed: int = 0, learner: object = None, n_tasks: int = 20) -> nn.Module:
    """The paper's network, conditioned; for Multimodal, whose tasks have first layers, as it is."""
    network = mnist_network(seed, learner, n_tasks)
    return network if learner is Multimodal else conditioned(network, 2 * DESCRIPTION + 1)


MNIST_COMPOSED = Benchmark(
    "mnist-composed",
    mnist_composed,
    composed_network,
    {
        "single": {"lr": 0.01},
        "independent": {"lr": 0.01},
        "multimodal": {"lr": 0.01},
        "ewc": {"lr": 0.01, "memories": 10, "regularization": 100.0},
        "icarl": {"lr": 0.01, "budget": 5120},
        "agem": {"lr": 0.01, "memories": 256, "sample": 256},
        "gem": {"lr": 0.01, "memories": 256, "margin": 0.5},
    },
)


def _mnist(
    change: Callable[[int, np.random.Generator], _Change],
    n_tasks: int,
    examples_per_task: int,
    batch_size: int,
    epochs: int,
    order: Order,
    seed: int,
    data: Data,
) -> Continuum:
    """A continuum in which task k's digits are changed by `change(k, rng)`."""
    n_tasks = positive_int("n_tasks", n_tasks)
    seed = non_negative_int("seed", seed)
    visited = visits(order, n_tasks, seed)
    images = load_mnist(data)
    if images.train_x.shape[1:] != (28, 28):
        raise ValueError(f"MNIST's images are 28 × 28, got {tuple(images.train_x.shape[1:])}")
    n = positive_int("examples_per_task", examples_per_task)
    # (n, 785): one black pixel more, at position 784, for what lies outside the image.
    train_x, test_x = (pad(x.flatten(1), (0, 1)) for x in (images.train_x, images.test_x))

    found = {k: change(k, np.random.default_rng([seed, TASK, k])) for k in {k for k, _ in visited}}
    tests = {}
    for k, own in found.items():
        among = own.among(images.test_y)
        tests[k] = own.examples(test_x[among], images.test_y[among])
    tasks = []
    for k, again in visited:
        own = found[k]
        among = own.among(images.train_y)
        if n > len(among):
            raise ValueError(
                f"examples_per_task must be at most the {len(among)} training images, got {n}"
            )
        drawn = np.random.default_rng([seed, EXAMPLES, k, again]).permutation(len(among))[:n]
        chosen = among[drawn]
        train = own.examples(train_x[chosen], images.train_y[chosen])
        tasks.append(Task(k, train, tests[k], own.label, own.classes, own.description))
    return Continuum(tasks, batch_size, epochs, seed=seed)


def _turned(angle: float) -> _Change:
    """A task whose digits are turned by so many degrees."""
    return _Change(_rotation(angle), f"{angle:.1f}°", _harmonics(angle))


def _harmonics(angle: float) -> list[float]:
    """Cosine and sine of an angle in degrees, and of twice the angle."""
    turns = [m * math.radians(angle) for m in (1, 2)]
    return [value for turn in turns for value in (math.cos(turn), math.sin(turn))]


def _rotation(angle: float) -> Tensor:
    """Where each of 784 pixels comes from when an image is turned by `angle` degrees; 784: outside.

    Pillow turns one image of positions per task, so that the nearest neighbours are Pillow's,
    without turning each of 11,000 images.
    """
    from PIL import Image

    positions = Image.fromarray(np.arange(784, dtype=np.int32).reshape(28, 28))
    turned = positions.rotate(angle, resample=Image.Resampling.NEAREST, fillcolor=784)
    return torch.from_numpy(np.array(turned).reshape(-1)).long()
