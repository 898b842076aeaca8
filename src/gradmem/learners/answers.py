"""What a network answered for examples when they were stored, beside their labels in the memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradmem.memory import EpisodicMemory
from gradmem.trees import Tree

__all__ = ["fitted", "labelled"]


def labelled(y: Tree, name: str, answers: Any) -> dict[str, Tree]:
    """`y` with answers (n, outputs) under a name, as a memory keeps both."""
    if not isinstance(answers, Tensor) or answers.ndim != 2:
        shape = tuple(answers.shape) if isinstance(answers, Tensor) else type(answers).__name__
        raise TypeError(f"the network must give outputs (n, outputs) to be kept, got {shape}")
    return {"label": y, name: answers.detach()}


def fitted(memory: EpisodicMemory, name: str, n: int, value: float) -> EpisodicMemory:
    """The memory, or a copy whose answers have n outputs, with `value` for those that are new.

    For a network that got wider.
    """
    widths = {dict(kind_y)[name][0][-1] for _, kind_y in memory.kinds}
    if widths <= {n}:
        return memory
    state = copy.deepcopy(memory.state_dict())
    state["tasks"] = {
        t: (x, y | {name: F.pad(y[name], (0, n - y[name].shape[1]), value=value)}, *rest)
        for t, (x, y, *rest) in state["tasks"].items()
    }
    device = next((y["label"].device for _, y, *_ in state["tasks"].values()), torch.device("cpu"))
    other = memory.holding({})
    other.load_state_dict(state, device)
    return other
