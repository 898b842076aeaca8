"""G: (k, p) whose columns lie in several processes: each adds up inner products of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor, nn

from gradmem.distributed.collectives import Collectives
from gradmem.gradients.gram import add_products
from gradmem.projection.blocks import add_rows

__all__ = ["Columns", "OwnColumns", "ShardedColumns"]


class Columns(ABC):
    """The gradients at k tasks' memories, of which this process has some columns.

    GGᵀ and Gz are sums over columns, so that k² + k numbers are added up over all processes, and
    every process solves the dual on the same ones.

    Attributes
    ----------
    tasks
        The tasks, in the order of the rows.
    rows
        (k, c) the columns of this process.
    """

    def __init__(self, collectives: Collectives, tasks: tuple[Hashable, ...], rows: Tensor) -> None:
        self.collectives, self.tasks, self.rows = collectives, tasks, rows
        self._known: tuple[Tensor, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    @abstractmethod
    def own(self, z: Tensor) -> Tensor:
        """Of z, the part that belongs to this process's columns: (c,)."""

    @abstractmethod
    def square(self, z: Tensor) -> Tensor:
        """|z|² in double precision: ()."""

    @abstractmethod
    def combine(self, v: Tensor) -> Tensor:
        """The last z plus Gᵀv, for v: (k,)."""

    @abstractmethod
    def leave_out(self, weights: Iterable[nn.Parameter]) -> None:
        """Take these parameters' gradients as zero."""

    @abstractmethod
    def whole(self) -> Tensor:
        """G: (k, p) in every process, or this process's columns if vectors are sharded."""

    def look(self, z: Tensor) -> None:
        """All products are computed at once: nothing less would cost less."""
        del z

    def products(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """GGᵀ: (k, k) and Gz: (k,) in double precision: the same bits in all processes.

        Known without a collective for the z that was asked for last, and for what `combine` made.
        """
        if self._known is None or self._known[0] is not z:
            k = len(self)
            total = torch.zeros((k, k + 1), dtype=torch.float64, device=self.rows.device)
            add_products(total, self.rows, self.own(z))
            upper = torch.triu_indices(k, k + 1, device=total.device)  # GGᵀ is symmetric
            added = self.collectives.sum(total[upper[0], upper[1]], "inner products")
            total[upper[0], upper[1]] = added
            GGt = total[:, :k].triu() + total[:, :k].triu(1).mT
            self._known = z, GGt, total[:, k].clone()
        return self._known[1:]

    def _combined(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """This process's part of z + Gᵀv, and v as it is used."""
        assert self._known is not None
        z, GGt, _ = self._known
        v, own = v.to(GGt), self.own(z)
        if own.is_cuda:
            return own + v.to(own.dtype) @ self.rows, v
        return add_rows(own, self.rows, v, own.dtype), v

    def _note(self, z: Tensor, v: Tensor) -> Tensor:
        """Know the products of z, which is the last one plus Gᵀv."""
        assert self._known is not None
        _, GGt, Gz = self._known
        self._known = z, GGt, Gz + GGt @ v
        return z


class OwnColumns(Columns):
    """Columns of whole vectors: every process has all of z: (p,) and c ≈ p/W columns of G."""

    def __init__(
        self,
        collectives: Collectives,
        tasks: tuple[Hashable, ...],
        rows: Tensor,
        start: int,
        places: dict[nn.Parameter, slice],
    ) -> None:
        """`start` is this process's first column; `places` are where parameters lie in p."""
        super().__init__(collectives, tasks, rows)
        self.start, self.places = start, places

    def own(self, z: Tensor) -> Tensor:
        return z[self.start : self.start + self.rows.shape[1]]

    def square(self, z: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(z, dtype=torch.float64)
        return length.square()

    def combine(self, v: Tensor) -> Tensor:
        """The last z plus Gᵀv: (p,), which every process puts together from all parts."""
        assert self._known is not None
        z = self._known[0]
        part, v = self._combined(v)
        width = -(-len(z) // self.collectives.size)
        padded = torch.nn.functional.pad(part, (0, width - len(part)))
        return self._note(self.collectives.gather(padded, "g̃")[: len(z)], v)

    def whole(self) -> Tensor:
        p = max([0, *(place.stop for place in self.places.values())])
        width = -(-p // self.collectives.size)
        padded = torch.nn.functional.pad(self.rows, (0, width - self.rows.shape[1]))
        every = self.collectives.gather(padded, "rows of G")
        whole: Tensor = every.unflatten(0, (-1, len(self))).transpose(0, 1).flatten(1)[:, :p]
        return whole

    def leave_out(self, weights: Iterable[nn.Parameter]) -> None:
        for w in weights:
            first, last = (
                max(0, end - self.start) for end in (self.places[w].start, self.places[w].stop)
            )
            self.rows[:, first:last] = 0


class ShardedColumns(Columns):
    """Columns of vectors that are sharded themselves: z: (c,) is this process's part."""

    def __init__(
        self,
        collectives: Collectives,
        tasks: tuple[Hashable, ...],
        rows: Tensor,
        places: dict[nn.Parameter, slice],
    ) -> None:
        """`places` are where parameters' shards lie in c."""
        super().__init__(collectives, tasks, rows)
        self.places = places

    def own(self, z: Tensor) -> Tensor:
        return z

    def square(self, z: Tensor) -> Tensor:
        own = torch.linalg.vector_norm(z, dtype=torch.float64).square()
        return self.collectives.sum(own, "inner products")

    def combine(self, v: Tensor) -> Tensor:
        return self._note(*self._combined(v))

    def whole(self) -> Tensor:
        return self.rows

    def leave_out(self, weights: Iterable[nn.Parameter]) -> None:
        for w in weights:
            self.rows[:, self.places[w]] = 0
