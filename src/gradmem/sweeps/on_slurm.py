"""Runs as jobs of Slurm through submitit, which is an extra: `pip install "gradmem[slurm]"`."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from operator import length_hint
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any, TypeVar

from gradmem.evaluation.machine import cores
from gradmem.sweeps.executors import Died, Elsewhere
from gradmem.validation import one_of, positive_int

__all__ = ["OnSlurm"]

T = TypeVar("T")
R = TypeVar("R")

#: Seconds between looks at the jobs.
POLL_SECONDS = 0.5

#: Jobs at a time on a cluster, if the caller does not say.
WORKERS = 16

#: A job has the part 1 / (SHARES × workers) of the runs that are left: large jobs first, as a job
#: takes seconds to begin; small ones last, so that all end at about the same time.
SHARES = 2

#: Minutes that a job may take, if the caller does not say.
MINUTES = 240


class OnSlurm(Elsewhere):
    """In jobs of Slurm, a few items each; a job's answers come as files in its folder.

    An item whose job ended without its answer has a `Died` as its outcome. A job that Slurm
    preempts and queues again goes on after the items it has done. Closing the generator early
    cancels its jobs; if this process is killed, they end with their items, and are not read.

    Parameters
    ----------
    folder
        For jobs, their answers and their logs; all nodes must see it.
    cluster
        "slurm", or "local" for processes on this machine, to try it.
    workers
        Jobs at a time. (default: 16; for "local" as many as cores)
    cpus, gpus
        Of each job; cores are its threads.
    parameters
        What else submitit's `update_parameters` takes: timeout_min, slurm_partition,
        slurm_account, …
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cluster: str = "slurm",
        workers: int | None = None,
        cpus: int = 1,
        gpus: int = 0,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        _submitit()
        self.folder = Path(folder).absolute()
        self.cluster = one_of("slurm:", cluster, ("slurm", "local"))
        usual = WORKERS if cluster == "slurm" else cores()
        self.workers = positive_int("workers", usual if workers is None else workers)
        self.cpus = positive_int("cpus", cpus)
        if gpus != int(gpus):
            raise ValueError(f"gpus must be a whole number on Slurm, got {gpus!r}")
        self.gpus = int(gpus)
        self.parameters = {"timeout_min": MINUTES, **(parameters or {})}

    def __enter__(self) -> OnSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # each call ends its own jobs

    def alone(self) -> OnSlurm:
        """One job at a time, with a node to itself."""
        more = {"slurm_exclusive": True} if self.cluster == "slurm" else {}
        own = {**self.parameters, **more}
        return OnSlurm(self.folder, self.cluster, 1, self.cpus, self.gpus, own)

    def __call__(
        self, function: Callable[[T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R | Died], None, None]:
        waiting, jobs, executor = iter(items), list[_Sent](), self._executor()
        try:
            while True:
                while len(jobs) < self.workers:
                    share = length_hint(waiting, 1) / (SHARES * self.workers)
                    some = list(islice(waiting, max(1, round(share))))
                    if not some:
                        break
                    job = _Job(function, some, Path(mkdtemp(dir=self.folder)), self.cpus)
                    jobs.append(_Sent(job, executor.submit(job), self.cluster == "local"))
                if not jobs:
                    return
                for sent in list(jobs):
                    is_over = sent.is_over()  # before its answers are read: then these are all
                    yield from sent.answers()
                    if is_over:
                        jobs.remove(sent)
                        yield from sent.rest()
                time.sleep(POLL_SECONDS)
        finally:
            for sent in jobs:
                sent.cancel()

    def _executor(self) -> Any:
        submitit = _submitit()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            executor = submitit.AutoExecutor(self.folder, cluster=self.cluster)
            executor.update_parameters(
                name="gradmem",
                tasks_per_node=1,
                cpus_per_task=self.cpus,
                gpus_per_node=self.gpus,
                **self.parameters,
            )
        except (RuntimeError, ValueError, NameError) as error:
            raise ValueError(f"Slurm cannot be used like this: {error}") from error
        return executor


class _Job:
    """What a job does: call a function with each of its items, and write each answer."""

    def __init__(
        self, function: Callable[[Any], Any], items: list[Any], folder: Path, threads: int
    ) -> None:
        self.function, self.items, self.folder, self.threads = function, items, folder, threads

    def __call__(self) -> list[Any]:
        import torch

        torch.set_num_threads(self.threads)
        _end_at_errors_of(signal.SIGUSR2)
        for i, item in enumerate(self.items):
            if self.answer(i) is None:  # else the job was queued again
                self._write(i, self.function(item))
        return [self.answer(i) for i in range(len(self.items))]

    def answer(self, i: int) -> tuple[Any] | None:
        """The answer for an item in a tuple; None if there is none yet."""
        try:
            return (pickle.loads(self._file(i).read_bytes()),)
        except FileNotFoundError:
            return None

    def _write(self, i: int, answer: Any) -> None:
        """Write an answer whole or not at all."""
        temporary = self._file(i).with_suffix(".part")
        temporary.write_bytes(pickle.dumps(answer))
        os.replace(temporary, self._file(i))

    def _file(self, i: int) -> Path:
        return self.folder / f"{i}.pkl"


class _Sent:
    """A job as the caller sees it."""

    def __init__(self, job: _Job, handle: Any, is_here: bool) -> None:
        self.job, self.handle, self.is_here = job, handle, is_here
        self._left = dict(enumerate(job.items))

    def is_over(self) -> bool:
        return bool(self.handle.done())

    def answers(self) -> Iterator[tuple[Any, Any]]:
        """The items that have been done since the last call, with their answers."""
        for i in list(self._left):
            found = self.job.answer(i)
            if found is None:
                return
            yield self._left.pop(i), found[0]

    def rest(self) -> Iterator[tuple[Any, Any]]:
        """What a job that is over has not shown so far: answers, or that it died of an item."""
        if not self.is_here and self._left and self.handle.exception() is None:
            # Files that another machine wrote may be seen late; submitit waits for its own.
            for i, found in enumerate(self.handle.result()):
                if i in self._left:
                    yield self._left.pop(i), found[0]
        for n, item in enumerate(self._left.values()):
            last = (self.handle.stderr() or "").strip().splitlines()[-1:]
            how = ": ".join([f"job {self.handle.job_id} ended without an answer", *last])
            yield item, Died(how, blameless=n > 0)

    def cancel(self) -> None:
        self.handle.cancel(check=False)
        if self.is_here:
            self.handle.wait()


def _end_at_errors_of(number: int) -> None:
    """End this process if the handler of a signal raises an error, which would look like a run's.

    submitit's raises one where a job is out of time and is not queued again.
    """
    handler = signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            if callable(handler):
                handler(number, frame)
        except Exception as error:
            print(error, flush=True)
            os._exit(1)

    signal.signal(number, handle)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ValueError(f'Slurm is an extra ({error}): pip install "gradmem[slurm]"') from error
    return submitit
