"""Average accuracy, backward and forward transfer of a matrix R of scores (Section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["TransferMetrics", "transfer_metrics"]


@dataclass(frozen=True)
class TransferMetrics:
    """What a matrix R says about a learner; for other scores than accuracy, of that score.

    Attributes
    ----------
    acc
        Average accuracy over all tasks at the end (equation 2).
    bwt
        Backward transfer: how later tasks changed earlier ones (equation 3). NaN when no task has
        a later one.
    fwt
        Forward transfer: accuracy on a task just before it is learned, over the baseline
        (equation 4). NaN when no task has an earlier one.
    forgetting
        Per task, how far its final accuracy lies below the best since it was learned; at least 0.
    learning_accuracy
        Per task, the accuracy right after it was (last) learned: R's diagonal.
    """

    acc: float
    bwt: float
    fwt: float
    forgetting: tuple[float, ...]
    learning_accuracy: tuple[float, ...]


def transfer_metrics(
    R: Any, baseline: Any, learned: Sequence[int | None] | None = None
) -> TransferMetrics:
    """ACC, BWT and FWT by equations 2 to 4.

    Parameters
    ----------
    R
        (rows, T) accuracies, or other scores, which may be any finite numbers: row i is measured
        after the i-th stretch of training, column j is task j. A continuum of T different tasks
        has T rows.
    baseline
        (T,) scores before training.
    learned
        Which column each row has just learned; 0, 1, …, T−1 if left out. With it, tasks may come
        back: a task then counts as learned when it was last learned for BWT, and as new when it
        was first met for FWT. None marks a row that learned no single column (iid data).

    Examples
    --------
    >>> m = transfer_metrics([[0.9, 0.3], [0.8, 0.9]], baseline=[0.1, 0.1])
    >>> round(m.acc, 4), round(m.bwt, 4), round(m.fwt, 4)
    (0.85, -0.1, 0.2)
    """
    R = _scores("R", R, 2)
    b = _scores("baseline", baseline, 1)
    rows, T = R.shape
    if len(b) != T:
        raise ValueError(f"baseline must have R's {T} columns, got {len(b)}")
    if learned is None:
        if rows != T:
            raise ValueError(
                f"R must be square unless `learned` says what each row learned, got {R.shape}"
            )
        learned = range(T)
    first, last = _visits(learned, rows, T)

    end = rows - 1
    backward = [R[end, j] - R[i, j] for j, i in last.items() if i < end]
    forward = [R[i - 1, j] - b[j] for j, i in first.items() if i > 0]
    return TransferMetrics(
        acc=float(R[end].mean()),  # equation 2
        bwt=_mean(backward),  # equation 3
        fwt=_mean(forward),  # equation 4
        forgetting=tuple(
            float(R[first[j] :, j].max() - R[end, j]) if j in first else 0.0 for j in range(T)
        ),
        learning_accuracy=tuple(float(R[last.get(j, end), j]) for j in range(T)),
    )


def _visits(
    learned: Sequence[int | None], rows: int, T: int
) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last row in which each column was learned."""
    if len(learned) != rows:
        raise ValueError(f"learned must name a column for each of R's {rows} rows, got {learned!r}")
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, j in enumerate(learned):
        if j is None:
            continue
        if not 0 <= j < T:
            raise ValueError(f"learned must hold columns 0 to {T - 1} or None, got {j!r}")
        first.setdefault(j, i)
        last[j] = i
    return first, last


def _mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _scores(name: str, values: Any, ndim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a matrix of numbers, got {values!r}") from None
    if array.ndim != ndim or array.size == 0:
        raise ValueError(f"{name} must have {ndim} dimension(s) and values, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {array}")
    return array
