"""Files that are written whole or not at all, and JSON files that anybody may have written."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = [
    "check_texts",
    "misfit",
    "plain",
    "read_json",
    "replace_whole",
    "write_json",
    "write_whole",
]

#: The most that is read of a JSON file: bytes, values, and lists or dictionaries in each other.
#: A result with 100,000 points of 20 learning curves has 2 million values, in 40 million bytes.
MOST_BYTES = 1 << 26
MOST_VALUES = 1 << 23
MOST_DEPTH = 20


def read_json(path: Path, name: str | None = None) -> dict[str, Any]:
    """The dictionary in a JSON file; ValueError says what is wrong with a file that has none.

    All numbers in it are finite. A file that is too large is refused before it is parsed. `name` is
    what an error calls the file; left out, its path.
    """
    name = name or str(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{name} is no file")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error
    # A comma or a bracket comes before every value but the first of all.
    if len(content) > MOST_BYTES or sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(
            f"{name} is too large: at most {MOST_BYTES:,} bytes and {MOST_VALUES:,} values are read"
        )
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"{name} has lists nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not whole: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} has no dictionary")
    if problem := _problem(value, MOST_DEPTH):
        raise ValueError(f"{name} has {problem}")
    return value


def misfit(value: Any, shape: Any, name: str = "it") -> str | None:
    """What about a value of a JSON file differs from `shape`, or None.

    A shape is a type, a dictionary of the entries that are needed, or a list of the shape that all
    items must have.

    Examples
    --------
    >>> misfit({"runs": [{"seed": 0}, {"seed": "x"}]}, {"runs": [{"seed": int}]})
    'seed in runs in it must be int, got str'
    """
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        return f"{name} must be {getattr(kind, '__name__', kind)}, got {type(value).__name__}"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list):
        parts = [(item, shape[0], name) for item in value]
    elif isinstance(shape, dict):
        if missing := [key for key in shape if key not in value]:
            return f"{name} has no {', '.join(missing)}"
        parts = [(value[key], shape[key], f"{key} in {name}") for key in shape]
    return next(filter(None, (misfit(*part) for part in parts)), None)


def check_texts(value: Any) -> None:
    """Raise ValueError if a text could be more than text in a page or on a terminal."""
    if isinstance(value, dict):
        check_texts([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            check_texts(item)
    elif isinstance(value, str) and not (value.isprintable() and set(value).isdisjoint("<|`")):
        raise ValueError(f"it has a text that is not plain: {value!a:.100}")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _problem(value: Any, levels: int) -> str | None:
    """What is wrong with a value of a JSON file, if anything is."""
    if isinstance(value, dict | list):
        if levels == 0:
            return "lists nested too deeply"
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, (_problem(part, levels - 1) for part in parts)), None)
    if isinstance(value, int | float) and not -sys.float_info.max <= value <= sys.float_info.max:
        return "a number that is too large"
    return None


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
    >>> from functools import partial
    >>> plain({"optimizer": partial(torch.optim.AdamW, lr=0.001)})
    {'optimizer': 'AdamW(lr=0.001)'}
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
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, partial):
        return _call_text(value)
    # Without the address in memory, which is another one in every run.
    name = getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return re.sub(r"\s+", " ", name)


def _call_text(call: partial[Any]) -> str:
    """A function with some of its arguments, as one would type its call."""
    given = [_argument(value) for value in call.args]
    given += [f"{name}={_argument(value)}" for name, value in call.keywords.items()]
    return f"{plain(call.func)}({', '.join(given)})"


def _argument(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(plain(value))
