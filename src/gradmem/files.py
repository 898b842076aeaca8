"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["plain", "replace_whole", "write_json", "write_whole"]


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    write_whole(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that the file is either the old one or the whole new one."""
    replace_whole(path, text.encode("utf-8"))


def replace_whole(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write a file beside its place, flush it to the disk, and rename it.

    Whatever happens, the file is either the old one or the whole new one. With `keep`, the old one
    is moved there when the new one is whole. An OSError has the name of the file.
    """
    try:
        _replace(path, content, keep)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    _flush_folder(path.parent)


def _replace(path: Path, content: bytes, keep: Path | None) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if sys.platform != "win32":
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _flush_folder(folder: Path) -> None:
    """Let a rename survive a power failure, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
    name = getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return re.sub(r"\s+", " ", name)
