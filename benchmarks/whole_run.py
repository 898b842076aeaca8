"""A whole run of GEM on 20 rotated tasks, with its evaluations, beside the plain loop.

    python -m benchmarks.whole_run [--device cuda] [--data FOLDER] [--seeds 1] [--no-plain]

`--no-plain` leaves the plain loop out, `--no-gradients` the memory gradients beside bare products,
`--precisions fp32` all other precisions.

On a GPU a run is repeated from the same state, so that the graphs recorded by the first two are
there (in the first, memories move as they grow): these are cold, the others are warm.
"""

from __future__ import annotations

import argparse
import time

import torch

import gradmem as gm
from benchmarks.measure import bare_products, machine, time_it
from benchmarks.plain import PlainGEM
from gradmem.gradients import MemoryGradients
from gradmem.learners import Learner
from gradmem.memory import Stack


def timed_run(learner: Learner, continuum: gm.Continuum) -> tuple[float, gm.Result]:
    """Seconds on the wall, everything included, and the result."""
    if continuum.tests[0].x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = gm.run(learner, continuum)
    return time.perf_counter() - start, result


def gradients_of_a_run(device: str, steps_per_task: int = 100) -> str:
    """Seconds for all memory gradients of a run, beside the bare matrix products."""
    network = gm.mlp().to(device)
    engine = MemoryGradients(network)
    ours = bare = 0.0
    for k in range(1, 20):
        stack = Stack(
            torch.rand(k, 256, 784, device=device),
            torch.randint(10, (k, 256), device=device),
            (256,) * k,
        )
        products = bare_products(k, 256, device)
        repeats = max(5, 60 // k)
        # alternately, so that both see the same machine
        pairs = [
            (
                time_it(lambda stack=stack: engine([stack]), device, repeats).median,  # type: ignore[misc]
                time_it(products, device, repeats).median,
            )
            for _ in range(3)
        ]
        ours += sorted(pair[0] for pair in pairs)[1] * steps_per_task / 1e3
        bare += sorted(pair[1] for pair in pairs)[1] * steps_per_task / 1e3
    return (
        f"memory gradients of a run: {ours:.2f} s, bare matrix products {bare:.2f} s, "
        f"ratio {ours / bare:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", default=None)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--precisions", nargs="+", default=None)
    arguments = parser.parse_args()
    device = arguments.device
    print(machine(device))
    if not arguments.no_gradients:
        print(gradients_of_a_run(device), flush=True)
    usual = ["fp32", "tf32", "bf16"] if device == "cuda" else ["fp32"]
    precisions = arguments.precisions or usual
    for seed in range(arguments.seeds):
        continuum = gm.mnist_rotations(data=arguments.data, seed=seed).to(device)
        for precision in precisions:
            learner = gm.GEM(gm.mlp(seed=seed).to(device), precision=precision)
            state = learner.state_dict()
            times = []
            for _ in range(7 if device == "cuda" else 1):
                learner.load_state_dict(state)
                seconds, result = timed_run(learner, continuum)
                times.append(f"{seconds:.3f}")
            print(
                f"seed {seed} GEM {precision} ({learner.gradients}): {', '.join(times)} s on the "
                f"wall; training {result.seconds_training:.2f}, evaluation "
                f"{result.seconds_evaluation:.2f}; ACC {result.acc:.4f} BWT {result.bwt:+.4f}",
                flush=True,
            )
        if not arguments.no_plain:
            plain = PlainGEM(gm.mlp(seed=seed).to(device))
            seconds, result = timed_run(plain, continuum)
            print(
                f"seed {seed} plain loop: {seconds:.2f} s on the wall; training "
                f"{result.seconds_training:.2f}, evaluation {result.seconds_evaluation:.2f}; "
                f"ACC {result.acc:.4f} BWT {result.bwt:+.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
