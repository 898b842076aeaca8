"""Reading files of a tar archive where it lies, whole or in parts."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from gradmem.data.idx import DataError

__all__ = ["read_members"]

CHUNK = 1 << 16


def read_members(paths: Sequence[Path], names: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of these names, in the order they lie in the archive, in one pass over it.

    Nothing is written to disk, and members of other names, links and folders are passed over.

    Parameters
    ----------
    paths
        The archive, plain, gzipped or xz-compressed; or its parts, in order.
    names
        What to read. Each file is to be read before the next is asked for.

    Raises
    ------
    DataError
        If some file is not there.
    OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError
        If the archive is damaged; at the end at the latest, where its checksum stands.
    """
    wanted = set(names)
    with ExitStack() as opened:
        joined = opened.enter_context(io.BufferedReader(_Joined(paths), CHUNK))
        plain = opened.enter_context(_decompressed(joined))
        tar = opened.enter_context(tarfile.open(fileobj=plain, mode="r|"))
        for member in tar:
            name = member.name.removeprefix("./")
            stream = tar.extractfile(member) if name in wanted and member.isfile() else None
            if stream is not None:
                wanted.remove(name)
                yield name, stream
        while plain.read(CHUNK):
            pass
    if wanted:
        raise DataError(f"{paths[0]} has no {', '.join(sorted(wanted))}")


def _decompressed(
    stream: io.BufferedReader[_Joined],
) -> io.BufferedReader[_Joined] | gzip.GzipFile | lzma.LZMAFile:
    start = stream.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(stream)
    return stream


class _Joined(io.RawIOBase):
    """Several files as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._file: io.FileIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._file or self._paths:
            if self._file is None:
                self._file = io.FileIO(self._paths.pop(0))
            if n := self._file.readinto(buffer):
                return n
            self._file.close()
            self._file = None
        return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
