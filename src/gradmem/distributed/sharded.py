"""Under FSDP2 (`fully_shard`): every process has a shard of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gradmem.distributed.agreement import Past
from gradmem.distributed.passes import loss_of_nothing, part_of_loss, unmoved
from gradmem.distributed.processes import Processes
from gradmem.distributed.rows import ShardedColumns
from gradmem.gradients import MemoryGradients, Objective
from gradmem.gradients.flat import flat, parameters, split
from gradmem.gradients.precision import computing_in
from gradmem.memory import Stack

__all__ = ["Sharded"]

#: Examples of a pass that is there for other processes' sake: with batch norm, one is too few.
FEW = 2


class Sharded(Processes):
    """One pass per task, which all processes go through together; FSDP adds up and shards.

    Each process gets its shard of every row of G from FSDP itself, which does so while the backward
    pass goes on; beyond that, only inner products are exchanged.
    """

    passes_alone = False

    def __init__(self, model: nn.Module) -> None:
        self.network = model
        weights = parameters(model)
        first = weights[0]
        assert isinstance(first, DTensor)
        mesh = first.device_mesh
        for w in weights:
            if not isinstance(w, DTensor) or w.device_mesh != mesh or mesh.ndim != 1:
                raise ValueError(
                    "all parameters must be sharded over one mesh of one dimension: call "
                    "fully_shard(model, mesh=init_device_mesh(device, (processes,))), got "
                    f"{getattr(w, 'device_mesh', 'a parameter that is not sharded')}"
                )
        super().__init__(mesh.get_group())

    def gradients(self, engine: MemoryGradients, past: Past) -> ShardedColumns:
        weights = parameters(self.network)
        mine = self.local(weights)
        ends = torch.tensor([0, *(part.numel() for part in mine)]).cumsum(0).tolist()
        rows = mine[0].detach().new_empty((len(past), ends[-1]))
        shares = past.shares[self.rank].tolist()
        for t, share, row in zip(past.tasks, shares, rows, strict=True):
            if share:
                (one,) = past.stacks([t])
                self._pass(engine, partial(part_of_loss, share=share * self.size), one, row)
            else:
                with unmoved(self.network):
                    self._pass(engine, partial(loss_of_nothing, most=FEW), past.spare(), row)
        places = {w: slice(*ends[i : i + 2]) for i, w in enumerate(weights)}
        return ShardedColumns(self.collectives, past.tasks, rows, places)

    def _pass(
        self,
        engine: MemoryGradients,
        loss: Callable[[Objective, Stack], Tensor],
        one: Stack,
        out: Tensor,
    ) -> Tensor:
        """Write this process's shard of the gradient of all processes' losses' mean into out."""
        weights = parameters(self.network)
        with self._no_gradients(weights), computing_in(engine.precision, out.device):
            with torch.enable_grad():
                found = loss(engine.objective, one)
                found.backward()
            out.copy_(self.gradient(weights))
        return found.detach()

    @contextmanager
    def _no_gradients(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Without the `.grad`s that there are; they come back."""
        before = [w.grad for w in weights]
        for w in weights:
            w.grad = None
        try:
            yield
        finally:
            for w, grad in zip(weights, before, strict=True):
                w.grad = grad

    def with_batch(
        self, engine: MemoryGradients, past: Past, batch: Stack
    ) -> tuple[ShardedColumns, Tensor, Tensor]:
        assert past.batch is not None
        share = float(past.batch[self.rank]) / float(past.batch.sum())
        G = self.gradients(engine, past)  # the batch goes last: running statistics end with it
        g = G.rows.new_empty(G.rows.shape[1])
        loss = self._pass(engine, partial(part_of_loss, share=share * self.size), batch, g)
        return G, g, self._agreed_loss(loss, g)

    def backward(self, loss: Tensor, n: int, weights: Sequence[nn.Parameter]) -> Tensor:
        part = loss * (self.share(n) * self.size)
        part.backward()
        g = self.gradient(weights)
        return self._agreed_loss(part, g)

    def _agreed_loss(self, part: Tensor, g: Tensor) -> Tensor:
        """The mean loss: (), not finite if a gradient is not finite in some process's shard."""
        mean = part.detach().double() / self.size + g.double().sum() * 0.0
        return self.collectives.sum(mean, "g").to(g.dtype)

    def settle(self) -> None:
        """Shard parameters that FSDP left whole after a pass without a backward pass."""
        for part in self.network.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_shard(one.detach()) for one in tensors]

    def set_gradient(self, weights: Sequence[nn.Parameter], g: Tensor) -> None:
        for w, part in zip(weights, split(g, self.local(weights)), strict=True):
            assert isinstance(w, DTensor)
            w.grad = DTensor.from_local(
                part, w.device_mesh, w.placements, shape=w.shape, stride=w.stride()
            )

    def gradient(self, weights: Sequence[nn.Parameter]) -> Tensor:
        shards = [None if w.grad is None else self.local([w.grad])[0] for w in weights]
        return flat(shards, self.local(weights))

    def length(self, z: Tensor) -> Tensor:
        own = torch.linalg.vector_norm(z, dtype=torch.float64).square()
        return self.collectives.sum(own, "inner products").sqrt().to(z.dtype)

    def agree(self, number: Tensor) -> Tensor:
        own = number.detach().clone().to(self.collectives.device)
        return self.collectives.sum(own, "inner products")

    def full(self, state: Any) -> Any:
        if isinstance(state, DTensor):
            return state.full_tensor()
        if isinstance(state, dict):
            return {key: self.full(value) for key, value in state.items()}
        if isinstance(state, tuple | list):
            return type(state)(self.full(value) for value in state)
        return state

    def sharded(self, state: Any, owner: Any) -> Any:
        if isinstance(owner, nn.Module):
            like = owner.state_dict()
            return {key: _sharded_as(like.get(key), value) for key, value in state.items()}
        if isinstance(owner, Optimizer):
            weights = [w for group in owner.param_groups for w in group["params"]]
            parts = {
                i: {name: _sharded_as(weights[i], value) for name, value in part.items()}
                for i, part in state["state"].items()
            }
            return {**state, "state": parts}
        return state


def _shard(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_as(like: Any, value: Any) -> Any:
    """A whole tensor as a shard, if it is like one that is sharded."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
