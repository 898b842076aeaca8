"""Reading files of a tar archive, whole or in parts, without unpacking it to disk."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from gradmem.data.errors import DataError

__all__ = ["read_members"]

CHUNK = 1 << 16
#: The most an archive may unpack to; CIFAR-100's unpacks to 186 million bytes.
MOST_BYTES = 1 << 28
#: The most memory for unpacking xz; `xz -9` asks for 65 MiB.
MOST_MEMORY = 1 << 27

Plain = io.BufferedIOBase | gzip.GzipFile


def read_members(paths: Sequence[Path], names: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of these names, in the order of the archive, in one pass over it.

    `paths` are the archive, plain, gzipped or xz-compressed, or its parts in order. Each name has
    at most 100 characters. Read each file before asking for the next. Links, folders and other
    members are skipped. So are extended headers, in pieces: `tarfile.open` would read them into
    memory, whatever their size.

    A missing file is a `DataError`. A damaged archive, or one that unpacks to more than
    `MOST_BYTES`, is an error of `DAMAGE`, at the latest after the last file.
    """
    wanted = set(names)
    left = MOST_BYTES
    with ExitStack() as opened:
        files = [opened.enter_context(io.FileIO(path)) for path in paths]
        plain = opened.enter_context(_decompressed(io.BufferedReader(_Joined(files), CHUNK)))
        for header in iter(partial(plain.read, tarfile.BLOCKSIZE), bytes(tarfile.BLOCKSIZE)):
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            size = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            left = _less(left, len(header) + size)
            stream = io.BufferedReader(_Member(plain, member.size), CHUNK)
            name = member.name.removeprefix("./")
            if name in wanted and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                wanted.remove(name)
                yield name, stream
            while stream.read(CHUNK):
                pass
            plain.read(size - member.size)
        for piece in iter(partial(plain.read, CHUNK), b""):
            left = _less(left, len(piece))
    if wanted:
        raise DataError(f"{paths[0]} has no {', '.join(sorted(wanted))}")


def _less(left: int, size: int) -> int:
    if not 0 <= size <= left:
        raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES:,} bytes")
    return left - size


def _decompressed(stream: io.BufferedReader[_Joined]) -> Plain:
    start = stream.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream)
    if start.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(_Unxz(stream), CHUNK)
    return stream


class _Member(io.RawIOBase):
    """The next `left` bytes of a stream."""

    def __init__(self, stream: Plain, left: int) -> None:
        self._stream, self._left = stream, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        n = self._stream.readinto(buffer[: self._left])
        if n == 0 < self._left:
            raise tarfile.ReadError("it is truncated")
        self._left -= n
        return n


class _Unxz(io.RawIOBase):
    """What an xz file holds. `lzma.LZMAFile` takes as much memory as the file asks for."""

    def __init__(self, stream: io.BufferedReader[_Joined]) -> None:
        self._stream = stream
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._xz.eof:
            packed = self._stream.read(CHUNK) if self._xz.needs_input else b""
            if self._xz.needs_input and not packed:
                raise EOFError("it is truncated")
            if data := self._xz.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)
        if self._xz.unused_data or self._stream.read(1):
            raise lzma.LZMAError("it goes on after its end")
        return 0


class _Joined(io.RawIOBase):
    """Several files as one."""

    def __init__(self, files: Iterable[io.FileIO]) -> None:
        self._files = list(files)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._files:
            if n := self._files[0].readinto(buffer):
                return n
            del self._files[0]
        return 0
