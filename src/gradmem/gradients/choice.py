"""Which way to compute G: the fastest that agrees with the plain loop, found by trying."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.gradients.batched import batched_gradients, layer_without_rule
from gradmem.gradients.chain import ChainGradients, is_chain
from gradmem.gradients.flat import parameters
from gradmem.gradients.functional import functional_gradients, is_vectorisable
from gradmem.gradients.loop import loop_gradients
from gradmem.gradients.precision import computing_in
from gradmem.memory.stack import Stack

__all__ = ["METHODS", "Method", "as_it_was", "choose", "few_of"]

Method = Callable[[nn.Module, Stack, Tensor], None]

#: Name → what makes the method, from the fastest to the most general.
METHODS: dict[str, Callable[[], Method]] = {
    "chain": ChainGradients,
    "batched": lambda: batched_gradients,
    "func": lambda: functional_gradients,
    "loop": lambda: loop_gradients,
}


def choose(network: nn.Module, few: Stack, precision: str = "fp32") -> str:
    """The fastest method that gives what the loop gives on a few memories of two tasks."""
    usable = {
        "chain": is_chain(network) and few.x.ndim == 3 and precision != "bf16",
        "batched": layer_without_rule(network) is None,
        "func": True,
    }
    with as_it_was(network), computing_in("fp32", few.x.device):
        if not is_vectorisable(network, few.x[0]):
            return "loop"
        network, few, expected = _reference(network, few)
        tolerance = 1e-3 if expected[0].dtype != torch.float64 else 1e-6
        for name in (name for name, fits in usable.items() if fits):
            try:
                found = _result(METHODS[name](), network, few)
            except Exception:
                continue
            pairs = zip(found, expected, strict=True)
            if all(_are_close(one, other, tolerance) for one, other in pairs):
                return name
    return "loop"


def _are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    largest = float(expected.abs().max())
    return torch.allclose(found, expected, rtol=tolerance, atol=0.1 * tolerance * largest)


def _reference(network: nn.Module, few: Stack) -> tuple[nn.Module, Stack, list[Tensor]]:
    """The loop's result and what it was computed from: a copy in double precision, if there can be.

    In single precision a deep network's gradients may differ by rounding alone: a ReLU whose input
    is next to zero is on one side for one method and on the other for another.
    """
    try:
        double = copy.deepcopy(network).double()
        x = few.x.double() if few.x.is_floating_point() else few.x
        exact = Stack(x, few.y, few.counts, few.masks)
        return double, exact, _result(loop_gradients, double, exact)
    except Exception:
        return network, few, _result(loop_gradients, network, few)


def few_of(stacks: list[Stack]) -> Stack | None:
    """A few examples of two tasks with inputs of one kind: enough to tell right from wrong.

    One task would not be: a network whose examples influence each other goes unnoticed then.
    """
    ends = [part for stack in stacks for part in (stack[:1], stack[-1:])]
    for first, second in itertools.combinations(ends, 2):
        same = first.x.shape[2:] == second.x.shape[2:]
        if not same or second.x.data_ptr() == first.x.data_ptr():
            continue
        n = min(3, *first.counts, *second.counts)
        x, y = (
            torch.cat([a[:, :n], b[:, :n]]) for a, b in ((first.x, second.x), (first.y, second.y))
        )
        masks = (
            None
            if first.masks is None or second.masks is None
            else (torch.cat([first.masks, second.masks]))
        )
        return Stack(x, y, (n, n), masks)
    return None


def _result(method: Method, network: nn.Module, stack: Stack) -> list[Tensor]:
    """G, and what becomes of the network's buffers; they are put back."""
    weights = parameters(network)
    out = weights[0].new_empty((len(stack), sum(w.numel() for w in weights)))
    with as_it_was(network):
        method(network, stack, out)
        return [out, *(buffer.clone() for buffer in network.buffers())]


@contextmanager
def as_it_was(network: nn.Module) -> Iterator[None]:
    """Try something out: no dropout, and buffers and random numbers are put back afterwards."""
    buffers: list[tuple[Tensor, Tensor]] = [(b, b.clone()) for b in network.buffers()]
    dropouts: list[Any] = [
        part
        for part in network.modules()
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training
    ]
    for part in dropouts:
        part.training = False
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part in dropouts:
            part.training = True
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
