"""The paper's benchmarks, each a function from a few numbers and a seed to a `Continuum`."""

from collections.abc import Callable

from gradmem.benchmarks.cifar import cifar100_incremental
from gradmem.benchmarks.mnist import mnist_permutations, mnist_rotations
from gradmem.streams.continuum import Continuum

__all__ = ["BENCHMARKS", "cifar100_incremental", "mnist_permutations", "mnist_rotations"]

#: Every benchmark by the name it has on the command line and in results.
BENCHMARKS: dict[str, Callable[..., Continuum]] = {
    "mnist-rotations": mnist_rotations,
    "mnist-permutations": mnist_permutations,
    "cifar100-incremental": cifar100_incremental,
}
