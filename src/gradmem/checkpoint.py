"""States in one file that executes nothing when it is read.

A checkpoint is a safetensors file: tensors, and in its metadata a format version, a checksum and
the structure around the tensors as JSON. It is written beside its place, flushed and renamed, so
that there is always a whole one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.files import replace_whole
from gradmem.version import __version__

__all__ = ["FORMAT", "CheckpointError", "load_state", "previous_of", "save_state"]

#: Rises when a reader of the former format could not read a file.
FORMAT = 1
#: The name by which a file is known to be one of ours.
KIND = "gradmem checkpoint"
#: Names of what is neither a number, a text nor nothing, in the JSON.
TENSOR, DICT, LIST, TUPLE, FLOAT = "tensor", "dict", "list", "tuple", "float"
#: Deepest structure that is read or written.
DEPTH = 50


class CheckpointError(ValueError):
    """A state that cannot be saved, or a file that cannot be loaded; says which and why."""


def save_state(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    about: str,
    keep: Path | None = None,
) -> None:
    """Write a state: dicts, lists and tuples of tensors, numbers and texts.

    Parameters
    ----------
    path
        The file. What was there stays until the new file is whole.
    state
        Keys of dicts may be task descriptors: texts, numbers, or tuples of them.
    about
        What it is the state of; `load_state` refuses to take it for something else.
    keep
        Where the file that was there is moved when the new one is whole; left out, it is replaced.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(state, tensors, "the state", 0), allow_nan=False)
    metadata = {
        "kind": KIND,
        "format": str(FORMAT),
        "about": about,
        "gradmem": __version__,
        "torch": torch.__version__,
        "state": text,
        "checksum": _checksum(text, tensors),
    }
    try:
        replace_whole(Path(path), save(tensors, metadata), keep)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def load_state(path: str | os.PathLike[str], about: str) -> dict[str, Any]:
    """The state in a file that `save_state` wrote, with its tensors on the CPU."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, about)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    text = metadata.get("state", "")
    if metadata.get("checksum") != _checksum(text, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum is another")
    try:
        state = _decoded(json.loads(text), tensors, 0)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {type(state).__name__}, not a state")
    return state


def previous_of(path: Path) -> Path:
    """Where the checkpoint before the one at `path` is kept."""
    return path.with_name(f"previous-{path.name}")


def _check(path: Any, metadata: Mapping[str, str], about: str) -> None:
    if metadata.get("kind") != KIND:
        raise CheckpointError(f"{path} is a safetensors file, but no checkpoint of gradmem")
    version = metadata.get("format", "")
    if not version.isascii() or not version.isdigit() or len(version) > 6:
        raise CheckpointError(f"{path} is damaged: its format is {version[:20]!r}")
    if int(version) > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer gradmem (format {version}, this one reads up to "
            f"{FORMAT}): update gradmem"
        )
    if metadata.get("about") != about:
        other = str(metadata.get("about"))[:100]
        raise CheckpointError(f"{path} must hold the state of {about}, got one of {other}")


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the structure and of the tensors' names, types, shapes and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encoded(value: Any, tensors: dict[str, Tensor], where: str, depth: int) -> Any:
    """The value as JSON, in which a tensor is its name."""
    if depth > DEPTH:
        raise CheckpointError(f"{where} is nested more than {DEPTH} deep")
    if isinstance(value, Tensor):
        return {TENSOR: _named(value, tensors)}
    if _is_scalar(value):
        return _scalar(value)
    if isinstance(value, Mapping):
        items = []
        for key, item in value.items():
            place = f"{where}[{key!r}]"
            items.append([_key(key, where), _encoded(item, tensors, place, depth + 1)])
        return {DICT: items}
    if isinstance(value, tuple | list):
        parts = [
            _encoded(item, tensors, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)
        ]
        return {LIST if isinstance(value, list) else TUPLE: parts}
    raise CheckpointError(f"{where} cannot be saved: {type(value).__name__} {value!r:.100}")


def _key(key: Hashable, where: str) -> Any:
    """A key of a dict as JSON; a task's descriptor may be one."""
    if isinstance(key, tuple):
        return {TUPLE: [_key(part, where) for part in key]}
    if _is_scalar(key):
        return _scalar(key)
    raise CheckpointError(
        f"the descriptor {key!r:.100} ({type(key).__name__}) cannot be saved: descriptors in files "
        "are texts, numbers, or tuples of them"
    )


def _is_scalar(value: Any) -> bool:
    kinds = str | bool | int | float | np.bool_ | np.integer | np.floating
    return value is None or isinstance(value, kinds)


def _scalar(value: Any) -> Any:
    """A number, a text or nothing as JSON."""
    value = value.item() if isinstance(value, np.generic) and not isinstance(value, str) else value
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite else {FLOAT: repr(value)}


def _named(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """The name under which a tensor is stored."""
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous()
    if tensors[name].data_ptr() == tensor.data_ptr():
        tensors[name] = tensors[name].clone()  # the file format wants memory that is not shared
    return name


def _decoded(value: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("something unknown in it")
    ((kind, content),) = value.items()
    if kind == TENSOR:
        return tensors[content]
    if kind == FLOAT:
        if content not in ("nan", "inf", "-inf"):
            raise ValueError("a number that is none")
        return float(content)
    if kind not in (DICT, LIST, TUPLE) or not isinstance(content, list):
        raise ValueError("something unknown in it")
    if kind == DICT:
        pairs = [(key, item) for key, item in content]
        return {
            _decoded(key, {}, depth + 1): _decoded(item, tensors, depth + 1) for key, item in pairs
        }
    items = [_decoded(item, tensors, depth + 1) for item in content]
    return items if kind == LIST else tuple(items)
