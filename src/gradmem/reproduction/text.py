"""Numbers and names as the reproduction page writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradmem.reports import Estimate
from gradmem.reports.table import literal
from gradmem.reproduction.numbers import Number
from gradmem.reproduction.plan import N_TASKS, SHUFFLED, Setting
from gradmem.runs.read_folder import printable

__all__ = [
    "command_text",
    "interval_text",
    "machine_text",
    "measured",
    "number_text",
    "paragraphs",
    "setting_text",
    "settings_text",
    "table",
    "title",
]

TITLES = {
    "mnist-permutations": "MNIST permutations",
    "mnist-rotations": "MNIST rotations",
    "cifar100-incremental": "incremental CIFAR-100",
    "ewc": "EWC",
    "gem": "GEM",
    "icarl": "iCaRL",
    "appendix-b": "Appendix B",
    "table-1": "Table 1",
    "table-2": "Table 2",
    "table-3": "Table 3",
}


def title(name: str) -> str:
    """What the paper calls it."""
    return TITLES.get(name) or literal(name)


def setting_text(setting: Setting) -> str:
    """A setting in words.

    Examples
    --------
    >>> setting_text(Setting("mnist-rotations", "gem", (), epochs=5))
    'GEM on MNIST rotations, 5 epochs'
    >>> setting_text(Setting("cifar100-incremental", "gem", (("memories", 64),)))
    'GEM on incremental CIFAR-100, 1,280 memories (64 a task)'
    """
    name = SHUFFLED if setting.shuffled else title(setting.learner)
    changes = {} if setting.shuffled else dict(setting.changes)
    details = [_change_text(key, value) for key, value in changes.items()]
    details += [f"{setting.epochs} epochs"] if setting.epochs > 1 else []
    return ", ".join([f"{name} on {title(setting.benchmark)}", *details])


def _change_text(name: str, value: Any) -> str:
    if name == "memories":
        return f"{N_TASKS * value:,} memories ({value} a task)"
    return f"{value:,} exemplars" if name == "budget" else literal(f"{name} {value}")


def number_text(number: Number, printed: bool = False) -> str:
    """The published value with its digits; if asked, with what was printed if that is another."""
    sign = "+" if number.metric in ("bwt", "fwt") else ""
    spec = f"{sign}.{number.digits}f"
    text = signed(number.value, spec)
    if printed and number.printed is not None and signed(number.printed, spec) != text:
        text += f" (printed {signed(number.printed, spec)})"
    return text


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
    on_gpu = str(about["device"]).startswith("cuda")
    where = versions.get("gpu") if on_gpu else versions.get("processor")
    n = versions.get("threads")
    threads = "" if on_gpu else f", {n} thread{'s' if n != 1 else ''}"
    made = f"{where}{threads}, torch {versions['torch']}, gradmem {versions['gradmem']}"
    return literal(made)


def command_text(command: str) -> str:
    """What was typed, as code."""
    return f"`{printable(command).replace('`', ' ')}`"


def paragraphs(*parts: str) -> str:
    """Paragraphs, headings and tables in Markdown, one after another."""
    return "\n\n".join(parts)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(headings), ["---"] * len(headings), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
