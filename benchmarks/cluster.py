"""What a sweep adds to its runs: milliseconds per run beyond the run itself, by place.

    python -m benchmarks.cluster [--places here,processes,ray] [--runs 60] [--repeats 3]

One worker with one thread makes short runs one after another, and this process writes or reads
their results. Measured is the time from one result to the next, less the time that the worker took
for the run: claiming, sending, writing, fetching and waiting. The first run of a worker, which
includes its start, is left out. Places take turns.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.measure import machine
from gradmem.runs.experiment import Experiment
from gradmem.sweeps import Elsewhere, InTurn, Processes, Store, executor_on
from gradmem.sweeps.perform import Compute, Perform, perform_elsewhere


class Timed(Compute):
    """Writes how many seconds each run took into its result."""

    def __call__(self, experiment: Experiment, checkpoint: Any = None) -> Any:
        start = time.perf_counter()
        answer = super().__call__(experiment, checkpoint)
        assert isinstance(answer, dict), answer
        return answer | {"seconds_computing": time.perf_counter() - start}


def overheads(executor: Any, planned: list[Experiment]) -> tuple[list[float], list[float]]:
    """Seconds beyond each run but the first, and seconds of each of these runs."""
    with TemporaryDirectory() as folder:
        if isinstance(executor, Elsewhere):
            outcomes: Any = perform_elsewhere(Store(folder), executor, Timed(), planned)
        else:
            outcomes = executor(Perform(Path(folder), Timed()), planned)
        beyond, taken, last = [], [], None
        with closing(outcomes):
            for _, run in outcomes:
                now, seconds = time.perf_counter(), run.result["seconds_computing"]
                if last is not None:
                    beyond.append(now - last - seconds)
                    taken.append(seconds)
                last = now
    return beyond, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", default="here,processes,ray")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--examples", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = {"data": "sample", "n_tasks": 2, "examples_per_task": arguments.examples}
    planned = [
        Experiment("mnist-rotations", "gem", {"lr": 0.01 * (1 + i)}, **size)
        for i in range(arguments.runs)
    ]
    for experiment in planned:
        experiment.key  # noqa: B018 computed before anything is timed
    with ExitStack() as stack, TemporaryDirectory() as folder:
        places: dict[str, Any] = {}
        for name in arguments.places.split(","):
            if name == "here":
                places[name] = InTurn()
            elif name == "processes":
                places[name] = Processes(1, threads=1)
            else:
                places[name] = stack.enter_context(executor_on(name, folder, workers=1))
        found: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in places}
        for _ in range(arguments.repeats):
            for name, executor in places.items():
                found[name].append(overheads(executor, planned))
    print(machine("cpu"))
    print("| place | ms beyond each run: median (10–90 %) | mean | ms of a run, mean |")
    print("|---|---|---|---|")
    for name, repeats in found.items():
        beyond = 1e3 * np.concatenate([one for one, _ in repeats])
        low, median, high = np.percentile(beyond, [10, 50, 90])
        run = 1e3 * np.concatenate([taken for _, taken in repeats]).mean()
        print(f"| {name} | {median:.1f} ({low:.1f}–{high:.1f}) | {beyond.mean():.1f} | {run:.0f} |")


if __name__ == "__main__":
    main()
