"""Networks whose weights depend on a description of the task."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.validation import positive_int

__all__ = ["Conditioned", "conditioned"]

#: Modules of torch that read their layers' weights themselves: no layer in them can be replaced.
CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def conditioned(network: nn.Module, size: int) -> Conditioned:
    """A copy of a network whose first layer's weights depend on a description of the task.

    For the description d: (size,), the weights and the bias of the first layer are W + Σₖ dₖ Wₖ and
    b + Σₖ dₖ bₖ. The Wₖ and bₖ are learned and start at zero, so that the network starts as the one
    given, whatever d is. They are `size` times as many parameters as the layer has.

    What is learned at some descriptions holds for others as far as these are close to them, or a
    sum of them: a description has the numbers in which tasks change smoothly. An angle θ is best
    described by cos θ, sin θ, cos 2θ and sin 2θ; an attribute by a number of its own, −1 or 1. All
    of about unit size: with larger ones, a smaller learning rate is needed.

    A learner puts a task's description beside x (`Learner.descriptions`), and predicts for a task
    that was never observed from its description alone. Elsewhere, as with `GradientMemory`, x is
    {"x": x, "task": (n, size)}, one description per example.

    Parameters
    ----------
    network
        Any module with a linear or convolutional layer. The first in the order of `modules()`
        becomes conditioned, which must be given the examples in its first dimension.
    size
        Numbers in a description.

    Examples
    --------
    >>> import gradmem as gm
    >>> learner = gm.GEM(gm.networks.conditioned(gm.mlp([4, 16, 3]), size=2), memories=20)
    >>> learner.descriptions["a"] = torch.tensor([1.0, 0.0])
    >>> loss = learner.observe(torch.randn(10, 4), "a", torch.randint(3, (10,)))
    >>> learner.descriptions["never observed"] = torch.tensor([0.6, 0.8])
    >>> learner.predict(torch.randn(5, 4), "never observed").shape
    torch.Size([5])
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be a torch.nn.Module, got {network!r}")
    return Conditioned(copy.deepcopy(network), positive_int("size", size))


class Conditioned(nn.Module):
    """A network of which `conditioned` replaced the first layer.

    Attributes
    ----------
    description_size
        Numbers in a description; tells learners to give one.
    """

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        layer = next(_open_layers(network), None)
        if layer is None:
            raise ValueError(
                "network must have a linear or convolutional layer to condition, got "
                f"{type(network).__name__}"
            )
        self.description_size = size
        self._task = _Task()
        mixed = Mixed(layer, size, self._task)
        places = [
            (parent, name)
            for parent in network.modules()
            for name, part in parent._modules.items()
            if part is layer
        ]
        for parent, name in places:
            setattr(parent, name, mixed)
        self.network = network if places else mixed

    def forward(self, given: Mapping[str, Any]) -> Any:
        """The outputs for {"x": x, "task": (n, size)}."""
        task = given.get("task") if isinstance(given, Mapping) else None
        if not isinstance(task, Tensor) or task.shape[1:] != (self.description_size,):
            got = f"one of shape {tuple(task.shape)}" if isinstance(task, Tensor) else "no task"
            raise TypeError(
                'a conditioned network takes {"x": x, "task": (n, '
                f"{self.description_size})}}, got {got}"
            )
        self._task.descriptions = task
        try:
            return self.network(given["x"])
        finally:
            self._task.descriptions = None


class Mixed(nn.Module):
    """A layer whose weights are W + Σₖ dₖ Wₖ for an example of a task that d describes."""

    def __init__(self, layer: nn.Linear | Convolution, size: int, task: _Task) -> None:
        super().__init__()
        self.more = _zeros(layer, size)
        self.layer = layer  # the last one: `widen` makes the last linear layer wider
        self._task = task

    def forward(self, x: Tensor) -> Tensor:
        d = self._task.descriptions
        if d is None or len(d) != len(x):
            raise ValueError(
                f"the conditioned layer must be given one row for each of the "
                f"{0 if d is None else len(d)} examples, got {len(x)} rows"
            )
        channels = 1 if isinstance(self.layer, Convolution) else x.ndim - 1
        parts = self.more(x).unflatten(channels, (-1, d.shape[1]))
        shape = [len(d)] + [1] * (parts.ndim - 1)
        shape[channels + 1] = d.shape[1]
        return self.layer(x) + (parts * d.view(shape)).sum(channels + 1)  # type: ignore[no-any-return]


class _Task:
    """The descriptions of the examples that are going through the network: (n, size)."""

    descriptions: Tensor | None = None


class _Zero:
    """A layer that starts with zeros."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for w in self.parameters():  # type: ignore[attr-defined]
                w.zero_()


class _ZeroLinear(_Zero, nn.Linear):
    pass


class _ZeroConv1d(_Zero, nn.Conv1d):
    pass


class _ZeroConv2d(_Zero, nn.Conv2d):
    pass


class _ZeroConv3d(_Zero, nn.Conv3d):
    pass


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: _ZeroConv1d,
    nn.Conv2d: _ZeroConv2d,
    nn.Conv3d: _ZeroConv3d,
}


def _zeros(layer: nn.Linear | Convolution, size: int) -> nn.Module:
    """A layer that takes the same, with `size` outputs in place of each: Wₖ and bₖ."""
    like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        return _ZeroLinear(layer.in_features, size * layer.out_features, **like)
    kind = next(own for known, own in CONVOLUTIONS.items() if isinstance(layer, known))
    return kind(  # type: ignore[no-any-return]
        layer.in_channels, size * layer.out_channels, layer.kernel_size, layer.stride,
        layer.padding, layer.dilation, layer.groups, True, layer.padding_mode, **like,
    )  # fmt: skip


def _open_layers(network: nn.Module) -> Iterator[nn.Linear | Convolution]:
    """The linear and convolutional layers that can be replaced, in the order of `modules()`."""
    if isinstance(network, nn.Linear | Convolution):
        yield network
    elif not isinstance(network, CLOSED):
        for part in network.children():
            yield from _open_layers(part)
