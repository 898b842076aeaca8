"""One run of a sweep, in any process: claim it, run it, write its result.

`Perform` does all three in a worker that sees the sweep's folder. For workers that do not,
`perform_elsewhere` claims and writes in this process, and only `Compute` is called in the worker.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradmem.benchmarks import lookup
from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.files import plain
from gradmem.learners import Learner
from gradmem.runs.experiment import Experiment, keep_continuums, settings_key
from gradmem.runs.read_folder import Failure, Run
from gradmem.sweeps.executors import Died, Elsewhere
from gradmem.sweeps.store import Failed, Store

__all__ = ["Compute", "LostDeviceError", "Perform", "perform_elsewhere"]

#: Seconds between two saves of a run; shorter runs are made again if they are killed.
PAUSE = 10.0


class LostDeviceError(OSError):
    """The GPU cannot be used any more by this process; `failed` is the error after which."""

    def __init__(self, device: str, failed: Failed) -> None:
        super().__init__(f"{device} can no longer be used by this process: {failed.message}")
        self.device, self.failed = device, failed

    def __reduce__(self) -> tuple[Any, ...]:
        return LostDeviceError, (self.device, self.failed)


@dataclass
class Compute:
    """A function of an experiment that runs it: its result as plain data, or its error.

    `continuums` is how many continuums the process keeps, on their device.

    Where a GPU's memory was full, which may be other processes' doing, it is as if the worker had
    died: that says nothing about the run, and it is made again.

    Runs of gradmem's learners that differ only in their seed and follow each other share a learner,
    set back to the state of a new one. On a GPU they so share its recorded CUDA graphs.
    """

    continuums: int = 1
    _learner: Learner | None = field(default=None, init=False, repr=False)
    _group: str = field(default="", init=False, repr=False)

    def __call__(
        self, experiment: Experiment, checkpoint: RunCheckpoint | None = None
    ) -> dict[str, Any] | Failed | Died:
        keep_continuums(self.continuums)
        try:
            result = experiment.run(learner=self._fresh(experiment), checkpoint=checkpoint)
        except Exception as error:
            self._learner = None  # its state is unknown after an error
            failed = Failed.of(error)
            _require_device(experiment.device, failed)
            if not _is_full(error):
                return failed
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Died(f"a GPU's memory was full, {failed.message}")
        described: dict[str, Any] = plain(result.described(plain(experiment.config())))
        return described

    def alike(self, experiment: Experiment) -> str | None:
        """A text that runs have in common which are quicker one after another in one worker.

        None on a CPU, where no time is saved.
        """
        return self._group_of(experiment) if experiment.device.startswith("cuda") else None

    def _fresh(self, experiment: Experiment) -> Learner:
        """A learner in its first state: the last run's learner if only the seed differs.

        Learners and networks that are not gradmem's are made anew, since their state may not be
        complete.
        """
        group = self._group_of(experiment)
        known = lookup.is_own(experiment.learner) and lookup.is_own(experiment.benchmark)
        if self._learner is None or group != self._group or not known:
            self._learner = None  # frees its memory
            self._learner, self._group = experiment.new_learner(), group
        else:
            new = experiment.new_learner()
            self._learner.load_state_dict(new.state_dict())
            self._learner.settings = new.settings  # with its seed, which checkpoints are told by
        return self._learner

    @staticmethod
    def _group_of(experiment: Experiment) -> str:
        return settings_key(experiment.config() | {"seed": None})


@dataclass
class Perform:
    """A function of an experiment that may be called in any process that sees the folder.

    It returns the finished run, its failure, or None if another process is running it. A run that
    is done is not run again; its stored outcome is returned.
    """

    folder: Path
    compute: Compute = field(default_factory=Compute)

    def __call__(self, experiment: Experiment) -> Run | Failure | Died | None:
        store = Store(self.folder)
        with store.claim(experiment.key) as mine:
            if store.is_done(experiment.key):
                return store.outcome(experiment)
            return self._run(store, experiment) if mine else None

    def _run(self, store: Store, experiment: Experiment) -> Run | Failure | Died:
        store.start(experiment)
        checkpoint = RunCheckpoint(store.folder(experiment.key) / "checkpoint", pause=PAUSE)
        try:
            answer = self.compute(experiment, checkpoint)
        except LostDeviceError as error:
            store.fail(experiment, error.failed)
            raise
        if isinstance(answer, Died):
            return answer
        outcome = _stored(store, experiment, answer)
        if isinstance(outcome, Run):
            checkpoint.clear()
        return outcome


def perform_elsewhere(
    store: Store, executor: Elsewhere, compute: Compute, experiments: Sequence[Experiment]
) -> Generator[tuple[Experiment, Run | Failure | Died], None, None]:
    """Make runs in workers that do not see the store's folder; this process does all in it.

    Runs that other processes have claimed or done are left out. A run is claimed when a worker
    takes it, and until its result is written.
    """
    claimed = _Claimed(store, experiments)
    try:
        with closing(executor(compute, claimed)) as answers:
            for experiment, answer in answers:
                with claimed.claims.pop(experiment.key):
                    outcome = (
                        answer if isinstance(answer, Died) else _stored(store, experiment, answer)
                    )
                yield experiment, outcome
    finally:
        for claim in claimed.claims.values():
            claim.close()


class _Claimed:
    """Iterates over experiments, each claimed and begun when it is taken; see `claims`."""

    def __init__(self, store: Store, experiments: Sequence[Experiment]) -> None:
        self.claims: dict[str, ExitStack] = {}
        self._store, self._waiting = store, list(reversed(experiments))

    def __iter__(self) -> Iterator[Experiment]:
        return self

    def __length_hint__(self) -> int:
        return len(self._waiting)

    def __next__(self) -> Experiment:
        while self._waiting:
            experiment = self._waiting.pop()
            with ExitStack() as claim:
                mine = claim.enter_context(self._store.claim(experiment.key))
                if mine and not self._store.is_done(experiment.key):
                    self._store.start(experiment)
                    self.claims[experiment.key] = claim.pop_all()
                    return experiment
        raise StopIteration


def _stored(store: Store, experiment: Experiment, answer: dict[str, Any] | Failed) -> Run | Failure:
    if isinstance(answer, Failed):
        return store.fail(experiment, answer)
    return store.finish(experiment, answer)


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that a GPU's memory did not suffice."""
    if error is None:
        return False
    words = ("out of memory", "ALLOC_FAILED")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return isinstance(error, torch.OutOfMemoryError) or said or _is_full(error.__cause__)


def _require_device(device: str, failed: Failed) -> None:
    """Raise LostDeviceError if the GPU cannot be used any more: later runs are not failures."""
    if not device.startswith("cuda"):
        return
    try:
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        raise LostDeviceError(device, failed) from error
