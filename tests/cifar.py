"""Small stand-ins for CIFAR-100's files, in the official format."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "cifar-100-python"
#: Class c is in superclass c % 20, so that superclasses are not runs of classes.
SUPERCLASSES = 20


def python2_pickle(value: Any) -> bytes:
    """A pickle as Python 2 writes it at protocol 2: bytes are its strings."""
    out = io.BytesIO()
    puts = 0

    def put() -> None:
        nonlocal puts
        puts += 1
        out.write(b"q" + bytes([puts]) if puts < 256 else b"r" + struct.pack("<I", puts))

    def string(text: bytes) -> None:
        short = len(text) < 256
        out.write(b"U" + bytes([len(text)]) if short else b"T" + struct.pack("<i", len(text)))
        out.write(text)

    def save(value: Any) -> None:
        if isinstance(value, bytes):
            string(value)
            put()
        elif isinstance(value, int):
            out.write(
                b"K" + bytes([value]) if value in range(256) else struct.pack("<ci", b"J", value)
            )
        elif isinstance(value, list):
            out.write(b"]")
            put()
            for start in range(0, len(value), 1000):
                out.write(b"(")
                for item in value[start : start + 1000]:
                    save(item)
                out.write(b"e")
        elif isinstance(value, dict):
            out.write(b"}")
            put()
            out.write(b"(")
            for key, item in value.items():
                save(key)
                save(item)
            out.write(b"u")
        elif isinstance(value, np.ndarray):
            array(value)
        else:
            raise TypeError(type(value))

    def array(value: np.ndarray) -> None:
        kind = value.dtype.str[1:].encode()
        out.write(b"cnumpy.core.multiarray\n_reconstruct\n")
        put()
        out.write(b"cnumpy\nndarray\n")
        put()
        out.write(b"K\0\x85U\x01b\x87R")
        put()
        out.write(b"(K\x01")
        for size in value.shape:
            out.write(b"J" + struct.pack("<i", size))
        out.write({1: b"\x85", 2: b"\x86", 3: b"\x87"}[value.ndim])
        out.write(b"cnumpy\ndtype\n")
        put()
        out.write(b"U" + bytes([len(kind)]) + kind + b"K\0K\x01\x87R")
        put()
        out.write(b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89")
        string(value.tobytes())
        out.write(b"tb")

    out.write(b"\x80\x02")
    save(value)
    out.write(b".")
    return out.getvalue()


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
