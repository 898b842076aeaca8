"""Incremental CIFAR-100 as a continuum, on small stand-ins."""

import re

import numpy as np
import pytest
import torch

import gradmem as gm
from gradmem.data import load_cifar100
from tests.cifar import batch, contents, meta, python2_pickle, write_cifar

N_TRAIN, N_TEST = 600, 200  # 6 and 2 of each class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_cifar(tmp_path_factory.mktemp("cifar"), contents(N_TRAIN, N_TEST))


def stream(continuum):
    return [(x.tolist(), t, y.tolist()) for x, t, y in continuum]


def pixels(x):
    """Images as a set, to be compared in any order."""
    return {image.numpy().tobytes() for image in x}


@pytest.mark.parametrize("n_tasks", [1, 2, 4, 5, 10, 20, 25, 50, 100])
def test_classes_come_a_few_at_a_time(folder, n_tasks):
    continuum = gm.cifar100_incremental(n_tasks, data=folder)
    size = 100 // n_tasks
    assert continuum.outputs == {k: tuple(range(k * size, (k + 1) * size)) for k in range(n_tasks)}
    assert continuum.n_examples == N_TRAIN
    for k, task in enumerate(continuum.tasks):
        assert task.t == k
        assert task.train.y.unique().tolist() == task.test.y.unique().tolist() == [*task.classes]
        assert len(task.test) == N_TEST // n_tasks


def test_images_stay_with_their_labels(folder):
    """Although they are put in order in place: compare with the files as they are."""
    images = load_cifar100(folder)
    continuum = gm.cifar100_incremental(data=folder)
    for task in continuum.tasks:
        for part, x, y in (
            (task.train, images.train_x, images.train_y),
            (task.test, images.test_x, images.test_y),
        ):
            assert part.x.dtype == torch.uint8
            for c in task.classes:
                assert torch.equal(part.x[part.y == c], x[y == c])


def test_pixels_are_served_as_floats_from_0_to_1(folder):
    x, t, y = next(iter(gm.cifar100_incremental(data=folder)))
    assert x.shape == (10, 3, 32, 32)
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1
    assert t == 0
    assert y.dtype == torch.int64


def test_each_image_is_held_once(folder):
    continuum = gm.cifar100_incremental(data=folder, order=[3, 1, *range(20)])
    storages = [task.train.x.untyped_storage() for task in continuum.tasks]
    assert sum({one.data_ptr(): one.nbytes() for one in storages}.values()) == N_TRAIN * 3072
    assert continuum.tasks[0].train is continuum.tasks[5].train  # task 3, come back


def test_images_that_were_passed_are_left_as_they_are(folder):
    images = load_cifar100(folder)
    before = images.train_x.clone(), images.test_x.clone()
    passed = gm.cifar100_incremental(data=images, seed=2)
    assert torch.equal(images.train_x, before[0])
    assert torch.equal(images.test_x, before[1])
    assert stream(passed) == stream(gm.cifar100_incremental(data=folder, seed=2))


def test_the_seed_makes_the_stream(folder):
    one, again, other = (gm.cifar100_incremental(data=folder, seed=seed) for seed in (1, 1, 2))
    assert stream(one) == stream(again) != stream(other)
    assert one.outputs == other.outputs  # classes are in order


def test_classes_may_be_shuffled_by_the_seed(folder):
    def make(seed):
        return gm.cifar100_incremental(data=folder, classes="shuffled", seed=seed)

    one = make(1)
    assert one.outputs == make(1).outputs != make(2).outputs
    assert sorted(c for classes in one.outputs.values() for c in classes) == list(range(100))
    assert one.outputs[0] != (0, 1, 2, 3, 4)
    assert one.labels()[0] == f"classes {', '.join(map(str, one.outputs[0]))}"


def test_superclasses_may_be_tasks(folder):
    """In the stand-in, class c is in superclass c % 20."""
    continuum = gm.cifar100_incremental(data=folder, tasks="coarse")
    assert continuum.outputs[3] == (3, 23, 43, 63, 83)
    assert continuum.labels()[3] == "super class 3"
    assert continuum.tasks[3].train.y.unique().tolist() == [3, 23, 43, 63, 83]
    two = gm.cifar100_incremental(10, data=folder, tasks="coarse")
    assert two.outputs[0] == (0, 1, 20, 21, 40, 41, 60, 61, 80, 81)
    assert two.labels()[0] == "super class 0, super class 1"
    mixed = gm.cifar100_incremental(data=folder, tasks="coarse", classes="shuffled")
    assert {*mixed.outputs.values()} == {*continuum.outputs.values()}
    assert mixed.outputs != continuum.outputs


@pytest.mark.parametrize(
    ("n_tasks", "classes", "label"),
    [
        (20, "in order", "classes 0–4"),
        (100, "in order", "class 0"),
        (1, "shuffled", "classes 0–99"),
        (10, "shuffled", r"classes \d+, \d+, \d+, \d+, \d+, …"),
    ],
)
def test_tasks_have_labels_for_people(folder, n_tasks, classes, label):
    continuum = gm.cifar100_incremental(n_tasks, data=folder, classes=classes)
    assert re.fullmatch(label, continuum.labels()[0])


def test_the_order_of_tasks_changes_no_task(folder):
    plain = gm.cifar100_incremental(data=folder, examples_per_task=10)
    turned = gm.cifar100_incremental(data=folder, examples_per_task=10, order=[7, 0, 7])
    assert [task.t for task in turned.tasks] == [7, 0, 7]
    assert list(turned.tests) == [7, 0]
    assert torch.equal(turned.tasks[0].train.x, plain.tasks[7].train.x)
    assert torch.equal(turned.tests[0].x, plain.tests[0].x)
    # a task that comes back brings other examples, if they are drawn
    assert pixels(turned.tasks[2].train.x) != pixels(turned.tasks[0].train.x)
    shuffled = gm.cifar100_incremental(data=folder, order="random", seed=3)
    assert sorted(shuffled.tests) == list(range(20)) != list(shuffled.tests)


def test_examples_are_drawn_without_replacement_by_the_seed(folder):
    every = gm.cifar100_incremental(data=folder)
    some, again, other = (
        gm.cifar100_incremental(data=folder, examples_per_task=20, seed=seed) for seed in (0, 0, 1)
    )
    for k, task in enumerate(some.tasks):
        assert len(task.train) == len(pixels(task.train.x)) == 20
        assert pixels(task.train.x) < pixels(every.tasks[k].train.x)
        assert pixels(task.train.x) == pixels(again.tasks[k].train.x)
    assert pixels(some.tasks[0].train.x) != pixels(other.tasks[0].train.x)
    assert len(some.tests[0]) == len(every.tests[0])  # tests are whole


def test_shuffled_mixes_all_and_tests_each_by_its_own(folder):
    mixed = gm.cifar100_incremental(data=folder).shuffled()
    assert mixed.outputs["iid"] == tuple(range(100))
    assert mixed.outputs[4] == (20, 21, 22, 23, 24)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n_tasks": 3}, "n_tasks must divide the 100 classes, got 3"),
        ({"n_tasks": 0}, "n_tasks must be at least 1, got 0"),
        ({"n_tasks": 50, "tasks": "coarse"}, "n_tasks must divide the 20 superclasses, got 50"),
        ({"examples_per_task": 31}, "at most the 30 training images of classes 0–4, got 31"),
        ({"examples_per_task": 0}, "examples_per_task must be at least 1, got 0"),
        ({"classes": "random"}, "classes must be one of in order, shuffled; got 'random'"),
        ({"tasks": "super"}, "tasks must be one of fine, coarse; got 'super'"),
        ({"order": [0, 20]}, r"order must hold tasks from 0 to 19, got \[20\]"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_what_is_wrong_is_named(folder, arguments, says):
    with pytest.raises(ValueError, match=says):
        gm.cifar100_incremental(**arguments, data=folder)


def images(y, **changed):
    x = torch.zeros(len(y), 3, 8, 8, dtype=torch.uint8)
    return gm.Images(**{"train_x": x, "train_y": y, "test_x": x, "test_y": y} | changed)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (images(torch.arange(99)), None),
        (images(torch.arange(95)), "training images of every task, got none of classes 95–99"),
        (
            images(
                torch.arange(100), test_x=torch.zeros(1, 3, 8, 8).byte(), test_y=torch.tensor([0])
            ),
            "test images of every task, got none of classes 5–9",
        ),
        (images(torch.arange(101)), "train_y must be from 0 to 99, got 0 to 100"),
        (
            images(
                torch.arange(2),
                train_x=torch.zeros(2, 8, 8).byte(),
                test_x=torch.zeros(2, 8, 8).byte(),
            ),
            r"images must be \(N, 3, 32, 32\), got \(2, 8, 8\)",
        ),
    ],
    ids=["enough", "no training images", "no test images", "labels", "no channels"],
)
def test_images_must_have_something_for_every_task(given, says):
    if says is None:
        assert gm.cifar100_incremental(data=given).n_examples == 99
        return
    with pytest.raises(ValueError, match=says):
        gm.cifar100_incremental(data=given)


def test_superclasses_must_be_known_and_each_class_in_one(tmp_path):
    with pytest.raises(ValueError, match="needs superclasses: pass data as Cifar100"):
        gm.cifar100_incremental(data=images(torch.arange(100)), tasks="coarse")
    train = batch(100)
    train[b"coarse_labels"][7] = 8
    files = contents(train=python2_pickle(train), meta=python2_pickle(meta()))
    with pytest.raises(ValueError, match=r"a class must be in one superclass; in several: \[7\]"):
        gm.cifar100_incremental(data=write_cifar(tmp_path, files), tasks="coarse")


def test_it_has_a_name_and_takes_what_the_other_benchmarks_take(folder):
    by_name = gm.benchmarks.BENCHMARKS["cifar100-incremental"]
    made = by_name.continuum(10, 25, 5, 2, [1, 0], 3, folder)
    assert (made.batch_size, made.epochs, made.seed) == (5, 2, 3)
    assert [task.t for task in made.tasks] == [1, 0]
    assert made.n_examples == 100
    assert np.prod(made.tasks[0].train.x.shape) == 25 * 3072
