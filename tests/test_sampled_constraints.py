"""GEM's constraints at some memories of each task, drawn anew in each step, or without any."""

import pytest
import torch
from torch.nn import functional as F

import gradmem as gm
from gradmem.checks import check_learner
from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.memory import Stack
from gradmem.memory.policies.first import First

LR = 0.1


def network():
    return gm.mlp([4, 8, 3], seed=1).double()


def batch(seed, n=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def weights(model):
    return torch.cat([w.detach().flatten() for w in model.parameters()])


def observed(learner, tasks="aabbccddab"):
    for step, t in enumerate(tasks):
        x, y = batch(step)
        learner.observe(x, t, y)
    return weights(learner.network)


def test_as_many_as_there_are_is_gem_to_the_last_bit():
    plain = observed(gm.GEM(network(), lr=LR, memories=8))
    assert torch.equal(observed(gm.GEM(network(), lr=LR, memories=8, sample=8)), plain)
    assert not torch.equal(observed(gm.GEM(network(), lr=LR, memories=8, sample=3)), plain)


@pytest.mark.parametrize("outputs", [{}, {"a": (0, 1), "b": (1, 2), "c": (0, 2)}])
@pytest.mark.parametrize("size", [{"memories": 9}, {"budget": 24}])
def test_a_step_is_projected_on_the_gradients_at_what_was_drawn(size, outputs):
    """Also while a task has fewer memories than room, and fewer than are drawn."""
    learner = gm.GEM(network(), lr=LR, **size, keep="reservoir", sample=7, margin=0.0)
    learner.outputs = outputs
    model, given, take = network(), [], learner.take_once
    learner.take_once = lambda *parts: [given.append(parts[3:]), take(*parts)][1]

    def gradient(x, t, y):
        logits = model(x)
        if t in outputs:
            left_out = [i for i in range(3) if i not in outputs[t]]
            logits = logits.index_fill(1, torch.tensor(left_out), -torch.inf)
        return loss_gradient(F.cross_entropy(logits, y), parameters(model))

    drawn = []
    for step, t in enumerate("aabbccab"):
        x, y = batch(step)
        y = torch.tensor(outputs[t])[y % 2] if outputs else y
        before = {k: learner.memory[k] for k in learner.memory if k != t}
        learner.observe(x, t, y)
        (_, _, _, *stacks) = given.pop()
        found = [own for x_k, y_k, shares in stacks for own in zip(x_k, y_k, shares, strict=True)]
        assert len(found) == len(before)
        G = []
        for (k, (all_x, all_y)), (x_k, y_k, shares) in zip(before.items(), found, strict=True):
            n = min(7, len(all_y))
            assert torch.equal(shares > 0, torch.arange(len(shares)) < n)
            known = [*zip(all_x.tolist(), all_y.tolist(), strict=True)]
            some = [*zip(x_k[:n].tolist(), y_k[:n].tolist(), strict=True)]
            assert len({*map(str, some)}) == n  # each once
            assert all(one in known for one in some)
            drawn.append(str(sorted(some)))
            G.append(gradient(x_k[:n], k, y_k[:n]))
        g = gradient(x, t, y)
        g = gm.project(g, torch.stack(G)) if G else g
        with torch.no_grad():
            parts = g.split([w.numel() for w in model.parameters()])
            for w, part in zip(model.parameters(), parts, strict=True):
                w -= LR * part.view_as(w)
        torch.testing.assert_close(weights(learner.network), weights(model))
    assert learner.constraints.violations > 0
    assert len({*drawn}) > 6  # others in each step


@pytest.mark.parametrize("gradients", ["auto", "func", "gram"])
@pytest.mark.parametrize("constraints", [None, 2])
def test_every_way_draws_the_same(gradients, constraints):
    found = []
    for way in ("loop", gradients):
        options = {"constraints": constraints, "gradients": way, "rehearse": 4, "glances": 2}
        learner = gm.GEM(network(), lr=LR, memories=8, sample=3, margin=0.0, **options)
        found.append(observed(learner))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_loop_of_ones_own_draws_too(constrain):
    """By the memory's own generator; with the seed of the learner's it takes the same steps."""
    options = {"memories": 8, "margin": 0.0, "sample": 3, "constrain": constrain}
    learner, model = gm.GEM(network(), lr=LR, **options), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    memory = gm.GradientMemory(model, loss=F.cross_entropy, **options)
    before = torch.get_rng_state()
    for step, t in enumerate("aabbccab"):
        x, y = batch(step)
        learner.observe(x, t, y)
        F.cross_entropy(model(x), y).backward()
        memory.step(optimizer, t)
        optimizer.zero_grad()
        memory.add(x, t, y)
    torch.testing.assert_close(weights(learner.network), weights(model))
    assert memory.violations > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loop_of_ones_own_goes_on_with_the_same_draws(tmp_path):
    def loop(memory, model, steps):
        for step in steps:
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            memory.project_("abc"[step % 3])
            with torch.no_grad():
                for w in model.parameters():
                    w -= LR * w.grad
                    w.grad = None
            memory.add(x, "abc"[step % 3], y)

    def new():
        model = network()
        return gm.GradientMemory(model, loss=F.cross_entropy, memories=8, sample=3), model

    (whole, model), (first, begun), (second, ended) = new(), new(), new()
    loop(whole, model, range(12))
    loop(first, begun, range(7))
    first.save(tmp_path / "memory", model=begun)
    second.load(tmp_path / "memory", model=ended)
    loop(second, ended, range(7, 12))
    assert torch.equal(weights(model), weights(ended))


@pytest.mark.parametrize("gradients", ["auto", "batched", "loop", "func"])
def test_a_task_of_which_nothing_is_kept_is_no_constraint(gradients):
    class NotOfB(First):
        name = "not of b"

        def places(self, row, n, generator):
            return iter(()) if "b" in row.tasks else super().places(row, n, generator)

    options = {"lr": LR, "keep": NotOfB(), "memories": 8, "gradients": gradients}
    found = [observed(gm.GEM(network(), **options, sample=n)) for n in (None, 8)]
    torch.testing.assert_close(*found)
    assert observed(gm.GEM(network(), **options, sample=3)).isfinite().all()


def test_fewer_memories_in_a_step_need_less():
    memory = gm.GradientMemory(network(), memories=64, gradients="loop")
    some = gm.GradientMemory(network(), memories=64, gradients="loop", sample=4)
    for one in (memory, some):
        one.add(*batch(0, 64)[:1], "a", batch(0, 64)[1])
    assert some.bytes_needed(3) < memory.bytes_needed(3)


@pytest.mark.parametrize("kind", [gm.GEM, gm.SteadyGEM])
def test_a_learner_that_draws_passes_the_checks(kind):
    check_learner(lambda network, seed: kind(network, memories=20, sample=6, seed=seed))


def test_slots_that_are_not_filled_count_nothing():
    x, y = torch.arange(12.0).view(2, 6), torch.arange(12).view(2, 6)
    stack = Stack(x, y, (6, 2), tasks=("a", "b"))
    assert stack.drawn(6) is stack
    torch.manual_seed(0)
    some = stack.drawn(4)
    assert (some.counts, some.tasks, some.room) == ((4, 2), ("a", "b"), (2, 4))
    assert torch.equal(some.x, some.y.float())
    assert len({*some.y[0].tolist()}) == 4
    assert {*some.y[1, :2].tolist()} == {6, 7}
    assert some.shares.tolist() == [[0.25] * 4, [0.5, 0.5, 0.0, 0.0]]


def test_a_sample_is_at_least_one():
    with pytest.raises(ValueError, match="sample must be at least 1, got 0"):
        gm.GEM(network(), sample=0)


def test_without_constraints_it_is_sgd():
    free, plain = (
        observed(learner)
        for learner in (gm.GEM(network(), lr=LR, constraints=0), gm.Single(network(), lr=LR))
    )
    torch.testing.assert_close(free, plain)
    learner = gm.GEM(network(), lr=LR, memories=20, constraints=0, rehearse=4)
    observed(learner, "aabb")
    assert learner.example_gradients == 6 + 10 + 6 + 10
    with pytest.raises(ValueError, match="constraints must be at least 0, got -1"):
        gm.GEM(network(), constraints=-1)
