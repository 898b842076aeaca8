"""Copies that a GPU's host does not wait for, and several small tensors copied by one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["copy_in_turn", "copy_to", "copy_to_host", "copy_together"]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device; a GPU is not waited for."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_to_host(tensor: Tensor) -> Tensor:
    """A tensor on the host; complete once a GPU gets there, which is not waited for."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: by one kernel, if they are on a GPU and without gaps."""
    words = _as_words(targets, sources)
    if words is not None:
        torch._foreach_copy_(*words)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_in_turn(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[None]:
    """Copy the first parts of the sources, each as long as its target; then the next ones, …"""
    to, whole = _as_words(targets, sources) or ([*targets], [*sources])
    pairs = zip(to, whole, strict=True)
    for parts in zip(*(source.split(len(target)) for target, source in pairs), strict=True):
        torch._foreach_copy_(to, parts)
        yield


def _as_words(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """The same bytes as words of eight, which one kernel copies; None if there is none for them."""
    if len(targets) < 2 or not targets[0].is_cuda:
        return None
    words = [_words(tensor) for tensor in (*targets, *sources)]
    known = [word for word in words if word is not None]
    same = all(
        one.dtype == other.dtype and one.device == other.device
        for one, other in zip(targets, sources, strict=True)
    )
    if not same or len(known) < len(words):
        return None
    return known[: len(targets)], known[len(targets) :]


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
