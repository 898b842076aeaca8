"""Examples in memory and of datasets: any structure, any targets, the same answers."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import gradmem as gm
from gradmem.trees import leaves

N = 23


def plain():
    """An input tensor and class ids."""
    return torch.arange(2.0 * N).reshape(N, 2), torch.arange(N) % 3


def nested():
    """Two kinds of inputs, two kinds of targets."""
    ids = torch.arange(N)
    x = {"words": ids[:, None].expand(N, 4), "sizes": (ids.float(), ids > 5)}
    return x, {"box": torch.rand(N, 2), "kind": ids % 2}


class Items(Dataset):
    """Reads items one by one and counts them."""

    def __init__(self, x, y):
        self.examples, self.read = gm.Examples(x, y), 0

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        self.read += 1
        return self.examples[i]


def equal(one, other):
    """Whether two trees have the same structure, dtypes and values."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return type(one) is type(other) and all(equal(*pair) for pair in zip(one, other, strict=True))


def kinds(make):
    """The same examples in memory and read from a dataset."""
    x, y = make()
    return gm.Examples(x, y), gm.DatasetExamples(Items(x, y))


@pytest.mark.parametrize("make", [plain, nested])
@pytest.mark.parametrize(
    "which",
    [
        slice(None),
        slice(3, 9, 2),
        torch.tensor([7, 0, 7]),
        torch.arange(N) % 4 == 1,
        [2, 1],
        5,
    ],
    ids=["all", "slice", "positions", "mask", "list", "one"],
)
def test_a_dataset_gives_the_same_examples_as_memory(make, which):
    in_memory, read = kinds(make)
    x, _ = make()
    assert len(in_memory) == len(read) == N
    if isinstance(which, int):
        assert leaves(read[which][0])[0].shape == leaves(x)[0].shape[1:]
    assert equal(in_memory[which], read[which])


@pytest.mark.parametrize("make", [plain, nested])
@pytest.mark.parametrize("shuffle", [False, True])
def test_both_go_through_their_examples_in_the_same_order(make, shuffle):
    in_memory, read = kinds(make)
    batches = [*in_memory.batches(5, shuffle, [3, 1])]
    assert equal(batches, [*read.batches(5, shuffle, [3, 1])])
    assert [len(leaves(y)[0]) for _, y in batches] == [5, 5, 5, 5, 3]
    other = [*in_memory.batches(5, shuffle, [3, 2])]
    assert equal(batches, other) is not shuffle


def test_more_batches_than_are_fetched_at_once():
    x = torch.arange(1000)
    examples = gm.Examples(x, x)
    batches = [x for x, _ in examples.batches(3, shuffle=True)]
    assert [len(one) for one in batches] == [3] * 333 + [1]
    assert sorted(torch.cat(batches).tolist()) == x.tolist()


@pytest.mark.parametrize("make", [plain, nested])
def test_parts_and_joined_parts(make):
    for examples in kinds(make):
        first, second = examples.part(torch.tensor([4, 2])), examples.part(torch.tensor([9]))
        joined = first.joined(second, first)
        assert type(joined) is type(examples)
        assert equal(joined[:], examples[[4, 2, 9, 4, 2]])


def test_the_same_data_is_recognised():
    x, y = nested()
    dataset = Items(x, y)
    assert gm.Examples(x, y).is_same(gm.Examples({**x}, y))
    assert not gm.Examples(x, y).is_same(gm.Examples(x, torch.zeros(N)))
    assert gm.DatasetExamples(dataset).is_same(gm.DatasetExamples(dataset))
    assert not gm.DatasetExamples(dataset).is_same(gm.DatasetExamples(Items(x, y)))
    assert not gm.DatasetExamples(dataset).is_same(gm.Examples(x, y))


@pytest.mark.parametrize("make", [plain, nested])
def test_examples_know_their_device_and_move(make):
    for examples in kinds(make):
        assert examples.device == torch.device("cpu")
        assert examples.to("cpu") is examples
        moved = examples.to("meta")
        assert moved.device == torch.device("meta")
        assert {leaf.device.type for leaf in leaves(moved[:])} == {"meta"}
        assert all(leaf.is_meta for batch in moved.batches(10) for leaf in leaves(batch))
        part = moved.part(torch.tensor([1]))
        assert part.device == part.joined(part).device == torch.device("meta")


@pytest.mark.parametrize(
    ("y", "dtype"),
    [
        (torch.arange(4, dtype=torch.uint8), torch.int64),
        (torch.arange(4, dtype=torch.int32), torch.int64),
        (torch.rand(4), torch.float32),
        (torch.rand(4, 2, dtype=torch.float64), torch.float64),
        (torch.rand(4) > 0.5, torch.bool),
        (torch.ones(4, 6, dtype=torch.uint8), torch.uint8),
    ],
)
def test_class_ids_are_served_as_int64_and_other_targets_as_stored(y, dtype):
    for examples in (gm.Examples(y, y), gm.DatasetExamples([*zip(y, y, strict=True)])):
        _, served = examples[1:]
        assert served.dtype == dtype
        assert torch.equal(served, y[1:].to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_dataset_arrive_on_the_gpu(num_workers):
    x, y = nested()
    read = gm.DatasetExamples(Items(x, y), num_workers=num_workers).to("cuda")
    in_memory = gm.Examples(x, y).to("cuda")
    assert equal([*in_memory.batches(5, True)], [*read.batches(5, True)])
    assert equal(in_memory[3:], read[3:])
    assert {leaf.device.type for leaf in leaves([*read.batches(5)])} == {"cuda"}


def test_one_batch_of_everything_is_read_by_this_process():
    dataset = Items(*plain())
    examples = gm.DatasetExamples(dataset, num_workers=1)
    assert equal([*examples.batches(N)], [examples[:]])
    assert dataset.read == 2 * N


def test_reading_a_batch_reads_no_more():
    dataset = Items(*plain())
    examples = gm.DatasetExamples(dataset)
    continuum = gm.Continuum([gm.Task("a", examples, examples)], batch_size=4)
    chosen_on = continuum.held_out(0.2)
    assert dataset.read == 0
    next(iter(continuum))
    assert dataset.read == 4
    next(iter(chosen_on.tests["a"].batches(3)))
    assert dataset.read == 7


def test_pytorch_s_own_generator_is_not_touched():
    before = torch.get_rng_state()
    [*gm.DatasetExamples(Items(*plain())).batches(4, shuffle=True)]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_collate_function_of_one_s_own():
    def padded(items):
        x, y = zip(*items, strict=True)
        return torch.nn.utils.rnn.pad_sequence([*x], batch_first=True), torch.stack(y)

    items = [(torch.ones(n), torch.tensor(n)) for n in (1, 3, 2)]
    examples = gm.DatasetExamples(items, collate_fn=padded)
    assert examples[:][0].tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert [x.shape[1] for x, _ in examples.batches(2)] == [3, 2]


class Endless(IterableDataset):
    def __iter__(self):
        yield from []


PLAIN = plain()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gm.Examples(*nested(), divisor=255), TypeError, "one tensor, got dict"),
        (lambda: gm.Examples(*plain(), divisor=0), ValueError, "divisor must be above 0, got 0"),
        (lambda: gm.Examples({}, torch.ones(2)), TypeError, r"x must hold .* got \{\}"),
        (
            lambda: gm.Examples(PLAIN[0].to("meta"), PLAIN[1]),
            ValueError,
            "x and y must be on one device, got meta and cpu",
        ),
        (
            lambda: gm.Examples(*PLAIN).joined(gm.Examples(*PLAIN, divisor=2)),
            ValueError,
            "agree in their divisor to be joined, got None and 2",
        ),
        (
            lambda: gm.Examples(*PLAIN).joined(gm.Examples(*nested())),
            ValueError,
            "agree in structure, shapes",
        ),
        (
            lambda: gm.Examples(*PLAIN).joined(gm.DatasetExamples(Items(*PLAIN))),
            TypeError,
            "in memory cannot be joined with DatasetExamples",
        ),
        (
            lambda: gm.DatasetExamples(Items(*PLAIN)).joined(gm.Examples(*PLAIN)),
            TypeError,
            "a dataset cannot be joined with Examples in memory",
        ),
        (lambda: gm.DatasetExamples(Endless()), TypeError, "must be map-style, .* got Endless"),
        (lambda: gm.DatasetExamples(7), TypeError, "must be map-style, .* got int"),
        (lambda: gm.DatasetExamples([]), ValueError, r"at least one example, got \[\]"),
        (lambda: gm.DatasetExamples([1], shuffle=True), TypeError, "shuffle: decided by the cont"),
        (lambda: gm.DatasetExamples([1], workers=1), TypeError, "unexpected .* 'workers'"),
        (lambda: gm.DatasetExamples([1, 2])[:], TypeError, r"of list must be pairs \(x, y\), got"),
        (lambda: gm.DatasetExamples([(1, "a")])[:], TypeError, "y must be a tensor, .* got str"),
    ],
)
def test_what_is_wrong_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
