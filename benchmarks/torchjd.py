"""Milliseconds of TorchJD's UPGrad weights with its own projector and with `ExactProjector`.

    python -m benchmarks.torchjd [--device cuda] [--objectives 8 32 64 256] [--save FILE]
    python -m benchmarks.torchjd --device cuda --reference FILE

Both are timed in turns, on the same Gramians of m random or ill-conditioned gradients. The largest
difference between their weights is printed beside. Where qpsolvers or quadprog is missing only
`ExactProjector` is timed; `--reference` compares it with the weights that `--save` wrote elsewhere.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.measure import machine
from gradmem.integrations.torchjd import ExactProjector

KINDS = ("random", "ill-conditioned")


def gramian(kind: str, m: int) -> Tensor:
    """JJᵀ: (m, m) in double precision, the same on every machine up to rounding."""
    J = torch.from_numpy(np.random.default_rng(m).standard_normal((m, 2 * m)))
    if kind == "ill-conditioned":
        U, s, V = torch.linalg.svd(J, full_matrices=False)
        J = (U * torch.logspace(0, -8, len(s), dtype=torch.float64)) @ V
    return J @ J.T


def own_projector() -> Any:
    """TorchJD's projector, or None where what it needs is not installed."""
    try:
        from torchjd.linalg import QuadprogProjector

        return QuadprogProjector()
    except ImportError:
        return None


def times(actions: dict[str, Any], device: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, sorted; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first is to warm up
                found[name].append(1e3 * (time.perf_counter() - begin))
    return {name: sorted(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--objectives", type=int, nargs="+", default=[8, 32, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write Gramians and weights here")
    parser.add_argument("--reference", type=Path, help="what --save wrote, to be compared with")
    options = parser.parse_args()
    reference = load_file(options.reference) if options.reference else {}
    saved: dict[str, Tensor] = {}
    print(machine(options.device))
    print("| objectives | Gramian | TorchJD's, ms | ExactProjector, ms | largest difference |")
    print("|---|---|---|---|---|")
    for m in options.objectives:
        for kind in KINDS:
            name = f"{kind} {m}"
            G = reference.get(f"{name} gramian", gramian(kind, m))
            saved[f"{name} gramian"] = G
            G = G.to(options.device)
            U = torch.eye(m, dtype=G.dtype, device=G.device) / m
            projectors = {"theirs": own_projector(), "ours": ExactProjector()}
            actions = {
                key: (lambda projector=projector, U=U, G=G: projector(U, G))
                for key, projector in projectors.items()
                if projector is not None
            }
            taken = times(actions, options.device, options.repeats)
            saved[f"{name} weights"] = weights = projectors["ours"](U, G).cpu()
            theirs = reference.get(f"{name} weights")
            if "theirs" in actions:
                theirs = actions["theirs"]().cpu()
                saved[f"{name} weights"] = theirs
            cells = [
                f"{values[len(values) // 2]:.3g} ({values[0]:.3g}–{values[-1]:.3g})"
                if (values := taken.get(key))
                else "–"
                for key in ("theirs", "ours")
            ]
            apart = "–" if theirs is None else f"{float((weights - theirs).abs().max()):.1e}"
            print(f"| {m} | {kind} | {' | '.join(cells)} | {apart} |", flush=True)
    if options.save:
        save_file(saved, options.save)


if __name__ == "__main__":
    main()
