"""What data a benchmark has: those that published numbers are of, the bundled ones, or others."""

from __future__ import annotations

import hashlib
from functools import cache

from gradmem.data import load_cifar100, load_mnist

__all__ = ["DATA_SETS", "OTHER", "SAMPLE", "WHOLE", "kind_of_data"]

#: The data set of each benchmark whose numbers are compared with published ones.
DATA_SETS = {
    "mnist-permutations": "mnist",
    "mnist-rotations": "mnist",
    "mnist-many-permutations": "mnist",
    "permuted-mnist": "mnist",
    "rotated-mnist": "mnist",
    "permuted-mnist-17": "mnist",
    "cifar100-incremental": "cifar100",
}

#: What data can be: those of the papers, the bundled ones (too few for their numbers), or others.
WHOLE, SAMPLE, OTHER = "whole", "sample", "other"

#: SHA-256 of the images and labels of the papers' test sets.
TEST_SETS = {
    "mnist": "a0863a96c44e5666edbb30c4071ee79ca0514c621e6349c5967fc78e7305c891",
    "cifar100": "9f0797cda23af3231dce0cca7e8d619c0607f6bb8ca05e9b95ff23e4d044c600",
}


def kind_of_data(benchmark: str, data: str | None) -> str:
    """`WHOLE`, `SAMPLE` or `OTHER`: what a benchmark finds under `data`."""
    if data == SAMPLE:
        return SAMPLE
    name = DATA_SETS[benchmark]
    return WHOLE if _test_set(name, data) == TEST_SETS[name] else OTHER


@cache
def _test_set(name: str, data: str | None) -> str:
    images = load_mnist(data) if name == "mnist" else load_cifar100(data)
    hashed = hashlib.sha256()
    for part in (images.test_x, images.test_y):
        hashed.update(part.contiguous().numpy().data)
    return hashed.hexdigest()
