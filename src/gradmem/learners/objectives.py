"""A learner's loss, for what the learner holds."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch import Tensor

from gradmem.gradients import Objective
from gradmem.gradients.objective import TaskLoss
from gradmem.learners.learner import Learner
from gradmem.trees import Tree

__all__ = ["objective_of"]


def objective_of(learner: Learner) -> Objective:
    """What a learner differentiates: its network and criterion, or its own `loss`."""
    own_loss = _weak_loss(learner) if learner.has_own_loss else None
    return Objective(learner.network, learner.criterion, learner.passes, own_loss)


def _weak_loss(learner: Learner) -> TaskLoss:
    """A learner's own loss for what the learner holds: without a cycle, it is freed at once."""
    method = weakref.WeakMethod(learner.loss)

    def loss(x: Tree, t: Hashable, y: Tree, mask: Tensor | None) -> Tensor:
        own = method()
        assert own is not None
        return own(x, t, y, mask)

    return loss
