"""Which GPU is the current one, what it has, and whether kernels of our own can run on it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["current_device", "has_triton", "is_recording", "total_memory"]


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch's builds for GPUs."""
    return importlib.util.find_spec("triton") is not None


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: CUDA graphs and kernels run on that one. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def total_memory(device: torch.device) -> int:
    """The bytes of memory that a device has, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
