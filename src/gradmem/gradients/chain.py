"""G for plain chains of layers (MLPs), written out: the products and little else.

The same pass as in `batched.py`, without autograd in between. Activations and gradients live in
buffers that are kept from step to step, ReLU works in place, and no large temporaries are made,
whose memory the system would have to hand out anew in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradmem.gradients.flat import parameters, rows_by_parameter
from gradmem.gradients.rules import linear
from gradmem.stack import Stack

__all__ = ["ChainGradients", "is_chain"]


def is_chain(network: nn.Module, x: Tensor) -> bool:
    """Whether a network is linear layers with ReLU between them, on inputs x: (n, features)."""
    if type(network) is not nn.Sequential or x.ndim != 2:
        return False
    kinds = [_kind(layer) for layer in network]
    plain = not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())
    learns = all(w.requires_grad for w in network.parameters())
    once = len(set(map(id, network.parameters()))) == sum(1 for _ in _all_parameters(network))
    return bool(kinds) and kinds[0] is nn.Linear and None not in kinds and plain and learns and once


class ChainGradients:
    """Computes G for a chain; keeps its buffers."""

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    @torch.no_grad()
    def __call__(self, network: nn.Module, stack: Stack, out: Tensor) -> None:
        """Write the gradient of each task's mean loss into its row of out: (k, p)."""
        k, m = stack.y.shape
        rows = rows_by_parameter(out, parameters(network))
        blocks = _blocks(network)
        x = [stack.x.flatten(0, 1)]  # what each block is given, and what the last one gives
        for number, (layer, relu) in enumerate(blocks):
            y = self._linear(layer, x[-1], number)
            x.append(y.relu_() if relu else y)
        grad = stack.slopes(x[-1].unflatten(0, (k, m))).flatten(0, 1)
        for number, (layer, relu) in reversed(list(enumerate(blocks))):
            if relu:  # nothing flows back where ReLU gave zero
                torch.ops.aten.threshold_backward.grad_input(
                    grad, x[number + 1], 0, grad_input=grad
                )
            own = {name: rows[w] for name, w in layer.named_parameters()}
            linear(layer, x[number].unflatten(0, (k, m)), grad.unflatten(0, (k, m)), own, 0)
            if number > 0:
                below = self._buffer(("grad", number), grad, len(grad), layer.in_features)
                grad = torch.mm(grad, _right_factor(layer.weight, grad), out=below)

    def _linear(self, layer: nn.Linear, x: Tensor, number: int) -> Tensor:
        y = self._buffer(("output", number), x, len(x), layer.out_features)
        if layer.bias is None:
            return torch.mm(x, layer.weight.T, out=y)
        return torch.addmm(layer.bias, x, layer.weight.T, out=y)

    def _buffer(self, key: object, like: Tensor, n: int, width: int) -> Tensor:
        if like.is_cuda:  # its allocator keeps what is freed, and a graph has a pool of its own
            return like.new_empty((n, width))
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < n or buffer.shape[1] != width:
            self._buffers[key] = buffer = like.new_empty((n, width))
        return buffer[:n]


def _right_factor(weight: Tensor, grad: Tensor) -> Tensor:
    """The weight as it is best multiplied from the right.

    For a few rows, cuBLAS takes a kernel that is ten times slower than the one it takes when the
    weight is transposed in memory (10 × 100 by 100 × 100 on an H200: 52 µs).
    """
    return weight.T.contiguous().T if grad.is_cuda and len(grad) <= 64 else weight


def _blocks(network: nn.Module) -> list[tuple[nn.Linear, bool]]:
    """The linear layers, each with whether a ReLU follows."""
    blocks: list[tuple[nn.Linear, bool]] = []
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            blocks.append((layer, False))
        else:
            blocks[-1] = (blocks[-1][0], True)
    return blocks


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    kinds: Sequence[type[nn.Module]] = (nn.Linear, nn.ReLU)
    return next((kind for kind in kinds if type(layer).forward is kind.forward), None)


def _all_parameters(network: nn.Module) -> list[nn.Parameter]:
    return [w for layer in network.modules() for w in layer.parameters(recurse=False)]
