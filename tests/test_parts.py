"""Learners from parts: any network, loss, optimizer, schedule and data, and outputs that grow."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradmem as gm
from gradmem import learners

#: SteadyGEM is SoftGEM with other defaults, several noisy steps on a mini-batch among them.
LEARNERS = {name: kind for name, kind in learners.LEARNERS.items() if kind is not gm.SteadyGEM}
ONE_NETWORK = {name: kind for name, kind in LEARNERS.items() if kind.one_network}


def batch(n=8, seed=0, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(classes, (n,), generator=generator)


def flat(network):
    return torch.cat([w.detach().reshape(-1) for w in network.parameters()])


def train(learner, tasks="abcab", y=lambda y: y):
    for step, t in enumerate(tasks):
        x, labels = batch(seed=step)
        learner.observe(x, t, y(labels))
    return learner


# What was wrong in silence


@pytest.mark.parametrize("gradients", ["auto", "batched"])
def test_a_module_that_is_used_twice_is_trained_as_by_the_loop(gradients):
    def trained(gradients):
        torch.manual_seed(0)
        prelu, block = nn.PReLU(), nn.Linear(8, 8)
        network = nn.Sequential(nn.Linear(4, 8), prelu, block, block, block, prelu, nn.Linear(8, 3))
        return train(gm.GEM(network, memories=6, gradients=gradients), "ab" * 30).network

    try:
        found = trained(gradients)
    except ValueError as error:
        assert "no rule for PReLU" in str(error)  # noqa: PT017
        return
    copy.deepcopy(found)
    torch.testing.assert_close(flat(found), flat(trained("loop")))


class Doubled(gm.Learner):
    """Mixed into a learner: its loss counts twice."""

    def loss(self, x, t, y, mask=None):
        return 2 * super().loss(x, t, y, mask)


#: Settings of learners whose steps are else not linear in the loss.
LINEAR = {"icarl": {"distillation": 0.0}, "derpp": {"alpha": 0.0}, "lamaml": {"rate_lr": None}}


@pytest.mark.parametrize("name", sorted({*LEARNERS} - {"ewc"}))  # its penalty is not linear in it
def test_a_subclass_may_compute_the_loss_another_way(name):
    kind, settings = LEARNERS[name], LINEAR.get(name, {})
    own = type("Own", (Doubled, kind), {})(gm.mlp([4, 8, 3]), lr=0.05, **settings)
    plain = kind(gm.mlp([4, 8, 3]), lr=0.1, **settings)
    for learner in (own, plain):
        train(learner)
    torch.testing.assert_close(flat(own.module("a")), flat(plain.module("a")))


def test_a_loss_of_ones_own_cannot_be_batched():
    kind = type("Own", (Doubled, gm.GEM), {})
    assert train(kind(gm.mlp([4, 8, 3]))).gradients == "loop"
    with pytest.raises(ValueError, match="a loss\\(\\) of its own"):
        kind(gm.mlp([4, 8, 3]), gradients="chain")


def test_a_memory_needs_a_label_for_each_input():
    with pytest.raises(ValueError, match="equally many, got 5 inputs and 4 labels"):
        gm.EpisodicMemory(10).add(torch.randn(5, 2), "a", torch.zeros(4).long())


@pytest.mark.parametrize("name", LEARNERS)
def test_a_state_of_adamw_does_not_load_into_sgd(name):
    adamw = LEARNERS[name](gm.mlp([4, 8, 3]), optimizer=partial(torch.optim.AdamW, lr=1e-3))
    sgd = LEARNERS[name](gm.mlp([4, 8, 3]))
    with pytest.raises(ValueError, match="optimizer must be AdamW as in the state, got SGD"):
        sgd.load_state_dict(train(adamw).state_dict())


def test_memories_and_budget_are_not_given_together():
    with pytest.raises(ValueError, match="cannot both be given, got 10 and 20"):
        gm.GEM(gm.mlp([4, 3]), memories=10, budget=20)
    with pytest.raises(ValueError, match="lr is plain SGD's"):
        gm.GEM(gm.mlp([4, 3]), lr=0.5, optimizer=partial(torch.optim.AdamW, lr=1e-3))


# Losses


class Focal(nn.Module):
    def forward(self, outputs, y):
        losses = F.cross_entropy(outputs, y, reduction="none")
        return (1 - (-losses).exp()) ** 2 * losses


LOSSES = {
    "cross-entropy": (F.cross_entropy, lambda y: y),
    "as a module": (nn.CrossEntropyLoss(), lambda y: y),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), lambda y: y),
    "each": (nn.CrossEntropyLoss(reduction="none"), lambda y: y),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.1), lambda y: y),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), lambda y: y),
    "with labels left out": (
        partial(F.cross_entropy, ignore_index=7),
        lambda y: y.masked_fill(torch.arange(len(y)) % 3 == 1, 7),
    ),
    "one value per example": (Focal(), lambda y: y),
    "a mean": (lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(), lambda y: y),
    "probabilities": (None, lambda y: F.one_hot(y, 3) * 0.8 + 0.1),
    "squares": (F.mse_loss, lambda y: F.one_hot(y, 3).float()),
    "smooth": (nn.SmoothL1Loss(beta=0.5), lambda y: F.one_hot(y, 3).float()),
    "several labels": (nn.BCEWithLogitsLoss(), lambda y: F.one_hot(y, 3).float()),
    "a dict of labels": (
        lambda z, y: (z - y["target"]).square().mean(1) * y["weight"],
        lambda y: {"target": F.one_hot(y, 3).float(), "weight": 1.0 + y},
    ),
}


@pytest.mark.parametrize("gradients", ["chain", "batched", "func"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_way_to_compute_gradients_takes_any_loss(name, gradients):
    """Memories of unequal sizes; each task's mean is the one the loss itself would give."""
    loss, y = LOSSES[name]
    model = gm.mlp([4, 8, 3])
    memory = gm.GradientMemory(model, loss=loss, memories=6, gradients=gradients)
    kept = {}
    for t, n in (("a", 6), ("b", 3), ("c", 6), ("d", 4)):
        x, labels = batch(n, seed=n)
        kept[t] = x, y(labels)
        memory.add(kept[t][0], t, kept[t][1])
    found = memory.gradients()
    for row, (x, labels) in zip(found, kept.values(), strict=True):
        value = (loss or F.cross_entropy)(model(x), labels)
        if name in ("a sum", "each"):
            value = F.cross_entropy(model(x), labels)
        grads = torch.autograd.grad(value.mean(), list(model.parameters()))
        torch.testing.assert_close(row, torch.cat([g.flatten() for g in grads]))


def test_tokens_with_padding_count_once_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def loss(outputs, y):  # a mean over the tokens that are not padding
        return F.cross_entropy(outputs.transpose(1, 2), y, ignore_index=-100)

    ids = torch.randint(11, (5, 7))
    y = ids.roll(-1, 1).masked_fill(torch.rand(5, 7) < 0.4, -100)
    for gradients in ("auto", "loop", "batched"):
        memory = gm.GradientMemory(model, loss=loss, memories=5, gradients=gradients)
        memory.add(ids, "a", y)
        memory.add(ids.flip(0), "b", y.flip(0))
        value = F.cross_entropy(model(ids).flatten(0, 1), y.flatten(), ignore_index=-100)
        expected = torch.autograd.grad(value, list(model.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        for row in memory.gradients():
            torch.testing.assert_close(row, expected)


def test_a_loss_that_does_not_fit_is_refused_before_anything_changes():
    learner = gm.Single(nn.Linear(4, 1), loss=F.mse_loss)
    x = torch.randn(6, 4)
    before = flat(learner.network)
    with pytest.raises(ValueError, match=r"does not take outputs \(2, 1\)"):
        learner.observe(x, "a", torch.randn(6))  # would be spread out to (6, 6)
    with pytest.raises(ValueError, match="y must be finite, got nan"):
        learner.observe(x, "a", torch.full((6, 1), float("nan")))
    assert torch.equal(before, flat(learner.network))
    assert learner.observe(x, "a", torch.randn(6, 1)).ndim == 0


def test_a_loss_must_give_a_value_for_each_example():
    learner = gm.GEM(gm.mlp([4, 8, 3]), loss=lambda z, y: z.sum(0))
    with pytest.raises(ValueError, match="got 3 values for 2 examples"):
        learner.observe(*[batch()[0], "a", batch()[1]])


def test_an_unknown_setting_is_named_with_those_there_are():
    with pytest.raises(TypeError, match="GEM has no setting 'marginn'; it has lr, optimizer, loss"):
        gm.GEM(gm.mlp([4, 3]), marginn=0.5)
    with pytest.raises(TypeError, match="decide must be a callable"):
        gm.GEM(gm.mlp([4, 3]), decide=3)
    with pytest.raises(TypeError, match="grow must be True or False"):
        gm.Single(gm.mlp([4, 3]), grow=1)


# Predictions


def test_predictions_are_classes_outputs_or_what_is_decided():
    x, y = batch()
    assert gm.Single(nn.Linear(4, 3)).predict(x).dtype == torch.int64
    regression = gm.Single(nn.Linear(4, 2), loss=F.mse_loss)
    regression.observe(x, "a", torch.randn(8, 2))
    assert torch.equal(regression.predict(x, "a"), regression.forward(x, "a"))
    focal = gm.Single(nn.Linear(4, 3), loss=Focal())
    focal.observe(x, "a", y)
    assert focal.predict(x, "a").shape == (8,)
    several = gm.Single(nn.Linear(4, 3), loss=nn.BCEWithLogitsLoss(), decide=lambda z: z > 0)
    several.observe(x, "a", F.one_hot(y, 3).float())
    assert several.predict(x, "a").dtype == torch.bool
    assert several.forward(x).shape == (8, 3)


# Optimizers, schedules, clipping, transforms


@pytest.mark.parametrize("name", LEARNERS)
def test_an_optimizer_and_a_schedule_go_on_from_a_state(name):
    def make():
        return LEARNERS[name](
            gm.mlp([4, 8, 3]),
            optimizer=partial(torch.optim.AdamW, lr=1e-2),
            schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
            clip=1.0,
        )

    learner = train(make(), "aab")
    other = make()
    other.load_state_dict(learner.state_dict())
    for one in (learner, other):
        train(one, "bca")
    torch.testing.assert_close(flat(learner.module("b")), flat(other.module("b")), rtol=0, atol=0)


def test_an_optimizer_may_leave_parameters_alone():
    network = gm.mlp([4, 8, 3])
    learner = gm.GEM(network, optimizer=lambda weights: torch.optim.SGD([*weights][2:], lr=0.1))
    before = [w.detach().clone() for w in network.parameters()]
    train(learner)
    same = [torch.equal(w, b) for w, b in zip(network.parameters(), before, strict=True)]
    assert same == [True, True, False, False]
    gm.networks.widen(network, 5)
    train(learner)
    assert torch.equal(network[0].weight, before[0])
    assert network[-1].weight.shape == (5, 8)


def test_a_schedule_is_advanced_after_every_batch():
    learner = gm.Single(
        nn.Linear(4, 3), lr=1.0,
        schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )  # fmt: skip
    train(learner, "abc")
    assert learner.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("name", LEARNERS)
def test_a_step_is_no_longer_than_the_clip_allows(name):
    learner = LEARNERS[name](gm.mlp([4, 8, 3]), lr=1.0, clip=1e-3)
    for step, t in enumerate("aabb"):
        x, y = batch(seed=step)
        learner.observe(100 * x, t, y)
        before = flat(learner.module(t))
        learner.observe(100 * x, t, y)
        steps = len(x) if name == "mer" else 1  # one for each example
        assert (flat(learner.module(t)) - before).norm() <= steps * 1.01e-3


@pytest.mark.parametrize("name", ONE_NETWORK)
def test_what_is_remembered_is_raw_and_transformed_when_it_is_used(name):
    def pixels(x):
        return x.float() / 255

    raw = LEARNERS[name](gm.mlp([4, 8, 3]), transform=pixels)
    plain = LEARNERS[name](gm.mlp([4, 8, 3]))
    for step, t in enumerate("aabba"):
        x = torch.randint(256, (8, 4), dtype=torch.uint8)
        _, y = batch(seed=step)
        raw.observe(x, t, y)
        plain.observe(pixels(x), t, y)
    torch.testing.assert_close(flat(raw.network), flat(plain.network))
    if name in ("gem", "agem"):
        assert raw.memory["a"][0].dtype == torch.uint8
    assert torch.equal(raw.predict(x, "a"), plain.predict(pixels(x), "a"))


# Data of any structure


class Sentence(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x):
        mask = x["mask"][..., None]
        return self.last((self.embedding(x["ids"]) * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("name", ONE_NETWORK)
def test_dicts_with_padding_are_learned_and_kept_as_they_came(name):
    torch.manual_seed(0)
    learner = LEARNERS[name](Sentence())
    for t in "abab":
        ids = torch.randint(20, (6, 5))
        x = {"ids": ids, "mask": (ids % 4 > 0).float().index_fill(1, torch.tensor([0]), 1.0)}
        learner.observe(x, t, torch.arange(6) % 3)
    assert learner.predict(x, "a").shape == (6,)
    if name in ("gem", "agem"):
        kept, _ = learner.memory["b"]
        assert torch.equal(kept["ids"][-6:], ids)
    with pytest.raises(ValueError, match="must have as many examples, got 6 and 5"):
        learner.observe({"ids": ids, "mask": x["mask"][:5]}, "a", torch.arange(6) % 3)


def test_an_optimizer_or_schedule_that_is_already_made_is_refused():
    network = gm.mlp([4, 3])
    made = torch.optim.AdamW(network.parameters())
    with pytest.raises(TypeError, match=r"optimizer must be a callable, partial\(AdamW, …\)"):
        gm.GEM(network, optimizer=made)
    schedule = torch.optim.lr_scheduler.StepLR(made, 3)
    with pytest.raises(TypeError, match=r"schedule must be a callable, partial\(StepLR, …\)"):
        gm.GEM(network, schedule=schedule)


# Outputs that grow


@pytest.mark.parametrize("name", ONE_NETWORK)
def test_a_network_grows_with_the_classes_that_arrive(name):
    learner = LEARNERS[name](
        gm.mlp([4, 8, 2]), grow=True, optimizer=partial(torch.optim.AdamW, lr=1e-2)
    )
    x, y = batch(classes=2)
    for t in "ab":
        learner.observe(x, t, y)
    kept = learner.network[-1].weight.detach().clone()
    moments = learner.optimizer.state[learner.network[-1].weight]["exp_avg"].clone()
    assert learner.predict(x, "a").max() < 2
    learner.observe(x, "c", y + 3)
    assert learner.network[-1].out_features == 5
    state = learner.optimizer.state[learner.network[-1].weight]
    assert state["exp_avg"].shape == (5, 8)
    assert state["step"] == (3 * len(x) if name == "mer" else 3)  # one for each example
    assert not torch.equal(state["exp_avg"][:2], moments)  # it went on
    assert (learner.network[-1].weight[:2] - kept).abs().max() < 0.1
    for t in "abc":
        learner.observe(x, t, y)
    other = LEARNERS[name](
        gm.mlp([4, 8, 5]), grow=True, optimizer=partial(torch.optim.AdamW, lr=1e-2)
    )
    other.load_state_dict(learner.state_dict())
    assert torch.equal(learner.predict(x, "c"), other.predict(x, "c"))


@pytest.mark.parametrize("name", ONE_NETWORK)
def test_a_network_grows_for_tasks_with_outputs_of_their_own(name):
    x, y = torch.rand(60, 4), torch.arange(60) % 6
    continuum = gm.Continuum.split_by_class(x, y, 3, test=0.5, batch_size=1)
    learner = LEARNERS[name](gm.mlp([4, 8, 2]), grow=True)
    result = gm.run(learner, continuum)
    assert result.baseline[1:].tolist() == [0, 0]  # there are no outputs for these classes yet
    assert learner.network[-1].out_features == 6
    for t, own in continuum.outputs.items():
        assert set(learner.predict(x, t).tolist()) <= set(own)


def test_without_growing_a_new_class_says_what_to_do():
    learner = gm.GEM(gm.mlp([4, 8, 2]))
    x, y = batch(classes=2)
    with pytest.raises(ValueError, match=r"from 0 to 1, got 3; gm.networks.widen\(network, 4\)"):
        learner.observe(x, "a", y + 2)
    gm.networks.widen(learner.network, 4)
    learner.observe(x, "a", y + 2)
    with pytest.raises(ValueError, match="grow is for one network"):
        gm.Independent(gm.mlp([4, 2]), grow=True)


def test_widening_keeps_what_was_there():
    network = gm.mlp([4, 8, 2])
    x, _ = batch()
    before = network(x)
    gm.networks.widen(network, 6)
    torch.testing.assert_close(network(x)[:, :2], before)
    with pytest.raises(ValueError, match="at least the 6 there are, got 3"):
        gm.networks.widen(network, 3)


# The rest of the surface


def test_a_learner_shows_its_settings_and_takes_them_by_keyword():
    assert repr(gm.GEM(gm.mlp([4, 3]), lr=0.2, memories=5)) == "GEM(Sequential, lr=0.2, memories=5)"
    with pytest.raises(TypeError):
        gm.GEM(gm.mlp([4, 3]), 0.1)
    for kind in (*LEARNERS.values(), gm.Learner):
        names = list(inspect.signature(kind).parameters)
        assert names[:4] == ["network", "lr", "optimizer", "loss"]
        assert {"schedule", "clip", "seed", "graphs"} <= set(names)


def test_a_stream_is_learned_from_as_it_comes():
    def stream():
        for step in range(7):
            x, y = batch(seed=step)
            yield x, step // 4, y

    learner = gm.GEM(gm.mlp([4, 8, 3])).learn_from(stream(), progress=False)
    assert learner.examples == 56
    assert list(learner.memory) == [0, 1]
    with pytest.raises(TypeError, match=r"triplets \(x, t, y\), got 2 items"):
        learner.learn_from([batch()], progress=False)


@pytest.mark.parametrize("grow", [False, True])
def test_a_label_that_is_not_the_tasks_own_is_refused(grow):
    learner = gm.GEM(gm.mlp([4, 8, 3]), grow=grow)
    learner.outputs = {"a": (0, 2)}
    x, y = batch()
    with pytest.raises(ValueError, match=r"task 'a''s classes \(0, 2\), got 1"):
        learner.observe(x, "a", torch.full((8,), 1))
    learner.observe(x, "a", 2 * (y % 2))
