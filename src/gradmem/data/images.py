"""Images and labels as they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Images"]


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images and their labels, to train on and to test on.

    Parameters
    ----------
    train_x, test_x
        (N, H, W) or (N, C, H, W) uint8; N may differ between them.
    train_y, test_y
        (N,) integers.
    source
        Where they were found, for people.

    Examples
    --------
    >>> Images(torch.zeros(3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2]),
    ...        torch.zeros(1, 8, 8, dtype=torch.uint8), torch.tensor([1]))
    Images(3 to train on, 1 to test on, of 8 x 8)
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    source: str = "memory"

    def __post_init__(self) -> None:
        for name in ("train_x", "train_y", "test_x", "test_y"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        _check("train", self.train_x, self.train_y)
        _check("test", self.test_x, self.test_y)
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise ValueError(
                "train_x and test_x must hold images of one shape, got "
                f"{tuple(self.train_x.shape[1:])} and {tuple(self.test_x.shape[1:])}"
            )

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.train_x.shape[1:]))
        return (
            f"{type(self).__name__}({len(self.train_y)} to train on, "
            f"{len(self.test_y)} to test on, of {shape})"
        )


def _check(part: str, x: Tensor, y: Tensor) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{part}_x must be uint8, got {x.dtype}")
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise TypeError(f"{part}_y must hold integers, got {y.dtype}")
    if x.ndim not in (3, 4):
        raise ValueError(f"{part}_x must be (N, H, W) or (N, C, H, W), got {tuple(x.shape)}")
    if y.ndim != 1:
        raise ValueError(f"{part}_y must be (N,), got {tuple(y.shape)}")
    if len(x) != len(y):
        raise ValueError(
            f"{part}_x and {part}_y must be equally many, got {len(x)} images and {len(y)} labels"
        )
    if x.numel() == 0:
        raise ValueError(f"{part}_x must not be empty, got {tuple(x.shape)}")
