"""Many plain SGD steps on one example each, as cheap as they can be made, without waiting.

Nothing here depends on values, so that on a GPU all steps are recorded into one CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import get_total_norm

from gradmem.cuda.devices import has_triton
from gradmem.gradients.chain import chain_layers, is_chain

__all__ = [
    "chain_steps",
    "clipped",
    "gradients",
    "move",
    "running_statistics_for_one",
    "takes_chain_steps",
]


def takes_chain_steps(network: nn.Module, x: object, y: object) -> bool:
    """Whether `chain_steps` can make the steps: an MLP, inputs (n, features), class ids (n,)."""
    plain = isinstance(x, Tensor) and isinstance(y, Tensor) and (x.ndim, y.ndim) == (2, 1)
    ids = isinstance(y, Tensor) and not y.is_floating_point()
    real = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)
    return plain and ids and real and is_chain(network)


@np.errstate(all="ignore")  # what is not finite is found by who asked for the steps
@torch.no_grad()
def chain_steps(
    network: nn.Module, x: Tensor, y: Tensor, masks: Tensor | None, rate: float | Tensor
) -> None:
    """A step of plain SGD along the cross-entropy of each example in turn, on an MLP.

    `x`: (n, features), `y`: (n,), `masks`: (n, classes) or None.

    On a GPU, `SIDE` examples are gone through at once.

    The first layer, the largest, is changed once, at the end: after j steps its weights are
    W + Σᵢ dᵢ xᵢᵀ, and so it gives W xⱼ + Σᵢ dᵢ (xᵢᵀ xⱼ), for which one product of all inputs with
    the weights and one with each other are enough.
    """
    if x.is_cuda and len(x) > SIDE:
        for start in range(0, len(x), SIDE):
            part = slice(start, start + SIDE)
            chain_steps(network, x[part], y[part], None if masks is None else masks[part], rate)
        return
    (first, relu), *others = chain_layers(network)
    given = F.linear(x, first.weight, first.bias)  # what the first layer gives without the steps
    inner = x @ x.T if first.bias is None else x @ x.T + 1  # a bias is a weight for an input of 1
    upper = [(layer.weight.detach(), _detached(layer.bias), own) for layer, own in others]
    classes = torch.arange(chain_layers(network)[-1][0].out_features, device=y.device)
    targets = (y[:, None] == classes).to(given.dtype)
    if x.is_cuda and _has_kernel(given, relu, upper):
        from gradmem.learners.one_by_one_device import changes_in_a_kernel

        changes = changes_in_a_kernel(given, inner, upper, y, masks, rate)
    elif x.is_cuda:
        changes = _changes(given, inner, relu, upper, targets, masks, rate)
    elif _is_compiled(upper):
        from gradmem.learners.one_by_one_compiled import changes_compiled

        changes = changes_compiled(given, inner, relu, upper, y, masks, float(rate))
    else:
        changes = _changes_on_a_cpu(given, inner, relu, upper, targets, masks, float(rate))
    first.weight.addmm_(changes.T, x)
    if first.bias is not None:
        first.bias.add_(changes.sum(0))


#: Weights, bias, and whether a ReLU follows.
Upper = tuple[Tensor, Tensor | None, bool]
#: On a GPU, layers of at most so many units, and so many examples, are one kernel's work.
SIDE = 128


def _has_kernel(given: Tensor, relu: bool, upper: list[Upper]) -> bool:
    """Whether one kernel takes all steps on a GPU: three small layers with biases."""
    if not has_triton() or given.dtype != torch.float32 or not relu or len(upper) != 2:
        return False
    sizes = [*given.shape, *(len(W) for W, _, _ in upper)]
    biases = [b for _, b, _ in upper if b is not None]
    tensors = [*(W for W, _, _ in upper), *biases]
    return (
        max(sizes) <= SIDE
        and len(biases) == 2
        and [own for _, _, own in upper] == [True, False]
        and all(part.dtype == torch.float32 and part.is_contiguous() for part in tensors)
    )


def _is_compiled(upper: list[Upper]) -> bool:
    """Whether compiled code takes all steps on a CPU: layers above the first, in rows."""
    tensors = [part for W, b, _ in upper for part in (W, b) if part is not None]
    return _has_numba() and bool(upper) and all(part.is_contiguous() for part in tensors)


@cache
def _has_numba() -> bool:
    """Whether Numba is installed, which is optional, and fits the NumPy beside it."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


def _changes(
    given: Tensor,
    inner: Tensor,
    relu: bool,
    upper: list[Upper],
    targets: Tensor,
    masks: Tensor | None,
    rate: float | Tensor,
) -> Tensor:
    """Take the steps on the upper layers; what each step adds to the first one's outputs."""
    changes = torch.zeros_like(given)
    for j, target in enumerate(targets):
        z = torch.addmv(given[j], changes[:j].T, inner[:j, j]) if j else given[j].clone()
        gave = [z.relu_() if relu else z]
        for W, b, own in upper:
            z = torch.mv(W, gave[-1]) if b is None else torch.addmv(b, W, gave[-1])
            gave.append(z.relu_() if own else z)
        logits = gave[-1] if masks is None else gave[-1].masked_fill(~masks[j], float("-inf"))
        grad = torch.softmax(logits, 0).sub_(target).mul_(-rate)
        for (W, b, own), h, out in zip(upper[::-1], gave[-2::-1], gave[:0:-1], strict=True):
            if own:  # nothing flows back where ReLU gave zero
                grad = torch.ops.aten.threshold_backward(grad, out, 0)
            below = torch.mv(W.T, grad)
            W.addr_(grad, h)
            if b is not None:
                b.add_(grad)
            grad = below
        changes[j] = torch.ops.aten.threshold_backward(grad, gave[0], 0) if relu else grad
    return changes


def _changes_on_a_cpu(
    given: Tensor,
    inner: Tensor,
    relu: bool,
    upper: list[Upper],
    targets: Tensor,
    masks: Tensor | None,
    rate: float,
) -> Tensor:
    """The same in NumPy, whose calls on such small arrays take a fraction of torch's."""
    changes = torch.zeros_like(given)
    C, Z, K = changes.numpy(), given.numpy(), inner.numpy()
    arrays = [(W.numpy(), None if b is None else b.numpy(), own) for W, b, own in upper]
    left_out = None if masks is None else ~masks.numpy()
    for j, target in enumerate(targets.numpy()):
        z = Z[j] + K[j, :j] @ C[:j]
        gave = [np.maximum(z, 0, out=z) if relu else z]
        for W, b, own in arrays:
            z = W @ gave[-1]
            if b is not None:
                z += b
            gave.append(np.maximum(z, 0, out=z) if own else z)
        logits = gave[-1] if left_out is None else np.where(left_out[j], -np.inf, gave[-1])
        grad = np.exp(logits - logits.max())
        grad /= grad.sum()
        grad -= target
        grad *= -rate
        for (W, b, own), h, out in zip(arrays[::-1], gave[-2::-1], gave[:0:-1], strict=True):
            if own:
                grad *= out > 0
            below = grad @ W
            W += np.multiply.outer(grad, h)
            if b is not None:
                b += grad
            grad = below
        C[j] = grad * (gave[0] > 0) if relu else grad
    return changes


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


@torch.no_grad()
def move(
    weights: list[nn.Parameter], loss: Tensor, rate: float | Tensor, clip: float | None = None
) -> None:
    """A step of plain SGD along the gradient of a loss, on any network."""
    grads = gradients(loss, weights, clip)
    torch._foreach_sub_([w.detach() for w in weights], torch._foreach_mul(grads, rate))


def gradients(loss: Tensor, weights: list[nn.Parameter], clip: float | None = None) -> list[Tensor]:
    """The gradient of a loss, zero for weights it does not depend on, no longer than `clip`."""
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = zip(weights, grads, strict=True)
    found = [torch.zeros_like(w) if g is None else g for w, g in pairs]
    clipped(found, clip)
    return found


def clipped(grads: list[Tensor], clip: float | None) -> None:
    """Scale gradients down, in place, if they are longer together than `clip`."""
    if clip is not None:
        length = get_total_norm(grads)
        torch._foreach_mul_(grads, (clip / (length + 1e-6)).clamp(max=1.0))


@contextmanager
def running_statistics_for_one(network: nn.Module, n: int = 1) -> Iterator[None]:
    """One example has no batch statistics: it is normalised by the running ones."""
    parts = [part for part in network.modules() if isinstance(part, _BatchNorm) and part.training]
    for part in parts if n == 1 else ():
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True
