"""Exact GEM of few tasks without G: a few rows at a time, one task's pass after another."""

import copy

import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.gradients import Criterion, Objective, choice, parameters
from gradmem.gradients.by_task import ROOM, TaskByTask, once_through, passes, schedule
from gradmem.gradients.loop import loop_gradients, pass_of
from gradmem.projection import Projection
from tests.networks import NETWORKS, build, memories

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")

#: Running statistics move with each pass, and are met by `GramGradients`.
STILL = [name for name in NETWORKS if name not in ("resnet", "no rule and batch norm")]


@pytest.mark.parametrize("room", [2, 3, 5, 8])
@pytest.mark.parametrize("k", range(1, 14))
def test_all_pairs_of_tasks_meet(k, room):
    plan = schedule(k, room)
    held, met = {}, set()
    for i, place in (*once_through(k, room), *plan.rest):
        assert place < room
        held[place] = i
        met |= {frozenset((i, j)) for j in held.values()}
    assert len(met) == k * (k + 1) // 2
    assert {*plan.gone} == {*range(k)} - {*held.values()}
    if k <= room:
        assert not plan.rest
        assert not plan.gone


def test_what_a_violation_costs_is_two_passes_for_each_of_nine_tasks_at_most():
    assert [passes(k) for k in (1, 5, 6, 7, 8, 9)] == [1, 5, 8, 11, 14, 17]
    assert passes(10) > 20


@pytest.mark.parametrize("room", [2, 3, 5])
@pytest.mark.parametrize("name", STILL)
def test_inner_products_are_those_of_the_loop(name, room):
    network, stack = build(name), memories(name, (7, 3, 7, 5))
    objective = Objective(network, Criterion(None))
    rows = torch.empty(4, sum(w.numel() for w in parameters(network)))
    loop_gradients(objective, stack, rows)
    z = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(4))
    v = torch.rand(4, generator=torch.Generator().manual_seed(5)).double()

    found = TaskByTask(objective, [stack], room=room)
    Gz, squares = (part.clone() for part in found.look(z))
    GGt, again = found.products(z)
    combined = found.combine(v)

    exact = rows.double()
    assert torch.equal(Gz, again)
    for one, other in (
        (GGt, exact @ exact.T),
        (squares, exact.square().sum(1)),
        (Gz, exact @ z.double()),
        (combined.double(), z.double() + exact.T @ v),
        (found.products(combined)[1], exact @ combined.double()),
    ):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_passes_that_are_made_again_drop_the_same():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 5))
    stack = memories(next(name for name in STILL if build(name)[0].in_features == 6), (4,) * 4)
    objective = Objective(network, Criterion(None))
    seen = {}

    def noted(objective, batch, out):
        loss = pass_of(objective, batch, out)
        seen.setdefault(float(loss.detach()), []).append(out.clone())
        return loss

    found = TaskByTask(objective, [stack], one_pass=noted, room=2)
    z = torch.randn(sum(w.numel() for w in network.parameters()))
    before = torch.get_rng_state()
    found.products(z)
    found.combine(torch.ones(4))
    assert len(seen) == 4  # losses, which differ by what is dropped
    assert sum(map(len, seen.values())) == 4 + sum(map(len, schedule(4, 2))) > 4
    assert all(torch.equal(row, rows[0]) for rows in seen.values() for row in rows)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("tasks", [3, 7])
def test_a_step_that_violates_nothing_takes_one_pass_for_each_task(tasks, monkeypatch):
    torch.manual_seed(0)
    network = gm.mlp([6, 9, 5], seed=0)
    memory = gm.GradientMemory(network, memories=4, gradients="gram", margin=0.0)
    other = gm.GradientMemory(copy.deepcopy(network), memories=4, gradients="loop", margin=0.0)
    for t in range(tasks):
        x, y = torch.randn(4, 6), torch.randint(5, (4,))
        memory.add(x, t, y)
        other.add(x, t, y)
    made = []
    given = memory.engine._passes

    def counted(*args):
        made.append(args)
        return given(*args)

    monkeypatch.setattr(memory.engine, "_passes", counted)
    total = memory.gradients().sum(0)
    for turned in (False, True):
        for one in (memory, other):
            weights = list(one.model.parameters())
            parts = (-total if turned else total).split([w.numel() for w in weights])
            for w, part in zip(weights, parts, strict=True):
                w.grad = part.view_as(w).clone()
            one.project_("now")
        expected = passes(tasks) if turned else tasks
        assert len(made) == expected
        assert len(memory.last.violated) == len(other.last.violated)
        torch.testing.assert_close(memory.last.cosines, other.last.cosines)
        torch.testing.assert_close(memory.last.v, other.last.v, rtol=1e-4, atol=1e-7)
        for w, same in zip(memory.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(w.grad, same.grad, rtol=1e-4, atol=1e-6)
        made.clear()
    assert ROOM == 5


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("large", "limit", "held"), [(True, None, 12), (True, 9, 9), (False, 0, 0)]
)
def test_of_few_parameters_that_learn_all_rows_are_held(
    large, limit, held, batch_norm, monkeypatch
):
    """Of a network so large that tasks go one by one anyway, within what G may take."""
    monkeypatch.setitem(choice.ENOUGH, "cpu", (0.0 if large else 1e30, 1e10))
    norm = [nn.BatchNorm1d(40, affine=False)] if batch_norm else []
    network = nn.Sequential(nn.Linear(6, 40), *norm, nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 5))
    for part in network[:-1].parameters():
        part.requires_grad_(False)
    p = sum(w.numel() for w in network[-1].parameters())
    options = {"memory_limit": 4 * p * limit} if limit else {}
    memory = filled(network, 12, gradients="gram", **options)
    other = filled(copy.deepcopy(network), 12, gradients="loop")
    found = memory.engine.at(memory.others("now"))
    # Batch norm's statistics move with each pass, so that no task's is made again.
    assert isinstance(found, TaskByTask) == (held == 12 or (held == 9 and not batch_norm))
    if isinstance(found, TaskByTask):
        found.look(torch.zeros(p))
        assert len(found._rows) == held
    memory.project_("now")
    other.project_("now")
    assert len(memory.last.violated) > 6
    for w, same in zip(memory.model[-1].parameters(), other.model[-1].parameters(), strict=True):
        torch.testing.assert_close(w.grad, same.grad, rtol=1e-4, atol=1e-6)


class Counting(nn.Module):
    """Moves a buffer in every pass, which its outputs depend on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("passed", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.passed += 1
        return self.layer(x)


def filled(network, tasks, **options):
    """A memory of several tasks, and a gradient that violates all of them."""
    memory = gm.GradientMemory(network, memories=4, margin=0.0, **options)
    generator = torch.Generator().manual_seed(1)
    for t in range(tasks):
        x = torch.randn(4, 6, generator=generator)
        memory.add(x, t, torch.randint(5, (4,), generator=generator))
    G, weights = memory.gradients(), parameters(network)
    parts = (-G.sum(0)).split([w.numel() for w in weights])
    for w, part in zip(weights, parts, strict=True):
        w.grad = part.view_as(w).clone()
    return memory


def test_passes_that_are_made_again_leave_no_trace_in_buffers():
    network = Counting()
    memory = filled(network, 7, gradients="gram")
    before, place = float(network.passed), network.passed.data_ptr()
    memory.project_("now")
    assert float(network.passed) == before + 7
    assert network.passed.data_ptr() == place


def test_a_task_without_a_weight_is_not_gone_through_for_the_sum(monkeypatch):
    network = gm.mlp([6, 9, 5], seed=0)
    memory = filled(network, 7, gradients="gram")
    found = memory.engine.at(memory.others("now"))
    made = []
    found.one_pass = lambda *args: (made.append(args), pass_of(*args))[1]
    z = torch.randn(sum(w.numel() for w in network.parameters()))
    found.products(z)
    gone = schedule(7).gone
    made.clear()
    v = torch.ones(7)
    v[gone[0]] = 0
    found.combine(v)
    assert len(made) == len(gone) - 1


@pytest.mark.parametrize("tasks", [3, 7, 12])
def test_an_autocast_of_the_callers_does_not_touch_the_projection(tasks):
    torch.manual_seed(0)
    network = gm.mlp([6, 9, 5], seed=0)
    found = []
    for outer in (False, True):
        memory = filled(network, tasks, gradients="gram")
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            memory.project_("now")
        assert memory.last.violated
        found.append(torch.cat([w.grad.flatten() for w in network.parameters()]))
    assert torch.equal(*found)


def test_a_gradient_that_is_infinite_is_found_though_nothing_is_violated():
    project = Projection(0.0)

    class Rows:
        def look(self, z):
            return torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0])

        def square(self, z):
            return z.square().sum()

        def products(self, z):
            GGt = torch.tensor([[float("inf"), 0.0], [0.0, 1.0]], dtype=torch.float64)
            return GGt, self.look(z)[0].double()

    with pytest.raises(FloatingPointError, match="not finite"):
        project(torch.ones(3), Rows())
