"""Full disks, kills, vanished folders, no home, clocks that jump, files that contradict themselves.

Each leaves whole files only, and the user reads one sentence that names the file.
"""

import errno
import functools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress

import pytest

from gradmem.data import DataError, load_mnist
from gradmem.data.fetch import cache_folder
from gradmem.files import write_json
from gradmem.reports import draw_pictures, gather, write_page
from gradmem.reproduction.kept import load
from gradmem.reproduction.page import page_text
from gradmem.reproduction.search import load_searches
from gradmem.runs.compare import compare, run_into
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import find_runs, read_run
from gradmem.runs.write_folder import RunFolder
from gradmem.sweeps import Store

from .papers import GEM, RESULTS, keep_like_published
from .reports import rows_of
from .synthetic import write_run

TINY = {"data": "sample", "n_tasks": 3, "examples_per_task": 30}


def experiment(**changes):
    return Experiment("mnist-rotations", "single", **TINY | changes)


def change(file, **entries):
    write_json(file, json.loads(file.read_text()) | entries)


def command(monkeypatch, *arguments):
    """`gradmem` in this process; its exit code."""
    from gradmem.cli import main

    monkeypatch.setattr(sys, "argv", ["gradmem", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


class Killed(BaseException):
    """What SIGKILL is to a process: nothing of gradmem's catches it."""


# Whole files or none


@pytest.mark.parametrize("name", ["report.html", "table.md", "bars-mnist-rotations.pdf"])
def test_on_a_full_disk_a_reports_files_stay_as_they_were(name, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    out = tmp_path / "out"
    assert command(monkeypatch, "report", tmp_path / "run", "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    change(tmp_path / "run" / "config.json", learner="another")

    replace = os.replace

    def full(source, target):
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert command(monkeypatch, "report", tmp_path / "run", "--out", out) == 1
    assert f"No space left on device: '{out / name}'" in " ".join(capsys.readouterr().err.split())
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert after[name] == before[name]
    assert not [path for path in after if path.startswith(".")]


@pytest.mark.parametrize("write", [draw_pictures, lambda rows, out: write_page(rows, out / "p")])
def test_pictures_and_pages_take_their_place_when_they_are_whole(write, tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    rows = rows_of(tmp_path)

    def kill(*_):
        raise Killed

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(Killed):
        write(rows, tmp_path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_comparison_that_is_killed_does_not_repeat_its_finished_runs(tmp_path):
    made = []

    class Killer:
        """Ends the process in the middle of the second run, the first time."""

        def on_task(self, progress):
            made.append(type(progress.learner).__name__)
            if made == ["Single"] * 3 + ["EWC"]:
                raise Killed

    def again():
        return compare(
            "mnist-rotations", ["single", "ewc"], 1, tmp_path, callbacks=[Killer()], **TINY
        )

    with pytest.raises(Killed):
        again()
    results = again()
    assert made == ["Single"] * 3 + ["EWC"] * 3
    assert {name: runs[0].R.shape for name, runs in results.items()} == {
        "single": (3, 3),
        "ewc": (3, 3),
    }


def test_what_a_killed_process_left_beside_its_files_is_removed(tmp_path):
    run_into(tmp_path, experiment())
    (tmp_path / ".result.json-abc").write_text("{")
    run_into(tmp_path, experiment(), overwrite=True)
    assert not list(tmp_path.glob(".*.json-*"))


# Files that contradict themselves


@pytest.mark.parametrize("name", ["acc", "bwt", "fwt"])
@pytest.mark.parametrize("value", [0.123, None])
def test_a_metric_that_contradicts_its_matrix_is_refused(name, value, tmp_path):
    write_run(tmp_path)
    right = read_run(tmp_path).result[name]
    change(tmp_path / "result.json", **{name: value})
    said = f"result.json has {name} {value}, but its R gives {right}"
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} is not a run's folder: {said}")):
        find_runs([tmp_path])


def test_a_metric_that_was_rounded_is_believed(tmp_path):
    write_run(tmp_path)
    acc = read_run(tmp_path).result["acc"]
    change(tmp_path / "result.json", acc=acc + 1e-8, learned=None, baseline=None, fwt=0.9)
    assert read_run(tmp_path).result["acc"] == acc + 1e-8


def test_a_run_whose_metric_contradicts_its_matrix_is_not_taken_as_finished(tmp_path):
    acc = run_into(tmp_path, experiment()).result["acc"]
    change(tmp_path / "result.json", acc=acc + 0.1)
    assert run_into(tmp_path, experiment()).result["acc"] == acc


def test_a_sweeps_run_whose_metric_contradicts_its_matrix_is_named(tmp_path):
    store, one = Store(tmp_path), experiment()
    with store.claim(one.key):
        store.start(one)
        store.finish(one, one.run().described())
    change(store.folder(one.key) / "result.json", acc=0.999)
    with pytest.raises(ValueError, match=r"seed0.* has acc 0\.999, but its R gives .*Delete it"):
        store.run(one.key)


def test_a_kept_metric_follows_from_its_matrix(tmp_path):
    keep_like_published(tmp_path, [GEM], seeds=1)
    (file,) = tmp_path.iterdir()
    acc = load(tmp_path)[GEM].row.estimate("acc").mean
    file.write_text(re.sub(r'"acc":[0-9.]+', '"acc":0.999', file.read_text()))
    assert load(tmp_path)[GEM].row.estimate("acc").mean == acc


def change_kept(kept, path, value):
    """Replace an entry of what a kept file holds: `path` leads to it."""
    for step in path[:-1]:
        kept = kept[step]
    kept[path[-1]] = value


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("mnist-rotations-gem", ("runs", 0, "seconds"), math.nan),
        ("mnist-rotations-gem", ("runs", 0, "seconds"), None),
        ("mnist-rotations-gem", ("runs", 0, "R", 0, 0), math.inf),
        ("mnist-rotations-gem", ("runs", 0, "R"), [[0.5]]),
        ("mnist-rotations-gem", ("runs", 0, "steps"), "many"),
        ("mnist-rotations-gem", ("benchmark",), "mine"),
        ("mnist-rotations-gem", ("learner",), 1),
        ("mnist-rotations-gem", ("changes",), {"memories": []}),
        ("mnist-rotations-gem", ("settings",), 0.1),
        ("mnist-rotations-gem", ("machines", 0), "a machine"),
        ("mnist-rotations-gem", ("command",), ["gradmem"]),
        ("mnist-rotations-gem", ("machines",), functools.reduce(lambda a, _: [a], range(500), 1)),
        ("grid-mnist-rotations", ("choices", 0, "settings"), {}),
        ("grid-mnist-rotations", ("choices", 0, "test", 0, "acc"), "high"),
        ("grid-mnist-rotations", ("choices", 0, "failed"), "none"),
        ("grid-mnist-rotations", ("machine",), {"torch": "2"}),
    ],
)
def test_a_kept_file_with_a_wrong_entry_is_named(name, path, value, tmp_path):
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    change_kept(kept, path, value)
    (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    read = load_searches if name.startswith("grid") else load
    with pytest.raises(ValueError, match=f"{name}.json is no kept"):
        read(tmp_path)


# Names


def test_names_in_kept_files_break_no_table_and_steer_no_terminal(tmp_path):
    evil = "x\x1b[2J|<b>\n`"
    places = {
        "mnist-rotations-gem": [
            ("settings", "margin_rule"),
            ("command",),
            ("machines", 0, "torch"),
        ],
        "grid-mnist-rotations": [("choices", 0, "learner"), ("command",), ("machine", "torch")],
    }
    for name, paths in places.items():
        for path in paths:
            kept = json.loads((RESULTS / f"{name}.json").read_text())
            change_kept(kept, path, evil)
            (tmp_path / f"{name}.json").write_text(json.dumps(kept))
            with pytest.raises(ValueError, match="text that is not plain") as error:
                page_text(tmp_path)
            assert str(error.value).isprintable()
            assert name in str(error.value)
            (tmp_path / f"{name}.json").unlink()


def test_folders_and_errors_cannot_steer_a_terminal(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a\x1b[2Jb"
    write_run(folder / "good")
    write_run(folder / "bad")
    (folder / "bad" / "result.json").write_text("{")
    assert command(monkeypatch, "report", folder) == 0
    assert command(monkeypatch, "report", folder / "none") == 2
    said = capsys.readouterr()
    assert "a�[2Jb" in said.out
    assert "a�[2Jb" in said.err
    assert "\x1b[2J" not in said.out + said.err
    with pytest.warns(UserWarning, match="a�") as told:
        gather([folder])
    assert "\x1b" not in str(told[0].message)


# Folders, homes and clocks


def remove(folder):
    """Remove a folder into which a checkpoint may be being written."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_that_vanishes_during_a_run_is_made_again_whole(tmp_path):
    out = tmp_path / "run"

    class Remover:
        def on_task(self, progress):
            remove(out)

    run = run_into(out, experiment(), [Remover()])
    assert sorted(path.name for path in out.iterdir() if path.suffix) == [
        "config.json",
        "result.json",
    ]
    assert read_run(out).result == run.result


def test_a_folder_that_becomes_a_file_during_a_run_is_a_clear_error(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    on_task = RunFolder.on_task

    def replace(target, progress):
        remove(out)
        out.write_text("")
        on_task(target, progress)

    monkeypatch.setattr(RunFolder, "on_task", replace)
    size = ["--data", "sample", "--tasks", 2, "--examples", 30, "--learner", "single"]
    assert command(monkeypatch, "run", "--benchmark", "mnist-rotations", *size, "--out", out) != 0
    said = capsys.readouterr().err
    assert str(out) in said
    assert "Traceback" not in said


def test_a_result_is_not_written_into_another_experiments_folder(tmp_path):
    class Other:
        """Takes the folder for another experiment, as if it had been removed in between."""

        def on_task(self, progress):
            for _ in range(5):
                remove(tmp_path)
                with suppress(ValueError):  # a checkpoint was written into it meanwhile
                    return write_run(tmp_path, "gem")

    with pytest.raises(ValueError, match="holds the result of another experiment"):
        run_into(tmp_path, experiment(), [Other()])
    assert read_run(tmp_path).learner == "gem"


@pytest.mark.parametrize("where", ["file/below", "file"])
@pytest.mark.parametrize("what", ["run", "report"])
def test_a_folder_that_cannot_be_made_is_named(what, where, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    write_run(tmp_path / "made")
    options = {
        "run": ["--benchmark", "mnist-rotations", "--learner", "single", "--data", "sample"],
        "report": [tmp_path / "made"],
    }
    assert command(monkeypatch, what, *options[what], "--out", tmp_path / where) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"--out must be a folder, {tmp_path / 'file'} is a file" in said


def test_a_read_only_folder_is_named(tmp_path, monkeypatch, capsys):
    write_run(tmp_path)

    def read_only(prefix, dir):
        raise OSError(errno.EROFS, "Read-only file system", f"{dir}/{prefix}x")

    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    before = sorted(os.listdir(tmp_path))
    assert command(monkeypatch, "report", tmp_path) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"Read-only file system: '{tmp_path / 'table.md'}'" in said
    assert sorted(os.listdir(tmp_path)) == before


def test_without_a_home_data_are_asked_for_in_one_sentence(tmp_path, monkeypatch):
    """As for a user without HOME and without an entry in the system's list of users."""
    for name in ("HOME", "XDG_CACHE_HOME", "GRADMEM_CACHE", "GRADMEM_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="set HOME or GRADMEM_CACHE=FOLDER"):
        cache_folder()
    with pytest.raises(DataError, match="'~/mine' is no folder"):
        load_mnist("~/mine")
    monkeypatch.setenv("GRADMEM_CACHE", "~/cache")
    with pytest.raises(DataError, match="set HOME or GRADMEM_CACHE=FOLDER"):
        cache_folder()
    monkeypatch.setenv("GRADMEM_DATA", "~/data")
    with pytest.raises(DataError, match="GRADMEM_DATA must name a folder, '~/data' is none"):
        load_mnist()
    assert not os.listdir(tmp_path)


def test_a_clock_that_jumps_back_changes_no_result(tmp_path, monkeypatch):
    undisturbed = run_into(tmp_path / "calm", experiment()).result
    clock = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))

    class Killer:
        def on_task(self, progress):
            if progress.task == 1:
                raise Killed

    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_into(out, experiment(), [Killer()])
    for path in out.rglob("*"):
        os.utime(path, (2**32, 2**32))  # in the year 2106
    went_on = run_into(out, experiment()).result
    assert went_on["R"] == undisturbed["R"]
    assert went_on["seconds"] > 0
    assert len(rows_of(tmp_path)) == 1
