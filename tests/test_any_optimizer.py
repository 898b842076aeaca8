"""`constrain="update"`: no step goes against a remembered task, whatever the optimizer."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, AdamW

import gradmem as gm
from tests.networks import CLASSES, Residual, Transformer


def by_groups(weights):
    """Adam with a rate for each half of the parameters."""
    weights = list(weights)
    half = len(weights) // 2
    return Adam([{"params": weights[:half], "lr": 3e-2}, {"params": weights[half:]}], lr=1e-3)


OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "Nesterov, decay": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": partial(AdamW, lr=3e-2, weight_decay=0.1),
    "Adam by groups": by_groups,
}
MARGINS = {"none": (0.0, "shift"), "shift": (0.5, "shift"), "floor": (0.5, "floor")}
constrain = pytest.mark.parametrize("constrain", ["gradient", "update"])
any_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def squared_errors(outputs, y):
    """Of the outputs as one-hot vectors: one value per example."""
    return F.mse_loss(outputs, F.one_hot(y, CLASSES).to(outputs), reduction="none").mean(1)


LOSSES = (F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.2), squared_errors)


def examples(t, n=8, dtype=torch.float32):
    """Inputs around a centre of the task's own; the tasks contradict each other about classes."""
    centre = 0.3 * torch.sin(torch.arange(6.0) * (t + 1))
    x = centre + torch.randn(n, 6)
    return x.to(dtype), (x[:, :CLASSES].argmax(1) + t) % CLASSES


def random_network():
    widths = [6, *torch.randint(3, 12, (int(torch.randint(1, 4, ())),)).tolist(), CLASSES]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    between = nn.Tanh() if torch.rand(()) < 0.5 else nn.ReLU()
    return nn.Sequential(*[part for layer in layers for part in (layer, between)][:-1])


def flat(network):
    return nn.utils.parameters_to_vector(network.parameters()).detach().double()


class Loop:
    """A plain training loop that notes how far each step goes against the remembered tasks."""

    def __init__(self, network, optimizer, loss=F.cross_entropy, **settings):
        self.network, self.loss = network, loss
        self.optimizer = optimizer([w for w in network.parameters() if w.requires_grad])
        self.memory = gm.GradientMemory(network, loss, memories=5, **settings)
        self.against = []

    def backward(self, x, y):
        self.loss(self.network(x), y).mean().backward()

    def gradient_at(self, t):
        """g_k, by autograd alone; zero for parameters that stay as they are."""
        x, y = self.memory.memory[t]
        loss, weights = self.loss(self.network(x), y).mean(), list(self.network.parameters())
        owned = {id(w) for group in self.optimizer.param_groups for w in group["params"]}
        learning = [w for w in weights if id(w) in owned]
        grads = torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True)
        parts = dict(zip(map(id, learning), grads, strict=True))
        return torch.cat([parts.get(id(w), torch.zeros_like(w)).flatten() for w in weights])

    def step(self, t, closure=None):
        """A step along `.grad`; the largest ⟨g_k, Δθ⟩ / |g_k| |Δθ| beyond rounding is noted."""
        past = [k for k in self.memory.memory if k != t]
        G = [self.gradient_at(k).double() for k in past]
        before = flat(self.network)
        with self.memory.around_step(t, self.optimizer):
            self.optimizer.step(closure)
        self.optimizer.zero_grad()
        step = flat(self.network) - before
        slack = 1e-6 * step.norm() + torch.finfo(torch.float32).eps * before.norm()
        self.against += [bool(g @ step > slack * g.norm()) for g in G]

    def learn(self, tasks, parts=1):
        for t in tasks:
            for _ in range(parts):
                x, y = examples(t)
                self.backward(x, y)
            self.step(t)
            self.memory.add(x, t, y)
        return self


def visits(tasks=5, steps=4):
    return [t for t in range(tasks) for _ in range(steps)] + list(range(tasks))


@pytest.mark.parametrize(("margin", "margin_rule"), MARGINS.values(), ids=MARGINS)
@any_optimizer
def test_no_step_goes_against_a_remembered_task(optimizer, margin, margin_rule):
    """75 steps each time and 1,125 in all."""
    settings = {"margin": margin, "margin_rule": margin_rule, "constrain": "update"}
    for seed, loss in enumerate(LOSSES):
        torch.manual_seed(seed)
        loop = Loop(random_network(), optimizer, loss, **settings).learn(visits())
        assert not any(loop.against)
        assert loop.memory.violations > 0  # there was something to do


@pytest.mark.parametrize("name", ["momentum", "Nesterov, decay", "AdamW", "Adam by groups"])
def test_a_projected_gradient_does_not_promise_that(name):
    torch.manual_seed(0)
    loop = Loop(random_network(), OPTIMIZERS[name], margin=0.0).learn(visits(5, 8))
    assert sum(loop.against) > 5


@any_optimizer
def test_accumulated_gradients_are_one_step(optimizer):
    torch.manual_seed(1)
    loop = Loop(random_network(), optimizer, constrain="update").learn(visits(), parts=3)
    assert not any(loop.against)


@any_optimizer
def test_frozen_and_tied_parameters(optimizer):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    network[2].weight = network[0].weight
    frozen = network[3].weight.requires_grad_(False)
    before = frozen.clone()
    loop = Loop(network, optimizer, constrain="update").learn(visits())
    assert not any(loop.against)
    assert loop.memory.violations > 0
    assert torch.equal(frozen, before)


@constrain
@any_optimizer
def test_parameters_that_the_optimizer_does_not_own_stay(optimizer, constrain):
    """And are not counted on: the others keep the promise by themselves."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    before = copy.deepcopy(network[0])
    loop = Loop(network, lambda weights: optimizer(weights[2:]), margin=0.0, constrain=constrain)
    loop.learn(visits())
    assert all(map(torch.equal, network[0].parameters(), before.parameters()))
    assert loop.memory.violations > 0
    if constrain == "update" or optimizer is OPTIMIZERS["SGD"]:
        assert not any(loop.against)


def test_an_optimizer_that_evaluates_the_loss_itself():
    """Several times a step."""
    torch.manual_seed(0)
    loop = Loop(random_network(), partial(LBFGS, lr=0.1, max_iter=4), constrain="update")
    for t in visits(3, 2):
        x, y = examples(t)

        def closure(x=x, y=y):
            loop.optimizer.zero_grad()
            loss = F.cross_entropy(loop.network(x), y)
            loss.backward()
            return loss

        loop.step(t, closure)
        loop.memory.add(x, t, y)
    assert loop.memory.violations > 0
    assert not any(loop.against)


@pytest.mark.parametrize("rule", ["shift", "floor"])
def test_a_vanishing_gradient_leaves_steps_of_momentum_short(rule):
    """The margin is relative to the gradient, which must not mean a division by nothing."""
    torch.manual_seed(0)
    loop = Loop(random_network(), OPTIMIZERS["momentum"], margin_rule=rule, constrain="update")
    loop.learn(visits(3))
    for _ in range(5):
        for w in loop.network.parameters():
            w.grad = torch.zeros_like(w)
        buffers = [loop.optimizer.state[w]["momentum_buffer"] for w in loop.network.parameters()]
        momentum = torch.cat([b.flatten() for b in buffers]).norm()
        before = flat(loop.network)
        loop.step("new")
        assert (flat(loop.network) - before).norm() < 20 * 0.05 * momentum
    assert not any(loop.against)


@pytest.mark.parametrize("tasks", [1, 3])  # with 3 a way to compute them was chosen before
@constrain
def test_gradients_that_are_not_finite_are_found_before_the_optimizer_steps(constrain, tasks):
    torch.manual_seed(0)
    loop = Loop(random_network(), OPTIMIZERS["AdamW"], constrain=constrain).learn([*range(tasks)])
    loop.memory.memory.add(torch.full((2, 6), torch.inf), "broken", torch.tensor([0, 1]))
    loop.backward(*examples(3))
    before, state = flat(loop.network), copy.deepcopy(loop.optimizer.state_dict())
    with pytest.raises(FloatingPointError, match="at the memories are not finite"):
        loop.memory.step(loop.optimizer, 3)
    assert torch.equal(flat(loop.network), before)
    torch.testing.assert_close(loop.optimizer.state_dict(), state)


@constrain
def test_where_gradients_are_switched_off_it_is_the_same(constrain):
    """Optimizers' wrappers often call a step like that."""
    loops = []
    for enabled in (True, False):
        torch.manual_seed(0)
        loop = Loop(random_network(), OPTIMIZERS["AdamW"], constrain=constrain)
        for t in range(4):
            x, y = examples(t)
            loop.backward(x, y)
            with torch.set_grad_enabled(enabled):
                loop.memory.step(loop.optimizer, t)
            loop.optimizer.zero_grad()
            loop.memory.add(x, t, y)
        with torch.set_grad_enabled(enabled):
            assert not loop.memory.gradients().requires_grad
        loops.append(loop)
    assert torch.equal(flat(loops[0].network), flat(loops[1].network))


def test_with_plain_sgd_both_ways_are_one():
    """Also with a margin, where it breaks no constraint."""
    one, other = (gm.mlp([6, 9, CLASSES]).double() for _ in range(2))
    learners = [gm.GEM(one, lr=0.05), gm.GEM(other, lr=0.05, constrain="update")]
    torch.manual_seed(0)
    for t in visits(3):
        x, y = examples(t, dtype=torch.float64)
        for learner in learners:
            learner.observe(x, t, y)
    assert learners[0].statistics()["violations"] > 0
    torch.testing.assert_close(flat(one), flat(other), rtol=0, atol=1e-10)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1])


def with_dropout():
    network = Transformer()
    network.mix = nn.Sequential(network.mix, nn.Dropout(0.3))
    network.narrow = nn.Sequential(network.narrow, nn.Dropout(0.3))
    return network


#: Network, and what gives n of its inputs.
NETWORKS = {
    "MLP": (lambda: gm.mlp([6, 9, CLASSES]), lambda n: torch.randn(n, 6)),
    "convnet, batch norm": (Residual, lambda n: torch.randn(n, 3, 6, 6)),
    "GRU": (Recurrent, lambda n: torch.randn(n, 4, 3)),
    "transformer, dropout": (with_dropout, lambda n: torch.randint(11, (n, 7))),
}


@pytest.mark.parametrize(("make", "inputs"), NETWORKS.values(), ids=NETWORKS)
@constrain
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_gem_is_a_loop_around_a_gradient_memory(make, inputs, constrain, name):
    """The same parameters to the last digits, dropout's masks included."""
    torch.manual_seed(3)
    network = make().double()
    own = copy.deepcopy(network)
    shown = inputs(24)  # to all tasks, with other classes each time
    shown = shown.double() if shown.is_floating_point() else shown
    stream = []
    for i, t in enumerate(visits(4, 3)):
        rows = torch.arange(i, i + 6) % 24
        stream.append((shown[rows], t, (rows + t) % CLASSES))
    settings = {"memories": 8, "constrain": constrain}

    learner = gm.GEM(network, optimizer=OPTIMIZERS[name], seed=7, **settings)
    for x, t, y in stream:
        learner.observe(x, t, y)

    memory = gm.GradientMemory(own, **settings)
    optimizer = OPTIMIZERS[name](own.parameters())
    torch.manual_seed(7)
    for x, t, y in stream:
        F.cross_entropy(own(x), y).backward()
        memory.step(optimizer, t)
        optimizer.zero_grad()
        memory.add(x, t, y)

    assert memory.violations == learner.statistics()["violations"] > 0
    torch.testing.assert_close(flat(own), flat(network), rtol=0, atol=1e-9)
