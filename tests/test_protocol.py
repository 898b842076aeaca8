"""Algorithm 1 on learners whose every answer is known."""

import numpy as np
import pytest
import torch

import gradmem as gm


class Remembers:
    """Knows the constant label of a task once it has observed the task; otherwise answers 0."""

    def __init__(self):
        self.known = {}
        self.calls = []

    def observe(self, x, t, y):
        self.calls.append(("observe", t))
        self.known[t] = int(y[0])

    def predict(self, x, t):
        self.calls.append(("predict", t))
        return torch.full((len(x),), self.known.get(t, 0))


def constant(t, label, n=25):
    y = torch.full((n,), label)
    return gm.Task(t, (torch.zeros(n, 1), y), (torch.zeros(7, 1), y[:7]))


@pytest.fixture
def continuum():
    return gm.Continuum([constant("a", 0), constant("b", 1), constant("c", 2)], batch_size=10)


def test_a_row_after_each_task_and_one_before(continuum):
    result = gm.run(Remembers(), continuum)
    assert result.baseline.tolist() == [1, 0, 0]
    assert result.R.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (result.acc, result.bwt, result.fwt) == (1.0, 0.0, 0.0)
    assert result.curve_examples == [0, 25, 50, 75]
    assert result.seconds == result.seconds_training + result.seconds_evaluation > 0
    assert "acc=1.0000" in repr(result)


def test_all_tasks_are_tested_before_training_and_after_each_task(continuum):
    learner = Remembers()
    gm.run(learner, continuum)
    tests = [("predict", t) for t in "abc"]
    expected = list(tests)
    for t in "abc":
        expected += [("observe", t)] * 3 + tests
    assert learner.calls == expected


def test_the_fine_grained_matrix(continuum):
    result = gm.run(Remembers(), continuum, every=10)
    assert result.curve_examples == [0, 10, 20, 25, 35, 45, 50, 60, 70, 75]
    assert result.curves[:, 1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    # rows of R are those at the ends of tasks
    ends = [result.curve_examples.index(n) for n in (25, 50, 75)]
    assert np.array_equal(result.R, result.curves[ends])


def test_a_task_that_comes_back_has_a_row_each_time_and_one_column():
    a, b = constant("a", 1), constant("b", 2)
    result = gm.run(Remembers(), gm.Continuum([a, b, a]))
    assert result.R.shape == (3, 2)
    assert result.learned == [0, 1, 0]
    assert result.acc == 1.0


def test_iid_data_gives_one_row(continuum):
    result = gm.run(gm.Single(gm.mlp([1, 4, 3])), continuum.shuffled())
    assert result.R.shape == (1, 3)
    assert np.isnan(result.bwt)


def test_every_test_example_counts():
    """2,001 examples do not fit one evaluation batch; the last one alone is wrong."""
    n = 2001
    y = torch.ones(n, dtype=torch.long)
    y[-1] = 0
    task = gm.Task("a", (torch.zeros(1, 1), torch.ones(1).long()), (torch.zeros(n, 1), y))
    result = gm.run(Remembers(), gm.Continuum([task]))
    assert result.R[0, 0] == (n - 1) / n


def test_progress_says_how_far_the_run_is(continuum):
    seen = []
    result = gm.run(Remembers(), continuum, on_progress=seen.append)
    assert [p.examples for p in seen] == [10, 20, 25, 25, 35, 45, 50, 50, 60, 70, 75, 75]
    assert [p.task for p in seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert {(p.n_tasks, p.n_examples) for p in seen} == {(3, 75)}
    rows = [p.partial for p in seen if p.partial is not None]
    assert [len(partial.R) for partial in rows] == [1, 2, 3]
    assert [p.acc for p in seen][-1] == 1.0
    assert rows[-1].R.tolist() == result.R.tolist()


def test_two_runs_with_one_seed_are_the_same_to_the_last_bit():
    def once(seed):
        continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=60, seed=seed, data="sample")
        return gm.run(gm.GEM(gm.mlp(seed=seed), memories=20, seed=seed), continuum)

    one, again, other = once(0), once(0), once(1)
    assert np.array_equal(one.R, again.R)
    assert np.array_equal(one.baseline, again.baseline)
    assert not np.array_equal(one.R, other.R)


def test_gem_forgets_less_than_single():
    continuum = gm.mnist_permutations(n_tasks=4, examples_per_task=300, data="sample")
    gem = gm.run(gm.GEM(gm.mlp(), lr=0.1, memories=100), continuum)
    single = gm.run(gm.Single(gm.mlp(), lr=0.1), continuum)
    assert gem.acc > single.acc
    assert gem.bwt > single.bwt


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_a_wrong_every_is_named(continuum, every):
    with pytest.raises((ValueError, TypeError), match="every must be"):
        gm.run(Remembers(), continuum, every=every)


def test_what_is_wrong_with_the_data_is_found_before_the_run():
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    learner = gm.GEM(gm.mlp([4, 8, 3]))
    nan = x.clone()
    nan[7, 2] = float("nan")
    for train, test, message in (
        ((nan, y), (x, y), r"x must be finite, got nan at \[7, 2\]"),
        ((x, y), (x, y + 9), "y must hold classes from 0 to 2, got 11"),
        ((x, y + 3), (x, y), "y must hold classes from 0 to 2, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            gm.run(learner, gm.Continuum([gm.Task("a", train, test)]))
    assert learner.steps == 0
    with pytest.raises(TypeError, match="run takes a learner and a Continuum, got GEM"):
        gm.run(gm.Continuum([gm.Task("a", (x, y), (x, y))]), learner)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (gm.GEM, "one example for each of 3 tasks, got 2"),
        (gm.AGEM, "one example for each of 3 tasks, got 2"),
        (gm.ICaRL, "one exemplar for each of 3 classes, got 2"),
    ],
)
def test_a_budget_too_small_is_found_before_the_run(kind, message, continuum):
    learner = kind(gm.mlp([1, 4, 3]), budget=2)
    with pytest.raises(ValueError, match=message):
        gm.run(learner, continuum)
    assert learner.steps == 0


def test_a_test_set_may_be_one_example():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    result = gm.run(gm.Single(network), gm.Continuum([gm.Task(0, (x, y), (x[:1], y[:1]))]))
    assert result.R.shape == (1, 1)
