"""What a network makes of single examples in evaluation mode: features, losses, gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.gradients.objective import Objective
from gradmem.memory import EpisodicMemory, Stack
from gradmem.trees import Tree, leaves, size, take, tree_map

__all__ = ["attach", "evaluating", "with_last_inputs"]


def attach(
    memory: EpisodicMemory, objective: Objective, labels: Callable[[Tree], Tree] | None = None
) -> None:
    """Let a memory's policy ask for what the objective's network makes of examples.

    `labels` gives those of y, where a memory keeps more than labels.
    """
    memory.attach(
        partial(last_inputs, objective),
        partial(example_losses, objective),
        partial(example_gradients, objective),
        labels,
    )


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode; every part is put back into the mode it was in."""
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def with_last_inputs(network: nn.Module, outputs: Callable[[], Any]) -> tuple[Any, Tensor]:
    """`outputs()`, and what goes into the linear layer that comes last as they are computed.

    The outputs themselves if there is no linear layer.
    """
    seen: list[Tensor] = []
    linear = [part for part in network.modules() if isinstance(part, nn.Linear)]

    def note(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        seen[:] = given[:1]

    hooks = [part.register_forward_hook(note) for part in linear]
    try:
        found = outputs()
    finally:
        for hook in hooks:
            hook.remove()
    return found, seen[0] if seen else leaves(found)[0]


@torch.no_grad()
def last_inputs(objective: Objective, x: Tree, t: Hashable = None) -> Tensor:
    """Features of examples x: (n, …): what goes into the network's last linear layer, (n, d)."""
    network = objective.network
    with evaluating(network):
        _, features = with_last_inputs(network, lambda: objective.outputs(x))
    return features.reshape(size(x), -1)


@torch.no_grad()
def example_losses(
    objective: Objective, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None
) -> Tensor:
    """The loss at each of the examples x, y of task t: (n,)."""
    with evaluating(objective.network):
        return _losses(objective, x, t, y, mask)


@torch.enable_grad()
def example_gradients(
    objective: Objective, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None
) -> Tensor:
    """Each example's gradient by the weights and the bias of the last linear layer: (n, q)."""
    network, n = objective.network, size(y)
    seen: list[tuple[Tensor, Tensor]] = []

    def cut(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        seen[:] = [(given[0].detach(), output.detach().requires_grad_())]
        return seen[0][1]

    def of(x: Tree, y: Tree) -> Tensor:
        total = _losses(objective, x, t, y, mask).sum()
        h, outputs = seen[0]
        (grad,) = torch.autograd.grad(total, outputs)
        h, grad = (each.reshape(size(y), -1, each.shape[-1]) for each in (h, grad))
        by_weights = torch.einsum("nsc,nsd->ncd", grad, h).flatten(1)
        return torch.cat([by_weights, grad.sum(1)], 1)

    linear = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise TypeError('KCentre("gradients") needs a network with a linear layer')
    hooks = [part.register_forward_hook(cut) for part in linear]
    try:
        with evaluating(network):
            if objective.own_loss is None:
                return of(x, y)
            alone = [slice(i, i + 1) for i in range(n)]
            return torch.cat([of(take(x, i), take(y, i)) for i in alone])
    finally:
        for hook in hooks:
            hook.remove()


def _losses(
    objective: Objective, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None
) -> Tensor:
    n = size(y)
    if objective.own_loss is not None:
        parts = [slice(i, i + 1) for i in range(n)]
        losses = [objective.loss(take(x, i), t, take(y, i), mask) for i in parts]
        return torch.stack(losses)
    one_x, one_y = (tree_map(lambda leaf: leaf[:, None], tree) for tree in (x, y))
    masks = None if mask is None else mask.expand(n, -1)
    alone = Stack(one_x, one_y, (1,) * n, masks, tasks=(t,) * n)
    return objective.criterion.by_task(objective.outputs(x), alone)
