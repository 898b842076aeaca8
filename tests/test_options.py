"""What every learner can be given: an average of the weights for predictions, several glances."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.checks import CHECKS, _same
from gradmem.learners import LEARNERS
from gradmem.learners.averaging import Averages

#: Checks that count steps, or look at the live weights where predictions are averaged.
COUNTS = ("takes_batches_of_any_size", "returns_the_loss_of_the_batch")


def batch(seed, n=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def train(learner, tasks="abcab"):
    for step, t in enumerate(tasks):
        x, y = batch(step)
        learner.observe(x, t, y)
    return learner


def weights(module):
    return [w.detach().clone() for w in module.parameters()]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_with_both_passes_the_checks(name, check):
    few = {"batches": 1, "sample": 2, "beta": 0.5} if name == "mer" else {}
    both = {"average": 0.5, "glances": 2, **few}
    if check.__name__ not in COUNTS:
        check(lambda network, seed: LEARNERS[name](network, seed=seed, **both))


@pytest.mark.parametrize("name", LEARNERS)
def test_learning_goes_on_with_the_live_weights(name):
    plain, averaged = (LEARNERS[name](gm.mlp([4, 8, 3]), average=a) for a in (None, 0.9))
    for learner in (plain, averaged):
        train(learner, "aab" if name != "icarl" else "aaa")  # its answers are the average's
    for one, other in zip(
        plain.module("a").parameters(), averaged.module("a").parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_predictions_are_those_of_the_average():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    learner = gm.Single(network, average=0.8)
    mean = copy.deepcopy(network)
    for step in range(5):
        x, y = batch(step)
        learner.observe(x, "a", y)
        with torch.no_grad():
            for average, live in zip(
                [*mean.parameters(), *mean.buffers()],
                [*network.parameters(), *network.buffers()],
                strict=True,
            ):
                if live.is_floating_point():
                    average.lerp_(live, max(0.2, 1 / (step + 1)))
    x, _ = batch(99, n=50)
    torch.testing.assert_close(learner.forward(x), mean.eval()(x))
    assert not torch.allclose(learner.forward(x), copy.deepcopy(network).eval()(x))
    assert network.training


def test_a_task_is_predicted_with_an_average_as_long_as_it_is_past():
    learner = gm.Single(gm.mlp([4, 8, 3]), average=(0.98, 0.8, 0.9))  # 50, 5 and 10 steps long
    means = {decay: weights(learner.network) for decay in (0.8, 0.9, 0.98)}
    for step, t in enumerate("a" * 4 + "b" * 30 + "c" * 15 + "d" * 8 + "e" * 4):
        x, y = batch(step)
        learner.observe(x, t, y)
        for decay, mean in means.items():
            for m, w in zip(mean, weights(learner.network), strict=True):
                m.lerp_(w, max(1 - decay, 1 / (step + 1)))
    x, _ = batch(99, n=50)
    own = {"a": 0.98, "b": 0.9, "c": 0.9, "d": 0.8, "e": 0.8, "never learned": 0.8, None: 0.9}
    for t, decay in own.items():
        expected = gm.mlp([4, 8, 3])
        for w, m in zip(expected.parameters(), means[decay], strict=True):
            w.data = m
        torch.testing.assert_close(learner.forward(x, t), expected(x))
    mixed = learner.forward(x[:2], ["a", "e"])
    torch.testing.assert_close(mixed[0], learner.forward(x[:1], "a")[0])
    torch.testing.assert_close(mixed[1], learner.forward(x[1:2], "e")[0])


def test_a_step_that_is_held_leaves_averages_as_they_are():
    network = gm.mlp([4, 8, 3])
    averages = Averages((0.5, 0.9))
    before = [tensor.clone() for tensor in averages.tensors(network)]
    with torch.no_grad():
        network[0].weight.add_(1.0)
    averages.update(network, stopped=torch.tensor(1.0))  # the first step, on a GPU
    for now, then in zip(averages.tensors(network), before, strict=True):
        assert torch.equal(now, then)
    averages.update(network, stopped=torch.tensor(0.0))
    assert torch.equal(averages.tensors(network)[1], network[0].weight)


def test_several_averages_are_saved_and_counted(tmp_path):
    learner = gm.SteadyGEM(gm.mlp([4, 8, 3]), memories=3, average=(0.5, 0.9), glances=2)
    train(learner, "aaab")
    size = sum(w.numel() for w in learner.network.parameters()) * 4
    assert learner.statistics()["average_bytes"] == 2 * size
    learner.save(tmp_path / "learner")
    other = gm.SteadyGEM(gm.mlp([4, 8, 3]), memories=3, average=[0.5, 0.9], glances=2)
    other.load(tmp_path / "learner")
    x, _ = batch(9)
    for t in ("a", "b", None):
        assert torch.equal(learner.forward(x, t), other.forward(x, t))
    for one in (learner, other):
        train(one, "cc")
    assert torch.equal(learner.forward(x, "a"), other.forward(x, "a"))
    with pytest.raises(ValueError, match="average must be"):
        gm.SteadyGEM(gm.mlp([4, 8, 3]), memories=3, average=0.9, glances=2).load(
            tmp_path / "learner"
        )


def test_a_run_asks_for_each_task_with_its_own_average():
    continuum = gm.mnist_rotations(4, 40, data="sample")
    learner = gm.Single(gm.mlp(), average=(0.5, 0.9))
    R = gm.run(learner, continuum).R
    for t, test in continuum.tests.items():
        x, y = test[:]
        assert R[-1][t] == pytest.approx((learner.predict(x, t) == y).float().mean().item())


def test_an_average_follows_every_step_on_a_single_example():
    learner = gm.MER(gm.mlp([4, 8, 3]), average=0.8)
    mean = [w.clone() for w in weights(learner.network)]
    for step in range(4):
        x, y = batch(step, n=1)
        learner.observe(x, "a", y)
        rate = max(0.2, 1 / (step + 1))
        mean = [m.lerp(w, rate) for m, w in zip(mean, weights(learner.network), strict=True)]
    expected = gm.mlp([4, 8, 3])
    for w, m in zip(expected.parameters(), mean, strict=True):
        w.data = m
    x, _ = batch(9)
    torch.testing.assert_close(learner.forward(x), expected(x))


def test_an_average_follows_a_network_that_grows():
    learner = gm.Single(gm.mlp([4, 8, 2]), grow=True, average=0.9)
    x, y = batch(0)
    learner.observe(x, "a", y.clamp(max=1))
    learner.observe(x, "a", y + 2)
    assert learner.forward(x).shape == (8, 5)
    other = gm.Single(gm.mlp([4, 8, 2]), grow=True, average=0.9)
    other.load_state_dict(learner.state_dict())
    assert torch.equal(learner.forward(x), other.forward(x))


def test_a_learner_that_steps_its_own_way_has_an_average():
    class Own(gm.Learner):
        def learn(self, x, t, y):
            loss = self.loss(x, t, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    own, single = (kind(gm.mlp([4, 8, 3]), average=0.7) for kind in (Own, gm.Single))
    x, _ = batch(9)
    for learner in (own, single):
        train(learner)
    torch.testing.assert_close(own.forward(x), single.forward(x))


def test_glances_are_steps_on_the_same_batch():
    several, each = gm.Single(gm.mlp([4, 8, 3]), glances=3), gm.Single(gm.mlp([4, 8, 3]))
    x, y = batch(0)
    losses = [each.observe(x, "a", y) for _ in range(3)]
    assert several.observe(x, "a", y) == losses[0]
    assert (several.steps, several.examples) == (3, 8)
    for one, other in zip(weights(several.network), weights(each.network), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [gm.GEM, gm.AGEM, gm.ER, gm.EWC, gm.ICaRL])
def test_what_was_glanced_at_is_remembered_once(kind):
    settings = {"memories": 20} if kind is not gm.ICaRL else {"budget": 20}
    learner = kind(gm.mlp([4, 8, 3]), glances=3, **settings)
    x, y = batch(0)
    learner.observe(x, "a", y)
    kept = learner.memory if kind is not gm.ICaRL else learner.current
    assert kept.count("a") == 8
    assert sorted(kept["a"][0].tolist()) == sorted(x.tolist())


def test_remembered_examples_are_drawn_anew_for_each_glance():
    learner = gm.ER(gm.mlp([4, 8, 3]), glances=5, sample=3)
    train(learner)
    seen, sample = [], learner.memory.sample
    learner.memory.sample = lambda *given: [seen.append(found := sample(*given)), found][1]
    learner.observe(*batch(7)[:1], "b", batch(7)[1])
    assert len(seen) == 5
    assert len({tuple(x.flatten().tolist()) for ((x, _),) in seen}) == 5


class Overflows(nn.Module):
    """Gives infinity in its n-th pass in train mode from now on."""

    left = -1

    def forward(self, x):
        if self.training:
            self.left -= 1
        return x * float("inf") if self.left == 0 else x


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
@pytest.mark.parametrize("average", [None, 0.5])
def test_a_glance_that_cannot_be_made_undoes_those_before_it(optimizer, average):
    bad = Overflows()
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), bad, nn.Linear(8, 3))
    learner = gm.Single(network, glances=3, average=average, optimizer=optimizer)
    train(learner)
    before = learner.state_dict()
    bad.left = 3
    with pytest.raises(FloatingPointError, match="not finite after 17 steps"):
        learner.observe(*batch(7)[:1], "b", batch(7)[1])
    _same(before, learner.state_dict(), "a glance left a trace")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average": 1.0}, "average must be below 1, got 1.0"),
        ({"average": 0}, "average must be above 0, got 0"),
        ({"average": "much"}, "average must be a number, got 'much'"),
        ({"average": (0.9, 1)}, "average must be below 1, got 1"),
        ({"average": ()}, r"average must be a decay or several different ones, got \(\)"),
        ({"average": (0.9, 0.9)}, "average must be a decay or several different ones"),
        ({"glances": 0}, "glances must be at least 1, got 0"),
        ({"glances": 1.5}, "glances must be a whole number, got 1.5"),
    ],
)
def test_a_wrong_option_is_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gm.Single(gm.mlp([4, 3]), **settings)


def test_several_averages_are_refused_where_tasks_cannot_have_their_own():
    for learner in (gm.Independent, gm.Multimodal, gm.ICaRL):
        with pytest.raises(ValueError, match=r"are chosen by the task, .* predicts with one"):
            learner(gm.mlp([4, 8, 3]), average=(0.9, 0.99))


def test_a_state_without_an_average_does_not_fit_a_learner_with_one():
    with pytest.raises(ValueError, match="average must be None as when the state was saved"):
        gm.Single(gm.mlp([4, 3]), average=0.5).load_state_dict(
            gm.Single(gm.mlp([4, 3])).state_dict()
        )


@pytest.mark.parametrize("kind", [gm.Independent, gm.Multimodal])
def test_a_later_tasks_average_begins_with_its_own_first_step(kind):
    """So that it is the plain mean of its weights, while these are fewer than it is long."""
    learner = kind(gm.mlp([4, 8, 3]), average=0.999, lr=0.1)
    train(learner, "a" * 20)
    seen = []
    for step in range(10):
        x, y = batch(step)
        learner.observe(x, "b", y)
        seen.append(learner.module("b")[0].weight.detach().clone())
    with learner.averaged.standing_in(learner.module("b"), 0):
        mean = learner.module("b")[0].weight.detach().clone()
    assert torch.allclose(mean, torch.stack(seen).mean(0), atol=1e-6)


@pytest.mark.parametrize("kind", [gm.Independent, gm.Multimodal])
def test_averages_take_what_the_modules_take_that_learn(kind):
    learner = train(kind(gm.mlp([4, 8, 3]), average=0.9), "ab")
    own = {w for t in "ab" for w in learner.module(t).parameters()}
    expected = sum(w.numel() * w.element_size() for w in own)
    for _ in range(2):
        assert learner.statistics()["average_bytes"] == expected
        learner.load_state_dict(learner.state_dict())


def test_mers_averages_follow_once_for_a_mini_batch_and_glance():
    learner = gm.MER(gm.mlp([4, 8, 3]), average=0.9, glances=2, batches=2, sample=3, beta=0.5)
    train(learner, "aab")
    assert learner.steps == 6
    count, *_ = learner.averaged.tensors(learner.network)
    assert count == 6


@pytest.mark.parametrize("kind", [gm.Single, gm.MER])
def test_a_batch_that_is_refused_leaves_momentum_as_it_was(kind):
    """Also if the network had got wider for it."""
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    learner = kind(gm.mlp([4, 8, 2]), grow=True, glances=2, optimizer=momentum)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    learner.observe(x, "a", torch.tensor([0, 1] * 4))
    before = learner.state_dict()
    with pytest.raises(FloatingPointError):
        learner.observe(x * 1e38, "a", torch.tensor([0, 2] * 4))
    _same(before, learner.state_dict(), "a batch that was refused left a trace")
    learner.observe(x, "a", torch.tensor([0, 2] * 4))


def test_a_single_example_is_tried_without_the_global_generator():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    learner = gm.Single(network, input_dropout=0.1)
    before = torch.get_rng_state()
    learner.observe(torch.randn(1, 1, 4, 4, generator=torch.Generator()), 0, torch.tensor([1]))
    assert torch.equal(before, torch.get_rng_state())


def test_averages_are_saved_with_a_layer_that_was_just_replaced():
    learner = train(gm.GEM(gm.mlp([4, 8, 3]), average=0.9))
    learner.network[2] = nn.Linear(8, 3)
    other = gm.GEM(gm.mlp([4, 8, 3], seed=5), average=0.9)
    other.load_state_dict(learner.state_dict())
    x, _ = batch(50)
    assert torch.equal(learner.predict(x, "a"), other.predict(x, "a"))
    count, *_ = other.averaged.tensors(other.network)
    assert count == 5


def test_a_state_of_old_of_multimodal_averages_loads():
    """It had one number of steps, and the next task's input layer under None."""
    learner = train(gm.Multimodal(gm.mlp([4, 8, 3]), average=0.9), "aab")
    state = learner.state_dict()
    own = state["average"]
    own["averages"][None], own["steps"] = own["averages"]["a"], torch.tensor(3.0).double()
    other = gm.Multimodal(gm.mlp([4, 8, 3]), average=0.9)
    other.load_state_dict(state)
    x, _ = batch(50)
    assert torch.equal(learner.predict(x, "a"), other.predict(x, "a"))
