"""Numbers and names as the reproduction page writes them."""

from __future__ import annotations

from typing import Any

from gradmem.reports.markdown import signed
from gradmem.reports.table import literal
from gradmem.reproduction.numbers import Number
from gradmem.reproduction.plan import N_TASKS, SHUFFLED, Setting

__all__ = ["number_text", "setting_text", "title"]

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
