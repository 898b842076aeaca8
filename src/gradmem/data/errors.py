"""The error of data that cannot be used."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DAMAGE", "DataError", "damage_named"]

#: What the standard library and numpy raise when a file is damaged.
DAMAGE = (
    OSError,  # also gzip.BadGzipFile
    EOFError,
    ValueError,
    KeyError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class DataError(RuntimeError):
    """Data that could not be found, fetched or read; the message says what to do."""


@contextmanager
def damage_named(what: object) -> Iterator[None]:
    """Raise errors of `DAMAGE` as a `DataError` that says that `what` cannot be read."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(f"{what} cannot be read: {error}") from error
