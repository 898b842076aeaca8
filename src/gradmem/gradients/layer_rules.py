"""How a layer's parameter gradients are reduced per task, for the common layers.

A rule is a small function `rule(layer, x, grad, out, beta)`. It is given what went into the layer
and the gradient of what came out of it for all tasks at once, x: (k, m, …) and grad: (k, m, …), and
it writes one gradient per task into out[name]: (k, *shape) for every parameter `name` that learns.
With beta = 0 it overwrites; with beta = 1 it adds, for layers that are used twice and weights that
are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.cuda.devices import side_by_side
from gradmem.gradients.batch_norm import normalise_by_task, sums_by_task
from gradmem.gradients.thin import cut, padded_to, padded_weight, wide

__all__ = ["FORWARDS", "RULES", "Rule", "rule_for"]

Rule = Callable[[Any, Tensor, Tensor, Mapping[str, Tensor], int], None]
Forward = Callable[[Any, Tensor, int], Tensor]

#: Layer type → its rule.
RULES: dict[type[nn.Module], Rule] = {}
#: The same for layers of libraries that are not imported, by module and name.
NAMED: dict[str, Rule] = {}
#: Layer type → whether the rule fits a layer's options; layers not listed always do.
FITS: dict[type[nn.Module], Callable[[Any], bool]] = {}
#: Layer type → its forward pass task by task, where examples of different tasks must not mix.
FORWARDS: dict[type[nn.Module], Forward] = {}


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for a layer, if there is one and the layer computes what the rule knows."""
    kind = registered(layer)
    if kind is not None:
        return RULES[kind]
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if name.startswith("transformers.") and not any(True for _ in layer.children()):
        return NAMED.get(name, again)
    return None


def registered(layer: nn.Module) -> type[nn.Module] | None:
    """The registered type whose forward pass the layer has, with options that its rule fits."""
    for kind in type(layer).__mro__:
        if kind in RULES:
            same = type(layer).forward is kind.forward
            return kind if same and FITS.get(kind, lambda _: True)(layer) else None
    return None


def rule(
    *kinds: type[nn.Module], fits: Callable[[Any], bool] | None = None
) -> Callable[[Rule], Rule]:
    """Register a function as the rule for layer types."""

    def register(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
            if fits is not None:
                FITS[kind] = fits
        return function

    return register


def by_task(*kinds: type[nn.Module]) -> Callable[[Forward], Forward]:
    """Register a forward pass that keeps tasks apart."""

    def register(function: Forward) -> Forward:
        for kind in kinds:
            FORWARDS[kind] = function
        return function

    return register


@rule(nn.Linear)
def linear(layer: nn.Linear, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int) -> None:
    x, grad = x.flatten(1, -2), grad.flatten(1, -2)
    if "weight" in out and x.dtype == grad.dtype == out["weight"].dtype:
        out["weight"].baddbmm_(grad.mT, x, beta=beta)
    elif "weight" in out:  # bf16 activations
        write(out["weight"], torch.bmm(grad.mT, x.to(grad.dtype)), beta)
    if "bias" in out and not beta and grad.dtype == out["bias"].dtype:
        torch.sum(grad, 1, out=out["bias"])
    elif "bias" in out:
        write(out["bias"], grad.sum(1), beta)


def transposed_linear(
    layer: Any, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    """For a linear layer whose weight is (inputs, outputs)."""
    swapped = {**out, "weight": out["weight"].mT} if "weight" in out else out
    linear(layer, x, grad, swapped, beta)


NAMED["transformers.pytorch_utils.Conv1D"] = transposed_linear


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(
    layer: nn.Conv2d, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    dims = len(layer.kernel_size)
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x = F.pad(x.flatten(0, 1), layer._reversed_padding_repeated_twice, layer.padding_mode)
        x = x.unflatten(0, grad.shape[:2])
        padding = (0,) * dims
    elif isinstance(padding, str):
        x = F.pad(x, layer._reversed_padding_repeated_twice)
        padding = (0,) * dims
    wanted = [False, "weight" in out, "bias" in out]
    x = x.to(grad.dtype)  # bf16 activations
    weights: Tensor = layer.weight
    if grad.shape[2] != layer.out_channels or x.shape[2] != layer.in_channels:
        x = padded_to(x.flatten(0, 1), wide(layer.in_channels)).unflatten(0, grad.shape[:2])
        weights = padded_weight(layer)
    weights = weights.to(grad.dtype)

    def of_task(i: int) -> None:
        _, weight, bias = torch.ops.aten.convolution_backward(
            grad[i], x[i], weights, [len(weights)], layer.stride, padding,
            layer.dilation, False, [0] * dims, layer.groups, wanted,
        )  # fmt: skip
        if weight is not None and wanted[1]:
            write(out["weight"][i], cut(weight, out["weight"][i].shape), beta)
        if bias is not None and wanted[2]:
            write(out["bias"][i], cut(bias, out["bias"][i].shape), beta)

    side_by_side(of_task, len(x), x.device)


@rule(nn.Embedding, fits=lambda e: e.max_norm is None and not e.scale_grad_by_freq)
def embedding(
    layer: nn.Embedding, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    k, n = len(x), layer.num_embeddings
    places = x.flatten(1) + n * torch.arange(k, device=x.device)[:, None]
    rows = out["weight"].new_zeros(k * n, layer.embedding_dim)
    rows.index_add_(0, places.flatten(), grad.flatten(0, -2).to(rows.dtype))
    if layer.padding_idx is not None:
        rows.view(k, n, -1)[:, layer.padding_idx] = 0
    write(out["weight"], rows.view(k, n, -1), beta)


@rule(nn.LayerNorm)
def layer_norm(
    layer: nn.LayerNorm, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    affine(normal, grad, out, beta, over=range(1, x.ndim - len(layer.normalized_shape)))


@rule(nn.RMSNorm)
def rms_norm(
    layer: nn.RMSNorm, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    normal = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    affine(normal, grad, out, beta, over=range(1, x.ndim - len(layer.normalized_shape)))


@rule(nn.GroupNorm)
def group_norm(
    layer: nn.GroupNorm, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    normal = F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps).view_as(x)
    affine(normal, grad, out, beta, over=[1, *range(3, x.ndim)])


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(
    layer: nn.BatchNorm2d, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int
) -> None:
    by_weight, by_bias = sums_by_task(layer, x[:, :, : grad.shape[2]], grad)
    if "weight" in out:
        write(out["weight"], by_weight, beta)
    if "bias" in out:
        write(out["bias"], by_bias, beta)


@by_task(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_by_task(layer: nn.BatchNorm2d, x: Tensor, k: int) -> Tensor:
    return normalise_by_task(layer, x, k)


def again(layer: nn.Module, x: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int) -> None:
    """For a small layer that could be anything, as a norm: it is computed again, task by task."""
    own = dict(layer.named_parameters(recurse=False))
    for i in range(len(x)):
        with torch.enable_grad():
            y = type(layer).forward(layer, x[i].detach())
        grads = torch.autograd.grad(y, [own[name] for name in out], grad[i])
        for name, gradient in zip(out, grads, strict=True):
            write(out[name][i], gradient, beta)


def affine(normal: Tensor, grad: Tensor, out: Mapping[str, Tensor], beta: int, over: Any) -> None:
    """The gradients of `normal * weight + bias`, summed over dimensions."""
    over = list(over)
    if "weight" in out:
        write(out["weight"], (grad * normal).sum(over, dtype=out["weight"].dtype), beta)
    if "bias" in out:
        write(out["bias"], grad.sum(over, dtype=out["bias"].dtype), beta)


def write(target: Tensor, value: Tensor, beta: int) -> None:
    if beta:
        target.add_(value)
    else:
        target.copy_(value)
