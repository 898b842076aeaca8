"""Kills a sweep again and again, and says what it saw; run by test_sweep_processes.py.

    python kill_sweep.py at-random FOLDER SEED KILLS
    python kill_sweep.py at-each-write FOLDER

torch is imported once, here; every sweep is a fork of this process and begins in no time.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from gradmem.runs.experiment import Experiment
from gradmem.sweeps import InTurn, Store, Sweep, run_sweep

TINY = {"data": "sample", "n_tasks": 2, "examples_per_task": 60}
GRIDS = {"mnist-rotations": {"single": {"lr": [0.01, 0.1]}, "gem": {"lr": [0.01, 0.1]}}}


def fork(action):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            action()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def at_random(folder, seed, kills):
    """Half of the kills at any moment, half while a run is being made."""
    rng = random.Random(seed)
    store = Store(folder)
    sweep = Sweep(GRIDS, seeds=tuple(range(8)), common=TINY)
    hits, changed, known = 0, [], {}
    while hits < kills:
        log = folder / "log.jsonl"
        size = log.stat().st_size if log.exists() else 0
        pid = fork(lambda sweep=sweep: run_sweep(folder, sweep, InTurn()))
        if hits % 2:
            while not (log.exists() and log.stat().st_size > size):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break  # there was nothing left to run
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.08))
        else:
            time.sleep(rng.uniform(0, 0.6))
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # not even a group yet
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            hits += 1
        else:  # it finished before it could be killed: give it more to do
            assert os.WEXITSTATUS(status) == 0, "the sweep ended with an error"
            sweep = replace(sweep, seeds=(*sweep.seeds, len(sweep.seeds)), final_seeds=())
        found = {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("runs/*/result.json")}
        changed += [key for key, written in known.items() if found.get(key) != written]
        known = found
    before = len(known)
    _, status = os.waitpid(fork(lambda: run_sweep(folder, sweep, InTurn())), 0)
    for key, written in known.items():
        if (store.folder(key) / "result.json").stat().st_mtime_ns != written:
            changed.append(key)
    return {"hits": hits, "status": status, "finished_before_the_end": before, "changed": changed}


def at_each_write(folder):
    """Once before and once after each file gets its name, until nothing is left to be killed."""
    grids = {"mnist-rotations": {"single": {"lr": [0.1]}}}
    sweep = Sweep(grids, seeds=(0,), common=TINY)
    sites = []
    rename = os.replace
    for when in ("before", "after"):
        for n in range(100):
            where = folder / f"{when}-{n}"

            def deadly(source, target, count=[0], when=when, n=n):  # noqa: B006 a count per function
                last = count[0] == n
                count[0] += 1
                if last and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, target)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

            def killed(where=where, deadly=deadly):
                os.replace = deadly
                run_sweep(where, sweep, InTurn())

            _, status = os.waitpid(fork(killed), 0)
            if not os.WIFSIGNALED(status):
                break
            _, status = os.waitpid(fork(lambda where=where: run_sweep(where, sweep, InTurn())), 0)
            sites.append({"folder": str(where), "status": status})
    return sites


if __name__ == "__main__":
    mode, where, *numbers = sys.argv[1:]
    Experiment("mnist-rotations", "gem", **TINY)  # the first one imports half of torch
    action = {"at-random": at_random, "at-each-write": at_each_write}[mode]
    print(json.dumps(action(Path(where), *map(int, numbers))))
