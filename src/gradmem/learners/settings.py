"""What a learner can be given: names shared by all, signatures, and what states must share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from gradmem.gradients import Loss, Transform
from gradmem.learners.boundaries import Rule
from gradmem.learners.optimizers import OptimizerFactory, ScheduleFactory

__all__ = ["LR", "Common", "compared_settings", "signature_of"]

#: The learning rate of plain SGD, if none is given.
LR = 0.1

#: Settings that may differ between a learner and the one whose state it takes over: how things are
#: computed, what is part of the state itself, and functions.
FREE = {
    "network", "lr", "seed", "graphs", "gradients", "tasks_per_chunk", "memory_limit", "precision",
    "optimizer", "loss", "schedule", "transform", "decide", "memory", "not_finite",
    "boundaries",
}  # fmt: skip


class Common(TypedDict, total=False):
    """What every learner can be given by keyword (see `Learner`)."""

    lr: float
    optimizer: OptimizerFactory | None
    loss: Loss | None
    schedule: ScheduleFactory | None
    clip: float | None
    transform: Transform | None
    decide: Callable[[Any], Any] | None
    grow: bool
    boundaries: Rule | None
    average: float | Sequence[float] | None
    glances: int
    input_dropout: float
    augment: str | Transform | None
    not_finite: str
    seed: int
    graphs: bool


def signature_of(cls: type[Any], root: type[Any]) -> inspect.Signature:
    """The parameters of a learner; those behind `**…` are the ones of the class above it.

    `root` is the class that all learners come from.
    """
    lineage = list(cls.__mro__)
    definer = next(kind for kind in lineage if "__init__" in vars(kind))
    _, *own = inspect.signature(vars(definer)["__init__"]).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in own):
        return inspect.Signature(own)
    above = lineage[lineage.index(definer) + 1 :]
    parent = next(kind for kind in above if issubclass(kind, root) and "__init__" in vars(kind))
    first, *inherited = signature_of(parent, root).parameters.values()
    mine = {p.name: p for p in own if p.kind is p.KEYWORD_ONLY}
    kept = [p for p in inherited if p.name not in mine]
    return inspect.Signature([first, *kept[:3], *mine.values(), *kept[3:]])


def compared_settings(cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a learner must share with one whose state it takes over."""
    usual = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
    comparable = {name: _comparable(value) for name, value in {**usual, **given}.items()}
    return {name: v for name, v in comparable.items() if name not in FREE and v is not FREE}


def _comparable(value: Any) -> Any:
    """A value, or a list of several, as a state keeps it; FREE if it cannot be compared."""
    if isinstance(value, list | tuple):
        values = [_comparable(one) for one in value]
        return FREE if any(one is FREE for one in values) else values
    return value if value is None or isinstance(value, str | bool | int | float) else FREE
