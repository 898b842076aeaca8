"""Tasks' descriptions on their way into networks that take one beside x."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.gradients import Transform
from gradmem.streams.task import as_description
from gradmem.trees import Tree, check, leaves

__all__ = ["Describing"]


class Describing:
    """Puts a task's description beside x, for a network that takes one; others are given x itself.

    A network takes descriptions of k numbers if it has an attribute `description_size` of k, as
    those of `gradmem.networks.conditioned` have. It is given {"x": x, "task": (n, k)}.
    """

    def __init__(self, network: nn.Module) -> None:
        self.size: int | None = getattr(network, "description_size", None)
        self._dtype = next(network.parameters()).dtype
        self._made: dict[Hashable, tuple[Any, Tensor]] = {}  # what was given, and what it became

    def __call__(self, x: Tree, t: Hashable | None, descriptions: Mapping[Hashable, Any]) -> Tree:
        """What the network is given for x: (n, …) of task t."""
        if self.size is None:
            return x
        n = check("x", x)
        if t not in descriptions:
            raise ValueError(
                f"task {t!r} has no description, and the network takes one: set "
                f"learner.descriptions[{t!r}] to {self.size} numbers, or give the continuum's "
                "tasks theirs, Task(…, describe=…)"
            )
        return {"x": x, "task": self._ready(t, descriptions[t], leaves(x)[0].device).repeat(n, 1)}

    def of_x(self, transform: Transform | None) -> Transform | None:
        """The transform, applied to x alone where a description lies beside it."""
        if self.size is None or not callable(transform):
            return transform
        return lambda given: {**given, "x": transform(given["x"])}

    def _ready(self, t: Hashable, given: Any, device: torch.device) -> Tensor:
        """The description on x's device, looked at once."""
        known = self._made.get(t)
        if known is not None and known[0] is given and known[1].device == device:
            return known[1]
        description = as_description(t, given)
        if len(description) != self.size:
            raise ValueError(
                f"the description of task {t!r} must be {self.size} numbers, as the network takes, "
                f"got {len(description)}"
            )
        self._made[t] = given, description.to(device, self._dtype)
        return self._made[t][1]
