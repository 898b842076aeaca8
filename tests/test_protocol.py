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


@pytest.mark.parametrize("features", [0, 1, 2000, 100_000])
def test_on_a_cpu_large_inputs_are_predicted_few_at_a_time(features):
    """As many as 1 MiB of their numbers for each thread; not under 32, and not over 2,000."""
    sizes = []

    class Counting(Remembers):
        def predict(self, x, t):
            sizes.append(len(x))
            return x.sum(1).long()

    n = 2100 if features < 100_000 else 40
    x, y = torch.zeros(n, features), torch.zeros(n).long()
    y[-1] = 1
    task = gm.Task("a", (x[:1], y[:1]), (x, y))
    assert gm.run(Counting(), gm.Continuum([task])).R[0, 0] == (n - 1) / n
    fitting = torch.get_num_threads() * 2**20 // (4 * 2000)
    assert max(sizes) == {0: 2000, 1: 2000, 2000: fitting, 100_000: 32}[features]
    assert sum(sizes) == 2 * n


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
    with pytest.raises(TypeError, match="in this order; got Continuum and GEM"):
        gm.run(gm.Continuum([gm.Task("a", (x, y), (x, y))]), learner)


def test_a_budget_too_small_is_found_before_the_run(continuum):
    learner = gm.ICaRL(gm.mlp([1, 4, 3]), budget=2)
    with pytest.raises(ValueError, match="one exemplar for each of 3 classes, got 2"):
        gm.run(learner, continuum)
    assert learner.steps == 0


def test_a_test_set_may_be_one_example():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    result = gm.run(gm.Single(network), gm.Continuum([gm.Task(0, (x, y), (x[:1], y[:1]))]))
    assert result.R.shape == (1, 1)


# Scores


class Guesses:
    """Predicts the mean of the targets it observed last, a float; 0 before."""

    def __init__(self):
        self.mean = 0.0

    def observe(self, x, t, y):
        self.mean = float(y.double().mean())

    def predict(self, x, t):
        return torch.full((len(x),), self.mean)


def minus_squared_error(prediction, y):
    return -((prediction - y) ** 2)


def test_R_holds_the_means_of_any_score():
    tasks = [constant("a", 10), constant("b", 30)]
    result = gm.run(Guesses(), gm.Continuum(tasks), score=minus_squared_error)
    assert result.score == "minus_squared_error"
    assert result.baseline.tolist() == [-100, -900]
    assert result.R.tolist() == [[0, -400], [-400, 0]]
    assert (result.acc, result.bwt, result.fwt) == (-200, -400, 500)
    assert "minus_squared_error" in repr(result)


def test_gem_learns_a_regression_of_float_targets():
    x = torch.linspace(-1, 1, 40)[:, None]
    tasks = [
        gm.Task(t, (x, torch.cat([x + t, x - t], 1)), (x, torch.cat([x + t, x - t], 1)))
        for t in range(2)
    ]
    learner = gm.GEM(torch.nn.Linear(1, 2), loss=torch.nn.MSELoss(), memories=10)

    def minus_mse(prediction, y):
        return -((prediction - y) ** 2).mean(1)

    result = gm.run(learner, gm.Continuum(tasks), score=minus_mse)
    assert result.R[0, 0] > result.baseline[0]
    with pytest.raises(ValueError, match=r"predicts torch.float32 of shape \(40, 2\): give run a"):
        gm.run(learner, gm.Continuum(tasks))


def test_datasets_are_read_as_they_are_needed():
    class Counted(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 25

        def __getitem__(self, i):
            self.read += 1
            return torch.full((4,), i / 25), i % 3

    train, test = Counted(), Counted()
    continuum = gm.Continuum.from_datasets([("a", train, test)], batch_size=10)
    learner = gm.Single(gm.mlp([4, 8, 3]))
    gm.run(learner, continuum)
    assert learner.examples == 25
    assert train.read == 25 + 10  # and the first batch before the run
    assert test.read == 2 * 25 + 10


def test_predictions_may_be_trees():
    class Both(Remembers):
        def predict(self, x, t):
            return {"label": super().predict(x, t), "size": torch.zeros(len(x))}

    continuum = gm.Continuum([constant("a", 1)])
    result = gm.run(Both(), continuum, score=lambda prediction, y: prediction["label"] == y)
    assert (result.R.tolist(), result.score) == ([[1.0]], "score")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (None, r"the learner predicts torch.float32 of shape \(7,\): give run a score="),
        (
            lambda p, y: (p - y).mean(),
            r"one real number for each example, shape \(7,\), .* gave \(\)",
        ),
        (lambda p, y: 0.5, "gave float"),
    ],
)
def test_a_score_that_is_none_is_explained(score, message):
    with pytest.raises(ValueError, match=message):
        gm.run(Guesses(), gm.Continuum([constant("a", 1)]), score=score)


def test_a_score_that_is_not_finite_ends_the_run(continuum):
    with pytest.raises(FloatingPointError, match="nans is not finite on task a after 0 examples"):
        gm.run(Guesses(), continuum, score=nans)


def nans(prediction, y):
    return prediction / 0


# Callbacks


def test_callbacks_follow_the_run(continuum):
    class Follows(gm.Callback):
        def __init__(self):
            self.seen = []

        def on_batch(self, progress):
            self.seen.append((progress.examples, progress.loss))

        def on_task(self, progress):
            self.seen.append(len(progress.partial.R))

        def on_end(self, result):
            self.seen.append(result)

    class Loses(Remembers):
        def observe(self, x, t, y):
            super().observe(x, t, y)
            return torch.tensor(len(self.calls))

    class OnlyEnds:
        def on_end(self, result):
            self.result = result

    one, other, learner = Follows(), OnlyEnds(), Loses()
    result = gm.run(learner, continuum[:2], callbacks=[one, other])
    loss = [torch.tensor(n) for n in (3, 4, 5, 8, 9, 10)]
    assert one.seen == [
        *zip([10, 20, 25], loss[:3], strict=True),
        1,
        *zip([35, 45, 50], loss[3:], strict=True),
        2,
        result,
    ]
    assert other.result is result


def test_what_is_no_callback_is_named(continuum):
    with pytest.raises(TypeError, match=r"needs one of on_resume, on_batch, .*, got <function"):
        gm.run(Remembers(), continuum, callbacks=[lambda progress: None])


def test_progress_has_the_learner(continuum):
    seen, learner = [], Remembers()
    gm.run(learner, continuum, on_progress=seen.append)
    assert all(progress.learner is learner for progress in seen)


# What is looked at


def test_data_are_looked_at_once(continuum, monkeypatch):
    learner = gm.Single(gm.mlp([1, 4, 3]))
    looks = []
    check = type(learner).check
    monkeypatch.setattr(learner, "check", lambda *args: (looks.append(args), check(learner, *args)))
    gm.run(learner, continuum)
    assert len(looks) == 3  # a task's training set each, and no batch of it


def test_a_batch_of_one_is_refused_before_the_run():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    x, y = torch.randn(11, 4), torch.arange(11) % 3
    learner = gm.Single(network)
    with pytest.raises(ValueError, match="x must have more than one example for this network"):
        gm.run(learner, gm.Continuum([gm.Task(0, (x, y), (x, y))], batch_size=10))
    assert learner.steps == 0


def test_what_is_known_of_a_run_is_in_its_config(continuum):
    class Mine(Remembers):
        settings = {"rate": 0.5, "loss": torch.nn.functional.mse_loss, "seed": 4}  # noqa: RUF012

    config = gm.run(Mine(), continuum, every=10).config
    assert config == {
        "benchmark": "continuum",
        "learner": "Mine",
        "settings": {"rate": 0.5, "loss": "mse_loss"},
        "seeds": {"continuum": 0, "learner": 4},
        "n_tasks": 3,
        "examples_per_task": 25,
        "batch_size": 10,
        "epochs": 1,
        "shuffled": False,
        "every": 10,
        "device": "cpu",
    }
    assert gm.run(gm.Single(gm.mlp([1, 4, 3])), continuum).config["learner"] == "single"


def test_a_class_or_something_else_in_place_of_a_learner_is_named(continuum):
    with pytest.raises(TypeError, match=r"got the class GEM, not a learner: gm\.GEM\(network\)"):
        gm.run(gm.GEM, continuum)
    with pytest.raises(TypeError, match=r"not a learner: Remembers\(network\)"):
        gm.run(Remembers, continuum)
    with pytest.raises(TypeError, match="needs observe and predict, got Linear without observe"):
        gm.run(torch.nn.Linear(1, 2), continuum)
