"""MEGA: gradients of the batch and of what is remembered, mixed by how large their losses are."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

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
    glances, not_finite, seed, graphs
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
        tiny = torch.finfo(g.dtype).tiny
        along = g / g.norm().clamp(min=tiny)
        across = g_ref - (along @ g_ref) * along  # sin θ and cos θ, in units of |g_ref|
        sine = across.norm()
        beta = torch.atan2(loss_ref * sine, loss * g_ref.norm() + loss_ref * (along @ g_ref))
        turned = along * beta.cos() + across / sine.clamp(min=tiny) * beta.sin()
        mixed: Tensor = turned * g.norm()
        return mixed
