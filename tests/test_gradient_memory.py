"""GradientMemory in a loop of one's own: what it does to `.grad`, and what it tells."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradmem as gm
from gradmem.memory.policies import Policy


def batch(n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def filled(model, tasks="ab", **settings):
    memory = gm.GradientMemory(model, F.cross_entropy, **settings)
    for seed, t in enumerate(tasks):
        x, y = batch(seed=seed)
        memory.add(x, t, y)
    return memory


def gradient(model):
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


def descend(model, seed=9, opposed=True):
    """A gradient that goes against what task "a" has learned, or along with it."""
    model.zero_grad()
    x, y = batch(seed=0 if opposed else seed)
    F.cross_entropy(model(x), (y + 1) % 3 if opposed else y).backward()


def test_the_gradient_is_projected_in_place():
    model = gm.mlp([4, 8, 3])
    memory = filled(model, margin=0.0)
    descend(model)
    objects = [w.grad for w in model.parameters()]
    g, G = gradient(model), memory.gradients()
    memory.project_("new")
    assert all(w.grad is old for w, old in zip(model.parameters(), objects, strict=True))
    torch.testing.assert_close(gradient(model), gm.project(g, G))
    assert (G @ gradient(model) > -1e-6).all()
    assert not torch.equal(gradient(model), g)


@pytest.mark.parametrize("tasks", ["", "a"])
def test_without_a_past_task_nothing_is_touched(tasks):
    model = gm.mlp([4, 8, 3])
    memory = filled(model, tasks)
    descend(model)
    before = gradient(model)
    memory.project_("a")
    assert torch.equal(before, gradient(model))
    assert memory.last is None
    assert memory.violations == 0


def test_what_was_found_can_be_logged():
    model = gm.mlp([4, 8, 3])
    memory = filled(model, "abc", margin=0.3)
    descend(model)
    g, G = gradient(model), memory.gradients()
    memory.project_("c")
    last = memory.last
    assert last.tasks == ("a", "b")
    cosines = F.cosine_similarity(g[None], G[:2]).double()
    torch.testing.assert_close(last.cosines, cosines, atol=1e-6, rtol=1e-5)
    assert "a" in last.violated
    assert memory.violations == 1
    expected = g + (last.v + 0.3).float() @ G[:2]
    torch.testing.assert_close(gradient(model), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last.v, gm.solve_dual(G[:2] @ G[:2].T, G[:2] @ g).double())


def test_a_parameter_that_the_loss_does_not_depend_on_is_projected_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.one(x["x"]) + x["both"].mean() * self.other(x["x"])

    torch.manual_seed(0)
    model = Two()
    memory = gm.GradientMemory(model, F.cross_entropy, margin=0.0)
    x, y = batch()
    memory.add({"x": x, "both": torch.ones(8)}, "a", y)
    F.cross_entropy(model.one(x), (y + 1) % 3).backward()
    assert model.other.weight.grad is None
    memory.project_("b")
    assert model.other.weight.grad is not None
    (row,) = memory.gradients()
    assert row @ gradient(model) > -1e-6


def test_frozen_and_tied_parameters_and_replaced_layers_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight  # tied
    model[0].bias.requires_grad_(False)
    memory = filled(model)
    assert memory.gradients().shape == (2, 16 + 4 + 15)
    model[3] = nn.Linear(4, 3, bias=False)
    assert memory.gradients().shape == (2, 16 + 4 + 12)
    model[0].bias.requires_grad_(True)
    G = memory.gradients(["b"])
    assert G.shape == (1, 16 + 4 + 4 + 12)
    x, y = batch(seed=1)
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    torch.testing.assert_close(G[0], torch.cat([g.flatten() for g in expected]))


def test_accumulated_and_clipped_gradients_are_what_is_projected():
    model = gm.mlp([4, 8, 3])
    memory = filled(model, margin=0.0)
    descend(model)
    x, y = batch(seed=5)
    (0.5 * F.cross_entropy(model(x), y)).backward()  # accumulates
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    g, G = gradient(model), memory.gradients()
    memory.project_("c")
    torch.testing.assert_close(gradient(model), gm.project(g, G))


def test_a_network_that_changes_its_input_does_not_change_the_memory():
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    model = nn.Sequential(Doubling(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for gradients in ("auto", "loop", "func"):
        memory = gm.GradientMemory(model, F.cross_entropy, gradients=gradients)
        for seed, t in enumerate("ab"):
            memory.add(*[batch(seed=seed)[0], t, batch(seed=seed)[1]])
        first = memory.gradients()
        for _ in range(3):
            torch.testing.assert_close(memory.gradients(), first)
        assert torch.equal(memory.memory["a"][0], batch(seed=0)[0])


def test_an_update_is_projected_by_step_and_not_by_project():
    model = gm.mlp([4, 8, 3])
    memory = filled(model, constrain="update")
    descend(model)
    with pytest.raises(RuntimeError, match=r"memory.step\(optimizer, t\)"):
        memory.project_("c")
    before = [w.detach().clone() for w in model.parameters()]
    G = memory.gradients()
    memory.step(torch.optim.AdamW(model.parameters(), lr=1e-2), "c")
    pairs = zip(model.parameters(), before, strict=True)
    update = torch.cat([(w.detach() - b).flatten() for w, b in pairs])
    assert (G @ update <= 1e-5 * G.norm(dim=1) * update.norm()).all()
    assert memory.violations == 1


def test_an_update_that_violates_nothing_is_left_to_the_bit():
    one, other = gm.mlp([4, 8, 3]), gm.mlp([4, 8, 3])
    memory = filled(one, "a", constrain="update")
    for model in (one, other):
        descend(model, seed=0, opposed=False)  # along with task "a"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory.step(optimizer, "b") if model is one else optimizer.step()
    assert memory.violations == 0
    for w, v in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(w, v)


def test_plain_sgd_makes_no_difference_between_gradient_and_update():
    networks = []
    for constrain in ("gradient", "update"):
        model = gm.mlp([4, 8, 3])
        memory = filled(model, margin=0.2, constrain=constrain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(10):
            descend(model, seed=step, opposed=step % 2 == 0)
            memory.step(optimizer, "c")
        networks.append(model)
    for w, v in zip(*(model.parameters() for model in networks), strict=True):
        torch.testing.assert_close(w, v, atol=1e-4, rtol=1e-3)


def test_a_state_goes_on_where_it_was():
    model = gm.mlp([4, 8, 3])
    memory = filled(model)
    descend(model)
    memory.project_("c")
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    other = gm.GradientMemory(copy.deepcopy(model), F.cross_entropy)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.violations == memory.violations == 1
    assert torch.equal(other.gradients(), memory.gradients())
    with pytest.raises(ValueError, match="memories, budget and keep must be"):
        gm.GradientMemory(model, memories=3).load_state_dict(memory.state_dict())


def test_autocast_around_the_loop_leaves_the_memorys_precision_alone():
    model = gm.mlp([4, 8, 3])
    memory = filled(model)
    expected = memory.gradients()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(memory.gradients(), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"constrain": "loss"}, "constrain must be one of gradient, update; got 'loss'"),
        ({"loss": "mse"}, "loss must be a callable"),
        ({"margin": -1}, "margin must not be negative"),
        ({"memories": 3, "budget": 9}, "cannot both be given"),
        ({"memory": 5}, "memory must be an EpisodicMemory, got 5"),
        ({"memory": gm.EpisodicMemory(5), "memories": 9}, "memory has limits of its own"),
        ({"loss": nn.MSELoss}, r"give MSELoss\(\), no class"),
        ({"keep": "best"}, "keep must be one of last, first, .*; got 'best'"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gm.GradientMemory(gm.mlp([4, 3]), **settings)


def test_what_cannot_be_used_is_refused():
    memory = filled(gm.mlp([4, 8, 3]))
    with pytest.raises(TypeError, match="t must be hashable"):
        memory.project_(["a"])
    with pytest.raises(KeyError, match="no examples of task 'z'"):
        memory.gradients(["z"])
    with pytest.raises(ValueError, match="must be like task 'a'"):
        memory.add(torch.randn(3, 5), "a", torch.zeros(3).long())
    for x, y, message in (
        (torch.full((3, 4), float("nan")), torch.zeros(3).long(), "x must be finite, got nan"),
        (torch.randn(3, 4), torch.full((3,), 8), "classes from 0 to 2, got 8"),
        (torch.randn(3, 4), torch.zeros(3), "class ids as whole numbers, got torch.float32"),
        (torch.randn(3, 7), torch.zeros(3).long(), "the network does not take x"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            memory.add(x, "new", y)
    assert list(memory.memory) == ["a", "b"]
    with pytest.raises(ValueError, match="got one without any"):
        memory.step(torch.optim.SGD(gm.mlp([4, 3]).parameters(), lr=0.1), "c")
    with pytest.raises(TypeError, match="must be a torch optimizer"):
        memory.step("adam", "c")
    memory.model[0].weight.grad = torch.full_like(memory.model[0].weight, float("nan"))
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        memory.project_("c")


@pytest.mark.parametrize("margin_rule", ["shift", "floor"])
@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_the_dual_alone_gives_the_weights_of_the_projection(margin, margin_rule):
    generator = torch.Generator().manual_seed(0)
    for k, p in ((1, 5), (4, 9), (12, 6)):  # the last ones depend on each other
        G = torch.randn(k, p, dtype=torch.float64, generator=generator)
        g = -G.sum(0) + torch.randn(p, dtype=torch.float64, generator=generator)
        v = gm.solve_dual(G @ G.T, G @ g, margin, margin_rule)
        expected = gm.project(g, G, margin, margin_rule)
        if margin_rule == "shift" or k <= p:
            torch.testing.assert_close(g + v @ G, expected, atol=1e-7, rtol=1e-6)
    assert not gm.solve_dual(torch.eye(2), torch.ones(2), margin, margin_rule).any()
    with pytest.raises(ValueError, match="must be finite"):
        gm.solve_dual(torch.eye(2), torch.tensor([1.0, float("nan")]))


def test_a_grad_scaler_goes_on_over_an_overflow():
    model = gm.mlp([4, 8, 3])
    memory = filled(model, not_finite="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(2):
        x, y = batch(seed=step)
        scaler.scale(1e3 * F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        memory.project_("c")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert memory.skipped == 2
    assert all(w.isfinite().all() for w in model.parameters())
    model[0].weight.grad = torch.full_like(model[0].weight, float("inf"))
    memory.step(optimizer, "c")  # without a scaler, the step is skipped
    assert all(w.isfinite().all() for w in model.parameters())


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_gradients_at_memories_that_are_not_finite_stop_a_step_or_skip_it(constrain):
    class Bad(nn.Module):
        bad = False

        def forward(self, x):
            return x * float("nan") if self.bad else x

    bad = Bad()
    model = nn.Sequential(nn.Linear(4, 8), bad, nn.Linear(8, 3))
    memory = filled(model, constrain=constrain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(seed=9)
    F.cross_entropy(model(x), y).backward()
    bad.bad = True
    before = [w.detach().clone() for w in model.parameters()]
    with pytest.raises(FloatingPointError, match="not finite"):
        memory.step(optimizer, "c")
    memory.not_finite = "skip"
    memory.step(optimizer, "c")
    assert memory.skipped == 1
    assert all(torch.equal(w, b) for w, b in zip(model.parameters(), before, strict=True))
    assert memory.state_dict()["progress"] == (2, 1)


def test_a_policy_of_ones_own_serves():
    class Largest(Policy):
        """Fills up, then replaces nothing: a policy is one small class."""

        name = "fill"

        def places(self, row, n, generator):
            if row.count < row.size:
                yield slice(0, min(n, row.size - row.count)), row.count

        def kept(self, row, size, generator):
            return slice(0, min(size, row.count))

    memory = gm.GradientMemory(gm.mlp([4, 3]), keep=Largest(), memories=5)
    for seed in range(3):
        memory.add(batch(seed=seed)[0], "a", batch(seed=seed)[1])
    assert torch.equal(memory.memory["a"][0], batch(seed=0)[0][:5])


def test_a_reservoir_keeps_every_example_with_the_same_probability():
    counts = torch.zeros(40)
    for seed in range(400):
        memory = gm.EpisodicMemory(5, keep="reservoir", seed=seed)
        for start in range(0, 40, 4):
            numbers = torch.arange(start, start + 4)
            memory.add(numbers[:, None].float(), "a", numbers)
        counts[memory["a"][1]] += 1
    assert counts.sum() == 2000
    assert (counts - 50).abs().max() < 30  # σ is 6.6


@pytest.mark.parametrize("way", ["loop", "batched", "gram"])
def test_examples_added_to_another_task_count_in_the_next_step(way):
    model = gm.mlp([4, 8, 3])

    def projected(memory):
        descend(model)
        memory.project_("c")
        return gradient(model)

    memory = filled(model, "ab", gradients=way, margin=0.0, memories=16)
    before = projected(memory)
    x, y = batch(seed=7)
    memory.add(x, "a", y)
    new = gm.GradientMemory(model, F.cross_entropy, gradients=way, margin=0.0, memories=16)
    new.load_state_dict(memory.state_dict())
    expected = projected(new)
    assert not torch.allclose(before, expected, atol=1e-4)
    assert torch.allclose(projected(memory), expected, atol=1e-6)


def changed_weight(loss, net):
    loss.weight = torch.tensor([0.2, 3.0, 9.0])


def changed_smoothing(loss, net):
    loss.label_smoothing = 0.4


def changed_attribute(loss, net):
    net.temperature = 4.0


def changed_tensor(loss, net):
    net.gate = torch.tensor([0.0, 1.0, 0.0])


def changed_layer(loss, net):
    getattr(net, "body", net)[1] = nn.Tanh()


def added_hook(loss, net):
    getattr(net, "body", net)[0].register_forward_hook(lambda part, x, outputs: outputs * 3)


class Gated(nn.Module):
    """Has attributes that are no parameters and no buffers."""

    def __init__(self):
        super().__init__()
        self.body, self.temperature, self.gate = gm.mlp([4, 8, 3]), 1.0, torch.ones(3)

    def forward(self, x):
        return self.body(x) * self.gate / self.temperature


@pytest.mark.parametrize("way", ["auto", "func"])
@pytest.mark.parametrize("make", [Gated, partial(gm.mlp, [4, 8, 3])], ids=["gated", "chain"])
@pytest.mark.parametrize(
    "change",
    [changed_weight, changed_smoothing, changed_attribute, changed_tensor, changed_layer,
     added_hook],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_is_changed_between_steps_is_what_is_computed(make, change, way):
    net = make()
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    memory = gm.GradientMemory(net, loss, memories=8, gradients=way)
    for seed, t in enumerate("abc"):
        x, y = batch(seed=seed)
        memory.add(x, t, y)
    memory.gradients()
    change(loss, net)
    rows = []
    for t in "abc":
        x, y = memory.memory[t]
        own = torch.autograd.grad(loss(net(x), y), [*net.parameters()])
        rows.append(torch.cat([g.flatten() for g in own]))
    assert torch.allclose(memory.gradients(), torch.stack(rows), atol=1e-6)


class Centred(nn.Module):
    """Mixes examples, in training mode alone."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


def test_a_way_that_was_chosen_in_another_mode_is_not_taken():
    net = nn.Sequential(nn.Linear(4, 8), Centred(), nn.ReLU(), nn.Linear(8, 3)).eval()
    memory = filled(net, "abc")
    memory.gradients()
    chosen = memory.engine.method
    net.train()
    loop = filled(net, "abc", gradients="loop")
    assert torch.allclose(memory.gradients(), loop.gradients(), atol=1e-6)
    net.eval()
    memory.gradients()
    assert memory.engine.method == chosen


class Focal(nn.CrossEntropyLoss):
    def forward(self, outputs, y):
        each = F.cross_entropy(outputs, y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


@pytest.mark.parametrize("way", ["auto", "chain", "batched", "func", "loop", "gram"])
def test_a_loss_that_inherits_from_torchs_is_itself(way):
    net = gm.mlp([4, 8, 3])
    memory = gm.GradientMemory(net, Focal(), gradients=way, margin=0.0)
    for seed, t in enumerate("abc"):
        x, y = batch(seed=seed)
        memory.add(x, t, y)
    x, y = memory.memory["a"]
    own = torch.autograd.grad(Focal()(net(x), y), [*net.parameters()])
    expected = torch.cat([g.flatten() for g in own])
    assert torch.allclose(memory.gradients()[0], expected, atol=1e-6)


def test_a_class_that_is_ignored_may_have_any_number():
    net, loss = gm.mlp([4, 8, 3]), nn.CrossEntropyLoss(torch.ones(3), ignore_index=255)
    memory = gm.GradientMemory(net, loss)
    for seed, t in enumerate("abc"):
        x, y = batch(seed=seed)
        if t == "c":
            y[:2] = 255
        memory.add(x, t, y)
        if t != "a":
            rows = memory.gradients()
    x, y = memory.memory["c"]
    own = torch.autograd.grad(loss(net(x), y), [*net.parameters()])
    assert torch.allclose(rows[-1], torch.cat([g.flatten() for g in own]), atol=1e-6)


def test_gradients_have_a_dtype_that_holds_those_of_all_layers():
    first, relu, last = gm.mlp([4, 8, 3])
    net = nn.Sequential(first.bfloat16(), relu, last)
    net[1].register_forward_hook(lambda part, x, outputs: outputs.float())
    net.register_forward_pre_hook(lambda part, x: (x[0].bfloat16(),))
    memory = filled(net, "ab", gradients="loop")
    assert memory.gradients().dtype == torch.float32


def test_many_gradients_in_half_precision_are_finite():
    net = nn.Linear(300, 300).half()
    memory = filled_halves(net)
    for w in net.parameters():
        w.grad = torch.ones_like(w)
    memory.project_("b")


def filled_halves(net):
    memory = gm.GradientMemory(net, F.mse_loss, margin=0.0)
    memory.add(torch.zeros(2, 300).half(), "a", torch.zeros(2, 300).half())
    return memory
