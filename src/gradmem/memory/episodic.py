"""The episodic memory: some examples of every task observed so far (Section 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradmem.memory.policies import (
    POLICIES,
    Features,
    Gradients,
    Losses,
    Offer,
    Policy,
    Row,
)
from gradmem.memory.rows import Rows
from gradmem.memory.stack import Stack
from gradmem.trees import Kind, Tree, check, concatenate, kind, size, take, to, tree_map
from gradmem.validation import descriptor, non_negative_int, one_of, positive_int

__all__ = ["EpisodicMemory", "Masks", "memory_of"]

#: Which outputs are some tasks': (k, classes), or None if all are.
Masks = Callable[[Sequence[Hashable]], Tensor | None]

MEMORIES = 256


def _all_outputs(tasks: Sequence[Hashable]) -> None:
    """Tasks that share their outputs."""


def memory_of(
    memory: EpisodicMemory | None,
    memories: int,
    budget: int | None = None,
    keep: str | Policy = "last",
    *,
    default: str = "last",
    seed: int = 0,
    groups: int | None = None,
) -> EpisodicMemory:
    """The memory that was given, or one with these limits; not both.

    `default` is what `keep` is where nothing was said.
    """
    if memory is None:
        return EpisodicMemory(memories, budget, keep, seed, groups=groups)
    if not isinstance(memory, EpisodicMemory):
        raise TypeError(f"memory must be an EpisodicMemory, got {memory!r}")
    if memories != MEMORIES or keep != default or (budget, groups) != (None, None):
        raise ValueError("memory has limits of its own: memories, budget and keep go without it")
    return memory


class EpisodicMemory:
    """For each task, some of the examples observed, in the dtype they came in.

    Parameters
    ----------
    memories
        Examples kept per task.
    budget
        Examples kept in all, instead of `memories`: shared equally among the tasks seen so far, so
        that each task's share shrinks as new tasks arrive.
    keep
        Which examples of a task: "last" (the paper's), "first", "reservoir" (a uniform sample),
        "balanced" (equally many of each class), "herding" (whose mean features are close to those
        of all), "k-centre" (far apart in their features), "loss" (a sample weighted by the loss),
        or a `Policy`: one of your own, or one with a setting, as `KCentre("gradients")` of
        `gradmem.memory.policies`.
    seed
        Of a policy's random choices; the global generator is left alone.
    groups
        Most rows of memories, and so most constraints of a step; any number if None.
    device
        Where examples are kept: as they come if None, or "cpu", "cuda". If that is not where they
        came from, they are moved there whenever they are used.
    pin
        Whether memory on the CPU is pinned, so that moving it to a GPU does not wait.

    Notes
    -----
    When there are more tasks than `groups` or `budget` allow, neighbouring tasks come to share one
    row of memories, of which each has its part then; what is added to it later replaces any of
    them, as the policy says. Of all neighbours in the order of age, those two
    rows are joined that have the fewest tasks together, the oldest if there are several; the newest
    row is left alone if it would make the largest. That needs no gradients, is the same in every
    run, and leaves no row much larger than the others. `memory.groups` says which tasks share.
    Tasks whose examples differ in shape or dtype share nothing.

    Examples
    --------
    >>> memory = EpisodicMemory(memories=3)
    >>> for i in range(5):
    ...     memory.add(torch.tensor([[float(i)]]), "a", torch.tensor([i]))
    >>> x, y = memory["a"]
    >>> y
    tensor([2, 3, 4])
    >>> list(memory), len(memory)
    (['a'], 1)

    With more tasks than rows, tasks share:

    >>> memory = EpisodicMemory(budget=8, groups=2)
    >>> for t in range(5):
    ...     memory.add(torch.full((3, 1), float(t)), t, torch.full((3,), t))
    >>> memory.groups
    [(0, 1, 2, 3), (4,)]
    >>> memory[0][1], memory[4][1]
    (tensor([0, 1, 2, 3]), tensor([4, 4, 4]))
    """

    def __init__(
        self,
        memories: int = MEMORIES,
        budget: int | None = None,
        keep: str | Policy = "last",
        seed: int = 0,
        *,
        groups: int | None = None,
        device: torch.device | str | None = None,
        pin: bool = False,
    ) -> None:
        self.memories = positive_int("memories", memories)
        self.budget = None if budget is None else positive_int("budget", budget)
        if budget is not None and memories != MEMORIES:
            raise ValueError(
                f"memories (per task) and budget (in all) cannot both be given, got {memories} and "
                f"{budget}"
            )
        self.policy = (
            keep if isinstance(keep, Policy) else POLICIES[one_of("keep", keep, POLICIES)]()
        )
        self.most_groups = None if groups is None else positive_int("groups", groups)
        self.device = None if device is None else _device(device)
        self.pin = _pinned(pin, self.device)
        self._generator = torch.Generator().manual_seed(non_negative_int("seed", seed))
        self._features: Features | None = None
        self._losses: Losses | None = None
        self._gradients: Gradients | None = None
        self._in_all: tuple[int, int | None] | None = None
        self._labels: Callable[[Tree], Tree] | None = None
        self._start()

    @property
    def generator(self) -> torch.Generator:
        """Of random choices, on the host; its state is part of the memory's."""
        return self._generator

    def split(self, rank: int, processes: int) -> None:
        """Become the part of process `rank` of `processes`; the limits were those of all together.

        What does not divide evenly goes to the first processes. Tasks do not share memories then:
        a budget must have an example for each task in each process.
        """
        if len(self) or self._in_all is not None:
            raise ValueError("memory must be a new one, of which each process becomes a part")
        if self.most_groups is not None:
            raise ValueError("groups are of one process: give the memory without them")
        name = "memories" if self.budget is None else "budget"
        limit = self.memories if self.budget is None else self.budget
        if limit < processes:
            raise ValueError(f"{name} must be at least the {processes} processes, got {limit}")
        self._in_all = self.memories, self.budget
        share = limit // processes + (rank < limit % processes)
        if self.budget is None:
            self.memories = share
        else:
            self.budget = share

    def _start(self) -> None:
        self._rows: dict[tuple[Kind, Kind], Rows] = {}
        #: Those from before a state was taken over. If their size is right they are used again:
        #: CUDA graphs that refer to their tensors stay valid.
        self._spare: dict[tuple[Kind, Kind], Rows] = {}
        self._places: dict[Hashable, tuple[Rows, Row]] = {}
        self._version = 0  # changes with where examples lie, and how many others there are
        #: What they depend on, the tasks, their masks, and the stacks of all tasks but one.
        self._others: tuple[Hashable, list[Hashable], Tensor | None, list[Stack]] | None = None
        self._others_of: Hashable = None

    def attach(
        self,
        features: Features | None = None,
        losses: Losses | None = None,
        gradients: Gradients | None = None,
        labels: Callable[[Tree], Tree] | None = None,
    ) -> None:
        """Say how a policy gets what a network makes of examples; learners do it themselves.

        Parameters
        ----------
        features
            x, t → (n, …). Without it, a policy takes the inputs themselves.
        losses
            x, t, y, mask → (n,), the mask saying which outputs are the task's: (classes,) or None.
        gradients
            x, t, y, mask → (n, q), by the weights that a policy is to compare examples by.
        labels
            y as it is kept → the labels, which a policy, losses and gradients are given; y itself
            if None.
        """
        self._features, self._losses, self._gradients = features, losses, gradients
        self._labels = labels

    def holding(self, examples: Mapping[Hashable, tuple[Tree, Tree]]) -> EpisodicMemory:
        """A memory with the same settings to which these were added, task → (x, y).

        This one stays as it is.
        """
        other = copy.copy(self)
        other._generator = torch.Generator()
        other._generator.set_state(self._generator.get_state())
        other._start()
        share = self.share(len(examples))
        for t, (x, y) in examples.items():
            other.check(x, t, y)
            if other._n_rows != other.most_rows:
                other._begin(t, other._rows_for(x, y, share))
            other.put(x, t, y)
        return other

    def share(self, n_rows: int) -> int:
        """Examples that each of `n_rows` rows may keep; a row is a task's, or several tasks'."""
        if self.budget is None:
            return self.memories
        return self.budget // min(max(1, n_rows), self.most_rows or self.budget)

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise what `add` would raise, and change nothing."""
        known = self._places[t][0].kind if t in self._places else None
        plain = isinstance(x, Tensor) and isinstance(y, Tensor)  # the usual case, looked at at once
        if plain and known == (kind(x), kind(y)) and size(x) == size(y) > 0:
            return
        if (n := check("x", x)) != (labels := check("y", y)):
            raise ValueError(f"x and y must be equally many, got {n} inputs and {labels} labels")
        if known is None:
            self.policy.check(self._offer(x, t, y))
            self._check_room(x, y)
            return
        for name, tree, like in zip(("x", "y"), (x, y), known, strict=True):
            if kind(tree) != like:
                raise ValueError(
                    f"{name} must be like task {t!r}'s other examples, {like}, got {kind(tree)}"
                )

    def _check_room(self, x: Tree, y: Tree) -> None:
        """Refuse a kind of examples for which no row can be made: no two rows can be joined."""
        full = self._n_rows == self.most_rows
        if full and self._in_all is not None:
            raise ValueError(
                f"budget must have an example for each task in each process, and this one's part "
                f"is {self.budget}, for {self._n_rows + 1} tasks"
            )
        if full and (kind(x), kind(y)) not in self._rows and self._neighbours() is None:
            raise ValueError(
                f"budget and groups must allow a row for each of {len(self._rows) + 1} kinds of "
                f"examples, which cannot share, got {self.most_rows}"
            )

    def add(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Offer x: (n, …) and y: (n, …) as task t's newest examples; the policy keeps some."""
        self.check(x, t, y)
        self.put(x, t, y)

    def put(self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None) -> None:
        """`add` for what was checked before; the mask says which outputs are the task's."""
        if t not in self._places:
            self._arrive(x, t, y)
        rows, row = self._places[t]
        count = row.count
        rows.add(row, self._offer(x, t, y, mask), self.policy, self._generator)
        if row.count != count and (len(row.tasks) > 1 or self._others_of != t):
            self._version += 1  # it is among the others that were last asked for

    def takes_many(self, t: Hashable) -> bool:
        """Whether many of task t's examples can be added at once, with the same outcome.

        Nothing else changes by it: not the `others` of task t.
        """
        own = vars(type(self.policy)).get("takes_many", False)  # not what its base class says
        return bool(own) and t in self._places and len(self._places[t][1].tasks) == 1

    def _offer(self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None) -> Offer:
        labels = y if self._labels is None else self._labels(y)
        return Offer(x, y, t, mask, self._features, self._losses, self._gradients, labels)

    def _arrive(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Find a row for a task that was not observed before."""
        if self._n_rows == self.most_rows:
            pair = self._neighbours()
            if pair is None:  # one row for all there is
                rows = self._rows[kind(x), kind(y)]
                row = rows.rows[-1]
                row.tasks.append(t)
                self._places[t] = rows, row
                self._version += 1
                return
            self._join(*pair)
        share = self.share(self._n_rows + 1)
        for known in self._rows.values():
            known.resize(share, self.policy, self._generator)
        self._begin(t, self._rows_for(x, y, share))

    def _begin(self, t: Hashable, rows: Rows) -> None:
        row = rows.new_row()
        row.tasks.append(t)
        self._places[t] = rows, row
        self._version += 1

    def _join(self, rows: Rows, first: Row, second: Row) -> None:
        rows.join(first, second, self.policy, self._generator)
        for t in first.tasks:
            self._places[t] = rows, first

    def _neighbours(self) -> tuple[Rows, Row, Row] | None:
        """The two neighbouring rows that are joined next; None if no two can be."""
        by_age = self._by_age()
        pairs = [
            (rows, first, second)
            for rows in self._rows.values()
            for first, second in pairwise(row for its, row in by_age if its is rows)
        ]
        largest = max((len(row.tasks) for _, row in by_age), default=0)

        def order(pair: tuple[Rows, Row, Row]) -> tuple[bool, int]:
            _, first, second = pair
            together = len(first.tasks) + len(second.tasks)
            return second is by_age[-1][1] and together > largest, together

        return min(pairs, key=order, default=None)

    def _by_age(self) -> list[tuple[Rows, Row]]:
        """All rows, in the order in which their first tasks were observed."""
        return list({id(row): (rows, row) for rows, row in self._places.values()}.values())

    @property
    def groups(self) -> list[tuple[Hashable, ...]]:
        """The tasks of each row, the oldest first; those of one row share their memories."""
        return [tuple(row.tasks) for _, row in self._by_age()]

    @property
    def bytes(self) -> int:
        """Bytes that the examples take where they are kept, with the room for more of them."""
        return sum(rows.bytes for rows in self._rows.values())

    @property
    def _n_rows(self) -> int:
        return sum(len(rows.rows) for rows in self._rows.values())

    @property
    def most_rows(self) -> int | None:
        """Most rows that there can be, and so most constraints; None for any number."""
        limits = [limit for limit in (self.budget, self.most_groups) if limit is not None]
        return min(limits, default=None)

    def __getitem__(self, t: Hashable) -> tuple[Tree, Tree]:
        """(x, y) kept for task t and those it shares its memories with, oldest first; a copy."""
        rows, row = self._places[t]
        x, y = rows.by_age(row)
        return to(x, rows.home), to(y, rows.home)

    def labels(self, t: Hashable) -> Tree:
        """Y kept for task t and those it shares its memories with, in no order; without a copy."""
        rows, row = self._places[t]
        return take(rows.y, slice(row.start, row.start + row.count))

    @property
    def kinds(self) -> list[tuple[Kind, Kind]]:
        """The kinds of x and y that are kept (see `gradmem.trees.kind`)."""
        return [*self._rows]

    def count(self, t: Hashable) -> int:
        """How many examples are kept for task t and those it shares its memories with."""
        return self._places[t][1].count

    def seen(self, t: Hashable) -> int:
        """How many examples were offered of task t and those it shares its memories with."""
        return self._places[t][1].seen

    def stacks(self, tasks: Sequence[Hashable], masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for `tasks`, in their order, without a copy.

        Tasks whose examples lie next to each other come in one `Stack`; one stack is all there is
        while examples are of one kind and the tasks follow the order in which they were met. Tasks
        that share their memories come once. `masks` says which outputs are a task's.
        """
        return [
            rows.stack(some, _masks_of(some, masks))
            for rows, some in _runs([self._places[t] for t in tasks])
        ]

    def others(self, t: Hashable, masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for all tasks but t; the same stacks as long as only t is observed.

        A row that t shares with others is among them. `masks` says which outputs are a task's.
        """
        key = (t, self._version, masks is _all_outputs)
        moved = any(rows.device != rows.home for rows in self._rows.values())
        if self._others is not None and self._others[0] == key and not moved:
            _, tasks, own, stacks = self._others
            if masks(tasks) is own:
                return stacks
        found = [
            (rows, row) for rows in self._rows.values() for row in rows.rows if row.tasks != [t]
        ]
        stacks = [rows.stack(some, _masks_of(some, masks)) for rows, some in _runs(found)]
        tasks = [one for _, row in found for one in row.tasks]
        self._others, self._others_of = (key, tasks, masks(tasks), stacks), t
        return stacks

    def like(self, t: Hashable) -> list[Hashable]:
        """The tasks whose examples are of the kind of task t's, itself among them."""
        rows, _ = self._places[t]
        return [one for one, (own, _) in self._places.items() if own is rows]

    def sample(
        self,
        tasks: Sequence[Hashable],
        n: int | None,
        masks: Masks = _all_outputs,
        *,
        replace: bool = False,
    ) -> list[tuple[Tree, ...]]:
        """`n` examples of `tasks`, drawn without replacement (all of them if None or too few).

        With `replace` they are n, and one may come twice.

        As batches (x, y), or (x, y, mask) where `masks` gives tasks outputs of their own: one batch
        per kind of examples. They are drawn by the global generator, which is the learner's own in
        a step.
        """
        runs = _runs([self._places[t] for t in tasks])
        own = [_masks_of(some, masks) for _, some in runs]
        some_mask = next((mask for mask in own if mask is not None), None)
        total = sum(row.count for _, some in runs for row in some)
        chosen = None if n is None or n >= total else torch.randperm(total)[:n]
        if replace and n is not None and total:
            chosen = torch.randint(total, (n,))
        batches: dict[Any, list[tuple[Tree, ...]]] = {}
        start = 0
        for (rows, some), mask in zip(runs, own, strict=True):
            m = rows.size
            # positions of the filled slots in the run, all tasks in one row
            slots = torch.cat([i * m + torch.arange(row.count) for i, row in enumerate(some)])
            if chosen is not None:
                inside = (chosen >= start) & (chosen < start + len(slots))
                start += len(slots)
                slots = slots[chosen[inside] - (start - len(slots))]
            batch = [tree_map(lambda leaf: leaf.flatten(0, 1), part) for part in rows.view(some)]
            if chosen is not None or len(slots) < size(batch[1]):
                batch = [take(part, slots.to(rows.device)) for part in batch]
            batch = [to(part, rows.home) for part in batch]
            if some_mask is not None:  # then all batches have them
                every = some_mask.new_ones((len(some), some_mask.shape[1]))
                batch.append((every if mask is None else mask)[(slots // m).to(some_mask.device)])
            if size(batch[1]):
                batches.setdefault(kind(batch[:2]), []).append(tuple(batch))
        return [
            tuple(concatenate(part) for part in zip(*parts, strict=True))
            for parts in batches.values()
        ]

    def __iter__(self) -> Iterator[Hashable]:
        """The tasks, in the order they were first observed."""
        return iter(self._places)

    def __contains__(self, t: Hashable) -> bool:
        return t in self._places

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._places)

    def __repr__(self) -> str:
        limit = f"memories={self.memories}" if self.budget is None else f"budget={self.budget}"
        return f"EpisodicMemory({limit}, keep={self.policy.name!r}, {len(self)} tasks)"

    def clear(self) -> None:
        """Forget all examples of all tasks."""
        version = self._version
        self._start()
        self._version = version + 1

    def state_dict(self) -> dict[str, Any]:
        """What is kept, slot by slot: sums over the memory come out the same to the last bit."""
        every = [(rows, row) for rows in self._rows.values() for row in rows.rows]
        return {
            "limits": self._limits(),
            "randomness": self._generator.get_state(),
            "tasks": {
                row.tasks[0]: (*rows.slots(row), row.seen, row.oldest, *_numbers(row))
                for rows, row in every
            },
            "groups": {t: row.tasks[0] for t, (_, row) in self._places.items()},
        }

    def load_state_dict(
        self, state: dict[str, Any], device: torch.device | str | None = None
    ) -> None:
        """Take over the `state` that `state_dict` gave; on a `device`, if one is named."""
        if tuple(state["limits"]) != self._limits():
            raise ValueError(
                f"memories, budget and keep must be {tuple(state['limits'])} as when the state was "
                f"saved, got {self._limits()}"
            )
        share = self.share(len(state["tasks"]))
        self._generator.set_state(state["randomness"].cpu())
        self._places, self._others = {}, None
        self._version += 1
        self._spare, self._rows = self._rows, {}
        first = {}
        for t, (x, y, seen, oldest, *numbers) in state["tasks"].items():
            x, y = to(x, device), to(y, device)
            rows = self._rows_for(x, y, share)
            row = rows.new_row()
            row.seen, row.oldest = seen, oldest
            if numbers:
                row.slots, row.totals = ({**part} for part in numbers)
            rows.restore(row, x, y)
            first[t] = rows, row
        for t, leader in state.get("groups", {t: t for t in first}).items():
            self._places[descriptor(t)] = first[leader]
            first[leader][1].tasks.append(t)
        if unnamed := [t for t, (_, row) in first.items() if t not in row.tasks]:
            raise ValueError(f"groups must name the task {unnamed[0]!r}, whose memories there are")

    def _limits(self) -> tuple[Any, ...]:
        limits = (*(self._in_all or (self.memories, self.budget)), self.policy.name)
        return limits if self.most_groups is None else (*limits, self.most_groups)

    def _rows_for(self, x: Tree, y: Tree, share: int) -> Rows:
        both = kind(x), kind(y)
        if both not in self._rows:
            most = self.budget
            if most is None and self.most_groups is not None:
                most = self.most_groups * self.memories
            spare = self._spare.pop(both, None)
            if spare is not None and spare.size == share:
                spare.rows = []
                self._rows[both] = spare
            else:
                self._rows[both] = Rows(x, y, share, most, self.device, self.pin)
        return self._rows[both]


def _runs(places: Iterable[tuple[Rows, Row]]) -> list[tuple[Rows, list[Row]]]:
    """Rows in which each run lies in one piece; each row once."""
    runs: list[tuple[Rows, list[Row]]] = []
    seen: set[int] = set()
    for rows, row in places:
        if id(row) in seen:
            continue
        seen.add(id(row))
        if runs and runs[-1][0] is rows and runs[-1][1][-1].place + 1 == row.place:
            runs[-1][1].append(row)
        else:
            runs.append((rows, [row]))
    return runs


def _masks_of(rows: list[Row], masks: Masks) -> Tensor | None:
    """Which outputs are each row's, (k, classes): those of any of its tasks; None if all are."""
    found = masks([t for row in rows for t in row.tasks])
    if found is None or all(len(row.tasks) == 1 for row in rows):
        return found
    parts = found.split([len(row.tasks) for row in rows])
    return torch.stack([part.any(0) for part in parts])


def _numbers(row: Row) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A copy of a policy's own numbers about the filled slots, and its sums."""
    slots = {name: own[: row.count].clone() for name, own in row.slots.items()}
    return slots, {name: total.clone() for name, total in row.totals.items()}


def _device(device: torch.device | str) -> torch.device:
    """A device with its index, as tensors on it name it."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _pinned(pin: bool, device: torch.device | None) -> bool:
    if not isinstance(pin, bool):
        raise TypeError(f"pin must be True or False, got {pin!r}")
    if pin and (device is None or device.type != "cpu"):
        raise ValueError(f'pin is for memory on the CPU: give device="cpu", got {device}')
    if pin and not torch.cuda.is_available():
        raise ValueError("pin is for moving memory to a GPU, and no GPU is available")
    return pin
