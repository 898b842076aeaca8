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

from gradmem.sweeps.executors import Died, Elsewhere, Executor, InTurn, Processes, executor_for
from gradmem.sweeps.places import executor_for_sweep, executor_on
from gradmem.sweeps.plan import MODES, SEARCHES, Sweep
from gradmem.sweeps.runner import (
    Event,
    Finished,
    LostWorkerError,
    Phase,
    check_settings,
    grid_of,
    run_sweep,
    sweep,
)
from gradmem.sweeps.selection import Choice, Standings, select
from gradmem.sweeps.store import Store, only_one
from gradmem.sweeps.trials import Round

__all__ = [
    "MODES",
    "SEARCHES",
    "Choice",
    "Died",
    "Elsewhere",
    "Event",
    "Executor",
    "Finished",
    "InTurn",
    "LostWorkerError",
    "Phase",
    "Processes",
    "Round",
    "Standings",
    "Store",
    "Sweep",
    "check_settings",
    "executor_for",
    "executor_for_sweep",
    "executor_on",
    "grid_of",
    "only_one",
    "run_sweep",
    "select",
    "sweep",
]
