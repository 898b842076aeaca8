"""Sweeps: many runs that can be interrupted and extended, to choose settings on held-out data.

>>> import tempfile
>>> from gradmem.sweeps import InTurn, Sweep, run_sweep
>>> sweep = Sweep({"mnist-rotations": {"single": {"lr": [0.0001, 0.1]}}}, seeds=(0,),
...               common={"data": "sample", "n_tasks": 2, "examples_per_task": 100})
>>> with tempfile.TemporaryDirectory() as folder:
...     done = run_sweep(folder, sweep, InTurn())
>>> done.choices[0].settings, len(done.runs)
({'lr': 0.1}, 1)
"""

from gradmem.sweeps.executors import Died, Executor, InTurn, Processes, executor_for
from gradmem.sweeps.plan import MODES, Sweep
from gradmem.sweeps.runner import (
    Event,
    Finished,
    LostWorkerError,
    Phase,
    check_settings,
    grid_of,
    run_sweep,
    sweep,
    workers_for,
)
from gradmem.sweeps.selection import Choice, Standings, select
from gradmem.sweeps.store import Store

__all__ = [
    "MODES",
    "Choice",
    "Died",
    "Event",
    "Executor",
    "Finished",
    "InTurn",
    "LostWorkerError",
    "Phase",
    "Processes",
    "Standings",
    "Store",
    "Sweep",
    "check_settings",
    "executor_for",
    "grid_of",
    "run_sweep",
    "select",
    "sweep",
    "workers_for",
]
