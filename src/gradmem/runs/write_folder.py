"""Writes the folder of an experiment while it is run and when it is done."""

from __future__ import annotations

import os

from gradmem.evaluation import Progress, Result
from gradmem.evaluation.result_folder import ResultFolder
from gradmem.files import write_json
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Run

__all__ = ["RunFolder"]


class RunFolder(ResultFolder):
    """Writes one experiment's results; see `ResultFolder`. It is a callback of the run, too."""

    def __init__(self, path: str | os.PathLike[str], experiment: Experiment) -> None:
        super().__init__(path, experiment.config())

    def on_task(self, progress: Progress) -> None:
        """Write the rows of R measured so far to partial.json."""
        if progress.partial is not None:
            self.renew()
            write_json(self.path / "partial.json", progress.partial.described(self.config))

    def save(self, result: Result) -> Run:
        """Write the whole result, and return it as a run."""
        return Run(self.path, self.config, self.write(result.described(self.config)))
