"""Batches whose examples are of several tasks: a descriptor for each example."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from torch import Tensor

from gradmem.trees import Tree, check, take
from gradmem.validation import descriptor

__all__ = ["is_mixed", "parts_of", "places_of"]


def is_mixed(t: Any) -> bool:
    """Whether t is a sequence of descriptors, one per example: a list, 1-d tensor or array.

    A tuple is one descriptor.
    """
    return isinstance(t, list) or (isinstance(t, Tensor | np.ndarray) and t.ndim == 1)


def places_of(t: Any, n: int) -> dict[Hashable, list[int]]:
    """Descriptor → the positions of its examples, in the order in which descriptors first come.

    Examples
    --------
    >>> places_of(["b", "a", "b"], 3)
    {'b': [0, 2], 'a': [1]}
    """
    each = t if isinstance(t, list) else t.tolist()
    if len(each) != n:
        raise ValueError(f"t must be one descriptor, or a list of one per example: {n}, got {t!r}")
    places: dict[Hashable, list[int]] = {}
    for i, one in enumerate(each):
        places.setdefault(descriptor(one), []).append(i)
    return places


def parts_of(x: Tree, t: Any, y: Tree) -> list[tuple[Tree, Hashable, Tree]]:
    """A mixed batch as one batch (x, t, y) per task, tasks in the order in which they first come.

    Examples
    --------
    >>> import torch
    >>> [(x.tolist(), t, y.tolist()) for x, t, y in
    ...  parts_of(torch.tensor([1.0, 2.0, 3.0]), ["b", "a", "b"], torch.tensor([0, 1, 2]))]
    [([1.0, 3.0], 'b', [0, 2]), ([2.0], 'a', [1])]
    """
    n, labels = check("x", x), check("y", y)
    if n != labels:
        raise ValueError(f"x and y must be equally many, got {n} inputs and {labels} labels")
    places = places_of(t, n)
    if len(places) == 1:
        return [(x, next(iter(places)), y)]
    return [(take(x, those), one, take(y, those)) for one, those in places.items()]
