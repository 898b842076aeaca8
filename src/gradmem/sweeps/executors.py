"""Executors: they call a function with many items, here or in other processes.

Those for clusters (on_ray.py, on_slurm.py) are called in the same way. The function can be pickled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from typing import Any, Protocol, TypeVar

from gradmem.evaluation.machine import cores
from gradmem.validation import positive_int

__all__ = ["Died", "Elsewhere", "Executor", "InTurn", "Processes", "executor_for"]

T = TypeVar("T")
R = TypeVar("R")

#: The environment variables from which torch's libraries read their number of threads.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Died:
    """The outcome of an item whose worker ended without an answer."""

    how: str
    blameless: bool = False
    """Whether the item cannot be the reason: its machine is gone, or it was not begun."""

    @classmethod
    def with_exit_code(cls, code: int | None) -> Died:
        """The end of a process; a negative code is the signal that ended it."""
        if code is not None and code < 0:
            with suppress(ValueError):
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                return cls(f"the worker was ended by {name}{hint}")
        return cls(f"the worker ended with exit code {code}")

    def __str__(self) -> str:
        return self.how


class Executor(Protocol):
    """Calls a function with each of many items."""

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R | Died], None, None]:
        """Call `function` with each item, and yield each item with its outcome as it comes.

        Items are taken when there is a worker for them. Closing the generator early ends the calls
        that are still running.
        """
        ...


class Elsewhere:
    """The base of executors whose workers do not see the sweep's folder.

    Their workers compute and send back what they found; the process that calls the executor claims
    runs and writes results (see perform.py).
    """

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R | Died], None, None]:
        """See `Executor`."""
        raise NotImplementedError

    def alone(self) -> AbstractContextManager[Elsewhere]:
        """The same place, but one item at a time with a machine to itself, for times to compare."""
        raise NotImplementedError


class InTurn:
    """In this process, one after another in the order given; for a GPU.

    Examples
    --------
    >>> list(InTurn()(abs, [-1, 2]))
    [(-1, 1), (2, 2)]
    """

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R], None, None]:
        for item in items:
            yield item, function(item)


class Processes:
    """In several processes on this machine, each with its share of the cores.

    An item whose process dies has a `Died` as its outcome; another process takes its place.

    Parameters
    ----------
    workers
        How many; by default one per core.
    threads
        Of each, by default its share of the cores. More threads than cores slow each other down
        many times over. Results are the same to the last bit for any number of workers, but not
        for any number of threads: sums are split up differently.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        self.workers = positive_int("workers", cores() if workers is None else workers)
        share = max(1, cores() // self.workers)
        self.threads = positive_int("threads", share if threads is None else threads)

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R | Died], None, None]:
        waiting = list(items)[::-1]
        workers: dict[Any, _Worker] = {}  # by their end of the pipe
        try:
            while waiting or workers:
                while waiting and len(workers) < self.workers:
                    worker = _Worker(function, self.threads)
                    workers[worker.pipe] = worker
                    worker.give(waiting.pop())
                for pipe in connection.wait(list(workers)):
                    worker = workers[pipe]
                    item, outcome = worker.take()
                    if isinstance(outcome, Died) or not waiting:
                        workers.pop(pipe).end()
                    else:
                        worker.give(waiting.pop())
                    yield item, outcome
        finally:
            for worker in workers.values():
                worker.end()


def executor_for(workers: int) -> Executor:
    """An executor with `workers` processes; for one worker, this process itself."""
    return InTurn() if workers == 1 else Processes(workers)


class _Worker:
    """A process that does one item after another."""

    def __init__(self, function: Callable[[Any], Any], threads: int) -> None:
        context = get_context("spawn")  # torch's threads and CUDA do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.item: Any = None
        arguments = (function, theirs, threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with _worker_environment(threads):
            self.process.start()
        theirs.close()

    def give(self, item: Any) -> None:
        self.item = item
        with suppress(OSError):  # it died: `take` will say so
            self.pipe.send(item)

    def take(self) -> tuple[Any, Any]:
        try:
            return self.item, self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return self.item, Died.with_exit_code(self.process.exitcode)

    def end(self) -> None:
        """End the process, whatever it is doing: files are written whole or not at all."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()
        self.process.close()


def _work(function: Callable[[Any], Any], pipe: connection.Connection, threads: int) -> None:
    """A worker's loop: it ends when it is terminated or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    import torch

    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(function(pipe.recv()))


@contextmanager
def _worker_environment(threads: int) -> Iterator[None]:
    """Inside, started processes find their number of threads and have Ctrl-C blocked."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update({name: str(threads) for name in THREADS})
    masked = hasattr(signal, "pthread_sigmask")
    if masked:
        resource_tracker.ensure_running()  # started later, it would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        if masked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
