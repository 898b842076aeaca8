"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

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
    """`value` as JSON knows it: arrays as lists, numbers that are not finite as null.

    Examples
    --------
    >>> plain({"R": np.array([[0.5, np.nan]]), 3: (1, 2)})
    {'R': [[0.5, None]], '3': [1, 2]}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
