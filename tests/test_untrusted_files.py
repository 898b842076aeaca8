"""Files that anybody may have written: refused by name, in little memory, and never run."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gradmem.cli import sweep as sweep_cli
from gradmem.data import DataError, fetch, load_cifar100, load_mnist
from gradmem.data.idx import MOST_LABELS
from gradmem.files import MOST_BYTES, MOST_VALUES, read_json, write_json
from gradmem.reproduction.search import load_searches
from gradmem.runs.read_folder import find_runs
from gradmem.sweeps import Store, Sweep, select
from gradmem.sweeps.plan import MOST_RUNS
from tests import cifar
from tests.attack_files import KEPT, READERS
from tests.memory import growth, measured
from tests.synthetic import write_run
from tests.test_data import TINY, idx
from tests.test_fetch import get
from tests.web import Web

GRID = {"mnist-rotations": {"single": {"lr": [0.1]}}}


@measured
def test_a_mutated_file_is_read_or_refused_by_name_whatever_reads_it():
    """A short attack in a process with little memory; recorded ones have 100,000 files a reader."""
    command = [sys.executable, "-m", "tests.attack_files", "all", "150"]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 other errors") == len(READERS)


# JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": ' + b"[" * 100_000, "has lists nested too deeply"),
        (b'{"a": 1e999}', "has a number that is too large"),
        (b'{"a": -' + b"9" * 400 + b"}", "has a number that is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not whole"),
        (b'{"a": NaN}', "is not whole: NaN is no number"),
        (b'{"a": "\xff"}', "is not whole: 'utf-8'"),
        ('{"a": 1}'.encode("utf-16"), "is not whole: 'utf-8'"),
        (b"[1]", "has no dictionary"),
        (b"", "is not whole"),
    ],
)
def test_json_that_cannot_be_used_is_one_sentence_with_the_files_name(tmp_path, content, says):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} {says}")) as caught:
        read_json(path)
    assert type(caught.value) is ValueError


@measured
def test_a_json_file_cannot_fill_the_memory(tmp_path):
    (tmp_path / "long.json").write_bytes(b" " * (MOST_BYTES + 1))
    (tmp_path / "many.json").write_bytes(b'{"a": [' + b"{}," * MOST_VALUES + b"0]}")
    code = f"""
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        read_json(path)
    except ValueError as error:
        assert "is too large: at most" in str(error)
    else:
        raise AssertionError(path)
"""
    assert growth("from gradmem.files import read_json", code) < 2 * MOST_BYTES


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes in folders")
def test_a_pipe_in_a_runs_folder_is_not_waited_for(tmp_path):
    write_run(tmp_path)
    (tmp_path / "result.json").unlink()
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(ValueError, match=r"result\.json is no file"):
        find_runs([tmp_path])


# Sweeps and grids -----------------------------------------------------------------------------


def test_a_grid_is_counted_before_it_is_made():
    """10⁹ settings in a few kilobytes; the list of them would take a terabyte."""
    values = [i / 1000 + 0.001 for i in range(1000)]
    grid = {"lr": values, "margin": values, "memories": list(range(1, 1001))}
    assert len(json.dumps(grid)) < 30_000
    says = rf"at most {MOST_RUNS:,} runs; these grids and seeds make 3,000,000,003: try fewer"
    with pytest.raises(ValueError, match=says):
        Sweep({"mnist-rotations": {"gem": grid}})
    Sweep({"mnist-rotations": {"gem": {"lr": values, "memories": [5, 10]}}})


TRAP = "from pathlib import Path\nPath('sprung').touch()\nclass Trap: observe = predict = None\n"


@pytest.mark.parametrize("name", ["trap:Trap", "trap.py:Trap", "timeit:timeit"])
def test_code_that_a_file_names_is_not_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("trap.py").write_text(TRAP)
    grid = {name: {"setup": ["open('sprung', 'w')"]}}
    write_json(Path("grid.json"), grid)
    with pytest.raises(ValueError, match=r"grid\.json is no grid: it names .* --learners"):
        sweep_cli._grid("mnist-rotations", "grid.json", None, [])
    for grids in ({"mnist-rotations": grid}, {name: GRID["mnist-rotations"]}):
        write_json(Path("sweep.json"), {"grids": grids})
        with pytest.raises(ValueError, match=r"sweep\.json cannot be read: it names"):
            select(tmp_path)
    assert not Path("sprung").exists()
    assert "trap" not in sys.modules


def test_a_sweep_whose_common_part_is_wrong_is_refused_when_it_is_read(tmp_path):
    for common, says in (
        ({"data": {}}, "'data' in common must be"),
        ({"n_tasks": 0}, "n_tasks must be at least 1"),
        ({"device": "no such"}, "device 'no such' cannot be used here"),
        (3, "common must be"),
    ):
        write_json(tmp_path / "sweep.json", {"grids": GRID, "common": common})
        with pytest.raises(ValueError, match=rf"sweep\.json cannot be read: {says}"):
            Store(tmp_path).sweep()


# Data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [load_mnist, load_cifar100])
def test_a_folder_whose_name_is_too_long_is_no_folder(read):
    with pytest.raises(DataError, match=r"data must be .*'9999"):
        read("9" * 5000)


def test_labels_are_bounded_before_they_take_eight_bytes_each(tmp_path):
    for name, content in TINY.items():
        (tmp_path / name).write_bytes(content)
    (name,) = (name for name in TINY if name.startswith("train-labels"))
    (tmp_path / name).unlink()
    packed = gzip.compress(idx((MOST_LABELS + 1,), b"") + bytes(MOST_LABELS + 1), 1)
    (tmp_path / f"{name}.gz").write_bytes(packed)
    with pytest.raises(DataError, match=rf"{name}\.gz is too large: .* at most 16777216 are read"):
        load_mnist(tmp_path)


@measured
def test_no_memory_is_taken_for_values_that_a_file_has_no_room_for(tmp_path):
    (tmp_path / "array").write_bytes(idx((2**10, 2**10, 2**10), bytes(9)))
    (tmp_path / "array.gz").write_bytes(gzip.compress(idx((2**10, 2**10, 2**10), bytes(9))))
    code = f"""
import resource
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        read_idx(path, ndim=3)
    except DataError as error:
        assert "is truncated" in str(error)
"""
    imports = "from gradmem.data import DataError\nfrom gradmem.data.idx import read_idx"
    assert growth(imports, code) < 1 << 26


def test_an_xz_archive_cannot_ask_for_gigabytes(tmp_path):
    content = bytearray(lzma.compress(cifar.tar(cifar.contents(2, 1), compression="")))
    block = slice(12, 12 + 4 * (content[12] + 1))  # after the stream's header: the block's
    made = content[block]
    made[4] = 38  # a dictionary of 2 GiB
    made[-4:] = struct.pack("<I", zlib.crc32(made[:-4]))
    content[block] = made
    (tmp_path / "cifar-100-python.tar.xz").write_bytes(content)
    with pytest.raises(DataError, match=r"tar\.xz cannot be read: Memory usage limit exceeded"):
        load_cifar100(tmp_path)


def test_an_xz_archive_with_something_after_its_end_is_refused(tmp_path):
    content = lzma.compress(cifar.tar(cifar.contents(2, 1), compression=""))
    path = tmp_path / "cifar-100-python.tar.xz"
    for bad, says in ((content + b"!", "it goes on after its end"), (content[:-30], "truncated")):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=rf"tar\.xz cannot be read: .*{says}"):
            load_cifar100(tmp_path)


def test_a_server_cannot_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(fetch, "MOST_BYTES", 1 << 17)
    web = Web()
    try:
        with pytest.raises(DataError, match="wrong content, it has more than 131,072 bytes"):
            get(web.mirror("huge", dict.fromkeys(TINY, bytes(1 << 20))))
    finally:
        web.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


# Kept results ---------------------------------------------------------------------------------


def test_a_kept_search_with_an_acc_whose_square_overflows_is_refused(tmp_path):
    path = tmp_path / "grid-mnist-rotations.json"
    found = json.loads((KEPT / path.name).read_text())
    found["choices"][0]["test"][0]["acc"] = 1e300
    write_json(path, found)
    with pytest.raises(ValueError, match=rf"{path} is no kept search: single has an acc that is"):
        load_searches(tmp_path)
