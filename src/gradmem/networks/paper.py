"""Networks of the paper's experiments, and starting one afresh."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.validation import positive_int

__all__ = ["ResNet18", "mlp", "reset_parameters", "resnet18"]


def mlp(sizes: Sequence[int] = (784, 100, 100, 10), seed: int = 0) -> nn.Sequential:
    """Fully connected layers with ReLU between them, Xavier-uniform weights and zero biases.

    Parameters
    ----------
    sizes
        Units of each layer, inputs and outputs included; the paper's for MNIST if left out.
    seed
        Of the weights; the global generator is left alone.

    Examples
    --------
    >>> mlp([784, 100, 100, 10])(torch.zeros(3, 784)).shape
    torch.Size([3, 10])
    """
    sizes = [positive_int("sizes", size) for size in sizes]
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold at least inputs and outputs, got {sizes}")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [XavierLinear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet18(n_outputs: int = 100, feature_maps: int = 20, seed: int = 0) -> ResNet18:
    """A thin ResNet-18 for images of 32 × 32: the paper's for CIFAR-100 if nothing is given.

    Parameters
    ----------
    n_outputs
        Classes of all tasks together.
    feature_maps
        Of the first layer; the last has eight times as many.
    seed
        Of the weights; the global generator is left alone.

    Examples
    --------
    >>> network = resnet18()
    >>> sum(w.numel() for w in network.parameters())
    1109240
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """
    positive_int("n_outputs", n_outputs)
    positive_int("feature_maps", feature_maps)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return ResNet18(n_outputs, feature_maps)


class ResNet18(nn.Module):
    """Four groups of two residual blocks; each group but the first halves the image."""

    def __init__(self, n_outputs: int, feature_maps: int) -> None:
        super().__init__()
        widths = [feature_maps * 2**i for i in range(4)]
        self.first = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks = []
        for i, (n_in, n_out) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            blocks += [Block(n_in, n_out, stride=1 if i == 0 else 2), Block(n_out, n_out)]
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(widths[-1], n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.blocks(x)
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.around = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.around(x))


class XavierLinear(nn.Linear):
    """A linear layer that starts with Xavier-uniform weights and a zero bias."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def reset_parameters(module: nn.Module) -> nn.Module:
    """`module` with new random weights from the global generator, as its layers draw them.

    They are drawn on the CPU: a GPU has a generator of its own, and other weights come from it.
    """
    drawn = copy.deepcopy(module).cpu()
    for name, part in drawn.named_modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in part.parameters(recurse=False)):
            raise ValueError(
                f"{type(part).__name__} ({name or 'the network'}) has parameters but no "
                "reset_parameters(): give it one so that it can start afresh"
            )
    with torch.no_grad():
        pairs = zip(module.parameters(), drawn.parameters(), strict=True)
        for mine, new in itertools.chain(
            pairs, zip(module.buffers(), drawn.buffers(), strict=True)
        ):
            mine.copy_(new)
    return module
