"""The episodic memory: some examples of every task observed so far (Section 3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.memory.policies import POLICIES, Policy
from gradmem.memory.rows import Rows
from gradmem.memory.stack import Stack
from gradmem.trees import Kind, Tree, check, concatenate, kind, leaves, size, take, to
from gradmem.validation import non_negative_int, one_of, positive_int

__all__ = ["EpisodicMemory", "Masks", "memory_of"]

#: Which outputs are some tasks': (k, classes), or None if all are.
Masks = Callable[[Sequence[Hashable]], Tensor | None]

MEMORIES = 256


def _all_outputs(tasks: Sequence[Hashable]) -> None:
    """Tasks that share their outputs."""


def memory_of(
    memory: EpisodicMemory | None, memories: int, budget: int | None, keep: str | Policy = "last"
) -> EpisodicMemory:
    """The memory that was given, or one with these limits; not both."""
    if memory is None:
        return EpisodicMemory(memories, budget, keep)
    if not isinstance(memory, EpisodicMemory):
        raise TypeError(f"memory must be an EpisodicMemory, got {memory!r}")
    if memories != MEMORIES or budget is not None or keep != "last":
        raise ValueError("memory has limits of its own: memories, budget and keep go without it")
    return memory


class EpisodicMemory:
    """For each task, some of the examples observed, on the device and in the dtype they came in.

    Parameters
    ----------
    memories
        Examples kept per task.
    budget
        Examples kept in all, instead of `memories`: shared equally among the tasks seen so far, so
        that each task's share shrinks as new tasks arrive.
    keep
        Which examples of a task: "last" (the paper's), "first", "reservoir" (a uniform sample), or
        a `Policy` of your own.
    seed
        Of a policy's random choices; the global generator is left alone.

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
    """

    def __init__(
        self,
        memories: int = MEMORIES,
        budget: int | None = None,
        keep: str | Policy = "last",
        seed: int = 0,
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
        self._generator = torch.Generator().manual_seed(non_negative_int("seed", seed))
        self._rows: dict[tuple[Kind, Kind], Rows] = {}
        self._places: dict[Hashable, tuple[Rows, int]] = {}
        self._version = 0  # changes when a task arrives, and with it where examples lie
        self._others: tuple[Hashable, list[Stack]] | None = None

    def share(self, n_tasks: int) -> int:
        """Examples that each of `n_tasks` tasks may keep."""
        if self.budget is None:
            return self.memories
        share = self.budget // max(1, n_tasks)
        if share < 1:
            raise ValueError(
                f"budget must allow one example for each of {n_tasks} tasks, got {self.budget}"
            )
        return share

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise what `add` would raise, and change nothing."""
        known = self._places[t][0].kind if t in self._places else None
        plain = isinstance(x, Tensor) and isinstance(y, Tensor)  # the usual case, looked at at once
        if plain and known == (kind(x), kind(y)) and len(x) == len(y) > 0:
            return
        if (n := check("x", x)) != (labels := check("y", y)):
            raise ValueError(f"x and y must be equally many, got {n} inputs and {labels} labels")
        if known is None:
            self.share(len(self) + 1)
            return
        for name, tree, like in zip(("x", "y"), (x, y), known, strict=True):
            if kind(tree) != like:
                raise ValueError(
                    f"{name} must be like task {t!r}'s other examples, {like}, got {kind(tree)}"
                )

    def add(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Offer x: (n, …) and y: (n, …) as task t's newest examples; the policy keeps some."""
        self.check(x, t, y)
        self.put(x, t, y)

    def put(self, x: Tree, t: Hashable, y: Tree) -> None:
        """`add` for what was checked before."""
        if t not in self._places:
            share = self.share(len(self) + 1)
            for known in self._rows.values():
                known.resize(share, self.policy, self._generator)
            rows = self._rows_for(x, y, share)
            self._places[t] = rows, rows.new_row(x, y)
            self._version += 1
        rows, i = self._places[t]
        rows.add(i, x, y, self.policy, self._generator)

    def __getitem__(self, t: Hashable) -> tuple[Tree, Tree]:
        """(x, y) kept for task t, oldest first."""
        rows, i = self._places[t]
        return rows.by_age(i)

    def count(self, t: Hashable) -> int:
        """How many examples are kept for task t."""
        rows, i = self._places[t]
        return rows.rows[i].count

    def stacks(self, tasks: Sequence[Hashable], masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for `tasks`, in their order, without a copy.

        Tasks whose examples lie next to each other come in one `Stack`; one stack is all there is
        while examples are of one kind and the tasks follow the order in which they were met.
        """
        runs: list[tuple[Rows, int, list[Hashable]]] = []
        for t in tasks:
            rows, i = self._places[t]
            if runs and runs[-1][0] is rows and runs[-1][1] + len(runs[-1][2]) == i:
                runs[-1][2].append(t)
            else:
                runs.append((rows, i, [t]))
        return [rows.stack(start, those, masks(those)) for rows, start, those in runs]

    def others(self, t: Hashable, masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for all tasks but t; the same stacks as long as only t is observed."""
        key = (t, self._version, masks is _all_outputs)
        if self._others is None or self._others[0] != key:
            self._others = key, self.stacks([k for k in self if k != t], masks)
        return self._others[1]

    def sample(
        self, tasks: Sequence[Hashable], n: int | None, masks: Masks = _all_outputs
    ) -> list[tuple[Tree, ...]]:
        """N examples of the tasks, drawn without replacement (all of them if None or too few).

        As batches (x, y), or (x, y, mask) where tasks have outputs of their own: one batch per kind
        of examples. They are drawn by the global generator, which is the learner's own in a step.
        """
        stacks = self.stacks(tasks, masks)
        some = next((stack.masks for stack in stacks if stack.masks is not None), None)
        total = sum(count for stack in stacks for count in stack.counts)
        chosen = None if n is None or n >= total else torch.randperm(total)[:n]
        batches: dict[Any, list[tuple[Tree, ...]]] = {}
        start = 0
        for stack in stacks:
            _, m = stack.room
            # positions of the filled slots in the stack, all tasks in one row
            slots = torch.cat([i * m + torch.arange(c) for i, c in enumerate(stack.counts)])
            if chosen is not None:
                inside = (chosen >= start) & (chosen < start + len(slots))
                start += len(slots)
                slots = slots[chosen[inside] - (start - len(slots))]
            batch = [stack.flat_x, stack.flat_y]
            if some is not None:  # then all batches have them
                all_outputs = some.new_ones((len(stack), some.shape[1]))
                own = all_outputs if stack.masks is None else stack.masks
                batch.append(own.repeat_interleave(m, 0))
            if len(slots) < size(batch[1]):
                slots = slots.to(leaves(batch[1])[0].device)
                batch = [take(part, slots) for part in batch]
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
        self._places, self._rows, self._others = {}, {}, None
        self._version += 1

    def state_dict(self) -> dict[str, Any]:
        """What is kept, slot by slot: sums over the memory come out the same to the last bit."""
        return {
            "limits": self._limits(),
            "randomness": self._generator.get_state(),
            "tasks": {
                t: (*rows.slots(i), rows.rows[i].seen, rows.rows[i].oldest)
                for t, (rows, i) in self._places.items()
            },
        }

    def load_state_dict(
        self, state: dict[str, Any], device: torch.device | str | None = None
    ) -> None:
        """Take over what `state_dict` gave; on a device, if one is named."""
        if tuple(state["limits"]) != self._limits():
            raise ValueError(
                f"memories, budget and keep must be {tuple(state['limits'])} as when the state was "
                f"saved, got {self._limits()}"
            )
        share = self.share(len(state["tasks"]))
        self._generator.set_state(state["randomness"].cpu())
        self._places, self._others = {}, None
        self._version += 1
        # Tensors of the right size are used again: a CUDA graph that refers to them stays valid.
        self._rows = {kind: rows for kind, rows in self._rows.items() if rows.size == share}
        for rows in self._rows.values():
            rows.rows = []
        for t, (x, y, seen, oldest) in state["tasks"].items():
            x, y = to(x, device), to(y, device)
            rows = self._rows_for(x, y, share)
            self._places[t] = rows, rows.restore(x, y, seen, oldest)

    def _limits(self) -> tuple[int, int | None, str]:
        return self.memories, self.budget, self.policy.name

    def _rows_for(self, x: Tree, y: Tree, share: int) -> Rows:
        both = kind(x), kind(y)
        if both not in self._rows:
            self._rows[both] = Rows(x, y, share)
        return self._rows[both]
