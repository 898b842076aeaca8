"""Benchmarks: each a record of how its stream, its network and its learners' settings are made."""

from gradmem.benchmarks.benchmark import Benchmark
from gradmem.benchmarks.cifar import cifar100_incremental
from gradmem.benchmarks.mnist import mnist_permutations, mnist_rotations
from gradmem.benchmarks.parts import BENCHMARKS

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "cifar100_incremental",
    "mnist_permutations",
    "mnist_rotations",
]
