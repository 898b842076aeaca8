"""In which precision matrix products and convolutions are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from gradmem.cuda.devices import current_device

__all__ = ["PRECISIONS", "computing_in"]

PRECISIONS = ("fp32", "tf32", "bf16")


@contextmanager
def computing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Matrix products and convolutions in the precision asked for, and not in another one."""
    with (
        current_device(device),
        _tf32(precision == "tf32"),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        yield


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """TF32 on GPUs or not; afterwards it is as the user had it, by the older switches or the new.

    torch refuses to read the older ones once the new ones were used.
    """
    cuda, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    try:
        matmul, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        parts = [cuda, cudnn.conv, cudnn.rnn]
        before = [part.fp32_precision for part in parts]
        try:
            for part in parts:
                part.fp32_precision = "tf32" if allowed else "ieee"
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.fp32_precision = value
        return
    try:
        cuda.allow_tf32 = cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = convolutions
