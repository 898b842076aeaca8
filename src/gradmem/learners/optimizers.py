"""Optimizers and their schedules: making them, their states, and following a changed network."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "OptimizerFactory",
    "ScheduleFactory",
    "follow",
    "load_optimizer",
    "optimizer_state",
    "padded",
    "predecessor",
]

#: Parameters → their optimizer, such as `partial(torch.optim.AdamW, lr=1e-3)`.
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
#: An optimizer → the schedule of its rates, which is advanced after every mini-batch.
ScheduleFactory = Callable[[Optimizer], LRScheduler]

#: Options that say how a step is computed here, and not what it does.
LOCAL = ("capturable", "foreach", "fused", "differentiable")


def optimizer_state(optimizer: Optimizer, schedule: LRScheduler | None) -> dict[str, Any]:
    """An optimizer's state with its kind, and the state of its schedule."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])  # it may be a tensor on a GPU
    return {
        "kind": type(optimizer).__name__,
        "optimizer": state,
        "schedule": None if schedule is None else schedule.state_dict(),
    }


def load_optimizer(
    optimizer: Optimizer, schedule: LRScheduler | None, state: dict[str, Any]
) -> None:
    """Take over what `optimizer_state` gave for an optimizer of the same kind."""
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise ValueError(f"the optimizer must be {state['kind']} as in the state, got {kind}")
    if (state["schedule"] is None) != (schedule is None):
        has = "no schedule" if state["schedule"] is None else "a schedule"
        raise ValueError(f"the state has {has}, other than this learner")
    given = copy.deepcopy(state["optimizer"])
    for group, mine in zip(given["param_groups"], optimizer.param_groups, strict=True):
        group |= {name: mine[name] for name in LOCAL if name in mine}
    optimizer.load_state_dict(given)
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])


def predecessor(weight: Tensor) -> Tensor | None:
    """The parameter that a widened one took the place of, if it is still known."""
    earlier: weakref.ref[Tensor] | None = getattr(weight, "widened_from", None)
    return None if earlier is None else earlier()


def padded(values: Tensor, shape: torch.Size) -> Tensor:
    """Values with zeros added behind them in every dimension, up to a shape."""
    wide = values.new_zeros(shape)
    wide[tuple(slice(n) for n in values.shape)] = values
    return wide


def follow(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Let an optimizer step along these parameters: layers of the network were replaced.

    A parameter that was widened keeps its place and its state, with zeros for what is new. New
    parameters join the first group; those that are gone leave.
    """
    groups = optimizer.param_groups
    current = {id(w) for w in weights}
    successors = {id(old): w for w in weights if (old := predecessor(w)) is not None}
    known: set[int] = set()
    for group in groups:
        params = []
        for old in group["params"]:
            new = old if id(old) in current else successors.get(id(old))
            if new is None:
                optimizer.state.pop(old, None)
                continue
            if new is not old and old in optimizer.state:
                optimizer.state[new] = {
                    name: padded(value, new.shape)
                    if isinstance(value, Tensor) and value.shape == old.shape
                    else value
                    for name, value in optimizer.state.pop(old).items()
                }
            params.append(new)
        group["params"] = params
        known |= {id(w) for w in params}
    groups[0]["params"] += [w for w in weights if id(w) not in known]
