"""Reading one IDX file, the format of MNIST and of its many variants."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["DataError", "read_idx"]

#: The format's code for unsigned bytes, the only type that image and label files use.
UNSIGNED_BYTE = 0x08


class DataError(RuntimeError):
    """Data that could not be found, fetched or read; the message says what to do."""


def read_idx(path: Path, ndim: int) -> Tensor:
    """The array in an IDX file of unsigned bytes.

    An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as four
    big-endian bytes, and then exactly as many values as the dimensions call for.

    Parameters
    ----------
    path
        The file, gzipped if its name ends in `.gz`.
    ndim
        How many dimensions it must have: 3 for images, 1 for labels.

    Returns
    -------
    Tensor
        uint8, of `ndim` dimensions.

    Raises
    ------
    DataError
        If the file cannot be read or is anything but such an array, whole and with nothing after.
    """
    content = _content(path)
    start = 4 + 4 * ndim
    if len(content) < start:
        raise DataError(
            f"{path} is too short: {len(content)} bytes, but an IDX header of "
            f"{ndim} dimensions has {start}"
        )
    if content[:2] != b"\0\0":
        raise DataError(
            f"{path} is not an IDX file: it starts with 0x{content[:4].hex()}, "
            f"not with 0x0000{UNSIGNED_BYTE:02x}{ndim:02x}"
        )
    if content[2] != UNSIGNED_BYTE:
        raise DataError(
            f"{path} holds values of type 0x{content[2]:02x}; "
            f"only unsigned bytes (0x{UNSIGNED_BYTE:02x}) are read"
        )
    if content[3] != ndim:
        raise DataError(f"{path} has {content[3]} dimensions; expected {ndim}")

    # Python's integers: a damaged header may name more values than 64 bits can count.
    shape = struct.unpack(f">{ndim}I", content[4:start])
    values, expected = len(content) - start, math.prod(shape)
    if values != expected:
        what = "is truncated" if values < expected else "has trailing bytes"
        size = " x ".join(map(str, shape))
        raise DataError(
            f"{path} {what}: its header says {size} = {expected} values, it has {values}"
        )
    # A copy, because a tensor must not share the read-only memory of `bytes`.
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            return stream.read()
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise DataError(f"{path} cannot be read: {error}") from error
