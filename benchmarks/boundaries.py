"""GEM on streams whose task labels are withheld: what finds the tasks, and what that costs.

    python -m benchmarks.boundaries [--data FOLDER] [--device cpu|cuda] [--workers N]

On MNIST rotations and permutations, with as much memory for every way to find the tasks: the true
labels, `Every` in phase and out of phase with the tasks, detectors, and no tasks at all (`Single`).
River's detectors are among them where river is installed; their settings, as the defaults of
`RisingLoss`, were chosen on other seeds (100 to 102). A boundary is found by the first one inferred
after it and before the next true one; others are false alarms. One thread per worker. Writes
boundaries.json, boundaries.md and boundaries.png to the folder of `--out`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradmem as gm
from benchmarks.measure import machine
from gradmem.reports.summary import Estimate

BENCHMARKS = {"rotations": gm.mnist_rotations, "permutations": gm.mnist_permutations}
LR, MARGIN = 0.1, 0.5
TRUE, NONE = "true labels", "none (Single)"


@dataclass
class Found:
    """What one run found."""

    benchmark: str
    way: str
    seed: int
    acc: float
    bwt: float
    boundaries: list[int] | None
    """The first example of each inferred task; None where tasks are not inferred."""
    delays: list[int]
    false_alarms: int
    missed: int


def ways(examples: int) -> dict[str, Callable[[], Any]]:
    """Name → a function that makes the boundaries, for tasks of so many examples."""
    found: dict[str, Callable[[], Any]] = {
        TRUE: lambda: None,
        f"Every({examples})": partial(gm.Every, examples),
        f"Every({examples * 7 // 10})": partial(gm.Every, examples * 7 // 10),
        "RisingLoss()": gm.RisingLoss,
    }
    try:
        from river import drift
    except ImportError:
        print("without river's detectors: river is not installed")
    else:
        found["river PageHinkley"] = partial(
            drift.PageHinkley, mode="up", threshold=5, min_instances=10
        )
        found["river ADWIN"] = partial(drift.ADWIN, delta=0.05, clock=1)
    return found | {NONE: lambda: None}


def perform(job: tuple[str, str, int], arguments: argparse.Namespace) -> Found:
    """One run: a benchmark, a way to find tasks, a seed."""
    torch.set_num_threads(1)
    benchmark, way, seed = job
    T, n = arguments.tasks, arguments.examples
    continuum = BENCHMARKS[benchmark](T, n, seed=seed, data=arguments.data)
    network = gm.mlp(seed=seed).to(arguments.device)
    learner: gm.Learner
    if way == NONE:
        learner = gm.Single(network, lr=LR, seed=seed)
    else:
        boundaries = ways(n)[way]()
        budget = arguments.memories * T
        learner = gm.GEM(
            network, lr=LR, budget=budget, margin=MARGIN, boundaries=boundaries, seed=seed
        )
    result = gm.run(learner, continuum)
    inferred = result.statistics.get("boundaries")
    delays, false_alarms = compare(inferred or [], T, n)
    missed = T - 1 - len(delays)
    return Found(
        benchmark, way, seed, result.acc, result.bwt, inferred, delays, false_alarms, missed
    )


def compare(inferred: Sequence[int], T: int, n: int) -> tuple[list[int], int]:
    """Delays in examples of the boundaries that were found, and how many were found in addition."""
    delays: dict[int, int] = {}
    false_alarms = 0
    for first in inferred[1:]:  # a stream begins with a task
        task = first // n
        if 0 < task < T and task not in delays:
            delays[task] = first - task * n
        else:
            false_alarms += 1
    return list(delays.values()), false_alarms


def row(runs: Sequence[Found]) -> str:
    """A line of the table: one benchmark and way over all seeds."""
    metrics = [
        Estimate.of([run.acc for run in runs]).format(".3f"),
        Estimate.of([run.bwt for run in runs]).format("+.3f"),
    ]
    inferred = ["–"] * 4
    if runs[0].boundaries is not None:
        delays = [delay for run in runs for delay in run.delays]
        inferred = [
            f"{np.mean([len(run.boundaries or []) for run in runs]):.1f}",
            f"{np.mean(delays):.0f}" if delays else "–",
            f"{np.mean([run.false_alarms for run in runs]):.1f}",
            f"{np.mean([run.missed for run in runs]):.1f}",
        ]
    return f"| {' | '.join([runs[0].benchmark, runs[0].way, *metrics, *inferred])} |"


def table(groups: dict[tuple[str, str], list[Found]], about: str) -> str:
    names = "MNIST | boundaries | ACC | BWT | tasks found | delay, examples | false alarms | missed"
    return "\n".join([about, "", f"| {names} |", "|---" * 8 + "|", *map(row, groups.values()), ""])


def draw(groups: dict[tuple[str, str], list[Found]], path: Path, T: int, n: int) -> None:
    """ACC with its interval, and below where the tasks of the first seed were found."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(benchmark for benchmark, _ in groups))
    figure = Figure(figsize=(6 * len(names), 6), layout="constrained", dpi=150)
    axes = figure.subplots(2, len(names), squeeze=False)
    for (above, below), name in zip(axes.T, names, strict=True):
        own = {way: runs for (benchmark, way), runs in groups.items() if benchmark == name}
        places = range(len(own))
        estimates = [Estimate.of([run.acc for run in runs]) for runs in own.values()]
        above.barh(
            places,
            [estimate.mean for estimate in estimates],
            xerr=[estimate.half_width or 0 for estimate in estimates],
            color="#4477aa",
            capsize=3,
        )
        above.set_title(f"MNIST {name}, {T} tasks × {n} examples")
        above.set_xlabel("ACC")
        above.set_xlim(0, 1)
        below.eventplot(
            [(runs[0].boundaries or [0])[1:] for runs in own.values()],
            lineoffsets=list(places),
            linelengths=0.7,
            colors="#cc6677",
        )
        for k in range(1, T):
            below.axvline(k * n, color="black", linewidth=0.4, alpha=0.5)
        below.set_xlim(0, T * n)
        below.set_xlabel("examples (grey: true boundaries; red: found, first seed)")
        for part in (above, below):
            part.set_yticks(places, labels=list(own))
            part.invert_yaxis()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", help="a folder with MNIST; 'sample' for the bundled digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--memories", type=int, default=256, help="a task, times --tasks in all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/boundaries"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    jobs = list(product(BENCHMARKS, ways(arguments.examples), seeds))
    groups: dict[tuple[str, str], list[Found]] = {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(partial(perform, arguments=arguments), jobs):
            groups.setdefault((found.benchmark, found.way), []).append(found)
            print(f"{found.benchmark}, {found.way}, seed {found.seed}: {found.acc:.4f}", flush=True)
    about = (
        f"{arguments.tasks} tasks of {arguments.examples} examples, batches of 10, "
        f"{arguments.memories * arguments.tasks} memories in all, mean and 95% interval of "
        f"{arguments.seeds} seeds. {machine(arguments.device)}"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = [asdict(found) for group in groups.values() for found in group]
    kept = {"about": about, "runs": runs}
    (arguments.out / "boundaries.json").write_text(json.dumps(kept, indent=1) + "\n")
    (arguments.out / "boundaries.md").write_text(table(groups, about))
    draw(groups, arguments.out / "boundaries.png", arguments.tasks, arguments.examples)
    print(table(groups, about))


if __name__ == "__main__":
    main()
