"""iCaRL: exemplars, how they are shared, chosen and used."""

import numpy as np
import pytest
import torch

import gradmem as gm
from gradmem.learners.icarl import distinct, herd


def two_classes(t, n=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = 2 * t + torch.arange(n) % 2
    return torch.randn(n, 3, generator=generator) + y[:, None], y


def trained(n_tasks=3, epochs=1, batch=10, **settings):
    learner = gm.ICaRL(gm.mlp([3, 8, 8]), lr=0.05, **settings)
    for t in range(n_tasks):
        x, y = two_classes(t, seed=t)
        for _ in range(epochs):
            for some in torch.arange(len(y)).split(batch):
                learner.observe(x[some], t, y[some])
    return learner


def test_the_memory_is_shared_equally_by_the_classes_seen_so_far():
    for n_tasks, share in ((1, 6), (2, 3), (3, 2)):
        exemplars = trained(n_tasks, budget=12).exemplars()
        assert {y: len(x) for y, x in exemplars.items()} == dict.fromkeys(range(2 * n_tasks), share)


def test_earlier_classes_give_up_their_last_exemplars():
    before = trained(1, budget=12).exemplars()
    after = trained(2, budget=12).exemplars()
    for y in before:
        assert torch.equal(after[y], before[y][:3])


def test_exemplars_are_examples_of_their_class():
    for y, x in trained(3, budget=12).exemplars().items():
        own, labels = two_classes(y // 2, seed=y // 2)
        assert all((own[labels == y] == one).all(1).any() for one in x)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_several_epochs_leave_no_example_twice(batch):
    for x in trained(2, epochs=3, batch=batch, budget=40).exemplars().values():
        assert len(x.unique(dim=0)) == len(x) == 10


def test_examples_that_differ_a_little_are_not_one():
    x = torch.tensor([[1e20, 0.0], [1e20, 1.0], [1e20, 0.0], [1e20, 2.0]])
    assert distinct(x).tolist() == x[[0, 1, 3]].tolist()
    assert len(distinct(torch.tensor([[0.0, 1.0], [-0.0, 1.0]]))) == 1


def test_more_classes_than_the_budget_are_refused_before_anything_is_learned():
    learner = trained(1, budget=3)
    x, y = two_classes(1)
    with pytest.raises(ValueError, match="one exemplar for each of 4 classes, got 3"):
        learner.observe(x, 1, y)
    assert learner.task == 0


def test_herding_follows_the_mean_as_a_search_over_all_choices_does():
    rng = np.random.default_rng(0)
    features = torch.tensor(rng.standard_normal((12, 4)))
    chosen = herd(features, 5)
    for i in range(5):
        distances = [
            float((features.mean(0) - features[[*chosen[:i], j]].mean(0)).norm())
            if j not in chosen[:i]
            else np.inf
            for j in range(12)
        ]
        assert chosen[i] == int(np.argmin(distances))


def test_distinct_keeps_the_first_of_equal_rows_in_order():
    rows = torch.tensor([[3.0, 1], [2, 2], [3, 1], [0, 0], [2, 2]])
    assert distinct(rows).tolist() == [[3, 1], [2, 2], [0, 0]]


def test_the_nearest_mean_decides_among_a_tasks_own_classes():
    learner = trained(2, budget=8)
    learner.outputs = {0: (0, 1), 1: (2, 3)}
    x, _ = two_classes(1, seed=9)
    exemplars = learner.exemplars()

    def features(x):
        inner = learner.network[:-1]
        return torch.nn.functional.normalize(inner(x), dim=1)

    means = torch.stack([features(exemplars[y]).mean(0) for y in (2, 3)])
    means = torch.nn.functional.normalize(means, dim=1)
    expected = 2 + torch.cdist(features(x), means).argmin(1)
    assert torch.equal(learner.predict(x, 1), expected)


def test_distillation_holds_old_answers():
    """The more it counts, the less the network's answers to exemplars change in the next task."""

    def change(distillation):
        learner = gm.ICaRL(gm.mlp([3, 16, 4]), lr=0.1, distillation=distillation, budget=40)
        learner.outputs = {0: (0, 1), 1: (2, 3)}
        for t in (0, 1):
            x, y = two_classes(t, 40, seed=t)
            for _ in range(30):
                for some in torch.arange(40).split(5):
                    learner.observe(x[some], t, y[some])
        kept = torch.cat([learner.kept[y] for y in (0, 1)])
        before = torch.cat([learner.answers[y] for y in (0, 1)])[:, :2].softmax(1)
        return float((learner.network(kept)[:, :2].softmax(1) - before).detach().abs().mean())

    assert change(5.0) < 0.2 * change(0.0)


def test_candidates_are_the_tasks_last_examples():
    learner = gm.ICaRL(gm.mlp([3, 8, 4]), budget=100, candidates=4)
    x, y = two_classes(0, 20)
    learner.observe(x, 0, y)
    assert sum(len(own) for own in learner.exemplars().values()) == 4
    assert torch.equal(learner.exemplars()[0].sort(0).values, x[[16, 18]].sort(0).values)


def test_a_class_that_comes_back_leaves_no_example_twice():
    learner = gm.ICaRL(gm.mlp([3, 8, 4]), budget=100)
    x, y = two_classes(0)
    for t in ("first", "between", "first"):
        learner.observe(x + (t == "between"), t, y)
    for own in learner.exemplars().values():
        assert len(own.unique(dim=0)) == len(own)


def test_what_it_remembers_is_its_own():
    learner = gm.ICaRL(gm.mlp([3, 8, 4]), budget=100)
    x, y = two_classes(0)
    buffer = torch.empty(5, 3)
    for some in torch.arange(20).split(5):
        learner.observe(buffer.copy_(x[some]), 0, y[some])
    kept = torch.cat([*learner.exemplars().values()])
    assert {tuple(row) for row in kept.tolist()} == {tuple(row) for row in x.tolist()}


def test_exemplars_take_the_room_of_the_budget_whatever_is_given_up():
    for n_tasks in (2, 3, 4):
        assert trained(n_tasks, budget=12).memory.bytes == 12 * (3 * 4 + 8)


def test_exemplars_lie_in_a_memory_by_class_which_may_be_given():
    learner = trained(3, memory=gm.EpisodicMemory(memories=2, keep="first"))
    assert list(learner.memory) == [0, 1, 2, 3]  # the current task's come when it is over
    for y in learner.memory:
        x, labels = learner.memory[y]
        assert labels.tolist() == [y, y]
        assert torch.equal(x, learner.exemplars()[y])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": gm.EpisodicMemory(8)}, r'EpisodicMemory\(…, keep="first"\).*got Episodic'),
        ({"memory": gm.EpisodicMemory(8, keep="first"), "budget": 4}, "limits of its own"),
    ],
)
def test_a_memory_for_exemplars_that_does_not_fit_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        gm.ICaRL(gm.mlp([3, 4]), **settings)


def test_inputs_of_another_shape_are_refused_although_the_network_takes_them():
    pooled = torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(4), torch.nn.Linear(4, 2))
    learner = gm.ICaRL(pooled)
    learner.observe(torch.zeros(2, 8), 0, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="x must be like what was observed before"):
        learner.observe(torch.zeros(2, 6), 1, torch.tensor([0, 1]))


def test_features_are_what_goes_into_the_linear_layer_that_is_computed_last():
    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = torch.nn.Linear(5, 4), torch.nn.Linear(3, 5)

        def forward(self, x):
            return self.head(self.body(x).relu())

    network = Backwards()
    x = torch.randn(7, 3)
    _, features = gm.ICaRL(network)._features(x)
    expected = torch.nn.functional.normalize(network.body(x).relu(), dim=1)
    torch.testing.assert_close(features, expected)
