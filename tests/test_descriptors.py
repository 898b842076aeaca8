"""Tasks that describe themselves, and networks that listen."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.gradients import MemoryGradients
from gradmem.learners import LEARNERS
from gradmem.networks import conditioned, widen

EXAMPLES = gm.Examples(
    torch.randn(20, 4, generator=torch.Generator().manual_seed(7)), torch.arange(20) % 2
)


def toy_task(t, describe=None):
    return gm.Task(t, EXAMPLES, EXAMPLES, describe=describe)


def described(x, d):
    return {"x": x, "task": torch.tensor(d).repeat(len(x), 1)}


# A task, its continuum


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ([1.0, math.nan], ValueError, "must be finite"),
        (torch.zeros(2, 2), ValueError, r"shape \(k,\).*\(2, 2\)"),
        (3.0, ValueError, r"got \(\)"),
        ([], ValueError, r"got \(0,\)"),
        ("north", TypeError, "must be numbers, got 'north'"),
    ],
)
def test_a_description_is_a_row_of_finite_numbers(wrong, error, said):
    with pytest.raises(error, match=f"description of task 'a' .*{said}"):
        toy_task("a", wrong)


@pytest.mark.parametrize("given", [[1, 2], np.array([1.0, 2.0]), torch.tensor([1, 2])])
def test_a_description_may_be_a_list_an_array_or_a_tensor(given):
    assert toy_task("a", given).description.tolist() == [1.0, 2.0]
    assert toy_task("a").description is None


def test_a_continuum_knows_its_tasks_descriptions_and_others():
    tasks = [toy_task("a", [1.0, 2.0]), toy_task("b"), toy_task("a", [1.0, 2.0])]
    continuum = gm.Continuum(tasks, descriptions={"b": [3.0, 4.0], "new": [5.0, 6.0]})
    known = {t: d.tolist() for t, d in continuum.descriptions.items()}
    assert known == {"a": [1.0, 2.0], "b": [3.0, 4.0], "new": [5.0, 6.0]}
    assert list(continuum[0].descriptions) == ["a"]
    assert list((continuum[0] + continuum[1]).descriptions) == ["a", "b"]
    assert continuum.held_out(0.2).descriptions == continuum.descriptions
    assert list(continuum.shuffled().descriptions) == ["a", "b", "new"]


def test_descriptions_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"one size, got 1 numbers and 2 for task 'b'"):
        gm.Continuum([toy_task("a", [1.0]), toy_task("b", [1.0, 2.0])])
    with pytest.raises(ValueError, match=r"'a' comes back with another description: \[2.0\]"):
        gm.Continuum([toy_task("a", [1.0]), toy_task("a", [2.0])])
    with pytest.raises(ValueError, match="'a' comes back with another description"):
        gm.Continuum([toy_task("a", [1.0])]) + gm.Continuum([toy_task("a", [2.0])])


def test_arrays_are_described_by_descriptor():
    continuum = gm.Continuum.from_arrays(
        torch.rand(8, 2), torch.arange(8) % 2, ["a"] * 4 + ["b"] * 4, test=0.25,
        descriptions={"a": [0.0], "b": [1.0]},
    )  # fmt: skip
    assert continuum.descriptions["b"].tolist() == [1.0]


# A conditioned network


class Attending(nn.Module):
    """Attention, whose linear layer torch does not call, then a convolution."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.convolution = nn.Conv1d(9, 3, 4, bias=False)

    def forward(self, x):
        h = x.view(-1, 9, 4)
        return self.convolution(self.attention(h, h, h, need_weights=False)[0]).flatten(1)


NETWORKS = {
    "mlp": (lambda: gm.mlp([36, 12, 12, 3]), "batched"),
    "linear": (lambda: nn.Linear(36, 3), "batched"),
    "sequence": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 9)), nn.Linear(9, 8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
        ),
        "batched",
    ),
    "groups": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 9)), nn.Conv1d(4, 8, 3, stride=2, groups=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32, 3),
        ),
        "batched",
    ),
    "no rule": (lambda: nn.Sequential(nn.Linear(36, 8), nn.PReLU(), nn.Linear(8, 3)), "func"),
}  # fmt: skip


@pytest.fixture(params=list(NETWORKS))
def network(request):
    torch.manual_seed(1)
    return NETWORKS[request.param][0]()


@pytest.fixture
def moved(network):
    """A conditioned network whose description counts."""
    torch.manual_seed(2)
    made = conditioned(network, 2)
    with torch.no_grad():
        for w in made.parameters():
            w += 0.1 * torch.randn_like(w)
    return made


def test_it_starts_as_the_network_which_stays_as_it_was(network):
    before = copy.deepcopy(network.state_dict())
    x = torch.randn(5, 36)
    made = conditioned(network, 2)
    torch.testing.assert_close(made(described(x, [3.0, -1.0])), network(x))
    made(described(x, [1.0, 2.0])).sum().backward()
    assert network.state_dict().keys() == before.keys()
    assert all(w.grad is None for w in network.parameters())


def test_its_first_layer_is_linear_in_the_description(moved):
    """With d = 0, the network; with one more, the sum of both changes."""
    layer = next(part for part in moved.modules() if hasattr(part, "more"))
    seen = []
    layer.register_forward_hook(lambda layer, given, output: seen.append(output))
    x = torch.randn(5, 36)
    for d in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, -3.0]):
        moved(described(x, d))
    zero, first, second, both = seen
    expected = zero + 2 * (first - zero) - 3 * (second - zero)
    torch.testing.assert_close(both, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first, second)


def test_copies_and_states_give_the_same(moved, network):
    given = described(torch.randn(5, 36), [0.5, -1.0])
    other = conditioned(network, 2)
    other.load_state_dict(moved.state_dict())
    for same in (other, copy.deepcopy(moved)):
        torch.testing.assert_close(same(given), moved(given))
    alone = [moved({name: part[i : i + 1] for name, part in given.items()}) for i in range(5)]
    torch.testing.assert_close(torch.cat(alone), moved(given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_gem_computes_its_gradients_at_once_and_as_the_loop_does(name):
    torch.manual_seed(3)
    make, way = NETWORKS[name]
    learner = gm.GEM(conditioned(make(), 2), memories=6)
    for t in range(4):
        learner.descriptions[t] = torch.randn(2)
        for _ in range(2):
            learner.observe(torch.randn(5, 36), t, torch.randint(3, (5,)))
    assert learner.gradients == way
    stacks = learner.memory.stacks([0, 1, 2, 3])
    loop = MemoryGradients(learner.network, "loop")(stacks)
    for method in {way, "func"}:
        G = MemoryGradients(learner.network, method)(stacks)
        torch.testing.assert_close(G, loop, atol=1e-5, rtol=1e-5)
    assert loop.abs().sum(1).min() > 0


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), {"x": torch.zeros(2, 4)}])
def test_it_says_what_it_takes(wrong):
    with pytest.raises(TypeError, match=r'takes \{"x": x, "task": \(n, 3\)\}, got no task'):
        conditioned(gm.mlp([4, 3]), 3)(wrong)
    with pytest.raises(TypeError, match=r"\(n, 3\)\}, got one of shape \(2, 2\)"):
        conditioned(gm.mlp([4, 3]), 3)(described(torch.zeros(2, 4), [1.0, 2.0]))


def test_what_cannot_be_conditioned_is_refused():
    with pytest.raises(ValueError, match="linear or convolutional layer to condition, got Embed"):
        conditioned(nn.Embedding(3, 4), 2)
    with pytest.raises(TypeError, match=r"network must be a torch\.nn\.Module"):
        conditioned("mlp", 2)
    with pytest.raises(ValueError, match="size"):
        conditioned(gm.mlp([4, 3]), 0)
    rows = conditioned(nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 2)), nn.Linear(2, 3)), 1)
    with pytest.raises(ValueError, match="one row for each of the 3 examples, got 6 rows"):
        rows(described(torch.zeros(3, 4), [1.0]))


def test_layers_that_torch_does_not_call_stay_as_they_are():
    made = conditioned(Attending(), 2)
    assert hasattr(made.network.convolution, "more")
    assert made(described(torch.randn(5, 36), [1.0, 0.0])).shape == (5, 3)


def test_a_layer_that_is_used_twice_is_conditioned_in_both_places():
    layer = nn.Linear(4, 4)
    made = conditioned(nn.Sequential(layer, nn.ReLU(), layer), 1)
    assert made.network[0] is made.network[2]
    assert made(described(torch.ones(2, 4), [1.0])).shape == (2, 4)


# Learners


def learn(learner, tasks="ab", batches=3):
    for visit, t in enumerate(tasks):
        generator = torch.Generator().manual_seed(visit)
        for _ in range(batches):
            x = torch.randn(8, 4, generator=generator)
            learner.observe(x, t, torch.randint(3, (8,), generator=generator))
    return learner


def conditioned_learner(kind=gm.GEM, **settings):
    learner = kind(conditioned(gm.mlp([4, 8, 8, 3]), 2), **settings)
    learner.descriptions = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 1.0])}
    return learner


def test_memories_hold_what_the_network_is_given():
    learner = learn(conditioned_learner(memories=5))
    x, _ = learner.memory["b"]
    assert x["x"].shape == (5, 4)
    assert x["task"].tolist() == [[0.0, 1.0]] * 5


def test_a_task_without_a_description_is_refused_and_changes_nothing():
    learner = conditioned_learner()
    x, y = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)
    for act in (
        lambda: learner.observe(x, "north", y),
        lambda: learner.observe(x, "north", y, check=False),
        lambda: learner.predict(x, "north"),
        lambda: learner.forward(x, "north"),
    ):
        with pytest.raises(ValueError, match=r"'north' has no .*learner\.descriptions\['north'\]"):
            act()
    assert learner.steps == 0
    assert not list(learner.memory)
    with pytest.raises(ValueError, match=r"None has no description"):
        learner.predict(x)
    learner.descriptions["north"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'north' must be 2 numbers, as the network takes, got 3"):
        learner.predict(x, "north")


def test_a_description_can_be_replaced():
    learner = learn(conditioned_learner())
    x = torch.randn(6, 4)
    other = learner.forward(x, "b")
    learner.descriptions["a"] = torch.tensor([0.0, 1.0])
    assert torch.equal(learner.forward(x, "a"), other)


def test_other_networks_take_no_notice_of_descriptions():
    with_them, without = (gm.GEM(gm.mlp([4, 8, 3]), memories=5) for _ in range(2))
    with_them.descriptions = {"a": torch.ones(2), "b": torch.zeros(2)}
    x = torch.randn(6, 4)
    assert torch.equal(learn(with_them).forward(x, "a"), learn(without).forward(x, "a"))


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_learns_with_it(name):
    kind = LEARNERS[name]
    if kind is gm.Multimodal:
        with pytest.raises(TypeError, match=r"must be an nn\.Sequential .*got Conditioned"):
            conditioned_learner(kind)
        return
    learner = conditioned_learner(kind)
    more = [w for n, w in learner.network.named_parameters() if ".more." in n]
    assert not any(w.any() for w in more)
    learn(learner, "aba")
    last = [w for n, w in learner.module("a").named_parameters() if ".more." in n]
    assert all(w.any() for w in last)
    other = conditioned_learner(kind)
    other.descriptions = {}
    other.load_state_dict(learner.state_dict())
    x = torch.randn(6, 4)
    for t in "ab":
        assert torch.equal(other.forward(x, t), learner.forward(x, t))


def test_an_independent_learner_can_start_afresh():
    learner = learn(conditioned_learner(gm.Independent, start="random"))
    assert list(learner.networks) == ["a", "b"]


def test_descriptions_are_saved(tmp_path):
    learner = learn(conditioned_learner(memories=5))
    learner.save(tmp_path / "learner")
    other = gm.GEM(conditioned(gm.mlp([4, 8, 8, 3], seed=5), 2), memories=5)
    other.load(tmp_path / "learner")
    assert {t: d.tolist() for t, d in other.descriptions.items()} == {
        "a": [1.0, 0.0],
        "b": [0.0, 1.0],
    }
    for one in (learner, other):
        learn(one, "ba")
    assert torch.equal(learner.forward(torch.ones(2, 4), "a"), other.forward(torch.ones(2, 4), "a"))


def test_a_state_with_a_description_that_is_none_is_refused():
    learner = conditioned_learner()
    state = learner.state_dict() | {"descriptions": {"a": torch.zeros(2, 2)}}
    with pytest.raises(ValueError, match="the description of task 'a' must have shape"):
        learner.load_state_dict(state)
    older = learner.state_dict()
    del older["descriptions"]
    learner.load_state_dict(older)
    assert learner.descriptions == {}


def test_a_transform_is_of_x_alone():
    learner = conditioned_learner(transform=lambda x: x.float() / 255, memories=4)
    x = torch.randint(256, (6, 4), dtype=torch.uint8)
    learner.observe(x, "a", torch.arange(6) % 3)
    assert learner.memory["a"][0]["x"].dtype == torch.uint8
    expected = learner.network(described(x.float() / 255, [1.0, 0.0]))
    torch.testing.assert_close(learner.forward(x, "a"), expected)


def test_a_conditioned_network_grows():
    learner = conditioned_learner(grow=True, memories=5)
    learn(learner)
    learner.observe(torch.randn(4, 4), "a", torch.tensor([0, 1, 2, 4]))
    assert learner.forward(torch.randn(2, 4), "b").shape == (2, 5)
    assert widen(learner.network, 7).out_features == 7


@pytest.mark.parametrize("kind", [gm.Single, gm.GEM])
def test_what_differs_between_tasks_is_learned_from_their_descriptions(kind):
    """Which side of a line through zero x is on: with angles held out."""
    angles = torch.linspace(0, 2 * math.pi, 13)[:-1]
    normals = torch.stack([angles.cos(), angles.sin()], 1)

    def accuracy(network):
        learner = kind(network, lr=0.2)
        learner.descriptions = dict(enumerate(normals))
        generator = torch.Generator().manual_seed(0)
        for t in [0, 6, 2, 8, 10, 4] * 2:
            for _ in range(20):
                x = torch.randn(10, 2, generator=generator)
                learner.observe(x, t, (x @ normals[t] > 0).long())
        x = torch.randn(300, 2, generator=generator)
        right = [learner.predict(x, t) == (x @ normals[t] > 0) for t in (1, 3, 5, 7, 9, 11)]
        return torch.stack(right).float().mean().item()

    assert accuracy(conditioned(gm.mlp([2, 32, 2]), 2)) > 0.9
    assert accuracy(gm.mlp([2, 32, 2])) < 0.7


# Runs and benchmarks


def test_a_run_tells_the_learner_the_descriptions(tmp_path):
    def start():
        continuum = gm.Continuum(
            [toy_task("a", [1.0, 0.0]), toy_task("b", [0.0, 1.0])],
            tests=dict.fromkeys(["a", "b", "never learned"], EXAMPLES),
            descriptions={"never learned": [0.6, 0.8]},
        )
        return gm.GEM(conditioned(gm.mlp([4, 8, 2]), 2), memories=5), continuum

    learner, continuum = start()
    learner.descriptions["a"] = torch.tensor([1.0, 1.0])  # the learner knows better
    result = gm.run(learner, continuum, checkpoint=tmp_path / "run")
    assert result.R.shape == (2, 3)
    assert learner.descriptions["a"].tolist() == [1.0, 1.0]
    assert learner.descriptions["b"].tolist() == [0.0, 1.0]
    again, continuum = start()
    resumed = gm.run(again, continuum, checkpoint=tmp_path / "run")
    assert np.array_equal(resumed.R, result.R)
    assert again.descriptions["a"].tolist() == [1.0, 1.0]


def test_a_run_is_refused_before_it_begins_if_descriptions_do_not_fit():
    continuum = gm.Continuum([toy_task("a", [1.0, 0.0]), toy_task("b", [1.0, 1.0])])
    with pytest.raises(ValueError, match="'a' must be 3 numbers, as the network takes, got 2"):
        gm.run(gm.Single(conditioned(gm.mlp([4, 2]), 3)), continuum)
    mixed = continuum.shuffled()
    with pytest.raises(ValueError, match="task 'iid' has no description"):
        gm.run(gm.Single(conditioned(gm.mlp([4, 2]), 2)), mixed)


def test_rotations_are_described_by_their_angles():
    continuum = gm.mnist_rotations(3, 10, order=[2, 0], data="sample")
    for task in continuum.tasks:
        angle = math.radians(float(task.label[:-1]))
        cos, sin, cos2, sin2 = continuum.descriptions[task.t].tolist()
        assert math.isclose(math.atan2(sin, cos), angle, abs_tol=1e-2)
        assert math.isclose(cos2, math.cos(2 * angle), abs_tol=1e-2)
        assert math.isclose(sin2, math.sin(2 * angle), abs_tol=1e-2)


def test_permutations_are_described_by_numbers_that_say_nothing():
    one, other = (gm.mnist_permutations(2, 10, seed=seed, data="sample") for seed in (0, 1))
    assert {len(d) for d in one.descriptions.values()} == {4}
    assert not torch.equal(one.descriptions[0], other.descriptions[0])


def test_composed_tasks_are_all_combinations():
    continuum = gm.mnist_composed(24, 5, data="sample")
    assert len({*continuum.labels()}) == 24
    assert len({tuple(d.tolist()) for d in continuum.descriptions.values()}) == 12
    for task in continuum.tasks:
        _, background, digits = task.label.split(", ")
        low, high = map(int, digits.split("–"))
        assert task.classes == tuple(range(low, high + 1))
        x, _ = continuum.tests[task.t][:]
        corner = x[:, 0].unique().tolist()
        assert corner == pytest.approx([127 / 255 if background == "gray" else 0.0])
        assert continuum.descriptions[task.t][4] == (1.0 if background == "gray" else -1.0)
    part = gm.mnist_composed(24, 5, order=[7, 3], data="sample")
    assert part.labels() == [continuum.labels()[7], continuum.labels()[3]]
    with pytest.raises(ValueError, match="n_tasks must be at most 24, got 25"):
        gm.mnist_composed(25, 5, data="sample")


def test_composed_digits_can_be_compared_by_name():
    found = gm.compare(
        "mnist-composed", ["gem", "multimodal", "independent"], seeds=1, n_tasks=2,
        examples_per_task=20, data="sample",
    )  # fmt: skip
    assert all(results[0].R.shape == (2, 2) for results in found.values())
