"""Small stand-ins for CIFAR-100's files, in the official format."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

FOLDER = "cifar-100-python"
#: Class c is in superclass c % 20, so that superclasses are not runs of classes.
SUPERCLASSES = 20


class _Python2Pickler(pickle._Pickler):
    """Writes bytes and text as Python 2's strings, and counts what it remembers from 1."""

    def save_string(self, value: str | bytes) -> None:
        content, n = value.encode() if isinstance(value, str) else value, len(value)
        self.write(b"U" + bytes([n]) if n < 256 else b"T" + struct.pack("<i", n))
        self.write(content)
        self.memoize(value)

    def put(self, index: int) -> bytes:
        return super().put(index + 1)

    def get(self, index: int) -> bytes:
        return super().get(index + 1)

    dispatch: ClassVar = pickle._Pickler.dispatch | {bytes: save_string, str: save_string}


def python2_pickle(value: Any) -> bytes:
    """A pickle as Python 2 writes it at protocol 2."""
    out = io.BytesIO()
    _Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue().replace(b"numpy._core.", b"numpy.core.")


def batch(n: int, seed: int = 0) -> dict[bytes, Any]:
    """What `train` and `test` hold: n random images, the classes in turn."""
    fine = [i % 100 for i in range(n)]
    data = np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)
    return {
        b"filenames": [b"image_%06d.png" % i for i in range(n)],
        b"batch_label": b"a batch",
        b"fine_labels": fine,
        b"coarse_labels": [c % SUPERCLASSES for c in fine],
        b"data": data,
    }


def meta() -> dict[bytes, Any]:
    return {
        b"fine_label_names": [b"class_%d" % c for c in range(100)],
        b"coarse_label_names": [b"super_class_%d" % c for c in range(SUPERCLASSES)],
    }


def contents(n_train: int = 200, n_test: int = 100, **changed: bytes) -> dict[str, bytes]:
    """The three files."""
    return {
        "train": python2_pickle(batch(n_train)),
        "test": python2_pickle(batch(n_test, seed=1)),
        "meta": python2_pickle(meta()),
    } | changed


def write_cifar(folder: Path, files: Mapping[str, bytes] | None = None) -> Path:
    """The files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (contents() if files is None else files).items():
        (folder / name).write_bytes(content)
    return folder


def tar(
    files: Mapping[str, bytes | tarfile.TarInfo], folder: str = FOLDER, compression: str = "gz"
) -> bytes:
    """The files in an archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}") as archive:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()
