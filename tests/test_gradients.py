"""Every way to compute G gives what the plain loop gives, on networks of every kind."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import gradmem as gm
from gradmem.gradients import METHODS, MemoryGradients, Stack
from gradmem.gradients.batched import has_rules
from gradmem.gradients.engine import bytes_per_task

CLASSES = 5

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


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
    "no rule and batch norm": (
        lambda: nn.Sequential(Scale(6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)), VECTOR, "loop"
    ),
}  # fmt: skip
# torch.func cannot follow running statistics as they move; that is the loop's part then.
STATISTICS = ["resnet", "resnet, a frozen statistic", "batch norm 1d",
              "batch norm with a cumulative average"]  # fmt: skip
CASES = [(name, method) for name, (_, _, best) in NETWORKS.items()
         for method in list(METHODS)[list(METHODS).index(best) : -1]
         if (name in STATISTICS, method) != (True, "func")]  # fmt: skip


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


def compute(method, name, stack, dtype=torch.float32, **settings):
    network = build(name, dtype)
    G = MemoryGradients(network, method, **settings)([stack])
    return G.clone(), dict(network.named_buffers())


def agree(one, other, tolerance):
    return (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("counts", [(7, 7, 7, 7), (7, 3, 3, 5), (4,)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"]
)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_agrees_with_the_loop(name, method, dtype, tolerance, masked, counts):
    stack = memories(name, counts, dtype, masked)
    expected, buffers = compute("loop", name, stack, dtype)
    found, after = compute(method, name, stack, dtype)
    assert expected.norm() > 0
    for one, other in zip(found, expected, strict=True):  # each task by itself
        assert agree(one, other, tolerance)
    for key, value in buffers.items():  # running statistics
        torch.testing.assert_close(after[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_loop_is_autograd(name):
    """The yardstick itself: each row is what backward gives for that task alone."""
    stack = memories(name, (7, 3, 5, 7))
    found, _ = compute("loop", name, stack)
    network = build(name)
    for i, row in enumerate(found):
        n = stack.counts[i]
        network.zero_grad()
        F.cross_entropy(network(stack.x[i, :n]), stack.y[i, :n]).backward()
        expected = torch.cat([
            (torch.zeros_like(w) if w.grad is None else w.grad).flatten()
            for w in network.parameters() if w.requires_grad
        ])  # fmt: skip
        torch.testing.assert_close(row, expected)


@pytest.mark.parametrize(
    ("name", "best"), [(name, best) for name, (_, _, best) in NETWORKS.items()]
)
def test_the_way_is_chosen_by_itself(name, best):
    network = build(name)
    before = copy.deepcopy(dict(network.named_buffers()))
    flags = [w.requires_grad for w in network.parameters()]
    modes = [part.training for part in network.modules()]
    gradients = MemoryGradients(network)
    found = gradients([memories(name)])
    assert gradients.method == best
    expected, buffers = compute("loop", name, memories(name))
    assert agree(found, expected, 1e-5)
    # choosing left no trace: one call has moved the statistics once
    for key, value in network.named_buffers():
        torch.testing.assert_close(value, buffers[key])
    assert before.keys() == buffers.keys()
    assert flags == [w.requires_grad for w in network.parameters()]
    assert modes == [part.training for part in network.modules()]
    assert not any(part._forward_hooks or "forward" in vars(part) for part in network.modules())


@pytest.mark.parametrize("name", ["mlp", "resnet", "tied weights", "a module without a rule"])
@pytest.mark.parametrize(
    "limit",
    [{"tasks_per_chunk": 1}, {"tasks_per_chunk": 3}, {"memory_limit": 1}, {"memory_limit": 999}],
    ids=str,
)
def test_chunks_change_nothing(name, limit):
    stack = memories(name, (7, 7, 5, 7))
    whole, buffers = compute("auto", name, stack)
    parts, after = compute("auto", name, stack, **limit)
    assert agree(parts, whole, 1e-6)
    for key, value in buffers.items():
        torch.testing.assert_close(after[key], value)


def test_a_limit_in_bytes_follows_what_autograd_keeps(monkeypatch):
    network = gm.mlp([6, 9, CLASSES])
    kept = bytes_per_task(network, memories("mlp", (7, 7)))
    # the hidden layer (7 × 9 floats), and as much again for the way back
    assert kept == 2 * 7 * 9 * 4
    calls = []
    monkeypatch.setitem(
        METHODS, "loop", lambda: lambda network, stack, out: calls.append(len(stack))
    )
    MemoryGradients(network, "loop", memory_limit=2 * kept)([memories("mlp", (7,) * 5)])
    assert calls == [2, 2, 1]


def test_out_of_memory_makes_smaller_chunks_with_one_warning(monkeypatch):
    calls = []

    def small_gpu(network, stack, out):
        calls.append(len(stack))
        if len(stack) > 2:
            raise torch.cuda.OutOfMemoryError("out of memory")
        out.fill_(len(calls))

    monkeypatch.setitem(METHODS, "batched", lambda: small_gpu)
    gradients = MemoryGradients(gm.mlp([6, 9, CLASSES]), "batched")
    with pytest.warns(RuntimeWarning, match="do not fit the GPU's memory") as warned:
        gradients([memories("mlp", (7,) * 8)])
    gradients([memories("mlp", (7,) * 8)])
    assert len(warned) == 1
    assert calls == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


def test_the_buffer_is_used_again():
    gradients = MemoryGradients(gm.mlp([6, 9, CLASSES]))
    first = gradients([memories("mlp")])
    assert gradients([memories("mlp")]).data_ptr() == first.data_ptr()
    assert gradients([memories("mlp", (7, 7))]).data_ptr() == first.data_ptr()


def test_a_rule_does_not_apply_where_a_subclass_computes_something_else():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert not has_rules(nn.Sequential(Doubled(6, CLASSES)))
    assert has_rules(gm.mlp([6, CLASSES]))  # a subclass that only starts differently


def test_gem_says_which_way_it_takes_and_takes_the_one_it_is_told():
    def trained(**settings):
        learner = gm.GEM(gm.mlp([6, 9, CLASSES]), memories=5, **settings)
        assert learner.gradients == settings.get("gradients", "auto")
        generator = torch.Generator().manual_seed(0)
        for t in (0, 1, 2, 0, 3, 1):
            x = torch.randn(4, 6, generator=generator)
            learner.observe(x, t, torch.randint(CLASSES, (4,), generator=generator))
        return learner

    expected = trained(gradients="loop")
    assert expected.gradients == "loop"
    for settings in (
        {},
        {"gradients": "batched"},
        {"gradients": "func"},
        {"tasks_per_chunk": 1},
        {"memory_limit": 10},
    ):
        learner = trained(**settings)
        assert learner.gradients == settings.get("gradients", "chain")
        for w, other in zip(learner.network.parameters(), expected.network.parameters(),
                            strict=True):  # fmt: skip
            torch.testing.assert_close(w, other)
    with pytest.raises(ValueError, match="gradients must be one of auto, chain, batched, func"):
        gm.GEM(gm.mlp([6, CLASSES]), gradients="magic")
