"""The paper's figures and tables as runs: each part is some settings, and parts share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradmem.benchmarks.data_sets import OTHER, SAMPLE
from gradmem.published import appendix_b, settings, tables
from gradmem.runs.experiment import Experiment
from gradmem.validation import one_of, positive_int

__all__ = [
    "BENCHMARKS",
    "LEARNERS",
    "N_TASKS",
    "PARTS",
    "SHUFFLED",
    "Conditions",
    "Setting",
    "settings_of",
]

#: What can be asked for by name.
PARTS = ("figure-1", "table-1", "table-2", "table-3", "appendix-b")

#: The paper's benchmarks, and the training examples per task in each.
BENCHMARKS: dict[str, int] = {
    name: settings()[name]["examples_per_task"]
    for name in ("mnist-permutations", "mnist-rotations", "cifar100-incremental")
}

#: The paper's learners, in its order.
LEARNERS = tuple(dict.fromkeys(name for found in appendix_b().values() for name in found))

N_TASKS = 20

#: Table 3's first row.
SHUFFLED = "single, shuffled data"

#: The rate for shuffled data is not in the paper. On held-out shuffled data (three seeds, one
#: epoch), this is the best of single's grid; its rate for tasks one by one, 0.003, reaches 0.6.
SHUFFLED_LR = 0.1


@dataclass(frozen=True)
class Setting:
    """What runs with different seeds have in common: a learner at the paper's best values.

    `changes` are the settings that differ from these; `epochs` and `shuffled` as in `Experiment`.

    Examples
    --------
    >>> Setting("cifar100-incremental", "gem", (("memories", 64),)).slug
    'cifar100-incremental-gem-memories64'
    """

    benchmark: str
    learner: str
    changes: tuple[tuple[str, Any], ...] = ()
    epochs: int = 1
    shuffled: bool = False

    @property
    def slug(self) -> str:
        """A name for a file."""
        parts = [self.benchmark, self.learner, *(f"{name}{value}" for name, value in self.changes)]
        if self.shuffled:
            parts.append("shuffled")
        if self.epochs > 1:
            parts.append(f"{self.epochs}-epochs")
        return "-".join(parts)


@dataclass(frozen=True)
class Conditions:
    """What all runs have in common: where the data are, where it is computed, how large it is.

    `n_tasks` and `examples_per_task` left out are the paper's; smaller ones make a trial, whose
    numbers are not compared. `precision` is GEM's, on a GPU.
    """

    data: str | None = None
    device: str = "cpu"
    precision: str | None = None
    n_tasks: int | None = None
    examples_per_task: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_tasks", "examples_per_task"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))

    def is_trial(self, benchmark: str) -> bool:
        """Whether runs are smaller than the paper's, so that there is nothing to compare."""
        size = self.common(benchmark)
        known = (N_TASKS, BENCHMARKS[benchmark])
        return (size["n_tasks"], size["examples_per_task"]) != known or self.data in (SAMPLE, OTHER)

    def common(self, benchmark: str) -> dict[str, Any]:
        """The fields of `Experiment` that these conditions decide."""
        return {
            "data": self.data,
            "device": self.device,
            "n_tasks": self.n_tasks or N_TASKS,
            "examples_per_task": self.examples_per_task or BENCHMARKS[benchmark],
        }

    def experiment(self, setting: Setting, seed: int) -> Experiment:
        """One run."""
        settings = dict(setting.changes)
        if self.precision is not None and setting.learner == "gem":
            settings["precision"] = self.precision
        return Experiment(
            setting.benchmark,
            setting.learner,
            settings,
            seed=seed,
            epochs=setting.epochs,
            shuffled=setting.shuffled,
            **self.common(setting.benchmark),
        )


def settings_of(
    parts: Sequence[str],
    benchmarks: Iterable[str] = BENCHMARKS,
    learners: Iterable[str] = LEARNERS,
) -> list[Setting]:
    """What has to be run for these parts, benchmarks and learners, each setting once.

    Examples
    --------
    >>> len(settings_of(PARTS)), len(settings_of(PARTS, ["mnist-rotations", "mnist-permutations"]))
    (34, 23)
    """
    where = [one_of("benchmark", name, BENCHMARKS) for name in benchmarks]
    who = [one_of("learner", name, LEARNERS) for name in learners]
    found = [setting for part in parts for setting in _part(one_of("a part", part, PARTS))]
    return [s for s in dict.fromkeys(found) if s.benchmark in where and s.learner in who]


def _part(part: str) -> list[Setting]:
    """The settings of a part; those of Figure 1 are Appendix B's."""
    columns = tables()[part] if part.startswith("table") else appendix_b()
    pairs = [(name, column) for name, found in columns.items() for column in found]
    if part == "table-2":
        return [with_memory(learner, int(size)) for learner, size in pairs]
    if part == "table-3":
        return [after_epochs(row, int(epochs)) for row, epochs in pairs]
    return [Setting(benchmark, learner) for benchmark, learner in pairs]


def with_memory(learner: str, size: int) -> Setting:
    """A learner of Table 2 that remembers `size` examples in all; the largest is the best value."""
    if size == max(map(int, tables()["table-2"][learner])):
        return Setting("cifar100-incremental", learner)
    change = ("memories", size // N_TASKS) if learner == "gem" else ("budget", size)
    return Setting("cifar100-incremental", learner, (change,))


def after_epochs(row: str, epochs: int) -> Setting:
    """A row of Table 3 after so many passes over each task."""
    if row == SHUFFLED:
        return Setting("mnist-rotations", "single", (("lr", SHUFFLED_LR),), epochs, shuffled=True)
    return Setting("mnist-rotations", row, (), epochs)
