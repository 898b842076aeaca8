"""Exponential averages of a network's weights, for predictions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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

#: A part of a module, and the name and the tensor of what is averaged there.
Place = tuple[nn.Module, str, Tensor]


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
    by_part
        Whether n is counted for each part of a module by itself, for modules that are not all
        learned in every step.
    """

    def __init__(self, decay: float | Sequence[float], *, by_part: bool = False) -> None:
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
        self.by_part = by_part
        self._kept: dict[nn.Module, dict[str, list[Tensor]]] = {}
        #: n: () of each part, or of all under None; on the device of the weights, where a graph
        #: counts it.
        self._counts: dict[nn.Module | None, Tensor] = {}

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
        for count, places in self._counted(module):
            live = [tensor.detach() for _, _, tensor in places]
            goes = torch.ones_like(count) if stopped is None else 1 - stopped
            count += goes
            for i, decay in enumerate(self.decays):
                averages = self._tensors(places, i)
                rate = goes * (1 / count.clamp(min=1)).clamp(min=1 - decay)
                if count.device.type == "cpu":
                    torch._foreach_lerp_(averages, live, float(rate))
                    continue
                change = torch._foreach_sub(live, averages)
                torch._foreach_mul_(change, rate.to(live[0].dtype))
                torch._foreach_add_(averages, change)

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """All n, then all averages, each in the order of the module's weights and buffers.

        Those that are not known yet begin with the values there are now, before the first step; a
        weight that was widened has those for what is new.
        """
        places = _places(module)
        averages = [tensor for i in range(len(self)) for tensor in self._tensors(places, i)]
        return [*(count for count, _ in self._counted(module)), *averages]

    def _tensors(self, places: Sequence[Place], i: int) -> list[Tensor]:
        return [self._of(part, name, tensor)[i] for part, name, tensor in places]

    def _counted(self, module: nn.Module) -> list[tuple[Tensor, list[Place]]]:
        """What is averaged in a module, by the n that counts for it."""
        groups: dict[nn.Module | None, list[Place]] = {}
        for place in _places(module):
            groups.setdefault(place[0] if self.by_part else None, []).append(place)
        for part, places in groups.items():
            n = self._counts.get(part, torch.zeros((), dtype=torch.float64))
            self._counts[part] = n.to(places[0][2].device)
        return [(self._counts[part], places) for part, places in groups.items()]

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
        self._counts = {part: n for part, n in self._counts.items() if part in {None, *parts}}

    def bytes_of(self, modules: Iterable[nn.Module]) -> int:
        """What the averages of modules take."""
        parts = {part for module in modules for part in module.modules()}
        own = [tensors for part in parts for tensors in self._kept.get(part, {}).values()]
        return sum(one.numel() * one.element_size() for tensors in own for one in tensors)

    def _began(self, module: nn.Module) -> bool:
        return all(name in self._kept.get(part, {}) for part, name, _ in _places(module))

    def state_of(self, modules: Mapping[Any, nn.Module]) -> dict[str, Any]:
        """How many steps there were, when tasks were learned, and averages, by the modules' keys.

        By part, modules that have learned nothing yet are left out.
        """
        steps, averages = {}, {}
        for key, module in modules.items():
            if not self.by_part or self._began(module):
                n = len(self._counted(module))
                tensors = self.tensors(module)
                steps[key], averages[key] = tensors[:n], tensors[n:]
        return {"steps": steps, "learned": self.learned, "averages": averages}

    @torch.no_grad()
    def load(self, modules: Mapping[Any, nn.Module], state: Mapping[str, Any]) -> None:
        """Take over what `state_of` gave, for the same keys; in place where averages are known."""
        if self.by_part:
            self._kept, self._counts = {}, {}
        for key, given in state["averages"].items():
            if key not in modules and key is None:
                continue  # Multimodal's next input layer, in a state of old
            n = len(self._counted(modules[key]))
            steps = state["steps"]
            # a state of old has one number of steps for all
            counts = [steps] * n if isinstance(steps, Tensor) else steps[key]
            own, given = self.tensors(modules[key]), [*counts, *given]
            if [mean.shape for mean in own] != [mean.shape for mean in given]:
                raise ValueError("the averages in the state must be shaped as the weights")
            for mine, value in zip(own, given, strict=True):
                mine.copy_(value)
        self.learned = dict(state["learned"])


def _places(module: nn.Module) -> list[Place]:
    """What is averaged, each tensor once, with the part it belongs to and its name there."""
    found: dict[int, Place] = {}
    for part in module.modules():
        for name, w in part._parameters.items():
            if w is not None and w.requires_grad:
                found.setdefault(id(w), (part, name, w))
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                found.setdefault(id(buffer), (part, name, buffer))
    return list(found.values())
