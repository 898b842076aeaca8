"""The incremental benchmark as a whole, with small networks on made-up images."""

import pytest
import torch

import gradmem as gm
from gradmem.learners import LEARNERS


def continuum(n_tasks=4, per_class=6):
    """Images whose class is easy to see; 100 classes, a task's in order."""
    y = torch.arange(100).repeat(per_class)
    x = torch.zeros(len(y), 3, 32, 32, dtype=torch.uint8)
    x[:, 0], x[:, 1] = (y % 10 * 25)[:, None, None], (y // 10 * 25)[:, None, None]
    x[:, 2] = torch.randint(255, (len(y), 32, 32), generator=torch.Generator().manual_seed(0))
    images = gm.Images(x, y, x[:200], y[:200])
    return gm.cifar100_incremental(n_tasks, data=images)


def small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 4),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 100),
    )


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "multimodal"])
def test_every_learner_predicts_among_a_tasks_classes_from_the_start(name):
    stream = continuum()
    learner = LEARNERS[name](small_network(), lr=0.05)
    result = gm.run(learner, stream)
    assert learner.outputs == stream.outputs
    assert result.R.shape == (4, 4)
    assert result.baseline.mean() == pytest.approx(1 / 25, abs=0.06)  # of 25 classes, not of 100
    for t, test in stream.tests.items():
        assert {*learner.predict(test[:][0], t).tolist()} <= {*stream.outputs[t]}


def test_training_a_task_leaves_other_tasks_outputs_alone():
    stream = continuum(n_tasks=2)
    network = small_network()
    before = network[-1].weight.detach().clone()
    gm.run(gm.Single(network, lr=0.1), stream[0])
    changed = (network[-1].weight != before).any(1)
    assert changed[:50].all()
    assert not changed[50:].any()


@pytest.mark.parametrize("method", ["batched", "loop"])
def test_gem_takes_the_same_way_whatever_computes_its_gradients(method):
    """Weights and running statistics, up to rounding."""
    ways = []
    for gradients in (method, "auto"):
        learner = gm.GEM(
            small_network().double(), lr=0.05, memories=8, gradients=gradients, tasks_per_chunk=2
        )
        learner.outputs = dict(continuum().outputs)
        for x, t, y in continuum():
            learner.observe(x.double(), t, y)
        ways.append(learner.network.state_dict())
    assert learner.gradients == "batched"
    for key, value in ways[0].items():
        torch.testing.assert_close(ways[1][key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["gem", "steadygem", "derpp", "lamaml"])
def test_how_weights_lie_changes_nothing_but_rounding(name):
    """The benchmark's network lies channels last, on every device."""
    laid = gm.benchmarks.BENCHMARKS["cifar100-incremental"].new_network(0, n_tasks=20)
    assert laid.first.weight.is_contiguous(memory_format=torch.channels_last)
    ways = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        network = small_network().double().to(memory_format=memory_format)
        learner = LEARNERS[name](network, lr=0.05)
        learner.outputs = dict(continuum().outputs)
        for x, t, y in continuum(per_class=2):
            learner.observe(x.double(), t, y)
        ways.append(learner.network.state_dict())
    for key, value in ways[0].items():
        torch.testing.assert_close(ways[1][key], value, rtol=1e-6, atol=1e-8)


def test_independent_networks_share_the_feature_maps_out():
    def maps(learner):
        benchmark = gm.benchmarks.BENCHMARKS["cifar100-incremental"]
        return benchmark.new_network(0, learner=learner, n_tasks=20).first.out_channels

    assert (maps(gm.Independent), maps(gm.GEM)) == (1, 20)


def test_a_wrong_output_is_named():
    learner = gm.Single(small_network())
    learner.outputs = {0: (0, 100)}
    x = torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match="outputs of task 0 must be below 100, got 100"):
        learner.observe(x, 0, torch.zeros(2, dtype=torch.long))
