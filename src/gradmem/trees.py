"""Examples of any structure: a tensor, or dicts, tuples and lists of tensors (a tree).

All tensors of a tree have the examples in their first dimension, so a batch of n examples is a tree
of tensors (n, …). Functions here treat a plain tensor first: it is the usual case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Kind",
    "Tree",
    "check",
    "concatenate",
    "kind",
    "leaves",
    "size",
    "take",
    "to",
    "tree_map",
]

#: A tensor, or a dict, tuple or list of trees.
Tree = Any
#: Structure, shapes without the first dimension, dtypes and device: equal for trees of one kind.
Kind = tuple[Any, ...]


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of `function(leaf, *leaves of the others)`; the others have the same structure.

    Examples
    --------
    >>> tree_map(len, {"ids": torch.zeros(3, 2), "mask": torch.ones(3)})
    {'ids': 3, 'mask': 3}
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        return {k: tree_map(function, tree[k], *(other[k] for other in others)) for k in tree}
    if isinstance(tree, tuple | list):
        made = [tree_map(function, *parts) for parts in zip(tree, *others, strict=True)]
        return made if isinstance(tree, list) else tuple(made)
    return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """The tensors of a tree, in order.

    Examples
    --------
    >>> leaves({"a": torch.tensor(1), "b": (torch.tensor(2), torch.tensor(3))})
    [tensor(1), tensor(2), tensor(3)]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def size(tree: Tree) -> int:
    """How many examples there are: the size of the first dimension."""
    first = tree if isinstance(tree, Tensor) else leaves(tree)[0]
    return int(first.shape[0])  # `len` of a tensor takes twice as long


def check(name: str, tree: Tree) -> int:
    """The number of examples; TypeError or ValueError if it is not a tree of n ≥ 1 examples."""
    found = leaves(tree)
    if not found:
        raise TypeError(f"{name} must hold at least one tensor, got {tree!r}")
    for leaf in found:
        if not isinstance(leaf, Tensor):
            inside = "" if leaf is tree else " in it"
            is_array = isinstance(leaf, np.ndarray)
            make = f"torch.as_tensor({name if leaf is tree else 'array'})"
            more = f": {make} makes a tensor of an array" if is_array else ""
            raise TypeError(
                f"{name} must be a tensor, or a dict, tuple or list of tensors, got "
                f"{type(leaf).__name__}{inside}{more}"
            )
        if leaf.ndim < 1 or len(leaf) == 0:
            raise ValueError(f"{name} must be (n, …) with n ≥ 1, got shape {tuple(leaf.shape)}")
        if len(leaf) != len(found[0]):
            raise ValueError(
                f"all tensors of {name} must have as many examples, got {len(found[0])} and "
                f"{len(leaf)}"
            )
        if leaf.device != found[0].device:
            raise ValueError(
                f"all tensors of {name} must be on one device, got {found[0].device} and "
                f"{leaf.device}"
            )
    return len(found[0])


def kind(tree: Tree) -> Kind:
    """What examples must have in common to be kept together: all but their values and number.

    Examples
    --------
    >>> kind(torch.zeros(5, 2))
    ((2,), torch.float32, device(type='cpu'))
    """
    if isinstance(tree, Tensor):
        return tuple(tree.shape[1:]), tree.dtype, tree.device
    if isinstance(tree, Mapping):
        return tuple((name, kind(part)) for name, part in tree.items())
    return (type(tree).__name__, *(kind(part) for part in tree))


def take(tree: Tree, which: Any) -> Tree:
    """The examples at a slice, mask or tensor of positions."""
    return tree[which] if isinstance(tree, Tensor) else tree_map(lambda leaf: leaf[which], tree)


def to(tree: Tree, device: torch.device | str | None) -> Tree:
    """The same examples on a device; the very same tensors where they are there already."""
    return tree_map(lambda leaf: leaf.to(device), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Several batches of one kind as one."""
    first, *others = trees
    return tree_map(lambda *parts: torch.cat(parts), first, *others) if others else first
