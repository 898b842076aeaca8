"""One HTML page about runs, with everything it needs inside: it opens without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.reports.published import PUBLISHED, published
from gradmem.reports.styles import VARIANTS, styles
from gradmem.reports.summary import SEEDS, Row, bounds, conditions, memory_lines
from gradmem.runs.folder import COUNTS, Run, printable

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
SCRIPTS = ("numbers.js", "charts.js", "page.js")


def write_page(rows: Sequence[Row], path: str | Path, failed: Sequence[str] = ()) -> Path:
    """Write the page about `rows` to `path`, a file of about 5 MB, most of it Plotly's code.

    Parameters
    ----------
    rows
        What `summarize` made of the runs. The page recomputes means and intervals over the seeds
        that its reader chooses.
    path
        The file; its folder must exist.
    failed
        What else was tried, and how it ended: lines of `failed_lines`.

    Returns
    -------
    Path
        `path`.
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
        held_out=any(row.runs[0].config.get("held_out") for row in rows),
        scores=list(dict.fromkeys(row.score for row in rows)),
        failed=failed,
        versions=_versions(run for row in rows for run in row.runs),
        style=Markup(web.joinpath("page.css").read_text("utf-8")),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(web.joinpath(name).read_text("utf-8")) for name in SCRIPTS],
    )
    path = Path(path)
    path.write_text(html, encoding="utf-8")
    return path


def page_data(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page's scripts work on, as plain data.

    Every run is there with its metrics, so that any choice of seeds can be averaged, and with its
    R and learning curves, in units of its row's `unit`. Curves longer than their share of
    `CURVE_NUMBERS` are thinned out; a curve that is just the rows of R is left out, since the page
    can make it.
    """
    runs = [run for row in rows for run in row.runs]
    numbers = sum(run.R.size for run in runs)
    columns = sum(run.R.shape[1] for run in runs)
    points = min(CURVE_POINTS, max(2, CURVE_NUMBERS // columns))
    per_run = numbers <= MATRIX_NUMBERS
    lines = memory_lines(rows)
    line_of = {id(row): i for i, line in enumerate(lines) for row in line.rows}
    look = styles(row.learner for row in rows)
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.benchmark, []).append(row)
    bounded = {benchmark: bounds(alike) is not None for benchmark, alike in members.items()}
    return {
        "published": PUBLISHED,
        "t": _quantiles(max(len(row.runs) for row in rows)),
        "learners": {
            name: {
                "colour": look[name].colour,
                "symbol": look[name].symbol,
                "pattern": look[name].pattern,
                "glyph": look[name].glyph,
            }
            for name in look
            if any(row.learner == name for row in rows)
        },
        "variants": [asdict(variant) for variant in VARIANTS],
        "lines": [line.name for line in lines],
        "rows": [
            {
                "benchmark": row.benchmark,
                "learner": row.learner,
                "name": row.name,
                "base": row.runs[0].name,
                "score": row.score,
                "bounded": bounded[row.benchmark],
                "digits": row.digits,
                "unit": UNIT if row.score == ACCURACY else 1,
                "memory": row.memory,
                "line": line_of.get(id(row)),
                "published": published(row),
                "settings": _settings(row.runs[0]),
                "conditions": list(conditions(row.runs[0])),
            }
            | ({} if per_run else {"R": _short(row.R, row.score), "baseline": _baseline(row)})
            for row in rows
        ],
        "runs": [
            _run_data(run, i, place, points, per_run)
            for i, row in enumerate(rows)
            for place, run in enumerate(row.runs)
        ],
    }


def _run_data(run: Run, row: int, place: int, points: int, per_run: bool) -> dict[str, Any]:
    result = run.result
    seed = run.config.get("seed", result.get("seed"))
    data = {
        "row": row,
        "seed": f"run {place + 1}" if seed is None else str(seed),
        "tasks": [str(task) for task in result.get("tasks") or []],
        "learned": result.get("learned"),
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


def _baseline(row: Row) -> Any:
    known = [run.result["baseline"] for run in row.runs if run.result.get("baseline")]
    return _short(np.mean(known, axis=0), row.score) if known else None


def _quantiles(most: int) -> list[float]:
    """Student's t at 97.5% for 1, 2, … degrees of freedom: browsers have none."""
    from scipy.special import stdtrit

    return [float(stdtrit(n, 0.975)) for n in range(1, most)]


def _settings(run: Run) -> dict[str, str]:
    """Everything that was chosen for a run but its seed, as text to show."""
    others = (*SEEDS, "settings")
    flat = {name: value for name, value in run.config.items() if name not in others}
    flat |= run.config.get("settings", {})
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in flat.items()
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
