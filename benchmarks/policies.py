"""Which examples are worth remembering, streams of many tasks, and memories of many examples.

    python -m benchmarks.policies compare [--data FOLDER] [--device cuda] [--workers 8]
    python -m benchmarks.policies thousand [--groups 20,100] [--join age,gradients] [--seeds 3]
    python -m benchmarks.policies thousand --budget 10000 --constraints 0,20,100 --groups ""
    python -m benchmarks.policies million [--keep last,reservoir]

`compare` runs GEM with every policy on both MNIST benchmarks, for some sizes of the memory, and
writes all values (policies.json), a table with means and 95% intervals (policies.md) and a picture
(policies.png). `thousand` learns a stream of 1,000 tasks with 20 examples each from the bundled
digits, beside `Single` and replay from a reservoir, and draws the time per step (thousand.png).
`million` measures the longest pause of a memory of a million small examples. Into the folder --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gradmem as gm
from benchmarks.measure import machine
from gradmem.memory.policies import POLICIES, KCentre
from gradmem.reports.summary import Estimate
from gradmem.trees import concatenate

BENCHMARKS = {
    "mnist_rotations": gm.mnist_rotations,
    "mnist_permutations": gm.mnist_permutations,
}
#: Examples remembered in all.
SIZES = (200, 500, 5120)
#: What can be compared beside the policies that have a name.
OTHERS = {"k-centre of gradients": KCentre("gradients")}
#: Learning rate and margin of the paper's runs of GEM on MNIST.
GEM = {"lr": 0.1, "margin": 0.5}


def run_one(case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of GEM; what was asked for, with ACC, BWT and the seconds of training."""
    torch.set_num_threads(1)
    make = BENCHMARKS[case["benchmark"]]
    continuum = make(arguments.tasks, arguments.examples, data=arguments.data, seed=case["seed"])
    learner = gm.GEM(
        gm.mlp(seed=case["seed"]).to(arguments.device),
        budget=case["memories"],
        keep=OTHERS.get(case["keep"], case["keep"]),
        seed=case["seed"],
        **GEM,
    )
    result = gm.run(learner, continuum.to(arguments.device))
    seconds = result.seconds_training
    return {**case, "acc": result.acc, "bwt": result.bwt, "seconds": seconds}


def compare(arguments: argparse.Namespace) -> None:
    cases = [
        {"benchmark": benchmark, "memories": memories, "keep": keep, "seed": seed}
        for benchmark, memories, keep, seed in product(
            arguments.benchmarks, arguments.sizes, arguments.keep, range(arguments.seeds)
        )
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn) as workers:
        found = []
        for one in workers.map(partial(run_one, arguments=arguments), cases):
            found.append(one)
            print(json.dumps(one), flush=True)
    folder: Path = arguments.out
    text = {"machine": machine(arguments.device), "settings": GEM, "runs": found}
    (folder / "policies.json").write_text(json.dumps(text, indent=1) + "\n", "utf-8")
    page = table(found) + (f"\n{gains(found)}" if "last" in arguments.keep else "")
    (folder / "policies.md").write_text(page, "utf-8")
    draw_accuracies(found, folder / "policies.png")
    print(page)


def estimate(found: Sequence[dict[str, Any]], name: str, **case: Any) -> Estimate:
    """Of a number over the seeds of a case."""
    runs = [one for one in found if all(one[key] == value for key, value in case.items())]
    return Estimate.of([run[name] for run in runs])


def values(found: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """The different values of a setting, in their order."""
    return list(dict.fromkeys(one[name] for one in found))


def table(found: Sequence[dict[str, Any]]) -> str:
    """ACC and BWT as Markdown: a row per benchmark and policy, columns per size."""
    sizes = values(found, "memories")
    names = [f"{name} at {size:,}" for size in sizes for name in ("ACC", "BWT")]
    lines = [f"| benchmark | keep | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for benchmark, keep in product(values(found, "benchmark"), values(found, "keep")):
        cells = []
        for size in sizes:
            case = {"benchmark": benchmark, "keep": keep, "memories": size}
            cells += [
                estimate(found, "acc", **case).format(".4f"),
                estimate(found, "bwt", **case).format("+.4f"),
            ]
        lines.append(f"| {benchmark} | {keep} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def gains(found: Sequence[dict[str, Any]], over: str = "last") -> str:
    """ACC less that of a policy, seed by seed: Markdown, a row per policy."""
    places = list(product(values(found, "benchmark"), values(found, "memories")))
    names = [f"{benchmark.replace('mnist_', '')}, {size:,}" for benchmark, size in places]
    lines = [f"| keep | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    accs = {
        (one["benchmark"], one["memories"], one["keep"], one["seed"]): one["acc"] for one in found
    }
    for keep in (keep for keep in values(found, "keep") if keep != over):
        cells = []
        for place in places:
            seeds = [seed for *other, seed in accs if other == [*place, keep]]
            differences = [accs[*place, keep, seed] - accs[*place, over, seed] for seed in seeds]
            cells.append(Estimate.of(differences).format("+.3f"))
        lines.append(f"| {keep} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_accuracies(found: Sequence[dict[str, Any]], path: Path) -> None:
    """ACC by memories, a panel per benchmark and a mark with its 95% interval per policy."""
    from matplotlib.figure import Figure

    sizes, policies = values(found, "memories"), values(found, "keep")
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, benchmark in zip(panels, values(found, "benchmark"), strict=False):
        for i, (keep, mark) in enumerate(zip(policies, "osD^vP*X", strict=False)):
            case = {"benchmark": benchmark, "keep": keep}
            estimates = [estimate(found, "acc", memories=size, **case) for size in sizes]
            shift = (i - (len(policies) - 1) / 2) * 0.8 / len(policies)  # policies side by side
            axes.errorbar(
                [place + shift for place in range(len(sizes))],
                [one.mean for one in estimates],
                yerr=[one.half_width or 0.0 for one in estimates],
                linestyle="",
                marker=mark,
                markersize=7,
                capsize=3,
                label=keep,
            )
        for place in range(1, len(sizes)):
            axes.axvline(place - 0.5, color="black", linewidth=0.5)
        axes.set_xticks(range(len(sizes)), labels=[f"{size:,}" for size in sizes])
        title = benchmark.replace("mnist_", "MNIST ")
        axes.set(title=title, xlabel="examples remembered in all", ylabel="ACC")
        axes.grid(alpha=0.3, axis="y")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.savefig(path)


class Replay(gm.Learner):
    """Learns from each mini-batch together with as many examples from a reservoir of the stream."""

    def __init__(self, network: torch.nn.Module, *, budget: int, **common: Any) -> None:
        super().__init__(network, **common)
        self.memory = gm.EpisodicMemory(budget=budget, keep="reservoir")

    def learn(self, x: Tensor, t: Any, y: Tensor) -> Tensor | None:
        batches = [(x, y), *self.memory.sample([*self.memory], len(y))]
        all_x, all_y = (concatenate(part) for part in zip(*batches, strict=True))

        def step(x: Tensor, y: Tensor) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self.loss(x, t, y)
            loss.backward()
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        loss = self.take("any task", t, step, all_x, all_y)
        self.memory.put(x, "all", y)  # one row for the whole stream
        return loss


class ByGradients(gm.EpisodicMemory):
    """Joins the two rows whose gradients point in the most similar direction, of whatever age."""

    learner: gm.GEM

    def _neighbours(self) -> Any:
        G = torch.nn.functional.normalize(self.learner.constraints.gradients(), dim=1)
        pairs = torch.triu_indices(len(G), len(G), offset=1)
        first, second = pairs[:, (G @ G.T)[tuple(pairs)].argmax()].tolist()
        rows = self._by_age()
        return rows[first][0], rows[first][1], rows[second][1]


#: How rows are chosen that are joined when there are too many.
JOINED = {"age": gm.EpisodicMemory, "gradients": ByGradients}


def new_gem(groups: int, keep: str, joined: str, budget: int, seed: int) -> gm.GEM:
    """GEM whose margins are as large in all as the paper's are with 20 tasks.

    A margin is added for every constraint: 0.5 for each of 100 takes steps that are too long.
    """
    memory = JOINED[joined](budget=budget, groups=groups, keep=keep, seed=seed)
    margin = GEM["margin"] * 20 / groups
    learner = gm.GEM(gm.mlp(seed=seed), memory=memory, seed=seed, **GEM | {"margin": margin})
    if isinstance(memory, ByGradients):
        memory.learner = learner
    return learner


def bounded_gem(most: int | None, budget: int, seed: int) -> gm.GEM:
    """GEM with a memory for each task and so many constraints a step.

    Without a margin, which would differ: it is added once for every constraint of a step.
    """
    settings = GEM | {"margin": 0.0}
    return gm.GEM(gm.mlp(seed=seed), budget=budget, constraints=most, seed=seed, **settings)


def digits(n_tasks: int, examples: int, seed: int) -> Iterator[tuple[gm.Continuum, list[Any]]]:
    """Turned digits of many tasks, in parts of at most 50 tasks, with their test sets."""
    whole = partial(gm.mnist_rotations, n_tasks, examples, data="sample", seed=seed)
    for start in range(0, n_tasks, 50):
        tasks = list(range(start, min(start + 50, n_tasks)))
        yield whole(order=tasks), tasks


def learn_thousand(learner: gm.Learner, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Learn the stream; ACC over all tasks at the end, groups, processor milliseconds of steps."""
    memory = getattr(learner, "memory", None)
    times, tests = [], {}
    for part, tasks in digits(arguments.tasks, arguments.examples, seed):
        for x, t, y in part:
            start = time.process_time()  # of one thread: other work on the machine does not count
            learner.observe(x, t, y)
            times.append((time.process_time() - start) * 1e3)
            if memory is not None:
                kept = sum(memory.count(group[0]) for group in memory.groups)
                assert kept <= arguments.budget, f"{kept} examples, {arguments.budget} allowed"
        for t in tasks:
            tests[t] = tuple(side[:100] for side in part.tests[t][:])
    right = [float((learner.predict(x, t) == y).float().mean()) for t, (x, y) in tests.items()]
    groups = [len(group) for group in memory.groups] if memory is not None else []
    quantiles = [np.quantile(part, (0.05, 0.5, 0.95)) for part in hundredths(times)]
    return {
        "acc": float(np.mean(right)),
        "median, 99%, longest, ms": np.quantile(times, (0.5, 0.99, 1)).round(3).tolist(),
        "5%, 50%, 95% along the stream, ms": np.round(quantiles, 3).tolist(),
        "mean by tenths, ms": [round(float(p.mean()), 3) for p in np.array_split(times, 10)],
        "groups": [len(groups), min(groups), max(groups)] if groups else None,
    }


def hundredths(times: Sequence[float]) -> list[Any]:
    return np.array_split(np.array(times), min(100, len(times)))


def thousand(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    budget, about = arguments.budget, machine("cpu")
    print(about)
    learners: dict[str, Callable[[int], gm.Learner]] = {
        "Single": lambda seed: gm.Single(gm.mlp(seed=seed), lr=0.1, seed=seed),
        "replay": lambda seed: Replay(gm.mlp(seed=seed), budget=budget, lr=0.1, seed=seed),
    }
    for most in arguments.constraints:
        name = f"GEM, {most} constraints a step" if most else "GEM, all constraints"
        learners[name] = partial(bounded_gem, most or None, budget)
    for groups, keep, joined in product(arguments.groups, arguments.keep, arguments.join):
        name = f"GEM, {groups} groups by {joined}, {keep}"
        learners[name] = partial(new_gem, groups, keep, joined, budget)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in learners}
    for seed, (name, make) in product(range(arguments.seeds), learners.items()):
        found[name].append(learn_thousand(make(seed), arguments, seed))
        print(f"{name}, seed {seed}: {found[name][-1]['acc']:.4f}", flush=True)
    sizes = {name: getattr(arguments, name) for name in ("tasks", "examples", "budget", "seeds")}
    folder: Path = arguments.out
    text = json.dumps({"machine": about, **sizes, "learners": found}) + "\n"
    (folder / "thousand.json").write_text(text, "utf-8")
    (folder / "thousand.md").write_text(thousand_table(found), "utf-8")
    draw_times(found, arguments, folder / "thousand.png")
    print(thousand_table(found))


def thousand_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown, a row per learner: ACC with its interval, and times, the medians over seeds."""
    names = "ACC | median step, ms | 99% of steps below, ms | longest, ms | last tenth, mean ms"
    lines = [f"| learner | {names} | memories shared by |", "|---" * 7 + "|"]
    for name, runs in found.items():
        acc = Estimate.of([run["acc"] for run in runs]).format(".3f")
        times = [[*run["median, 99%, longest, ms"], run["mean by tenths, ms"][-1]] for run in runs]
        ms = np.median(times, 0)
        groups = [run["groups"] for run in runs if run["groups"]]
        few, many = min((g[1] for g in groups), default=0), max((g[2] for g in groups), default=0)
        shared = f"{few} to {many} tasks" if many > 1 else "–"
        cells = [acc, *(f"{number:.1f}" for number in ms), shared]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def thousand_accs(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown, a row per learner: ACC with its interval, and of every seed."""
    seeds = range(len(next(iter(found.values()))))
    lines = [f"| learner | ACC | {' | '.join(f'seed {seed}' for seed in seeds)} |"]
    lines.append("|---" * (2 + len(seeds)) + "|")
    for name, runs in found.items():
        accs = [run["acc"] for run in runs]
        cells = [Estimate.of(accs).format(".3f"), *(f"{acc:.3f}" for acc in accs)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_times(
    found: Mapping[str, Sequence[Mapping[str, Any]]], arguments: argparse.Namespace, path: Path
) -> None:
    """The time of a step along the stream, a line per learner (the first seed)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    for name, runs in found.items():
        low, middle, high = np.array(runs[0]["5%, 50%, 95% along the stream, ms"]).T
        places = (np.arange(len(middle)) + 0.5) * arguments.tasks / len(middle)
        line = axes.plot(places, middle, label=name)[0]
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(
        xlabel="tasks observed", ylabel="processor ms per step (median, 5–95%)", yscale="log",
        title=f"{arguments.tasks:,} tasks × {arguments.examples}, budget {arguments.budget:,}",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def million(arguments: argparse.Namespace) -> None:
    """Fill a memory, task by task; the longest call of `add`, with a new task and without."""
    torch.set_num_threads(1)
    print(machine("cpu"))
    print("| keep | bytes | a task arrives: longest, ms | batch of 10: median, ms | longest, ms |")
    print("|---" * 5 + "|")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, arguments.inputs, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    for keep in arguments.keep:
        memory = gm.EpisodicMemory(budget=arguments.budget, keep=keep)
        memory.attach(losses=lambda x, t, y, mask: x[:, 0].abs())
        arrivals, batches = [], []
        for t in range(arguments.tasks):
            arrivals.append(seconds_to_add(memory, x[:10], t, y[:10]))
            for _ in range(memory.share(t + 1) // len(x) + 1):
                memory.add(x, t, y)
            batches += [seconds_to_add(memory, x[i : i + 10], t, y[i : i + 10]) for i in range(200)]
        ms = [1e3 * one for one in (max(arrivals), float(np.median(batches)), max(batches))]
        print(f"| {keep} | {memory.bytes:,} | {' | '.join(f'{one:.3g}' for one in ms)} |")


def seconds_to_add(memory: gm.EpisodicMemory, x: Tensor, t: int, y: Tensor) -> float:
    start = time.perf_counter()
    memory.add(x, t, y)
    return time.perf_counter() - start


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def numbers(text: str) -> list[int]:
    return [int(name) for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compare")
    one.add_argument("--data", default=None)
    one.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    one.add_argument("--workers", type=int, default=1)
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--tasks", type=int, default=20)
    one.add_argument("--examples", type=int, default=1000)
    one.add_argument("--benchmarks", type=names, default=list(BENCHMARKS))
    one.add_argument("--sizes", type=numbers, default=SIZES)
    one.add_argument("--keep", type=names, default=list(POLICIES))
    one.set_defaults(action=compare)
    two = commands.add_parser("thousand")
    two.add_argument("--tasks", type=int, default=1000)
    two.add_argument("--examples", type=int, default=20)
    two.add_argument("--budget", type=int, default=2000)
    two.add_argument("--groups", type=numbers, default=[100])
    two.add_argument("--constraints", type=numbers, default=[], help="0 for all of them")
    two.add_argument("--keep", type=names, default=["last"])
    two.add_argument("--join", type=names, default=["age"])
    two.add_argument("--seeds", type=int, default=1)
    two.set_defaults(action=thousand)
    three = commands.add_parser("million")
    three.add_argument("--budget", type=int, default=1_000_000)
    three.add_argument("--inputs", type=int, default=16)
    three.add_argument("--tasks", type=int, default=10)
    three.add_argument(
        "--keep", type=names, default=["last", "first", "reservoir", "balanced", "loss"]
    )
    three.set_defaults(action=million)
    for command in (one, two, three):
        command.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.action(arguments)


if __name__ == "__main__":
    main()
