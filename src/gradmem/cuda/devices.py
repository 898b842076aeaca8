"""Which GPU is the current one, what it has, and whether kernels of our own can run on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["current_device", "has_triton", "is_recording", "side_by_side", "total_memory"]

#: Streams for what can be done side by side on a GPU: more gain nothing on an H200.
STREAMS = 4


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch's builds for GPUs."""
    return importlib.util.find_spec("triton") is not None


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: CUDA graphs and kernels run on that one. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def side_by_side(work: Callable[[int], None], n: int, device: torch.device) -> None:
    """Call work(0) to work(n − 1), which do not depend on each other; on a GPU on several streams.

    What they start is done, for what comes after it on the current stream, when this returns.
    """
    if device.type != "cuda" or n == 1:
        for i in range(n):
            work(i)
        return
    current, streams = torch.cuda.current_stream(device), _streams(device)
    for stream in streams:
        stream.wait_stream(current)
    try:
        for i in range(n):
            with torch.cuda.stream(streams[i % len(streams)]):
                work(i)
    finally:  # what was started before an error must not run on beside what comes after it
        for stream in streams:
            current.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def total_memory(device: torch.device) -> int:
    """The bytes of memory that a device has, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
