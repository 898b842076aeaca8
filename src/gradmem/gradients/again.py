"""Passes that are made a second time: with the same random numbers, and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

__all__ = ["Restore", "as_it_was", "buffers_put_back", "drawn_again"]

#: Gives a block in which something is as it was.
Restore = Callable[[], AbstractContextManager[None]]


def drawn_again(device: torch.device) -> Restore:
    """Gives blocks in which the random numbers are those that are drawn from now on."""
    state = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng([] if on_device is None else [device]):
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)
            yield

    return restored


@contextmanager
def buffers_put_back(module: nn.Module) -> Iterator[None]:
    """A block after which the module's buffers have the values they had, where they are.

    For whole passes: a backward pass that comes after the block would find them changed.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def as_it_was(module: nn.Module, device: torch.device) -> Restore:
    """Gives blocks in which a module computes what it computes now, on copies of its buffers."""
    numbers = drawn_again(device)

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as undo, numbers():
            for part in module.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    undo.callback(part._buffers.__setitem__, name, buffer)
                    part._buffers[name] = buffer.clone()
            yield

    return restored
