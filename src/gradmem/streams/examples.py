"""Inputs and targets in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.cuda.copies import copy_to
from gradmem.trees import Tree, check, concatenate, kind, leaves, take, to, tree_map
from gradmem.validation import positive

__all__ = ["Examples", "Pair", "Seed", "are_class_ids", "permutation", "served", "tensors"]

Pair = tuple[Tree, Tree]
Seed = int | Sequence[int]

#: Examples that are looked at to tell some examples from others.
LOOKED_AT = 32

#: Mini-batches of a shuffled pass that are gathered at once, since each gather on a GPU costs time.
BATCHES_PER_FETCH = 64


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets in memory, kept in the dtype they are stored in.

    Parameters
    ----------
    x
        (n, …) inputs in any dtype, or a dict, tuple or list of such tensors.
    y
        (n, …) targets of any kind, or a dict, tuple or list of such tensors. One integer per
        example, (n,), is a class id and is served as int64; other targets are served as stored.
    divisor
        If given, x is one tensor, and is served as float32 divided by it (255 for pixels that are
        stored as bytes).

    Examples
    --------
    >>> digits = Examples(torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8),
    ...                   torch.tensor([7, 3]), divisor=255)
    >>> digits[1:]
    (tensor([[0.2000, 0.4000]]), tensor([3]))
    >>> pairs = Examples({"left": torch.tensor([1, 2]), "right": torch.tensor([3, 4])},
    ...                  torch.tensor([0.5, 0.25]))
    >>> pairs[:1]
    ({'left': tensor([1]), 'right': tensor([3])}, tensor([0.5000]))
    """

    x: Tree
    y: Tree
    divisor: float | None = None

    def __post_init__(self) -> None:
        n, n_targets = check("x", self.x), check("y", self.y)
        if n != n_targets:
            raise ValueError(f"x and y must have as many examples, got {n} and {n_targets}")
        check("x and y", (self.x, self.y))
        if self.divisor is not None:
            positive("divisor", self.divisor)
            if not isinstance(self.x, Tensor):
                raise TypeError(f"divisor needs x to be one tensor, got {type(self.x).__name__}")

    def __len__(self) -> int:
        return len(leaves(self.y)[0])

    def __getitem__(self, which: Any) -> Pair:
        """Inputs and targets of a slice, a mask or a tensor of positions."""
        x, y = take(self.x, which), take(self.y, which)
        if self.divisor is not None:
            x = torch.div(x, self.divisor)
        return x, (y.long() if are_class_ids(self.y) else y)

    @property
    def device(self) -> torch.device:
        """The device of the examples."""
        return leaves(self.x)[0].device  # type: ignore[no-any-return]

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device; itself if they are there already."""
        moved = Examples(to(self.x, device), to(self.y, device), self.divisor)
        return self if moved.is_same(self) else moved

    def part(self, which: Tensor) -> Examples:
        """The examples at these positions, as they are stored."""
        which = which.to(self.device)
        return Examples(take(self.x, which), take(self.y, which), self.divisor)

    def joined(self, *others: Any) -> Examples:
        """These examples and then those of the others, which must be of the same kind."""
        for other in others:
            if not isinstance(other, Examples):
                raise TypeError(f"examples in memory cannot be joined with {type(other).__name__}")
            if other.divisor != self.divisor:
                raise ValueError(
                    "examples must agree in their divisor to be joined, got "
                    f"{self.divisor} and {other.divisor}"
                )
            kinds = [kind((one.x, served(one.y))) for one in (self, other)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    "examples must agree in structure, shapes, dtypes and device to be joined, "
                    f"got {kinds[0]} and {kinds[1]}"
                )
        every = (self, *others)
        x, y = concatenate([one.x for one in every]), concatenate([one.y for one in every])
        return Examples(x, y, self.divisor)

    def is_same(self, other: Any) -> bool:
        """Whether the other consists of the very same tensors."""
        if not isinstance(other, Examples) or self.divisor != other.divisor:
            return False
        ours, theirs = leaves((self.x, self.y)), leaves((other.x, other.y))
        return [*map(id, ours)] == [*map(id, theirs)]

    def fingerprint(self) -> str:
        """A text that other examples do not have: a digest of some of them, spread over all."""
        n = len(self)
        some = (
            torch.linspace(0, n - 1, min(n, LOOKED_AT), dtype=torch.float64)
            .round()
            .long()
            .to(self.device)
        )
        digest = hashlib.sha256(f"{n} {self.divisor}".encode())
        for leaf in leaves((self.x, self.y)):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf[some].detach().cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def batches(self, size: int, shuffle: bool = False, seed: Seed = 0) -> Iterator[Pair]:
        """All examples, `size` at a time, in their order; if `shuffle`, in one drawn by `seed`."""
        if not shuffle:
            yield from (self[start : start + size] for start in range(0, len(self), size))
            return
        for x, y in self.fetches(size, shuffle, seed):
            for start in range(0, len(leaves(y)[0]), size):
                batch = slice(start, start + size)
                yield take(x, batch), take(y, batch)

    def fetches(self, size: int, shuffle: bool = False, seed: Seed = 0) -> Iterator[Pair]:
        """`batches` of `size`, by `shuffle` and `seed`, several whole ones at a time."""
        n = size * BATCHES_PER_FETCH
        if not shuffle:
            yield from (self[start : start + n] for start in range(0, len(self), n))
            return
        order = copy_to(permutation(len(self), seed), self.device)
        yield from (self[some] for some in torch.split(order, n))


def are_class_ids(y: Tree) -> bool:
    """Whether targets are class ids: one tensor, one integer per example."""
    return (
        isinstance(y, Tensor)
        and y.ndim == 1
        and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    )


def served(y: Tree) -> Tree:
    """Targets as learners get them: class ids as int64, others as they are."""
    return y.long() if are_class_ids(y) else y


def permutation(n: int, seed: Seed) -> Tensor:
    """The positions 0 to n - 1 in a random order."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(n))


def tensors(name: str, tree: Tree) -> Tree:
    """A tree whose arrays (numpy, pandas, …) have become tensors.

    Float64 arrays, numpy's default, become torch's default dtype. Tensors stay as they are. Other
    arrays share their memory with the tensor where they can.

    Examples
    --------
    >>> tensors("x", {"a": np.array([0.5, 1.0]), "b": torch.tensor([1, 2])})
    {'a': tensor([0.5000, 1.0000]), 'b': tensor([1, 2])}
    """

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__array__"):
            return leaf
        array = np.asarray(leaf)
        try:
            made = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        except TypeError:
            raise TypeError(f"{name} must hold numbers, got an array of {array.dtype}") from None
        return made.to(torch.get_default_dtype()) if made.dtype == torch.float64 else made

    return tree_map(tensor, tree)
