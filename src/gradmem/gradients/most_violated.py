"""The constraints of a step that matter, where there are more than it may have."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradmem.gradients.engine import MemoryGradients
from gradmem.memory.stack import Stack
from gradmem.projection import Projection, Shortlist

__all__ = ["most_violated"]


def most_violated(
    engine: MemoryGradients, shortlist: Shortlist, past: list[Stack], g: Tensor
) -> tuple[list[Stack], Tensor]:
    """Those constraints of a step along g: (p,) that it may violate, and their G: (k, p)."""
    tasks = [t for stack in past for t in stack.tasks]
    named = shortlist.first(tasks, g)
    chosen = _rows_of(past, named)
    G = engine(chosen).clone()
    shortlist.learn(named, G)
    g_tilde = Projection()(g, G)
    others = shortlist.second([t for t in tasks if t not in {*named}], g_tilde)
    if others:
        more = _rows_of(past, others)
        G_more = engine(more)
        shortlist.learn([t for stack in more for t in stack.tasks], G_more)
        chosen, G = [*chosen, *more], torch.cat([G, G_more])
    return chosen, G


def _rows_of(past: list[Stack], tasks: Sequence[Hashable]) -> list[Stack]:
    """Some tasks of the stacks, in the stacks' order: copies."""
    named = {*tasks}
    places = [(stack, [i for i, t in enumerate(stack.tasks) if t in named]) for stack in past]
    return [stack.rows(which) for stack, which in places if which]
