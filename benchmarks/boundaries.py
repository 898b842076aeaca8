"""GEM on streams whose task labels are withheld: what finds the tasks, and what that costs.

    python -m benchmarks.boundaries [--data FOLDER] [--device cpu|cuda] [--workers N]
    python -m benchmarks.boundaries --ways "river PageHinkley" "river ADWIN" [--data FOLDER]

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
from importlib.util import find_spec
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
LR, MARGIN, BATCH_SIZE = 0.1, 0.5, 10
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
    """In examples, of the true boundaries that were found."""
    false_alarms: int


#: Runs by benchmark and way, the seeds in order.
Groups = dict[tuple[str, str], list[Found]]


def ways(examples: int) -> dict[str, Callable[[], Any]]:
    """Name → a function that makes the boundaries, for tasks of so many examples."""
    shorter = examples * 7 // 10
    batches = shorter // BATCH_SIZE
    found: dict[str, Callable[[], Any]] = {
        TRUE: lambda: None,
        f"Every({examples})": partial(gm.Every, examples),
        f"Every({shorter})": partial(gm.Every, shorter),
        "RisingLoss()": gm.RisingLoss,
        f"RisingLoss(longest={batches})": partial(gm.RisingLoss, longest=batches),
    }
    if find_spec("river"):
        from river import drift

        page_hinkley = partial(drift.PageHinkley, mode="up", threshold=5, min_instances=10)
        found["river PageHinkley"] = page_hinkley
        found["river ADWIN"] = partial(drift.ADWIN, delta=0.05, clock=1)
    return found | {NONE: lambda: None}


def perform(job: tuple[str, str, int], arguments: argparse.Namespace) -> Found:
    """One run: a benchmark, a way to find tasks, a seed."""
    torch.set_num_threads(1)
    benchmark, way, seed = job
    T, n = arguments.tasks, arguments.examples
    continuum = BENCHMARKS[benchmark](T, n, BATCH_SIZE, seed=seed, data=arguments.data)
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
    return Found(benchmark, way, seed, result.acc, result.bwt, inferred, delays, false_alarms)


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


def row(runs: Sequence[Found], T: int) -> str:
    """A line of the table: one benchmark of T tasks, and one way, over all seeds."""
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
            f"{np.mean([T - 1 - len(run.delays) for run in runs]):.1f}",
        ]
    return f"| {' | '.join([runs[0].benchmark, runs[0].way, *metrics, *inferred])} |"


def table(groups: Groups, T: int) -> str:
    """Markdown, a row per benchmark and way."""
    names = "MNIST | boundaries | ACC | BWT | tasks found | delay, examples | false alarms | missed"
    lines = [row(runs, T) for runs in groups.values()]
    return "\n".join([f"| {names} |", "|---" * 8 + "|", *lines, ""])


def draw(groups: Groups, path: Path, T: int, n: int) -> None:
    """ACC with its interval, and below where the tasks of the first seed were found."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(benchmark for benchmark, _ in groups))
    inferred = {way for (_, way), runs in groups.items() if runs[0].boundaries is not None}
    ratio = [len({way for _, way in groups}), max(1, len(inferred))]
    figure = Figure(figsize=(6 * len(names), 1.5 + 0.4 * sum(ratio)), layout="constrained", dpi=120)
    axes = figure.subplots(2, len(names), squeeze=False, height_ratios=ratio)
    for (above, below), name in zip(axes.T, names, strict=True):
        own = {way: runs for (benchmark, way), runs in groups.items() if benchmark == name}
        estimates = [Estimate.of([run.acc for run in runs]) for runs in own.values()]
        above.barh(
            list(own),
            [estimate.mean for estimate in estimates],
            xerr=[estimate.half_width or 0 for estimate in estimates],
            color="#4477aa",
            capsize=3,
        )
        above.set(title=f"MNIST {name}, {T} tasks × {n} examples", xlabel="ACC", xlim=(0, 1))
        found = {way: runs[0].boundaries[1:] for way, runs in own.items() if runs[0].boundaries}
        below.eventplot([*found.values()], linelengths=0.7, linewidths=2, colors="#cc3311")
        below.set_yticks(range(len(found)), labels=list(found))
        for k in range(1, T):
            below.axvline(k * n, color="black", linewidth=0.5, alpha=0.5)
        below.set_xlim(0, T * n)
        below.set_xticks([k * n for k in range(0, T + 1, max(1, T // 4))])
        below.set_xlabel("examples (grey: a task begins; red: found to begin, seed 0)")
        above.invert_yaxis()
        below.invert_yaxis()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", help="a folder with MNIST; 'sample' for the bundled digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--memories", type=int, default=256, help="a task, times --tasks in all")
    parser.add_argument("--ways", nargs="+", help="by their names in the table; all if left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/boundaries"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    known = ways(arguments.examples)
    if wrong := [way for way in arguments.ways or [] if way not in known]:
        parser.error(f"no such way: {wrong[0]!r}; there are {', '.join(map(repr, known))}")
    jobs = list(product(BENCHMARKS, arguments.ways or known, seeds))
    groups: Groups = {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(partial(perform, arguments=arguments), jobs):
            groups.setdefault((found.benchmark, found.way), []).append(found)
            print(f"{found.benchmark}, {found.way}, seed {found.seed}: {found.acc:.4f}", flush=True)
    about = (
        f"{arguments.tasks} tasks of {arguments.examples} examples, batches of {BATCH_SIZE}, "
        f"{arguments.memories * arguments.tasks} memories in all, mean and 95% interval of "
        f"{arguments.seeds} seeds. {machine(arguments.device)}"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = [asdict(found) for group in groups.values() for found in group]
    kept = {"about": about, "tasks": arguments.tasks, "examples": arguments.examples, "runs": runs}
    (arguments.out / "boundaries.json").write_text(json.dumps(kept, indent=1) + "\n")
    text = f"{about}\n\n{table(groups, arguments.tasks)}"
    (arguments.out / "boundaries.md").write_text(text)
    draw(groups, arguments.out / "boundaries.png", arguments.tasks, arguments.examples)
    print(text)


if __name__ == "__main__":
    main()
