"""Looking at a learner's state before it is taken over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.streams.task import as_description
from gradmem.validation import class_ids, descriptor, non_negative_int

__all__ = ["check_state", "load_weights"]


def check_state(
    state: Mapping[str, Any], settings: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Refuse a state of other settings, or one that would be taken over and fail later.

    `own` is the state that the learner has now.
    """
    for name, mine in own.items():
        for kind in (dict, list):
            if isinstance(mine, kind) and not isinstance(given := state.get(name, mine), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(given).__name__}")
    others = state.get("settings", {})
    for name in {*settings} & {*others}:
        if settings[name] != others[name]:
            raise ValueError(
                f"{name} must be {others[name]!r} as when the state was saved, got "
                f"{settings[name]!r}"
            )
    for name in ("steps", "examples"):
        non_negative_int(name, state[name])
    non_negative_int("skipped", state.get("skipped", 0))
    for name, number in state.get("costs", {}).items():
        non_negative_int(name, number)
    if not isinstance(state.get("classes", False), bool):
        raise TypeError(f"classes must be a bool, got {state['classes']!r}")
    for t, classes in state.get("outputs", {}).items():
        class_ids(f"outputs of task {descriptor(t)!r}", classes)
    for t, description in state.get("descriptions", {}).items():
        as_description(descriptor(t), description)
    if (task := state.get("task")) is not None:
        descriptor(task)
    torch.Generator().set_state(state["randomness"].cpu())
    _refuse_nan(state, "state")


def load_weights(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """`network.load_state_dict(weights)`; ValueError names the first difference between them."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        own = network.state_dict()
        for name in [*own, *weights]:
            mine, saved = (_shape(name, state) for state in (own, weights))
            if mine != saved:
                raise ValueError(
                    f"the network is another one than was saved: {name} has {mine} in this "
                    f"network, and {saved} in the state"
                ) from error
        raise


def _shape(name: str, weights: Mapping[str, Any]) -> str:
    if name not in weights:
        return "no place"
    value = weights[name]
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def _refuse_nan(value: Any, where: str) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point() and bool(value.isnan().any()):
            raise ValueError(f"{where} holds numbers that are none (NaN)")
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{where} is a number that is none (NaN)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(item, f"{where}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            _refuse_nan(item, f"{where}[{i}]")
