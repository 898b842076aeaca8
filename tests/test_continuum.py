"""The continuum as a stream, and the two MNIST benchmarks."""

import numpy as np
import pytest
import torch
from PIL import Image

import gradmem as gm

ROTATIONS = {"n_tasks": 4, "examples_per_task": 25, "data": "sample"}


def task(t, n=25, offset=0):
    x = torch.arange(offset, offset + n).float()[:, None]
    y = torch.arange(n) % 3
    return gm.Task(t, (x, y), (x, y))


def stream(continuum):
    return [(x.tolist(), t, y.tolist()) for x, t, y in continuum]


def test_a_stream_of_mini_batches_with_a_last_short_one():
    continuum = gm.Continuum([task("a"), task("b", 31)], batch_size=10)
    assert [(t, len(y)) for x, t, y in continuum] == (
        [("a", 10), ("a", 10), ("a", 5)] + [("b", 10)] * 3 + [("b", 1)]
    )
    assert len(continuum) == 7 == len(list(continuum))
    assert continuum.n_examples == 56
    assert continuum.n_tasks == 2


def test_every_example_comes_once_per_epoch_in_another_order():
    continuum = gm.Continuum([task("a")], batch_size=10, epochs=2)
    values = torch.cat([x[:, 0] for x, _, _ in continuum]).tolist()
    assert sorted(values[:25]) == sorted(values[25:]) == list(range(25))
    assert values[:25] != values[25:]
    assert len(continuum) == 6


def test_iterating_again_and_building_again_give_the_same_stream():
    def make(seed):
        return gm.Continuum([task("a"), task("b")], seed=seed)

    continuum = make(3)
    assert stream(continuum) == stream(continuum) == stream(make(3))
    assert stream(make(3)) != stream(make(4))


def test_without_shuffling_the_order_is_the_data_s():
    continuum = gm.Continuum([task("a", 12)], batch_size=5, shuffle=False)
    assert torch.cat([x[:, 0] for x, _, _ in continuum]).tolist() == list(range(12))


def test_indexing_and_slicing_by_task_give_the_same_batches():
    continuum = gm.Continuum([task(t) for t in "abcd"])
    whole = stream(continuum)
    assert stream(continuum[1]) == whole[3:6]
    assert stream(continuum[-1]) == whole[9:]
    assert stream(continuum[1:3]) == whole[3:9]
    assert stream(continuum[::-1]) == whole[9:] + whole[6:9] + whole[3:6] + whole[:3]
    assert list(continuum[1:3].tests) == ["b", "c"]
    with pytest.raises(IndexError, match="task 4 of a continuum of 4"):
        continuum[4]
    with pytest.raises(TypeError, match="indexed by a task's position, got 'a'"):
        continuum["a"]
    with pytest.raises(ValueError, match="at least one task"):
        continuum[4:]


def test_tasks_may_come_back():
    a, b = task("a"), task("b")
    continuum = gm.Continuum([a, b, a])
    assert [t for _, t, _ in continuum] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3
    assert list(continuum.tests) == ["a", "b"]
    assert continuum.learned == [0, 1, 0]
    assert stream(continuum[0]) != stream(continuum[2])  # in another order
    joined = continuum[:2] + continuum[0]
    assert [task.t for task in joined.tasks] == ["a", "b", "a"]
    with pytest.raises(ValueError, match="task 'a' comes back with another test set"):
        gm.Continuum([a, task("a")])


def test_joined_continuums_keep_the_tests_they_were_given():
    pair = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    one = gm.Continuum([gm.Task("a", pair)], tests={"a": pair, "z": pair})
    other = gm.Continuum([gm.Task("b", pair)], tests={"b": pair})
    assert list((one + other).tests) == ["a", "z", "b"]
    again = gm.Continuum([gm.Task("a", pair, pair)]) + gm.Continuum([gm.Task("a", pair, pair)])
    assert list(again.tests) == ["a"]
    with pytest.raises(ValueError, match="agree in batch_size, epochs and shuffle"):
        one + gm.Continuum([gm.Task("b", pair, pair)], shuffle=False)


def test_shuffled_mixes_all_tasks_and_keeps_their_tests():
    continuum = gm.Continuum([task(t, 50, 100 * t) for t in range(3)], seed=1)
    mixed = continuum.shuffled()
    assert {t for _, t, _ in mixed} == {"iid"}
    values = torch.cat([x[:, 0] for x, _, _ in mixed])
    assert sorted(values.tolist()) == [100.0 * t + i for t in range(3) for i in range(50)]
    first = values[:10] // 100
    assert len(first.unique()) > 1  # a mini-batch of several tasks
    assert list(mixed.tests) == [0, 1, 2]
    assert mixed.learned == [None]
    assert len(mixed) == 15
    assert stream(mixed[0]) == stream(mixed)
    assert list(mixed[0].tests) == [0, 1, 2]


# Outputs of a task's own


def own(t, *classes, test=True):
    """A task with classes of its own."""
    pair = torch.rand(6, 1), torch.tensor(classes).repeat(6)[:6]
    return gm.Task(t, pair, pair if test else None, classes=classes)


def test_tasks_have_all_outputs_unless_they_have_their_own():
    assert task("a").classes is None
    assert gm.Continuum([task("a")]).outputs == {}
    assert own("a", 4, 2).classes == (2, 4)
    assert own("a", np.int64(4)).classes == (4,)
    mixed = gm.Continuum([own("a", 4, 2), task("b"), own("c", 7)])
    assert mixed.outputs == {"a": (2, 4), "c": (7,)}


@pytest.fixture
def elsewhere(monkeypatch):
    """A device that data is copied to, on a machine that has no other."""

    def copied(examples, device):
        return gm.Examples(examples.x.clone(), examples.y.clone(), examples.divisor)

    monkeypatch.setattr(gm.Examples, "to", copied)
    return "elsewhere"


def test_outputs_stay_with_their_tasks(elsewhere):
    continuum = gm.Continuum([own("a", 0, 1), own("b", 2, 3), own("c", 4)])
    assert continuum[1].outputs == {"b": (2, 3)}
    assert continuum[1:].outputs == {"b": (2, 3), "c": (4,)}
    joined = continuum[2] + continuum[:1] + continuum[2]
    assert joined.outputs == {"c": (4,), "a": (0, 1)}
    assert [task.classes for task in joined.tasks] == [(4,), (0, 1), (4,)]
    moved = continuum.to(elsewhere)
    assert moved is not continuum
    assert moved.outputs == continuum.outputs
    assert [task.classes for task in moved.tasks] == [(0, 1), (2, 3), (4,)]


def test_a_shuffled_continuum_has_all_outputs_to_learn_and_each_task_s_to_be_tested(elsewhere):
    continuum = gm.Continuum([own("a", 0, 5), own("b", 2, 3)])
    mixed = continuum.shuffled()
    assert mixed.tasks[0].classes == (0, 2, 3, 5)
    assert mixed.outputs == {"iid": (0, 2, 3, 5), "a": (0, 5), "b": (2, 3)}
    assert mixed[0].outputs == mixed[:].outputs == mixed.to(elsewhere).outputs == mixed.outputs
    assert mixed.shuffled().outputs == mixed.outputs
    # with a task that has all outputs, so has the mixture
    mixed = gm.Continuum([own("a", 0, 5), task("b")]).shuffled()
    assert mixed.tasks[0].classes is None
    assert mixed.outputs == {"a": (0, 5)}


def test_a_task_that_comes_back_has_the_same_outputs():
    a = own("a", 0, 1)
    assert gm.Continuum([a, own("b", 2), a]).outputs == {"a": (0, 1), "b": (2,)}
    for other in (own("a", 0, 1, 2, test=False), task("a")):
        with pytest.raises(ValueError, match="task 'a' comes back with other"):
            gm.Continuum([a, gm.Task("a", other.train, classes=other.classes)])


def test_outputs_of_tests_without_a_task_may_be_given():
    tests = {"a": own("a", 3).test, "b": own("b", 1).test}
    continuum = gm.Continuum([own("a", 3, 4)], tests=tests, outputs={"b": [2, 1]})
    assert continuum.outputs == {"a": (3, 4), "b": (1, 2)}
    with pytest.raises(ValueError, match=r"test labels of task 'b' .* classes \[2\], got \[1\]"):
        gm.Continuum([own("a", 3, 4)], tests=tests, outputs={"b": [2]})
    with pytest.raises(ValueError, match=r"outputs of task 'a' must be .* \(3, 4\), got \(3,\)"):
        gm.Continuum([own("a", 3, 4)], tests=tests, outputs={"a": [3]})


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        ([], ValueError, "classes of task 7 must be at least one, got none"),
        ([0, 1, 2, -3], ValueError, "classes of task 7 must be at least 0, got -3"),
        ([0, 1, 2, 1], ValueError, "classes of task 7 must be different, got 1 twice"),
        ([0, 1.0, 2], TypeError, "classes of task 7 must be a whole number, got 1.0"),
        ("012", TypeError, "classes of task 7 must be a list of class ids, got '012'"),
        (3, TypeError, "classes of task 7 must be a list of class ids, got 3"),
        ([0, 2], ValueError, r"train labels of task 7 must be among its classes .* got \[1\]"),
    ],
)
def test_classes_that_cannot_be_are_refused(classes, error, message):
    good = task(7)
    with pytest.raises(error, match=message):
        gm.Task(7, good.train, good.test, classes=classes)


def test_test_labels_must_be_among_the_classes_too():
    x = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"test labels of task 7 .* got \[5\]"):
        gm.Task(7, (x, torch.tensor([0, 1])), (x, torch.tensor([0, 5])), classes=[0, 1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gm.Continuum([]), ValueError, "at least one task"),
        (lambda: gm.Continuum(["a"]), TypeError, "tasks must hold Task objects, got 'a'"),
        (lambda: gm.Continuum([task(0)], batch_size=0), ValueError, "batch_size must be at least"),
        (lambda: gm.Continuum([task(0)], epochs=1.5), TypeError, "epochs must be a whole number"),
        (lambda: gm.Continuum([task(0)], seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda: task([1]), TypeError, r"t must be hashable .* got \[1\]"),
        (lambda: gm.Examples(torch.ones(3), torch.ones(2).long()), ValueError, "got 3 and 2"),
        (lambda: gm.Examples(torch.ones(0), torch.ones(0).long()), ValueError, r"n ≥ 1, .*\(0,\)"),
        (lambda: gm.Examples([1], torch.ones(1)), TypeError, "x must be a tensor, .* got int in"),
        (lambda: gm.Task(0, torch.ones(2)), TypeError, r"train must be .* \(x, y\), got Tensor"),
        (lambda: gm.mnist_rotations(0, data="sample"), ValueError, "n_tasks must be at least 1"),
        (lambda: gm.mnist_rotations(2, 4001, data="sample"), ValueError, "at most the 4000"),
        (lambda: gm.mnist_rotations(order="up", data="sample"), ValueError, "got 'up'"),
        (lambda: gm.mnist_rotations(2, order=[0, 2], data="sample"), ValueError, r"got \[2\]"),
        (lambda: gm.mnist_rotations(data="no such folder"), gm.DataError, "no such folder"),
    ],
)
def test_what_is_wrong_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("benchmark", [gm.mnist_rotations, gm.mnist_permutations])
def test_a_benchmark_is_what_its_seed_says(benchmark):
    one, again, other = (benchmark(**ROTATIONS, seed=seed) for seed in (1, 1, 2))
    assert stream(one) == stream(again)
    assert stream(one) != stream(other)
    for t, test in one.tests.items():
        assert torch.equal(test.x, again.tests[t].x)
        assert not torch.equal(test.x, other.tests[t].x)
    x, _, _ = next(iter(one))
    assert x.shape == (10, 784)
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1
    assert one.tests[0].x.dtype == torch.uint8  # a byte a pixel until it is used


@pytest.mark.parametrize("benchmark", [gm.mnist_rotations, gm.mnist_permutations])
def test_the_order_of_tasks_changes_no_task(benchmark):
    plain = benchmark(**ROTATIONS)
    turned = benchmark(**ROTATIONS, order=[2, 0, 2])
    assert [task.t for task in turned.tasks] == [2, 0, 2]
    assert torch.equal(turned.tasks[0].train.x, plain.tasks[2].train.x)
    assert torch.equal(turned.tests[0].x, plain.tests[0].x)
    # a task that comes back brings other examples
    assert not torch.equal(turned.tasks[2].train.x, turned.tasks[0].train.x)
    shuffled = benchmark(**ROTATIONS, order="random", seed=3)
    assert sorted(task.t for task in shuffled.tasks) == [0, 1, 2, 3]


def test_examples_are_drawn_without_replacement_and_differently_for_each_task():
    images = gm.Images(
        torch.arange(40, dtype=torch.uint8)[:, None, None].expand(40, 28, 28),
        torch.arange(40),
        torch.zeros(2, 28, 28, dtype=torch.uint8),
        torch.arange(2),
    )
    continuum = gm.mnist_permutations(n_tasks=3, examples_per_task=30, data=images)
    drawn = [task.train.y.tolist() for task in continuum.tasks]
    assert all(len(set(one)) == 30 for one in drawn)
    assert len({tuple(sorted(one)) for one in drawn}) == 3
    for one in continuum.tasks:
        assert one.train.x[:, 0].tolist() == one.train.y.tolist()  # image and label stay together


def test_rotations_are_those_of_an_image_library():
    continuum = gm.mnist_rotations(n_tasks=5, examples_per_task=5, data="sample", seed=7)
    images = gm.data.load_mnist("sample").test_x
    for k, one in enumerate(continuum.tasks):
        angle = float(one.label.rstrip("°"))
        assert 36 * k <= angle <= 36 * (k + 1)
        exact = np.random.default_rng([7, 0, k]).random()
        for i in range(20):
            image = Image.fromarray(images[i].numpy())
            turned = np.array(image.rotate((k + exact) * 36, resample=Image.Resampling.NEAREST))
            assert np.array_equal(one.test.x[i].reshape(28, 28).numpy(), turned)


def test_permutations_move_every_pixel_of_every_image_alike():
    continuum = gm.mnist_permutations(n_tasks=2, examples_per_task=5, data="sample")
    plain = gm.data.load_mnist("sample").test_x.flatten(1)
    for one in continuum.tasks:
        assert torch.equal(one.test.x.sort(1).values, plain.sort(1).values)
        assert not torch.equal(one.test.x, plain)
    first, second = (one.test.x for one in continuum.tasks)
    assert not torch.equal(first, second)


def test_a_task_that_comes_back_with_the_same_examples_is_not_trained_on_its_tests():
    x = torch.arange(40.0)[:, None]
    y = torch.zeros(40, dtype=torch.long)
    once = gm.Continuum([gm.Task("a", (x, y), (x, y)), gm.Task("b", (x, y), (x, y))])
    held = (once + once[0]).held_out(0.25)
    tests = {*held.tests["a"].x.flatten().tolist()}
    assert len(tests) == len(held.tests["a"]) == 10
    for task in held.tasks:
        if task.t == "a":
            assert not tests & {*task.train.x.flatten().tolist()}
            assert len(task.train) == 30
