"""Which outputs belong to a task, as masks that stay where they are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.validation import class_ids

__all__ = ["OutputMasks"]


class OutputMasks:
    """Masks of outputs, made once: a CUDA graph finds the same tensor for the same outputs."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._checked: dict[Any, tuple[int, ...]] = {}

    def __call__(
        self,
        outputs: Mapping[Hashable, Sequence[int]],
        tasks: Sequence[Hashable | None],
        n: int | None,
        device: torch.device,
        grows: bool = False,
    ) -> Tensor | None:
        """Which of n outputs are each task's: (k, n), or None if all tasks have all of them.

        `grows` says that a task may have classes that the network has no output for yet: they are
        left out, and a task with none but such classes has all outputs.
        """
        if not any(t in outputs for t in tasks):
            return None
        if n is None:
            raise ValueError("how many outputs there are is known when something was observed")
        classes = [self._ids(t, outputs[t]) if t in outputs else None for t in tasks]
        if grows:
            classes = [own and (tuple(c for c in own if c < n) or None) for own in classes]
        key = (n, device, *classes)
        if key not in self._made:
            masks = torch.zeros((len(tasks), n), dtype=torch.bool)
            for t, row, own in zip(tasks, masks, classes, strict=True):
                own = tuple(range(n)) if own is None else own
                if max(own) >= n:
                    raise ValueError(f"outputs of task {t!r} must be below {n}, got {max(own)}")
                row[list(own)] = True
            self._made[key] = masks.to(device)
        return self._made[key]

    def _ids(self, t: Hashable | None, given: Sequence[int]) -> tuple[int, ...]:
        """A task's outputs, sorted; tuples are checked once."""
        if not isinstance(given, tuple):
            return class_ids(f"outputs of task {t!r}", given)
        if given not in self._checked:
            self._checked[given] = class_ids(f"outputs of task {t!r}", given)
        return self._checked[given]
