"""Every number that the paper prints about a run, with its setting and metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from gradmem.evaluation.metrics import transfer_metrics
from gradmem.published import appendix_b, tables
from gradmem.reproduction.plan import Setting, after_epochs, with_memory

__all__ = ["Number", "numbers", "second_values"]


@dataclass(frozen=True)
class Number:
    """One published number: of one run, with one seed."""

    part: str
    setting: Setting
    metric: str
    """"acc", "bwt", "fwt" or "seconds"."""
    value: float
    """For Appendix B, from its R by equations 2 to 4."""
    digits: int
    """Behind the point: a printed 0.53 stands for anything from 0.525 to 0.535."""
    printed: float | None = None
    """What stands below Appendix B's R, where BWT and FWT are divided by T instead of T − 1."""

    @property
    def rounding(self) -> float:
        """How far the number may be from the one that was rounded."""
        return 0.5 * 10.0**-self.digits


@cache
def numbers() -> tuple[Number, ...]:
    """All of them: Tables 1 to 3, and the metrics of Appendix B's matrices, drawn in Figure 1."""
    found = []
    for benchmark, times in tables()["table-1"].items():
        for learner, seconds in times.items():
            found.append(Number("table-1", Setting(benchmark, learner), "seconds", seconds, 0))
    for learner, accs in tables()["table-2"].items():
        for size, acc in accs.items():
            found.append(Number("table-2", with_memory(learner, int(size)), "acc", acc, 3))
    for name, columns in tables()["table-3"].items():
        for epochs, metrics in columns.items():
            setting = after_epochs(name, int(epochs))
            found += [Number("table-3", setting, key, v, 2) for key, v in metrics.items()]
    for benchmark, learners in appendix_b().items():
        for learner, entry in learners.items():
            metrics = transfer_metrics(entry["R"], entry["baseline"])
            for key in ("acc", "bwt", "fwt"):
                setting, value = Setting(benchmark, learner), getattr(metrics, key)
                printed = entry["printed"][key]
                found.append(Number("appendix-b", setting, key, value, 4, printed))
    return tuple(found)


def second_values(number: Number, among: Sequence[Number] | None = None) -> list[Number]:
    """What the paper prints elsewhere for the same thing, if rounding does not explain it.

    Examples
    --------
    >>> for number in numbers():
    ...     if number.part == "table-2" and number.value == 0.654:
    ...         print([round(other.value, 4) for other in second_values(number)])
    [0.6783]
    """

    def as_printed(some: Number) -> float:
        return some.value if some.printed is None else some.printed

    return [
        other
        for other in (numbers() if among is None else among)
        if (other.setting, other.metric) == (number.setting, number.metric)
        and other.part != number.part
        and abs(as_printed(other) - as_printed(number)) > other.rounding + number.rounding + 1e-9
    ]
