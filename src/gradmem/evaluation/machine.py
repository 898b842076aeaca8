"""The machine and the versions that a run is made with."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradmem.version import __version__

__all__ = ["cores", "processor", "versions"]


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, Any]:
    """What a run is made with: the `versions` of a result.json."""
    return {
        "gradmem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
