"""What the paper has for a row, where it has something that can be compared."""

from __future__ import annotations

from typing import Any

from gradmem.benchmarks import BENCHMARKS as KNOWN
from gradmem.evaluation.metrics import transfer_metrics
from gradmem.published import appendix_b
from gradmem.reports.summary import Row
from gradmem.reproduction.plan import BENCHMARKS, OTHER, SAMPLE

__all__ = ["PUBLISHED", "published", "published_first_task"]

#: What such a value is called in a legend.
PUBLISHED = "published (one run)"


def published(row: Row) -> dict[str, float] | None:
    """ACC, BWT and FWT of the same learner and benchmark, from the R of Appendix B (one run).

    They are computed by equations 2 to 4, since the printed ones divide by T where these divide by
    T − 1. None where the paper has no such R: for other data, settings, epochs, sizes of batches
    or orders of tasks, mixed data, or another number of tasks or examples.
    """
    entry = _entry(row)
    if entry is None:
        return None
    metrics = transfer_metrics(entry["R"], entry["baseline"])
    return {"acc": metrics.acc, "bwt": metrics.bwt, "fwt": metrics.fwt}


def published_first_task(row: Row) -> list[float] | None:
    """The accuracy on the first task before training and after each task, from the same R."""
    entry = _entry(row)
    return None if entry is None else [after[0] for after in (entry["baseline"], *entry["R"])]


def _entry(row: Row) -> dict[str, Any] | None:
    """The row's matrix in Appendix B."""
    entry = appendix_b().get(row.benchmark, {}).get(row.learner)
    run = row.runs[0]
    recipe = KNOWN[row.benchmark].settings.get(row.learner, {}) if row.benchmark in KNOWN else {}
    settings = run.config.get("settings", {})
    if (
        entry is None
        or run.config.get("data") in (SAMPLE, OTHER)
        or run.R.shape != (len(entry["R"]),) * 2
        or any(run.config.get(name) not in values for name, values in _same(row.benchmark).items())
        or any(settings.get(name) != value for name, value in recipe.items())
    ):
        return None
    return entry


def _same(benchmark: str) -> dict[str, tuple[Any, ...]]:
    """What else the paper's runs have in common; None is what was left out, and so as usual."""
    return {
        "shuffled": (False, None),
        "epochs": (1, None),
        "order": (None,),
        "batch_size": (10, None),
        "examples_per_task": (BENCHMARKS[benchmark], None),
    }
