"""A sweep that several processes share, and that is killed at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from gradmem.runs.read_folder import find_runs
from gradmem.sweeps import (
    InTurn,
    Store,
    run_sweep,
    select,
)

from .sweeps import (
    assert_nothing_finished_twice,
    command,
    events,
    results,
    said_by,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Several processes, and sudden ends ----------------------------------------------------------


def test_two_processes_share_a_sweep_and_run_nothing_twice(tmp_path):
    found = {"mnist-rotations": {"single": {"lr": [0.01, 0.1]}, "gem": {"lr": [0.01, 0.1]}}}
    Store(tmp_path).open(tiny(grids=found, seeds=(0, 1, 2, 3)))
    both = [command(tmp_path, "--workers", 1) for _ in range(2)]
    tables = [said_by(process).split("mean of 4 seeds")[1] for process in both]
    runs = 4 * 4 + 2 * 4
    assert events(tmp_path) == {"started": runs, "finished": runs}
    assert len(assert_nothing_finished_twice(tmp_path)) == runs
    assert tables[0].split("Written")[0] == tables[1].split("Written")[0]


def test_a_run_that_another_process_has_is_waited_for(tmp_path):
    """Here, the other one gives up without a result: its run is then made after all."""
    sweep = tiny()
    key = sweep.experiments()[0].key
    store = Store(tmp_path)
    store.open(sweep)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); "
            "lock.acquire(); print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "locks" / f"{key}.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    assert store.is_claimed(key)
    seen = []

    def on_event(event):
        seen.append(event)
        if event.phase == "selection" and event.done == 1:
            assert event.experiment.key != key
            holder.kill()

    try:
        run_sweep(tmp_path, None, InTurn(), on_event=on_event)
    finally:
        holder.kill()
        holder.communicate()
    assert store.is_finished(key)
    assert [event.done for event in seen if event.phase == "selection"] == [0, 1, 2]


def killed(*arguments):
    script = Path(__file__).with_name("kill_sweep.py")
    process = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


def assert_whole(folder):
    """Every file is whole, and nothing that a killed process left is in the way."""
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    assert [path for path in folder.rglob(".*") if path.is_file()] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_sweep_killed_twenty_times_finishes_and_runs_nothing_twice(tmp_path):
    folder = tmp_path / "sweep"
    seed = time.time_ns() % 2**32
    seen = killed("at-random", folder, seed, 20)
    assert seen["hits"] == 20
    assert seen["status"] == 0
    assert seen["changed"] == [], f"results were written again (seed {seed})"
    assert_whole(folder)
    store = Store(folder)
    sweep = store.sweep()
    keys = {experiment.key for experiment in sweep.experiments()}
    final = [(c.benchmark, c.learner, c.settings) for c in select(folder)]
    keys |= {experiment.key for experiment in sweep.final(final)}
    assert all(store.is_finished(key) for key in keys)
    assert_nothing_finished_twice(folder)
    starts = Counter(entry["key"] for entry in store.log() if entry["event"] == "started")
    assert sum(starts.values()) - len(starts) <= 20  # only what was killed began again
    undisturbed = run_sweep(tmp_path / "undisturbed", sweep, InTurn())
    assert undisturbed.choices == select(folder)
    expected = results(tmp_path / "undisturbed")
    assert {key: results(folder)[key] for key in expected} == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_sweep_killed_at_any_write_finishes_and_runs_nothing_twice(tmp_path):
    sites = killed("at-each-write", tmp_path)
    # sweep.json, two times config.json and result.json, chosen.json; before and after each
    assert len(sites) == 12
    for site in sites:
        folder = Path(site["folder"])
        assert site["status"] == 0
        assert_whole(folder)
        assert_nothing_finished_twice(folder)
        assert len(find_runs([folder])) == 2
        assert (folder / "chosen.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupted_sweep_ends_its_workers_and_says_how_to_go_on(tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"gem": {"lr": [0.01, 0.1]}}')
    out = tmp_path / "sweep"
    options = ["--benchmark", "mnist-rotations", "--grid", grid, "--data", "sample", "--seeds", 1]
    size = ["--tasks", 20, "--examples", 200]
    process = command(*options, *size, "--out", out, "--workers", 2)
    deadline = time.monotonic() + 60
    while events(out)["started"] < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does, to parent and workers
    said = said_by(process, code=130)
    assert f"`gradmem sweep {out}` goes on" in said
    assert "Traceback" not in said
    assert workers_in(out) == []
    assert events(out)["failed"] == 0
    assert not list(out.rglob("failure.json"))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_workers_whose_parent_is_killed_finish_their_runs_and_end(tmp_path):
    Store(tmp_path).open(tiny(grids={"mnist-rotations": {"gem": {"lr": [0.01, 0.03, 0.1, 0.3]}}}))
    process = command(tmp_path, "--workers", 2)
    deadline = time.monotonic() + 60
    while events(tmp_path)["started"] < 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    while workers_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert workers_in(tmp_path) == []
    assert events(tmp_path)["started"] == events(tmp_path)["finished"] >= 1
    run_sweep(tmp_path, None, InTurn())
    assert events(tmp_path) == {"started": 5, "finished": 5}


def workers_in(folder):
    """The processes that ran something and are still there."""
    alive = []
    for pid in {entry["pid"] for entry in Store(folder).log()}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        stat = Path(f"/proc/{pid}/stat")  # an orphan may stay a zombie where nobody collects it
        if not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"):
            alive.append(pid)
    return alive
