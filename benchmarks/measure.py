"""Timing: medians with their spread, on a CPU or a GPU."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradmem as gm

__all__ = ["Times", "bare_products", "evaluate", "machine", "time_it"]


@dataclass(frozen=True)
class Times:
    """Milliseconds: the median, and the range from the 10th to the 90th percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


def time_it(action: Callable[[], object], device: str, repeats: int, inner: int = 1) -> Times:
    """Time `action` called `inner` times in a row, per call."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        for _ in range(inner):
            action()
        _wait(device)
        times.append((time.perf_counter() - start) / inner * 1e3)
    times.sort()
    tenth = len(times) // 10
    return Times(times[len(times) // 2], times[tenth], times[-1 - tenth])


def bare_products(k: int, m: int, device: str, sizes: tuple[int, ...] = (784, 100, 100, 10)):
    """The matrix products that the gradients of k tasks with m memories consist of, and no more.

    Forward and backward through all layers of an MLP, into memory that is there already.
    """
    pairs = list(itertools.pairwise(sizes))
    weights = [torch.rand(n_out, n_in, device=device) for n_in, n_out in pairs]
    inputs = [torch.rand(k * m, n, device=device) for n in sizes[:-1]]
    grads = [torch.rand(k * m, n, device=device) for n in sizes[1:]]
    outputs = [torch.empty(k * m, n, device=device) for n in sizes[1:]]
    below = [torch.empty(k * m, n, device=device) for n in sizes[:-1]]
    rows = [torch.empty(k, n_out, n_in, device=device) for n_in, n_out in pairs]

    def products() -> None:
        for x, w, y in zip(inputs, weights, outputs, strict=True):
            torch.mm(x, w.T, out=y)
        for grad, w, x in list(zip(grads, weights, below, strict=True))[1:]:
            torch.mm(grad, w, out=x)
        for grad, x, row in zip(grads, inputs, rows, strict=True):
            torch.bmm(grad.view(k, m, -1).mT, x.view(k, m, -1), out=row)

    return products


def machine(device: str) -> str:
    name = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    text = f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if device == "cuda":
        text = f"{torch.cuda.get_device_name()}, host {text}"
    return f"{text}; torch {torch.__version__}, gradmem {gm.__version__}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def evaluate(learner: Any, continuum: gm.Continuum) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Test accuracies on all tasks: (T,)."""
    pairs = [(t, *test[:]) for t, test in continuum.tests.items()]
    return np.array([float((learner.predict(x, t) == y).float().mean()) for t, x, y in pairs])
