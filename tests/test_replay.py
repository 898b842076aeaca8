"""Learners that replay, each against a few lines of torch that follow its paper's equations."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import gradmem as gm
from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.learners import one_by_one
from gradmem.memory.policies import POLICIES
from gradmem.memory.policies.first import First

LR = 0.1


def network(seed=1):
    return gm.mlp([4, 8, 3], seed=seed).double()


def batch(seed, n=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def weights(model):
    return torch.cat([w.detach().flatten() for w in model.parameters()])


def descend(model, loss, lr=LR):
    grads = torch.autograd.grad(loss, [*model.parameters()])
    with torch.no_grad():
        for w, g in zip(model.parameters(), grads, strict=True):
            w -= lr * g


def samples_of(memory):
    """What the memory's samples are from now on, in their order."""
    seen, sample = [], memory.sample

    def noted(*given):
        seen.append(sample(*given))
        return seen[-1]

    memory.sample = noted
    return seen


# ER


def test_er_steps_along_the_mean_loss_of_batch_and_sample():
    learner, model = gm.ER(network(), lr=LR, memories=20, sample=4), network()
    seen = samples_of(learner.memory)
    for step, t in enumerate("aabbab"):
        x, y = batch(step)
        learner.observe(x, t, y)
        for x_m, y_m in seen.pop():
            assert len(x_m) == 4
            x, y = torch.cat([x, x_m]), torch.cat([y, y_m])
        descend(model, F.cross_entropy(model(x), y))
        torch.testing.assert_close(weights(learner.network), weights(model))


def test_one_row_of_memories_is_a_sample_of_the_whole_stream():
    learner = gm.ER(gm.mlp([4, 8, 3]), budget=30, groups=1)
    for step in range(20):
        x, y = batch(step, n=10)
        learner.observe(x.float(), step // 5, y)
    assert learner.memory.groups == [(0, 1, 2, 3)]
    assert learner.memory.count(0) == 30
    state = learner.state_dict()
    other = gm.ER(gm.mlp([4, 8, 3]), budget=30, groups=1)
    other.load_state_dict(state)
    assert torch.equal(other.memory[3][0], learner.memory[0][0])


def test_examples_of_several_kinds_are_replayed_together():
    torch.manual_seed(0)
    convolution = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    for kind in (gm.ER, gm.DERpp):
        learner = kind(convolution, memories=12, sample=8)
        for t, n in (("a", 6), ("b", 9), ("a", 6), ("c", 7)):
            learner.observe(torch.randn(12, 1, n, n), t, torch.randint(3, (12,)))
        assert len(learner.memory.kinds) == 3


# DER++


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.3, 0.0), (0.0, 1.0)])
def test_derpp_follows_equation_6(alpha, beta):
    learner = gm.DERpp(network(), lr=LR, memories=20, sample=4, alpha=alpha, beta=beta)
    model, logits = network(), {}
    seen = samples_of(learner.memory)
    for step, t in enumerate("aabbab"):
        x, y = batch(step)
        for one, z in zip(x, model(x).detach(), strict=True):
            logits[tuple(one.tolist())] = z
        learner.observe(x, t, y)
        loss = F.cross_entropy(model(x), y)
        if step:
            ((x_1, _),), ((x_2, y_2),) = seen
            stored = torch.stack([logits[tuple(one.tolist())] for one in x_1])
            loss = loss + alpha * F.mse_loss(model(x_1), stored)
            loss = loss + beta * F.cross_entropy(model(x_2), y_2["label"])
        seen.clear()
        descend(model, loss)
        torch.testing.assert_close(weights(learner.network), weights(model))


def test_derpp_has_no_answer_for_outputs_of_other_tasks():
    learner = gm.DERpp(network(), memories=20)
    learner.outputs = {"a": (0, 2), "b": (1,)}
    x, y = batch(0, n=12)
    learner.observe(x[y != 1], "a", y[y != 1])
    learner.observe(x[y == 1], "b", y[y == 1])
    learner.observe(x[y != 1], "a", y[y != 1])
    kept = learner.memory["a"][1]["logits"]
    assert kept[:, [0, 2]].isfinite().all()
    assert (kept[:, 1] == -torch.inf).all()
    assert weights(learner.network).isfinite().all()


# SoftGEM


def mixed(logits, y, soft, temperature):
    return (1 - soft) * F.one_hot(y, 3) + soft * (logits / temperature).softmax(1)


@pytest.mark.parametrize(
    ("soft", "temperature", "match", "rehearse"),
    [(0.7, 1.0, 0.0, 0), (1.0, 2.0, 0.0, 0), (0.0, 1.0, 0.5, 0), (0.4, 1.0, 2.0, 100)],
)
def test_softgem_is_held_by_the_gradients_at_soft_targets(soft, temperature, match, rehearse):
    learner = gm.SoftGEM(
        network(),
        lr=LR,
        memories=12,
        soft=soft,
        temperature=temperature,
        match=match,
        rehearse=rehearse,
        margin=0.5,
    )
    model, memory = network(), {}

    def gradient(past, q, z):
        loss = F.cross_entropy(model(past), q) + match * F.mse_loss(model(past), z)
        return loss_gradient(loss, parameters(model))

    for step, t in enumerate("aabbccab"):
        x, y = batch(step)
        learner.observe(x, t, y)
        own = parameters(model)
        g = loss_gradient(F.cross_entropy(model(x), y), own)
        if rehearse and t in memory:  # all memories, together as much as the batch
            parts = [(len(m[0]), gradient(*m)) for m in memory.values()]
            g = (g + sum(n * part for n, part in parts) / sum(n for n, _ in parts)) / 2
        G = [gradient(*parts) for k, parts in memory.items() if k != t]
        g = gm.project(g, torch.stack(G), margin=0.5) if G else g
        with torch.no_grad():
            for w, part in zip(own, g.split([w.numel() for w in own]), strict=True):
                w -= LR * part.view_as(w)
        answers = model(x).detach()
        new = (x, mixed(answers, y, soft, temperature), answers)
        before = memory.get(t, [part[:0] for part in new])
        memory[t] = [torch.cat(pair)[-12:] for pair in zip(before, new, strict=True)]
        torch.testing.assert_close(weights(learner.network), weights(model))
    assert learner.gradients == "chain"


@pytest.mark.parametrize("gradients", ["auto", "loop", "gram"])
@pytest.mark.parametrize("constraints", [None, 2])
def test_rehearsing_is_the_same_by_every_way(gradients, constraints):
    """Also where G is not stored, or only some of its rows are computed."""
    found = []
    for way in ("loop", gradients):
        options = {"constraints": constraints, "gradients": way}
        learner = gm.GEM(network(), lr=LR, memories=8, rehearse=5, margin=0.0, **options)
        for step, t in enumerate("aabbccddab"):
            x, y = batch(step)
            learner.observe(x, t, y)
        found.append(weights(learner.network))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    plain = gm.GEM(network(), lr=LR, memories=8, margin=0.0)
    for step, t in enumerate("aabbccddab"):
        x, y = batch(step)
        plain.observe(x, t, y)
    assert not torch.allclose(found[0], weights(plain.network), rtol=1e-3)


def summed(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none") + outputs.square().sum(1)


def turned(x):
    return 2 * x.flip(-1) + 1


@pytest.mark.parametrize("gradients", ["auto", "batched", "loop"])
@pytest.mark.parametrize(
    ("batches", "memories", "augment"),
    [(None, None, {}), (turned, turned, {"augment": turned}),
     (None, turned, {"augment": turned, "augmented": "memories"})],
    ids=["none", "all", "memories"],
)  # fmt: skip
@pytest.mark.parametrize(
    "loss", [None, nn.CrossEntropyLoss(label_smoothing=0.2), summed], ids=["plain", "smooth", "own"]
)
def test_rehearsing_is_as_written_with_any_loss_and_any_change_of_inputs(
    loss, batches, memories, augment, gradients
):
    """What joins a mini-batch counts as much as the mini-batch, however many there are."""
    options = {"memories": 8, "rehearse": 100, "margin": 0.0, "gradients": gradients, **augment}
    learner = gm.GEM(network(), lr=LR, loss=loss, **options)
    model, memory, loss = network(), {}, loss or F.cross_entropy

    def gradient(x, y, change):
        outputs = model(x if change is None else change(x))
        return loss_gradient(loss(outputs, y).mean(), parameters(model))

    for step, t in enumerate("aabbaccb"):
        x, y = batch(step)
        found = learner.observe(x, t, y)
        own = model(x if batches is None else batches(x))
        torch.testing.assert_close(found, loss(own, y).mean().detach())
        g = gradient(x, y, batches)
        if t in memory:
            everything = [torch.cat(parts) for parts in zip(*memory.values(), strict=True)]
            g = (g + gradient(*everything, memories)) / 2
        G = [gradient(*own, memories) for k, own in memory.items() if k != t]
        g = gm.project(g, torch.stack(G)) if G else g
        with torch.no_grad():
            parts = g.split([w.numel() for w in model.parameters()])
            for w, part in zip(model.parameters(), parts, strict=True):
                w -= LR * part.view_as(w)
        before = memory.get(t, (x[:0], y[:0]))
        memory[t] = [torch.cat(pair)[-8:] for pair in zip(before, (x, y), strict=True)]
        torch.testing.assert_close(weights(learner.network), weights(model))


def test_a_loss_of_ones_own_is_given_one_task_and_refuses_to_rehearse():
    class Doubled(gm.GEM):
        def loss(self, x, t, y, mask=None):
            return 2 * super().loss(x, t, y, mask)

    with pytest.raises(ValueError, match="rehearse must be 0 with a loss of one's own, got 5"):
        Doubled(network(), rehearse=5)
    with pytest.raises(ValueError, match='augmented must be "all" with a loss of one\'s own'):
        Doubled(network(), augmented="memories")
    Doubled(network())


def test_nothing_is_rehearsed_where_nothing_is_kept():
    class Nothing(First):
        name = "nothing"

        def places(self, row, n, generator):
            return iter(())

    both = [gm.GEM(network(), lr=LR, keep=Nothing(), rehearse=n) for n in (0, 5)]
    for learner in both:
        for step in range(3):
            x, y = batch(step)
            learner.observe(x, "a", y)
    assert torch.equal(*(weights(learner.network) for learner in both))


def test_a_state_without_logits_is_none_of_a_learner_that_matches_them():
    old, new = gm.SoftGEM(network(), match=0.0), gm.SoftGEM(network(), match=0.5)
    x, y = batch(0)
    old.observe(x, "a", y)
    state = old.state_dict()
    state["settings"].pop("match", None)  # of before there was such a setting
    with pytest.raises(ValueError, match="match must be 0, for the memory has no logits"):
        new.load_state_dict(state)
    new.observe(x, "a", y)


@pytest.mark.parametrize("sample", [None, 3])
@pytest.mark.parametrize("gradients", ["auto", "batched", "loop", "gram"])
def test_where_memories_are_rehearsed_constraints_leave_running_statistics_alone(gradients, sample):
    """Predictions use those of mini-batch and rehearsed examples together."""

    def normed():
        torch.manual_seed(1)
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    options = {"memories": 8, "rehearse": 5, "margin": 0.0, "gradients": gradients}
    learner, model = gm.GEM(normed(), lr=LR, sample=sample, **options), normed()
    seen, norm = samples_of(learner.memory), learner.network[1]
    for step, t in enumerate("aabbccddab"):
        x, y = batch(step)
        model.load_state_dict(learner.network.state_dict())
        seen.clear()
        learner.observe(x, t, y)
        model(torch.cat([x, *(found for ((found, _),) in seen)]))
        torch.testing.assert_close(norm.running_mean, model[1].running_mean)
        torch.testing.assert_close(norm.running_var, model[1].running_var)
        assert norm.num_batches_tracked == model[1].num_batches_tracked == step + 1


def test_what_is_rehearsed_is_drawn_from_all_tasks_and_counted():
    learner = gm.GEM(network(), lr=LR, memories=10, rehearse=4, glances=2)
    seen = samples_of(learner.memory)
    for step, t in enumerate("aabb"):
        x, y = batch(step)
        learner.observe(x, t, y)
    assert [len(y) for ((_, y),) in seen] == [4] * 4  # a task's first batch is as it comes
    drawn = {tuple(x) for ((found, _),) in seen[2:] for x in found.tolist()}
    assert all(drawn & {*map(tuple, batch(step)[0].tolist())} for step in (1, 2))
    past = (0, 0, 10, 10)
    assert learner.example_gradients == 2 * sum(6 + n + 4 * (i % 2) for i, n in enumerate(past))


@pytest.mark.parametrize("gradients", ["auto", "batched", "loop", "gram"])
def test_rehearsing_keeps_to_each_tasks_outputs(gradients):
    """Examples of several tasks in a batch are masked each by its own task's outputs."""
    outputs = {"a": (0, 2), "b": (1, 2)}
    learner = gm.GEM(network(), lr=LR, memories=6, rehearse=100, margin=0.0, gradients=gradients)
    learner.outputs = outputs
    model, memory = network(), {}

    def loss(x, t, y):
        left_out = [i for i in range(3) if i not in outputs[t]]
        return F.cross_entropy(model(x).index_fill(1, torch.tensor(left_out), -torch.inf), y)

    for step, t in enumerate("aabba"):
        x, y = batch(step)
        y = torch.tensor(outputs[t])[y % 2]
        learner.observe(x, t, y)
        total = loss(x, t, y)
        if t in memory:
            n = sum(len(y_k) for _, y_k in memory.values())
            past = [len(y_k) / n * loss(x_k, k, y_k) for k, (x_k, y_k) in memory.items()]
            total = (total + sum(past)) / 2
        g = loss_gradient(total, parameters(model))
        G = [
            loss_gradient(loss(x_k, k, y_k), parameters(model))
            for k, (x_k, y_k) in memory.items()
            if k != t
        ]
        g = gm.project(g, torch.stack(G)) if G else g
        with torch.no_grad():
            for w, part in zip(
                model.parameters(), g.split([w.numel() for w in model.parameters()]), strict=True
            ):
                w -= LR * part.view_as(w)
        before = memory.get(t, (x[:0], y[:0]))
        pairs = zip(before, (x, y), strict=True)
        memory[t] = tuple(torch.cat(pair)[-6:] for pair in pairs)
        torch.testing.assert_close(weights(learner.network), weights(model))


def test_softgem_without_soft_targets_is_gem():
    soft, gem = gm.SoftGEM(network(), soft=0.0, memories=10), gm.GEM(network(), memories=10)
    for step, t in enumerate("aabbccab"):
        x, y = batch(step)
        loss = soft.observe(x, t, y)
        torch.testing.assert_close(loss, gem.observe(x, t, y))
    torch.testing.assert_close(weights(soft.network), weights(gem.network))


def test_steadygem_without_its_parts_is_softgem():
    plain = {"glances": 1, "input_dropout": 0.0, "average": None, "keep": "last"}
    plain |= {"match": 0.0, "rehearse": 0, "margin": 0.5}
    steady = gm.SteadyGEM(network(), memories=10, soft=0.4, **plain)
    soft = gm.SoftGEM(network(), memories=10, soft=0.4)
    for step, t in enumerate("aabbccab"):
        x, y = batch(step)
        assert torch.equal(steady.observe(x, t, y), soft.observe(x, t, y))
    assert torch.equal(weights(steady.network), weights(soft.network))


def test_softgem_stores_the_answers_of_the_average():
    learner = gm.SoftGEM(network(), average=0.9, teacher="average", soft=1.0, memories=6)
    for step in range(4):
        x, y = batch(step)
        learner.observe(x, "a", y)
    answers = learner.forward(x, "a").softmax(1)
    torch.testing.assert_close(learner.memory["a"][1]["target"], answers)


@pytest.mark.parametrize("gradients", ["chain", "batched", "func", "loop", "gram"])
def test_soft_targets_are_the_same_by_every_way_with_outputs_of_their_own(gradients):
    found = []
    for way in ("loop", gradients):
        learner = gm.SoftGEM(network(), lr=LR, memories=5, soft=0.7, match=0.4, gradients=way)
        learner.outputs = {"a": (0, 2), "b": (1, 2), "c": (0, 1)}
        for step, t in enumerate("aabbccab"):
            x, y = batch(step)
            own = torch.tensor(learner.outputs[t])
            learner.observe(x, t, own[y % 2])
        found.append(weights(learner.network))
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("keep", sorted(POLICIES))
@pytest.mark.parametrize("kind", [gm.SoftGEM, gm.DERpp, gm.ER])
def test_every_policy_keeps_examples_with_answers(kind, keep):
    learner = kind(gm.mlp([4, 8, 3]), budget=12, keep=keep)
    for step, t in enumerate("aabbcc"):
        x, y = batch(step)
        learner.observe(x.float(), t, y)
    assert [learner.memory.count(t) for t in "abc"] == [4, 4, 4]
    if keep == "balanced" and kind is gm.SoftGEM:
        labels = learner.memory["a"][1]["label"]
        assert labels.bincount(minlength=3).max() <= 2


# MEGA


@pytest.mark.parametrize("rule", ["I", "II"])
def test_mega_mixes_gradients_by_their_losses(rule):
    learner, model = gm.MEGA(network(), lr=LR, memories=20, sample=4, rule=rule), network()
    seen = samples_of(learner.memory)
    for step, t in enumerate("aabbab"):
        x, y = batch(step)
        learner.observe(x, t, y)
        own = parameters(model)
        loss = F.cross_entropy(model(x), y)
        g = loss_gradient(loss, own)
        for x_m, y_m in seen.pop():
            loss_ref = F.cross_entropy(model(x_m), y_m)
            g_ref = loss_gradient(loss_ref, own)
            if rule == "I":
                g = g + (loss_ref / loss).item() * g_ref
                continue
            theta = F.cosine_similarity(g, g_ref, dim=0).acos()
            betas = torch.linspace(0, float(theta), 200_001, dtype=torch.float64)
            beta = betas[(loss * betas.cos() + loss_ref * (theta - betas).cos()).argmax()]
            # the unit vector at the angle β from g and θ − β from g_ref
            mix = (theta - beta).sin() * g / g.norm() + beta.sin() * g_ref / g_ref.norm()
            g = g.norm() * mix / mix.norm()
        with torch.no_grad():
            for w, part in zip(own, g.split([w.numel() for w in own]), strict=True):
                w -= LR * part.view_as(w)
        torch.testing.assert_close(weights(learner.network), weights(model), rtol=1e-4, atol=1e-5)


def test_mega_with_a_loss_of_zero_steps_for_what_is_remembered():
    learner = gm.MEGA(network(), rule="I", epsilon=0.5)
    g, g_ref = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 4.0])
    found = learner.combined(g, torch.tensor(0.1), g_ref, torch.tensor(2.0))
    assert torch.equal(found, g_ref)


# MER


def examples_in(found):
    return [] if not found else list(zip(*found[0], strict=True))


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("own_outputs", [False, True])
def test_mer_is_algorithm_1(written_out, own_outputs):
    """Of the paper: s batches, k steps in each, the within-batch and the across-batch update."""
    lr, beta, gamma, s, k = 0.1, 0.3, 0.6, 3, 4
    model = network()
    learner = gm.MER(
        network() if written_out else nn.Sequential(network(), nn.Identity()),
        lr=lr, beta=beta, gamma=gamma, batches=s, sample=k - 1, budget=7, groups=1,
    )  # fmt: skip
    learner.outputs = dict.fromkeys("ab", (0, 1)) if own_outputs else {}
    seen, sample = [], learner.memory.sample
    learner.memory.sample = lambda *a, **b: [seen.append(found := sample(*a, **b)), found][1]

    def loss(x, y):
        logits = model(x[None])
        return F.cross_entropy(logits[:, :2] if own_outputs else logits, y[None])

    for step, t in enumerate("aaaaabbbbbab"):
        x, y = batch(step, n=1)
        y = y % 2 if own_outputs else y
        learner.observe(x, t, y)
        (found,) = seen
        seen.clear()
        drawn = [part[:2] for part in examples_in(found)]
        assert len(drawn) == s * min(k - 1, step, 7)
        each = len(drawn) // s
        theta_0 = [w.detach().clone() for w in model.parameters()]
        for i in range(s):
            theta_i = [w.detach().clone() for w in model.parameters()]
            for x_c, y_c in [(x[0], y[0]), *drawn[i * each : (i + 1) * each]]:
                descend(model, loss(x_c, y_c), lr)
            with torch.no_grad():
                for w, w_0 in zip(model.parameters(), theta_i, strict=True):
                    w.copy_(w_0 + beta * (w - w_0))
        with torch.no_grad():
            for w, w_0 in zip(model.parameters(), theta_0, strict=True):
                w.copy_(w_0 + gamma * (w - w_0))
        torch.testing.assert_close(weights(learner.network), weights(model))
    assert learner.memory.count("a") == 7


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [[4, 3], [4, 6, 3], [4, 6, 5, 3]])
@pytest.mark.parametrize("how", ["compiled", "numpy", "torch"])
def test_steps_on_an_mlp_are_those_of_autograd(sizes, bias, masked, how, monkeypatch):
    def made():
        torch.manual_seed(0)
        layers = [nn.Linear(a, b, bias) for a, b in pairwise(sizes)]
        parts = [part for layer in layers for part in (layer, nn.ReLU())]
        return nn.Sequential(*parts[:-1]).double()

    if how == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(one_by_one, "_is_compiled", lambda upper: False)
    if how == "torch":  # the steps that are recorded on a GPU
        monkeypatch.setattr(one_by_one, "_changes_on_a_cpu", one_by_one._changes)
    found, expected = made(), made()
    x, y = batch(0, n=9)
    masks = F.one_hot(y, 3).bool() | (torch.arange(27).view(9, 3) % 2 == 0) if masked else None
    one_by_one.chain_steps(found, x, y, masks, 0.2)
    for j in range(len(x)):
        logits = expected(x[j : j + 1])
        if masks is not None:
            logits = logits.masked_fill(~masks[j], -torch.inf)
        descend(expected, F.cross_entropy(logits, y[j : j + 1]), 0.2)
    torch.testing.assert_close(weights(found), weights(expected))


def steps_compiled_and_not(monkeypatch, sizes, x, y, masks=None):
    """The weights after the same steps, compiled and by NumPy, and how often NumPy was asked."""
    pytest.importorskip("numba")
    found, asked, by_numpy = [], [], one_by_one._changes_on_a_cpu
    monkeypatch.setattr(
        one_by_one, "_changes_on_a_cpu", lambda *a: [asked.append(a), by_numpy(*a)][1]
    )
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(one_by_one, "_is_compiled", lambda upper: False)
        model = gm.mlp(sizes, seed=0).to(x.dtype)
        one_by_one.chain_steps(model, x, y, masks, 0.05)
        found.append(weights(model))
        assert len(asked) == (not compiled)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [0, 1, 60])
@pytest.mark.parametrize(
    "sizes", [(784, 100, 100, 10), (20, 7, 33, 5), (20, 8, 5), (6, 9, 8, 7, 6)]
)
def test_compiled_steps_are_those_of_numpy(sizes, n, masked, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, sizes[0], generator=generator, dtype=dtype) / sizes[0] ** 0.5
    y = torch.randint(sizes[-1], (n,), generator=generator)
    masks = None
    if masked:
        masks = torch.rand(n, sizes[-1], generator=generator) > 0.4
        masks[torch.arange(n), y] = True
    found, expected = steps_compiled_and_not(monkeypatch, sizes, x, y, masks)
    moved = (expected - weights(gm.mlp(sizes, seed=0)).to(dtype)).norm()
    assert (moved > 0) == (n > 0)
    close = 1e-10 if dtype == torch.float64 else 1e-4
    assert (found - expected).norm() <= close * moved


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_compiled_steps_keep_what_is_not_a_number(bad, monkeypatch):
    """Where it is not finite by NumPy, and nowhere else."""
    x, y = batch(0)
    x[3, 1] = bad
    found, expected = steps_compiled_and_not(monkeypatch, [4, 8, 6, 3], x, y)
    assert expected.isnan().any()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_mer_goes_through_every_example_of_a_batch():
    learner = gm.MER(gm.mlp([4, 8, 3]), budget=100, groups=1)
    for step in range(3):
        x, y = batch(step)
        learner.observe(x.float(), "a", y)
    assert (learner.steps, learner.examples, learner.memory.count("a")) == (3, 18, 18)


def test_mer_takes_inputs_of_one_shape():
    learner = gm.MER(nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4, 3)))
    learner.observe(torch.randn(5, 1, 6), "a", torch.arange(5) % 3)
    with pytest.raises(ValueError, match="x must be like what was observed before"):
        learner.observe(torch.randn(5, 1, 7), "b", torch.arange(5) % 3)


# La-MAML


def no_longer(parts, clip):
    """Gradients, shorter if they are longer together than `clip`."""
    length = torch.cat([part.flatten() for part in parts]).norm()
    scale = 1.0 if clip is None else min(1.0, float(clip / (length + 1e-6)))
    return [part * scale for part in parts]


@pytest.mark.parametrize(("inner", "clamp"), [(1, None), (4, None), (4, 0.02)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("meta", ["last", "every"])
@pytest.mark.parametrize(
    "settings",
    [{"rate_lr": 0.4}, {"rate_lr": 0.4, "update": "sync", "alpha": 0.05}, {"rate_lr": None}],
    ids=["async", "sync", "C-MAML"],
)
def test_lamaml_is_algorithm_2(settings, meta, clip, inner, clamp):
    """With its gradients by torch, through steps whose own gradients are constants.

    What is clipped is the step from the start and the gradient by the rates; `clamp` bounds each
    entry of the steps inside. Mini-batches of 6 have a last such step with fewer examples.
    """
    common = {"lr": LR, "sample": 4, "memories": 20, "glances": 2, "meta": meta, "clip": clip}
    learner = gm.LaMAML(network(), **common, **settings, inner=inner, clamp=clamp)
    theta = [w.detach().clone() for w in network().parameters()]
    names = [name for name, _ in network().named_parameters()]
    alpha = [torch.full_like(w, settings.get("alpha", LR)) for w in theta]
    inputs, take = [], learner.take_once
    learner.take_once = lambda *given: [inputs.append(given[3:]), take(*given)][1]

    def loss(values, x, y):
        outputs = functional_call(network(), dict(zip(names, values, strict=True)), (x,))
        return F.cross_entropy(outputs, y)

    for step, t in enumerate("aabbab"):
        learner.observe(*batch(step)[:1], t, batch(step)[1])
        for x, y, _, inner_x, inner_y, *past in inputs:
            assert sorted(inner_x.tolist()) == sorted(x.tolist())
            joined = (torch.cat([x, *past[:1]]), torch.cat([y, *past[1:2]]))
            start = [w.clone().requires_grad_() for w in theta]
            rates = [a.clone().requires_grad_() for a in alpha]
            fast, metas = start, []
            for i in range(0, len(inner_x), inner):
                ahead = loss(fast, inner_x[i : i + inner], inner_y[i : i + inner])
                grads = torch.autograd.grad(ahead, fast)
                if clamp is not None:
                    assert any((g.abs() > clamp).any() for g in grads)
                    grads = [g.clamp(-clamp, clamp) for g in grads]
                fast = [w - a.relu() * g for w, a, g in zip(fast, rates, grads, strict=True)]
                metas.append(loss(fast, *joined))
            total = metas[-1] if meta == "last" else sum(metas) / len(metas)
            found = torch.autograd.grad(total, [*start, *rates])
            by_theta, by_alpha = found[: len(start)], found[len(start) :]
            if settings["rate_lr"] is not None:
                alpha = [a - 0.4 * g for a, g in zip(alpha, no_longer(by_alpha, clip), strict=True)]
                if "update" not in settings:
                    by_theta = [a.relu() / LR * g for a, g in zip(alpha, by_theta, strict=True)]
            pairs = zip(theta, no_longer(by_theta, clip), strict=True)
            theta = [w - LR * g for w, g in pairs]
        inputs.clear()
        expected = torch.cat([w.flatten() for w in theta])
        torch.testing.assert_close(weights(learner.network), expected)
        for mine, rate in zip(learner.rates, alpha, strict=True):
            torch.testing.assert_close(mine, rate)


def test_lamaml_bounds_gradients_that_share_their_memory():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.zeros(3)), nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x) + self.shift.sum()

    learner = gm.LaMAML(Shifted(), lr=LR, inner=2, clamp=1.0)
    x, y = batch(0)
    assert learner.observe(x.float(), "a", y) is not None


def test_rates_that_were_learned_stay_where_a_layer_gets_wider():
    learner = gm.LaMAML(gm.mlp([4, 8, 2]), grow=True, lr=0.05)
    x, y = batch(0)
    learner.observe(x.float(), "a", y % 2)
    before = learner.rates[-1].clone()
    learner.check(x.float(), "a", y % 2)
    gm.networks.widen(learner.network, 5)
    learner.check(x.float(), "a", y + 2)
    torch.testing.assert_close(learner.rates[-1][:2], before)
    assert (learner.rates[-1][2:] == learner.alpha).all()


# Settings


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (gm.ER, {"sample": 0}, "sample must be at least 1, got 0"),
        (gm.ER, {"groups": 0}, "groups must be at least 1, got 0"),
        (gm.ER, {"memory": gm.EpisodicMemory(5), "groups": 1}, "memory has limits of its own"),
        (gm.DERpp, {"alpha": -1}, "alpha must not be negative, got -1"),
        (gm.DERpp, {"beta": "much"}, "beta must be a number, got 'much'"),
        (gm.MEGA, {"rule": "III"}, "rule must be one of II, I; got 'III'"),
        (gm.MEGA, {"epsilon": -1}, "epsilon must not be negative, got -1"),
        (gm.LaMAML, {"rate_lr": 0}, "rate_lr must be above 0, got 0"),
        (gm.LaMAML, {"alpha": -1.0}, "alpha must be above 0, got -1.0"),
        (gm.LaMAML, {"inner": 0}, "inner must be at least 1, got 0"),
        (gm.LaMAML, {"clamp": 0.0}, "clamp must be above 0, got 0.0"),
        (gm.LaMAML, {"update": "now"}, "update must be one of async, sync; got 'now'"),
        (gm.LaMAML, {"meta": "first"}, "meta must be one of every, last; got 'first'"),
        (gm.MER, {"batches": 0}, "batches must be at least 1, got 0"),
        (gm.MER, {"beta": 0}, "beta must be above 0, got 0"),
        (gm.MER, {"gamma": -1}, "gamma must be above 0, got -1"),
        (gm.SoftGEM, {"soft": 1.5}, "soft must be at most 1, got 1.5"),
        (gm.SoftGEM, {"soft": -0.1}, "soft must not be negative, got -0.1"),
        (gm.SoftGEM, {"match": -1.0}, "match must not be negative, got -1.0"),
        (gm.GEM, {"rehearse": -1}, "rehearse must be at least 0, got -1"),
        (gm.GEM, {"augmented": "new"}, "augmented must be one of all, memories; got 'new'"),
        (gm.SoftGEM, {"temperature": 0}, "temperature must be above 0, got 0"),
        (gm.SoftGEM, {"teacher": "me"}, "teacher must be one of network, average; got 'me'"),
        (gm.SoftGEM, {"teacher": "average"}, "needs an average"),
        (gm.SoftGEM, {"loss": F.mse_loss}, "^SoftGEM is for .* without options; got mse_loss$"),
        (gm.SteadyGEM, {"loss": torch.nn.MSELoss()}, r"^SteadyGEM is for .*; got MSELoss\(\)$"),
        (gm.SoftGEM, {"loss": partial(F.cross_entropy, label_smoothing=0.1)}, "without options"),
    ],
)
def test_a_wrong_setting_is_named(kind, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kind(gm.mlp([4, 3]), **settings)


def test_la_mamls_rates_are_in_units_of_the_optimizers_rate():
    """Whoever gives it, and also after a state of another rate was loaded."""
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    by_rate = gm.LaMAML(gm.mlp([4, 8, 3]), lr=0.5)
    given = partial(torch.optim.SGD, lr=0.5)
    by_optimizer = gm.LaMAML(gm.mlp([4, 8, 3]), optimizer=given)
    other = gm.LaMAML(gm.mlp([4, 8, 3], seed=1), lr=0.1)
    other.load_state_dict(by_rate.state_dict())
    assert by_optimizer.alpha == 0.5
    for learner in (by_rate, by_optimizer, other):
        learner.observe(x, "a", y)
    for learner in (by_optimizer, other):
        for one, same in zip(
            learner.network.parameters(), by_rate.network.parameters(), strict=True
        ):
            assert torch.equal(one, same)


def test_a_rate_that_is_changed_by_hand_changes_la_mamls_steps():
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    learner = gm.LaMAML(gm.mlp([4, 8, 3]), lr=0.5)
    learner.observe(x, "a", y)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    before = [w.detach().clone() for w in learner.network.parameters()]
    learner.observe(x, "a", y)
    for one, same in zip(before, learner.network.parameters(), strict=True):
        assert torch.equal(one, same)
