"""Several small tensors copied at once: on a GPU, starting a kernel takes longer than they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["copy_together"]


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: by one kernel, if they are on a GPU and without gaps."""
    if len(targets) > 1 and targets[0].is_cuda:
        words = [_words(tensor) for tensor in (*targets, *sources)]
        known = [word for word in words if word is not None]
        same = all(
            one.dtype == other.dtype and one.device == other.device
            for one, other in zip(targets, sources, strict=True)
        )
        if same and len(known) == len(words):
            torch._foreach_copy_(known[: len(targets)], known[len(targets) :])
            return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _words(tensor: Tensor) -> Tensor | None:
    """The same bytes as words of eight; None if they are no whole number of words."""
    if tensor.dtype == torch.int64:
        return tensor if tensor.is_contiguous() else None
    if not tensor.ndim or not tensor.is_contiguous() or tensor.dtype == torch.bool:
        return None
    bytes_each = tensor.element_size()
    if tensor.shape[-1] * bytes_each % 8 or tensor.storage_offset() * bytes_each % 8:
        return None
    return tensor.view(torch.int64)
