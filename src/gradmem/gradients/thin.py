"""Convolutions with few channels on a GPU: padded once, not in every call.

In half precision cuDNN takes channels in multiples of 8 and pads what has others, forth and back,
in every call. Here a pass has the wider activations throughout: weights are padded with zeros, so
that the channels that are added stay zero and nothing flows back through them, and their gradients
are cut off. Batch norm keeps a zero channel zero; so do ReLU, sums and pooling, but not everything
that a network may do with its channels, so that it is tried out first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from gradmem.cuda.devices import is_recording
from gradmem.gradients.flat import parameters
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack
from gradmem.trees import leaves, take, tree_map

__all__ = [
    "cut",
    "is_thin",
    "keeps_zeros",
    "padded_forward",
    "padded_to",
    "padded_weight",
    "wide",
]

#: Channels that kernels take come in multiples of this.
MULTIPLE = 8
#: How far gradients in double precision may change by padding, relative to the largest.
TOLERANCE = 1e-8

#: Network → its convolutions when it was tried, and whether channels of zeros stay zeros in it.
_tried: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], bool]] = weakref.WeakKeyDictionary()

#: Computes G: (k, p) with padding (True) or without.
Gradients = Callable[[Objective, Stack, Tensor, bool], None]


def wide(channels: int) -> int:
    """The channels that a kernel takes in place of so many."""
    return -(-channels // MULTIPLE) * MULTIPLE


def is_thin(layer: nn.Module) -> bool:
    """Whether a layer is a convolution whose channels a kernel would pad."""
    if not isinstance(layer, nn.Conv2d) or type(layer).forward is not nn.Conv2d.forward:
        return False
    if layer.groups != 1 or layer.padding_mode != "zeros":
        return False
    out, into = layer.weight.shape[:2]
    return wide(out) != out or wide(into) != into


def keeps_zeros(objective: Objective, stack: Stack, gradients: Gradients) -> bool:
    """Whether a pass in half precision is to have padded channels: it is thin, and may have them.

    That is found out by trying once, on copies of the network in double precision.
    """
    network = objective.network
    if not leaves(stack.x)[0].is_cuda or not _in_half_precision(network):
        return False
    thin = [id(layer) for layer in network.modules() if is_thin(layer)]
    known = _tried.get(network)
    if known is None or known[0] != thin:
        if not thin or is_recording():
            return False
        known = thin, _tries(objective, stack, gradients)
        _tried[network] = known
    return known[1]


def _in_half_precision(network: nn.Module) -> bool:
    half = (torch.bfloat16, torch.float16)
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda") in half
    return next(network.parameters()).dtype in half


def _tries(objective: Objective, stack: Stack, gradients: Gradients) -> bool:
    """Whether padding changes nothing in the gradients of a few examples."""
    few = slice(min(3, *stack.counts))
    x = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, stack[:2].x)
    x, y = (take(tree, (slice(None), few)) for tree in (x, stack[:2].y))
    masks = None if stack.masks is None else stack.masks[:2]
    n = len(leaves(y)[0])
    sample = Stack(x, y, (leaves(y)[0].shape[1],) * n, masks, tasks=stack.tasks[:2])
    found = []
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cuda", enabled=False):
            for pads in (False, True):
                copied = objective.copied()
                copied.network.double()
                for part in copied.network.modules():
                    if isinstance(part, _DropoutNd):
                        part.training = False
                weights = parameters(copied.network)
                out = weights[0].new_empty((n, sum(w.numel() for w in weights)))
                gradients(copied, sample, out, pads)
                found += [torch.cat([out.flatten(), *_buffers(copied.network)])]
    except Exception:  # it looks at its channels, or cannot be copied
        return False
    plain, padded = found
    return bool((plain - padded).abs().max() <= TOLERANCE * plain.abs().max())


def _buffers(network: nn.Module) -> list[Tensor]:
    return [buffer.flatten().double() for buffer in network.buffers()]


def padded_forward(layer: Any, x: Tensor) -> Tensor:
    """What a thin convolution gives, with channels of zeros behind its own."""
    weight, x = padded_weight(layer), padded_to(x, wide(layer.in_channels))
    bias = layer.bias
    if bias is not None:
        bias = F.pad(bias, (0, wide(layer.out_channels) - layer.out_channels))
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)


def padded_weight(layer: nn.Conv2d) -> Tensor:
    """A convolution's weights, with zeros for the channels that are added."""
    more_in = wide(layer.in_channels) - layer.in_channels
    more_out = wide(layer.out_channels) - layer.out_channels
    return F.pad(layer.weight, (0, 0, 0, 0, 0, more_in, 0, more_out))


def padded_to(x: Tensor, channels: int) -> Tensor:
    """Images x: (n, c, height, width) with zeros behind their channels, these last in memory."""
    more = channels - x.shape[1]
    if more <= 0:
        return x
    if torch.is_autocast_enabled("cuda") and x.is_cuda:
        x = x.to(torch.get_autocast_dtype("cuda"))
    return F.pad(x.contiguous(memory_format=torch.channels_last), (0, 0, 0, 0, 0, more))


def cut(values: Any, shape: torch.Size) -> Any:
    """The part of a tensor that has this shape: without what belongs to padding."""
    return values[tuple(slice(n) for n in shape)] if values.shape != shape else values
