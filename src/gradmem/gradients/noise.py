"""How inputs are changed while learning: numbers hidden, images shifted and mirrored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradmem.gradients.objective import Transform
from gradmem.trees import tree_map
from gradmem.validation import non_negative, one_of

__all__ = ["AUGMENTS", "noise_of", "shifted_and_mirrored"]


def noise_of(augment: str | Transform | None, input_dropout: float) -> Transform | None:
    """What `augment` and `input_dropout` do to inputs, one after the other; None for nothing."""
    if isinstance(augment, str):
        augment = AUGMENTS[one_of("augment", augment, AUGMENTS)]
    elif augment is not None and not callable(augment):
        raise TypeError(f"augment must be a function of x or a name, got {augment!r}")
    if non_negative("input_dropout", input_dropout) >= 1:
        raise ValueError(f"input_dropout must be below 1, got {input_dropout!r}")
    dropout = partial(tree_map, partial(_dropped, share=input_dropout)) if input_dropout else None
    steps = [step for step in (augment, dropout) if step is not None]
    return partial(reduce, _applied, steps) if steps else None


def _applied(x: Any, step: Callable[[Any], Any]) -> Any:
    return step(x)


def _dropped(leaf: Tensor, share: float) -> Tensor:
    """With a share of its numbers zero and the others scaled; integers as they are."""
    return F.dropout(leaf, share) if leaf.is_floating_point() else leaf


def shifted_and_mirrored(x: Tensor) -> Tensor:
    """Images (n, channels, height, width), each moved by up to an eighth of its side either way.

    Every other one is mirrored, on average. What moves in from outside is zero.

    Examples
    --------
    >>> shifted_and_mirrored(torch.ones(5, 3, 32, 32)).shape
    torch.Size([5, 3, 32, 32])
    """
    if not isinstance(x, Tensor) or x.ndim != 4:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f'augment="images" takes images (n, channels, height, width), got {got}: give augment '
            "a function of x, or None"
        )
    n, _, height, width = x.shape
    draws = torch.rand(3, n, 1, device=x.device)
    rows = torch.arange(height, device=x.device) + _moves(draws[0], height // 8)  # (n, height)
    columns = torch.arange(width, device=x.device) + _moves(draws[1], width // 8)
    columns = torch.where(draws[2] < 0.5, columns, width - 1 - columns)
    found = x[
        torch.arange(n, device=x.device)[:, None, None],
        :,
        rows.clamp(0, height - 1)[:, :, None],
        columns.clamp(0, width - 1)[:, None, :],
    ]  # (n, height, width, channels)
    inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
    moved = (found * inside[..., None]).movedim(3, 1)
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return moved if is_last else moved.contiguous()


def _moves(draws: Tensor, most: int) -> Tensor:
    """Whole numbers from −most to most, from uniform ones between 0 and 1."""
    return (draws * (2 * most + 1)).long().clamp(max=2 * most) - most


def _inside(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


#: Name → how inputs are changed.
AUGMENTS: dict[str, Transform] = {"images": shifted_and_mirrored}
