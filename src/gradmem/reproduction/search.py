"""The search for settings (Appendix A): a sweep, and a small file with what it chose."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradmem.files import check_texts, misfit, read_json, write_json
from gradmem.published import grids
from gradmem.reproduction.plan import BENCHMARKS, Conditions
from gradmem.runs.read_folder import MAX_NUMBER
from gradmem.sweeps import MODES, Event, Executor, Finished, Sweep, run_sweep
from gradmem.sweeps.plan import final_numbers
from gradmem.validation import one_of

__all__ = ["keep_search", "load_searches", "search"]

#: Settings are chosen with so many seeds.
SEEDS = 3

#: What the file of a search must hold; no machine, if no run finished.
SHAPE = {
    **dict.fromkeys(("benchmark", "command", "device"), str),
    "trial": bool,
    "machine": dict,
    "choices": [
        {
            "learner": str,
            "settings": dict,
            "considered": int,
            "failed": int,
            "test": [{"acc": int | float | None}],
        }
    ],
}
MACHINE = {"torch": str, "gradmem": str}


def search(
    out: str | os.PathLike[str],
    benchmark: str,
    conditions: Conditions,
    seeds: int,
    executor: Executor,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
    grid: Mapping[str, Mapping[str, Any]] | None = None,
) -> Finished:
    """Try the paper's grid on held-out data, and run what is best on the test sets.

    The sweep's folder is made in `out`. `seeds` is the number of runs with each chosen setting; the
    choice itself takes three other seeds. `grid` (learner → setting → values) replaces the paper's.
    See `gradmem.sweeps.run_sweep` for the other parameters.
    """
    tried = {name: dict(values) for name, values in (grid or grids()[benchmark]).items()}
    if conditions.precision is not None and "gem" in tried:
        tried["gem"]["precision"] = [conditions.precision]
    common = {name: v for name, v in conditions.common(benchmark).items() if v is not None}
    sweep = Sweep(
        {benchmark: tried},
        seeds=tuple(range(SEEDS)),
        final_seeds=final_numbers("validation", seeds),
        common=common,
    )
    return run_sweep(Path(out) / f"grid-{benchmark}", sweep, executor, retry_failed, on_event)


def keep_search(
    folder: str | os.PathLike[str],
    benchmark: str,
    done: Finished,
    conditions: Conditions,
    command: str,
) -> Path:
    """Write what a search chose, and how that did on the test sets."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    kept = {
        "benchmark": benchmark,
        "chosen_on": MODES["validation"],
        "command": command,
        "trial": conditions.is_trial(benchmark),
        "device": conditions.device,
        "machine": done.runs[0].result["versions"] if done.runs else {},
        "choices": [
            {
                "learner": choice.learner,
                "settings": choice.settings,
                "validation_acc": round(choice.acc, 4),
                "seeds": choice.seeds,
                "considered": choice.considered,
                "failed": choice.failed,
                "test": [
                    {name: run.result[name] for name in ("seed", "acc", "bwt", "fwt")}
                    for run in done.runs
                    if run.config["learner"] == choice.learner
                ],
            }
            for choice in done.choices
        ],
    }
    path = Path(folder) / f"grid-{benchmark}.json"
    write_json(path, kept)
    return path


def load_searches(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The searches kept in a folder."""
    return [_read(file) for file in sorted(Path(folder).glob("grid-*.json"))]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = {"device": "cpu"} | read_json(file, "it")
        if problem := misfit(found, SHAPE) or (
            misfit(found["machine"], MACHINE, "machine") if found["machine"] else None
        ):
            raise ValueError(problem)
        check_texts(found)
        known = grids()[one_of("benchmark", found["benchmark"], BENCHMARKS)]
        for choice in found["choices"]:
            needed = dict.fromkeys(known.get(choice["learner"], ()), object)
            if problem := misfit(choice["settings"], needed, f"{choice['learner']}'s settings"):
                raise ValueError(problem)
            if not all(abs(run["acc"] or 0) < MAX_NUMBER for run in choice["test"]):
                raise ValueError(f"{choice['learner']} has an acc that is too large")
    except ValueError as error:
        raise ValueError(f"{file} is no kept search: {error}") from error
    return found
