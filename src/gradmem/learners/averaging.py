"""Exponential averages of a network's weights, for predictions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.learners.optimizers import padded
from gradmem.validation import positive

__all__ = ["Averages"]

#: How long an average is to be, of the steps since the task that it predicts was learned: three
#: quarters of its weight then lie on what came after the task, 1 − exp(−1 / 0.7).
SHARE = 0.7


class Averages:
    """θ̄ ← θ̄ + max(1 − decay, 1 / n) (θ − θ̄) after step n.

    The mean of all weights so far, until these are as many as the average is long, some
    1 / (1 − decay) steps; exponential from then on. Of several, a task is predicted with the one
    that fits the time since the task was last learned: a task that is long past with an average
    over much of what came after it, the task at hand with the latest weights.

    Buffers of real numbers, such as the running statistics of batch norm, are averaged as the
    weights are: they belong to the weights that they were measured with. Other buffers, and
    parameters that do not learn, are the network's own.

    Parameters
    ----------
    decay
        Between 0 and 1, both excluded; or several of them.
    """

    def __init__(self, decay: float | Sequence[float]) -> None:
        given = tuple(decay) if isinstance(decay, list | tuple) else (decay,)
        for one in given:
            if positive("average", one) >= 1:
                raise ValueError(f"average must be below 1, got {one!r}")
        if not given or len({*given}) < len(given):
            raise ValueError(f"average must be a decay or several different ones, got {decay!r}")
        #: From the shortest average to the longest.
        self.decays = tuple(sorted(map(float, given)))
        #: Task → the number of steps that had been made when it was last learned.
        self.learned: dict[Hashable, int] = {}
        self._kept: dict[nn.Module, dict[str, list[Tensor]]] = {}
        #: n: (), on the device of the weights, where a graph counts it.
        self._count = torch.zeros((), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.decays)

    def which(self, t: Hashable | None, steps: int) -> int:
        """The average that task t is predicted with after so many steps: the nearest by length.

        A task that was never learned has the shortest; an unknown one, None, is taken for one that
        was learned when half of the steps had been made.
        """
        learned = steps // 2 if t is None else self.learned.get(t, steps)
        wanted = SHARE * max(1, steps - learned)
        far = [abs(math.log((1 - decay) * wanted)) for decay in self.decays]
        return far.index(min(far))

    @torch.no_grad()
    def update(self, module: nn.Module, stopped: Tensor | None = None) -> None:
        """Move the averages towards the module's weights; in place, where a graph finds them.

        If `stopped`: () is 1, they stay.
        """
        live = [tensor.detach() for _, _, tensor in _places(module)]
        self._count = self._count.to(live[0].device)
        goes = torch.ones_like(self._count) if stopped is None else 1 - stopped
        self._count += goes
        for i, decay in enumerate(self.decays):
            averages = self._tensors(module, i)
            rate = goes * (1 / self._count.clamp(min=1)).clamp(min=1 - decay)
            if self._count.device.type == "cpu":
                torch._foreach_lerp_(averages, live, float(rate))
                continue
            change = torch._foreach_sub(live, averages)
            torch._foreach_mul_(change, rate.to(live[0].dtype))
            torch._foreach_add_(averages, change)

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """n, and all averages, each in the order of the module's weights and buffers.

        Those that are not known yet begin with the values there are now, before the first step; a
        weight that was widened has those for what is new.
        """
        averages = [tensor for i in range(len(self)) for tensor in self._tensors(module, i)]
        self._count = self._count.to(averages[0].device)
        return [self._count, *averages]

    def _tensors(self, module: nn.Module, i: int) -> list[Tensor]:
        return [self._of(part, name, tensor)[i] for part, name, tensor in _places(module)]

    @torch.no_grad()
    def _of(self, part: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
        """The averages of one tensor, from the shortest to the longest."""
        own = self._kept.setdefault(part, {})
        known = own.get(name)
        if known is None or known[0].ndim != tensor.ndim:
            own[name] = [tensor.detach().clone() for _ in self.decays]
        elif known[0].shape != tensor.shape:
            there = padded(torch.ones_like(known[0], dtype=torch.bool), tensor.shape)
            wider = [padded(one, tensor.shape) for one in known]
            own[name] = [torch.where(there, one, tensor.detach()) for one in wider]
        elif known[0].device != tensor.device or known[0].dtype != tensor.dtype:
            own[name] = [one.to(tensor) for one in known]
        return own[name]

    @contextmanager
    def standing_in(self, module: nn.Module, i: int) -> Iterator[None]:
        """Average i in the place of the module's weights, without a copy.

        Weights that never learned have none, and stay.
        """
        known = [place for place in _places(module) if place[1] in self._kept.get(place[0], {})]
        live = [(tensor, tensor.data) for _, _, tensor in known]
        for part, name, tensor in known:
            tensor.data = self._of(part, name, tensor)[i]
        try:
            yield
        finally:
            for tensor, values in live:
                tensor.data = values

    def forget_others(self, module: nn.Module) -> None:
        """Forget the averages of layers that the module no longer has."""
        parts = {*module.modules()}
        self._kept = {part: own for part, own in self._kept.items() if part in parts}

    @property
    def bytes(self) -> int:
        """What the averages take."""
        kept = [one for own in self._kept.values() for known in own.values() for one in known]
        return sum(one.numel() * one.element_size() for one in kept)

    def state_of(self, modules: Mapping[Any, nn.Module]) -> dict[str, Any]:
        """How many steps there were, when tasks were learned, and the modules' averages by key."""
        averages = {key: self.tensors(module)[1:] for key, module in modules.items()}
        return {"steps": self._count, "learned": self.learned, "averages": averages}

    @torch.no_grad()
    def load(self, modules: Mapping[Any, nn.Module], state: Mapping[str, Any]) -> None:
        """Take over what `state_of` gave, for the same keys; in place where averages are known."""
        for key, module in modules.items():
            _, *own = self.tensors(module)
            given = state["averages"][key]
            if [mean.shape for mean in own] != [mean.shape for mean in given]:
                raise ValueError("the averages in the state must be shaped as the weights")
            for mine, value in zip(own, given, strict=True):
                mine.copy_(value)
        self._count.copy_(state["steps"])
        self.learned = dict(state["learned"])


def _places(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """What is averaged, each tensor once, with the part it belongs to and its name there."""
    found: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for part in module.modules():
        for name, w in part._parameters.items():
            if w is not None and w.requires_grad:
                found.setdefault(id(w), (part, name, w))
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                found.setdefault(id(buffer), (part, name, buffer))
    return list(found.values())
