"""One state of all processes, and a process's part of one: the number of processes may change."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradmem.checkpoint import save_state
from gradmem.distributed.processes import Processes
from gradmem.memory import EpisodicMemory
from gradmem.trees import Tree, concatenate, size, take, tree_map

__all__ = ["own_part", "save_together", "whole_state"]

#: What differs from process to process; the rest is the same in all.
OWN = ("memory", "method", "randomness", "examples")


def save_together(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    about: str,
    processes: Processes | None,
) -> None:
    """Write a state to a file; of several processes, the first one writes that of all."""
    if processes is None:
        save_state(path, state, about)
        return
    whole = whole_state(state, processes)
    if whole is not None:
        save_state(path, whole, about)
    processes.collectives.wait_for_all()  # when they go on, the file is there


def whole_state(state: Mapping[str, Any], processes: Processes) -> dict[str, Any] | None:
    """The state of all processes, in the first one; None elsewhere. Called by all of them."""
    full = processes.full({name: value for name, value in state.items() if name != "process"})
    parts = processes.collectives.collect({name: full[name] for name in OWN if name in full})
    if parts is None:
        return None
    about = {name: processes.state()[name] for name in ("tasks", "marks")}
    return {**full, "processes": {"parts": parts, **about}}


def own_part(
    state: Mapping[str, Any], processes: Processes | None, memory: EpisodicMemory | None
) -> dict[str, Any]:
    """What this process takes over of a state, of any number of processes.

    The memories are dealt out anew if there are more or fewer processes than there were.
    """
    rank, n = (0, 1) if processes is None else (processes.rank, processes.size)
    own = {name: value for name, value in state.items() if name not in ("process", "processes")}
    alone = {"parts": [own], "tasks": [], "marks": {}}
    about = state.get("process") or state.get("processes", alone)
    marks = about["marks"]
    if "process" in state:
        if (about["rank"], about["size"]) != (rank, n):
            raise ValueError(
                f"the state is the part of process {about['rank']} of {about['size']} alone, and "
                f"this is process {rank} of {n}: `save` writes the state of all"
            )
    elif len(about["parts"]) == n:
        own |= about["parts"][rank]
    elif memory is not None and "memory" in own:
        own["memory"] = _dealt([part["memory"] for part in about["parts"]], rank, n, memory)
        marks = {}
    if processes is None:
        return own
    processes.restore(about["tasks"], marks)
    return own | {"process": processes.state()}


def _dealt(parts: list[Any], rank: int, n: int, memory: EpisodicMemory) -> dict[str, Any]:
    """The memories of all parts, dealt out evenly to n processes: those of process `rank`.

    What a policy has summed up over all that it has seen is divided evenly, too.
    """
    tasks: dict[Hashable, list[Any]] = {}
    for part in parts:
        for t, kept in part["tasks"].items():
            tasks.setdefault(t, []).append(kept)
    dealt = {t: own for t, some in tasks.items() if (own := _hand(some, rank, n)) is not None}
    share = memory.share(len(dealt))
    return {
        **parts[rank % len(parts)],
        "tasks": {t: _newest(kept, share) for t, kept in dealt.items()},
        "groups": {t: t for t in dealt},
    }


def _hand(some: list[Any], rank: int, n: int) -> tuple[Any, ...] | None:
    """Every n-th of a task's examples in several parts, the oldest first; None if there is none."""
    counts = [size(y) for _, y, *_ in some]
    ages = [(i - count, place) for place, count in enumerate(counts) for i in range(count)]
    order = torch.tensor(sorted(range(len(ages)), key=ages.__getitem__)[rank::n])
    if not len(order):
        return None

    def mine(trees: list[Tree]) -> Tree:
        pairs = zip(trees, some, strict=True)
        return take(concatenate([_by_age(tree, kept[3]) for tree, kept in pairs]), order)

    x, y = mine([kept[0] for kept in some]), mine([kept[1] for kept in some])
    every = sum(kept[2] for kept in some)
    seen = max(1, every // n + (rank < every % n))
    slots, totals = ([kept[i] if len(kept) > i else {} for kept in some] for i in (4, 5))
    return (
        x,
        y,
        seen,
        0,
        {name: mine([own[name] for own in slots]) for name in slots[0]},
        {name: _part(sum(own[name] for own in totals), seen / every) for name in totals[0]},
    )


def _by_age(tree: Tree, oldest: int) -> Tree:
    """Slots in the order of age."""
    return tree_map(lambda leaf: leaf.roll(-oldest, 0), tree)


def _part(total: Any, part: float) -> Tensor:
    share = torch.as_tensor(total) * part
    return share if torch.as_tensor(total).is_floating_point() else share.round().to(total)


def _newest(kept: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """What is kept of a task, without its oldest examples if they are more than n."""
    x, y, seen, oldest, slots, totals = kept
    last = slice(max(0, size(y) - n), None)
    own = {name: one[last] for name, one in slots.items()}
    return take(x, last), take(y, last), seen, oldest, own, totals
