"""Benchmarks: each a record of how its stream, its network and its learners' settings are made."""

from gradmem.benchmarks.benchmark import Benchmark
from gradmem.benchmarks.cifar import cifar100_incremental
from gradmem.benchmarks.lookup import BENCHMARKS
from gradmem.benchmarks.mnist import mnist_composed, mnist_permutations, mnist_rotations

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "cifar100_incremental",
    "mnist_composed",
    "mnist_permutations",
    "mnist_rotations",
]
