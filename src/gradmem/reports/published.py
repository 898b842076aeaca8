"""The paper's values for a row, if the row is one of the paper's experiments."""

from __future__ import annotations

from typing import Any

from gradmem.evaluation.metrics import transfer_metrics
from gradmem.published import appendix_b, settings
from gradmem.reports.summary import Row

__all__ = ["PUBLISHED", "published", "published_first_task"]

#: The name of such values in a legend.
PUBLISHED = "published (one run)"

#: What a config calls data that are not the paper's.
OTHER_DATA = ("sample", "other")

#: Settings that decide how a learner computes, not what it learns.
COMPUTATION = ("gradients", "precision", "graphs")


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
    """The row's matrix in Appendix B, if the row is the paper's own experiment."""
    entry = appendix_b().get(row.benchmark, {}).get(row.learner)
    return entry if entry is not None and _is_the_papers(row) else None


def _is_the_papers(row: Row) -> bool:
    config, paper = row.runs[0].config, settings()[row.benchmark]
    chosen = {name: v for name, v in config.get("settings", {}).items() if v is not None}
    sizes = ("examples_per_task", "batch_size", "epochs")
    return (
        "data" in config
        and config["data"] not in OTHER_DATA
        and row.runs[0].R.shape == (paper["n_tasks"],) * 2
        and config.get("order") is None
        and not config.get("shuffled")
        and all(config.get(name) in (paper[name], None) for name in sizes)
        and {name: v for name, v in chosen.items() if name not in COMPUTATION}
        == paper["learners"][row.learner]
    )
