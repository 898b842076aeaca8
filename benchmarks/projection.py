"""Microseconds of single projections on a GPU, at gradients of steps that are taken.

    python -m benchmarks.projection [--past 19 50 100]

One line per step: constraints that the gradient violates, constraints that bind in the end, and the
time of the projection, recorded as a CUDA graph and replayed fifty times.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import gradmem as gm
from benchmarks.measure import machine, time_it
from benchmarks.steps import MEMORIES, prepare
from gradmem.projection import Projection


def microseconds(g: torch.Tensor, G: torch.Tensor) -> tuple[dict[str, int], float]:
    """What there was to do in one projection, and its time."""
    project = Projection(margin=0.5)
    project(g, G)
    counts = project.counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        project(g, G)
    return counts, time_it(graph.replay, "cuda", 5, 50).median * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--past", type=int, nargs="+", default=[19, 50, 100])
    print(machine("cuda"))
    for k in parser.parse_args().past:
        continuum = gm.mnist_rotations(k + 1, MEMORIES, data="sample").to("cuda")
        learner = gm.GEM(gm.mlp().cuda(), memories=MEMORIES)
        batches = prepare(learner, continuum, k)
        past = learner.memory.stacks(list(range(k)))
        for x, t, y in itertools.islice(batches, 20):
            G, g, _ = learner.constraints.engine.with_batch(past, x, t, y)
            counts, time = microseconds(g.clone(), G.clone())
            print(
                f"{k} past tasks: {counts['violated_constraints']} violated, "
                f"{counts['active_constraints']} bind, {time:.0f} µs",
                flush=True,
            )
            learner.observe(x, t, y)


if __name__ == "__main__":
    main()
