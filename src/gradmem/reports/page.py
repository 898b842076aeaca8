"""One HTML page about runs, with everything it needs inside: it opens without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.files import write_whole
from gradmem.published import appendix_b
from gradmem.reports.published import PUBLISHED, published
from gradmem.reports.styles import VARIANTS, styles
from gradmem.reports.summary import (
    Row,
    boundaries_of,
    bounds,
    conditions,
    flat_config,
    memory_lines,
)
from gradmem.runs.read_folder import COUNTS, Run, printable

__all__ = ["page_data", "write_page"]

#: Accuracies are written as whole numbers of this unit: MNIST's test sets have 10,000 images.
#: Other scores are written as they are, with this many significant digits.
UNIT, DIGITS = 1e-4, 6
ACCURACY = "accuracy"

#: Points of a run's learning curve, and what all curves together may hold (5 bytes a number).
CURVE_POINTS = 200
CURVE_NUMBERS = 500_000

#: Beyond this many numbers, matrices R are kept as means over seeds instead of one for each run.
MATRIX_NUMBERS = 3_000_000

#: The scripts in the order in which they build on each other.
SCRIPTS = ("numbers.js", "charts.js", "heat_map.js", "page.js")


def write_page(rows: Sequence[Row], path: str | Path, failed: Sequence[str] = ()) -> Path:
    """Write the page about `rows` to `path`, a file of about 5 MB, most of it Plotly's code.

    The page computes means and intervals over the seeds that its reader chooses. `failed` are the
    lines of `failed_lines`. The folder of `path` must exist; returns `path`.
    """
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    web = files("gradmem.reports").joinpath("web")
    # Whatever comes from runs is escaped: `autoescape` in the text, `tojson` in the data.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    template = environment.from_string(web.joinpath("page.html").read_text("utf-8"))
    html = template.render(
        rows=rows,
        data=page_data(rows),
        n_runs=sum(len(row.runs) for row in rows),
        papers=any(row.benchmark in appendix_b() for row in rows),
        held_out=any(row.runs[0].config.get("held_out") for row in rows),
        scores=list(dict.fromkeys(row.score for row in rows)),
        failed=failed,
        versions=_versions(run for row in rows for run in row.runs),
        style=Markup(web.joinpath("page.css").read_text("utf-8")),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(web.joinpath(name).read_text("utf-8")) for name in SCRIPTS],
    )
    path = Path(path)
    write_whole(path, html)
    return path


def page_data(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page's scripts work on, as plain data.

    Every run is there with its metrics, so that any choice of seeds can be averaged, and with its
    R and learning curves, in units of its row's `unit`. Curves longer than their share of
    `CURVE_NUMBERS` are thinned out; a curve that is just the rows of R is left out, since the page
    can make it.
    """
    from scipy.special import stdtrit

    runs = [run for row in rows for run in row.runs]
    columns = sum(run.R.shape[1] for run in runs)
    points = min(CURVE_POINTS, max(2, CURVE_NUMBERS // columns))
    per_run = sum(run.R.size for run in runs) <= MATRIX_NUMBERS
    lines = memory_lines(rows)
    line_of = {id(row): i for i, line in enumerate(lines) for row in line.rows}
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.benchmark, []).append(row)
    bounded = {name for name, own in members.items() if bounds(own) is not None}
    look = styles(row.learner for row in rows)
    return {
        "published": PUBLISHED,
        # Student's t at 97.5% for 1, 2, … degrees of freedom: browsers have none.
        "t": [float(stdtrit(n, 0.975)) for n in range(1, max(len(row.runs) for row in rows))],
        "learners": {name: asdict(style) for name, style in look.items()},
        "variants": [asdict(variant) for variant in VARIANTS],
        "lines": [line.name for line in lines],
        "rows": [
            _row_data(row, per_run)
            | {"bounded": row.benchmark in bounded, "line": line_of.get(id(row))}
            for row in rows
        ],
        "runs": [
            _run_data(run, i, place, points, per_run)
            for i, row in enumerate(rows)
            for place, run in enumerate(row.runs)
        ],
    }


def _row_data(row: Row, per_run: bool) -> dict[str, Any]:
    """What is known of a row; with its mean R unless every run has its own."""
    first = row.runs[0]
    data = {
        "benchmark": row.benchmark,
        "learner": row.learner,
        "name": row.name,
        "base": first.name,
        "score": row.score,
        "digits": row.digits,
        "unit": UNIT if row.score == ACCURACY else 1,
        "memory": row.memory,
        "published": published(row),
        "settings": _settings(first),
        "conditions": list(conditions(first)),
    }
    if per_run:
        return data
    known = [run.result["baseline"] for run in row.runs if run.result.get("baseline")]
    baseline = np.mean(known, axis=0) if known else None
    return data | {"R": _short(row.R, row.score), "baseline": _short(baseline, row.score)}


def _run_data(run: Run, row: int, place: int, points: int, per_run: bool) -> dict[str, Any]:
    result = run.result
    seed = run.config.get("seed", result.get("seed"))
    data = {
        "row": row,
        "seed": f"run {place + 1}" if seed is None else str(seed),
        "tasks": [str(task) for task in result.get("tasks") or []],
        "learned": result.get("learned"),
        "boundaries": boundaries_of(run),
    }
    data |= {name: result.get(name) for name in ("acc", "bwt", "fwt", "seconds")}
    data |= {name: result[name] for name in COUNTS if name in result}
    if per_run:
        baseline = result.get("baseline")
        data |= {"R": _short(run.R, run.score), "baseline": _short(baseline, run.score)}
    return data | _curve(run, points)


def _curve(run: Run, points: int) -> dict[str, Any]:
    """Examples observed, and scores (tasks, points) unless R and the baseline have them."""
    curves = run.result["curves"]
    examples = np.array(curves["examples"])
    scores = np.array(curves["accuracy"])
    R, baseline = run.R, run.result.get("baseline")
    if len(examples) == len(R) + 1 and np.array_equal(scores, [baseline, *R]):
        return {"examples": examples.tolist()}
    kept = np.unique(np.linspace(0, len(examples) - 1, points).round().astype(int))
    return {"examples": examples[kept].tolist(), "curve": _short(scores[kept].T, run.score)}


def _short(values: Any, score: str) -> Any:
    """Accuracies in whole units, half as long to write as fractions; other scores rounded."""
    if values is None:
        return None
    if score == ACCURACY:
        return np.rint(np.array(values) / UNIT).astype(int).tolist()
    return np.vectorize(lambda value: float(f"{value:.{DIGITS}g}"))(values).tolist()


def _settings(run: Run) -> dict[str, str]:
    """Everything that was chosen for a run but its seed, as text to show."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in flat_config(run).items()
        if name not in ("benchmark", "learner") and value is not None
    }


def _versions(runs: Iterable[Run]) -> list[str]:
    """What the runs were made with, each combination once."""
    found: dict[str, None] = {}
    for run in runs:
        made = run.result.get("versions") or {}
        tools = ("gradmem", "torch", "python")
        names = [f"{name} {made[name]}" for name in tools if made.get(name)]
        names += [str(made[name]) for name in ("system", "gpu") if made.get(name)]
        if names:
            found[printable(", ".join(names))] = None
    return list(found)
