"""What all benchmarks share: the order of tasks, and what each random number is for."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np

from gradmem.data import Images

__all__ = ["COMBINATIONS", "EXAMPLES", "ORDER", "TASK", "Data", "Order", "visits"]

Order = Sequence[int] | str | None
Data = Images | str | PathLike[str] | None

# Part of each seed: what is drawn for one purpose does not depend on what is drawn for another.
TASK, EXAMPLES, ORDER, COMBINATIONS = range(4)


def visits(order: Order, n_tasks: int, seed: int) -> list[tuple[int, int]]:
    """The tasks in the order they are learned, each with how often it was learned before.

    Examples
    --------
    >>> visits(None, 3, seed=0), visits([2, 0, 2], 3, seed=0)
    ([(0, 0), (1, 0), (2, 0)], [(2, 0), (0, 0), (2, 1)])
    """
    if isinstance(order, str) and order != "random":
        raise ValueError(f'order must be None, "random" or a list of tasks, got {order!r}')
    tasks: list[Any] = list(range(n_tasks))
    if isinstance(order, str):
        tasks = np.random.default_rng([seed, ORDER]).permutation(n_tasks).tolist()
    elif order is not None:
        tasks = list(order)
    wrong = [k for k in tasks if not isinstance(k, int | np.integer) or not 0 <= k < n_tasks]
    if wrong or not tasks:
        raise ValueError(f"order must hold tasks from 0 to {n_tasks - 1}, got {wrong or order!r}")
    return [(int(k), tasks[:i].count(k)) for i, k in enumerate(tasks)]
