"""Where a sweep's runs are made: an executor from what a user says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradmem.benchmarks import lookup
from gradmem.evaluation.machine import cores
from gradmem.sweeps.executors import Executor, executor_for
from gradmem.sweeps.plan import Sweep
from gradmem.validation import one_of

__all__ = ["executor_for_sweep", "executor_on"]


@contextmanager
def executor_on(
    on: str | None,
    folder: str | os.PathLike[str],
    device: str = "cpu",
    workers: int | None = None,
    cpus: int | None = None,
    gpus: float | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[Executor]:
    """An executor at a place, which is left again at the end of the `with` block.

    Parameters
    ----------
    on
        None or "here" for this machine; "ray" or "ray:ADDRESS" for a Ray cluster (see `OnRay`);
        "slurm" for Slurm, "slurm:local" to try the same on this machine (see `OnSlurm`).
    folder
        Of the sweep; Slurm's jobs are kept in it.
    device
        Of the runs.
    workers
        Runs at a time. If left out: here one per core, or one for a GPU; on Ray as many as the
        cluster has room for; on Slurm 16.
    cpus, gpus
        Of each worker on a cluster; by default 1 core, and 1 GPU if the runs are made on GPUs. On
        Ray a part of a GPU may be given: 0.25 makes four runs at a time on each.
    parameters
        Of Slurm's jobs; see `OnSlurm`.
    """
    place, _, rest = (on or "here").partition(":")
    one_of("on", place, ("here", "ray", "slurm"))
    if place == "here":
        if rest or cpus is not None or gpus is not None or parameters:
            raise ValueError("cpus, gpus and parameters of jobs are for runs on ray or slurm")
        yield executor_for(_usual(device) if workers is None else workers)
        return
    if ":" in device:
        raise ValueError(
            f"a cluster chooses which GPU a worker has: the device must be cuda, got {device}"
        )
    if gpus is not None and device.startswith("cuda") != (gpus > 0):
        raise ValueError(f"gpus go with the device cuda, and it with some: got {gpus} and {device}")
    per_worker: dict[str, Any] = {"workers": workers, "cpus": 1 if cpus is None else cpus}
    per_worker["gpus"] = gpus if gpus is not None else 1 if device.startswith("cuda") else 0
    if place == "ray":
        from gradmem.sweeps.on_ray import OnRay

        if parameters:
            raise ValueError("parameters of jobs are for runs on slurm")
        with OnRay(rest or None, **per_worker) as cluster:
            yield cluster
    else:
        from gradmem.sweeps.on_slurm import OnSlurm

        own = Path(folder) / "slurm"
        with OnSlurm(own, rest or "slurm", **per_worker, parameters=parameters) as jobs:
            yield jobs


@contextmanager
def executor_for_sweep(
    plan: Sweep,
    folder: str | os.PathLike[str],
    on: str | None = None,
    workers: int | None = None,
    **more: Any,
) -> Iterator[Executor]:
    """The executor of `executor_on` for a sweep.

    On this machine, parts that other processes cannot import are run in this process, with a
    warning.
    """
    names = [name for benchmark, grids in plan.grids.items() for name in (benchmark, *grids)]
    here = [lookup.shown(name) for name in names if not lookup.can_be_imported(name)]
    if here and on not in (None, "here"):
        raise ValueError(
            f"{', '.join(here)} cannot be imported by workers on {on}: define it at the top of a "
            "module"
        )
    if here and (_usual(plan.device) if workers is None else workers) > 1:
        warnings.warn(
            f"{', '.join(here)} cannot be imported by other processes, so all runs are made in "
            "this one: define it at the top of a module",
            stacklevel=4,
        )
        workers = 1
    with executor_on(on, folder, plan.device, workers, **more) as executor:
        yield executor


def _usual(device: str) -> int:
    """Workers on this machine."""
    return 1 if device.startswith("cuda") else cores()
