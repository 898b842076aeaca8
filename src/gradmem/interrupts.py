"""Steps that are not torn: interrupts wait for their end, and one thread steps at a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Lock", "uninterrupted"]


class Lock:
    """A lock that its own thread may take again, and that is new in a copy of its owner."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lock:
        return Lock()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended; a second one ends it at once.

    Only the main thread is interrupted by signals, so nothing is done in others. A handler of the
    user's own is called afterwards in place of the interrupt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        waiting.append((number, frame))

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, before)
            if waiting:
                before(*waiting[0])
