"""Every way to compute G gives what the plain loop gives, on networks of every kind."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradmem as gm
from gradmem.gradients import METHODS, Criterion, Forward, MemoryGradients, Objective, thin
from gradmem.gradients.batched import _in_one_pass, layer_without_rule
from gradmem.gradients.engine import bytes_per_task
from gradmem.memory import Stack

from .networks import CLASSES, NETWORKS, agree, build, memories

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

# torch.func cannot follow running statistics as they move; that is the loop's part then.
STATISTICS = ["resnet", "resnet, a frozen statistic", "batch norm 1d",
              "batch norm with a cumulative average"]  # fmt: skip
CASES = [(name, method) for name, (_, _, best) in NETWORKS.items()
         for method in list(METHODS)[list(METHODS).index(best) : -1]
         if (name in STATISTICS, method) != (True, "func")]  # fmt: skip


def compute(method, name, stack, dtype=torch.float32, **settings):
    network = build(name, dtype)
    G = MemoryGradients(network, method, **settings)([stack])
    return G.clone(), dict(network.named_buffers())


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


def test_batch_norm_that_is_used_twice_is_refused_by_one_pass():
    """Task by task, both its calls would move the statistics before the next task's."""
    with pytest.raises(ValueError, match="used twice"):
        MemoryGradients(build("batch norm used twice"), "batched")([memories("mlp")])


@pytest.mark.parametrize(
    "switch",
    [
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ],
)
def test_the_users_precision_is_taken_in_any_way_it_is_set_and_stays(switch):
    """In a process of its own: torch does not go back from the new switches to the old ones."""
    code = f"""if True:
        import torch, gradmem as gm
        {switch}
        def seen():
            try:
                old = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            except RuntimeError:
                old = None
            parts = torch.backends.cuda.matmul, torch.backends.cudnn.conv
            return old, [part.fp32_precision for part in parts]
        before = seen()
        learner = gm.GEM(gm.mlp([2, 8, 2]))
        for t in "ab":
            learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
        assert seen() == before, (before, seen())
    """
    subprocess.run([sys.executable, "-c", code], check=True)


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
    kept = bytes_per_task(Objective(network), memories("mlp", (7, 7)))
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

    assert isinstance(layer_without_rule(nn.Sequential(Doubled(6, CLASSES))), Doubled)
    assert (
        layer_without_rule(gm.mlp([6, CLASSES])) is None
    )  # a subclass that only starts differently


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


@pytest.mark.parametrize("name", NETWORKS)
def test_gem_is_exact_with_any_network(name):
    """Chosen by itself on what is observed first, the way it takes is as good as the loop."""

    def trained(gradients):
        learner = gm.GEM(build(name), lr=0.05, memories=6, gradients=gradients)
        stack = memories(name, (12,) * 3)
        for t in (0, 1, 2, 0):
            for some in (slice(0, 4), slice(4, 8), slice(8, 12)):
                learner.observe(stack.x[t, some], t, stack.y[t, some])
        return learner

    found, expected = trained("auto"), trained("loop")
    assert found.gradients == NETWORKS[name][2]
    for key, value in expected.network.state_dict().items():
        torch.testing.assert_close(found.network.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def test_one_task_alone_is_not_enough_to_choose():
    gradients = MemoryGradients(build("a batch centred by itself"))
    gradients([memories("a batch centred by itself", (5,))])
    assert gradients.method is None


def test_a_way_that_does_not_fit_is_refused():
    for name in ("resnet", "batch norm 1d", "transformer"):
        with pytest.raises(ValueError, match='"chain" is for an nn'):
            gm.GEM(build(name), gradients="chain")
    with pytest.raises(ValueError, match='"batched" has no rule for Scale'):
        gm.GEM(build("a module without a rule"), gradients="batched")
    learner = gm.GEM(nn.Sequential(nn.Linear(6, CLASSES)), gradients="chain")
    with pytest.raises(ValueError, match=r"needs inputs \(n, features\)|y must have shape"):
        learner.observe(torch.randn(4, 3, 6), 0, torch.zeros(4).long())


def test_the_way_is_chosen_whatever_the_shapes_of_the_first_tasks():
    small, large = (torch.randn(2, 4, 3, n, n) for n in (6, 8))
    y = torch.zeros(2, 4, dtype=torch.long)
    alone = Stack(large[:1], y[:1], (4,))
    engine = MemoryGradients(build("resnet"))
    engine([alone, Stack(small, y, (4, 4))])
    assert engine.method == "batched"


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)])
def test_classes_may_lie_last_in_memory_as_those_of_a_language_model_do(loss):
    torch.manual_seed(0)
    logits, y = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    y[:, 3:], y[4, 1:] = -100, -100  # padding
    stack = Stack(logits.view(2, 3, 5, 7), y.view(2, 3, 5), (3, 2))
    last, first = logits.mT, logits.mT.contiguous()
    torch.testing.assert_close(Criterion(loss).mean(last, y), Criterion(loss).mean(first, y))
    found = Criterion(loss).by_task(last, stack)
    torch.testing.assert_close(found, Criterion(loss).by_task(first, stack))
    each = [Criterion(loss).mean(first[:3], y[:3]), Criterion(loss).mean(first[3:5], y[3:5])]
    torch.testing.assert_close(found, torch.stack(each))


@pytest.mark.parametrize("training", [True, False])
def test_padded_channels_stay_zero_in_a_residual_network(training):
    """What a pass in half precision on a GPU does; here in double precision, where it is exact."""
    torch.manual_seed(0)
    network = gm.resnet18(n_outputs=10, feature_maps=5).double().train(training)
    stack = Stack(torch.randn(2, 3, 3, 32, 32).double(), torch.randint(10, (2, 3)), (3, 3))
    found = []
    for pads in (False, True):
        copied = copy.deepcopy(network)
        out = torch.empty(2, sum(w.numel() for w in network.parameters())).double()
        _in_one_pass(Objective(copied), stack, out, pads)
        found.append([out, *copied.buffers()])
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-9, atol=1e-12)


def test_padding_is_refused_where_a_network_looks_at_its_channels():
    objective = Objective(build("resnet"))  # its last layer takes as many features as channels
    (stack,) = memories("resnet", counts=(4, 4)).level()
    assert not thin._tries(objective, stack, _in_one_pass)
    assert thin._tries(Objective(gm.resnet18(feature_maps=5)), images(), _in_one_pass)


def images():
    return Stack(torch.rand(2, 3, 3, 32, 32), torch.randint(10, (2, 3)), (3, 3))


def test_noise_is_in_every_method_and_in_train_mode_only():
    """Noise that is the same every time, so that the methods can be compared."""
    torch.manual_seed(0)
    stack = Stack(torch.randn(3, 4, 6), torch.randint(5, (3, 4)), (4, 4, 4))
    network = gm.mlp([6, 8, 5])
    found = {}
    for noisy in (True, False):
        forward = Forward(noise=(lambda x: 0.5 * x) if noisy else None)
        objective = Objective(network, forward=forward)
        for mode in (True, False):
            network.train(mode)
            for method in ("loop", "chain", "batched", "func"):
                found[noisy, mode, method] = MemoryGradients(objective, method)([stack]).clone()
    for (_, mode, method), G in found.items():
        torch.testing.assert_close(G, found[_, mode, "loop"])
        assert torch.allclose(found[True, mode, method], found[False, mode, method]) == (not mode)
