"""Where examples lie: tasks of one kind in one tensor, a row of slots each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from gradmem.cuda.copies import copy_together
from gradmem.memory.policies import Offer, Policy, Row
from gradmem.memory.stack import Stack, share_dtype
from gradmem.trees import Kind, Tree, kind, leaves, size, take, tree_map

__all__ = ["Rows"]

#: Rows that there is room for at first.
FEW = 4
#: Bytes that are moved at once when rows shrink: they stay in the processor's cache.
PART = 2**19


class Rows:
    """Tasks whose examples are of one kind, a row of `size` slots each.

    The rows lie one after the other in one tensor, in which they move up when they shrink: nothing
    is allocated then. What refers to the tensors stays valid until `resize` or `remove`, or until
    there is no room for a new row and it is doubled.

    Parameters
    ----------
    x, y
        Examples such as are kept.
    size
        Slots of a row.
    most
        Slots of all rows that there will be at most; None if that is not known.
    device
        Where examples are kept; as they come if None. `stack` moves them to where they came from.
    pin
        Whether memory on the CPU is pinned, so that moving it to a GPU does not wait.
    """

    def __init__(
        self,
        x: Tree,
        y: Tree,
        size: int,
        most: int | None = None,
        device: torch.device | None = None,
        pin: bool = False,
    ) -> None:
        self.kind: tuple[Kind, Kind] = kind(x), kind(y)
        self.home: torch.device = leaves(y)[0].device
        self.device = device or self.home
        self.size, self.most, self.pin = size, most, pin
        self.rows: list[Row] = []
        self.x, self.y = (self._empty(tree, 0) for tree in (x, y))
        self.shares = torch.empty(0, dtype=share_dtype(x), device=self.home)
        self._staged: tuple[Tree, Tree] | None = None

    @property
    def bytes(self) -> int:
        """Bytes that the examples take, with the slots that are not filled."""
        parts = (*leaves(self.x), *leaves(self.y))
        return sum(leaf.numel() * leaf.element_size() for leaf in parts)

    def new_row(self) -> Row:
        """A new row without examples, after the others."""
        row = Row(self.size, place=len(self.rows))
        if (needed := row.start + self.size) > len(self.shares):
            doubled = max(2 * len(self.shares), FEW * self.size)
            self._reserve(max(needed, doubled if self.most is None else min(doubled, self.most)))
        self.rows.append(row)
        self._count(row, 0)
        return row

    def add(self, row: Row, offer: Offer, policy: Policy, generator: Generator) -> None:
        """Write what the policy keeps of an offer into a row."""
        filled, row.offer = row.count, offer
        for part, slot in policy.places(row, len(offer), generator):
            whole = part.stop - part.start == len(offer)
            x, y = (tree if whole else take(tree, part) for tree in (offer.x, offer.y))
            self._write(row, slot, x, y)
            filled = max(filled, slot + part.stop - part.start)
        row.offer = None
        row.seen += len(offer)
        if filled > row.count:
            self._count(row, filled)

    def restore(self, row: Row, x: Tree, y: Tree) -> None:
        """Write x, y into a row slot by slot."""
        self._write(row, 0, x, y)
        row.slots = {name: _sized(own, row.size) for name, own in row.slots.items()}
        row.padded = False
        row.cache.clear()
        self._count(row, size(y))

    def slots(self, row: Row) -> tuple[Tree, Tree]:
        """A copy of a row's filled slots."""
        return self._filled(row, Tensor.clone)

    def by_age(self, row: Row) -> tuple[Tree, Tree]:
        """A copy of a row's examples, the oldest first."""
        return self._filled(row, lambda leaf: leaf.roll(-row.oldest, 0))

    def view(self, rows: list[Row]) -> tuple[Tree, Tree]:
        """Neighbouring rows where they are kept, as x, y: (k, size, …)."""
        for row in rows:
            self._pad(row)
        return self._rows_of(self.x, rows), self._rows_of(self.y, rows)

    def stack(self, rows: list[Row], masks: Tensor | None) -> Stack:
        """Neighbouring rows, without a copy; moved, if they are kept elsewhere than they came from.

        The tensors to which they are moved are used again by the next stack of the same rows.
        """
        x, y = self.view(rows)
        if self.device != self.home:
            x, y = (
                tree_map(
                    lambda room, new: room.copy_(new, non_blocking=self.pin),
                    self._rows_of(there, rows),
                    here,
                )
                for there, here in zip(self._stage(), (x, y), strict=True)
            )
        counts = tuple(row.count for row in rows)
        tasks = tuple(row.tasks[0] for row in rows)
        return Stack(x, y, counts, masks, self._rows_of(self.shares, rows), tasks)

    def resize(self, size: int, policy: Policy, generator: Generator) -> None:
        """Give every row `size` slots, fewer than before; the policy says which examples stay.

        Examples move towards the first slot, in the order of their slots, a part at a time: none is
        written to where another one still lies, and there is no copy of them all.
        """
        if size == self.size:
            return
        self.size = size
        for row in self.rows:
            which = self._stay(row, size, policy, generator)
            parts, n, oldest = _slots_of(which, row)
            if oldest and n < size:  # there is no order of age around free slots
                x, y = self._taken(row, size, policy, generator)
                row.size = size
                self.restore(row, x, y)
                continue
            own = {name: _by_age(own, row)[which] for name, own in row.slots.items()}
            target = row.place * size
            for part in parts:
                self._move(row.start, part, target)
                target += _length(part)
            row.size, row.oldest, row.padded = size, oldest, False
            row.slots = {name: _sized(kept.roll(oldest, 0), size) for name, kept in own.items()}
            row.cache.clear()
            self._count(row, n)

    def _move(self, start: int, slots: slice | Tensor, target: int) -> None:
        """Write slots of the row at `start` to where `target` is the first, which lies before."""
        for leaf in (*leaves(self.x), *leaves(self.y)):
            example = leaf.element_size() * leaf[:1].numel()
            n, end = _length(slots), target
            step = n if leaf.is_cuda else max(1, PART // max(1, example))
            for i in range(0, n, step):
                if isinstance(slots, slice):
                    first = start + slots.start + i
                    part = leaf[first : min(first + step, start + slots.stop)].clone()
                else:
                    places = (start + slots[i : i + step]).to(leaf.device)
                    part = leaf.index_select(0, places)  # four times as fast as leaf[places]
                leaf[end : end + len(part)] = part
                end += len(part)

    def join(self, first: Row, second: Row, policy: Policy, generator: Generator) -> None:
        """Make one row of two, the first, in which each task counts like any other."""
        share = round(self.size * len(first.tasks) / (len(first.tasks) + len(second.tasks)))
        share = max(1, min(share, self.size - 1), self.size - second.count)
        n = min(first.count, share)
        m = min(second.count, self.size - n)
        x, y = self._taken(first, n, policy, generator)
        if m:
            others = self._taken(second, m, policy, generator)
            x, y = (_after(*both) for both in zip((x, y), others, strict=True))
            first.slots = _slots_after(first, second)
        first.totals = _added(first.totals, second.totals)
        first.seen += second.seen
        first.tasks += second.tasks
        self.restore(first, x, y)
        policy.joined(first)
        self.remove(second)

    def remove(self, row: Row) -> None:
        """Let a row go; the last row takes its place."""
        last = self.rows.pop()
        if last is not row:
            x, y = self.slots(last)
            last.place = row.place
            self.rows[row.place] = last
            self.restore(last, x, y)

    def _stay(self, row: Row, n: int, policy: Policy, generator: Generator) -> slice | Tensor:
        """Which n examples of a row stay, by age.

        The policy chooses within a task. Tasks that share a row lie one after the other, and each
        keeps its part.
        """
        if row.count <= n:
            return slice(0, row.count)
        if len(row.tasks) > 1:
            return _evenly(row.count, n)
        before = row.slots
        row.slots = {name: _by_age(own, row) for name, own in before.items()}
        which = policy.kept(row, n, generator)
        row.slots = before
        return which

    def _taken(self, row: Row, n: int, policy: Policy, generator: Generator) -> tuple[Tree, Tree]:
        """A copy of the n examples of a row that stay, oldest first; `row` is about them then."""
        which = self._stay(row, n, policy, generator)
        on_device = which.to(self.device) if isinstance(which, Tensor) else which
        x, y = (take(tree, on_device) for tree in self.by_age(row))
        row.slots = {name: _by_age(own, row)[which] for name, own in row.slots.items()}
        row.oldest, row.count = 0, size(y)
        return x, y

    def _write(self, row: Row, slot: int, x: Tree, y: Tree) -> None:
        first = row.start + slot
        sources = [new.detach() for new in (*leaves(x), *leaves(y))]
        room = zip((*leaves(self.x), *leaves(self.y)), sources, strict=True)
        copy_together([leaf.narrow(0, first, new.shape[0]) for leaf, new in room], sources)

    def _filled(self, row: Row, copied: Callable[[Tensor], Tensor]) -> tuple[Tree, Tree]:
        span = slice(row.start, row.start + row.count)
        x, y = (tree_map(lambda leaf: copied(leaf[span]), tree) for tree in (self.x, self.y))
        return x, y

    def _count(self, row: Row, n: int) -> None:
        """Note that n slots of a row are filled."""
        row.count = n
        span = self.shares[row.start : row.start + row.size]
        span[n:] = 0
        span[:n] = 1 / max(n, 1)

    def _rows_of(self, tree: Tree, rows: list[Row]) -> Tree:
        span = slice(rows[0].start, rows[-1].start + self.size)
        return tree_map(lambda leaf: leaf[span].unflatten(0, (len(rows), self.size)), tree)

    def _pad(self, row: Row) -> None:
        """Let slots that are not filled repeat the row's first example; zeros if there is none."""
        if row.count < row.size and not row.padded:
            for leaf in (*leaves(self.x), *leaves(self.y)):
                span = leaf[row.start : row.start + row.size]
                span[row.count :] = span[0].clone() if row.count else 0
            row.padded = True

    def _stage(self) -> tuple[Tree, Tree]:
        """Room for all rows where examples come from."""
        if self._staged is None or len(leaves(self._staged[1])[0]) != len(self.shares):
            self._staged = (
                tree_map(lambda leaf: torch.empty_like(leaf, device=self.home), self.x),
                tree_map(lambda leaf: torch.empty_like(leaf, device=self.home), self.y),
            )
        return self._staged

    def _empty(self, like: Tree, slots: int) -> Tree:
        def empty(leaf: Tensor) -> Tensor:
            shape = (slots, *leaf.shape[1:])
            return torch.empty(shape, dtype=leaf.dtype, device=self.device, pin_memory=self.pin)

        return tree_map(empty, like)

    def _reserve(self, slots: int) -> None:
        """Make room for so many slots."""
        used = slice(len(self.rows) * self.size)
        for name in ("x", "y"):
            old = getattr(self, name)
            new = self._empty(old, slots)
            for leaf, before in zip(leaves(new), leaves(old), strict=True):
                leaf[used] = before[used]
            setattr(self, name, new)
        shares = self.shares.new_zeros(slots)
        shares[used] = self.shares[used]
        self.shares = shares


def _slots_of(which: slice | Tensor, row: Row) -> tuple[list[slice | Tensor], int, int]:
    """Examples chosen by age as slots in ascending order; their number, and which is the oldest."""
    if isinstance(which, Tensor):
        slots = which if not row.oldest else (which + row.oldest) % row.count
        if bool((slots.diff() < 0).any()):
            slots = slots.sort().values
        n = len(slots)
        return [slots], n, int((slots < row.oldest).sum()) % max(1, n)
    first, last, _ = which.indices(row.count)
    n = max(0, last - first)
    start = (row.oldest + first) % max(1, row.count)
    if (wrapped := start + n - row.count) <= 0:
        return [slice(start, start + n)], n, 0
    return [slice(0, wrapped), slice(start, row.count)], n, wrapped


def _length(slots: slice | Tensor) -> int:
    return len(slots) if isinstance(slots, Tensor) else slots.stop - slots.start


def _evenly(count: int, n: int) -> Tensor:
    """Positions of n of `count` examples, as far apart as may be."""
    return ((torch.arange(n) + 0.5) * (count / n)).long()


def _by_age(own: Tensor, row: Row) -> Tensor:
    """The numbers of a row's filled slots in the order of age."""
    return own[: row.count].roll(-row.oldest, 0) if row.oldest else own[: row.count]


def _sized(own: Tensor, n: int) -> Tensor:
    """Numbers of n slots: as many as there are, then zeros."""
    return torch.cat([own[:n], own.new_zeros((max(0, n - len(own)), *own.shape[1:]))])


def _after(first: Tree, second: Tree) -> Tree:
    return tree_map(lambda *parts: torch.cat(parts), first, second)


def _slots_after(first: Row, second: Row) -> dict[str, Tensor]:
    """Numbers of two rows, one after the other; zeros for the first's of another width."""
    joined = {}
    for name, own in second.slots.items():
        before = first.slots.get(name)
        if before is None or before.shape[1:] != own.shape[1:]:
            before = own.new_zeros((first.count, *own.shape[1:]))
        joined[name] = torch.cat([before, own])
    return joined


def _added(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name; of sums of different widths, the second."""
    both = {**first, **second}
    return {
        name: first[name] + second[name]
        if name in first and name in second and first[name].shape == second[name].shape
        else value
        for name, value in both.items()
    }
