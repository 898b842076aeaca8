"""What R holds: a score for each test example, averaged over a task's test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.trees import Tree

__all__ = ["Score", "accuracy", "name_of", "totals"]

#: score(prediction, y): (n,) real numbers, one for each example.
Score = Callable[[Any, Any], Tensor]


def accuracy(prediction: Tree, y: Tree) -> Tensor:
    """1 where the predicted class, `prediction`: (n,), is y: (n,), 0 elsewhere; (n,).

    Examples
    --------
    >>> accuracy(torch.tensor([3, 1]), torch.tensor([3, 2]))
    tensor([ True, False])
    """
    for name, values in (("the learner predicts", prediction), ("y holds", y)):
        if not isinstance(values, Tensor) or values.is_floating_point() or values.ndim != 1:
            what = type(values).__name__
            if isinstance(values, Tensor):
                what = f"{values.dtype} of shape {tuple(values.shape)}"
            raise ValueError(
                f"accuracy compares class ids (n,), but {name} {what}: give run a "
                "score=f(prediction, y) with one value for each example, for instance "
                "minus the squared error"
            )
    return prediction == y  # type: ignore[no-any-return]


def name_of(score: Score) -> str:
    """The score's own `name`, or its function's."""
    for given in (score, getattr(score, "func", None)):  # a partial's function
        name = getattr(given, "name", None) or getattr(given, "__name__", None)
        if name:
            return "score" if name == "<lambda>" else str(name)
    return type(score).__name__


def totals(score: Score, prediction: Tree, y: Tree, sizes: Sequence[int]) -> Tensor:
    """The sums of a batch's scores over parts of these sizes, on its device.

    They are int64 or float64: (parts,).
    """
    values, n = score(prediction, y), sum(sizes)
    if not isinstance(values, Tensor) or values.shape != (n,) or values.is_complex():
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"score must give one real number for each example, shape ({n},), and "
            f"{name_of(score)} gave {got}"
        )
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    values = values.detach()
    if len({*sizes}) == 1:
        return values.view(len(sizes), -1).sum(1, dtype=dtype)
    return torch.stack([part.sum(dtype=dtype) for part in values.split(list(sizes))])
