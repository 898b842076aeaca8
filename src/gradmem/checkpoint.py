"""States in one file that executes nothing when it is read.

A checkpoint is a safetensors file: tensors, and in its metadata a format version, a checksum and
the structure around the tensors as JSON. It is written beside its place, flushed and renamed, so
that there is always a whole one. Who saves again and again can leave large tensors that stay the
same to `Parts`: files beside it that are written once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.files import replace_whole
from gradmem.version import __version__

__all__ = [
    "FORMAT",
    "CheckpointError",
    "Copied",
    "Parts",
    "copied",
    "load_state",
    "previous_of",
    "save_state",
]

#: Rises when a reader of the former format could not read a file. Files of format 1 are read, too.
FORMAT = 2
#: The name by which a file is known to be one of ours.
KIND, PART = "gradmem checkpoint", "a part of a checkpoint"
#: Names of what is neither a number, a text nor nothing, in the JSON.
TENSOR, DICT, LIST, TUPLE, FLOAT = "tensor", "dict", "list", "tuple", "float"
#: Deepest structure that is read or written.
DEPTH = 50


class CheckpointError(ValueError):
    """A state that cannot be saved, or a file that cannot be loaded; says which and why."""


@dataclass(frozen=True)
class Copied:
    """A state as it was when it was copied: its structure as JSON, and its tensors on the CPU."""

    text: str
    tensors: dict[str, Tensor]


def copied(state: Mapping[str, Any]) -> Copied:
    """Copy a state: dicts, lists and tuples of tensors, numbers and texts."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(state, tensors, "the state", 0), allow_nan=False)
    return Copied(text, tensors)


def save_state(
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | Copied,
    about: str,
    keep: Path | None = None,
    parts: Parts | None = None,
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
    parts
        Where tensors go that are the same as in the last save.
    """
    from safetensors.torch import save

    state = state if isinstance(state, Copied) else copied(state)
    digests = {name: _digest(tensor) for name, tensor in state.tensors.items()}
    try:
        elsewhere = {} if parts is None else parts.take(state.tensors, digests)
        own = {name: one for name, one in state.tensors.items() if name not in elsewhere}
        metadata = {
            "kind": KIND,
            "format": str(FORMAT),
            "about": about,
            "gradmem": __version__,
            "torch": torch.__version__,
            "state": state.text,
            "parts": json.dumps(elsewhere),
            "checksum": _checksum(state.text, digests),
        }
        replace_whole(Path(path), save(own, metadata), keep)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def load_state(path: str | os.PathLike[str], about: str) -> dict[str, Any]:
    """The state in a file that `save_state` wrote, with its tensors on the CPU."""
    metadata, tensors = _read(Path(path), about)
    try:
        elsewhere = _files(metadata.get("parts", "{}"))
        folder = Path(path).parent
        for file in {file for file, _ in elsewhere.values()}:
            _, found = _read(folder / file, PART)
            tensors |= {name: found[own] for name, (one, own) in elsewhere.items() if one == file}
        text = metadata["state"]
        if metadata["checksum"] != _checksum_of(metadata["format"], text, tensors):
            raise CheckpointError(f"{path} is damaged: its checksum is another")
        state = _decoded(json.loads(text), tensors, 0)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {type(state).__name__}, not a state")
    return state


class Parts:
    """Files beside a checkpoint, with large tensors that were the same in two saves.

    A finished task's memories are such tensors: they are written a second time, into a part, and
    not again. Nothing is written again as long as it saves less than `LEAST` bytes.

    Parameters
    ----------
    folder
        The checkpoint's folder, of which the files `part-….safetensors` are taken over.
    """

    #: Smallest tensor that goes into a part, and smallest part.
    SMALLEST, LEAST = 1 << 16, 1 << 18

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before: set[str] = set()
        self._known: dict[str, str] = {}  # a tensor's digest → the file that has it

    def take(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> dict[str, Any]:
        """Which tensors are in parts, name → (file, name there), after those were written."""
        from safetensors.torch import save

        large = {digests[name]: one for name, one in tensors.items() if one.nbytes >= self.SMALLEST}
        self._known = {
            digest: file for digest, file in self._known.items() if (self.folder / file).exists()
        }
        same = {d: large[d] for d in sorted(large) if d in self._before and d not in self._known}
        if sum(tensor.nbytes for tensor in same.values()) >= self.LEAST:
            file = f"part-{hashlib.sha256(' '.join(same).encode()).hexdigest()[:32]}.safetensors"
            about = {"kind": KIND, "format": str(FORMAT), "about": PART}
            replace_whole(self.folder / file, save(same, about))
            self._known |= dict.fromkeys(same, file)
        self._before = set(large)
        places = {name: self._known.get(digest) for name, digest in digests.items()}
        return {name: (file, digests[name]) for name, file in places.items() if file is not None}

    def adopt(self, checkpoint: Path) -> None:
        """Go on using the parts of a checkpoint that was loaded."""
        self._known |= {digest: file for file, digest in _needed(checkpoint).values()}

    def clean(self, *checkpoints: Path) -> None:
        """Remove the parts that none of these checkpoints needs."""
        needed = {file for path in checkpoints for file, _ in _needed(path).values()}
        for path in self.folder.glob("part-*.safetensors"):
            if path.name not in needed:
                path.unlink(missing_ok=True)


def _needed(path: Path) -> dict[str, tuple[str, str]]:
    """`_files` of a checkpoint; none if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return _files((file.metadata() or {}).get("parts", "{}"))
    except (SafetensorError, OSError, ValueError, TypeError, MemoryError, RecursionError):
        return {}


def _files(text: str) -> dict[str, tuple[str, str]]:
    """Tensors' names → the file beside the checkpoint, and the name there."""
    if not isinstance(given := json.loads(text), dict):
        raise ValueError("its parts are no dictionary")
    found = {name: (file, own) for name, (file, own) in given.items()}
    for file, _ in found.values():
        if not re.fullmatch(r"part-[0-9a-f]{32}\.safetensors", file):
            raise ValueError(f"{file!r:.100} is no part of a checkpoint")
    return found


def _read(path: Path, about: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, about)
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error


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


def _checksum(text: str, digests: Mapping[str, str]) -> str:
    """SHA-256 of the structure and of the tensors' names and contents."""
    lines = [f"{name} {digest}" for name, digest in sorted(digests.items())]
    return hashlib.sha256("\n".join([text, *lines]).encode()).hexdigest()


def _checksum_of(version: str, text: str, tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a file's contents in a format's own way."""
    if version != "1":
        return _checksum(text, {name: _digest(tensor) for name, tensor in tensors.items()})
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
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
