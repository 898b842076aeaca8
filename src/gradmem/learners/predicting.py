"""How a learner predicts: for any task at any time, with the weights or an average of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import current_device
from gradmem.gradients import Forward, masked
from gradmem.interrupts import uninterrupted
from gradmem.learners.descriptions import Describing
from gradmem.learners.keeping import Keeping
from gradmem.learners.masks import OutputMasks
from gradmem.streams.mixed import is_mixed, places_of
from gradmem.trees import Tree, check, concatenate, take
from gradmem.validation import descriptor

__all__ = ["Predicting"]


class Predicting(Keeping):
    """The part of a learner that predicts; `Learner` says what is learned."""

    #: Whether all tasks share their outputs, so that `predict(x)` works without a descriptor.
    shares_outputs = True
    #: Passes examples through a module.
    passes: Forward
    #: What a network that takes descriptions beside x is given.
    describing: Describing
    #: Outputs → predictions, if not the usual ones.
    decide: Callable[[Any], Any] | None
    _output_masks: OutputMasks

    def described(self, x: Tree, t: Hashable | None) -> Tree:
        """What the network is given for x: with task t's description, where it takes one."""
        return self.describing(x, t, self.descriptions)

    @torch.no_grad()
    def predict(self, x: Tree, t: Any = None, *, check: bool = True) -> Any:
        """What x: (n, …) is for task t, at any time and for any task, seen or not.

        Class ids (n,) where labels are classes, the outputs elsewhere, or what `decide` makes of
        them. `t` may be a list, 1-d tensor or array of one descriptor per example, and may be left
        out where the tasks share their outputs; for `check`, see `observe`.
        """
        with self._lock, uninterrupted(), current_device(self.device):
            look = check or self._inputs.n_outputs is None
            if look:
                self.settle()
            outputs = self._by_task(self.scores, x, t, look)
        if self.decide is not None:
            return self.decide(outputs)
        return outputs.argmax(1) if self._inputs.are_classes else outputs

    @torch.no_grad()
    def forward(self, x: Tree, t: Any = None) -> Any:
        """The network's outputs for x as task t sees them, in evaluation mode, as they are."""
        with self._lock, uninterrupted(), current_device(self.device):
            return self._by_task(self.evaluated, x, t, True)

    def _by_task(self, outputs: Callable[[Tree, Any], Any], x: Tree, t: Any, look: bool) -> Any:
        """`outputs(x, t)` in x's order, where t may be one descriptor per example."""
        if is_mixed(t):
            places = places_of(t, check("x", x))
            parts = [
                self._by_task(outputs, take(x, those), one, look) for one, those in places.items()
            ]
            order = torch.tensor([i for those in places.values() for i in those]).argsort()
            return take(concatenate(parts), order.to(self.device))
        self._require_descriptor(t)
        x = self.described(x, t)
        if look:
            self._inputs.check_x(x, partial(self.evaluated, t=t))
        return outputs(x, t)

    @property
    def predicts_alike(self) -> bool:
        """Whether an example is predicted alike whatever its task."""
        own = type(self)
        names = ("predict", "scores", "evaluated", "module", "described")
        usual = all(getattr(own, name) is getattr(Predicting, name) for name in names)
        described = self.describing.size is not None
        one_average = self.averaged is None or len(self.averaged) == 1
        shared = self.shares_outputs and not self.outputs
        return usual and shared and not described and one_average

    def scores(self, x: Tree, t: Hashable | None) -> Any:
        """The outputs for x without those of other tasks: (n, classes) for classes."""
        return masked(self.evaluated(x, t), self.mask(t))

    def mask(self, t: Hashable | None) -> Tensor | None:
        """Which outputs are task t's: (classes,), or None if all of them are."""
        masks = self.masks([t])
        return None if masks is None else masks[0]

    def masks(self, tasks: Sequence[Hashable | None]) -> Tensor | None:
        """Which outputs are each task's: (k, classes), or None if all tasks have all of them."""
        if not self.outputs:
            return None
        n = self._inputs.n_outputs
        return self._output_masks(self.outputs, tasks, n, self.device, self.grow)

    def _require_descriptor(self, t: Hashable | None) -> None:
        if t is not None:
            descriptor(t)
        elif not self.shares_outputs or self.outputs:
            what = "its outputs differ per task" if self.outputs else "it predicts per task"
            raise TypeError(f"{type(self).__name__} needs t, for {what}; got None")

    @torch.no_grad()
    def evaluated(self, x: Tree, t: Hashable | None, *, live: bool = False) -> Any:
        """Outputs in evaluation mode, of the averaged weights if there is an average.

        With `live`, of the weights that learn.
        """
        with self._evaluating(t) as module:
            if self.averaged is None or live:
                return self.passes(module, x)
            with self.averaged.standing_in(module, self.averaged.which(t, self.steps)):
                return self.passes(module, x)

    @contextmanager
    def _evaluating(self, t: Hashable | None) -> Iterator[nn.Module]:
        """Task t's module in evaluation mode; every part is put back into the mode it was in."""
        module = self.module(t)
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            yield module
        finally:
            for part in training:
                part.training = True
