"""The episodic memory keeps exactly the last examples of each task."""

import pytest
import torch

import gradmem as gm
from gradmem.memory import EpisodicMemory
from gradmem.memory.policies.first import First
from gradmem.memory.policies.last import Last


def add(memory, t, first, n):
    numbers = torch.arange(first, first + n)
    memory.add(numbers[:, None].float(), t, numbers)


@pytest.mark.parametrize("sizes", [[1] * 11, [10, 1], [3, 3, 3, 2], [4, 7], [11], [2, 9]])
@pytest.mark.parametrize("memories", [1, 3, 4, 10, 11, 20])
def test_the_last_examples_oldest_first_however_they_come(sizes, memories):
    memory = EpisodicMemory(memories)
    start = 0
    for n in sizes:
        add(memory, "a", start, n)
        start += n
        expected = list(range(max(0, start - memories), start))
        x, y = memory["a"]
        assert y.tolist() == expected
        assert x[:, 0].tolist() == expected
        (stack,) = memory.stacks(["a"])
        assert sorted(stack.y[0, : stack.counts[0]].tolist()) == expected


def test_tasks_do_not_mix():
    memory = EpisodicMemory(2)
    for i in range(4):
        add(memory, "a", i, 1)
        add(memory, ("b", 1), 10 + i, 1)
    assert memory["a"][1].tolist() == [2, 3]
    assert memory["b", 1][1].tolist() == [12, 13]
    assert list(memory) == ["a", ("b", 1)]
    with pytest.raises(KeyError):
        memory["c"]


def test_a_budget_is_shared_equally_and_shrinks_to_the_newest():
    memory = EpisodicMemory(budget=12)
    add(memory, 0, 0, 20)
    assert memory[0][1].tolist() == list(range(8, 20))
    add(memory, 1, 100, 20)
    assert memory[0][1].tolist() == list(range(14, 20))
    assert memory[1][1].tolist() == list(range(114, 120))
    for t in (2, 3, 4):
        add(memory, t, 100 * t, 20)
    assert [len(memory[t][1]) for t in range(5)] == [2] * 5
    assert memory[0][1].tolist() == [18, 19]
    add(memory, 0, 50, 1)  # a task that comes back
    assert memory[0][1].tolist() == [19, 50]


def test_more_tasks_than_the_budget_share_their_memories():
    learner = gm.GEM(gm.mlp([4, 8, 3]), budget=3)
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for t in "abcdefg":
        learner.observe(x, t, y)
        assert sum(len(stack.y.flatten()) for stack in learner.memory.others(None)) <= 3
    assert learner.memory.groups == [("a", "b", "c", "d"), ("e", "f"), ("g",)]
    assert learner.constraints.gradients().shape[0] == 3


def test_neighbours_with_the_fewest_tasks_are_joined_and_each_keeps_its_part():
    memory = EpisodicMemory(budget=12, groups=3)
    for t in range(4):
        add(memory, t, 100 * t, 6)
    assert memory.groups == [(0, 1), (2,), (3,)]
    assert memory[0][1].tolist() == memory[1][1].tolist() == [4, 5, 104, 105]
    add(memory, 4, 400, 6)
    assert memory.groups == [(0, 1), (2, 3), (4,)]
    add(memory, 1, 150, 2)  # a task that comes back, in the row that it shares
    assert memory[0][1].tolist() == [104, 105, 150, 151]
    add(memory, 5, 500, 1)  # the newest, (4,), would make the largest row
    assert memory.groups == [(0, 1, 2, 3), (4,), (5,)]
    assert memory[3][1].tolist() == [105, 151, 205, 305]


def test_no_row_becomes_much_larger_than_the_others():
    memory = EpisodicMemory(budget=40, groups=20)
    for t in range(500):
        add(memory, t, t, 2)
    sizes = [len(group) for group in memory.groups]
    assert len(sizes) == 20
    assert max(sizes) <= 3 * 500 / 20
    assert [t for group in memory.groups for t in group] == list(range(500))


def test_a_row_that_is_shared_is_a_constraint_for_each_of_its_tasks():
    memory = EpisodicMemory(2, groups=2)
    for t in range(3):
        add(memory, t, 10 * t, 2)
    assert memory.groups == [(0, 1), (2,)]
    (both,) = memory.others(0)
    assert both.y.tolist() == [[1, 11], [20, 21]]
    (shared,) = memory.others(2)
    assert shared.y.tolist() == [[1, 11]]
    assert [stack.y.tolist() for stack in memory.stacks([0, 1])] == [[[1, 11]]]


def test_what_is_added_to_a_row_that_is_shared_is_found_among_the_others():
    memory = EpisodicMemory(4, groups=1)
    for t in range(2):
        add(memory, t, 10 * t, 1)
        assert memory.groups == [tuple(range(t + 1))]
    for n in (3, 4):
        assert memory.others(1) is memory.others(1)
        add(memory, 1, 20 + n, 1)
        assert memory.others(1)[0].counts == (n,)


def test_a_row_that_is_shared_has_the_outputs_of_all_its_tasks():
    memory = EpisodicMemory(2, groups=2)
    for t in range(4):
        add(memory, t, 10 * t, 2)

    def masks_of(tasks):
        return torch.eye(4)[list(tasks)].bool()

    assert memory.groups == [(0, 1, 2), (3,)]
    (stack,) = memory.others(None, masks_of)
    assert stack.masks.int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    ((_, y, masks),) = memory.sample([0, 3], None, masks_of)
    assert [sum(mask) for mask in masks.tolist()] == [3 if one < 30 else 1 for one in y]


def test_examples_of_different_kinds_share_nothing():
    memory = EpisodicMemory(budget=2)
    add(memory, "a", 0, 2)
    memory.add(torch.zeros(2, 7), "wide", torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"a row for each of 3 kinds of examples.*got 2"):
        memory.add(torch.zeros(2, 8), "wider", torch.zeros(2).long())
    add(memory, "b", 10, 1)
    memory.add(torch.zeros(2, 7), "c", torch.ones(2).long())
    assert memory.groups == [("a", "b"), ("wide", "c")]


def test_memories_that_shrink_stay_where_they_are():
    memory = EpisodicMemory(budget=60)
    places = set()
    for t in range(20):
        add(memory, t, 100 * t, 60)
        places.add(memory.others(None)[0].x.data_ptr())
        assert memory.bytes == 60 * (4 + 8)
    assert len(places) == 1
    assert [memory[t][1].tolist() for t in (0, 19)] == [[57, 58, 59], [1957, 1958, 1959]]


def test_a_memory_holding_examples_leaves_the_first_as_it_was():
    memory = EpisodicMemory(budget=6, keep="first")
    add(memory, "a", 0, 4)
    x, y = memory["a"]
    other = memory.holding({"b": (x[:3], y[:3]), "c": (x, y)})
    assert other["b"][1].tolist() == other["c"][1].tolist() == [0, 1, 2]
    assert memory["a"][1].tolist() == [0, 1, 2, 3]
    assert list(memory.holding({})) == []
    crowd = memory.holding(dict.fromkeys(range(9), (x, y)))
    assert (len(crowd), len(crowd.groups)) == (9, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"pin": True}, 'device="cpu", got None'),
        ({"pin": 1}, "pin must be True or False, got 1"),
    ],
)
def test_limits_that_make_no_sense_are_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        EpisodicMemory(**settings)


def test_what_is_kept_is_a_copy():
    memory = EpisodicMemory(3)
    x, y = torch.ones(2, 1), torch.zeros(2, dtype=torch.long)
    memory.add(x, "a", y)
    x.zero_()
    assert memory["a"][0].tolist() == [[1.0], [1.0]]


def test_other_limits_cannot_take_over_a_state():
    memory = EpisodicMemory(3)
    add(memory, "a", 0, 2)
    with pytest.raises(ValueError, match="memories, budget and keep must be"):
        EpisodicMemory(4).load_state_dict(memory.state_dict())


def test_first_examples_stay():
    memory = EpisodicMemory(5, keep="first")
    for start in (0, 3, 6):
        add(memory, "a", start, 3)
    assert memory["a"][1].tolist() == [0, 1, 2, 3, 4]
    restored = EpisodicMemory(5, keep="first")
    restored.load_state_dict(memory.state_dict())
    add(restored, "a", 9, 3)
    assert restored["a"][1].tolist() == [0, 1, 2, 3, 4]


def test_stacks_are_views_of_neighbouring_tasks():
    memory = EpisodicMemory(4)
    for t in "abcde":
        add(memory, t, ord(t), 6 if t != "c" else 3)
    (stack,) = memory.stacks("abcde")
    assert stack.x.shape == (5, 4, 1)
    assert stack.counts == (4, 4, 3, 4, 4)
    assert stack.y[2].tolist() == [99, 100, 101, 99]  # an unused slot repeats what was observed
    left, right = memory.stacks("abde")  # the current task, in the middle, is left out
    assert len(left) == len(right) == 2
    assert right.x.untyped_storage().data_ptr() == stack.x.untyped_storage().data_ptr()
    memory.add(torch.zeros(2, 7), "other", torch.zeros(2).long())  # inputs of another shape
    assert [stack.x.shape[2:] for stack in memory.stacks(["e", "other"])] == [(1,), (7,)]


def test_all_tasks_but_one_are_found_once_and_again_when_they_change():
    memory = EpisodicMemory(4)
    for t in "abc":
        add(memory, t, ord(t), 2)
    one = memory.others("b")
    assert [stack.y[:, 0].tolist() for stack in one] == [[97], [99]]
    assert memory.others("b") is one
    add(memory, "b", 50, 1)
    assert memory.others("b") is one  # the others are as they were
    add(memory, "a", 60, 1)
    assert memory.others("a")[0].counts == (3, 2)
    assert memory.others("b")[0].counts == (3,)
    add(memory, "d", 70, 1)
    assert len(memory.others("b")) == 2
    assert memory.others("b")[1].counts == (2, 1)


def test_stacks_with_and_without_masks_are_not_mixed_up():
    memory = EpisodicMemory(memories=2)
    for t in "ab":
        memory.add(torch.ones(2, 1), t, torch.zeros(2, dtype=torch.long))
    assert memory.others("b")[0].masks is None
    assert memory.others("b", lambda tasks: torch.ones(1, 3).bool())[0].masks is not None


def test_a_sample_has_masks_for_all_tasks_or_for_none():
    memory = EpisodicMemory(memories=2)
    for t in "abc":
        memory.add(torch.ones(2, 1), t, torch.zeros(2, dtype=torch.long))
    assert [len(batch) for batch in memory.sample("abc", None)] == [2]

    def masks_of(tasks):
        return None if tasks == ["a"] else torch.eye(3)[: len(tasks)].bool()

    ((_, _, masks),) = memory.sample("ac", None, masks_of)
    assert masks.tolist() == [[True] * 3] * 2 + [[True, False, False]] * 2


def test_ewc_remembers_the_current_task_in_a_memory_of_ones_own():
    learner = gm.EWC(gm.mlp([1, 4, 3]), memory=EpisodicMemory(4, keep="reservoir"))
    x = torch.arange(9.0)[:, None] / 9
    for t in "ab":
        learner.observe(x, t, torch.arange(9) % 3)
        assert list(learner.memory) == [t]
        assert learner.memory.count(t) == 4
    assert any(part.any() for part in learner.curvature)


@pytest.mark.parametrize("kind", [gm.GEM, gm.AGEM])
def test_learners_take_a_policy_and_its_seed_is_theirs(kind):
    def kept(seed):
        learner = kind(gm.mlp([1, 4, 3]), memories=4, keep="reservoir", seed=seed)
        for start in range(0, 40, 10):
            numbers = torch.arange(start, start + 10)
            learner.observe(numbers[:, None] / 40, "a", numbers % 3)
        return learner.memory["a"][0].flatten().tolist()

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)
    with pytest.raises(ValueError, match="limits of its own"):
        kind(gm.mlp([1, 3]), memory=EpisodicMemory(4), keep="first")


def test_states_of_before_there_were_groups_load():
    memory = EpisodicMemory(3)
    for t in "ab":
        add(memory, t, ord(t), 5)
    state = memory.state_dict()
    del state["groups"]
    state["tasks"] = {t: kept[:4] for t, kept in state["tasks"].items()}
    other = EpisodicMemory(3)
    other.load_state_dict(state)
    assert other.groups == [("a",), ("b",)]
    assert other["b"][1].tolist() == memory["b"][1].tolist()


def test_raw_bytes_stay_bytes():
    memory = EpisodicMemory(budget=10)
    memory.add(torch.zeros(4, 28, dtype=torch.uint8), "a", torch.zeros(4, dtype=torch.int8))
    assert memory["a"][0].dtype == torch.uint8
    assert memory.bytes == 10 * (28 + 1)


@pytest.mark.parametrize("kind", [gm.GEM, gm.AGEM, gm.EWC])
def test_memory_that_is_kept_elsewhere_is_moved_to_where_it_is_used(kind):
    """To torch, "cpu:0" is another device than "cpu", though the memory is the same."""

    def learned(device):
        learner = kind(gm.mlp([4, 8, 3], seed=0), memory=EpisodicMemory(budget=12, device=device))
        generator = torch.Generator().manual_seed(0)
        for t in (0, 1, 2, 1, 3):
            for _ in range(4):
                x = torch.randn(7, 4, generator=generator)
                learner.observe(x, t, torch.arange(7) % 3)
        return learner

    here, there = learned(None), learned("cpu:0")
    for one, other in zip(here.network.parameters(), there.network.parameters(), strict=True):
        assert torch.equal(one, other)
    if kind is gm.GEM:
        (stack,) = there.memory.others(None)
        (again,) = there.memory.others(None)
        assert stack.x.data_ptr() == again.x.data_ptr()  # what a CUDA graph refers to
        rows = there.memory._places[0][0]
        assert stack.x.data_ptr() != rows.x.data_ptr()


@pytest.mark.parametrize("keep", ["last", "first"])
@pytest.mark.parametrize("n", [3, 7, 46])
def test_many_examples_at_once_lie_where_they_would_one_by_one(keep, n):
    states = []
    for size in (1, n):
        memory = gm.EpisodicMemory(20, keep=keep)
        x, y = torch.arange(13 + n, dtype=torch.float32)[:, None], torch.arange(13 + n)
        memory.add(x[:13], "a", y[:13])
        assert memory.takes_many("a")
        for some in torch.arange(13, 13 + n).split(size):
            memory.add(x[some], "a", y[some])
        states.append(memory.stacks(["a"])[0].x.clone())
    assert torch.equal(*states)


def test_what_a_policy_can_do_with_many_is_its_own_word():
    class Picky(Last):
        name = "picky"

    memory = gm.EpisodicMemory(20, keep=Picky())
    memory.add(torch.zeros(2, 1), "a", torch.zeros(2))
    assert not memory.takes_many("a")


def test_masks_of_past_tasks_are_those_there_are_now():
    learner = gm.GEM(gm.mlp([4, 8, 3]), grow=True)
    learner.outputs = {"a": (0, 1)}
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    learner.observe(x, "a", y)
    for labels in (y, y, y + 2):  # the last have a class more than the network
        learner.observe(x, "b", labels)
    (stack,) = learner.memory.others("b", learner.masks)
    assert stack.masks.tolist() == [[True, True, False, False]]
    learner.outputs["a"] = (0, 1, 2)
    (stack,) = learner.memory.others("b", learner.masks)
    assert stack.masks.tolist() == [[True, True, True, False]]


def test_a_memory_of_its_own_has_its_own_policy_also_where_a_learner_has_another():
    learner = gm.SteadyGEM(gm.mlp([4, 8, 3]), memory=gm.EpisodicMemory(5))
    assert learner.memory.policy.name == "last"
    with pytest.raises(ValueError, match="memory has limits of its own"):
        gm.SteadyGEM(gm.mlp([4, 8, 3]), memory=gm.EpisodicMemory(5), keep="reservoir")


def test_what_is_added_to_another_task_is_among_the_others_at_once():
    memory = gm.EpisodicMemory(6)
    for n in (2, 4):
        memory.add(torch.full((2, 1), float(n)), "b", torch.tensor([0, 1]))
        (stack,) = memory.others("c")
        assert stack.counts == (n,)


class Picky(First):
    """Keeps nothing of task b."""

    name = "picky"

    def places(self, row, n, generator):
        if "b" not in row.tasks:
            yield from super().places(row, n, generator)


@pytest.mark.parametrize("gradients", ["auto", "loop", "gram"])
@pytest.mark.parametrize("tasks", ["bac", "abca"])
def test_a_task_of_which_nothing_is_kept_constrains_nothing(tasks, gradients):
    learner = gm.GEM(gm.mlp([4, 8, 3]), memories=5, keep=Picky(), gradients=gradients)
    for t in tasks:
        learner.observe(torch.randn(4, 4), t, torch.tensor([0, 1, 2, 0]))
    assert learner.memory.count("b") == 0
    assert "b" not in learner.constraints.last.violated
    assert learner.constraints.gradients(["b"]).count_nonzero() == 0
