"""A bound on the constraints of a step, for very many tasks."""

import pytest
import torch
from torch.nn import functional as F

import gradmem as gm
from gradmem.checks import _same, check_learner
from gradmem.projection import Shortlist


def batch(t, n=10, seed=0):
    generator = torch.Generator().manual_seed(1000 * t + seed)
    x = torch.randn(n, 6, generator=generator)
    return x, ((x[:, t % 6] > 0) + (t % 2)).long()


def learner(constraints=None, **settings):
    return gm.GEM(gm.mlp([6, 16, 3], seed=0), lr=0.05, memories=5, constraints=constraints,
                  **settings)  # fmt: skip


def observe(one, tasks, seeds=(0,)):
    for t in tasks:
        for seed in seeds:
            one.observe(*batch(t, seed=seed)[:1], t, batch(t, seed=seed)[1])
    return one


def test_a_bound_that_is_not_met_changes_nothing():
    exact, bounded = observe(learner(), range(6)), observe(learner(6), range(6))
    for w, other in zip(exact.network.parameters(), bounded.network.parameters(), strict=True):
        assert torch.equal(w, other)


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_step_has_no_more_constraints_than_allowed(constrain):
    one = observe(learner(4, constrain=constrain), range(12))
    x, y = batch(12)
    one.observe(x, 12, y)
    last = one.constraints.last
    assert 0 < len(last.tasks) <= 4
    assert len(set(last.tasks)) == len(last.tasks)


def test_the_most_violated_ones_are_named():
    torch.manual_seed(0)
    G, g = torch.randn(60, 20_000), torch.randn(20_000)
    g -= 0.1 * G[[3, 20, 41]].sum(0)
    few = Shortlist(8)
    few.first(range(60), g)
    few.learn(range(60), G)
    assert {3, 20, 41} <= {*few.first(range(60), g)}


def test_what_the_first_solution_would_violate_is_added():
    torch.manual_seed(0)
    G = torch.randn(30, 5_000)
    one, other = torch.linalg.qr(torch.randn(5_000, 2))[0].T * 70
    g, G[0], G[7] = other - one, one, -2 * one - other  # fine for g, not for g without -one
    few = Shortlist(8)
    few.learn(range(30), G)
    named = few.first(range(30), g)
    assert 0 in named
    rest = [t for t in range(30) if t not in named]
    assert few.second(rest, gm.project(g, G[named]))[0] == 7


def test_every_constraint_has_its_turn():
    few = Shortlist(4)
    g, G = torch.ones(50), torch.eye(50)[:20]
    few.learn(range(20), G)
    seen = set()
    for _ in range(20):
        named = few.first(range(20), g)
        few.learn(named, G[named])
        seen |= {*named}
    assert seen == {*range(20)}


def test_it_goes_on_bit_for_bit_and_is_undone():
    whole, first = learner(4), learner(4)
    observe(whole, range(20), seeds=(0, 1))
    observe(first, range(10), seeds=(0, 1))
    second = learner(4)
    second.load_state_dict(first.state_dict())
    observe(second, range(10, 20), seeds=(0, 1))
    _same(whole.state_dict(), second.state_dict(), "going on led elsewhere")
    before = second.state_dict()
    with pytest.raises(FloatingPointError):
        second.observe(torch.full((10, 6), 3e38), 3, batch(3)[1])
    _same(before, second.state_dict(), "what could not be learned left a trace")


def test_all_checks_pass_with_a_bound():
    check_learner(lambda network, seed: gm.GEM(network, memories=16, constraints=2, seed=seed))


def test_a_loop_of_ones_own_can_have_a_bound():
    model = gm.mlp([6, 16, 3], seed=0)
    memory = gm.GradientMemory(model, memories=5, constraints=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for t in range(12):
        x, y = batch(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        memory.step(optimizer, t)
        memory.add(x, t, y)
    assert len(memory.last.tasks) <= 4
    with pytest.raises(ValueError, match="constraints must be at least 2"):
        gm.GradientMemory(model, constraints=1)
