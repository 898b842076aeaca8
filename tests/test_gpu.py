"""What is different on a GPU: the projection's kernel, graphs, and nothing that waits."""

import copy
import gc
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.checks import _same
from gradmem.cuda import graphs as cuda_graphs
from gradmem.cuda.copies import copy_together
from gradmem.cuda.graphs import GraphedSteps
from gradmem.gradients import Criterion, MemoryGradients, recorded
from gradmem.gradients.batch_norm import normalise_by_task
from gradmem.gradients.batched import _in_one_pass, batched_gradients
from gradmem.gradients.loop import pass_of
from gradmem.gradients.objective import Objective
from gradmem.gradients.precision import computing_in
from gradmem.gradients.recorded import RecordedPasses
from gradmem.gradients.thin import keeps_zeros
from gradmem.learners.one_by_one import chain_steps
from gradmem.learners.replay import Replay
from gradmem.memory import Stack
from gradmem.projection.blocks import products_with
from gradmem.projection.host import project_on_host
from gradmem.runs.experiment import Experiment
from gradmem.sweeps.perform import Compute

from .networks import NETWORKS, agree, build, memories

#: SteadyGEM is SoftGEM with other defaults, several noisy steps on a mini-batch among them.
LEARNERS = {name: kind for name, kind in gm.learners.LEARNERS.items() if kind is not gm.SteadyGEM}

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def problem(kind, seed):
    rng = np.random.default_rng([len(kind), seed])
    k, p = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    G, g = rng.standard_normal((k, p)), rng.standard_normal(p)
    if kind == "singular":
        G[k // 2 :] = G[: k - k // 2] * rng.choice([-2.0, 1.0, 3.0], (k - k // 2, 1))
    if kind == "zeros":
        G[::2] = 0
    if kind == "scaled":
        G *= 10.0 ** rng.integers(-9, 10, (k, 1))
    return torch.tensor(g), torch.tensor(G)


@pytest.mark.parametrize("rule", ["shift", "floor"])
@pytest.mark.parametrize("kind", ["random", "singular", "zeros", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_finds_what_the_host_finds(kind, rule, dtype):
    for seed in range(12):
        g, G = (values.to(dtype) for values in problem(kind, seed))
        margin = 0.0 if kind == "scaled" else 0.3
        expected, counts, _ = project_on_host(g.double(), G.double(), margin, rule)
        projection = gm.projection.Projection(margin, rule)
        found = projection(g.cuda(), G.cuda()).cpu().double()
        size = max(float(g.norm()), float(expected.norm()))
        assert (found - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-8) * size
        assert projection.counts()["violations"] == counts[0]
        assert projection.counts()["violated_constraints"] == counts[1]


def hard_problem(k, p=3000):
    torch.manual_seed(k)
    G = torch.randn(k, p, device="cuda") + 2 * torch.randn(p, device="cuda")
    if k > 5:
        G[1], G[2], G[3] = G[0], -G[0], 0
        G[4] *= 1e6
    return -G[: max(1, k // 3)].mean(0) + torch.randn(p, device="cuda"), G


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 19, 31, 32, 64, 100, 127, 128, 300, 1000])
def test_the_projection_is_optimal_for_any_number_of_tasks(k, dtype):
    """It lies in the cone, and g − g̃ is normal to it there."""
    g, G = (values.to(dtype) for values in hard_problem(k))
    projection = gm.projection.Projection()
    found, g, G = projection(g, G).double(), g.double(), G.double()
    lengths, size = G.norm(dim=1).clamp_min(1e-300), g.norm()
    assert projection.counts()["violations"] == 1
    assert (G @ found / lengths / size).min() >= -1e-6
    assert (found @ (found - g)).abs() <= 1e-6 * size**2
    expected, *_ = project_on_host(g.cpu(), G.cpu(), 0.0, "shift")
    assert (found.cpu() - expected).norm() <= 1e-5 * size.cpu()


@pytest.mark.parametrize("k", [5, 60, 200])
def test_any_strides_and_types_are_taken(k):
    columns = torch.randn(500, k + 1, device="cuda")
    g, G = columns[:, -1], columns[:, :-1].T
    torch.testing.assert_close(gm.project(g, G), gm.project(g.contiguous(), G.contiguous()))
    for dtype in (torch.float16, torch.bfloat16):
        found = gm.project(g.to(dtype), G.to(dtype))
        expected = gm.project(g.to(dtype).cpu(), G.to(dtype).cpu())
        assert found.dtype == dtype
        assert agree(found.cpu().float(), expected.float(), 0.02)


def test_dependent_gradients_are_projected_again_in_double_precision():
    """More tasks than dimensions: single precision cannot tell which constraints depend."""
    torch.manual_seed(0)
    G, g = torch.randn(100, 30, device="cuda"), torch.randn(30, device="cuda")
    g_tilde = gm.project(g, G).double()
    assert (G.double() @ g_tilde / G.double().norm(dim=1) / g.norm()).min() >= -1e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_agree_with_the_loop(name):
    stack = memories(name)
    on_gpu = Stack(stack.x.cuda(), stack.y.cuda(), stack.counts)
    expected = MemoryGradients(build(name).double(), "loop")(
        [Stack(stack.x.double() if stack.x.is_floating_point() else stack.x,
                            stack.y, stack.counts)]
    )  # fmt: skip
    engine = MemoryGradients(build(name).cuda())
    found = engine([on_gpu]).cpu().double()
    assert engine.method == NETWORKS[name][2]
    assert agree(found, expected, 1e-5)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 3, 20, 64, 160])
def test_statistics_per_task_are_those_of_each_task_alone(channels, dims):
    """With channels next to each other, as kernels of ours take them; forth, back, running ones."""
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    shape = (12, channels, *(3, 5, 2)[:dims])
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape, device="cuda")).movedim(1, -1).contiguous().movedim(-1, 1)
    grad = torch.randn_like(x)
    layers = [kind(channels).cuda() for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.linspace(-1, 2, channels))
    together, alone = (x.clone().requires_grad_() for _ in range(2))
    found = normalise_by_task(layers[0], together, 3)
    expected = torch.cat([layers[1](one) for one in alone.split(4)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(together.grad, alone.grad, rtol=1e-3, atol=1e-4)
    for name, buffer in layers[1].named_buffers():
        torch.testing.assert_close(layers[0].get_buffer(name), buffer, rtol=1e-4, atol=1e-5)


def test_a_residual_network_takes_one_pass_in_any_memory_format():
    stack = Stack(
        torch.rand(3, 4, 3, 32, 32, device="cuda"),
        torch.arange(12, device="cuda").view(3, 4),
        (4, 4, 4),
        torch.arange(100, device="cuda") // 4 == torch.arange(3, device="cuda")[:, None],
    )
    exact = Stack(stack.x.double(), stack.y, stack.counts, stack.masks)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        network = gm.resnet18(feature_maps=4).cuda().to(memory_format=memory_format)
        engine = MemoryGradients(network)
        engine([stack])
        assert engine.method == "batched"
        double = gm.resnet18(feature_maps=4).cuda().double().to(memory_format=memory_format)
        found = MemoryGradients(double, "batched")([exact]).clone()
        expected = MemoryGradients(double, "loop")([exact])
        assert agree(found, expected, 1e-10)


def trained(name="mlp", graphs=True, steps=6, **settings):
    network = build(name).cuda()
    learner = gm.GEM(network, lr=0.05, memories=7, graphs=graphs, **settings)
    stack = memories(name, counts=(20,) * 4)
    x, y = stack.x.cuda(), stack.y.cuda()
    for t in (0, 1, 2, 0, 3):
        for step in range(steps):
            some = slice(3 * step, 3 * step + 3)
            learner.observe(x[t, some], t, y[t, some])
    return learner


@pytest.mark.parametrize("name", ["mlp", "resnet", "group norm", "tied weights", "weight norm"])
def test_graphs_change_nothing(name):
    """Weights, running statistics and counts are those of steps that are not recorded."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with_graphs, without = trained(name), trained(name, graphs=False)
    assert with_graphs.graphed._graphs
    assert not without.graphed._graphs
    for key, value in without.network.state_dict().items():
        torch.testing.assert_close(with_graphs.network.state_dict()[key], value)
    assert with_graphs.statistics() == without.statistics()


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_graphs_change_nothing_for_any_learner(kind):
    """Tasks with outputs of their own, one that comes back, and a short last batch."""
    networks = []
    for graphs in (True, False):
        learner = kind(gm.mlp([6, 8, 8, 6]).cuda(), lr=0.05, graphs=graphs)
        learner.outputs = {0: (0, 1), 1: (2, 3), 2: (4, 5)}
        for t in (0, 1, 2, 0):
            x = torch.linspace(-1, 1, 18 * 6, device="cuda").view(18, 6) + t
            y = 2 * t + torch.arange(18, device="cuda") % 2
            for some in torch.arange(18, device="cuda").split(4):
                learner.observe(x[some], t, y[some])
        networks.append([learner.predict(x, t).tolist() for t in range(3)])
        assert bool(learner.graphed._graphs) == graphs
        networks[-1] += [w.detach().clone() for w in learner.module(0).parameters()]
    with_graphs, without = networks
    assert with_graphs[:3] == without[:3]
    for w, other in zip(with_graphs[3:], without[3:], strict=True):
        torch.testing.assert_close(w, other)


@pytest.mark.parametrize("kind", LEARNERS.values())
@pytest.mark.parametrize("average", [0.9, (0.6, 0.9)])
def test_graphs_change_nothing_for_an_average_and_glances(kind, average):
    if average != 0.9 and not (kind.one_network and kind.averages_by_task):
        pytest.skip("several averages are chosen by the task, for one network")
    outputs = []
    for graphs in (True, False):
        network = gm.mlp([6, 8, 8, 6], seed=0).cuda()
        learner = kind(network, lr=0.05, graphs=graphs, average=average, glances=2)
        for t in (0, 1, 2, 0):
            x = torch.linspace(-1, 1, 18 * 6, device="cuda").view(18, 6) + t
            for some in torch.arange(18, device="cuda").split(6):
                learner.observe(x[some], t, some % 6)
        assert bool(learner.graphed._graphs) == graphs
        outputs.append(torch.cat([learner.forward(x, t) for t in range(3)]))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("kind", [gm.GEM, gm.SoftGEM])  # a graph for each number of past tasks
def test_graphs_that_hold_much_memory_are_let_go_of_and_recorded_anew(kind, monkeypatch):
    ends = []
    for idle in (1 / 8, -1.0):  # below 0, at every recording
        monkeypatch.setattr(cuda_graphs, "IDLE", idle)
        learner = kind(gm.mlp([6, 8, 8, 6], seed=0).cuda(), lr=0.05)
        for t in (0, 1, 2, 0, 1):
            x = torch.linspace(-1, 1, 18 * 6, device="cuda").view(18, 6) + t
            for some in torch.arange(18, device="cuda").split(6):
                learner.observe(x[some], t, some % 6)
        ends.append((len(learner.graphed._graphs), learner.forward(x, 0)))
    (many, kept), (few, let_go) = ends
    assert many > few == 1
    torch.testing.assert_close(kept, let_go)


@pytest.mark.parametrize("average", [None, (0.6, 0.9)])
@pytest.mark.parametrize("kind", LEARNERS.values())
def test_batches_in_a_row_are_those_one_by_one(kind, average):
    """To the last bit: the same graphs with the same inputs, and the same memories at the end."""
    if average is not None and not (kind.one_network and kind.averages_by_task):
        pytest.skip("several averages are chosen by the task, for one network")
    learners = []
    for in_a_row in (False, True):
        learner = kind(gm.mlp([6, 8, 8, 6], seed=0).cuda(), lr=0.05, average=average)
        learner.outputs = {0: (0, 1), 1: (2, 3), 2: (4, 5)}
        for t in (0, 1, 2, 0):
            x = torch.linspace(-1, 1, 50 * 6, device="cuda").view(50, 6) + t
            y = 2 * t + torch.arange(50, device="cuda") % 2
            if in_a_row:
                learner.observe_each(x, t, y, 4, check=False)
            else:
                for some in torch.arange(50, device="cuda").split(4):
                    learner.observe(x[some], t, y[some], check=False)
        learner.settle()
        learners.append(learner)
    _same(*(learner.state_dict() for learner in learners), "in a row")
    assert learners[0].statistics() == learners[1].statistics()


@pytest.mark.parametrize(
    "make",
    [
        partial(gm.GEM, memories=20),
        partial(gm.GEM, memories=300, constrain="update", margin=0.0),
        partial(gm.Single, average=0.9),
        partial(gm.GEM, budget=30, keep="reservoir"),
        partial(gm.GEM, memories=20, rehearse=5),
        partial(gm.GEM, memories=20, sample=7),
    ],
)
def test_a_run_of_tasks_in_a_row_is_a_run_batch_by_batch(make):
    continuum = gm.mnist_rotations(4, 200, data="sample").to("cuda")
    results = []
    for watched in (False, True):
        learner = make(gm.mlp(seed=0).cuda())
        results.append(
            gm.run(learner, continuum, on_progress=(lambda _: None) if watched else None)
        )
    assert np.array_equal(results[0].R, results[1].R)
    assert results[0].statistics == results[1].statistics
    assert results[0].curve_examples == results[1].curve_examples


def test_only_what_repeats_is_taken_in_a_row():
    """GEM repeats its graph, one that remembers answers does not; a bad number is found at last."""
    x, y = torch.randn(60, 6, device="cuda"), torch.arange(60, device="cuda") % 6
    for kind, repeats in ((gm.GEM, True), (gm.Single, True), (gm.SoftGEM, False), (gm.ER, False)):
        learner = kind(gm.mlp([6, 8, 6]).cuda())
        calls = []
        learner._repeat = lambda *given, calls=calls, own=learner._repeat: calls.append(own(*given))
        learner.observe_each(x, 0, y, 10, check=False)
        assert bool(calls) == repeats
        assert (learner.steps, learner.examples, learner.updates) == (6, 60, 6)
    learner = gm.GEM(gm.mlp([6, 8, 6]).cuda())
    bad = x.clone()
    bad[45] = float("nan")
    learner.observe(x[:10], 0, y[:10])
    learner.observe_each(bad, 0, y, 10, check=False)
    with pytest.raises(FloatingPointError, match=r"after 5 steps.*task 0"):
        learner.settle()


class Scaled(gm.Single):
    def learn(self, x, t, y):
        return super().learn(2 * x, t, y)


def test_a_learner_that_does_more_than_its_base_is_not_taken_in_a_row():
    x, y = torch.randn(60, 6, device="cuda"), torch.arange(60, device="cuda") % 6
    ends = []
    for in_a_row in (False, True):
        learner = Scaled(gm.mlp([6, 8, 6], seed=0).cuda())
        if in_a_row:
            learner.observe_each(x, 0, y, 10, check=False)
        else:
            for some in torch.arange(60, device="cuda").split(10):
                learner.observe(x[some], 0, y[some], check=False)
        ends.append(torch.cat([w.detach().flatten() for w in learner.network.parameters()]))
    assert torch.equal(*ends)


def test_more_examples_than_memories_in_a_row_lie_as_one_by_one():
    """Sums over the memories run in the same order: equal to the last bit."""
    ends = []
    for in_a_row in (False, True):
        learner = gm.GEM(gm.mlp([6, 8, 6], seed=0).cuda(), memories=7)
        for t in range(3):
            x = torch.linspace(-1, 1, 60 * 6, device="cuda").view(60, 6) + t
            y = torch.arange(60, device="cuda") % 6
            if in_a_row:
                learner.observe_each(x, t, y, 4, check=False)
            else:
                for some in torch.arange(60, device="cuda").split(4):
                    learner.observe(x[some], t, y[some], check=False)
        ends.append(torch.cat([w.detach().flatten() for w in learner.network.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("sample", [None, 8])
@pytest.mark.parametrize("match", [0.0, 0.5])
def test_graphs_change_nothing_for_rehearsing_and_matching(match, sample):
    """What a task rehearses grows with its memories, and with it what is recorded."""
    found = []
    for graphs in (True, False):
        learner = gm.SteadyGEM(
            gm.mlp([6, 8, 8, 6], seed=0).cuda(),
            graphs=graphs, memories=20, rehearse=5, match=match, input_dropout=0.0, glances=3,
            sample=sample,
        )  # fmt: skip
        for t in (0, 1, 2, 0):
            x = torch.linspace(-1, 1, 36 * 6, device="cuda").view(36, 6) + t
            for some in torch.arange(36, device="cuda").split(6):
                learner.observe(x[some], t, some % 6)
        assert bool(learner.graphed._graphs) == graphs
        found.append(torch.cat([learner.forward(x, t) for t in range(3)]))
    torch.testing.assert_close(*found)


def test_a_network_that_cannot_be_recorded_runs_without_graphs():
    with pytest.warns(RuntimeWarning, match="cannot be recorded as CUDA graphs"):
        learner = trained("control flow on data")
    assert not learner.graphed.enabled
    without = trained("control flow on data", graphs=False)
    for w, other in zip(learner.network.parameters(), without.network.parameters(), strict=True):
        torch.testing.assert_close(w, other)


def test_a_step_waits_for_nothing():
    learner = trained()
    stack = memories("mlp", counts=(20,) * 4)
    x, y = stack.x.cuda(), stack.y.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(5):
            learner.observe(x[3, step : step + 3], 3, y[3, step : step + 3], check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_restored_learner_uses_its_graphs_again_and_goes_the_same_way():
    learner = trained()
    state = learner.state_dict()
    graphs = len(learner.graphed._graphs)

    def go_on():
        stack = memories("mlp", counts=(20,) * 4)
        for t in (1, 2, 3, 1, 2, 3):
            for some in (slice(0, 3), slice(3, 6), slice(6, 9)):
                learner.observe(stack.x[t, some].cuda(), t, stack.y[t, some].cuda())
        return [w.detach().clone() for w in learner.network.parameters()]

    first = go_on()
    recorded = len(learner.graphed._graphs)
    learner.load_state_dict(state)
    second = go_on()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert graphs < recorded
    other = gm.GEM(build("mlp").cuda(), lr=0.05, memories=7)
    other.load_state_dict(state)
    assert other.state_dict()["memory"]["tasks"].keys() == state["memory"]["tasks"].keys()


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_learner_put_back_to_its_start_learns_again(kind):
    """What graphs refer to is still what is trained."""
    learner = kind(gm.mlp([6, 8, 8, 6]).cuda(), lr=0.05)
    start = learner.state_dict()
    ends = []
    for _ in range(2):
        learner.load_state_dict(start)
        for t in (0, 1):
            x = torch.linspace(-1, 1, 60, device="cuda").view(10, 6) + t
            for _ in range(4):
                learner.observe(x, t, torch.arange(10, device="cuda") % 6)
        ends.append([w.detach().clone() for w in learner.module(0).parameters()])
    for first, second in zip(*ends, strict=True):
        torch.testing.assert_close(first, second)


def test_a_learner_put_back_to_its_start_records_nothing_new():
    learner = gm.GEM(gm.mlp([6, 8, 8, 6]).cuda(), lr=0.05, memories=20)
    start, recorded = learner.state_dict(), []
    for _ in range(4):
        learner.load_state_dict(start)
        for t in range(5):
            x = torch.linspace(-1, 1, 240, device="cuda").view(40, 6) + t
            learner.observe_each(x, t, torch.arange(40, device="cuda") % 6, 10, check=False)
        recorded.append(len(learner.graphed._graphs))
    assert recorded[1] == recorded[2] == recorded[3]  # in the first run, memories move as they grow


def test_seeds_that_share_a_learner_are_those_of_learners_of_their_own():
    """To the last bit: a sweep's worker sets one learner back for each seed, with its graphs."""
    compute = Compute()
    settings = {"memories": 20, "lr": 0.05}
    for seed in (0, 1, 2):
        experiment = Experiment(
            "mnist-rotations", "gem", settings, seed=seed, data="sample", device="cuda",
            n_tasks=4, examples_per_task=60,
        )  # fmt: skip
        shared = compute(experiment)
        assert shared["R"] == experiment.run().R.tolist()


def test_garbage_does_not_end_a_recording():
    """Graphs of a learner that is gone cannot be destroyed while another is recorded."""
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

    def step(x):
        total.add_(x)
        if torch.cuda.is_current_stream_capturing():
            return None, [[] for _ in range(200_000)]  # so much that garbage would be collected
        return (None,)

    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        gone = GraphedSteps()
        gone.cycle = gone
        for _ in range(2):
            gone("a step", lambda x: (total.add_(x),), x)
        del gone
        steps = GraphedSteps()
        for _ in range(3):
            steps("a step", step, x)
    finally:
        gc.set_threshold(*threshold)
    assert steps.enabled
    assert gc.isenabled()
    assert total.tolist() == [5.0] * 3


@pytest.mark.parametrize("kind", [gm.Single, gm.GEM, gm.Multimodal])
def test_what_is_changed_after_a_recording_counts(kind):
    learner = kind(gm.mlp([6, 8, 8, 6]).cuda(), lr=0.05)
    x, y = torch.randn(10, 6, device="cuda"), torch.arange(10, device="cuda") % 6
    for _ in range(4):
        learner.observe(x, 0, y)
    for optimizer in learner.optimizers_of(0):
        optimizer.param_groups[0]["lr"] = 0.0
    before = [w.detach().clone() for w in learner.module(0).parameters()]
    for _ in range(4):
        learner.observe(x, 0, y)
    for w, other in zip(learner.module(0).parameters(), before, strict=True):
        torch.testing.assert_close(w, other, rtol=0, atol=0)


def test_dropout_is_governed_by_the_learners_seed():
    def once():
        torch.manual_seed(int(torch.randint(1000, ())))
        network = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 5)).cuda()
        for i, w in enumerate(network.parameters()):
            w.data = torch.linspace(-1, 1, w.numel(), device="cuda").view_as(w) * (i + 1) / 4
        learner = gm.GEM(network, memories=5, seed=3)
        x = torch.linspace(-1, 1, 60, device="cuda").view(10, 6)
        for t in (0, 1):
            for _ in range(4):
                learner.observe(x, t, torch.arange(10, device="cuda") % 5)
        return [w.detach().clone() for w in network.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(once(), once(), strict=True))


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_graphs_change_nothing_for_what_dropout_draws(kind):
    networks = []
    for graphs in (True, False):
        network = nn.Sequential(*gm.mlp([6, 8, 8, 5], seed=0)[:4], nn.Dropout(0.3), nn.Linear(8, 5))
        torch.nn.init.constant_(network[-1].weight, 0.1)
        torch.nn.init.zeros_(network[-1].bias)
        for net, more in ((network, {}), (gm.mlp([6, 8, 8, 5]), {"input_dropout": 0.3})):
            learner = kind(net.cuda(), lr=0.05, graphs=graphs, seed=3, **more)
            for t in (0, 1, 0):
                x = torch.linspace(-1, 1, 18 * 6, device="cuda").view(18, 6) + t
                for some in torch.arange(18, device="cuda").split(6):
                    learner.observe(x[some], t, some % 5)
            assert bool(learner.graphed._graphs) == graphs
            networks.append([w.detach().clone() for w in learner.module(0).parameters()])
    for with_graphs, without in zip(networks[:2], networks[2:], strict=True):
        torch.testing.assert_close(with_graphs, without)


def test_a_run_on_the_gpu_is_as_good_as_one_on_the_cpu():
    continuum = gm.mnist_rotations(n_tasks=5, examples_per_task=300, data="sample")
    results = [
        gm.run(gm.GEM(gm.mlp().to(device), memories=50), continuum) for device in ("cpu", "cuda")
    ]
    cpu, gpu = results
    assert np.array_equal(cpu.baseline, gpu.baseline)
    assert gpu.acc == pytest.approx(cpu.acc, abs=0.03)


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_every_learner_runs_on_a_gpu(kind):
    continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=200, data="sample")
    result = gm.run(kind(gm.mlp().cuda(), lr=0.05), continuum)
    assert result.acc > 0.3


def test_a_diverging_run_ends_at_the_next_row():
    continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=50, data="sample")
    with pytest.raises(FloatingPointError, match="not finite"):
        gm.run(gm.GEM(gm.mlp().cuda(), lr=1e30), continuum)


def test_bad_data_is_found_before_a_run():
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    x[3, 1] = float("nan")
    task = gm.Task(0, (x, y), (x, y))
    with pytest.raises(ValueError, match="x must be finite"):
        gm.run(gm.GEM(gm.mlp([4, 8, 3]).cuda()), gm.Continuum([task]))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precisions_are_close_and_named(precision):
    exact, rough = trained("resnet", steps=2), trained("resnet", steps=2, precision=precision)
    assert rough.statistics()["precision"] == precision
    for w, other in zip(rough.network.parameters(), exact.network.parameters(), strict=True):
        assert agree(w, other, 0.1)


def test_out_of_memory_is_met_with_smaller_chunks():
    network = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 5)).cuda()
    x, y = torch.randn(64, 2000, 64, device="cuda"), torch.randint(5, (64, 2000), device="cuda")
    stack = Stack(x, y, (2000,) * 64)
    expected = MemoryGradients(network, "batched", tasks_per_chunk=1)([stack]).clone()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4e9 / total)
    try:
        engine = MemoryGradients(network, "batched")
        with pytest.warns(RuntimeWarning, match="do not fit the GPU's memory"):
            found = engine([stack])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert agree(found, expected, 1e-6)


def test_out_of_memory_while_recording_is_met_with_smaller_chunks():
    """A graph's memory lies beside the rest: what fits as it is need not fit when recorded."""
    whole, small = (trained("resnet", steps=2, graphs=graphs) for graphs in (False, True))
    compute = small.constraints.engine._compute

    def too_large_for_a_graph(network, part, out):
        if len(part) > 1 and torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError
        compute(network, part, out)

    small.constraints.engine._compute = too_large_for_a_graph
    stack = memories("resnet", counts=(20,))

    def go_on(learner):
        for step in range(6):
            some = slice(3 * step, 3 * step + 3)
            learner.observe(stack.x[0, some].cuda(), "new", stack.y[0, some].cuda())

    go_on(whole)
    with pytest.warns(RuntimeWarning, match="do not fit the GPU's memory"):
        go_on(small)
    assert small.graphed.enabled
    for w, other in zip(small.network.parameters(), whole.network.parameters(), strict=True):
        assert agree(w, other, 1e-4)


def test_out_of_memory_moves_running_statistics_once():
    """A pass that is begun and given up leaves no trace."""
    stack = memories("resnet", counts=(8,) * 4)
    stack = Stack(stack.x.cuda(), stack.y.cuda(), stack.counts)
    engines = [MemoryGradients(build("resnet").cuda(), "batched") for _ in range(2)]
    engines[0]([stack])

    def once_too_large(network, part, out, compute=batched_gradients):
        compute(network, part, out)
        if len(part) == 4:
            raise torch.cuda.OutOfMemoryError

    engines[1]._compute = once_too_large
    with pytest.warns(RuntimeWarning, match="do not fit the GPU's memory"):
        engines[1]([stack])
    for one, other in zip(*(engine.objective.network.buffers() for engine in engines), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("constrain", ["gradient", "update"])
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
def test_graphs_change_nothing_with_any_optimizer(optimizer, constrain):
    makes = {
        "SGD": partial(torch.optim.SGD, lr=0.05),
        "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        "AdamW": partial(torch.optim.AdamW, lr=0.01),
    }
    ends = []
    for graphs in (True, False):
        learner = gm.GEM(gm.mlp([6, 8, 5]).cuda(), optimizer=makes[optimizer], memories=7,
                         constrain=constrain, graphs=graphs)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            observe_tasks(learner)
        assert bool(learner.graphed._graphs) == graphs
        ends.append(learner)
    for w, other in zip(*(end.network.parameters() for end in ends), strict=True):
        torch.testing.assert_close(w, other, rtol=1e-3, atol=1e-5)
    assert ends[0].statistics()["violations"] == ends[1].statistics()["violations"]


def observe_tasks(learner, tasks=(0, 1, 2, 0), steps=6):
    stack = memories("mlp", counts=(20,) * 4)
    x, y = stack.x.cuda(), stack.y.cuda()
    return [
        learner.observe(x[t, 3 * i : 3 * i + 3], t, y[t, 3 * i : 3 * i + 3])
        for t in tasks
        for i in range(steps)
    ]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_rate_that_changes_in_every_step_is_read_by_the_same_graphs(optimizer):
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    ends = []
    for graphs in (True, False):
        learner = gm.GEM(gm.mlp([6, 8, 5]).cuda(), optimizer=partial(optimizer, lr=0.05),
                         schedule=schedule, memories=7, graphs=graphs)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            observe_tasks(learner, tasks=(0, 1, 2, 2, 2), steps=6)
        ends.append(learner)
    assert len(ends[0].graphed._graphs) <= 8  # one per number of memories, not per rate
    rates = [float(end.optimizer.param_groups[0]["lr"]) for end in ends]
    assert rates[0] == pytest.approx(rates[1], rel=1e-4)
    for w, other in zip(*(end.network.parameters() for end in ends), strict=True):
        torch.testing.assert_close(w, other, rtol=1e-3, atol=1e-5)
    state = ends[0].state_dict()
    on_cpu = gm.GEM(gm.mlp([6, 8, 5]), optimizer=partial(optimizer, lr=0.05),
                    schedule=schedule, memories=7)  # fmt: skip
    on_cpu.load_state_dict(state)
    ends[0].load_state_dict(on_cpu.state_dict())
    observe_tasks(ends[0], tasks=(1,))


def test_graphs_that_are_never_taken_again_are_said_once():
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for w in group["params"]:
                    w.sub_(w.grad, alpha=group["lr"])

    learner = gm.Single(gm.mlp([6, 8, 5]).cuda(), optimizer=Own)

    def change_the_rate_all_the_time():
        for step in range(40):
            learner.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 2)
            observe_tasks(learner, tasks=(0,), steps=1)

    with pytest.warns(RuntimeWarning, match="none was taken again") as said:
        change_the_rate_all_the_time()
    assert len(said) == 1


def test_the_loss_of_a_replayed_step_is_the_batchs_own():
    learner = gm.GEM(gm.mlp([6, 8, 5]).cuda(), memories=7)
    other = gm.GEM(gm.mlp([6, 8, 5]).cuda(), memories=7, graphs=False)
    one, two = observe_tasks(learner), observe_tasks(other)
    torch.testing.assert_close(torch.stack(one), torch.stack(two), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (nn.functional.mse_loss, lambda y: nn.functional.one_hot(y, 5).float()),
        (nn.CrossEntropyLoss(label_smoothing=0.1), lambda y: y),
        (lambda z, y: (z - nn.functional.one_hot(y, 5)).abs().mean(), lambda y: y),
    ],
)
def test_any_loss_is_as_on_the_cpu(loss, label):
    ends = []
    for device in ("cuda", "cpu"):
        learner = gm.GEM(gm.mlp([6, 8, 5]).to(device), loss=loss, memories=7, lr=0.05)
        stack = memories("mlp", counts=(20,) * 4)
        for t in (0, 1, 2, 0):
            for i in range(6):
                some = slice(3 * i, 3 * i + 3)
                x, y = stack.x[t, some].to(device), label(stack.y[t, some]).to(device)
                learner.observe(x, t, y)
        ends.append([w.detach().cpu() for w in learner.network.parameters()])
    for w, other in zip(*ends, strict=True):
        torch.testing.assert_close(w, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_loop_of_ones_own_is_as_on_the_cpu(constrain):
    ends = []
    for device in ("cuda", "cpu"):
        model = gm.mlp([6, 8, 5]).to(device)
        memory = gm.GradientMemory(model, memories=7, margin=0.2, constrain=constrain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stack = memories("mlp", counts=(20,) * 4)
        for t in (0, 1, 2, 0):
            for i in range(6):
                x, y = (part[t, 3 * i : 3 * i + 3].to(device) for part in (stack.x, stack.y))
                nn.functional.cross_entropy(model(x), y).backward()
                memory.step(optimizer, t)
                optimizer.zero_grad()
                memory.add(x, t, y)
        ends.append((model, memory))
    for w, other in zip(*(model.cpu().parameters() for model, _ in ends), strict=True):
        torch.testing.assert_close(w, other, rtol=1e-2, atol=1e-3)
    gpu, cpu = (memory for _, memory in ends)
    assert gpu.violations == cpu.violations
    assert gpu.last.tasks == cpu.last.tasks
    torch.testing.assert_close(gpu.last.cosines.cpu(), cpu.last.cosines, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(gpu.last.v.cpu(), cpu.last.v, rtol=2e-2, atol=1e-3)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2),  # has no fused step
}


class Squares(nn.Module):
    """Makes large numbers infinite."""

    def forward(self, x):
        return x * x


def squaring(**settings):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), Squares(), nn.BatchNorm1d(8), nn.Linear(8, 5)).cuda()
    return lambda kind: kind(network, **settings)


def squares_batch(seed, bad=False):
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    return (1e30 * x if bad else x).cuda(), (torch.arange(10) % 5).cuda()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_batch_that_is_not_finite_leaves_no_trace(kind, optimizer):
    """As on a CPU, also in a step that is a graph (the third of its kind)."""
    learner = squaring(optimizer=OPTIMIZERS[optimizer])(kind)
    for seed, t in enumerate("aaabbb"):
        x, y = squares_batch(seed)
        learner.observe(x, t, y)
    exact = optimizer != "RMSprop"  # such an optimizer makes a step along zeros
    for t in "bac":
        before = learner.state_dict()
        x, y = squares_batch(0, bad=True)
        with pytest.raises(FloatingPointError, match=f"after 6 steps.*on task '{t}'.*loss is"):
            learner.observe(x, t, y)
        after = learner.state_dict()
        if exact:
            _same(before, after, "what could not be learned left a trace")
        assert all(w.isfinite().all() for w in learner.network.state_dict().values())
    learner.not_finite = "skip"
    assert learner.observe(x, "b", y, check=False) is None
    assert learner.skipped == 1
    x, y = squares_batch(9)
    assert learner.observe(x, "b", y).isfinite()


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_steps_that_nobody_waits_for_change_nothing_after_one_that_is_not_finite(kind):
    learner = squaring(lr=0.05)(kind)
    for seed, t in enumerate("aaabbb"):
        x, y = squares_batch(seed)
        learner.observe(x, t, y)
    module = learner.module("b")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for seed in range(5):
        x, y = squares_batch(seed, bad=seed == 1)
        learner.observe(x, "b", y, check=False)
        if seed == 0:
            torch.cuda.synchronize()
            before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"after 7 steps.*on task 'b'"):
        learner.settle()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    if not isinstance(learner, Replay):  # nobody knew better than to remember the batch
        x, y = squares_batch(9)
        assert learner.observe(x, "b", y).isfinite()  # the learner can go on


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [gm.GEM, gm.AGEM, gm.Single])
def test_parameters_may_lie_channels_last(kind, optimizer):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5)).cuda()
    network = network.to(memory_format=torch.channels_last)
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    learner = kind(network, optimizer=OPTIMIZERS[optimizer], schedule=schedule)
    for seed, t in enumerate("aaaabbbb"):
        x = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).cuda()
        loss = learner.observe(x, t, torch.arange(10).cuda() % 5)
    assert loss.isfinite()
    assert learner.steps == 8


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("constrain", ["gradient", "update"])
@pytest.mark.parametrize("tasks", [2, 60, 130])
def test_gradients_at_memories_that_are_not_finite_are_noticed(constrain, optimizer, tasks):
    """Each of the ways to solve the dual gives NaN for such a problem, also in a graph."""
    made = squaring(optimizer=OPTIMIZERS[optimizer], memories=4, constrain=constrain)
    learner = made(gm.GEM)
    x, y = squares_batch(0)
    for t in range(tasks):
        learner.observe(x, t, y)
    for _ in range(3):
        learner.observe(x, 0, y)
    with torch.no_grad():
        learner.memory.others(0)[0].x[0] = 1e30
    before = learner.state_dict()
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        learner.observe(x, 0, y)
    if optimizer != "RMSprop":
        _same(before, learner.state_dict(), "what could not be learned left a trace")
    assert all(w.isfinite().all() for w in learner.network.state_dict().values())


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_loop_of_ones_own_stops_or_skips_on_a_gpu(constrain):
    model = gm.mlp([6, 8, 5]).cuda()
    memory = gm.GradientMemory(model, memories=5, constrain=constrain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed, t in enumerate("ab"):
        x, y = squares_batch(seed)
        memory.add(x, t, y)
    before = [w.detach().clone() for w in model.parameters()]
    for w in model.parameters():
        w.grad = torch.full_like(w, float("nan"))
    with pytest.raises(FloatingPointError, match="step 1, on task 'c'"):
        memory.step(optimizer, "c")
    memory.not_finite = "skip"
    memory.step(optimizer, "c")
    assert memory.skipped == 1
    assert all(torch.equal(w, b) for w, b in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_is_noticed_in_a_bare_loop():
    learner = gm.Single(gm.mlp([6, 8, 5]).cuda(), lr=1e30)
    with pytest.raises(FloatingPointError, match="not finite"):
        observe_tasks(learner)


class Killed(Exception):  # noqa: N818
    pass


class Kill:
    """Ends a run after so many examples."""

    def on_batch(self, progress):
        if progress.examples >= 130:
            raise Killed


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_run_on_a_gpu_goes_on_bit_for_bit(kind, optimizer, tmp_path):
    """With deterministic algorithms; the graphs are recorded anew."""
    continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=60, data="sample")

    def made():
        return kind(gm.mlp([784, 20, 10], seed=0).cuda(), optimizer=OPTIMIZERS[optimizer])

    whole, resumed = made(), made()
    expected = gm.run(whole, continuum)
    with pytest.raises(Killed):
        gm.run(made(), continuum, checkpoint=tmp_path, save_every=50, callbacks=[Kill()])
    found = gm.run(resumed, continuum, checkpoint=tmp_path)
    assert np.array_equal(found.R, expected.R)
    _same(whole.state_dict(), resumed.state_dict(), "going on led elsewhere")


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_a_file_moves_between_cpu_and_gpu(kind, tmp_path):
    x, y = torch.randn(10, 6), torch.arange(10) % 5
    learners = [kind(gm.mlp([6, 8, 5], seed=0).to(device), lr=0.05) for device in ("cuda", "cpu")]
    for t in "ab":
        learners[0].observe(x.cuda(), t, y.cuda())
    for one, other, device in ((*learners, "cpu"), (*learners[::-1], "cuda")):
        one.save(tmp_path / "learner")
        other.load(tmp_path / "learner")
        outputs = [learner.forward(x.to(learner.device), "a").cpu() for learner in learners]
        torch.testing.assert_close(*outputs)
        other.observe(x.to(device), "c", y.to(device))


@pytest.mark.parametrize("counts", [(9, 9, 9), (9, 4, 7)])
@pytest.mark.parametrize("sizes", [(20, 12, 7, 5), (784, 100, 100, 10), (40, 130, 5), (16, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_chains_kernels_give_what_the_loop_gives(sizes, bias, counts):
    """Layers of any size, with and without a bias, masks, memories that are not full, a batch."""
    torch.manual_seed(0)
    network = gm.mlp(sizes).cuda()
    if not bias:
        for layer in network[::2]:
            layer.register_parameter("bias", None)
    x, y = torch.randn(3, 9, sizes[0], device="cuda"), torch.randint(5, (3, 9), device="cuda")
    masks = torch.arange(sizes[-1], device="cuda") < 5 + torch.zeros(3, 1, device="cuda")
    one, label = torch.randn(6, sizes[0], device="cuda"), torch.randint(5, (6,), device="cuda")
    expected = MemoryGradients(copy.deepcopy(network).double(), "loop")
    stack = Stack(x.double(), y, counts, masks)
    G, g, loss = (part.clone() for part in expected.with_batch([stack], one.double(), 0, label))
    found = MemoryGradients(network, "chain").with_batch(
        [Stack(x, y, counts, masks)], one, 0, label
    )
    for ours, theirs in zip(found, (G, g, loss), strict=True):
        assert agree(ours.double(), theirs, 1e-5)
    alone = MemoryGradients(network, "chain")([Stack(x, y, counts, masks)])
    assert agree(alone.double(), G, 1e-5)


def test_padded_channels_change_nothing_but_the_rounding():
    """In half precision a thin network's pass has channels of zeros; errors are as without them."""
    torch.manual_seed(0)
    network = gm.resnet18(n_outputs=10, feature_maps=5).cuda().to(memory_format=torch.channels_last)
    x, y = torch.rand(3, 16, 3, 32, 32, device="cuda"), torch.randint(10, (3, 16), device="cuda")
    double = copy.deepcopy(network).double()
    exact = MemoryGradients(double, "batched")([Stack(x.double(), y, (16,) * 3)])
    stack, errors, buffers = Stack(x, y, (16,) * 3), [], []
    for pads in (True, False):
        copied = copy.deepcopy(network)
        out = torch.empty_like(exact, dtype=torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            objective = Objective(copied)
            assert keeps_zeros(objective, stack, _in_one_pass)
            _in_one_pass(objective, stack, out, pads)
        errors.append(float((out - exact).norm() / exact.norm()))
        buffers.append(list(copied.buffers()))
    assert errors[0] <= 1.5 * errors[1]
    for padded, plain in zip(*buffers, strict=True):
        torch.testing.assert_close(padded, plain, rtol=0.05, atol=0.05)


def test_a_network_that_looks_at_its_channels_is_not_padded():
    network = build("resnet").cuda().to(memory_format=torch.channels_last)
    stack = memories("resnet")
    stack = Stack(stack.x.cuda(), stack.y.cuda(), stack.counts)
    with torch.autocast("cuda", torch.bfloat16):
        assert not keeps_zeros(Objective(network), next(stack.level()), _in_one_pass)


def test_plain_sgd_steps_as_torchs_own_does():
    ends = []
    for foreach in (None, True):
        make = partial(torch.optim.SGD, lr=0.05, foreach=foreach)
        learner = gm.GEM(gm.mlp([6, 8, 5]).cuda(), optimizer=make, memories=7)
        observe_tasks(learner)
        ends.append(list(learner.network.parameters()))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Rows(gm.Callback):
    """Looks at every row of R, so that a run waits for it."""

    def on_task(self, progress):
        assert len(progress.partial.R) == progress.task + 1


@pytest.mark.parametrize("name", ["gem", "single", "er", "icarl", "steadygem"])
def test_a_run_that_is_ahead_of_the_gpu_measures_the_same(name):
    continuum = gm.mnist_rotations(4, 60, data="sample", seed=1).to("cuda")
    results = []
    for callbacks in ([], [Rows()]):
        learner = gm.learners.LEARNERS[name](gm.mlp(seed=1).cuda(), lr=0.05)
        results.append(gm.run(learner, continuum, callbacks=callbacks))
    ahead, waiting = results
    assert np.array_equal(ahead.R, waiting.R)
    assert np.array_equal(ahead.baseline, waiting.baseline)
    assert np.array_equal(ahead.curves, waiting.curves)
    assert ahead.statistics == waiting.statistics
    assert ahead.seconds_training > 0
    assert ahead.seconds_evaluation > 0


@pytest.mark.parametrize("kind", [gm.Single, gm.GEM])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_run_that_is_ahead_of_the_gpu_ends_with_the_learners_own_error(bad, kind):
    x, y = torch.randn(60, 6, device="cuda"), torch.arange(60, device="cuda") % 3
    scales = [1e30 if t == bad else 1.0 for t in range(3)]  # the loss of 1e30 is not finite soon
    tasks = [gm.Task(t, (x * scale, y), (x, y)) for t, scale in enumerate(scales)]
    learner = kind(gm.mlp([6, 8, 8, 3], seed=1).cuda(), lr=0.05)
    with pytest.raises(FloatingPointError, match=f"on task {bad} "):
        gm.run(learner, gm.Continuum(tasks))


def test_test_sets_predicted_together_score_as_alone():
    continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=50, data="sample")
    learner = gm.GEM(gm.mlp().cuda(), memories=20)
    assert learner.predicts_alike
    result = gm.run(learner, continuum)
    tests = continuum.to("cuda").tests
    alone = [
        float((learner.predict(t[:][0], n) == t[:][1]).float().mean()) for n, t in tests.items()
    ]
    assert result.R[-1] == pytest.approx(alone)


def test_several_tensors_are_copied_as_one_by_one():
    sources = [torch.randn(5, 6, device="cuda"), torch.arange(5, device="cuda")]
    for some in (sources, [sources[0][:, :3], sources[1]], [sources[0].bool(), sources[1]]):
        targets = [torch.zeros_like(source) for source in some]
        copy_together(targets, some)
        assert all(torch.equal(*pair) for pair in zip(targets, some, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "sizes", [(784, 100, 100, 10), (20, 12, 7, 5), (20, 8, 5), (20, 300, 8, 5)]
)
def test_steps_on_single_examples_are_those_of_a_cpu(sizes, masked):
    """In one kernel for three small layers, else by torch; more examples than a kernel takes."""
    torch.manual_seed(0)
    x, y = torch.randn(150, sizes[0]) / 10, torch.randint(5, (150,))
    masks = None
    if masked:
        masks = torch.rand(150, sizes[-1]) > 0.4
        masks[torch.arange(150), y] = True
    networks = []
    for device in ("cpu", "cuda"):
        network = gm.mlp(sizes, seed=0).to(device)
        own = None if masks is None else masks.to(device)
        rate = torch.tensor(0.05, device=device)
        chain_steps(network, x.to(device), y.to(device), own, rate)
        networks.append([w.detach().cpu() for w in network.parameters()])
    torch.testing.assert_close(*networks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1000, 5_000_000])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_products_with_one_vector_are_those_in_double_precision(k, p):
    torch.manual_seed(k)
    G, g = torch.randn(k, p, device="cuda"), torch.randn(p, device="cuda")
    exact = torch.cat([G.double() @ g.double(), g.double().square().sum()[None]])
    found = products_with(G, g)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-8 * p**0.5)


class Tokens(nn.Module):
    """A small language model whose passes the host takes longer to start than the GPU to run."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.out = nn.Linear(32, 50)

    def forward(self, x):
        return self.out(self.block(self.embed(x))).mT


def token_batch(seed, n=6):
    ids = torch.randint(50, (n, 11), generator=torch.Generator().manual_seed(seed)).cuda()
    return ids[:, :-1], seed, ids[:, 1:], None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_passes_give_what_passes_give(precision, monkeypatch):
    monkeypatch.setattr(recorded, "SHARE", 0.0)  # whatever it gains
    torch.manual_seed(0)
    network = Tokens().cuda()
    objective, passes = Objective(network, Criterion(None)), RecordedPasses()
    p = sum(w.numel() for w in network.parameters())
    for step in range(8):
        out, expected = torch.empty(2, p, device="cuda")
        with computing_in(precision, out.device):
            loss = passes(objective, token_batch(step), out)
            other = pass_of(objective, token_batch(step), expected)
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        assert (out - expected).norm() <= tolerance * expected.norm()
        torch.testing.assert_close(loss, other, rtol=tolerance, atol=tolerance)
        with torch.no_grad():  # where they are, so that a recording reads the new values
            for w in network.parameters():
                w.add_(torch.randn_like(w), alpha=0.05)
    assert len(passes._graphed._graphs) == 1
    network.eval()  # another kind
    passes(objective, token_batch(0), out)
    assert len(passes._next) == 2


def test_a_recording_knows_where_the_buffers_are(monkeypatch):
    """A buffer that was replaced is read where it is now."""
    monkeypatch.setattr(recorded, "SHARE", 0.0)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).cuda().eval()
    objective, passes = Objective(network, Criterion(None)), RecordedPasses()
    x, y = torch.randn(4, 6, device="cuda"), torch.arange(4, device="cuda")
    out, expected = torch.empty(2, sum(w.numel() for w in network.parameters()), device="cuda")
    for step in range(8):
        if step >= 4:
            network[1].running_mean = torch.full((8,), float(step), device="cuda")
        passes(objective, (x, 0, y, None), out)
        pass_of(objective, (x, 0, y, None), expected)
        torch.testing.assert_close(out, expected)


def test_passes_that_do_something_else_every_time_are_not_recorded(monkeypatch):
    monkeypatch.setattr(recorded, "SHARE", 0.0)

    class Drawing(Tokens):
        def forward(self, x):
            return super().forward(x) * (1 + 0.1 * float(torch.rand(())))

    for network in (Drawing().cuda(), Tokens().cuda()):
        if not isinstance(network, Drawing):
            network.block.register_forward_hook(lambda *_: None)
        passes = RecordedPasses()
        out = torch.empty(sum(w.numel() for w in network.parameters()), device="cuda")
        for step in range(6):
            passes(Objective(network, Criterion(None)), token_batch(step), out)
        assert not passes._graphed._graphs


def test_recorded_passes_drop_out_anew_each_time(monkeypatch):
    monkeypatch.setattr(recorded, "SHARE", 0.0)
    network = Tokens(dropout=0.5).cuda()
    passes = RecordedPasses()
    rows = torch.empty(8, sum(w.numel() for w in network.parameters()), device="cuda")
    for row in rows:
        passes(Objective(network, Criterion(None)), token_batch(0), row)
    assert passes._graphed._graphs
    assert len({float(row.sum()) for row in rows}) == len(rows)


@pytest.mark.parametrize("gradients", ["loop", "gram"])
def test_a_loop_with_recorded_passes_goes_the_same_way(gradients, monkeypatch):
    monkeypatch.setattr(recorded, "SHARE", 0.0)
    ends = []
    for graphs in (False, True):
        torch.manual_seed(0)
        network = Tokens().cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        memory = gm.GradientMemory(network, memories=6, gradients=gradients, graphs=graphs)
        for step in range(30):
            x, _, y, _ = token_batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            memory.step(optimizer, step // 4)
            memory.add(x, step // 4, y)
        assert memory.violations > 0
        assert bool(memory.engine._passes._graphed._graphs) == graphs
        ends.append(torch.cat([w.detach().flatten() for w in network.parameters()]))
    assert (ends[0] - ends[1]).norm() <= 1e-3 * ends[0].norm()
