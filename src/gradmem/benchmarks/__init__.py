"""The paper's benchmarks, each a function from a few numbers and a seed to a `Continuum`."""

from gradmem.benchmarks.mnist import mnist_permutations, mnist_rotations

__all__ = ["BENCHMARKS", "mnist_permutations", "mnist_rotations"]

#: Every benchmark by the name it has on the command line and in results.
BENCHMARKS = {
    "mnist-rotations": mnist_rotations,
    "mnist-permutations": mnist_permutations,
}
