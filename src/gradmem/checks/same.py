"""Whether two states are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["_same"]


def _same(first: Any, second: Any, message: str, path: str = "state") -> None:
    """Assert that two nested states are equal to the last bit."""
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor) and torch.equal(first, second), f"{message}: {path}"
    elif isinstance(first, dict):
        assert isinstance(second, dict) and list(first) == list(second), f"{message}: {path}"
        for key in first:
            _same(first[key], second[key], message, f"{path}[{key!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), f"{message}: {path}"
        for i, (one, other) in enumerate(zip(first, second, strict=True)):
            _same(one, other, message, f"{path}[{i}]")
    else:
        assert first == second, f"{message}: {path}"
