"""Reading one IDX file, the format of MNIST and of its many variants."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradmem.data.errors import DataError, damage_named

__all__ = ["read_idx"]

#: The format's code for unsigned bytes, the only type that image and label files use.
UNSIGNED_BYTE = 0x08
#: The largest array that is read. MNIST has 47 million values, EMNIST 547 million.
MOST_VALUES = 1 << 30
#: The most labels: they take eight bytes each later. EMNIST has 814 thousand.
MOST_LABELS = 1 << 24
#: The most bytes that one byte of a .gz file can stand for.
MOST_UNPACKED = 1032


def read_idx(path: Path, ndim: int) -> Tensor:
    """The array in an IDX file of unsigned bytes.

    An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as four
    big-endian bytes, and then exactly as many values as the dimensions call for. No more than that
    is read, whatever a .gz file unpacks to.

    The file is gzipped if its name ends in `.gz`. It must have `ndim` dimensions: 3 for images, 1
    for labels. A `DataError` says what is wrong with it.
    """
    with (
        damage_named(path),
        gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream,
    ):
        shape = _shape(path, stream.read(4 + 4 * ndim), ndim)
        says = f"its header says {' x '.join(map(str, shape))} = {math.prod(shape)} values"
        most = MOST_LABELS if ndim == 1 else MOST_VALUES
        if math.prod(shape) > most:
            raise DataError(f"{path} is too large: {says}, at most {most} are read")
        size = path.stat().st_size
        if math.prod(shape) > size * (MOST_UNPACKED if path.suffix == ".gz" else 1):
            raise DataError(f"{path} is truncated: {says}, its size is {size} bytes")
        values = np.empty(shape, np.uint8)
        if (found := _fill(values, stream)) < values.size:
            raise DataError(f"{path} is truncated: {says}, it has {found}")
        if stream.read(1):
            raise DataError(f"{path} has trailing bytes: {says}, it has more")
    return torch.from_numpy(values)


def _shape(path: Path, header: bytes, ndim: int) -> tuple[int, ...]:
    if len(header) < 4 + 4 * ndim:
        raise DataError(
            f"{path} is too short: {len(header)} bytes, but an IDX header of "
            f"{ndim} dimensions has {4 + 4 * ndim}"
        )
    if header[:2] != b"\0\0":
        raise DataError(
            f"{path} is not an IDX file: it starts with 0x{header[:4].hex()}, "
            f"not with 0x0000{UNSIGNED_BYTE:02x}{ndim:02x}"
        )
    if header[2] != UNSIGNED_BYTE:
        raise DataError(
            f"{path} holds values of type 0x{header[2]:02x}; "
            f"only unsigned bytes (0x{UNSIGNED_BYTE:02x}) are read"
        )
    if header[3] != ndim:
        raise DataError(f"{path} has {header[3]} dimensions; expected {ndim}")
    return struct.unpack(f">{ndim}I", header[4:])


def _fill(values: NDArray[np.uint8], stream: IO[bytes] | gzip.GzipFile) -> int:
    """Fill `values` from a stream; returns how many values the stream had."""
    flat, found = values.reshape(-1), 0
    while piece := stream.read(min(1 << 20, flat.size - found)):
        flat[found : found + len(piece)] = np.frombuffer(piece, np.uint8)
        found += len(piece)
    return found
