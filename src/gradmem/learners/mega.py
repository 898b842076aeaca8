"""MEGA: gradients of the batch and of what is remembered, mixed by how large their losses are."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from gradmem.learners.agem import AGEM, Averaging
from gradmem.validation import non_negative, one_of

__all__ = ["MEGA"]


class MEGA(AGEM):
    """A single predictor whose steps weigh old and new examples by their losses.

    g and ℓ are the gradient and the loss at the mini-batch, g_ref and ℓ_ref those at a sample of
    the other tasks' memories. MEGA-I steps along g + (ℓ_ref / ℓ) g_ref, or along g_ref if ℓ ≤ ε.
    MEGA-II turns g towards g_ref and leaves its length: by the angle β at which
    ℓ cos β + ℓ_ref cos(θ − β) is largest, θ the angle between both:
    tan β = ℓ_ref sin θ / (ℓ + ℓ_ref cos θ).

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. Losses are not negative.
    memory, memories, budget, keep, sample
        See `AGEM`.
    rule
        "II" or "I".
    epsilon
        ε ≥ 0 of MEGA-I.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.MEGA(gm.mlp([2, 8, 2]), memories=5)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))

    References
    ----------
    Guo et al., Improved Schemes for Episodic Memory-based Lifelong Learning, NeurIPS 2020.
    """

    RULES = ("II", "I")

    def __init__(
        self,
        network: nn.Module,
        *,
        rule: str = "II",
        epsilon: float = 1e-10,
        **common: Unpack[Averaging],
    ) -> None:
        super().__init__(network, **common)
        self.rule = one_of("rule", rule, self.RULES)
        self.epsilon = non_negative("epsilon", epsilon)

    def combined(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        if self.rule == "I":
            small = loss <= self.epsilon
            share = torch.where(small, 1.0, loss_ref / loss)
            return g * ~small + g_ref * share
        along, length = _direction(g)
        cosine = along @ g_ref  # of θ, in units of |g_ref|, as the sine is
        across, sine = _direction(g_ref - cosine * along)
        beta = torch.atan2(loss_ref * sine, loss * vector_norm(g_ref) + loss_ref * cosine)
        return length * (along * beta.cos() + across * beta.sin())


def _direction(v: Tensor) -> tuple[Tensor, Tensor]:
    """A vector's direction, of length one, and its length; of no length, zeros."""
    length: Tensor = vector_norm(v)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny), length
