"""Numbers, settings, machines and tables as generated Markdown pages write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradmem.reports.summary import Estimate
from gradmem.reports.table import literal
from gradmem.runs.read_folder import printable

__all__ = [
    "command_lines",
    "command_text",
    "interval_text",
    "machine_text",
    "measured",
    "paragraphs",
    "settings_text",
    "signed",
    "table",
]


def signed(value: float, spec: str) -> str:
    """A number with a minus sign that is one; a zero has none.

    Examples
    --------
    >>> signed(-0.0001, "+.2f"), signed(-1.5, ".1f")
    ('0.00', '−1.5')
    """
    text = format(value, spec)
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def measured(estimate: Estimate | None, spec: str) -> str:
    """A mean, ± half the width of its interval."""
    if estimate is None or math.isnan(estimate.mean):
        return "–"
    half = estimate.half_width
    mean = signed(estimate.mean, spec)
    return mean if half is None else f"{mean} ± {half:{spec.lstrip('+')}}"


def interval_text(low: float, high: float, spec: str) -> str:
    """From one number to another."""
    return "–" if math.isnan(low) else f"{signed(low, spec)} to {signed(high, spec)}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings on one line."""
    return ", ".join(
        literal(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        for name, value in settings.items()
    )


def machine_text(versions: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What a run was made on and with, in one line."""
    on_gpu = str(versions.get("device", about["device"])).startswith("cuda")
    where = versions.get("gpu") if on_gpu else versions.get("processor")
    n = versions.get("threads")
    threads = "" if on_gpu else f", {n} thread{'s' if n != 1 else ''}"
    made = f"{where}{threads}, torch {versions['torch']}, gradmem {versions['gradmem']}"
    return literal(made)


def command_text(command: str) -> str:
    """What was typed, as code."""
    return f"`{printable(command).replace('`', ' ')}`"


def command_lines(commands: Iterable[str]) -> str:
    """What was typed, each command once, as a block of code in the order of the alphabet."""
    lines = sorted({printable(command).replace("`", " ") for command in commands})
    return "\n".join(["```sh", *lines, "```"])


def paragraphs(*parts: str) -> str:
    """Paragraphs, headings and tables in Markdown, one after another."""
    return "\n\n".join(parts)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(headings), ["---"] * len(headings), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
