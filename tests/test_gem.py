"""GEM does what Algorithm 1 says, on problems small enough to redo by hand."""

import pytest
import torch
from torch.nn import functional as F

import gradmem as gm
from gradmem.gradients import gradient


def batch(n, seed, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(classes, (n,), generator=generator)


def flat(network):
    return torch.cat([w.detach().reshape(-1) for w in network.parameters()])


@pytest.mark.parametrize("margin_rule", ["shift", "floor"])
def test_a_step_is_the_projected_gradient(margin_rule):
    network = gm.mlp([4, 8, 3])
    learner = gm.GEM(network, lr=0.2, memories=10, margin=0.3, margin_rule=margin_rule)
    seen = {}
    for step, t in enumerate("aabbccab"):
        x, y = batch(6, step)
        before = flat(network)
        seen[t] = (
            [torch.cat(pair)[-10:] for pair in zip(seen[t], (x, y), strict=True)]
            if (t in seen)
            else [x, y]
        )
        past = [k for k in seen if k != t]
        G = torch.stack([gradient(network, *seen[k]) for k in past]) if past else before[:0]
        g = gradient(network, x, y)
        expected = before - 0.2 * gm.project(
            g, G.reshape(len(past), -1 if past else len(g)), 0.3, margin_rule
        )
        learner.observe(x, t, y)
        torch.testing.assert_close(flat(network), expected)


@pytest.mark.parametrize(("kind", "rises"), [(gm.GEM, False), (gm.Single, True)])
def test_no_remembered_loss_rises_unless_it_is_not_gem(kind, rises):
    """To first order: with a small step and no margin."""
    network = gm.mlp([4, 16, 3])
    settings = {"margin": 0.0, "memories": 20} if kind is gm.GEM else {}
    learner = kind(network, lr=1e-4, **settings)
    old = [batch(20, seed=t) for t in range(4)]
    for t, (x, y) in enumerate(old):
        learner.observe(x, t, y)
    worst = 0.0
    for step in range(30):
        before = [F.cross_entropy(network(x), y).item() for x, y in old]
        x, y = batch(5, seed=step % 4)
        learner.observe(x, "new", (y + 1) % 3)  # contradicts an old task
        after = [F.cross_entropy(network(x), y).item() for x, y in old]
        worst = max(worst, *(new - was for new, was in zip(after, before, strict=True)))
    assert (worst > 1e-6) == rises


def insert(pair, t):
    x, y = pair
    return x, t, y


def test_the_first_task_is_plain_descent():
    one, other = gm.mlp([4, 8, 3]), gm.mlp([4, 8, 3])
    gem, single = gm.GEM(one, lr=0.1), gm.Single(other, lr=0.1)
    for step in range(5):
        gem.observe(*insert(batch(7, step), 0))
        single.observe(*insert(batch(7, step), 0))
    torch.testing.assert_close(flat(one), flat(other))
    assert gem.statistics()["violations"] == 0


def test_the_current_task_is_never_a_constraint_on_itself():
    """A task that comes back has one constraint per *other* task."""
    learner = gm.GEM(gm.mlp([4, 8, 3]), memories=5)
    for t in "abab":
        learner.observe(*insert(batch(6, ord(t)), t))
    assert list(learner.memory) == ["a", "b"]


def test_violations_are_counted_once_a_step():
    learner = gm.GEM(gm.mlp([4, 8, 3]), memories=5)
    x, y = batch(6, 0)
    for t in ("a", "b", "c"):
        learner.observe(x, t, y)
    assert (
        learner.statistics()["violations"] == 0
    )  # the same examples never disagree with themselves
    learner.observe(x, "d", (y + 1) % 3)  # the opposite of what was learned
    counts = learner.statistics()
    assert counts["violations"] == 1
    assert counts["violated_constraints"] == 3
    assert 1 <= counts["active_constraints"] <= 3
    assert counts["steps"] == 4
    assert counts["examples"] == 24


def test_ewc_keeps_the_sum_of_the_tasks_penalties():
    """Its two running vectors give the gradient of the sum over tasks, written out."""
    network = gm.mlp([4, 8, 3])
    learner = gm.EWC(network, lr=0.05, regularization=20.0, memories=6)
    terms, kept, current = [], {}, None
    for step, t in enumerate("aabbccaa"):
        x, y = batch(6, step)
        if current is not None and t != current:
            F_k = gradient(network, *kept[current]).square()
            terms.append((F_k, flat(network)))
            kept.clear()
        current = t
        kept.setdefault(t, (x, y))  # the first six examples of the visit
        before = flat(network)
        g = gradient(network, x, y)
        for F_k, theta in terms:
            g = g + 2 * 20.0 * F_k * (before - theta)
        learner.observe(x, t, y)
        torch.testing.assert_close(flat(network), before - 0.05 * g, rtol=1e-4, atol=1e-6)
    assert len(terms) == 3


def test_ewc_fisher_by_example_is_the_mean_of_squares():
    network = gm.mlp([4, 8, 3])
    learner = gm.EWC(network, memories=6, fisher="example")
    x, y = batch(6, 0)
    learner.observe(x, "a", y)
    squares = torch.stack(
        [gradient(network, x[i : i + 1], y[i : i + 1]).square() for i in range(6)]
    )
    learner.consolidate()
    found = torch.cat([part.flatten() for part in learner.curvature])
    torch.testing.assert_close(found, squares.mean(0))


def test_independent_predicts_an_unseen_task_by_the_untrained_network():
    network = gm.mlp([4, 8, 3])
    x, y = batch(50, 0)
    before = network(x).argmax(1)
    learner = gm.Independent(network)
    for _ in range(30):
        learner.observe(x, "a", y)
    assert torch.equal(learner.predict(x, "b"), before)
    assert not torch.equal(learner.predict(x, "a"), before)


def test_independent_starts_where_it_is_told():
    x, y = batch(10, 0)
    for start, alike in (("copy", True), ("random", False)):
        learner = gm.Independent(gm.mlp([4, 8, 3]), lr=1e-9, start=start)
        for t in "ab":
            learner.observe(x, t, y)
        first, second = flat(learner.networks["a"]), flat(learner.networks["b"])
        assert torch.allclose(first, second, atol=1e-5) == alike


def test_multimodal_shares_all_but_the_first_layer():
    learner = gm.Multimodal(gm.mlp([4, 8, 8, 3]))
    x, y = batch(10, 0)
    for t in "ab":
        learner.observe(x, t, y)
    a, b = learner.module("a"), learner.module("b")
    assert a[0] is not b[0]
    assert a[1] is b[1] is learner.shared
