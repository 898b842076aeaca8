"""What becomes of GEM's promise with other optimizers: constrain="gradient" beside "update".

    python -m benchmarks.optimizers [--data FOLDER] [--tasks 10] [--examples 300] [--seeds 3]

The promise is that no step raises the loss at a remembered task, to first order. It is broken by a
step Δθ with ⟨g_k, Δθ⟩ > TOLERANCE |g_k| |Δθ|, g_k being the gradient at the memories of task k, at
the parameters before the step. Both ways to constrain take their steps in turn, in one process, so
that their times compare. One thread. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import gradmem as gm
from benchmarks.measure import evaluate, machine
from gradmem.constraints import CONSTRAINED
from gradmem.gradients import parameters
from gradmem.gradients.flat import flat
from gradmem.reports.summary import Estimate

#: ⟨g_k, Δθ⟩ relative to both lengths that is put down to rounding in single precision.
TOLERANCE = 1e-6
#: Seed of the data on which rates are chosen; the results have others.
SEARCH_SEED = 1000
MEMORIES = 100
MARGINS = (0.0, 0.5)
BENCHMARKS = {"rotations": gm.mnist_rotations, "permutations": gm.mnist_permutations}
#: Name → the optimizer without its rate, and the rates to choose from.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "SGD": (SGD, (0.03, 0.1, 0.3, 1.0)),
    "SGD, momentum 0.9": (partial(SGD, momentum=0.9), (0.003, 0.01, 0.03, 0.1)),
    "AdamW, decay 0.01": (partial(AdamW, weight_decay=0.01), (0.0003, 0.001, 0.003, 0.01)),
}


@dataclass
class Watched:
    """A learner, and what its steps did to the remembered tasks."""

    learner: gm.GEM
    against: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    R: list[Any] = field(default_factory=list)

    def observe(self, x: Tensor, t: int, y: Tensor) -> None:
        """Take a step; where there are other tasks, note its time and how far it goes against them.

        That is the largest cosine of the step with a remembered task's gradient.
        """
        others = [task for task in self.learner.memory if task != t]
        G = self.learner.constraints.gradients(others).double() if others else None
        before = self._parameters()
        start = time.perf_counter()
        self.learner.observe(x, t, y)
        seconds = time.perf_counter() - start
        step = self._parameters() - before
        if G is not None and step.any():
            self.seconds.append(seconds)
            self.against.append(float((G @ step / (G.norm(dim=1) * step.norm())).max()))

    def _parameters(self) -> Tensor:
        weights = parameters(self.learner.network)
        return flat([w.detach() for w in weights], weights).double()

    @property
    def broken(self) -> float:
        """The share of steps that broke the promise."""
        return statistics.fmean(angle > TOLERANCE for angle in self.against)


def new_learner(name: str, rate: float, constrain: str, margin: float, seed: int) -> gm.GEM:
    return gm.GEM(
        gm.mlp(seed=seed),
        optimizer=partial(OPTIMIZERS[name][0], lr=rate),
        constrain=constrain,
        margin=margin,
        memories=MEMORIES,
    )


def best_rate(name: str, continuum: gm.Continuum, constrain: str, margin: float) -> float:
    """The rate with the highest ACC on a fifth of each task's examples that is not learned."""
    held_out = continuum.held_out(0.2)

    def acc(rate: float) -> float:
        learner = new_learner(name, rate, constrain, margin, SEARCH_SEED)
        try:
            learner.learn_from(held_out, progress=False)
        except FloatingPointError:
            return 0.0
        return float(evaluate(learner, held_out).mean())

    return max(OPTIMIZERS[name][1], key=acc)


def side_by_side(continuum: gm.Continuum, learners: Iterable[gm.GEM]) -> list[Watched]:
    """Learners that take their steps on a continuum in turn."""
    watched = [Watched(learner) for learner in learners]
    for i in range(continuum.n_tasks):
        for x, t, y in continuum[i]:
            for one in watched:
                one.observe(x, t, y)
        for one in watched:
            one.R.append(evaluate(one.learner, continuum))
    return watched


def row(runs: list[Watched], beside: list[Watched], continuum: gm.Continuum) -> list[str]:
    """What the runs of all seeds measured, their seconds relative to those beside them."""
    baseline = [0.0] * continuum.n_tasks  # FWT, which it is for, is not asked
    metrics = [gm.transfer_metrics(one.R, baseline) for one in runs]
    pairs = zip(runs, beside, strict=True)
    times = [statistics.median(a.seconds) / statistics.median(b.seconds) for a, b in pairs]
    return [
        Estimate.of([100 * one.broken for one in runs]).format(".1f"),
        f"{max(0.0, *(max(one.against) for one in runs)):.1g}",
        Estimate.of([one.acc for one in metrics]).format(".3f"),
        Estimate.of([one.bwt for one in metrics]).format("+.3f"),
        Estimate.of(times).format(".2f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("cpu"))
    names = "MNIST | optimizer | margin | constrain | rate | steps against a task, % | worst cosine"
    print(f"\n| {names} | ACC | BWT | time of a step |")
    print("|---" * 10 + "|", flush=True)
    for benchmark, make in BENCHMARKS.items():
        make = partial(make, arguments.tasks, arguments.examples, data=arguments.data)
        search = make(seed=SEARCH_SEED)
        continua = [make(seed=seed) for seed in range(arguments.seeds)]
        for name in OPTIMIZERS:
            for margin in MARGINS:
                rates = {way: best_rate(name, search, way, margin) for way in CONSTRAINED}
                runs = [
                    side_by_side(
                        continuum,
                        [new_learner(name, rates[way], way, margin, seed) for way in CONSTRAINED],
                    )
                    for seed, continuum in enumerate(continua)
                ]
                by_way = [list(one) for one in zip(*runs, strict=True)]
                for (way, rate), own in zip(rates.items(), by_way, strict=True):
                    cells = [benchmark, name, f"{margin:g}", way, f"{rate:g}"]
                    cells += row(own, by_way[0], search)
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
