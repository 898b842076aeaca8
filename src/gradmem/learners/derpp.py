"""Dark experience replay: what is remembered is to be answered as it was when it was stored."""

from __future__ import annotations

from collections.abc import Hashable
from operator import itemgetter
from typing import Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import attach, masked
from gradmem.learners.answers import fitted, labelled
from gradmem.learners.objectives import objective_of
from gradmem.learners.replay import Remembering, Replay, drawn, examples_in, in_batches, mean_of
from gradmem.trees import Tree, size
from gradmem.validation import non_negative, positive_int

__all__ = ["DERpp"]

#: In the place of logits that an example has no answer for.
NONE = float("-inf")


class DERpp(Replay):
    """A single predictor that keeps its answers at remembered examples, and learns them again.

    A step is along the gradient of equation 6,
    ℓ(y, f(x)) + α ‖z′ − h(x′)‖² / outputs + β ℓ(y″, f(x″)):
    the loss at the mini-batch, the mean square of what the logits of one sample of the memory have
    changed by since it was stored, and the loss at another sample. (The paper's code divides by the
    number of outputs, and its α is meant so.) Logits are stored as they are before the step, in
    evaluation mode.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. The network's outputs are a tensor (n, outputs).
    memory, memories, budget, keep, groups
        What is remembered (see `Replay`). In the memory, y is a dict: "label" and "logits".
    sample
        Examples in each of the two samples, of all tasks alike, drawn anew in each step.
    alpha
        α ≥ 0, the weight of the logits; with β = 0 this is DER.
    beta
        β ≥ 0, the weight of the labels.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.DERpp(gm.mlp([2, 8, 2]), memories=5, sample=4)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> x, y = learner.memory["first"]
    >>> y["label"].shape, y["logits"].shape
    (torch.Size([5]), torch.Size([5, 2]))

    References
    ----------
    Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        sample: int = 10,
        alpha: float = 0.5,
        beta: float = 0.5,
        **common: Unpack[Remembering],
    ) -> None:
        super().__init__(network, **common)
        attach(self.memory, objective_of(self), labels=itemgetter("label"))
        self.sample = positive_int("sample", sample)
        self.alpha, self.beta = non_negative("alpha", alpha), non_negative("beta", beta)

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        logits = masked(self.evaluated(x, t, live=True), self.mask(t))
        remembered = labelled(y, "logits", logits)
        self.memory = fitted(self.memory, "logits", logits.shape[1], NONE)
        self.memory.check(x, t, remembered)

        def step(x: Tree, y: Tree, mask: Tensor | None, *past: Tree) -> tuple[Tensor]:
            half = len(past) // 2
            stored, again = in_batches(past[:half]), in_batches(past[half:])
            losses = self.losses_of(
                t, [(x, y, mask), *((x_k, y_k["label"], own) for x_k, y_k, own in again)]
            )
            answers = self.outputs_of(t, [x_k for x_k, _, _ in stored])
            changes = [
                _mean_square(z, y_k["logits"])
                for z, (_, y_k, _) in zip(answers, stored, strict=True)
            ]
            total = losses[0]
            total = total + self.alpha * mean_of(changes, [size(x_k) for x_k, _, _ in stored])
            total = total + self.beta * mean_of(losses[1:], [size(x_k) for x_k, _, _ in again])
            self.optimizer.zero_grad()
            total.backward()
            self.descend(losses[0], self.optimizer)
            return (losses[0].detach(),)

        def samples() -> list[Tree | None]:
            tasks = list(self.memory)
            one, other = (drawn(self.memory, tasks, self.sample, self.masks) for _ in range(2))
            self.count(1, size(x) + examples_in(one) + examples_in(other))
            more = len(one) - len(other)  # one may have more kinds of examples
            return [*one, *[None] * -more, *other, *[None] * more]

        loss = self.take("any task", t, step, x, y, self.mask(t), draw=samples)
        self.memory.put(x, t, remembered, self.mask(t))
        return loss


def _mean_square(now: Tensor, before: Tensor) -> Tensor:
    """The mean square of the logits' change, over those there were: ()."""
    known = before != NONE
    change = torch.where(known, now - before, 0.0)
    return change.square().sum() / known.sum()
