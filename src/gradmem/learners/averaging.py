"""An exponential average of a network's weights, for predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.learners.optimizers import padded
from gradmem.validation import positive

__all__ = ["Average"]


class Average:
    """θ̄ ← decay θ̄ + (1 − decay) θ after every step, from the weights at the start on.

    Buffers of real numbers, such as the running statistics of batch norm, are averaged as the
    weights are: they belong to the weights that they were measured with. Other buffers, and
    parameters that do not learn, are the network's own.

    Parameters
    ----------
    decay
        Between 0 and 1, both excluded.
    """

    def __init__(self, decay: float) -> None:
        if positive("average", decay) >= 1:
            raise ValueError(f"average must be below 1, got {decay!r}")
        self.decay = float(decay)
        self._kept: dict[nn.Module, dict[str, Tensor]] = {}

    @torch.no_grad()
    def update(self, module: nn.Module, stopped: Tensor | None = None) -> None:
        """Move the averages towards the module's weights; in place, where a graph finds them.

        If `stopped`: () is 1, they stay.
        """
        live = [tensor.detach() for _, _, tensor in _places(module)]
        averages = self.tensors(module)
        if stopped is None:
            torch._foreach_lerp_(averages, live, 1 - self.decay)
            return
        change = torch._foreach_sub(live, averages)
        torch._foreach_mul_(change, (1 - stopped) * (1 - self.decay))
        torch._foreach_add_(averages, change)

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The averages, in the order of the module's weights and buffers.

        Those that are not known yet begin with the values there are now, before the first step; a
        weight that was widened has those for what is new.
        """
        return [self._of(part, name, tensor) for part, name, tensor in _places(module)]

    @torch.no_grad()
    def _of(self, part: nn.Module, name: str, tensor: Tensor) -> Tensor:
        own = self._kept.setdefault(part, {})
        known = own.get(name)
        if known is None or known.ndim != tensor.ndim:
            own[name] = tensor.detach().clone()
        elif known.shape != tensor.shape:
            there = padded(torch.ones_like(known, dtype=torch.bool), tensor.shape)
            own[name] = torch.where(there, padded(known, tensor.shape), tensor.detach())
        elif known.device != tensor.device or known.dtype != tensor.dtype:
            own[name] = known.to(tensor)
        return own[name]

    @contextmanager
    def standing_in(self, module: nn.Module) -> Iterator[None]:
        """The averages in the place of the module's weights, without a copy.

        Weights that never learned have none, and stay.
        """
        known = [place for place in _places(module) if place[1] in self._kept.get(place[0], {})]
        live = [(tensor, tensor.data) for _, _, tensor in known]
        for part, name, tensor in known:
            tensor.data = self._of(part, name, tensor)
        try:
            yield
        finally:
            for tensor, values in live:
                tensor.data = values

    def forget_others(self, module: nn.Module) -> None:
        """Forget the averages of layers that the module no longer has."""
        parts = {*module.modules()}
        self._kept = {part: own for part, own in self._kept.items() if part in parts}

    def state_of(self, modules: Mapping[Any, nn.Module]) -> dict[Any, list[Tensor]]:
        """The averages of some modules, by the same keys."""
        return {key: self.tensors(module) for key, module in modules.items()}

    def load(self, modules: Mapping[Any, nn.Module], state: Mapping[Any, list[Tensor]]) -> None:
        """Take over averages for the modules, by the same keys; in place where they are known."""
        for key, module in modules.items():
            own = self.tensors(module)
            if [mean.shape for mean in own] != [mean.shape for mean in state[key]]:
                raise ValueError("the averages in the state must be shaped as the weights")
            with torch.no_grad():
                for mine, given in zip(own, state[key], strict=True):
                    mine.copy_(given)


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
