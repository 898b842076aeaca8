"""How long training and evaluation take: on the host's clock, or on a GPU's."""

from __future__ import annotations

import time
from typing import Protocol

import torch

__all__ = ["Clock", "DeviceClock", "WallClock"]


class Clock(Protocol):
    """Adds up the seconds inside `with` blocks."""

    seconds: float

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class WallClock:
    """Adds up the seconds on the wall inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


class DeviceClock:
    """Adds up the seconds in which a GPU is inside `with` blocks, without making it wait.

    The host may be far ahead of the GPU. `seconds` waits for what has been asked of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._start, self._mark()))

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        torch.cuda.synchronize(self._device)
        measured: float = sum(start.elapsed_time(end) for start, end in self._spans)
        return self._before + measured / 1e3

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._before, self._spans = value, []
