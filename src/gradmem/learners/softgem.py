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
from gradmem.learners.answers import fitted, labelled
from gradmem.learners.gem import GEM, Constraining
from gradmem.memory import Stack
from gradmem.trees import Tree
from gradmem.validation import non_negative, one_of, positive

__all__ = ["SoftGEM"]

#: Whose answers are stored.
TEACHERS = ("network", "average")


class SoftTargets(Criterion):
    """Cross-entropy with class ids, or with the probabilities that a memory has beside them."""

    def mean(self, outputs: Any, y: Tree, mask: Tensor | None = None) -> Tensor:
        return super().mean(outputs, _targets(y), mask)

    def by_task(self, outputs: Any, stack: Stack) -> Tensor:
        return super().by_task(outputs, replace(stack, y=_targets(stack.y)))

    def outputs_gradient(self, outputs: Tensor, stack: Stack, out: Tensor) -> None:
        super().outputs_gradient(outputs, replace(stack, y=_targets(stack.y)), out)


class SoftGEM(GEM):
    """GEM whose remembered examples have soft targets.

    The loss at the memories, whose rise the constraints forbid, is the cross-entropy with
    q = (1 − s) onehot(y) + s softmax(z / τ), where z are the logits that the example had when it
    was stored, after the step on it, in evaluation mode. The loss at the mini-batch is the
    cross-entropy with its labels. With s = 0 it is GEM.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, not_finite, seed, graphs
        See `Learner`. The loss is cross-entropy without options.
    memory, memories, budget, keep, margin, margin_rule, constrain, constraints, gradients,
    tasks_per_chunk, memory_limit, precision
        See `GEM`. In the memory, y is a dict: "label" and "target", q.
    soft
        s, between 0 and 1: the share of the stored answers in the targets.
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
        self.teacher = one_of("teacher", teacher, TEACHERS)
        if self.teacher == "average" and self.averaged is None:
            raise ValueError('teacher="average" needs an average: average=0.99')
        attach(self.memory, self.constraints.engine.objective, labels=itemgetter("label"))

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        dtype, n = next(self.network.parameters()).dtype, self._inputs.n_outputs or 0
        hard = y if y.is_floating_point() else F.one_hot(y.long(), n)
        self.memory = self.constraints.memory = fitted(self.memory, "target", n, 0.0)
        return super().learn(x, t, labelled(y, "target", hard.to(dtype)))

    def remembered(self, x: Tree, t: Hashable, y: Tree) -> Tree:
        logits = masked(self.evaluated(x, t, live=self.teacher == "network"), self.mask(t))
        answers = torch.softmax(logits / self.temperature, 1)
        return y | {"target": (1 - self.soft) * y["target"] + self.soft * answers}


def _targets(y: Tree) -> Tree:
    return y["target"] if isinstance(y, dict) else y
