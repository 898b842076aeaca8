"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["plain", "write_json", "write_whole"]


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    write_whole(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that the file is either the old one or the whole new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if sys.platform != "win32":
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def plain(value: Any) -> Any:
    """`value` as JSON can hold it.

    Arrays and tensors become lists, numbers that are not finite null, and other objects (a
    function, a module) their names.

    Examples
    --------
    >>> plain({"R": np.array([[0.5, np.nan]]), 3: (1, 2)})
    {'R': [[0.5, None]], '3': [1, 2]}
    >>> plain({"lr": 0.1, "loss": torch.nn.functional.mse_loss, "clip": torch.tensor(1.0)})
    {'lr': 0.1, 'loss': 'mse_loss', 'clip': 1.0}
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    # Without the address in memory, which is another one in every run.
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
