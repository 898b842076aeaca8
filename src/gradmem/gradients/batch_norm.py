"""Batch normalisation of several tasks at once, each by its own statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.cuda.devices import has_triton

__all__ = ["normalise_by_task", "sums_by_task"]


def normalise_by_task(layer: nn.BatchNorm2d, x: Tensor, k: int) -> Tensor:
    """What `layer` gives for the k tasks in x: (k·m, channels, …), one after another.

    In train mode each task is normalised by its own mean and variance, and moves the running ones,
    in order. No gradient flows into the layer's own parameters: see `sums_by_task`. Channels of x
    beyond the layer's own are zeros and stay so, or are left out.
    """
    if not _uses_batch(layer) or layer.momentum is None:
        # Running statistics do not mix examples. A cumulative average is left to the layer.
        forward = type(layer).forward
        if x.shape[1] > layer.num_features:
            x = x[:, : layer.num_features]
        if not _uses_batch(layer):
            return forward(layer, x)
        return torch.cat([forward(layer, one) for one in x.unflatten(0, (k, -1))])
    if x.numel() == k * x.shape[1]:
        raise ValueError(
            f"batch statistics need more than one value per channel and task, got {tuple(x.shape)}"
            f" for {k} tasks"
        )
    return _Normalise.apply(x, layer, k)  # type: ignore[no-untyped-call, no-any-return]


def sums_by_task(layer: nn.BatchNorm2d, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the layer's weight and bias, (k, channels) each, from (k, m, channels, …)."""
    k = len(x)
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    if _uses_batch(layer):
        mean, var = _statistics(x, k)
        scale = (var + layer.eps).rsqrt()
    else:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean = layer.running_mean.expand(k, -1)
        scale = (layer.running_var + layer.eps).rsqrt().expand(k, -1)
    return _sums(x, grad, mean, scale)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.BatchNorm2d, k: int) -> Tensor:
        own, channels = layer.num_features, x.shape[1]
        weight: Tensor | None = layer.weight
        bias: Tensor | None = layer.bias
        if channels > own:  # the padding of a thin convolution
            ones = x.new_ones(own, dtype=torch.float32) if weight is None else weight
            weight = F.pad(ones, (0, channels - own))
            bias = None if bias is None else F.pad(bias, (0, channels - own))
        ctx.weight = weight
        ctx.kernels = _has_kernels(layer, x)
        if ctx.kernels:
            from gradmem.gradients.device import normalise

            y, statistics = normalise(x, k, weight, bias, layer.eps)
        else:
            mean, var = _statistics(x, k)
            scale = (var + layer.eps).rsqrt()
            statistics = torch.stack([mean, scale, var])
            on_x = scale if weight is None else scale * weight
            shift = -mean * on_x if bias is None else bias - mean * on_x
            y = _affine(x, on_x, shift)
        ctx.save_for_backward(x, statistics)
        _move(layer, statistics[..., :own].contiguous(), x.numel() // (k * channels), ctx.kernels)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, statistics = ctx.saved_tensors
        if ctx.kernels:
            from gradmem.gradients.device import normalise_back

            grad = grad.movedim(1, -1).contiguous().movedim(-1, 1)
            dx, (by_weight, by_bias) = normalise_back(x, grad, statistics, ctx.weight)
        else:
            mean, scale, _ = statistics
            by_weight, by_bias = _sums(x, grad, mean, scale)
            # dx = s·w (dy − mean(dy) − x̂ mean(dy x̂)) is one more affine map, of dy and of x
            n = x.numel() // (len(mean) * x.shape[1])
            on_grad = scale if ctx.weight is None else scale * ctx.weight
            on_x = -on_grad * scale * by_weight / n
            shift = -on_grad * by_bias / n - on_x * mean
            dx = _affine(grad, on_grad, shift, x, on_x)
        ctx.by_parameter = {"weight": by_weight, "bias": by_bias}  # see `batched._reduce`
        return dx, None, None


def _uses_batch(layer: nn.BatchNorm2d) -> bool:
    return layer.training or layer.running_mean is None or layer.running_var is None


def _statistics(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each task's mean and variance: (k, channels)."""
    exact = x if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(_by_task(exact, k), (1, 3), correction=0)
    return mean, var


def _move(layer: nn.BatchNorm2d, statistics: Tensor, n: int, kernels: bool) -> None:
    """Move the layer's running statistics, if it has any that move, by each task's of n values."""
    if layer.running_mean is None or layer.running_var is None:
        return
    if not (layer.training and layer.track_running_stats):
        return
    k = statistics.shape[1]
    assert layer.momentum is not None
    if kernels:
        from gradmem.gradients.device import move

        means, variances = layer.running_mean, layer.running_var
        move(statistics, means, variances, layer.num_batches_tracked, layer.momentum, n)
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(k)
    # k moves by (1 − μ) old + μ new in a row: what is left of each after all of them.
    left = (1 - layer.momentum) ** torch.arange(
        k - 1, -1, -1, dtype=statistics.dtype, device=statistics.device
    )
    kept = (1 - layer.momentum) ** k
    mean, _, var = statistics
    unbiased = var * (n / max(1, n - 1))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        # no matrix product: autocast would make it a coarse one
        running.mul_(kept).add_(((layer.momentum * left)[:, None] * new).sum(0))


def _sums(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Σ dy x̂ and Σ dy for each task and channel: (k, channels)."""
    k = len(mean)
    dy = _by_task(grad, k).to(mean.dtype)
    with_x = (dy * (_by_task(x, k) - mean[:, None, :, None])).sum((1, 3))
    return with_x * scale, dy.sum((1, 3))


def _affine(
    x: Tensor, weight: Tensor, shift: Tensor, z: Tensor | None = None, on_z: Tensor | None = None
) -> Tensor:
    """An affine map, weight · x + shift (+ on_z · z), with (k, channels) coefficients."""
    k = len(weight)
    out = torch.addcmul(shift[:, None, :, None], _by_task(x, k), weight[:, None, :, None])
    if z is not None and on_z is not None:
        out.addcmul_(_by_task(z, k), on_z[:, None, :, None])
    return out.to(x.dtype).reshape_as(x)


def _by_task(x: Tensor, k: int) -> Tensor:
    """(k·m, channels, …) as (k, m, channels, pixels)."""
    x = x.unflatten(0, (k, -1))
    return x.flatten(3) if x.ndim > 3 else x[..., None]


def _has_kernels(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether there are kernels for it: on a GPU, with channels next to each other."""
    if not (x.is_cuda and has_triton() and x.movedim(1, -1).is_contiguous()):
        return False
    own = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    single = all(part is None or part.dtype == torch.float32 for part in own)
    small = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return single and small and x.shape[1] <= 4096 and x.numel() < 2**30
