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
    "unfollowed",
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
    """Take over what `optimizer_state` gave for an optimizer of the same kind.

    Raises if something in it is not what it should be, found by taking a step and undoing it.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise ValueError(f"the optimizer must be {state['kind']} as in the state, got {kind}")
    if (state["schedule"] is None) != (schedule is None):
        has = "no schedule" if state["schedule"] is None else "a schedule"
        raise ValueError(f"the state has {has}, other than this learner")
    given = copy.deepcopy(state["optimizer"])
    own = optimizer.state_dict()["param_groups"]
    for i, (group, mine) in enumerate(zip(given["param_groups"], own, strict=True)):
        if not isinstance(group["params"], list) or group["params"] != mine["params"]:
            raise ValueError(f"group {i} must be of {len(mine['params'])} parameters, in order")
        _check_like(group, {k: v for k, v in mine.items() if k not in LOCAL}, f"group {i}")
        group |= {name: mine[name] for name in LOCAL if name in mine}
    if unknown := {*given["state"]} - {place for group in own for place in group["params"]}:
        raise ValueError(f"the state is of a parameter that is not there: {min(unknown)!r}")
    if schedule is not None:
        _check_like(state["schedule"], schedule.state_dict(), "schedule")
    optimizer.load_state_dict(copy.deepcopy(given))
    _try_step(optimizer)
    optimizer.load_state_dict(given)
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])


def _check_like(given: Any, mine: Any, where: str) -> None:
    """Refuse a value of another kind than the one that it would replace: a text for a number."""
    number = int | float | Tensor
    for kind in (bool, str, number, dict, list | tuple):
        if isinstance(mine, kind):
            wrong = not isinstance(given, kind) or isinstance(given, bool) != isinstance(mine, bool)
            if wrong or (isinstance(given, Tensor) and given.numel() != 1):
                raise ValueError(f"{where} must be like {mine!r}, got {given!r:.100}")
            break
    if isinstance(mine, dict):
        for key in {*mine} & {*given}:
            _check_like(given[key], mine[key], f"{where}[{key!r}]")
    elif isinstance(mine, list | tuple):
        if len(given) != len(mine):
            raise ValueError(f"{where} must have {len(mine)} values, got {len(given)}")
        for i, (one, other) in enumerate(zip(given, mine, strict=True)):
            _check_like(one, other, f"{where}[{i}]")


@torch.no_grad()
def _try_step(optimizer: Optimizer) -> None:
    """Let an optimizer step along gradients of zero, and put parameters and gradients back."""
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    before = [(w.clone(), w.grad) for w in weights]
    try:
        for w in weights:
            w.grad = torch.zeros_like(w)
        optimizer.step()
    except Exception as error:
        raise ValueError(f"the optimizer cannot step from its state: {error!r}") from error
    finally:
        for w, (value, grad) in zip(weights, before, strict=True):
            w.copy_(value)
            w.grad = grad


def predecessor(weight: Tensor) -> Tensor | None:
    """The parameter that a widened one took the place of, if it is still known."""
    earlier: weakref.ref[Tensor] | None = getattr(weight, "widened_from", None)
    return None if earlier is None else earlier()


def padded(values: Tensor, shape: torch.Size) -> Tensor:
    """Values in a shape: in every dimension with zeros behind them, or without the last ones."""
    wide = values.new_zeros(shape)
    both = tuple(slice(min(sizes)) for sizes in zip(values.shape, shape, strict=True))
    wide[both] = values[both]
    return wide


def follow(
    optimizer: Optimizer, weights: Sequence[nn.Parameter], before: Sequence[nn.Parameter]
) -> None:
    """Let an optimizer step along a network's parameters that are others than `before`.

    A parameter that was widened keeps its place and its state, with zeros for what is new. New
    parameters join the first group; those that are gone leave. What the optimizer had left alone,
    it leaves alone.
    """
    groups = optimizer.param_groups
    current = {id(w) for w in weights}
    successors = {id(old): w for w in weights if (old := predecessor(w)) is not None}
    old_ids = {id(w) for w in before}
    known = {*old_ids, *(id(w) for old, w in successors.items() if old in old_ids)}
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
    groups[0]["params"] += [w for w in weights if id(w) not in known]


def unfollowed(optimizer: Optimizer) -> Callable[[], None]:
    """What gives an optimizer the parameters and the state back that it has now."""
    params = [list(group["params"]) for group in optimizer.param_groups]
    state = {w: copy.deepcopy(own) for w, own in optimizer.state.items()}

    def undo() -> None:
        for group, weights in zip(optimizer.param_groups, params, strict=True):
            group["params"] = weights
        optimizer.state.clear()
        optimizer.state.update(state)

    return undo
