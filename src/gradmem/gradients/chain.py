"""G for plain chains of layers (MLPs), written out: the products and little else.

The same pass as in `batched.py`, without autograd in between. Activations and gradients live in
buffers that are kept from step to step, ReLU works in place, and no large temporaries are made,
whose memory the system would have to hand out anew in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import has_triton
from gradmem.gradients.batched import UnsuitableError
from gradmem.gradients.flat import parameters, rows_by_parameter
from gradmem.gradients.layer_rules import linear
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack

__all__ = ["ChainGradients", "chain_layers", "is_chain"]


def is_chain(network: nn.Module) -> bool:
    """Whether a network is linear layers with ReLU between them; inputs must be (n, features)."""
    if type(network) is not nn.Sequential:
        return False
    kinds = [_kind(layer) for layer in network]
    plain = not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())
    learns = all(w.requires_grad for w in network.parameters())
    # by the places they have: a layer or a weight that is used twice has several
    named = [(name, w) for layer in network for name, w in layer.named_parameters()]
    once = len({id(w) for _, w in named}) == len(named)
    usual = {name for name, _ in named} <= {"weight", "bias"}
    layers = bool(kinds) and kinds[0] is nn.Linear and None not in kinds
    return layers and plain and learns and once and usual


class ChainGradients:
    """Computes G for a chain; keeps its buffers."""

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def __call__(self, objective: Objective, stack: Stack, out: Tensor) -> None:
        """Write the gradient of each task's mean loss into its row of out: (k, p)."""
        self.together(objective, [(stack, out)])

    @torch.no_grad()
    def together(self, objective: Objective, parts: Sequence[tuple[Stack, Tensor]]) -> list[Tensor]:
        """The same for several stacks in one pass; returns the outputs of each: (k·m, outputs)."""
        network, forward = objective.network, objective.forward
        given = [stack.flat_x for stack, _ in parts]
        if forward.transform is not None or forward.noise is not None:
            given = [forward.prepared(network, forward.safe(network, x)) for x in given]
        if any(not isinstance(x, Tensor) or x.ndim != 2 for x in given):
            raise UnsuitableError(
                'gradients="chain" needs inputs (n, features); "batched" takes others'
            )
        weights = parameters(network)
        rows = [rows_by_parameter(out, weights) for _, out in parts]
        blocks = chain_layers(network)
        starts = [0, *accumulate(map(len, given))]
        spans = [slice(start, stop) for start, stop in pairwise(starts)]
        n, kernels = starts[-1], _has_kernels(network, given)

        gave: list[Tensor] = []  # what each block gave, for all parts
        for number, (layer, relu) in enumerate(blocks):
            y = self._buffer(("output", number), given[0], n, layer.out_features)
            gave.append(y)
            if number:
                _linear(layer, gave[-2], y)
            elif kernels:
                from gradmem.gradients.chain_device import first_layer

                first_layer(layer, relu, given[0], given[1] if len(given) > 1 else None, y)
                continue
            else:  # the inputs lie apart, what comes after them does not
                for x, span in zip(given, spans, strict=True):
                    _linear(layer, x, y[span])
            if relu:
                y.relu_()
        outputs = [gave[-1][span] for span in spans]
        grad = self._buffer("outputs' gradient", gave[-1], n, gave[-1].shape[1])
        for (stack, _), z, span in zip(parts, outputs, spans, strict=True):
            objective.criterion.outputs_gradient(z, stack, grad[span])
        grads = [grad]  # of what each block gave, the last one's first
        for number, (layer, relu) in reversed(list(enumerate(blocks))):
            if relu:  # nothing flows back where ReLU gave zero
                torch.ops.aten.threshold_backward.grad_input(grad, gave[number], 0, grad_input=grad)
            if not kernels:
                for i, ((stack, _), span) in enumerate(zip(parts, spans, strict=True)):
                    x = gave[number - 1][span] if number else given[i]
                    _weights(layer, x, grad[span], stack, rows[i])
            if number:
                below = self._buffer(("grad", number), grad, n, layer.in_features)
                grad = torch.mm(grad, layer.weight, out=below)
                grads.append(grad)
        if kernels:
            inputs = [given[0], *gave[:-1]]
            _reduce([layer for layer, _ in blocks], inputs, given[1:], grads[::-1], parts, rows[0])
        return outputs

    def _buffer(self, key: object, like: Tensor, n: int, width: int) -> Tensor:
        if like.is_cuda:  # its allocator keeps what is freed, and a graph has a pool of its own
            return like.new_empty((n, width))
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < n or buffer.shape[1] != width:
            self._buffers[key] = buffer = like.new_empty((n, width))
        return buffer[:n]


def _linear(layer: nn.Linear, x: Tensor, out: Tensor) -> None:
    if layer.bias is None:
        torch.mm(x, layer.weight.T, out=out)
    else:
        torch.addmm(layer.bias, x, layer.weight.T, out=out)


def _weights(
    layer: nn.Linear, x: Tensor, grad: Tensor, stack: Stack, rows: dict[nn.Parameter, Tensor]
) -> None:
    """The gradients of a layer's parameters at the memories of a stack, by its rule."""
    own = {name: rows[w] for name, w in layer.named_parameters()}
    linear(layer, x.unflatten(0, stack.room), grad.unflatten(0, stack.room), own, 0)


def _reduce(
    layers: Sequence[nn.Linear],
    inputs: Sequence[Tensor],
    batch: Sequence[Tensor],
    grads: Sequence[Tensor],
    parts: Sequence[tuple[Stack, Tensor]],
    rows: Mapping[Any, Tensor],
) -> None:
    """The same for all layers, one stack and perhaps a batch: most of it in one kernel."""
    from gradmem.gradients.chain_device import reduce_small

    (stack, out), *rest = parts
    k, m = stack.room
    one, g = (batch[0], rest[0][1][0]) if batch else (None, None)
    for i in reduce_small(layers, inputs, one, grads, (k, m), out, g):
        x, grad = (part[: k * m].unflatten(0, (k, m)) for part in (inputs[i], grads[i]))
        rows[layers[i].weight].baddbmm_(grad.mT, x, beta=0)


def _has_kernels(network: nn.Module, given: Sequence[Tensor]) -> bool:
    """Whether there are kernels for it: on a GPU, for one stack and perhaps a small batch."""
    if not (given[0].is_cuda and has_triton()) or len(given) > 2:
        return False
    from gradmem.gradients.chain_device import fits

    tensors = [*given, *network.parameters()]
    single = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return single and fits(len(chain_layers(network)), given[1] if len(given) > 1 else None)


def chain_layers(network: nn.Module) -> list[tuple[nn.Linear, bool]]:
    """The linear layers, each with whether a ReLU follows."""
    blocks: list[tuple[nn.Linear, bool]] = []
    assert isinstance(network, nn.Sequential)
    for layer in network:  # children() would leave out a ReLU that is used again
        if isinstance(layer, nn.Linear):
            blocks.append((layer, False))
        else:
            blocks[-1] = (blocks[-1][0], True)
    return blocks


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    kinds: Sequence[type[nn.Module]] = (nn.Linear, nn.ReLU)
    return next((kind for kind in kinds if type(layer).forward is kind.forward), None)
