"""Times of single projections.

    python -m benchmarks.projection [--past 19 50 100]
    python -m benchmarks.projection --device cpu [--sizes 10x20000000 10x10000000 12x89610]

On a GPU, at gradients of steps that are taken, one line per step: constraints that the gradient
violates, constraints that bind in the end, and microseconds of the projection, recorded as a CUDA
graph and replayed fifty times.

On a CPU, at random gradients of k tasks with p parameters: milliseconds of GGᵀ and Gg alone, in
single precision, and of `Projection` where all, a third or none of the constraints are violated.
They take turns; medians, with the fastest and the slowest, and the ratio of the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

import gradmem as gm
from benchmarks.measure import machine, time_it
from benchmarks.steps import MEMORIES, prepare
from gradmem.projection import Projection


def microseconds(g: Tensor, G: Tensor) -> tuple[dict[str, int], float]:
    """What there was to do in one projection, and its time."""
    project = Projection(margin=0.5)
    project(g, G)
    counts = project.counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        project(g, G)
    return counts, time_it(graph.replay, "cuda", 5, 50).median * 1e3


def on_gpu(past: list[int]) -> None:
    for k in past:
        continuum = gm.mnist_rotations(k + 1, MEMORIES, data="sample").to("cuda")
        learner = gm.GEM(gm.mlp().cuda(), memories=MEMORIES)
        batches = prepare(learner, continuum, k)
        stacks = learner.memory.stacks(list(range(k)))
        for x, t, y in itertools.islice(batches, 20):
            G, g, _ = learner.constraints.engine.with_batch(stacks, x, t, y)
            counts, time = microseconds(g.clone(), G.clone())
            print(
                f"{k} past tasks: {counts['violated_constraints']} violated, "
                f"{counts['active_constraints']} bind, {time:.0f} µs",
                flush=True,
            )
            learner.observe(x, t, y)


def problem(k: int, p: int) -> tuple[Tensor, dict[str, Tensor]]:
    """G: (k, p), rows that have a part in common; and g: (p,) by what it violates."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(k, p, generator=generator)
    G += torch.randn(p, generator=generator)
    g = torch.randn(p, generator=generator)
    signs = {"all": torch.full((k,), -1.0), "a third": torch.ones(k), "none": torch.ones(k)}
    signs["a third"][::3] = -1.0
    GGt = G @ G.T
    return G, {
        name: g + G.T @ torch.linalg.solve(GGt, 0.1 * p * sign - G @ g)
        for name, sign in signs.items()
    }


def in_turns(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, sorted."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if turn:  # the first is to warm up
                found[name].append(1e3 * (time.perf_counter() - begin))
    return {name: sorted(values) for name, values in found.items()}


def on_cpu(sizes: list[str], repeats: int) -> None:
    names = ("all", "a third", "none")
    print(
        "| k | p | GGᵀ and Gg | " + " | ".join(f"{name} violated | ratio" for name in names) + " |"
    )
    print("|" + 9 * "---|")
    for k, p in (map(int, size.split("x")) for size in sizes):
        G, gradients = problem(k, p)
        project = Projection(margin=0.5)

        def bare(G: Tensor = G, g: Tensor = gradients["all"]) -> object:
            return G @ G.T, G @ g

        actions: dict[str, Callable[[], object]] = {"bare": bare}
        for name, g in gradients.items():
            actions[name] = lambda G=G, g=g, project=project: project(g, G)
        found = in_turns(actions, repeats)
        cells = [str(k), f"{p:,}"]
        for name, times in found.items():
            median = times[len(times) // 2]
            cells.append(f"{median:.3g} ({times[0]:.3g}–{times[-1]:.3g})")
            if name != "bare":
                cells.append(f"{times[0] / found['bare'][0]:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--past", type=int, nargs="+", default=[19, 50, 100])
    parser.add_argument("--sizes", nargs="+", default=["10x20000000", "10x10000000", "12x89610"])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(machine(options.device))
    if options.device == "cuda":
        on_gpu(options.past)
    else:
        on_cpu(options.sizes, options.repeats)


if __name__ == "__main__":
    main()
