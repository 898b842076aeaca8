"""Look-ahead MAML: a rate for every weight, learned from where steps would lead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import parameters
from gradmem.learners.one_by_one import clipped, gradients, running_statistics_for_one
from gradmem.learners.optimizers import padded
from gradmem.learners.replay import Remembering, Replay, drawn, examples_in, in_batches, mean_of
from gradmem.trees import Tree, leaves, size, take
from gradmem.validation import one_of, positive, positive_int

__all__ = ["LaMAML"]


class LaMAML(Replay):
    """A single predictor that steps along the gradient at where single examples would lead it.

    Algorithm 2 of the paper. The examples of a mini-batch lead from θ₀ to θₙ, one step each (or
    one for each `inner` of them), θᵢ₊₁ = θᵢ − max(0, α) ∇ℓ(θᵢ), with a rate α for every weight.
    L is the mean loss at the mini-batch and at a sample of the memory. Then
    α ← α + η ∇L(θₙ) Σᵢ ∇ℓ(θᵢ), and from where it began, θ ← θ₀ − max(0, α) ∇L(θₙ),
    products taken weight by weight: the gradients of L by α and θ₀ without second derivatives.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. `lr` is the rate of the step from θ₀: with the update "async", what the
        rates α are in units of. `clip` bounds the gradient by α as well, and not those of the steps
        from θ₀ to θₙ, which `clamp` bounds: so it is in the code behind the paper's figures, and
        ACC depends on it.
        Each glance goes through the mini-batch in another order.
    memory, memories, budget, keep, groups
        What is remembered (see `Replay`). The paper's is one reservoir: `budget=200, groups=1`.
    sample
        Remembered examples in L, of all tasks alike, drawn anew in each step.
    alpha
        The rates α at the start; `lr` if None.
    rate_lr
        η, the rate at which the rates are learned. None: they are not, which is C-MAML, whose
        steps from θ₀ have the rate `lr`.
    update
        "async": steps from θ₀ have the rates α as they were just learned (La-MAML); "sync": they
        have the rate `lr` (Sync-La-MAML).
    inner, clamp
        How many examples a step from θ₀ to θₙ has, and a bound for each entry of its gradient, if
        any. The code behind the paper's figures has steps on single examples without a bound for
        MNIST, and `inner=2, clamp=1.0` for CIFAR-100. In a step on one example, batch normalization
        takes its running statistics, with which a network at its start may diverge: let `inner`
        divide the mini-batches.
    meta
        Where L is taken: at the "last" of θ₁ … θₙ, as the algorithm is printed, or at "every" one
        of them and averaged, as in the code behind the paper's figures.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.LaMAML(gm.mlp([2, 8, 2]), lr=0.15, budget=50, groups=1, glances=2)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> [rate.shape for rate in learner.rates][:2]
    [torch.Size([8, 2]), torch.Size([8])]

    References
    ----------
    Gupta et al., La-MAML: Look-ahead Meta Learning for Continual Learning, NeurIPS 2020.
    """

    UPDATES = ("async", "sync")
    METAS = ("every", "last")

    def __init__(
        self,
        network: nn.Module,
        *,
        sample: int = 10,
        alpha: float | None = None,
        rate_lr: float | None = 0.3,
        update: str = "async",
        inner: int = 1,
        clamp: float | None = None,
        meta: str = "every",
        **common: Unpack[Remembering],
    ) -> None:
        super().__init__(network, **common)
        self.sample = positive_int("sample", sample)
        #: The optimizer's rate at the start: its step along α g / unit has the rate α.
        self.unit = self._first_rate()
        self.alpha = self.unit if alpha is None else positive("alpha", alpha)
        self.rate_lr = None if rate_lr is None else positive("rate_lr", rate_lr)
        self.update = one_of("update", update, self.UPDATES)
        self.inner = positive_int("inner", inner)
        self.clamp = None if clamp is None else positive("clamp", clamp)
        self.meta = one_of("meta", meta, self.METAS)
        self._weights: list[Tensor] = [*parameters(network)]
        self.rates = [torch.full_like(w, self.alpha) for w in self._weights]

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        self.memory.check(x, t, y)

        def step(
            x: Tree, y: Tree, mask: Tensor | None, inner_x: Tree, inner_y: Tree, *past: Tree
        ) -> tuple[Tensor]:
            with torch.no_grad():
                loss = self.loss(x, t, y, mask)
            by_weights, by_rates = self._look_ahead(
                t, inner_x, inner_y, mask, [(x, y, mask), *in_batches(past)]
            )
            rates = self.rates
            if self.rate_lr is not None:
                clipped(by_rates, self.clip)
                rates = [*torch._foreach_add(rates, by_rates, alpha=-self.rate_lr)]  # (a)
                if self.update == "async":
                    scale = torch._foreach_div(torch._foreach_clamp_min(rates, 0.0), self.unit)
                    torch._foreach_mul_(by_weights, scale)
            for w, g in zip(parameters(self.network), by_weights, strict=True):
                w.grad = g
            self.descend(loss, self.optimizer)  # (b)
            self.put_values(self.rates, rates)
            return (loss,)

        def inputs() -> list[Tree | None]:
            order = torch.randperm(size(x)).to(leaves(x)[0].device)
            sample = drawn(self.memory, list(self.memory), self.sample, self.masks)
            n, inner_steps = size(x), -(-size(x) // self.inner)
            looks = inner_steps if self.meta == "every" else 1
            self.count(inner_steps + 1, n + looks * (n + examples_in(sample)))
            return [take(x, order), take(y, order), *sample]

        self.note_steps(t, leaves(x)[0].device)
        self.note(self.rates)
        loss = self.take("any task", t, step, x, y, self.mask(t), draw=inputs)
        self.memory.put(x, t, y, self.mask(t))
        return loss

    def _look_ahead(
        self, t: Hashable, x: Tree, y: Tree, mask: Tensor | None, batches: list[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of L by θ₀ and by α; the weights are θ₀ again afterwards."""
        weights = parameters(self.network)
        live = [w.detach() for w in weights]
        start, rates = [w.clone() for w in live], torch._foreach_clamp_min(self.rates, 0.0)
        moved, by_weights, by_rates = ([torch.zeros_like(w) for w in live] for _ in range(3))
        parts = [slice(i, i + self.inner) for i in range(0, size(y), self.inner)]
        for part in parts:
            few = take(y, part)
            with running_statistics_for_one(self.network, size(few)):
                grads = gradients(self.loss(take(x, part), t, few, mask), weights)
            if self.clamp is not None:
                above = torch._foreach_clamp_min(grads, -self.clamp)
                grads = [*torch._foreach_clamp_max(above, self.clamp)]
            torch._foreach_sub_(live, torch._foreach_mul(grads, rates))
            torch._foreach_add_(moved, grads)
            if self.meta == "every" or part is parts[-1]:
                losses = self.losses_of(t, batches)
                grads = gradients(mean_of(losses, [size(own) for own, _, _ in batches]), weights)
                torch._foreach_add_(by_weights, grads)
                torch._foreach_addcmul_(by_rates, grads, moved, value=-1)
        torch._foreach_copy_(live, start)
        if self.meta == "every":
            for grads in (by_weights, by_rates):
                torch._foreach_div_(grads, len(parts))
        for g, rate in zip(by_rates, self.rates, strict=True):
            g.mul_(rate > 0)  # max(0, α) does not change with α below 0
        return by_weights, by_rates

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Rates of widened parameters stay, for what is new they begin at the start's."""
        places = {id(w): i for i, w in enumerate(self._weights)}
        found = [places.get(id(w), places.get(id(old))) for w, old in weights]
        start = [torch.full_like(w, self.alpha) for w, _ in weights]
        self.rates = [
            rate if i is None else rate + padded(self.rates[i] - self.alpha, rate.shape)
            for rate, i in zip(start, found, strict=True)
        ]
        self._weights = [w for w, _ in weights]

    def _first_rate(self) -> float:
        """The optimizer's rate before any schedule."""
        group = self.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"unit": self.unit, "rates": self.rates}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        with torch.no_grad():  # in place, where a graph finds them
            torch._foreach_copy_(self.rates, state["rates"])
        self.unit = positive("unit", state.get("unit", self._first_rate()))
