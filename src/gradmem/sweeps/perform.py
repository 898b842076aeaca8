"""One run of a sweep, in any process: claim it, run it, write its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.learners import LEARNERS, Learner
from gradmem.runs.experiment import Experiment, keep_continuums, settings_key
from gradmem.runs.read_folder import Failure, Run
from gradmem.sweeps.store import Store

__all__ = ["Perform"]

#: Seconds between two saves of a run; shorter runs are made again if they are killed.
PAUSE = 10.0


@dataclass
class Perform:
    """A function of an experiment that may be called in any process that sees the folder.

    It returns the finished run, its failure, or None if another process is running it. A run that
    is done is not run again; its stored outcome is returned. `continuums` is how many continuums
    the process keeps, on their device.

    Runs of gradmem's learners that differ only in their seed and follow each other share a learner,
    set back to the state of a new one. On a GPU they so share its recorded CUDA graphs.
    """

    folder: Path
    continuums: int = 1
    _learner: Learner | None = field(default=None, init=False, repr=False)
    _group: str = field(default="", init=False, repr=False)

    def __call__(self, experiment: Experiment) -> Run | Failure | None:
        store = Store(self.folder)
        with store.claim(experiment.key) as mine:
            if store.is_done(experiment.key):
                return store.outcome(experiment)
            return self._run(store, experiment) if mine else None

    def _run(self, store: Store, experiment: Experiment) -> Run | Failure:
        keep_continuums(self.continuums)
        store.start(experiment)
        checkpoint = RunCheckpoint(store.folder(experiment.key) / "checkpoint", pause=PAUSE)
        try:
            result = experiment.run(learner=self._fresh(experiment), checkpoint=checkpoint)
        except Exception as error:
            self._learner = None  # its state is unknown after an error
            failure = store.fail(experiment, error)
            _require_device(experiment.device, error)
            return failure
        run = store.finish(experiment, result)
        checkpoint.clear()
        return run

    def _fresh(self, experiment: Experiment) -> Learner:
        """A learner in its first state: the last run's learner if only the seed differs.

        Learners that are not gradmem's are made anew, since their state may not be complete.
        """
        group = settings_key(experiment.config() | {"seed": None})
        known = experiment.learner in LEARNERS
        if self._learner is None or group != self._group or not known:
            self._learner = None  # frees its memory
            self._learner, self._group = experiment.new_learner(), group
        else:
            self._learner.load_state_dict(experiment.new_learner().state_dict())
        return self._learner


def _require_device(device: str, error: Exception) -> None:
    """Raise OSError if the GPU cannot be used any more, so that later runs are not failures."""
    if not device.startswith("cuda"):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise OSError(f"{device} can no longer be used by this process: {error}") from error
