"""Sweeps: many runs that can be interrupted, extended and shared, and an honest choice of settings.

>>> import tempfile
>>> from gradmem.sweeps import InTurn, Sweep, run_sweep
>>> sweep = Sweep({"mnist-rotations": {"single": {"lr": [0.0001, 0.1]}}}, seeds=(0,),
...               common={"data": "sample", "n_tasks": 2, "examples_per_task": 100})
>>> with tempfile.TemporaryDirectory() as folder:
...     done = run_sweep(folder, sweep, InTurn())
>>> done.choices[0].settings, len(done.runs)
({'lr': 0.1}, 1)
"""

from gradmem.sweeps.executors import Died, Executor, InTurn, Processes
from gradmem.sweeps.keys import Planned, key_of
from gradmem.sweeps.plan import MODES, Sweep
from gradmem.sweeps.runner import Event, Finished, LostWorkerError, Phase, run_sweep
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
    "Planned",
    "Processes",
    "Standings",
    "Store",
    "Sweep",
    "key_of",
    "run_sweep",
    "select",
]
