"""Networks of every kind, the memories to go with them, and the way each must be computed."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import gradmem as gm
from gradmem.memory import Stack

CLASSES = 5


class Residual(nn.Module):
    """A convnet in the style of a ResNet: batch norm, a shortcut, ReLU in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(6, 6, 1, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.relu(self.norm1(self.first(x)))
        x = self.relu(self.norm2(self.second(x)) + self.shortcut(x))
        return self.last(x.mean((2, 3)))


class Transformer(nn.Module):
    """Token embeddings, attention written out, LayerNorm, and the output tied to the embedding."""

    def __init__(self, width=8, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, width, padding_idx=0)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 16), nn.Linear(16, width)
        self.out = nn.Linear(width, 11 if tied else CLASSES)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.out(x.mean(1))


class Twice(nn.Module):
    """One layer used two times."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(self.layer(torch.tanh(self.layer(x))))


class Scale(nn.Module):
    """A module that gradmem knows no rule for."""

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.scale


class Branches(nn.Module):
    """Takes another way when its input is large: nothing that can be vectorised."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.small(x) if x.mean() < 0.1 else self.large(x)


class InPlace(nn.Module):
    """Overwrites what a layer gave."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        x = self.first(x)
        x.mul_(2)
        return self.second(torch.tanh(x))


class Mixing(nn.Module):
    """Centres each batch by itself, behind the back of every rule."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        x = self.first(x)
        return self.second(torch.tanh(x - x.mean(0)))


class Unused(nn.Module):
    """A layer that takes no part, one of the others frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, CLASSES)
        self.idle = nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def eval_batch_norm():
    network = Residual()
    network(torch.randn(20, 3, 6, 6))  # running statistics that differ from 0 and 1
    network.norm1.eval()
    return network


def conv(layer, inputs):
    outputs = layer(torch.zeros(1, *inputs)).flatten(1).shape[1]
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(outputs, CLASSES))


VECTOR, IMAGE, TOKENS = (6,), (3, 6, 6), "tokens"
#: name → (network, its inputs, the way that must be chosen)
NETWORKS = {
    "mlp": (lambda: gm.mlp([6, 9, 8, CLASSES]), VECTOR, "chain"),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, CLASSES, bias=False)), VECTOR, "chain"),
    "mlp that ends in ReLU, in place": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, CLASSES), nn.ReLU(inplace=True)),
        VECTOR,
        "chain",
    ),
    "mlp over sequences": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES)),
        (3, 6),
        "batched",
    ),
    "resnet": (Residual, IMAGE, "batched"),
    "resnet, a frozen statistic": (eval_batch_norm, IMAGE, "batched"),
    "batch norm 1d": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)),
        VECTOR,
        "batched",
    ),
    "batch norm without affine or tracking": (
        lambda: nn.Sequential(
            nn.Linear(6, 7),
            nn.BatchNorm1d(7, affine=False, track_running_stats=False),
            nn.Linear(7, CLASSES),
        ),
        VECTOR,
        "batched",
    ),
    "batch norm with a cumulative average": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, CLASSES)),
        VECTOR,
        "batched",
    ),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(96, CLASSES)
        ),
        IMAGE,
        "batched",
    ),
    "conv: groups, stride, dilation": (
        lambda: conv(nn.Conv2d(3, 6, 2, stride=2, dilation=2, groups=3), IMAGE),
        IMAGE,
        "batched",
    ),
    "conv: same, even kernel": (lambda: conv(nn.Conv2d(3, 4, 2, padding="same"), IMAGE), IMAGE,
                                "batched"),
    "conv: reflected": (
        lambda: conv(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
        IMAGE,
        "batched",
    ),
    "conv 1d": (lambda: conv(nn.Conv1d(3, 4, 3, padding=1), (3, 8)), (3, 8), "batched"),
    "conv 3d": (lambda: conv(nn.Conv3d(2, 3, 2), (2, 3, 4, 3)), (2, 3, 4, 3), "batched"),
    "transformer": (Transformer, TOKENS, "batched"),
    "tied weights": (lambda: Transformer(tied=True), TOKENS, "batched"),
    "a layer used twice": (Twice, VECTOR, "batched"),
    "unused and frozen": (Unused, VECTOR, "batched"),
    "a module without a rule": (
        lambda: nn.Sequential(nn.Linear(6, 7), Scale(7), nn.Linear(7, CLASSES)), VECTOR, "func"
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 7)), nn.Tanh(),
                              nn.Linear(7, CLASSES)), VECTOR, "func"
    ),
    "rescaled embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 4, scale_grad_by_freq=True), nn.Flatten(),
                              nn.Linear(28, CLASSES)), TOKENS, "func"
    ),
    "overwritten in place": (InPlace, VECTOR, "func"),
    "a batch centred by itself": (Mixing, VECTOR, "func"),
    "control flow on data": (Branches, VECTOR, "loop"),
    "batch norm used twice": (
        lambda: nn.Sequential(nn.Linear(6, 6), *[nn.BatchNorm1d(6)] * 2, nn.Linear(6, CLASSES)),
        VECTOR, "loop"
    ),
    "no rule and batch norm": (
        lambda: nn.Sequential(Scale(6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)), VECTOR, "loop"
    ),
}  # fmt: skip


def build(name, dtype=torch.float32):
    torch.manual_seed(1)
    network = NETWORKS[name][0]().to(dtype)
    for w in network.parameters():  # away from ones and zeros, where mistakes hide
        if w.requires_grad:
            w.data += 0.1 * torch.randn_like(w)
    return network


def memories(name, counts=(7, 7, 7, 7), dtype=torch.float32, masked=False):
    generator = torch.Generator().manual_seed(2)
    inputs, k, m = NETWORKS[name][1], len(counts), max(counts)
    if inputs == TOKENS:
        x = torch.randint(11, (k, m, 7), generator=generator)
    else:
        x = torch.randn((k, m, *inputs), generator=generator, dtype=dtype)
        x += torch.linspace(-0.5, 0.5, k, dtype=dtype).view(-1, 1, *(1,) * len(inputs))
    y = torch.randint(2, (k, m), generator=generator)
    masks = None
    if masked:
        masks = (
            torch.rand((k, 11 if name == "tied weights" else CLASSES), generator=generator) < 0.5
        )
        masks[:, :2] = True
    return Stack(x, y, tuple(counts), masks)


def agree(one, other, tolerance):
    return (one - other).norm() <= tolerance * other.norm()
