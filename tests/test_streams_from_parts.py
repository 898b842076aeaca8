"""Continuums made from arrays, columns, classes and datasets."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import gradmem as gm
from gradmem.trees import leaves

X, Y = np.arange(24.0).reshape(12, 2), np.arange(12) % 4
DAYS = ["tue"] * 5 + ["mon"] * 4 + ["tue"] * 3


def numbers(examples):
    """Which rows of X there are."""
    return (examples[:][0][:, 0] / 2).int().tolist()


def stream(continuum):
    return [([leaf.tolist() for leaf in leaves((x, y))], t) for x, t, y in continuum]


# Arrays


def test_tasks_come_in_the_order_of_their_first_examples_or_sorted():
    continuum = gm.Continuum.from_arrays(X, Y, DAYS, test=(X[:6], Y[:6], DAYS[:6]), batch_size=4)
    assert [task.t for task in continuum.tasks] == ["tue", "mon"]
    assert [numbers(task.train) for task in continuum.tasks] == [
        [0, 1, 2, 3, 4, 9, 10, 11],
        [5, 6, 7, 8],
    ]
    assert [numbers(test) for test in continuum.tests.values()] == [[0, 1, 2, 3, 4], [5]]
    assert continuum.batch_size == 4
    ordered = gm.Continuum.from_arrays(X, Y, DAYS, test=0.2, sort=True)
    assert [task.t for task in ordered.tasks] == ["mon", "tue"]


@pytest.mark.parametrize("as_t", [list, np.array, torch.tensor])
def test_descriptors_are_plain_values_whatever_holds_them(as_t):
    t = as_t([3, 3, 1, 1] * 3)
    continuum = gm.Continuum.from_arrays(X, Y, t, test=0.5)
    assert [(task.t, type(task.t)) for task in continuum.tasks] == [(3, int), (1, int)]


def test_arrays_become_tensors_and_float64_the_default_dtype():
    x = {"a": X, "b": X.astype(np.uint8), "c": torch.from_numpy(X)}
    continuum = gm.Continuum.from_arrays(x, Y.astype(np.int16), DAYS, test=0.5)
    batch, _, y = next(iter(continuum))
    assert [leaf.dtype for leaf in batch.values()] == [torch.float32, torch.uint8, torch.float64]
    assert y.dtype == torch.int64
    x, _, _ = next(iter(gm.Continuum.from_arrays(X.astype(np.uint8), Y, DAYS, 0.5, divisor=2)))
    assert x.dtype == torch.float32
    assert x.max() <= 12


def test_read_only_and_reversed_arrays_are_taken():
    fixed = X.copy()
    fixed.flags.writeable = False
    task = gm.Task("a", (fixed, Y[::-1]))
    assert numbers(task.train) == [*range(12)]
    assert task.train.y.tolist() == Y[::-1].tolist()


def test_a_fraction_of_each_task_tests_it_and_is_not_trained_on():
    def make(seed):
        return gm.Continuum.from_arrays(X, Y, DAYS, test=0.25, seed=seed)

    continuum = make(0)
    for t, n in (("tue", 2), ("mon", 1)):
        (train,) = (numbers(task.train) for task in continuum.tasks if task.t == t)
        test = numbers(continuum.tests[t])
        assert len(test) == n
        assert sorted(train + test) == [i for i in range(12) if DAYS[i] == t]
    assert stream(make(1)) == stream(make(1)) != stream(continuum)


class Column:
    """What is used of a pandas column."""

    def __init__(self, values, name):
        self.values, self.name = values, name

    def tolist(self):
        return [*self.values]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def test_one_task_per_value_of_a_column_sorted():
    years = [2021, 2019] * 6
    continuum = gm.Continuum.split_by(years, X, Y, test=(years, X, Y), name="year")
    assert continuum.labels() == ["year 2019", "year 2021"]
    assert numbers(continuum.tests[2019]) == numbers(continuum.tasks[0].train) == [*range(1, 12, 2)]
    named = gm.Continuum.split_by(Column(years, "season"), X, Column(Y, "y"), test=0.5)
    assert named.labels() == ["season 2019", "season 2021"]
    assert gm.Continuum.split_by(years, X, Y, test=0.5).labels() == ["task 2019", "task 2021"]


# Classes


def test_each_task_brings_classes_of_its_own():
    continuum = gm.Continuum.split_by_class(X, Y, 2, test=(X[:8], Y[:8]), batch_size=3, seed=5)
    assert continuum.outputs == {0: (0, 1), 1: (2, 3)}
    assert continuum.labels() == ["classes 0–1", "classes 2–3"]
    assert numbers(continuum.tasks[1].train) == [2, 3, 6, 7, 10, 11]
    assert numbers(continuum.tests[0]) == [0, 1, 4, 5]
    assert (continuum.batch_size, continuum.seed) == (3, 5)
    shared = gm.Continuum.split_by_class(X, Y, classes=2, test=(X, Y), own_outputs=False)
    assert shared.outputs == {}
    assert [numbers(task.train) for task in shared.tasks] == [
        numbers(task.train) for task in continuum.tasks
    ]


def test_classes_may_be_chosen_and_left_out():
    continuum = gm.Continuum.split_by_class(X, Y, classes=[[3, 0], [2]], test=0.5)
    assert continuum.outputs == {0: (0, 3), 1: (2,)}
    assert continuum.labels() == ["classes 0, 3", "class 2"]
    assert continuum.n_examples == 3 + 1


# Datasets


class Pairs(Dataset):
    """Items with a dict of inputs and a tuple of targets."""

    def __init__(self, start, n=30):
        self.start, self.n = start, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        value = self.start + i
        return {"a": torch.tensor([value]), "b": np.float32(value)}, (value, torch.rand(()) * 0)

    def all(self):
        """The same in memory."""
        values = torch.arange(self.start, self.start + self.n)
        return {"a": values[:, None], "b": values.float()}, (values, torch.zeros(self.n))


def both(**options):
    """The same tasks in memory and as datasets; the first comes back."""
    parts = {"p": (Pairs(0), Pairs(1000, 5)), "q": (Pairs(100, 17), Pairs(2000, 4))}
    order = ["p", "q", "p"]
    made = {t: [gm.Examples(*part.all()) for part in parts[t]] for t in parts}
    in_memory = gm.Continuum([gm.Task(t, *made[t]) for t in order], batch_size=4, epochs=2, seed=7)
    read = gm.Continuum.from_datasets(
        [(t, *parts[t]) for t in order], batch_size=4, epochs=2, seed=7, **options
    )
    return in_memory, read


@pytest.mark.parametrize(
    "change",
    [
        lambda continuum: continuum,
        lambda continuum: continuum[1:],
        lambda continuum: continuum[2] + continuum[1],
        lambda continuum: continuum.shuffled(),
        lambda continuum: continuum.held_out(0.3),
        lambda continuum: continuum[::-1].held_out(0.3).shuffled().to("cpu"),
    ],
    ids=["whole", "slice", "sum", "shuffled", "held out", "all of it"],
)
def test_datasets_give_the_stream_of_the_same_data_in_memory(change):
    in_memory, read = map(change, both())
    assert stream(in_memory) == stream(read)
    assert repr(in_memory) == repr(read)
    assert len(read) == len(stream(read))
    assert list(in_memory.tests) == list(read.tests)
    for one, other in zip(in_memory.tests.values(), read.tests.values(), strict=True):
        assert str(one[:]) == str(other[:])
    assert {type(test) for test in read.tests.values()} == {gm.DatasetExamples}


def test_worker_processes_change_nothing():
    in_memory, read = both(num_workers=2)
    assert stream(in_memory[:2]) == stream(read[:2])
    one, other = (
        [str(batch) for batch in each.tests["p"].batches(2)] for each in (in_memory, read)
    )
    assert one == other


def test_a_dict_of_datasets_with_tests_or_a_fraction_for_them():
    data = {t: TensorDataset(torch.rand(8, 2), torch.tensor([t, 3] * 4)) for t in (0, 1)}
    classes = {0: [0, 3]}
    continuum = gm.Continuum.from_datasets(data, test=0.25, classes=classes)
    assert [(len(task.train), len(continuum.tests[task.t])) for task in continuum.tasks] == [
        (6, 2),
        (6, 2),
    ]
    assert continuum.outputs == {0: (0, 3)}
    tested = gm.Continuum.from_datasets({0: (data[0], data[1])})
    assert tested.tests[0].dataset is data[1]


def test_a_learner_learns_from_datasets():
    x = torch.randn(40, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    read = gm.Continuum.from_datasets({"a": (data, data), "b": (data, data)})
    pair = gm.Examples(*data.tensors)
    in_memory = gm.Continuum([gm.Task("a", pair, pair), gm.Task("b", pair, pair)])
    results = [gm.run(gm.GEM(gm.mlp([4, 8, 2]), memories=5), each) for each in (read, in_memory)]
    assert np.array_equal(results[0].R, results[1].R)


# What cannot be

DATA = TensorDataset(torch.rand(8, 2), torch.zeros(8).long())


@pytest.mark.parametrize(
    ("name", "arguments", "options", "error", "message"),
    [
        ("from_arrays", (X, Y, DAYS[1:], 0.5), {}, ValueError, "per example, got 11 for 12"),
        ("from_arrays", (X, Y, DAYS, (X, Y)), {}, TypeError, "test must be .* got 2 parts"),
        (
            "from_arrays",
            (X, Y, DAYS, (X, Y, ["wed"] * 12)),
            {},
            ValueError,
            "as 'tue', 'mon' do; got 'wed'",
        ),
        ("from_arrays", (X, Y, DAYS, 1.5), {}, ValueError, "test must be below 1, got 1.5"),
        ("from_arrays", (X, Y, [None] * 12, 0.5), {}, TypeError, "descriptor, got None"),
        ("from_arrays", (X, Y[:3], DAYS, 0.5), {}, ValueError, "as many examples, got 12 and 3"),
        ("from_arrays", (np.array(DAYS), Y, DAYS, 0.5), {}, TypeError, "x must hold numbers, .*U3"),
        ("from_arrays", (X, Y, DAYS, 0.5), {"size": 1}, TypeError, "'size'"),
        ("from_arrays", (X, Y, DAYS, 0.5), {"seed": -1}, ValueError, "seed must be at least 0"),
        ("split_by", (Y[1:], X, Y, 0.5), {}, ValueError, "per example, got 11 for 12"),
        ("split_by_class", (X, Y), {"test": 0.5}, ValueError, "either n_tasks or classes, got n_t"),
        ("split_by_class", (X, Y, 3), {"test": 0.5}, ValueError, "divide the 4 classes, got 3"),
        ("split_by_class", (X, X, 3), {"test": 0.5}, TypeError, "y must hold one class id per"),
        ("split_by_class", (X, Y, 2), {"test": (X,)}, TypeError, "got 1 parts"),
        (
            "split_by_class",
            (X, Y, 2),
            {"test": (X, Y * 0)},
            ValueError,
            "test examples of every task, got none of classes 2–3",
        ),
        (
            "split_by_class",
            (X, Y),
            {"test": 0.5, "classes": [[0], [9]]},
            ValueError,
            "training examples of every task, got none of class 9",
        ),
        ("from_datasets", ([DATA],), {}, TypeError, r"hold \(t, train\) or \(t, train, test\)"),
        ("from_datasets", ({0: DATA},), {}, ValueError, "needs a test set, got none"),
        ("from_datasets", ({0: (DATA, DATA)},), {"test": 0.5}, ValueError, "left out .* got 0.5"),
        (
            "from_datasets",
            ({0: (DATA, DATA)},),
            {"classes": {1: [0]}},
            ValueError,
            r"those of tasks \(0\), got 1",
        ),
    ],
)
def test_what_is_wrong_is_named(name, arguments, options, error, message):
    with pytest.raises(error, match=message):
        getattr(gm.Continuum, name)(*arguments, **options)
