"""Runs on a Ray cluster, which is an extra: `pip install "gradmem[ray]"`."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from operator import length_hint
from typing import Any, TypeVar

from gradmem.evaluation.machine import cores
from gradmem.sweeps.executors import Died, Elsewhere
from gradmem.validation import positive, positive_int
from gradmem.version import __version__

__all__ = ["OnRay"]

T = TypeVar("T")
R = TypeVar("R")

#: Seconds between looks at which nodes the cluster has.
POLL_SECONDS = 1.0

#: Seconds without any worker after which the caller is told.
PATIENCE_SECONDS = 60.0

#: Seconds to wait for an answer from a cluster's address.
ANSWER_SECONDS = 10.0

#: Workers in succession that may fail to start while no other is at work.
FAILED_STARTS = 5

#: Items that are looked at per worker for one that suits it.
AHEAD = 4

#: Bytes of shared memory of a local Ray: results are small.
OBJECT_STORE = 100_000_000


class OnRay(Elsewhere):
    """In workers (actors) on the nodes of a Ray cluster; results come through its object store.

    Nodes may come and go. An item whose worker or node is lost has a `Died` as its outcome. Workers
    stay for the next call, with what they have in memory, until `close` or the end of a `with`
    block, which also stop a Ray that was started here.

    Parameters
    ----------
    address
        Of the cluster: host:port, or "auto" for one that this machine is a node of. If left out:
        the one this process is connected to, else the environment variable RAY_ADDRESS, else a Ray
        is started on this machine.
    workers
        How many at a time; if left out, as many as the nodes have room for. A cluster that grows by
        itself (Ray's autoscaler) grows up to this number, so give it there.
    cpus
        Cores of each worker, which are its threads.
    gpus
        GPUs of each worker, 0.25 for four workers on each GPU.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        cpus: int = 1,
        gpus: float = 0.0,
    ) -> None:
        _ray()
        self.address = address
        self.workers = None if workers is None else positive_int("workers", workers)
        self.cpus = positive_int("cpus", cpus)
        self.gpus = positive("gpus", gpus) if gpus else 0.0
        if self.gpus > 1 and not float(self.gpus).is_integer():
            raise ValueError(f"gpus must be at most 1 or a whole number, got {gpus!r}")
        self._kept: list[_Worker] = []
        self._started = False

    def __enter__(self) -> OnRay:
        self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and the Ray that was started for them."""
        self._end_workers()
        if self._started:
            _ray().shutdown()
            self._started = False

    def alone(self) -> OnRay:
        """One worker, with all cores of the largest node, and a whole GPU if it has any."""
        self._connect()
        self._end_workers()  # they would be in its way
        most = max(int(node.get("CPU", 1)) for node in _nodes().values())
        return OnRay(self.address, 1, max(1, most), max(1.0, self.gpus) if self.gpus else 0.0)

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R | Died], None, None]:
        self._connect()
        waiting = _Waiting(items, getattr(function, "alike", None))
        kept, self._kept = self._kept, []
        call = _Call(self, function, waiting, kept)
        try:
            while call.goes_on():
                answers = call.answers()
                call.give()  # so that workers are busy while the caller is
                yield from answers
        finally:
            self._kept = call.end()

    def _end_workers(self) -> None:
        for worker in self._kept:
            worker.end()
        self._kept = []

    def _connect(self) -> Any:
        """Connect to the cluster, or start a Ray here; nothing if this process is connected."""
        ray = _ray()
        if ray.is_initialized():
            return ray
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            quiet |= {"include_dashboard": False, "num_cpus": max(cores(), self.cpus)}
            quiet["object_store_memory"] = OBJECT_STORE
        _require_answer(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise OSError(f"Ray at {address} cannot be used: {error}") from error
        self._started = True
        return ray

    def room(self) -> int:
        """How many workers may be there at a time, at least one."""
        if self.workers is not None:
            return self.workers
        return max(1, sum(map(self._fitting, _nodes().values())))

    def _fitting(self, node: dict[str, float]) -> int:
        """How many workers a node has room for."""
        fitting = int(node.get("CPU", 0)) // self.cpus
        if not self.gpus:
            return fitting
        gpus = int(node.get("GPU", 0))
        by_gpu = gpus * int(1 / self.gpus + 1e-6) if self.gpus <= 1 else gpus // int(self.gpus)
        return min(fitting, by_gpu)


class _Call:
    """One call of the executor: the workers that start, run an item, or have none."""

    def __init__(
        self,
        executor: OnRay,
        function: Callable[[Any], Any],
        waiting: _Waiting,
        kept: list[_Worker],
    ) -> None:
        self.executor, self.function, self.waiting = executor, function, waiting
        self.starting = {worker.start(function): worker for worker in kept}
        self.running: dict[Any, _Worker] = {}
        self.idle: list[_Worker] = []
        self._failed_starts = self._room = 0
        self._last_look = float("-inf")
        self._last_worker = time.monotonic()

    def goes_on(self) -> bool:
        """Whether there is an item left or in work; then workers are started as there is room."""
        self.give()
        if self.waiting.any():
            self._grow()
        return bool(self.running) or self.waiting.any()

    def give(self) -> None:
        """An item for each idle worker, as long as there are any."""
        while self.idle and self.waiting.any(len(self.running) + len(self.idle)):
            worker = self.idle.pop()
            taken = self.waiting.take(worker.group, self.running.values())
            self.running[worker.give(taken)] = worker

    def answers(self) -> list[tuple[Any, Any]]:
        """Items with their outcomes, if any came within a while."""
        refs = [*self.running, *self.starting]
        ready, _ = _ray().wait(refs, num_returns=1, timeout=POLL_SECONDS)
        found = []
        for ref in ready:
            if ref in self.starting:
                self._greet(self.starting.pop(ref), ref)
                continue
            worker = self.running.pop(ref)
            item, answer = worker.take(ref)
            found.append((item, answer))
            if isinstance(answer, Died):
                worker.end()
                self._last_look = float("-inf")
            else:
                self.idle.append(worker)
        if self.running or self.idle:
            self._last_worker = time.monotonic()
        elif time.monotonic() - self._last_worker > PATIENCE_SECONDS:
            self._last_worker = float("inf")
            warnings.warn(
                "no node of the Ray cluster has had room so far for a worker with "
                f"{self.executor.cpus} cores and {self.executor.gpus:g} GPUs: still waiting",
                stacklevel=3,
            )
        return found

    def end(self) -> list[_Worker]:
        """End all workers but the idle ones, and return those."""
        for worker in [*self.starting.values(), *self.running.values()]:
            worker.end()
        return self.idle

    def _grow(self) -> None:
        if time.monotonic() - self._last_look >= POLL_SECONDS:
            self._last_look, self._room = time.monotonic(), self.executor.room()
        wanted = min(self._room, len(self.running) + len(self.waiting))
        while len(self.starting) + len(self.running) + len(self.idle) < wanted:
            worker = _Worker(self.executor.cpus, self.executor.gpus)
            self.starting[worker.start(self.function)] = worker

    def _greet(self, worker: _Worker, ref: Any) -> None:
        """Take in a worker that has started; if none does, that is an error."""
        error = worker.has_started(ref)
        if error is None:
            self.idle.append(worker)
            self._failed_starts = 0
            return
        worker.end()
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS and not self.running:
            raise OSError(f"no worker can be started on Ray: {error}")


class _Remote:
    """What a worker does, on its node."""

    def start(self, function: Callable[[Any], Any], threads: int) -> tuple[str, str]:
        """Be ready for a function; tells the node and gradmem's version there."""
        import ray
        import torch

        torch.set_num_threads(threads)
        self.function = function
        return ray.get_runtime_context().get_node_id(), __version__

    def call(self, item: Any) -> Any:
        return self.function(item)


class _Worker:
    """A worker as the caller sees it."""

    def __init__(self, cpus: int, gpus: float) -> None:
        ray = _ray()
        needs = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        remote = ray.remote(_Remote).options(**needs, scheduling_strategy="SPREAD")
        self.actor, self.cpus = remote.remote(), cpus
        self.node = ""
        self.item: Any = None
        self.group: str | None = None
        """What the item in work, or the last one, has in common with those it makes quicker."""

    def start(self, function: Callable[[Any], Any]) -> Any:
        self.group = None
        return self.actor.start.remote(function, self.cpus)

    def has_started(self, ref: Any) -> BaseException | None:
        """None, or what is wrong."""
        ray = _ray()
        try:
            self.node, version = ray.get(ref)
        except ray.exceptions.RayError as error:
            return error  # type: ignore[no-any-return]
        if version != __version__:
            return ValueError(f"a node has gradmem {version}, this process has {__version__}")
        return None

    def give(self, waiting: tuple[Any, str | None]) -> Any:
        self.item, self.group = waiting
        return self.actor.call.remote(self.item)

    def take(self, ref: Any) -> tuple[Any, Any]:
        ray = _ray()
        try:
            return self.item, ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            return self.item, Died(f"the worker raised {str(error).strip().splitlines()[-1]}")
        except ray.exceptions.RayError as error:
            # Ray notices a node's sudden end only after a while, that of a process at once.
            unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
            if unavailable or self.node not in _nodes():
                return self.item, Died("the worker's node was lost", blameless=True)
            return self.item, Died(f"the worker was lost: {error}")

    def end(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            ray.kill(self.actor)


class _Waiting:
    """Items that no worker has yet; few of them are taken out of their iterable ahead of time."""

    def __init__(self, items: Iterable[Any], alike: Callable[[Any], str | None] | None) -> None:
        self._items, self._alike = iter(items), alike
        self._ahead: deque[tuple[Any, str | None]] = deque()

    def any(self, workers: int = 0) -> bool:
        """Whether there are items; looks AHEAD of them per worker ahead, where that is of use."""
        while len(self._ahead) < 1 or (
            self._ahead[-1][1] is not None and len(self._ahead) < AHEAD * workers
        ):
            try:
                item = next(self._items)
            except StopIteration:
                break
            self._ahead.append((item, self._alike(item) if self._alike else None))
        return bool(self._ahead)

    def __len__(self) -> int:
        """How many there are, or at least are known."""
        return len(self._ahead) + length_hint(self._items, 1)

    def take(self, group: str | None, others: Iterable[_Worker]) -> tuple[Any, str | None]:
        """One that its worker's last item makes quicker; else one like no other worker's."""
        busy = {worker.group for worker in others}
        found = [i for i, (_, its) in enumerate(self._ahead) if its is None or its == group]
        found += [i for i, (_, its) in enumerate(self._ahead) if its not in busy]
        place = found[0] if found else 0
        taken = self._ahead[place]
        del self._ahead[place]
        return taken


def _require_answer(address: str) -> None:
    """Raise OSError if nobody answers at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise OSError(f"no Ray answers at {address}: {error}") from None


def _nodes() -> dict[str, dict[str, float]]:
    """The resources of each node that is alive."""
    return {node["NodeID"]: node["Resources"] for node in _ray().nodes() if node["Alive"]}


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(f'Ray is an extra ({error}): pip install "gradmem[ray]"') from error
    return ray
