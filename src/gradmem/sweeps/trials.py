"""Settings to try, a round at a time: a whole grid, or what Optuna suggests.

Optuna is an extra: `pip install "gradmem[optuna]"`. Its suggestions are written to the sweep's
folder (trials.json) before they are run. What it suggests next depends on those, on the runs in the
folder and on nothing else: not on how many workers there are, nor on when the sweep was stopped.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Run
from gradmem.sweeps.plan import Sweep
from gradmem.sweeps.store import Store

__all__ = ["ROUND", "Round", "require_search", "rounds", "tried_settings"]

#: Settings of a learner that are tried at a time; then Optuna learns how they did.
ROUND = 10

#: Digits of suggested numbers.
DIGITS = 3

#: From this factor between the ends of a range on, factors count and not differences.
LOGARITHMIC = 10


@dataclass(frozen=True)
class Round:
    """Runs that can be made at a time, and at most how many come `later`, after them."""

    experiments: list[Experiment]
    later: int = 0


def require_search(sweep: Sweep) -> None:
    """Raise ValueError if what finds the settings to try is not installed."""
    if sweep.search == "optuna":
        _optuna()


def rounds(store: Store, sweep: Sweep) -> Iterator[Round]:
    """The runs to choose from; all runs of a round must be done before the next is asked for."""
    if sweep.search == "grid":
        yield Round(_each_once(sweep.experiments()))
        return
    assert sweep.trials is not None
    learners = [(b, learner) for b, grids in sweep.grids.items() for learner in grids]
    done = 0
    while done < sweep.trials:
        for benchmark, learner in learners:
            tried = store.trials()[benchmark][learner]
            if len(tried) <= done:
                told = [(s, _mean_acc(store, sweep, benchmark, learner, s)) for s in tried]
                n = min(ROUND, sweep.trials - done)
                store.add_trials(
                    benchmark, learner, done, suggest(sweep, benchmark, learner, told, n)
                )
        known = store.trials()
        stop = min(sweep.trials, *(len(known[b][learner]) for b, learner in learners))
        new = {b: {name: t[done:stop] for name, t in tried.items()} for b, tried in known.items()}
        later = (sweep.trials - stop) * len(sweep.seeds) * len(learners)
        yield Round(_each_once(sweep.experiments(new)), later)
        done = stop


def tried_settings(store: Store, sweep: Sweep) -> list[Experiment]:
    """All runs to choose from, of a search whose rounds were all begun."""
    if sweep.search == "grid":
        return sweep.experiments()
    known = store.trials()
    counts = [len(settings) for learners in known.values() for settings in learners.values()]
    assert sweep.trials is not None
    if min(counts) < sweep.trials:
        raise ValueError(
            f"{min(counts)} of {sweep.trials} trials were begun in {store.path}: "
            f"`gradmem sweep {store.path}` goes on with them"
        )
    return _each_once(sweep.experiments(known))


def suggest(
    sweep: Sweep,
    benchmark: str,
    learner: str,
    told: Sequence[tuple[Mapping[str, Any], float | None]],
    n: int,
) -> list[dict[str, Any]]:
    """`n` settings to try after others, each `told` with its mean ACC, or None if a run failed.

    They are those of Optuna's `TPESampler`. Failed settings count as worse than all others.
    """
    optuna = _optuna()
    grid = sweep.grids[benchmark][learner]
    space = _space(sweep, benchmark, learner)
    states = optuna.trial.TrialState
    with _quiet(optuna):
        seed = zlib.crc32(f"{benchmark} {learner} {len(told)}".encode())
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for settings, acc in told:
            params = {name: _parameter(settings[name], grid[name], space[name]) for name in space}
            about = {"state": states.PRUNED} if acc is None else {"value": acc}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, **about))
        asked = [study.ask(space).params for _ in range(n)]
    fixed = {name: values[0] for name, values in grid.items()}
    return [
        fixed | {name: _setting(value, grid[name], space[name]) for name, value in one.items()}
        for one in asked
    ]


def _space(sweep: Sweep, benchmark: str, learner: str) -> dict[str, Any]:
    """The settings with more than one value, as Optuna's distributions."""
    made = _optuna().distributions
    space = {}
    for name, values in sweep.grids[benchmark][learner].items():
        if len(values) < 2:
            continue
        if all(isinstance(value, int | float) and type(value) is not bool for value in values):
            low, high = min(values), max(values)
            # An int for a setting that is a float is made one.
            usual = [Experiment(benchmark, learner, {name: v}).settings[name] for v in values]
            kind = made.IntDistribution if set(map(type, usual)) == {int} else None
            kind = kind or made.FloatDistribution
            space[name] = kind(low, high, log=low > 0 and high / low >= LOGARITHMIC)
        else:
            space[name] = made.CategoricalDistribution(range(len(values)))
    return space


def _setting(parameter: Any, values: Sequence[Any], distribution: Any) -> Any:
    """What Optuna suggests as a setting: rounded, if it is a float; one of the values, if a place.

    Floats are rounded so that people can read them.
    """
    if not hasattr(distribution, "low"):
        return values[parameter]
    if isinstance(parameter, int):
        return parameter
    return min(max(float(f"{parameter:.{DIGITS}g}"), distribution.low), distribution.high)


def _parameter(setting: Any, values: Sequence[Any], distribution: Any) -> Any:
    """What `_setting` made a setting of."""
    return setting if hasattr(distribution, "low") else values.index(setting)


def _mean_acc(
    store: Store, sweep: Sweep, benchmark: str, learner: str, settings: Mapping[str, Any]
) -> float | None:
    """The mean over the seeds on the data for choosing; None if a run failed."""
    one = {b: dict.fromkeys(learners, ()) for b, learners in sweep.grids.items()}
    one[benchmark][learner] = (settings,)  # type: ignore[assignment]
    outcomes = [store.outcome(experiment) for experiment in sweep.experiments(one)]
    accs = [outcome.result["acc"] for outcome in outcomes if isinstance(outcome, Run)]
    if len(accs) < len(outcomes) or None in accs:
        return None
    return math.fsum(accs) / len(accs)


def _each_once(experiments: Sequence[Experiment]) -> list[Experiment]:
    return list({experiment.key: experiment for experiment in experiments}.values())


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Inside, Optuna logs warnings only."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ValueError(f'Optuna is an extra ({error}): pip install "gradmem[optuna]"') from error
    return optuna
