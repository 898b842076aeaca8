"""GEM whose constraints ask for the network's own answers of the time when examples were stored."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from operator import itemgetter
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.gradients import Criterion, attach, masked
from gradmem.learners.answers import fitted
from gradmem.learners.gem import GEM, Constraining
from gradmem.memory import Stack
from gradmem.trees import Tree
from gradmem.validation import non_negative, one_of, positive

__all__ = ["SoftGEM"]

#: Whose answers are stored.
TEACHERS = ("network", "average")


#: In the place of logits that an example has no answer for.
NONE = float("-inf")


class SoftTargets(Criterion):
    """Cross-entropy with class ids, or with the probabilities that a memory has beside them.

    `match` is the weight of the mean square of what logits have changed by, where they are known.
    """

    match = 0.0

    def mean(self, outputs: Any, y: Tree, mask: Tensor | None = None) -> Tensor:
        loss = super().mean(outputs, _targets(y), mask)
        return loss + self.match * _changes(outputs, y).mean() if self._matches(y) else loss

    def by_task(self, outputs: Any, stack: Stack) -> Tensor:
        losses = super().by_task(outputs, replace(stack, y=_targets(stack.y)))
        if not self._matches(stack.y):
            return losses
        changes = _changes(outputs, stack.flat_y).view(stack.room)
        return losses + self.match * (changes * stack.shares.to(changes.dtype)).sum(1)

    def outputs_gradient(self, outputs: Tensor, stack: Stack, out: Tensor) -> None:
        super().outputs_gradient(outputs, replace(stack, y=_targets(stack.y)), out)
        if self._matches(stack.y):
            change, n = _change(outputs, stack.flat_y)
            shares = stack.shares.reshape(-1, 1).to(out.dtype)
            out.addcmul_(change, shares / n, value=2 * self.match)

    def _matches(self, y: Tree) -> bool:
        return self.match > 0 and isinstance(y, dict)


class SoftGEM(GEM):
    """GEM whose remembered examples have soft targets.

    The loss at the memories, whose rise the constraints forbid, is the cross-entropy with
    q = (1 − s) onehot(y) + s softmax(z / τ), where z are the logits that the example had when it
    was stored, after the step on it, in evaluation mode. With `match` the mean square of z − h(x)
    is added, for the logits h(x) there are now. The loss at the mini-batch is the cross-entropy
    with its labels. With s = 0 and without `match` it is GEM.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. The loss is cross-entropy without options.
    memory, memories, budget, keep, margin, margin_rule, constrain, constraints, sample, rehearse,
    augmented, gradients, tasks_per_chunk, memory_limit, precision
        See `GEM`. In the memory, y is a dict: "label", "target", q, and with `match` "logits", z.
    soft
        s, between 0 and 1: the share of the stored answers in the targets.
    match
        α ≥ 0, the weight of the mean square of what the logits at the memories have changed by.
    temperature
        τ > 0; above 1 the stored answers are softer.
    teacher
        Whose answers are stored: the "network"'s, or those of the "average" of its weights, with
        which predictions are made if `average` is given.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.SoftGEM(gm.mlp([2, 8, 2]), memories=5, soft=0.7, average=0.99, glances=3)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> x, y = learner.memory["first"]
    >>> y["label"].shape, y["target"].shape
    (torch.Size([5]), torch.Size([5, 2]))

    References
    ----------
    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NIPS 2017.
    Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020 (stored logits).
    Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (soft targets).
    """

    criterion_kind = SoftTargets

    def __init__(
        self,
        network: nn.Module,
        *,
        soft: float = 0.5,
        match: float = 0.0,
        temperature: float = 1.0,
        teacher: str = "network",
        **common: Unpack[Constraining],
    ) -> None:
        super().__init__(network, **common)
        if not self.criterion.is_plain:
            kind, given = type(self).__name__, self.criterion.name
            raise ValueError(f"{kind} is for cross-entropy without options; got {given}")
        if non_negative("soft", soft) > 1:
            raise ValueError(f"soft must be at most 1, got {soft!r}")
        self.soft, self.temperature = float(soft), positive("temperature", temperature)
        assert isinstance(self.criterion, SoftTargets)
        self.match = self.criterion.match = non_negative("match", match)
        self.teacher = one_of("teacher", teacher, TEACHERS)
        if self.teacher == "average" and self.averaged is None:
            raise ValueError('teacher="average" needs an average: average=0.99')
        attach(self.memory, self.constraints.engine.objective, labels=itemgetter("label"))

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        dtype, n = next(self.network.parameters()).dtype, self._inputs.n_outputs or 0
        hard = y if y.is_floating_point() else F.one_hot(y.long(), n)
        answers = {"target": hard.to(dtype)}
        self.memory = fitted(self.memory, "target", n, 0.0)
        if self.match:
            answers["logits"] = torch.full_like(answers["target"], NONE)
            self.memory = fitted(self.memory, "logits", n, NONE)
        self.constraints.memory = self.memory
        return super().learn(x, t, {"label": y, **answers})

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if self.match and any("logits" not in dict(kind_y) for _, kind_y in self.memory.kinds):
            raise ValueError(f"match must be 0, for the memory has no logits; got {self.match!r}")

    def remembered(self, x: Tree, t: Hashable, y: Tree) -> Tree:
        logits = masked(self.evaluated(x, t, live=self.teacher == "network"), self.mask(t))
        answers = torch.softmax(logits / self.temperature, 1)
        target = (1 - self.soft) * y["target"] + self.soft * answers
        return y | {"target": target} | ({"logits": logits} if self.match else {})


def _targets(y: Tree) -> Tree:
    return y["target"] if isinstance(y, dict) else y


def _change(outputs: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
    """What logits have changed by, 0 where they are not known: (n, outputs); known ones: (n, 1)."""
    known = y["logits"] != NONE
    change = torch.where(known, outputs - y["logits"], 0.0)
    return change, known.sum(1, keepdim=True).clamp(min=1)


def _changes(outputs: Tensor, y: Tree) -> Tensor:
    """The mean square of what each example's logits have changed by: (n,)."""
    change, n = _change(outputs, y)
    return change.square().sum(1) / n[:, 0]
