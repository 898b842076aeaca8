"""Which way to compute G: the fastest that agrees with the plain loop, found by trying.

Everything is tried on copies of the network: the user's own is not touched.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gradmem.gradients.batched import UnsuitableError, batched_gradients, layer_without_rule
from gradmem.gradients.chain import ChainGradients, is_chain
from gradmem.gradients.flat import parameters
from gradmem.gradients.functional import FunctionalGradients, has_module_twice, is_vectorisable
from gradmem.gradients.loop import loop_gradients
from gradmem.gradients.objective import Forward, Objective
from gradmem.gradients.precision import computing_in
from gradmem.memory.stack import Stack
from gradmem.trees import Tree, kind, leaves, take, tree_map

__all__ = ["METHODS", "Method", "choose", "few_examples", "is_enough", "operations"]

#: Writes the gradient of each task's mean loss into its row of out: (k, p).
Method = Callable[[Objective, Stack, Tensor], Any]

#: Name → what makes the method, from the fastest to the most general.
METHODS: dict[str, Callable[[], Method]] = {
    "chain": ChainGradients,
    "batched": lambda: batched_gradients,
    "func": FunctionalGradients,
    "loop": lambda: loop_gradients,
}


#: Operations of one task's pass from which on several at once gain nothing, by kind of device:
#: first those by torch.func, then those by rules. Measured on two cores, and on an H200.
ENOUGH = {"cpu": (1e8, 1e10), "cuda": (1e11, 1e11)}


def operations(objective: Objective, stack: Stack) -> float:
    """A guess at what a pass over one task's memories takes: each parameter, once per position."""
    first = leaves(stack.x)[0]
    m, rest = first.shape[1], first.shape[2:]
    # Tokens and rows of features are positions; the places of an image are not counted.
    positions = m * (rest[0] if len(rest) == 2 or (rest and not first.is_floating_point()) else 1)
    return float(6 * positions * sum(w.numel() for w in objective.network.parameters()))


def is_enough(objective: Objective, stack: Stack) -> bool:
    """Whether a pass over one task's memories is so large that several at once gain nothing."""
    kind_of_device = leaves(stack.x)[0].device.type
    return operations(objective, stack) >= ENOUGH.get(kind_of_device, ENOUGH["cuda"])[0]


def choose(objective: Objective, few: Stack, precision: str = "fp32", work: float = 0.0) -> str:
    """The fastest method that gives what the loop gives on a few memories of two tasks.

    `work` is what a pass over one task's memories takes (`operations`): large ones go one by one.
    It is not a time, so that the same data take the same way in every run.
    """
    if objective.own_loss is not None:
        return "loop"  # a loss of a batch as a whole has no outputs that others could use
    network = objective.network
    device = leaves(few.x)[0].device
    by_func, by_rules = ENOUGH.get(device.type, ENOUGH["cuda"])
    usable = {
        "chain": is_chain(network) and precision != "bf16",
        "batched": layer_without_rule(network) is None and work < by_rules,
        "func": not has_module_twice(network) and work < by_func,
    }
    if not any(usable.values()):
        return "loop"
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), computing_in("fp32", device):
        try:
            copied = objective.copied()
        except Exception:
            return "loop"  # it cannot be copied, so nothing can be tried
        _stop_dropout(copied.network)
        if not is_vectorisable(copied.copied(), take(few.x, slice(1))):
            return "loop"
        usable["func"] = usable["func"] and _noise_is_vectorisable(objective, copied, few)
        tried, few, expected = _reference(copied, few)
        tolerance = 1e-6 if expected[0].dtype == torch.float64 else 1e-3
        for name in (name for name, fits in usable.items() if fits):
            found = _attempt(name, tried, few)
            if found is not None and all(
                _are_close(one, other, tolerance)
                for one, other in itertools.zip_longest(found, expected)
            ):
                return name
    return "loop"


def _noise_is_vectorisable(objective: Objective, copied: Objective, few: Stack) -> bool:
    """Whether torch.func can follow what changes inputs while learning, which is not tried else."""
    transform, noise = objective.forward.transform, objective.forward.noise
    noisy = replace(copied.copied(), forward=Forward(transform, noise))
    return noise is None or is_vectorisable(noisy, take(few.x, slice(1)))


def _attempt(name: str, objective: Objective, few: Stack) -> list[Tensor] | None:
    """What a method gives; None if it cannot be used, which is said where it is not expected."""
    try:
        return _result(METHODS[name](), objective, few)
    except UnsuitableError:
        return None
    except Exception as error:
        in_place = isinstance(error, RuntimeError) and "in-place" in str(error)
        if name != "func" and not in_place:  # vmap cannot follow everything
            kinds = {type(part).__name__ for part in objective.network.modules()}
            warnings.warn(
                f'gradients="{name}" failed on a network of {", ".join(sorted(kinds))} and is not '
                f"used: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None


def _are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found is None or expected is None:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    largest = float(expected.abs().max().nan_to_num())
    return torch.allclose(found, expected, rtol=tolerance, atol=0.1 * tolerance * largest)


def _reference(objective: Objective, few: Stack) -> tuple[Objective, Stack, list[Tensor]]:
    """The loop's result and what it was computed from: in double precision, if there can be.

    In single precision a deep network's gradients may differ by rounding alone: a ReLU whose input
    is next to zero is on one side for one method and on the other for another.
    """
    try:
        double = objective.copied()
        double.network.double()
        x, y = (tree_map(_doubled, tree) for tree in (few.x, few.y))
        exact = Stack(x, y, few.counts, few.masks, tasks=few.tasks)
        return double, exact, _result(loop_gradients, double, exact)
    except Exception:
        return objective, few, _result(loop_gradients, objective, few)


def _doubled(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def few_examples(stacks: list[Stack]) -> Stack | None:
    """A few examples of two tasks with inputs of one kind: enough to tell right from wrong.

    One task would not be: a network whose examples influence each other goes unnoticed then.
    """
    ends = [part for stack in stacks for part in (stack[:1], stack[-1:])]
    for first, second in itertools.combinations(ends, 2):
        if kind(_examples(first)) != kind(_examples(second)) or first.key == second.key:
            continue
        if (n := min(3, *first.counts, *second.counts)) == 0:
            continue
        filled = (slice(None), slice(n))
        x, y = (
            tree_map(lambda *pair: torch.cat(pair), take(one, filled), take(other, filled))
            for one, other in ((first.x, second.x), (first.y, second.y))
        )
        masks = None
        if first.masks is not None and second.masks is not None:
            masks = torch.cat([first.masks, second.masks])
        return Stack(x, y, (n, n), masks, tasks=first.tasks + second.tasks)
    return None


def _examples(stack: Stack) -> Tree:
    return take(stack.x, 0), take(stack.y, 0)


def _result(method: Method, objective: Objective, stack: Stack) -> list[Tensor]:
    """G, and what becomes of the buffers of a copy of the network."""
    copied = objective.copied()
    weights = parameters(copied.network)
    out = weights[0].new_empty((len(stack), sum(w.numel() for w in weights)))
    method(copied, stack, out)
    return [out, *(buffer.detach().clone() for buffer in copied.network.buffers())]


def _stop_dropout(network: nn.Module) -> None:
    for part in network.modules():
        if isinstance(part, _DropoutNd):
            part.training = False
