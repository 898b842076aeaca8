"""Learning rates as tensors on a GPU: a recorded step reads what they are when it is replayed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

__all__ = ["Rates", "make_capturable"]


def make_capturable(optimizer: Optimizer) -> None:
    """Let an optimizer's steps be recorded and be left out on a GPU, where it has switches for it.

    Torch's fused steps can be left out; another choice of the user's stands.
    """
    for group in optimizer.param_groups:
        if not group["params"][0].is_cuda:
            continue
        if "capturable" in group:
            group["capturable"] = True
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        if type(optimizer) in (SGD, Adam, AdamW) and not chosen:
            group["fused"] = True


class Rates:
    """The learning rates of optimizers whose steps are recorded.

    As long as they stay the same, they are constants of the recorded steps. From their first change
    on, they are tensors, where the optimizer can read them from there: then a schedule may change
    them in every step.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._known: list[float] = []

    def changed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether rates have changed for the first time: they are tensors from here on."""
        if self._tensors:
            return False
        rates = [float(group["lr"]) for o in optimizers for group in o.param_groups]
        known, self._known = self._known, rates
        return len(known) == len(rates) and known != rates

    def update(self, optimizers: Sequence[Optimizer], as_tensors: bool = False) -> Hashable:
        """What a recorded step depends on: the rates that are not tensors."""
        constants: list[Any] = []
        for i, optimizer in enumerate(optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if (as_tensors or (i, j) in self._tensors) and _reads_tensors(optimizer, group):
                    self._fill((i, j), group)
                else:
                    constants.append(float(group["lr"]))
        return tuple(constants)

    def _fill(self, place: tuple[int, int], group: dict[str, Any]) -> None:
        rate = self._tensors.get(place)
        if rate is None:
            device = group["params"][0].device
            rate = torch.zeros((), dtype=torch.float32, device=device)
            self._tensors[place] = rate
        if group["lr"] is not rate:
            rate.copy_(torch.as_tensor(group["lr"])) if isinstance(group["lr"], Tensor) else (
                rate.fill_(group["lr"])
            )
            group["lr"] = rate


def _reads_tensors(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a recorded step of the optimizer can read its rate from a tensor."""
    if isinstance(optimizer, SGD):
        group["fused"], group["foreach"] = True, False  # the one of its ways that can
        return True
    return bool(group.get("capturable"))
