"""What is offered to a policy: a mini-batch, with what a network makes of it if that is asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property

import torch
from torch import Tensor

from gradmem.trees import Tree, leaves, size

__all__ = ["Features", "Gradients", "Losses", "Offer"]

#: x, t → (n, …) the features of examples of task t.
Features = Callable[[Tree, Hashable], Tensor]
#: x, t, y, mask → (n,) the loss of each example of task t.
Losses = Callable[[Tree, Hashable, Tree, Tensor | None], Tensor]
#: x, t, y, mask → (n, q) the gradient of each example of task t, by some of the weights.
Gradients = Callable[[Tree, Hashable, Tree, Tensor | None], Tensor]
#: Features are cut off here, so that their squares are finite.
LARGEST = 1e15


class Offer:
    """A mini-batch of a task, before a policy says what is kept of it.

    Parameters
    ----------
    x, y
        Trees of tensors (n, …).
    t
        The task.
    mask
        Which outputs are the task's, (classes,); None if all are.
    features, losses, gradients
        What `EpisodicMemory.attach` was given.
    labels
        The labels in y, where more than they is kept; y itself if None.
    """

    def __init__(
        self,
        x: Tree,
        y: Tree,
        t: Hashable = None,
        mask: Tensor | None = None,
        features: Features | None = None,
        losses: Losses | None = None,
        gradients: Gradients | None = None,
        labels: Tree = None,
    ) -> None:
        self.x, self.y, self.t, self.mask = x, y, t, mask
        self.labels = y if labels is None else labels
        self._get_features, self._get_losses = features, losses
        self._get_gradients = gradients

    def __len__(self) -> int:
        return size(self.y)

    @property
    def has_losses(self) -> bool:
        """Whether `losses` can be asked for."""
        return self._get_losses is not None

    @property
    def has_gradients(self) -> bool:
        """Whether `gradients` can be asked for."""
        return self._get_gradients is not None

    def features(self) -> Tensor:
        """(n, d), on the CPU; the inputs themselves, flattened, if no network is attached.

        Computed once, when first asked for. On a GPU this waits for it.
        """
        return self._features

    def losses(self) -> Tensor:
        """(n,), on the CPU, at the network as it is now; computed once. On a GPU, this waits."""
        return self._losses

    def gradients(self) -> Tensor:
        """(n, q), on the CPU, at the network as it is now; computed once. On a GPU, this waits."""
        return self._gradients

    @cached_property
    def _features(self) -> Tensor:
        if self._get_features is None:
            found = torch.cat([leaf.flatten(1).float() for leaf in map(_wide, leaves(self.x))], 1)
        else:
            found = self._get_features(self.x, self.t).flatten(1)
        return _bounded(found)

    @cached_property
    def _losses(self) -> Tensor:
        assert self._get_losses is not None
        found = self._get_losses(self.x, self.t, self.labels, self.mask)
        return found.detach().double().nan_to_num(LARGEST, LARGEST, 0.0).clamp(0, LARGEST).cpu()

    @cached_property
    def _gradients(self) -> Tensor:
        assert self._get_gradients is not None
        return _bounded(self._get_gradients(self.x, self.t, self.labels, self.mask))


def _bounded(found: Tensor) -> Tensor:
    """Numbers whose squares are finite, in single precision on the CPU."""
    found = found.detach().float().nan_to_num(0.0, LARGEST, -LARGEST)
    return found.clamp(-LARGEST, LARGEST).cpu()


def _wide(leaf: Tensor) -> Tensor:
    """A tensor (n, …) with at least two dimensions."""
    return leaf if leaf.ndim > 1 else leaf[:, None]
