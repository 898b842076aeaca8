"""G by `torch.func`: the gradient of one task's loss, vectorised over tasks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from gradmem.gradients.flat import parameters
from gradmem.memory.stack import Stack

__all__ = ["functional_gradients"]


def functional_gradients(network: nn.Module, stack: Stack, out: Tensor) -> None:
    """Write the gradient of each task's mean loss into its row of out: (k, p).

    For modules without a rule. Raises where vmap cannot follow: data-dependent control flow,
    buffers that change (batch statistics).
    """
    weights = parameters(network)
    # One name per parameter: a tied one has several, and functional_call ties them again.
    named = {name: w.detach() for name, w in network.named_parameters() if w.requires_grad}
    assert len(named) == len(weights)

    def loss(tensors: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        logits = functional_call(network, tensors, (x,))
        one = Stack(x[None], y[None], (len(y),), None if mask is None else mask[None])
        return one.losses(logits[None]).sum()

    start = 0
    for part in stack.level():
        dims: tuple[Any, ...] = (None, 0, 0, None if part.masks is None else 0)
        per_task = vmap(grad(loss), in_dims=dims, randomness="different")
        grads = per_task(named, part.x, part.y, part.masks)
        rows = [grads[name].flatten(1) for name in named]
        torch.cat(rows, dim=1, out=out[start : start + len(part)])
        start += len(part)


def is_vectorisable(network: nn.Module, x: Tensor) -> bool:
    """Whether vmap can follow the forward pass on x: (n, …): no control flow depends on data."""
    # Batch statistics stop vmap, too, but they are no control flow, and there is a rule for them.
    normalising = [part for part in network.modules() if isinstance(part, _BatchNorm)]
    try:
        for part in normalising:
            part.forward = _as_it_is  # type: ignore[assignment]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations that vmap does one by one
            vmap(network, randomness="different")(x[None])
    except Exception:
        return False
    finally:
        for part in normalising:
            part.__dict__.pop("forward", None)
    return True


def _as_it_is(x: Tensor) -> Tensor:
    return x
