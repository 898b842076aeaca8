"""Small sweeps for tests, and what their folders hold."""

import os
import subprocess
import sys
from collections import Counter

from gradmem.runs.read_folder import find_runs
from gradmem.sweeps import (
    Store,
    Sweep,
)

TINY = {"data": "sample", "n_tasks": 2, "examples_per_task": 40}
TWO = {"mnist-rotations": {"single": {"lr": [0.01, 0.1]}}}


def tiny(**changes):
    return Sweep(**({"grids": TWO, "seeds": (0,), "common": TINY} | changes))


def events(folder):
    return Counter(entry["event"] for entry in Store(folder).log())


def results(folder):
    """Key → the numbers of each finished run, without its times."""
    found = {}
    for run in find_runs([folder]):
        times = [name for name in run.result if name.startswith("seconds")]
        numbers = {name: value for name, value in run.result.items() if name not in times}
        found[run.folder.name] = numbers
    return found


def assert_nothing_finished_twice(folder):
    finished = set()
    for entry in Store(folder).log():
        assert entry["key"] not in finished, f"{entry} after it had finished"
        if entry["event"] in ("finished", "failed"):
            finished.add(entry["key"])
    return finished


def command(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "150", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gradmem", "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def said_by(process, code=0):
    said = process.communicate(timeout=300)[0]
    assert process.returncode == code, said
    return said
