"""What is done with one run of a sweep, in whatever process: claim it, run it, keep the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradmem.learners import Learner
from gradmem.runs.experiment import Experiment, keep_continuums
from gradmem.sweeps.keys import Planned, settings_text
from gradmem.sweeps.store import Store

__all__ = ["ELSEWHERE", "FAILED", "FINISHED", "Outcome", "Perform"]

FINISHED, FAILED, ELSEWHERE = "finished", "failed", "elsewhere"


@dataclass(frozen=True)
class Outcome:
    """What came of a run: "finished", "failed", or "elsewhere" if another process has it."""

    kind: str
    acc: float | None = None
    seconds: float | None = None
    error: str = ""


@dataclass
class Perform:
    """A function of a planned run that may be called in any process that sees the folder.

    A run that is done is not run again, and its outcome is the one that is stored. Runs that differ
    only in their seed and follow each other share a learner, put back to a new one's state, so that
    on a GPU they share the recorded steps.

    Parameters
    ----------
    folder
        The sweep's.
    continuums
        How many to keep, each on its device.
    """

    folder: Path
    continuums: int = 1
    _learner: Learner | None = field(default=None, init=False, repr=False)
    _group: str = field(default="", init=False, repr=False)

    def __call__(self, run: Planned) -> Outcome:
        store = Store(self.folder)
        with store.claim(run.key) as mine:
            if store.is_done(run.key):
                return stored(store, run)
            if not mine:
                return Outcome(ELSEWHERE)
            return self._run(store, run)

    def _run(self, store: Store, run: Planned) -> Outcome:
        keep_continuums(self.continuums)
        store.start(run.key, run.experiment)
        begin = time.perf_counter()
        try:
            result = run.experiment.run(learner=self._fresh(run.experiment))
        except Exception as error:
            self._learner = None  # whatever happened to it
            store.fail(run.key, run.experiment, error)
            _require_device(run.experiment.device, error)
            return stored(store, run)
        store.finish(run.key, run.experiment, result)
        return Outcome(FINISHED, result.acc, time.perf_counter() - begin)

    def _fresh(self, experiment: Experiment) -> Learner:
        """A learner in its first state; the last run's, if only the seed is another."""
        group = settings_text(experiment.config() | {"seed": None})
        if self._learner is None or group != self._group:
            self._learner = None  # frees its memory
            self._learner, self._group = experiment.new_learner(), group
        else:
            self._learner.load_state_dict(experiment.new_learner().state_dict())
        return self._learner


def stored(store: Store, run: Planned) -> Outcome:
    """The outcome of a run that is done."""
    if store.is_finished(run.key):
        result = store.run(run.key).result
        return Outcome(FINISHED, result["acc"], result["seconds"])
    failure = store.failure(run.key)
    return Outcome(FAILED, error=f"{failure['type']}: {failure['message']}")


def _require_device(device: str, error: Exception) -> None:
    """Some errors end a GPU's work for the whole process; the next runs are not to blame."""
    if not device.startswith("cuda"):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise OSError(f"{device} can no longer be used by this process: {error}") from error
