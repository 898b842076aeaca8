r"""The settings of SteadyGEM, found on training data that was held out.

    python -m benchmarks.recipe [--data FOLDER] [--device cuda] [--workers 14]
    python -m benchmarks.recipe --benchmarks cifar100-incremental --tasks 10 --sizes 100 2560 \
        --seeds 500 501 --data FOLDER --device cuda --workers 14

Each task has twice the board's examples, of which half are learned and half measure it: no test
set has a part in it, and seeds are others than those of the board. What is tried is the recipe and
changes of it. Writes every ACC (recipe-NAME.json) and a table (recipe-NAME.md) into the folder
--out; runs that the file has already, from this or another machine, are not made again.

On CIFAR-100, which has no more examples than the board learns, a tenth of them is held out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch

import gradmem as gm
from benchmarks.measure import machine
from gradmem.benchmarks.lookup import find_benchmark

#: What has been chosen; of `keep` and the averages' lengths nothing else is tried here.
RECIPE: dict[str, Any] = {
    "lr": 0.2,
    "margin": 0.1,
    "soft": 0.5,
    "match": 0.5,
    "rehearse": 50,
    "glances": 3,
    "input_dropout": 0.05,
    "keep": "balanced",
    "average": [0.98, 0.995, 0.999, 0.9998],  # 50, 200, 1,000 and 5,000 steps long
}
#: Averages of 12, 25, …, 3,200 steps: finer than what is chosen, so that they do not decide.
FINE = [1 - 1 / n for n in (12, 25, 50, 100, 200, 400, 800, 1600, 3200)]
CIFAR_RECIPE: dict[str, Any] = {
    "lr": 0.05,
    "margin": 0.0,
    "soft": 0.5,
    "match": 0.5,
    "rehearse": 64,
    "sample": 5,
    "glances": 3,
    "input_dropout": 0.0,
    "keep": "balanced",
    "augment": "images",
    "augmented": "memories",
}
#: What a setting is where nothing is said.
UNSAID = {"sample": None, "constraints": None, "augment": None, "augmented": "all"}
#: What is tried, as changes of the recipe.
CHANGES: list[dict[str, Any]] = [
    {},
    {"match": 0.0, "input_dropout": 0.1},
    {"match": 0.0, "margin": 0.25},
    {"match": 0.2, "margin": 0.25},
    {"match": 0.0, "soft": 0.75, "margin": 0.25, "input_dropout": 0.1},
    {"soft": 0.75, "margin": 0.25},
    {"rehearse": 100},
    {"lr": 0.3},
    {"sample": 10},
    {"match": 0.0, "input_dropout": 0.1, "sample": 10},
    {"match": 0.0, "input_dropout": 0.1, "sample": 25},
    {"constraints": 0},
    {"match": 0.0, "input_dropout": 0.1, "constraints": 0},
]
FREE = {"constraints": 0, "sample": None}
CIFAR_CHANGES: list[dict[str, Any]] = [
    {},
    {"rehearse": 128},
    {"rehearse": 128, "augmented": "all"},
    {"rehearse": 128, "augment": None},
    {"rehearse": 128, "lr": 0.03},
    {"rehearse": 128, **FREE},
    {"glances": 2},
    {"glances": 2, "rehearse": 128},
    {"glances": 2, "augmented": "all"},
    {"glances": 2, "augment": None},
    {"glances": 2, "lr": 0.03},
    {"glances": 2, "margin": 0.5},
    {"glances": 2, "soft": 0.0},
    {"glances": 2, "match": 0.0},
    {"glances": 2, **FREE},
    {"glances": 1},
    {"glances": 1, "augment": None},
]

#: What a run is of, its settings and ACC.
Run = dict[str, Any]


def on_mnist(benchmark: str) -> bool:
    return benchmark.startswith("mnist")


def recipe_of(benchmark: str) -> dict[str, Any]:
    return RECIPE if on_mnist(benchmark) else CIFAR_RECIPE


def name_of(run: Run) -> str:
    """What a run's settings change of the recipe; on CIFAR-100, whatever its averages."""
    recipe, said = recipe_of(run["benchmark"]), run["settings"]
    own = {**said, **UNSAID, **said}
    if not on_mnist(run["benchmark"]):
        del own["average"]
    changes = {k: v for k, v in own.items() if v != {**UNSAID, **recipe}.get(k)}
    if own["augment"] is None:
        changes.pop("augmented", None)
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "the recipe"


def key_of(run: Run) -> str:
    names = ("benchmark", "memories", "tasks", "seed", "settings")
    return json.dumps([run.get(name) for name in names], sort_keys=True)


def cases(given: argparse.Namespace) -> Iterator[Run]:
    """What is tried, on all columns and with all seeds."""
    for seed, benchmark, memories in product(given.seeds, given.benchmarks, given.sizes):
        mnist = on_mnist(benchmark)
        always = {} if mnist else {"average": FINE}
        column = {"benchmark": benchmark, "memories": memories, "seed": seed}
        if given.tasks is not None:
            column["tasks"] = given.tasks
        for change in CHANGES if mnist else CIFAR_CHANGES:
            yield {**column, "settings": {**recipe_of(benchmark), **always, **change}}


def run_one(case: Run, given: argparse.Namespace) -> Run:
    torch.set_num_threads(1)
    benchmark, seed, mnist = case["benchmark"], case["seed"], on_mnist(case["benchmark"])
    known = find_benchmark(benchmark)
    twice = {"examples_per_task": 2 * known.options["examples_per_task"]} if mnist else {}
    continuum = known.continuum(seed=seed, data=given.data, **twice)[: given.tasks]
    continuum = continuum.held_out(0.5 if mnist else 0.1)
    network = known.new_network(seed)
    precision = "fp32" if mnist or given.device == "cpu" else "bf16"
    learner = gm.SteadyGEM(
        network.to(given.device),
        budget=case["memories"],
        seed=seed,
        precision=precision,
        **case["settings"],
    )
    start = time.perf_counter()
    try:
        result = gm.run(learner, continuum.to(given.device))
    except FloatingPointError as error:
        return {**case, "acc": None, "failed": str(error), "on": machine(given.device)}
    found = {"acc": round(result.acc, 4), "bwt": round(result.bwt, 4)}
    seconds = round(time.perf_counter() - start, 1)
    return {**case, **found, "seconds": seconds, "on": machine(given.device)}


def table(runs: Sequence[Run]) -> str:
    """ACC in the mean over seeds, by benchmark and memories; what was tried everywhere first."""
    columns = sorted({(run["benchmark"], run["memories"]) for run in runs}, reverse=True)
    heads = [f"{name.removeprefix('mnist-')}, {m:,}" for name, m in columns]
    lines = [f"| settings | {' | '.join(heads)} | mean |", "|---" * (len(heads) + 2) + "|"]
    rows = {name: means([run for run in runs if name_of(run) == name]) for name in _names(runs)}
    best_first = sorted(rows.items(), key=lambda row: (-len(row[1]), -_mean(row[1].values())))
    for name, own in best_first:
        cells = [f"{own[column]:.4f}" if column in own else "" for column in columns]
        lines.append(f"| {name} | {' | '.join([*cells, f'{_mean(own.values()):.4f}'])} |")
    return "\n".join(lines) + "\n"


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(map(name_of, runs)))


def means(runs: Sequence[Run]) -> Mapping[tuple[str, int], float]:
    """Column → the mean ACC over its seeds; 0 counts for one that diverged."""
    accs: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        accs.setdefault((run["benchmark"], run["memories"]), []).append(run["acc"] or 0.0)
    return {column: _mean(found) for column, found in accs.items()}


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--benchmarks", nargs="+", default=["mnist-rotations", "mnist-permutations"]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 500, 5120])
    parser.add_argument("--seeds", type=int, nargs="+", default=[500, 501])
    parser.add_argument("--tasks", type=int, default=None, help="the first so many")
    parser.add_argument("--data", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("recipe"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    label = "mnist" if on_mnist(given.benchmarks[0]) else "cifar"
    file = given.out / f"recipe-{label}.json"
    runs: list[Run] = json.loads(file.read_text("utf-8"))["runs"] if file.exists() else []
    known = {*map(key_of, runs)}
    wanted = [case for case in cases(given) if key_of(case) not in known]
    # What takes longest comes first; the file is written as runs end, in case of a stop.
    wanted.sort(key=lambda run: -run["memories"] * run["settings"]["glances"])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as workers:
        for made in as_completed([workers.submit(run_one, case, given) for case in wanted]):
            one = made.result()
            print(json.dumps(one), flush=True)
            runs.append(one)
            write(file, runs)
    text = table(runs)
    (given.out / f"recipe-{label}.md").write_text(text, "utf-8")
    print(text)


def write(file: Path, runs: Sequence[Run]) -> None:
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    file.write_text(f'{{"runs": [\n  {lines}\n ]}}\n', "utf-8")


if __name__ == "__main__":
    main()
