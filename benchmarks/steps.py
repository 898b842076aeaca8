"""Milliseconds per step at k past tasks: GEM, GEM as it is usually written, A-GEM, EWC, Single.

    python -m benchmarks.steps [--device cuda] [--past 1 5 10 19 50 100]

The paper's MNIST settings: MLP 784-100-100-10, 256 memories a task, batches of 10. Steps are taken
on real (rotated) digits after two hundred steps of training on the past tasks, so that constraints
are violated as they are in a run. After each pass over the new task's examples the weights are put
back: in a run examples are seen once, and a network that knows them by heart meets others.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gradmem as gm
from benchmarks.measure import bare_products, machine, time_it
from benchmarks.plain import PlainGEM
from gradmem.learners import Learner

MEMORIES = 256


def learners(device: str) -> dict[str, Callable[[], Learner]]:
    def net() -> torch.nn.Module:
        return gm.mlp().to(device)

    return {
        "GEM": lambda: gm.GEM(net(), memories=MEMORIES),
        "GEM, plain loop": lambda: PlainGEM(net(), memories=MEMORIES),
        "A-GEM, all memories": lambda: gm.AGEM(net(), memories=MEMORIES, sample=None),
        "A-GEM, 256 of them": lambda: gm.AGEM(net(), memories=MEMORIES, sample=256),
        "EWC": lambda: gm.EWC(net(), lr=0.01, regularization=1.0, memories=10),
        "Single": lambda: gm.Single(net()),
    }


def table(device: str, pasts: list[int]) -> Iterator[list[str]]:
    """A heading, and one row per number of past tasks."""
    names = list(learners(device))
    heading = ["past tasks", *names, "bare products", "G", "G / bare", "projection, share of step"]
    if device == "cuda":
        heading.append("peak MB (GEM)")
    yield heading
    for k in pasts:
        yield _row(device, k)


def _row(device: str, k: int) -> list[str]:
    continuum = gm.mnist_rotations(k + 1, MEMORIES, data="sample").to(device)
    cells = [str(k)]
    repeats, inner = (20, 10) if device == "cuda" else (max(8, 60 // k), 1)
    for name, make in learners(device).items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        learner = make()
        batches = prepare(learner, continuum, k)

        def step(learner: Learner = learner, batches=batches) -> None:  # type: ignore[no-untyped-def]
            x, t, y = next(batches)
            learner.observe(x, t, y, check=device == "cpu")

        slow = name == "GEM, plain loop"
        cells.append(str(time_it(step, device, max(5, repeats // 3) if slow else repeats, inner)))
        if name == "GEM":
            gem, gem_batches = learner, batches
            whole = time_it(step, device, repeats, inner).median
            peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0
    assert isinstance(gem, gm.GEM)
    past = gem.memory.stacks(list(range(k)))
    engine = time_it(lambda: gem.constraints.engine(past), device, repeats, inner)
    floor = time_it(bare_products(k, MEMORIES, device), device, repeats, inner)
    share = _projection(gem, gem_batches, k, device, repeats, inner) / whole
    cells += [str(floor), str(engine), f"{engine.median / floor.median:.2f}", f"{share:.0%}"]
    return cells + ([f"{peak:.0f}"] if device == "cuda" else [])


def prepare(learner: Learner, continuum: gm.Continuum, k: int):  # type: ignore[no-untyped-def]
    """Fill the memory with k tasks, and train a little on all of them."""
    for step in range(200):
        task = continuum.tasks[step * k // 200]
        x, y = task.train[torch.randint(len(task.train), (10,)).to(task.train.x.device)]
        if not hasattr(learner, "memory") or isinstance(learner, gm.EWC):
            learner.observe(x, task.t, y)
        else:
            _descend(learner, x, y)
    if isinstance(learner, gm.GEM | gm.AGEM | PlainGEM):
        for task in continuum.tasks[:k]:
            x, y = task.train[:]
            learner.memory.add(x, task.t, y)
    return _one_pass_again_and_again(learner, list(continuum[k]))


def _one_pass_again_and_again(learner: Learner, batches: list[Any]) -> Iterator[Any]:
    weights = list(learner.network.parameters())
    before = [w.detach().clone() for w in weights]
    while True:
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
        yield from batches


def _descend(learner: Learner, x: torch.Tensor, y: torch.Tensor) -> None:
    """Plain descent, for learners that would otherwise take their own, slower steps."""
    learner.optimizer.zero_grad()
    torch.nn.functional.cross_entropy(learner.network(x), y).backward()
    learner.optimizer.step()


def _projection(
    gem: gm.GEM, batches: Iterator[Any], k: int, device: str, repeats: int, inner: int
) -> float:
    """The projection's milliseconds, at gradients of steps that are taken."""
    past = gem.memory.stacks(list(range(k)))
    cases = []
    for x, t, y in itertools.islice(batches, 20):
        G, g, _ = gem.constraints.engine.with_batch(past, x, t, y)
        cases.append((g.clone(), G.clone()))
        gem.observe(x, t, y)
    turn = itertools.cycle(cases)
    if device == "cpu":
        return time_it(
            lambda: gem.constraints.project(*next(turn)), device, max(repeats, 20), inner
        ).median
    graphs = []
    for g, G in cases:
        gem.constraints.project(g, G)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gem.constraints.project(g, G)
        graphs.append(graph)
    replays = itertools.cycle(graphs)
    return time_it(lambda: next(replays).replay(), device, repeats, len(graphs)).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--past", type=int, nargs="+", default=[1, 5, 10, 19, 50, 100])
    arguments = parser.parse_args()
    print(f"Milliseconds per step, median (10th–90th percentile). {machine(arguments.device)}\n")
    for i, row in enumerate(table(arguments.device, arguments.past)):
        print("| " + " | ".join(row) + " |", flush=True)
        if i == 0:
            print("|" + "---|" * len(row))


if __name__ == "__main__":
    main()
