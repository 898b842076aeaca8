"""Small products, one after another, by one thread each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[int]:
    """Let torch compute on a CPU by the calling thread alone; gives how many there are otherwise.

    Threads that share out a small product wait for each other at its end. Thousands of such
    products take ten times as long, where cores have other things to do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)  # also what threads to come start with
