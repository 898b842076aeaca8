"""Which of many constraints a step may violate, estimated from their last known gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.validation import positive_int

__all__ = ["Shortlist"]

#: Numbers that a gradient's sketch has: cosines are estimated up to about 1 / √SIZE.
SIZE = 1024


class Shortlist:
    """Names the constraints that are worth computing, from sketches of their last gradients.

    A sketch adds up a gradient's elements with random signs into `SIZE` numbers; inner products of
    sketches are those of the gradients, up to a standard deviation of 1 / √SIZE of their lengths.
    They grow old as the network learns, so that some constraints are named in turn.

    Parameters
    ----------
    most
        Constraints of a step. Half of them are named from g, the others from what the solution with
        the first half would violate.
    seed
        Of the signs.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most = positive_int("constraints", most)
        if self.most < 2:
            raise ValueError(f"constraints must be at least 2, got {most}")
        self._seed = seed
        self._signs: Tensor | None = None
        self._sketches = torch.zeros(0, SIZE)
        self._places: dict[Hashable, int] = {}
        self._ages: list[int] = []  # the step in which a constraint was computed last
        self._step = 0
        self._new: list[tuple[list[Hashable], Tensor, int]] = []

    def first(self, tasks: Sequence[Hashable], g: Tensor) -> list[Hashable]:
        """Up to half of `most` tasks, in the order given, for a step along g: (p,).

        Those without a sketch and, of a quarter of the places, those that were not named for the
        longest time; the others are those that g goes against the most.
        """
        self._take_note()
        self._step += 1
        room = self.most // 2
        new = [t for t in tasks if t not in self._places][:room]
        known = [t for t in tasks if t in self._places]
        old = sorted(known, key=lambda t: self._ages[self._places[t]])
        named = {*new, *old[: max(1, room // 4)]} if len(new) < room else {*new}
        for t in self._against(known, g):
            if len(named) >= room:
                break
            named.add(t)
        return [t for t in tasks if t in named][:room]

    def second(self, tasks: Sequence[Hashable], g_tilde: Tensor) -> list[Hashable]:
        """Further tasks, up to `most` in all, that g̃: (p,) still goes against."""
        return self._against([t for t in tasks if t in self._places], g_tilde)[
            : self.most - self.most // 2
        ]

    def learn(self, tasks: Sequence[Hashable], G: Tensor) -> None:
        """Take note of the gradients G: (k, p) that were computed, from the next step on."""
        self._new = [*self._new, (list(tasks), self._sketch(G), self._step)]

    def _take_note(self) -> None:
        """Write down what was learned; doing it twice makes no difference."""
        for tasks, sketches, step in self._new:
            self._make_room(tasks, sketches.device)
            places = [self._places[t] for t in tasks]
            self._sketches[torch.tensor(places, device=sketches.device)] = sketches
            for place in places:
                self._ages[place] = step
        self._new = []

    def forget(self) -> None:
        """Start again: the network has other parameters."""
        self._signs, self._places, self._ages, self._new = None, {}, [], []
        self._sketches = torch.zeros(0, SIZE)

    def state_dict(self) -> dict[str, Any]:
        """All that naming constraints depends on."""
        self._take_note()
        n = len(self._places)
        return {
            "sketches": self._sketches[:n].clone(),
            "tasks": list(self._places),
            "ages": list(self._ages),
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take over what `state_dict` gave."""
        sketches, tasks, ages = state["sketches"], list(state["tasks"]), list(state["ages"])
        if sketches.shape != (len(tasks), SIZE) or len(ages) != len(tasks):
            raise ValueError(f"sketches must be ({len(tasks)}, {SIZE}), got {sketches.shape}")
        self._sketches = sketches.to(device).clone()
        self._places = {t: i for i, t in enumerate(tasks)}
        self._ages, self._step, self._new = ages, int(state["step"]), []

    def _against(self, tasks: Sequence[Hashable], g: Tensor) -> list[Hashable]:
        """The tasks whose last gradients g goes against, the most violated first."""
        if not tasks:
            return []
        rows = torch.tensor([self._places[t] for t in tasks], device=g.device)
        sketches = self._sketches[rows]
        products = sketches @ self._sketch(g[None])[0]
        found = (products / sketches.norm(dim=1).clamp(min=1e-30)).tolist()
        order = sorted(range(len(tasks)), key=found.__getitem__)
        return [tasks[i] for i in order if found[i] < 0]

    def _sketch(self, G: Tensor) -> Tensor:
        """(k, SIZE) of G: (k, p)."""
        k, p = G.shape
        whole = -(-p // SIZE) * SIZE
        if self._signs is None or len(self._signs) != p or self._signs.device != G.device:
            generator = torch.Generator().manual_seed(self._seed)
            signs = torch.randint(2, (p,), generator=generator, dtype=torch.int8) * 2 - 1
            self._signs = signs.to(G.device)
        sketches = G.new_empty((k, SIZE), dtype=torch.float32)
        for row, sketch in zip(G, sketches, strict=True):
            signed = torch.nn.functional.pad(row.float() * self._signs, (0, whole - p))
            torch.sum(signed.view(-1, SIZE), 0, out=sketch)
        return sketches

    def _make_room(self, tasks: Sequence[Hashable], device: torch.device) -> None:
        """A place for each task; tables are replaced, so that they can be put back."""
        if new := [t for t in tasks if t not in self._places]:
            self._places = self._places | {t: len(self._places) + i for i, t in enumerate(new)}
            self._ages = self._ages + [0] * len(new)
        n, room = len(self._places), len(self._sketches)
        if self._sketches.device != device or n > room:
            grown = torch.zeros((max(n, 2 * room), SIZE), device=device)
            grown[:room] = self._sketches.to(device)
            self._sketches = grown
