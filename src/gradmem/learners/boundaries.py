"""Where tasks begin in a stream without task labels: counted off, or where a detector says so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gradmem.learners.rising_loss import RisingLoss
from gradmem.validation import non_negative_int, positive_int

__all__ = ["Boundaries", "Detector", "Every", "InferredTask", "Rule", "restored"]


class Detector(Protocol):
    """Notices a change in a stream of numbers; river's drift detectors have this interface."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last `update` revealed a change."""

    def update(self, x: float, /) -> Any:
        """Take in the next number."""


@dataclass(frozen=True)
class Every:
    """A new task every n examples.

    A batch is of one task: the first batch that begins at or after a multiple of n begins a task.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.GEM(gm.mlp([2, 8, 2]), boundaries=gm.Every(20))
    >>> for _ in range(5):
    ...     loss = learner.observe(torch.randn(10, 2), y=torch.randint(2, (10,)))
    >>> learner.tasks[-1]
    InferredTask(t=2, first=40, examples=10)
    """

    n: int

    def __post_init__(self) -> None:
        positive_int("n", self.n)


#: What decides where tasks begin.
Rule = Every | Detector


@dataclass(frozen=True)
class InferredTask:
    """A task as it was found in a stream without labels.

    Attributes
    ----------
    t
        Its descriptor: 0, 1, …
    first
        Its first example, counted from 0 among those that came without t.
    examples
        How many there are, so far.
    """

    t: int
    first: int
    examples: int


class Boundaries:
    """A rule, and the tasks that it has found.

    Parameters
    ----------
    rule
        `Every(n)`, or a detector. The learner has a copy of its own: what was given stays as it is.
    """

    def __init__(self, rule: Rule) -> None:
        if not isinstance(rule, Every) and not (
            callable(getattr(rule, "update", None)) and hasattr(rule, "drift_detected")
        ):
            raise TypeError(
                "boundaries must be gm.Every(n) or a detector with update(value) and "
                f"drift_detected, got {rule!r}"
            )
        self.rule = copy.deepcopy(rule)
        self.tasks: list[InferredTask] = []

    @property
    def current(self) -> int:
        """The task that the last batch was of; 0 before the first."""
        return max(0, len(self.tasks) - 1)

    @property
    def examples(self) -> int:
        """Examples that came without t so far."""
        return self.tasks[-1].first + self.tasks[-1].examples if self.tasks else 0

    def next(self, loss: Callable[[], float]) -> tuple[int, Rule]:
        """The task of the next batch and the rule as it is after it; nothing is changed here.

        `loss` gives the batch's mean loss, which only a detector asks for. A loss that is not
        finite is not shown to it.
        """
        rule, begins = self.rule, not self.tasks
        if isinstance(rule, Every):
            begins = begins or self.examples // rule.n > self.tasks[-1].first // rule.n
        elif math.isfinite(value := loss()):
            rule = copy.deepcopy(rule)
            rule.update(value)
            begins = begins or bool(rule.drift_detected)
        return len(self.tasks) - 1 + begins, rule

    def add(self, t: int, n: int, rule: Rule) -> None:
        """Note a batch of n examples that was learned as what `next` gave: task and rule."""
        self.rule = rule
        if t == len(self.tasks):
            self.tasks.append(InferredTask(t, self.examples, n))
        else:
            last = self.tasks[-1]
            self.tasks[-1] = replace(last, examples=last.examples + n)

    def state_dict(self) -> dict[str, Any]:
        """The rule's name and state, and (first, examples) of the tasks.

        A detector whose attributes are not plain numbers is in it as an object, which cannot be
        written to a file.
        """
        plain = hasattr(self.rule, "__dict__") and _is_plain(vars(self.rule))
        return {
            "rule": _name(self.rule),
            "detector": vars(self.rule) if plain else self.rule,
            "tasks": [(task.first, task.examples) for task in self.tasks],
        }


def restored(own: Boundaries | None, state: Mapping[str, Any] | None) -> Boundaries | None:
    """A learner's boundaries as they were when `state` was made of the same ones."""
    mine = None if own is None else _name(own.rule)
    saved = None if state is None else state["rule"]
    if mine != saved:
        raise ValueError(f"boundaries must be {saved} as when the state was saved, got {mine}")
    if own is None or state is None:
        return None
    other = Boundaries(own.rule)
    if isinstance(state["detector"], dict):
        vars(other.rule).update(state["detector"])
    else:
        other.rule = state["detector"]
    for t, (first, n) in enumerate(state["tasks"]):
        place = non_negative_int("first", first), positive_int("examples", n)
        other.tasks.append(InferredTask(t, *place))
    return other


def _name(rule: Rule) -> str:
    """A rule with its settings; of a detector from elsewhere, the name of its class."""
    return repr(rule) if isinstance(rule, Every | RisingLoss) else type(rule).__name__


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers and texts only."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
