"""Where examples lie: tasks of one kind in one tensor, a row of slots each."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Generator, Tensor

from gradmem.memory.policies import Policy, Row
from gradmem.memory.stack import Stack, share_dtype
from gradmem.trees import Kind, Tree, kind, leaves, size, take, tree_map

__all__ = ["Rows"]


class Rows:
    """Tasks whose examples are of one kind, a row of `size` slots each.

    Slots that are not used yet hold copies of the task's first example, so that all of them can be
    passed through a network; `rows[i].count` says how many count. Rows are added by doubling, so
    what refers to the tensors stays valid until the next doubling or `resize`.
    """

    def __init__(self, x: Tree, y: Tree, size: int) -> None:
        self.kind: tuple[Kind, Kind] = kind(x), kind(y)
        self.size = size
        self.x, self.y = _empty(x, 0, size), _empty(y, 0, size)
        self.shares = torch.empty((0, size), dtype=share_dtype(x), device=leaves(y)[0].device)
        self.rows: list[Row] = []

    def new_row(self, x: Tree, y: Tree) -> int:
        """The number of a new task's row, made for examples such as x, y."""
        i = len(self.rows)
        if i == len(self.shares):
            self._grow(max(4, 2 * i))
        for mine, given in ((self.x, x), (self.y, y)):
            for leaf, new in zip(leaves(mine), leaves(given), strict=True):
                leaf[i] = new[0].detach()
        self.shares[i] = 0
        self.rows.append(Row(self.size))
        return i

    def add(self, i: int, x: Tree, y: Tree, policy: Policy, generator: Generator) -> None:
        """Write what the policy keeps of x, y into row i."""
        row, n = self.rows[i], size(y)
        filled = row.count
        for part, slot in policy.places(row, n, generator):
            end = slot + part.stop - part.start
            for mine, given in ((self.x, x), (self.y, y)):
                for leaf, new in zip(leaves(mine), leaves(given), strict=True):
                    leaf[i, slot:end] = new[part].detach()
            filled = max(filled, end)
        if filled > row.count:
            row.count = filled
            self.shares[i, :filled] = 1 / filled
        row.seen += n

    def slots(self, i: int) -> tuple[Tree, Tree]:
        """A copy of row i's filled slots."""
        n = self.rows[i].count
        x, y = (tree_map(lambda leaf: leaf[i, :n].clone(), tree) for tree in (self.x, self.y))
        return x, y

    def by_age(self, i: int) -> tuple[Tree, Tree]:
        """Row i's examples, the oldest first."""
        row = self.rows[i]
        x, y = (
            tree_map(lambda leaf: leaf[i, : row.count].roll(-row.oldest, 0), tree)
            for tree in (self.x, self.y)
        )
        return x, y

    def stack(self, start: int, tasks: list[Hashable], masks: Tensor | None) -> Stack:
        """The rows from `start` on, which are these tasks', without a copy."""
        which = slice(start, start + len(tasks))
        counts = tuple(row.count for row in self.rows[which])
        x, y = take(self.x, which), take(self.y, which)
        return Stack(x, y, counts, masks, self.shares[which], tuple(tasks))

    def resize(self, size: int, policy: Policy, generator: Generator) -> None:
        """Give every row `size` slots; the policy says which examples stay."""
        if size == self.size:
            return
        kept = []
        for i, row in enumerate(self.rows):
            which = policy.kept(row, size, generator)
            x, y = self.by_age(i)
            if isinstance(which, Tensor):
                which = which.to(leaves(y)[0].device)
            kept.append((take(x, which), take(y, which), row.seen))
        self.size, self.rows = size, []
        self.x, self.y = (
            tree_map(lambda leaf: leaf.new_empty((0, size, *leaf.shape[2:])), tree)
            for tree in (self.x, self.y)
        )
        self.shares = self.shares.new_empty((0, size))
        for x, y, seen in kept:
            self.restore(x, y, seen, oldest=0)

    def restore(self, x: Tree, y: Tree, seen: int, oldest: int) -> int:
        """The number of a new row that holds x, y slot by slot."""
        i, n = self.new_row(x, y), size(y)
        for mine, given in ((self.x, x), (self.y, y)):
            for leaf, new in zip(leaves(mine), leaves(given), strict=True):
                leaf[i, :n] = new
        self.shares[i, :n] = 1 / n
        self.rows[i] = Row(self.size, n, seen, oldest)
        return i

    def _grow(self, rows: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = old.new_empty((rows, *old.shape[1:]))
            new[: len(old)] = old
            return new

        self.x, self.y = tree_map(grown, self.x), tree_map(grown, self.y)
        self.shares = grown(self.shares)


def _empty(tree: Tree, rows: int, size: int) -> Tree:
    return tree_map(lambda leaf: leaf.new_empty((rows, size, *leaf.shape[1:])), tree)
