"""Every learner there is, through every check there is."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.checks import CHECKS, _same, check_learner
from gradmem.gradients.noise import shifted_and_mirrored
from gradmem.learners import LEARNERS

SETTINGS = {
    "ewc": [{"fisher": "batch"}, {"fisher": "example", "memories": 8}],
    "independent": [{"start": "copy"}, {"start": "random"}],
    "icarl": [{"budget": 6}, {"distillation": 0.0, "candidates": 12}],
    "mer": [{"batches": 2, "sample": 2}],
    "gem": [{"memories": 16}, {"budget": 30}, {"margin_rule": "floor"}, {"margin": 0.0}],
}
VARIANTS = [(name, settings) for name in LEARNERS for settings in SETTINGS.get(name, [{}])]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_learner(name, settings, check):
    check(lambda network, seed: LEARNERS[name](network, seed=seed, **settings))


class Squares(nn.Module):
    """Makes large numbers infinite."""

    def forward(self, x):
        return x * x


@pytest.mark.parametrize("t", ["a", "b", "c"])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_a_loss_that_is_not_finite_leaves_no_trace(name, settings, normalised, t):
    """Not in running statistics either, nor in what is made when another task begins."""
    torch.manual_seed(0)
    between = nn.BatchNorm1d(8) if normalised else nn.Identity()
    network = nn.Sequential(nn.Linear(6, 8), Squares(), between, nn.Linear(8, 4))
    learner = LEARNERS[name](network, lr=0.1, seed=0, **settings)
    x, y = torch.randn(10, 6), torch.arange(10) % 4
    for task in ("a", "a", "b", "b"):
        learner.observe(x, task, y)
    before = learner.state_dict()
    x[7] = 1e30  # finite, and taken for good data
    after = f"after {4 * learner.glances} steps"
    with pytest.raises(FloatingPointError, match=f"not finite {after}.*on task '{t}'.*loss"):
        learner.observe(x, t, y)
    _same(before, learner.state_dict(), "what could not be learned left a trace")
    learner.not_finite = "skip"
    assert learner.observe(x, t, y) is None
    assert learner.skipped == learner.statistics()["skipped"] == 1
    _same({**before, "skipped": 1}, learner.state_dict(), "what was skipped left a trace")


def test_an_interrupt_as_a_task_begins_is_undone():
    class Stops(nn.Module):
        passes = 0

        def forward(self, x):
            self.passes += self.training
            if self.passes == 3:
                raise KeyboardInterrupt
            return x

    learner = gm.EWC(nn.Sequential(nn.Linear(6, 8), Stops(), nn.Linear(8, 4)))
    x, y = torch.randn(10, 6), torch.arange(10) % 4
    learner.observe(x, 0, y)
    before = learner.state_dict()
    with pytest.raises(KeyboardInterrupt):
        learner.observe(x, 1, y)
    _same(before, learner.state_dict(), "an interrupt left a trace")
    learner.observe(x, 1, y)


class Refuses(nn.Module):
    """Cannot go on from some inputs."""

    def forward(self, x):
        if x.abs().max() > 1e3:
            raise IndexError("too large")
        return x


@pytest.mark.parametrize("t", ["a", "b"])
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_what_could_not_be_learned_leaves_no_trace(name, settings, t):
    """Also if the network itself finds out, in the middle of a task or as a new one begins."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), Refuses(), nn.Linear(8, 4))

    learners = [LEARNERS[name](network(), lr=0.1, seed=0, **settings) for _ in range(2)]
    x, y = torch.randn(3, 10, 6), torch.arange(30).view(3, 10) % 4
    bad = x[1].clone()
    bad[7] = 1e5
    for i, learner in enumerate(learners):
        learner.observe(x[0], "a", y[0])
        if i:
            with pytest.raises(IndexError, match="too large"):
                learner.observe(bad, t, y[1])
        for again in (t, "a", "b"):
            learner.observe(x[2], again, y[2])
    for task in ("a", "b"):
        pairs = zip(*(learner.module(task).parameters() for learner in learners), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_what_learns_cannot_be_changed_unnoticed(kind):
    learner = kind(gm.mlp([6, 8, 4]))
    x, y = torch.randn(10, 6), torch.arange(10) % 4
    learner.observe(x, "a", y)
    next(learner.module("a").parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="must stay as it was"):
        learner.observe(x, "a", y)


class Forgetful(gm.Single):
    """Breaks a promise: a part of what it depends on is not in its state."""

    def __init__(self, network, seed=0):
        super().__init__(network, seed=seed)
        self.scale = 1.0

    def learn(self, x, t, y):
        self.scale *= 0.99
        super().learn(x * self.scale, t, y)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_what_is_no_longer_used_is_freed_at_once(kind):
    """No cycle keeps it: on a GPU, gigabytes would wait for the interpreter's collection."""

    def use():
        learner = kind(gm.mlp([6, 8, 4]))
        learner.outputs = dict.fromkeys(range(3), (0, 1, 2))
        for t in (0, 0, 1, 1, 2, 2):
            learner.observe(torch.ones(3, 6), t, torch.arange(3))
        learner.predict(torch.ones(3, 6), 0)
        return weakref.ref(learner), weakref.ref(learner.network)

    use()  # torch, when first used, leaves frames behind
    gc.collect()
    gc.disable()
    try:
        assert [what() for what in use()] == [None, None]
    finally:
        gc.enable()


def test_the_checks_find_a_learner_that_breaks_a_promise():
    with pytest.raises(AssertionError, match="a restored learner went another way"):
        check_learner(lambda network, seed: Forgetful(network, seed=seed))


@pytest.mark.parametrize("kind", LEARNERS.values())
@pytest.mark.parametrize("lr", [0, -0.1, float("nan"), float("inf"), "fast", None, True])
def test_a_wrong_learning_rate_is_named(kind, lr):
    with pytest.raises((ValueError, TypeError), match="lr must be"):
        kind(gm.mlp([4, 3, 2]), lr=lr)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (gm.GEM, {"memories": 0}, "memories must be at least 1, got 0"),
        (gm.GEM, {"memories": 2.5}, "memories must be a whole number, got 2.5"),
        (gm.GEM, {"budget": 0}, "budget must be at least 1, got 0"),
        (gm.GEM, {"margin": -0.1}, "margin must not be negative, got -0.1"),
        (gm.GEM, {"margin": float("nan")}, "margin must be finite, got nan"),
        (gm.GEM, {"margin_rule": "push"}, "margin_rule must be one of shift, floor; got 'push'"),
        (gm.EWC, {"regularization": -1}, "regularization must not be negative, got -1"),
        (gm.EWC, {"memories": 0}, "memories must be at least 1, got 0"),
        (gm.EWC, {"fisher": "exact"}, "fisher must be one of batch, example; got 'exact'"),
        (gm.Independent, {"start": "warm"}, "start must be one of copy, random; got 'warm'"),
        (gm.Single, {"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_a_wrong_setting_is_named(kind, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kind(gm.mlp([4, 3, 2]), **settings)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_network_must_be_a_module_that_learns(kind):
    with pytest.raises(TypeError, match="network must be"):
        kind("resnet")
    with pytest.raises((TypeError, ValueError), match="learn"):
        kind(nn.Sequential(nn.ReLU(), nn.ReLU()))


def test_a_network_that_gives_no_logits_is_refused():
    learner = gm.Single(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)))
    with pytest.raises(ValueError, match=r"logits of shape \(n, classes\), got \(6,\)"):
        learner.observe(torch.randn(5, 4), 0, torch.zeros(5, dtype=torch.long))


def test_inputs_of_another_type_say_what_would_do():
    learner, y = gm.GEM(gm.mlp([4, 3, 2])), torch.tensor([0, 1])
    wrong = r"x of shape \(n, 4\), torch.float64, on cpu: .*; it takes x\.float\(\)$"
    with pytest.raises(ValueError, match=wrong):
        learner.observe(torch.zeros(2, 4, dtype=torch.float64), 0, y)
    with pytest.raises(ValueError, match=r"\(n, 5\), torch.float64, on cpu: .*[^)]$"):
        learner.observe(torch.zeros(2, 5, dtype=torch.float64), 0, y)
    with pytest.raises(TypeError, match=r"got ndarray: torch\.as_tensor\(x\) makes a tensor"):
        learner.observe(np.zeros((2, 4), np.float32), 0, y)
    with pytest.raises(TypeError, match=r"got ndarray: torch\.as_tensor\(y\) makes a tensor"):
        learner.observe(torch.zeros(2, 4), 0, y.numpy())


def test_a_setting_that_was_misspelt_is_guessed():
    with pytest.raises(TypeError, match=r"no setting 'margn'; it has .*: did you mean margin\?"):
        gm.GEM(gm.mlp([4, 3, 2]), margn=0)


def test_a_loss_that_is_not_finite_says_what_may_help():
    learner = gm.Single(gm.mlp([4, 2]), lr=1e38)
    x, y = torch.full((5, 4), 9.0), torch.tensor([0, 1, 0, 1, 1])
    learner.observe(x, 0, y)
    with pytest.raises(FloatingPointError, match=r"after 1 steps: a learning rate below lr=1e\+38"):
        learner.observe(x, 0, y)


def test_frozen_parameters_stay_as_they_are():
    for kind in (gm.Single, gm.EWC, gm.GEM):
        network = gm.mlp([4, 8, 3])
        network[0].weight.requires_grad_(False)
        before = network[0].weight.clone()
        learner = kind(network)
        for t in (0, 1, 2):
            learner.observe(torch.randn(10, 4), t, torch.randint(3, (10,)))
        assert torch.equal(network[0].weight, before)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_one_example_is_refused_before_anything_changes_where_batch_statistics_need_two(kind):
    learner = kind(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for t in "ab":
        learner.observe(x, t, y)
    before = learner.state_dict()
    with pytest.raises(ValueError, match="more than one example"):
        learner.observe(x[:1], "c", y[:1])
    _same(before, learner.state_dict(), "the learner was changed")


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_state_that_does_not_fit_changes_nothing(kind):
    def trained(width):
        learner = kind(gm.mlp([4, width, 3]))
        for t in "ab":
            learner.observe(torch.randn(5, 4), t, torch.tensor([0, 1, 2, 0, 1]))
        return learner

    learner = trained(6)
    before = learner.state_dict()
    broken = dict(list(before.items())[:-1])
    for state, error in (
        (trained(7).state_dict(), ValueError),
        (broken, ValueError),
        ([], TypeError),
    ):
        with pytest.raises(error, match="state"):
            learner.load_state_dict(state)
        _same(before, learner.state_dict(), "the learner was changed")


def test_agem_keeps_to_one_average_over_inputs_of_several_shapes():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    learner = gm.AGEM(network, lr=1e-3, memories=12, sample=None)
    sizes = {"a": 6, "b": 9}
    data = {t: (torch.randn(12, 1, n, n), torch.randint(3, (12,))) for t, n in sizes.items()}
    for t, (x, y) in data.items():
        learner.observe(x, t, y)

    @torch.no_grad()
    def average():
        losses = [nn.functional.cross_entropy(network(x), y) for x, y in data.values()]
        return float(sum(losses) / 2)

    before = average()
    for _ in range(60):
        learner.observe(torch.randn(10, 1, 6, 6), "c", torch.randint(3, (10,)))
        assert average() <= before + 2e-6
        before = average()
    assert learner.statistics()["violations"] > 0


def test_outputs_may_be_arrays_and_need_something_observed():
    learner = gm.GEM(gm.mlp([4, 8, 3]))
    learner.outputs = {"a": np.arange(2), "b": torch.tensor([2])}
    with pytest.raises(ValueError, match="known when something was observed"):
        learner.mask("a")
    learner.observe(torch.randn(5, 4), "a", torch.arange(5) % 2)
    learner.observe(torch.randn(5, 4), "b", torch.full((5,), 2))
    assert learner.mask("b").tolist() == [False, False, True]


def test_agem_takes_tasks_with_and_without_outputs_of_their_own():
    learner = gm.AGEM(gm.mlp([4, 8, 3]), memories=4)
    learner.outputs = {"b": (0, 1), "c": (0, 2)}
    x = torch.randn(4, 4)
    for t, y in (("a", 1), ("b", 0), ("c", 2), ("b", 1)):
        learner.observe(x, t, torch.full((4,), y))


def test_a_state_from_before_there_were_outputs_is_taken():
    learner = gm.Single(gm.mlp([4, 3]))
    state = learner.state_dict()
    del state["outputs"]
    learner.load_state_dict(state)
    assert learner.outputs == {}


@pytest.mark.parametrize("fisher", ["batch", "example"])
def test_ewc_takes_batch_statistics(fisher):
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    learner = gm.EWC(network, memories=1 if fisher == "batch" else 5, fisher=fisher)
    for t in "ab":
        learner.observe(torch.randn(6, 4), t, torch.arange(6) % 3)
    assert network[1].training


@pytest.mark.parametrize("options", [{}, {"average": 0.9, "glances": 2}], ids=str)
@pytest.mark.parametrize("kind", LEARNERS.values())
def test_no_autograd_graph_is_alive_when_a_step_begins(kind, options, monkeypatch):
    """Else autograd's nodes stay on their stream, and no CUDA graph can be recorded on another."""
    learner = kind(gm.mlp([6, 8, 8, 6], seed=0), lr=0.05, **options)
    call, alive = type(learner.graphed).__call__, []

    def looking(self, key, step, *inputs):
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        alive.extend(one for one in tensors if one.grad_fn is not None)
        return call(self, key, step, *inputs)

    monkeypatch.setattr(type(learner.graphed), "__call__", looking)
    gc.freeze()  # what there is already is not looked at
    try:
        for t in (0, 1, 0):
            for some in torch.arange(12).split(6):
                learner.observe(torch.linspace(-1, 1, 12 * 6).view(12, 6)[some] + t, t, some % 6)
    finally:
        gc.unfreeze()
    assert not alive


@pytest.mark.parametrize("name", LEARNERS)
def test_input_dropout_is_for_learning_alone_and_follows_the_seed(name):
    def learned(dropout, seed=0):
        learner = LEARNERS[name](gm.mlp([6, 8, 5]), lr=0.1, input_dropout=dropout, seed=seed)
        for t in (0, 1):
            for some in torch.arange(12).split(6):
                learner.observe(torch.linspace(-1, 1, 72).view(12, 6)[some] + t, t, some % 5)
        return learner

    x = torch.linspace(-1, 1, 72).view(12, 6)
    outputs = [learned(*case).forward(x, 0) for case in ((0.5,), (0.5,), (0.5, 1), (0.0,))]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])
    learner = learned(0.5)
    assert torch.equal(learner.forward(x, 0), learner.forward(x, 0))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_wrong_input_dropout_is_named(share):
    with pytest.raises(ValueError, match="input_dropout must"):
        gm.GEM(gm.mlp([4, 3, 2]), input_dropout=share)


@pytest.mark.parametrize("name", LEARNERS)
def test_augmented_inputs_are_for_learning_alone_and_follow_the_seed(name):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 36, 5))

    x = torch.linspace(-1, 1, 12 * 2 * 64).view(12, 2, 8, 8).sin()

    def learned(augment, seed=0):
        learner = LEARNERS[name](network(), lr=0.1, augment=augment, seed=seed)
        for t in (0, 1):
            for some in torch.arange(12).split(6):
                learner.observe(x[some] + t, t, some % 5)
        return learner

    if name == "multimodal":  # its first layer is a linear one
        pytest.skip("takes no convolution")
    cases = [("images",), ("images",), ("images", 1), (None,)]
    outputs = [learned(*case).forward(x, 0) for case in cases]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])
    learner = learned("images")
    assert torch.equal(learner.forward(x, 0), learner.forward(x, 0))
    assert torch.equal(learned(lambda x: x).forward(x, 0), outputs[3])


class Viewing(nn.Module):
    """Takes its inputs for ones without gaps, and has a weight that no rule knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5 * 128).view(5, 128))

    def forward(self, x):
        return x.view(len(x), -1) @ self.weight.T


@pytest.mark.parametrize(
    "augment", ["images", lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x], ids=["name", "own"]
)
@pytest.mark.parametrize("gradients", ["auto", "loop", "gram"])
def test_augmented_inputs_lie_as_inputs_do_and_may_be_made_by_any_function(augment, gradients):
    learner = gm.GEM(Viewing(), lr=0.1, augment=augment, gradients=gradients)
    for t in range(3):
        for some in torch.arange(12).split(6):
            learner.observe(torch.randn(6, 2, 8, 8), t, some % 5)
    assert learner.steps == 6


def test_images_are_moved_by_an_eighth_at_most_and_half_of_them_mirrored():
    torch.manual_seed(0)
    image = torch.zeros(1, 2, 16, 24)
    image[0, 0, 8, 5] = 1.0  # 5 from the left, 18 from the right
    image[0, 1] = 1.0
    changed = shifted_and_mirrored(image.expand(2000, -1, -1, -1))
    places = changed[:, 0].nonzero()
    assert len(places) == 2000
    assert places[:, 1].unique().tolist() == [6, 7, 8, 9, 10]
    assert places[:, 2].unique().tolist() == [*range(2, 9), *range(15, 22)]
    mirrored = places[:, 2] > 12
    assert 900 < mirrored.sum() < 1100
    # what moves in is zero, and as much of it as the image was moved by
    for (_, row, column), own in zip(places.tolist(), changed[:, 1], strict=True):
        across = column - (18 if column > 12 else 5)
        assert own.sum() == (16 - abs(row - 8)) * (24 - abs(across))


@pytest.mark.parametrize("wrong", ["image", 3])
def test_a_wrong_augment_is_named(wrong):
    with pytest.raises((ValueError, TypeError), match="augment must"):
        gm.GEM(gm.mlp([4, 3, 2]), augment=wrong)


def test_vectors_are_no_images():
    learner = gm.GEM(gm.mlp([4, 3, 2]), augment="images")
    with pytest.raises(ValueError, match=r"takes images \(n, channels, height, width\), got"):
        learner.observe(torch.randn(3, 4), 0, torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_batches_in_a_row_are_those_one_by_one(kind):
    learners = []
    for in_a_row in (False, True):
        learner = kind(gm.mlp([4, 8, 3], seed=0))
        generator = torch.Generator().manual_seed(0)
        for t in "aba":
            x, y = torch.randn(23, 4, generator=generator), torch.arange(23) % 3
            if in_a_row:
                learner.observe_each(x, t, y, 5)
            else:
                for some in torch.arange(23).split(5):
                    learner.observe(x[some], t, y[some])
        learners.append(learner)
    _same(*(learner.state_dict() for learner in learners), "in a row")
    with pytest.raises(ValueError, match="batch_size must be"):
        learner.observe_each(x, "a", y, 0)
    for t in (None, ["a"] * 23):
        with pytest.raises(TypeError, match="t must be one task's descriptor"):
            learner.observe_each(x, t, y, 5)
