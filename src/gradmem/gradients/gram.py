"""GGᵀ, Gg and Gᵀv without G: the gradients at the memories, for models of many parameters.

All tasks' backward passes go through the network side by side, segment by segment. As soon as a
parameter's gradients at all tasks are there, their inner products are added to GGᵀ and Gg, and the
gradients are dropped. For Gᵀv, the segments whose gradients were dropped are differentiated again.

Where activations are not kept, computing them again is a third of a pass. A plain loop over the
tasks does without, and gives Gg: all there is to know as long as no constraint is violated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import has_triton
from gradmem.gradients import loop
from gradmem.gradients.by_task import TaskByTask
from gradmem.gradients.examples import evaluating
from gradmem.gradients.flat import parameters, split
from gradmem.gradients.loop import loop_gradients, pass_of, task_losses
from gradmem.gradients.objective import Objective
from gradmem.gradients.precision import computing_in
from gradmem.gradients.segments import Block, Call, Pass, Segments
from gradmem.memory.stack import Stack
from gradmem.projection.blocks import inner_products
from gradmem.projection.project import Unstored

__all__ = ["Gradients", "GramGradients", "Outlook", "add_products", "check_segments", "longest"]

#: Gradients of tasks are kept for Gᵀv up to this many times the size of the parameters.
COPIES = 3
#: Steps in a row without a violation, after which the next one is expected to violate nothing.
CALM = 2


class Outlook:
    """Whether a look at the next step's Gz is likely to be enough, by the steps before it.

    Attributes
    ----------
    calm
        Steps in a row that violated no constraint, where activations were computed again or not
        needed.
    """

    def __init__(self) -> None:
        self.calm = 0

    def note(self, Gz: Tensor, again: bool) -> None:
        """Note a step's Gz: (k,), and whether activations were or would be computed again."""
        self.calm = self.calm + 1 if again and not bool((Gz < 0).any()) else 0


class GramGradients:
    """The gradients at k tasks' memories, at the parameters as they are, without storing them.

    Parameters
    ----------
    objective
        The loss that is differentiated.
    segments
        The network of the objective, cut into segments.
    stacks
        The tasks' memories.
    precision
        Of the passes; see `MemoryGradients`. Inner products are summed in double precision.
    outlook
        What the last steps were like, if `look` may go by it.
    one_pass
        Makes a pass over one task's memories, for `look`.
    """

    def __init__(
        self,
        objective: Objective,
        segments: Segments,
        stacks: Sequence[Stack],
        precision: str = "fp32",
        outlook: Outlook | None = None,
        one_pass: loop.Pass = pass_of,
    ) -> None:
        self.objective, self.segments, self.stacks = objective, segments, stacks
        self.precision, self.outlook, self.one_pass = precision, outlook, one_pass
        self.weights = parameters(objective.network)
        self._left_out: set[int] = set()
        self._known: tuple[Tensor, Tensor, Tensor] | None = None
        self._looked: TaskByTask | None = None
        self._start()

    def _start(self) -> None:
        self._rows: dict[Block, Tensor] = {}  # gradients (k, n) that are kept
        self._noted: set[tuple[nn.Parameter, int]] = set()
        self._done: set[Block] = set()
        self._left = COPIES * sum(w.nbytes for w in self.weights)
        self._again: list[tuple[int, Call]] = []  # what Gᵀv takes, with the tasks' places

    def __len__(self) -> int:
        return sum(len(stack) for stack in self.stacks)

    def products(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """GGᵀ: (k, k) and Gz: (k,) for z: (p,), summed in double precision.

        Known without a pass for the z that was asked for last, and for what `combine` made of it.
        """
        if self._known is not None and self._known[0] is z:
            return self._known[1:]
        GGt, Gz = self._passed(z)
        self._known = z, GGt, Gz
        if self.outlook is not None:
            self.outlook.note(Gz, self.segments.recomputes)
        return GGt, Gz

    def look(self, z: Tensor) -> tuple[Tensor, Tensor] | None:
        """Gz and the rows' squares: (k,) each; None where GGᵀ is likely to be needed as well.

        Takes one task's pass after another, and keeps nothing of them.
        """
        if self._known is not None and self._known[0] is z:
            return self._known[2], self._known[1].diagonal()
        if self._looked is None and self.outlook is not None and self.outlook.calm >= CALM:
            self._looked = TaskByTask(
                self.objective, self.stacks, self.precision, self.one_pass, room=1
            )
            self._looked.leave_out(w for w in self.weights if id(w) in self._left_out)
            self.outlook.note(self._looked.look(z)[0], again=True)
        return None if self._looked is None else self._looked.look(z)

    def _passed(self, z: Tensor) -> tuple[Tensor, Tensor]:
        while True:
            self._start()
            try:
                with torch.enable_grad(), computing_in(self.precision, z.device):
                    return self._products(z)
            except _SharedError as error:  # found out once
                self.segments.shared.add(error.block)

    def square(self, z: Tensor) -> Tensor:
        """|z|²: () in double precision."""
        length: Tensor = torch.linalg.vector_norm(z, dtype=torch.float64)
        return length.square()

    def leave_out(self, weights: Iterable[nn.Parameter]) -> None:
        """Take these parameters' gradients as zero."""
        self._left_out = {id(w) for w in weights}

    def _products(self, z: Tensor) -> tuple[Tensor, Tensor]:
        k = len(self)
        total = torch.zeros((k, k + 1), dtype=torch.float64, device=z.device)
        passes = self._forward()
        calls = [(place, i) for place, one in enumerate(passes) for i in range(one.remaining)]
        users = Counter(b for place, i in calls for b in self._blocks_of(passes[place].calls[i]))
        for place, i in sorted(calls, key=lambda call: (-call[1], call[0])):
            one = passes[place]
            self.segments.back(one, i, place, self._note)
            self._again.append((place, one.calls[i]))
            users.subtract(own := self._blocks_of(one.calls[i]))
            for block in own:
                if not users[block] and block not in self.segments.shared:
                    self._finish(block, z, total)
            if place == k - 1:
                self._let_go()
        for block in dict.fromkeys(self.segments.blocks.values()):
            if block not in self._done:
                self._finish(block, z, total, keep=True)
        self._let_go()
        return total[:, :k], total[:, k]

    def _blocks_of(self, call: Call) -> list[Block]:
        return list(dict.fromkeys(self.segments.blocks[w] for w in call.weights))

    def _let_go(self) -> None:
        """Free the segments whose gradients are all kept: Gᵀv takes nothing more of them."""
        for _, call in self._again:
            own = self._blocks_of(call)
            if all(block in self._done and block in self._rows for block in own):
                call.let_go()

    def _forward(self) -> list[Pass]:
        """All tasks' forward passes, and their backward passes down to where they go on together.

        A segment that gives more than it has parameters is left behind at once: what its outputs
        would take until all tasks are there is more than its gradients take.
        """
        passes: list[Pass] = []
        self.segments.kept = 0
        for loss in (loss for stack in self.stacks for loss in task_losses(self.objective, stack)):
            one, place = self.segments.forward(loss), len(passes)
            self.segments.end(one, place, self._note)
            one.remaining = len(one.calls)
            while one.remaining and _gives_more(call := one.calls[one.remaining - 1]):
                one.remaining -= 1
                self.segments.shared.update(self._blocks_of(call))
                self.segments.back(one, one.remaining, place, self._note)
                call.let_go()
            passes.append(one)
        return passes

    def _note(
        self, weights: Sequence[nn.Parameter], place: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Add to the gradients of the task at a place."""
        start = 0
        for w, gradient in zip(weights, gradients, strict=True):
            block = self.segments.blocks[w]
            start = 0 if w is block.weights[0] else start
            columns, start = slice(start, start + w.numel()), start + w.numel()
            if gradient is None or id(w) in self._left_out:
                continue
            if block in self._done:
                raise _SharedError(block)
            if block not in self._rows:
                self._rows[block] = w.new_zeros((len(self), block.stop - block.start))
            row = self._rows[block][place, columns].view_as(w)
            if (w, place) in self._noted:
                row += gradient
            else:
                row.copy_(gradient)
                self._noted.add((w, place))

    def _finish(self, block: Block, z: Tensor, total: Tensor, keep: bool = False) -> None:
        """Add some columns' part of the inner products, and drop the gradients if they are many."""
        self._done.add(block)
        rows = self._rows.get(block)
        if rows is None:
            return
        add_products(total, rows, z[block.start : block.stop])
        if not keep and rows.nbytes > self._left:
            del self._rows[block]
        elif not keep:
            self._left -= rows.nbytes

    def combine(self, v: Tensor) -> Tensor:
        """The z that `products` was asked for last, plus Gᵀv: (p,) for v: (k,)."""
        assert self._known is not None
        z, GGt, Gz = self._known
        out = z.clone()
        v = v.to(GGt)
        with computing_in("fp32", out.device):  # whatever the caller computes in
            for block, rows in self._rows.items():
                out[block.start : block.stop] += v.to(rows.dtype) @ rows
        parts = dict(zip(self.weights, split(out, self.weights), strict=True))
        with torch.enable_grad(), computing_in(self.precision, out.device):
            for place, call in self._again:
                weights = [w for w in call.weights if self._is_dropped(w)]
                if weights and call.gradients:
                    found = call.differentiate(weights, v[place])
                    for w, gradient in zip(weights, found, strict=True):
                        if gradient is not None:
                            parts[w].add_(gradient)
        self._known = out, GGt, Gz + GGt @ v
        return out

    def _is_dropped(self, w: nn.Parameter) -> bool:
        return self.segments.blocks[w] not in self._rows and id(w) not in self._left_out

    @staticmethod
    def bytes_needed(segments: Segments, tasks: int) -> int:
        """What the gradients of so many tasks take: those kept, and those of the largest part."""
        sizes = [sum(w.nbytes for w in module.parameters()) for module in segments.modules]
        total = sum(w.nbytes for w in segments.weights)
        return min(COPIES, tasks) * total + tasks * max([0, *sizes])


class Elsewhere(Unstored, Protocol):
    """A G: (k, p) that is no tensor: not stored, or stored by several processes."""

    def leave_out(self, weights: Iterable[nn.Parameter], /) -> None:
        """Take these parameters' gradients as zero."""
        ...


#: G: (k, p), a tensor or not.
Gradients = Tensor | Elsewhere


def longest(G: Gradients, z: Tensor) -> Tensor:
    """The length of the longest row of G: (); if it is no tensor, found along with Gz."""
    if not isinstance(G, Tensor):
        looked = G.look(z)
        squares = G.products(z)[0].diagonal() if looked is None else looked[1]
        return squares.max().sqrt()
    length: Tensor = torch.linalg.vector_norm(G, dim=1).max()
    return length


def check_segments(objective: Objective, segments: Segments, few: Stack) -> None:
    """Refuse a network that does not give in segments what it gives as a whole, at few examples."""
    weights = segments.weights
    rows = weights[0].new_empty((len(few), sum(w.numel() for w in weights)))
    with evaluating(objective.network), computing_in("fp32", rows.device):
        with torch.enable_grad():
            loop_gradients(objective, few, rows)
        gram = GramGradients(objective, segments, [few])
        GGt, Gg = gram.products(rows[0])
        found = gram.combine(torch.ones_like(Gg))
    expected = rows.double() @ rows.T.double()
    pairs = [(GGt, expected), (Gg, expected[:, 0]), (found, rows[0] + rows.sum(0))]
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())) for a, b in pairs):
        raise ValueError(
            'gradients="gram" does not fit this network, whose modules hand tensors to each other '
            'in other ways than by inputs and outputs: "loop" takes any'
        )


class _SharedError(Exception):
    """A block's gradients were taken to be complete too early."""

    def __init__(self, block: Block) -> None:
        self.block = block


def _gives_more(call: Call) -> bool:
    """Whether what a segment gives takes more memory than its parameters."""
    given = sum(leaf.nbytes for leaf in call.outputs)
    return given > sum(w.nbytes for w in call.weights)


def add_products(total: Tensor, rows: Tensor, z: Tensor) -> None:
    """Add rows rowsᵀ and rows z to total: (k, k + 1), for rows: (k, n) and z: (n,)."""
    k = len(rows)
    if rows.is_cuda and has_triton():
        from gradmem.projection.device import products_on_device

        total += products_on_device(rows, z)
        return
    total += inner_products(rows, z)[:k]
