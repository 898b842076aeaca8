"""What descriptions of tasks are worth: networks that are given them, beside those that are not.

    python -m benchmarks.descriptors [--data FOLDER] [--device cuda] [--workers 2] [--out FOLDER]
    python -m benchmarks.descriptors --streams rotations --networks oracle "random descriptions"

GEM and Single on four streams: rotations in random order; rotations of which some angles are held
out, between the learned ones (interpolated) and beyond them (extrapolated); permutations, whose
descriptions say nothing; and composed digits, of which some combinations are held out.

The networks are the paper's, as it is ("plain": the conditioned network computes the same when all
descriptions are zero), and made to take descriptions: by `gm.networks.conditioned`, and, on the
rotations in random order, in three other ways. Two more, which are run if they are named, say what
a gain is worth: "oracle" is the plain network with every image turned back by its task's angle,
and "random descriptions" is the conditioned network, given numbers that say nothing about the
angles. Each has its own learning rate, the one with the highest ACC on a fifth of the training
examples, with another seed than the results. Writes descriptors.json, descriptors.md (means over
seeds ± 95% intervals) and descriptors.png. One thread per process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradmem as gm
from benchmarks.measure import machine
from gradmem.reports.summary import Estimate

#: A run by its stream, learner and network.
Key = tuple[str, str, str]
RATES = (0.01, 0.03, 0.1)
#: Seed of the data on which rates are chosen; the results have others.
SEARCH_SEED = 1000
LEARNERS = ("gem", "single")
PLAIN, CONDITIONED, ORACLE, RANDOM = "plain", "conditioned", "oracle", "random descriptions"


class BesideX(nn.Module):
    """The paper's network, whose first layer has the description among its inputs."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.description_size = size
        self.network = gm.mlp([784 + size, 100, 100, 10], seed=seed)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.network(torch.cat([given["x"], given["task"]], 1))


class FiLM(nn.Module):
    """The paper's network, whose hidden units are scaled and shifted as the description says."""

    def __init__(self, size: int, seed: int, width: int = 32) -> None:
        super().__init__()
        self.description_size = size
        self.embedding = gm.mlp([size, width], seed)
        self.by = nn.ModuleList(nn.Linear(width, 200) for _ in range(2))
        for w in self.by.parameters():
            nn.init.zeros_(w)
        self.network = gm.mlp(seed=seed)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        h, embedded = given["x"], self.embedding(given["task"]).relu()
        for i, layer in enumerate(self.network):
            h = layer(h)
            if i in (0, 2):
                scale, shift = self.by[i // 2](embedded).chunk(2, 1)
                h = h * (1 + scale) + shift
        return h


class Warped(nn.Module):
    """The paper's network, given images moved by an affine map that the description chooses."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.description_size = size
        self.map = nn.Linear(size, 6)
        for w in self.map.parameters():
            nn.init.zeros_(w)
        self.register_buffer("identity", torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.network = gm.mlp(seed=seed)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        images = given["x"].view(-1, 1, 28, 28)
        maps = (self.identity + 0.3 * self.map(given["task"])).view(-1, 2, 3)
        grid = F.affine_grid(maps, list(images.shape), align_corners=False)
        return self.network(F.grid_sample(images, grid, align_corners=False).flatten(1))


def conditioned(size: int, seed: int) -> nn.Module:
    return gm.networks.conditioned(gm.mlp(seed=seed), size)


#: The networks of the rotations in random order.
COMPARED: dict[str, Callable[[int, int], nn.Module]] = {
    PLAIN: lambda size, seed: gm.mlp(seed=seed),
    CONDITIONED: conditioned,
    "beside x": BesideX,
    "FiLM": FiLM,
    "warped": Warped,
}
#: And what they are measured by: an oracle is the plain network, given images turned back.
NETWORKS = COMPARED | {ORACLE: COMPARED[PLAIN], RANDOM: conditioned}


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and where it is computed."""

    tasks: int
    examples: int
    memories: int
    data: str
    device: str


@dataclass(frozen=True)
class Job:
    """One run: a stream, a learner, a network, a seed, and a rate once it is chosen."""

    stream: str
    learner: str
    network: str
    seed: int
    rate: float
    sizes: Sizes


Stream = tuple[gm.Continuum, dict[str, list[int]]]


def rotations(sizes: Sizes, seed: int) -> Stream:
    continuum = gm.mnist_rotations(
        sizes.tasks, sizes.examples, order="random", seed=seed, data=sizes.data
    )
    return continuum, {}


def permutations(sizes: Sizes, seed: int) -> Stream:
    continuum = gm.mnist_permutations(sizes.tasks, sizes.examples, seed=seed, data=sizes.data)
    return continuum, {}


def held_out_rotations(sizes: Sizes, seed: int) -> Stream:
    """The last fifth of the angles is never learned, nor is every fourth of the others."""
    inner = range(round(0.8 * sizes.tasks))
    beyond = list(range(len(inner), sizes.tasks))
    between = [k for k in inner if k % 4 == 2]
    learned = np.random.default_rng(seed).permutation([k for k in inner if k not in between])

    def made(order: Sequence[int]) -> gm.Continuum:
        return gm.mnist_rotations(
            sizes.tasks, sizes.examples, order=order, seed=seed, data=sizes.data
        )

    held_out = {"interpolated": between, "extrapolated": beyond}
    return tested_on(made(learned.tolist()), made(between + beyond)), held_out


def composed(sizes: Sizes, seed: int) -> Stream:
    """Of 24 combinations a quarter is held out, and as many others learned as there are tasks."""
    learned, held_out = range(min(18, sizes.tasks)), list(range(18, 24))

    def made(order: Sequence[int]) -> gm.Continuum:
        return gm.mnist_composed(24, sizes.examples, order=order, seed=seed, data=sizes.data)

    return tested_on(made(learned), made(held_out)), {"combinations": held_out}


STREAMS: dict[str, Callable[[Sizes, int], Stream]] = {
    "rotations": rotations,
    "rotations, angles held out": held_out_rotations,
    "permutations": permutations,
    "composed": composed,
}


def tested_on(learned: gm.Continuum, others: gm.Continuum) -> gm.Continuum:
    """The learned tasks, tested on the others' test sets as well."""
    return gm.Continuum(
        learned.tasks,
        seed=learned.seed,
        tests=learned.tests | others.tests,
        outputs=others.outputs,
        descriptions=others.descriptions,
    )


def turned_back(continuum: gm.Continuum) -> gm.Continuum:
    """Rotations with every image turned back by its task's angle, to the nearest pixel."""

    def upright(examples: Any, t: int) -> gm.Examples:
        x, y = examples[:]
        cos, sin = continuum.descriptions[t][:2].tolist()
        turn = torch.tensor([[[cos, sin, 0.0], [-sin, cos, 0.0]]])
        grid = F.affine_grid(turn, [1, 1, 28, 28], align_corners=False)
        images = x.view(1, -1, 28, 28)  # all at once, as channels
        found = F.grid_sample(images, grid, mode="nearest", align_corners=False).view(-1, 784)
        return gm.Examples((found * 255).round().byte(), y, divisor=255)

    tests = {t: upright(test, t) for t, test in continuum.tests.items()}
    tasks = [
        gm.Task(task.t, upright(task.train, task.t), tests[task.t], task.label)
        for task in continuum.tasks
    ]
    return gm.Continuum(tasks, seed=continuum.seed, descriptions=continuum.descriptions)


def randomly_described(continuum: gm.Continuum) -> gm.Continuum:
    """The same tasks, each described by random numbers; the descriptions are as long as before."""
    rng = np.random.default_rng([continuum.seed, 0xDE5C])
    found = {}
    for t, own in continuum.descriptions.items():
        random = torch.from_numpy(rng.standard_normal(len(own))).to(own.dtype)
        found[t] = random * own.norm() / random.norm()
    tasks = [
        gm.Task(task.t, task.train, task.test, task.label, task.classes, found[task.t])
        for task in continuum.tasks
    ]
    return gm.Continuum(tasks, seed=continuum.seed, tests=continuum.tests, descriptions=found)


def run(job: Job, validate: bool = False) -> dict[str, Any]:
    """What a run measured; `validate`: on a fifth of the training examples."""
    torch.set_num_threads(1)
    sizes = job.sizes
    continuum, held_out = STREAMS[job.stream](sizes, job.seed)
    if job.network == ORACLE:
        continuum = turned_back(continuum)
    if job.network == RANDOM:
        continuum = randomly_described(continuum)
    if validate:
        continuum, held_out = continuum.held_out(0.2), {}
    size = len(next(iter(continuum.descriptions.values())))
    network = NETWORKS[job.network](size, job.seed).to(sizes.device)
    learner: gm.Learner = (
        gm.GEM(network, lr=job.rate, memories=sizes.memories)
        if job.learner == "gem"
        else gm.Single(network, lr=job.rate)
    )
    try:
        result = gm.run(learner, continuum)
    except FloatingPointError:  # too high a rate
        return {"acc": 0.0}
    learned = [j for j in result.learned if j is not None]
    places = {t: j for j, t in enumerate(continuum.tests)}
    last = result.R[-1]
    return {
        "fwt": result.fwt,
        "acc": float(last[learned].mean()),
        "learning accuracy": float(np.mean([result.R[i, j] for i, j in enumerate(learned)])),
        "next task": [float(result.R[i - 1, j]) for i, j in enumerate(learned) if i],
        **{name: float(last[[places[t] for t in ts]].mean()) for name, ts in held_out.items()},
    }


def chosen_rates(
    jobs: Mapping[Key, Job], rates: Sequence[float], pool: ProcessPoolExecutor
) -> dict[Key, float]:
    """The rate with the highest ACC on examples that were not learned."""
    if len(rates) == 1:
        return dict.fromkeys(jobs, rates[0])
    tried = [(key, replace(job, rate=rate)) for key, job in jobs.items() for rate in rates]
    found = pool.map(run, [job for _, job in tried], [True] * len(tried))
    accs = {(key, job.rate): one["acc"] for (key, job), one in zip(tried, found, strict=True)}
    return {key: max(rates, key=lambda rate: accs[key, rate]) for key in jobs}


def measured(
    sizes: Sizes,
    streams: Sequence[str],
    learners: Sequence[str],
    networks: Sequence[str] | None,
    rates: Sequence[float],
    seeds: int,
    workers: int,
) -> list[dict[str, Any]]:
    """A row for each stream, learner and network: its rate, and what each seed's run measured."""
    jobs = {
        (stream, learner, network): Job(stream, learner, network, SEARCH_SEED, 0.0, sizes)
        for stream in streams
        for learner in learners
        for network in networks or (COMPARED if stream == "rotations" else (PLAIN, CONDITIONED))
    }
    # Not forked: a process that has used a GPU cannot be.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        chosen = chosen_rates(jobs, rates, pool)
        runs = [replace(jobs[key], rate=chosen[key], seed=s) for key in jobs for s in range(seeds)]
        found = list(pool.map(run, runs))
    return [
        {
            "stream": stream,
            "learner": learner,
            "network": network,
            "lr": chosen[stream, learner, network],
            "runs": found[i * seeds : (i + 1) * seeds],
        }
        for i, (stream, learner, network) in enumerate(jobs)
    ]


def estimate(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """The mean over seeds ± the 95% interval; a dash where it was not measured."""
    known = name in runs[0]
    return Estimate.of([one[name] for one in runs]).format(".3f") if known else "–"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what was measured, and FWT's gain over the plain network, seed by seed."""
    names = ("fwt", "acc", "learning accuracy", "interpolated", "extrapolated", "combinations")
    heads = ["stream", "learner", "network", "lr", "FWT", "gain in FWT", "ACC", *names[2:]]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    plain = {(row["stream"], row["learner"]): row for row in rows if row["network"] == PLAIN}
    for row in rows:
        runs, gain = row["runs"], "–"
        if (other := plain.get((row["stream"], row["learner"]), row)) is not row:
            pairs = zip(runs, other["runs"], strict=False)  # the seeds that both have
            gain = Estimate.of([one["fwt"] - less["fwt"] for one, less in pairs]).format("+.3f")
        fwt, *others = (estimate(runs, name) for name in names)
        about = [row["stream"], row["learner"], row["network"], f"{row['lr']}"]
        lines.append(f"| {' | '.join([*about, fwt, gain, *others])} |")
    return "\n".join(lines)


def positions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: accuracy on a task before it is learned, by its place in the random order."""
    rows = [row for row in rows if row["stream"] == "rotations" and row["network"] in STYLES]
    parts = np.array_split(np.arange(len(rows[0]["runs"][0]["next task"])), 4)
    names = [f"tasks {part[0] + 2} to {part[-1] + 2}" for part in parts]
    lines = [f"| learner | network | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for row in rows:
        means = [[np.mean(np.array(one["next task"])[part]) for one in row["runs"]]
                 for part in parts]  # fmt: skip
        cells = [Estimate.of(one).format(".3f") for one in means]
        lines.append(f"| {row['learner']} | {row['network']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


#: Networks that are drawn, with their lines and hatches.
STYLES = {PLAIN: ("--", "//"), CONDITIONED: ("-", ""), ORACLE: (":", ""), RANDOM: ("-.", "")}
NAMES = {"gem": "GEM", "single": "Single"}


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy on the next task before it is learned, and on what is held out altogether."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    rows = [row for row in rows if row["network"] in STYLES]
    for row in (row for row in rows if row["stream"] == "rotations"):
        accuracy = np.mean([one["next task"] for one in row["runs"]], 0)
        line, _ = STYLES[row["network"]]
        seen = range(1, len(accuracy) + 1)
        left.plot(seen, accuracy, line, color=_color(row), label=_label(row))
    left.set(xlabel="tasks learned", ylabel="accuracy on the next task, not yet learned")
    left.set(title="rotations in random order", ylim=(0, 1))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(alpha=0.3)
    left.legend(loc="lower right", fontsize=9)
    labels: list[str] = []
    for name in ("interpolated", "extrapolated", "combinations"):
        for row in (row for row in rows if name in row["runs"][0]):
            value = Estimate.of([one[name] for one in row["runs"]])
            _, hatch = STYLES[row["network"]]
            right.barh(
                len(labels),
                value.mean,
                xerr=value.half_width,
                color=_color(row),
                hatch=hatch,
                alpha=0.8,
                capsize=3,
            )
            labels.append(f"{name}: {_label(row)}")
    right.set_yticks(range(len(labels)), labels, fontsize=9)
    right.invert_yaxis()
    right.set(xlabel="accuracy at the end", xlim=(0, 1), title="never learned")
    figure.savefig(path)


def _label(row: Mapping[str, Any]) -> str:
    return f"{NAMES[row['learner']]}, {row['network']}"


def _color(row: Mapping[str, Any]) -> str:
    return f"C{LEARNERS.index(row['learner'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=STREAMS)
    parser.add_argument("--learners", nargs="+", default=LEARNERS, choices=LEARNERS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="as said above if left out")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="one: no search")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--memories", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("results/descriptors"))
    given = parser.parse_args()
    sizes = Sizes(given.tasks, given.examples, given.memories, given.data, given.device)
    rows = measured(
        sizes,
        given.streams,
        given.learners,
        given.networks,
        given.rates,
        given.seeds,
        given.workers,
    )
    given.out.mkdir(parents=True, exist_ok=True)
    about = {**asdict(sizes), "data": Path(given.data).name, "machine": machine(given.device)}
    whole = {"about": about, "seeds": given.seeds, "rows": rows}
    (given.out / "descriptors.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    text = table(rows)
    (given.out / "descriptors.md").write_text(f"{text}\n\n{about['machine']}\n", "utf-8")
    picture(rows, given.out / "descriptors.png")
    print(text)


if __name__ == "__main__":
    main()
