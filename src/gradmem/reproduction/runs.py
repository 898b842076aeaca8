"""Making the paper's runs in a folder; interrupted, they can be gone on with.

OUT/alone       Table 1's runs: one after another, with all cores, since their seconds are compared;
                on a cluster, with all cores of one node
OUT/others      the rest, several at a time where there are cores for it
OUT/grid-NAME   the sweep behind a benchmark's settings, if asked for
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gradmem.evaluation import machine
from gradmem.reproduction.plan import Conditions, Setting, settings_of
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Run
from gradmem.sweeps import (
    Elsewhere,
    Event,
    Executor,
    InTurn,
    Phase,
    Round,
    Store,
    check_settings,
    executor_for,
    only_one,
)

__all__ = ["Timed", "default_workers", "make_runs"]

#: Runs, each with whether it had the machine to itself.
Timed = list[tuple[Run, bool]]


def make_runs(
    out: str | os.PathLike[str],
    settings: Sequence[Setting],
    seeds: Sequence[int],
    conditions: Conditions,
    executor: Executor | None = None,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
    on_finished: Callable[[Setting, Timed], object] | None = None,
) -> tuple[dict[Setting, Timed], list[tuple[Experiment, str]]]:
    """Run each setting with each seed, where the folder lacks it.

    It can be interrupted or killed and called again. `executor` makes the runs other than Table
    1's; `retry_failed` and `on_event` are those of `gradmem.sweeps.run_sweep`. `on_finished` is
    called after each run with its setting and all finished runs of the setting.

    Returns the finished runs of each setting, by seed, and what failed, with its error.
    """
    out = Path(out)
    cuda = conditions.device.startswith("cuda")
    timed = set(settings_of(["table-1"]))
    planned = {
        (setting, seed): conditions.experiment(setting, seed)
        for setting, seed in _order(settings, seeds, cuda)
    }
    others = executor or executor_for(default_workers(conditions))
    is_elsewhere = isinstance(others, Elsewhere)
    check_settings(list(planned.values()), is_elsewhere)
    setting_of = {run.key: setting for (setting, _), run in planned.items()}

    def finished(setting: Setting) -> Timed:
        store = Store(out / ("alone" if setting in timed else "others"))
        keys = [planned[setting, seed].key for seed in seeds]
        return [(store.run(key), setting in timed) for key in keys if store.is_finished(key)]

    def report(event: Event) -> None:
        if on_finished and event.experiment and isinstance(event.outcome, Run):
            setting = setting_of[event.experiment.key]
            on_finished(setting, finished(setting))
        if on_event:
            on_event(event)

    failed: dict[str, tuple[Experiment, str]] = {}
    alone = others.alone() if isinstance(others, Elsewhere) else nullcontext(InTurn())
    places: dict[str, AbstractContextManager[Executor]] = {}
    places = {"alone": alone, "others": nullcontext(others)}
    with only_one(out, "paper"):
        for name, place in places.items():
            runs = [run for (s, _), run in planned.items() if (s in timed) == (name == "alone")]
            if runs:
                with place as where:
                    phase = Phase(Store(out / name), where, retry_failed, report)
                    failed |= phase.make(name, [Round(runs)])
    made = {setting: finished(setting) for setting in settings}
    return {setting: runs for setting, runs in made.items() if runs}, list(failed.values())


def default_workers(conditions: Conditions) -> int:
    """One worker per two cores, since two threads make a run quicker; one on a GPU."""
    return 1 if conditions.device.startswith("cuda") else max(1, machine.cores() // 2)


def _order(
    settings: Sequence[Setting], seeds: Sequence[int], cuda: bool
) -> list[tuple[Setting, int]]:
    """The runs in the order in which they are made fastest.

    On a GPU a setting's seeds follow each other and share recorded CUDA graphs. On a CPU runs of
    the same benchmark, epochs and seed follow each other and share their data.
    """

    def place(pair: tuple[Setting, int]) -> tuple[Any, ...]:
        setting, seed = pair
        alike = (setting.benchmark, setting.shuffled, setting.epochs)
        return alike if cuda else (*alike, seed)

    return sorted(((setting, seed) for setting in settings for seed in seeds), key=place)
