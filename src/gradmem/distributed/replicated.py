"""Under DistributedDataParallel: every process has all parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradmem.distributed.agreement import Past
from gradmem.distributed.collectives import Pending
from gradmem.distributed.copies import Copies, Work
from gradmem.distributed.passes import loss_of_nothing, part_of_loss
from gradmem.distributed.processes import Processes
from gradmem.distributed.rows import OwnColumns
from gradmem.gradients import MemoryGradients
from gradmem.gradients.flat import flat, loss_gradient, parameters, set_gradient
from gradmem.gradients.precision import computing_in
from gradmem.memory import Stack

__all__ = ["Replicated"]

#: Bytes of rows that are exchanged at once, while the next ones are computed.
BUCKET = 2**24


class Replicated(Processes):
    """Every process computes some rows of G and its part of others, by any of the engine's ways.

    `Copies` says which. The rows are added up so that each process gets all k of them for p/W of
    the columns. That goes on while further rows are computed.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model.process_group)
        self.network: nn.Module = model.module
        self.copies = Copies(self.collectives)

    def gradients(self, engine: MemoryGradients, past: Past) -> OwnColumns:
        weights = parameters(self.network)
        first, p = weights[0], engine.n_parameters
        width = -(-p // self.size)
        columns = [slice(min(p, r * width), min(p, (r + 1) * width)) for r in range(self.size)]
        own = columns[self.rank]
        rows = first.detach().new_zeros((len(past), own.stop - own.start))
        n = max(1, BUCKET // (p * first.itemsize))
        work = self._work(engine, past)
        under_way: list[tuple[int, Pending]] = []
        for start in range(0, len(past), n):
            G = self._own_rows(engine, past, work, start, start + n)
            sent = torch.cat([G[:, part].reshape(-1) for part in columns])
            numbers = [len(G) * (part.stop - part.start) for part in columns]
            received = [m * rows.shape[1] for m in self._computed(work, start, start + n)]
            begun = self.collectives.start_exchange(sent, numbers, received, "rows of G")
            under_way.append((start, begun))
        for start, begun in under_way:
            computed = self._computed(work, start, start + n)
            parts = begun.wait().view(sum(computed), rows.shape[1]).split(computed)
            for r, part in enumerate(parts):
                places = torch.tensor(work.places(r, start, start + n), dtype=torch.long)
                rows.index_add_(0, places.to(rows.device), part)
        ends = torch.tensor([0, *(w.numel() for w in weights)]).cumsum(0).tolist()
        slices = {w: slice(*ends[i : i + 2]) for i, w in enumerate(weights)}
        return OwnColumns(self.collectives, past.tasks, rows, own.start, slices)

    def _work(self, engine: MemoryGradients, past: Past) -> Work:
        """Who computes which rows; the way to do so is chosen by what this process has."""
        if self._synchronises():
            return Work(past.shares, ())
        work = self.copies.work(past)
        remembered = [t for t, n in zip(past.tasks, past.counts[self.rank], strict=True) if n]
        copied = [past.tasks[i] for i in sorted(work.copied)]
        engine.prepare([*past.stacks(remembered), *self.copies.stacks(copied, past)])
        return work

    def _computed(self, work: Work, start: int, stop: int) -> list[int]:
        """How many rows between start and stop each process computes something of."""
        return [len(work.places(r, start, stop)) for r in range(self.size)]

    def _stacks(self, past: Past, work: Work, places: Sequence[int]) -> list[Stack]:
        """What this process remembers, then what it has copies of, of the tasks in some places."""
        own = [past.tasks[i] for i in places if i not in work.copied]
        copied = [past.tasks[i] for i in places if i in work.copied]
        return [*past.stacks(own), *self.copies.stacks(copied, past)]

    def _own_rows(
        self, engine: MemoryGradients, past: Past, work: Work, start: int, stop: int
    ) -> Tensor:
        """What this process adds to the rows between start and stop, to those that it computes."""
        shares, places = work.shares[self.rank], work.places(self.rank, start, stop)
        if self._synchronises():
            return self._in_step(engine, past, range(start, min(stop, len(past))), shares.tolist())
        G = engine(self._stacks(past, work, places))
        order = sorted(range(len(places)), key=lambda i: (places[i] in work.copied, i))
        if order != sorted(order):  # rows from copies came last
            G = G[torch.tensor(order).argsort().to(G.device)]
        counts = shares[places]
        return G if bool((counts == 1).all()) else G * counts.to(G)[:, None]

    def _in_step(
        self, engine: MemoryGradients, past: Past, places: Sequence[int], shares: list[float]
    ) -> Tensor:
        """`_own_rows` for a network whose processes wait for each other in every pass."""
        weights = parameters(self.network)
        own = [i for i in places if shares[i]]
        G = weights[0].detach().new_empty((len(own), engine.n_parameters))
        with torch.enable_grad(), computing_in(engine.precision, G.device):
            for i in places:
                if shares[i]:
                    (one,) = past.stacks([past.tasks[i]])
                    loss = part_of_loss(engine.objective, one, shares[i])
                    loss_gradient(loss, weights, out=G[own.index(i)])
                else:
                    loss_gradient(loss_of_nothing(engine.objective, past.spare(), 0), weights)
        return G

    def _synchronises(self) -> bool:
        """Whether layers add up statistics over all processes as they learn."""
        return any(
            isinstance(part, nn.SyncBatchNorm) and part.training for part in self.network.modules()
        )

    def with_batch(
        self, engine: MemoryGradients, past: Past, batch: Stack
    ) -> tuple[OwnColumns, Tensor, Tensor]:
        if engine.moves_buffers:  # they end with the newest data
            G = self.gradients(engine, past)
            begun = self._start_batch(engine, past, batch)
        else:  # the batch's gradient is added up while the memories' are computed
            begun = self._start_batch(engine, past, batch)
            G = self.gradients(engine, past)
        g = begun.wait()
        return G, g[:-1], g[-1]

    def _start_batch(self, engine: MemoryGradients, past: Past, batch: Stack) -> Pending:
        """Begin to add up a batch's gradient and, as its last number, its loss: (p + 1,)."""
        assert past.batch is not None
        weights = parameters(self.network)
        share = float(past.batch[self.rank]) / float(past.batch.sum())
        g = weights[0].detach().new_empty(engine.n_parameters + 1)
        with torch.enable_grad(), computing_in("fp32", g.device):
            loss = part_of_loss(engine.objective, batch, share)
            loss_gradient(loss, weights, out=g[:-1])
        g[-1] = loss.detach()
        return self.collectives.start_sum(g, "g")

    def backward(self, loss: Tensor, n: int, weights: Sequence[nn.Parameter]) -> Tensor:
        part = loss * self.share(n)
        g = loss_gradient(part, list(weights))
        total = self.collectives.sum(torch.cat([g, part.detach().to(g)[None]]), "g")
        set_gradient(self.network, total[:-1])
        return total[-1]

    def local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def gradient(self, weights: Sequence[nn.Parameter]) -> Tensor:
        return flat([w.grad for w in weights], weights)

    def set_gradient(self, weights: Sequence[nn.Parameter], g: Tensor) -> None:
        set_gradient(self.network, g)

    def length(self, z: Tensor) -> Tensor:
        length: Tensor = z.norm()
        return length

    def settle(self) -> None:
        """All parameters are there."""

    def state(self) -> dict[str, Any]:
        return super().state() | {"marks": dict(self.copies.marks)}

    def restore(self, tasks: Sequence[Hashable], marks: Mapping[Hashable, Sequence[int]]) -> None:
        super().restore(tasks, marks)
        self.copies.forget(marks)

    def agree(self, number: Tensor) -> Tensor:
        return number  # of gradients that all processes have
