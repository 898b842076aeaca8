"""G by `torch.func`: the gradient of one task's loss, vectorised over tasks.

Nothing is ever done to the user's own module: `functional_call` and `vmap` work on a twin, whose
modules are copies and whose parameters and buffers are the network's own tensors.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from gradmem.gradients.flat import parameters
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack
from gradmem.trees import Tree

__all__ = ["FunctionalGradients", "has_module_twice", "is_vectorisable"]

#: Attributes that every module has: its parameters, buffers, parts and hooks.
OF_EVERY_MODULE = {*vars(nn.Module())}


class FunctionalGradients:
    """For modules without a rule.

    Raises where vmap cannot follow: data-dependent control flow, buffers that change (batch
    statistics).
    """

    def __init__(self) -> None:
        self._twin: nn.Module | None = None
        self._modules: list[nn.Module] = []
        self._attributes: dict[tuple[int, str], Any] = {}  # as they were when they were copied

    def __call__(self, objective: Objective, stack: Stack, out: Tensor) -> None:
        """Write the gradient of each task's mean loss into its row of out: (k, p)."""
        network = objective.network
        twin = self._twin_of(network)
        # One name per parameter: a tied one has several, and functional_call ties them again.
        named = {name: w.detach() for name, w in network.named_parameters() if w.requires_grad}
        fixed = {name: w.detach() for name, w in network.named_parameters() if name not in named}
        fixed |= {name: buffer.clone() for name, buffer in network.named_buffers()}
        assert len(named) == len(parameters(network))

        def loss(tensors: dict[str, Tensor], x: Tree, y: Tree, mask: Tensor | None) -> Tensor:
            outputs = functional_call(
                twin, tensors | fixed, (objective.forward.prepared(network, x),)
            )
            return objective.criterion.mean(outputs, y, mask)

        start = 0
        for part in stack.level():
            dims: tuple[Any, ...] = (None, 0, 0, None if part.masks is None else 0)
            per_task = vmap(grad(loss), in_dims=dims, randomness="different")
            grads = per_task(named, objective.forward.safe(network, part.x), part.y, part.masks)
            rows = [grads[name].flatten(1) for name in named]
            torch.cat(rows, dim=1, out=out[start : start + len(part)])
            start += len(part)

    def _twin_of(self, network: nn.Module) -> nn.Module:
        """The twin, with attributes as the network has them now: tensors themselves, else copies.

        Objects that several modules share are shared by their twins.
        """
        modules = [*network.modules()]
        memo: dict[int, Any] = {
            id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())
        }
        is_new = self._twin is None or modules != self._modules
        if self._twin is None or is_new:
            self._twin = copy.deepcopy(network, dict(memo))
            self._modules, self._attributes = modules, {}
        twins = [*self._twin.modules()]
        memo |= {id(part): twin for part, twin in zip(modules, twins, strict=True)}
        changed = []
        for i, (part, twin) in enumerate(zip(modules, twins, strict=True)):
            twin.training = part.training
            for name, value in vars(part).items():
                if name in OF_EVERY_MODULE:
                    continue
                if isinstance(value, Tensor):
                    vars(twin)[name] = value
                elif is_new:
                    self._attributes[i, name] = value
                elif self._attributes.get((i, name), self) is not value or _is_container(value):
                    changed.append((i, name, value))
                else:
                    memo[id(value)] = vars(twin)[name]
        for i, name, value in changed:
            vars(twins[i])[name] = copy.deepcopy(value, memo)
            self._attributes[i, name] = value
        return self._twin


def _is_container(value: Any) -> bool:
    """Whether what is in it may be another thing while it is the same."""
    return isinstance(value, list | dict | set)


def has_module_twice(network: nn.Module) -> bool:
    """Whether a module has several names: functional_call does not put such a one back right."""
    names = sum(1 for _ in network.named_modules(remove_duplicate=False))
    return names > sum(1 for _ in network.modules())


def is_vectorisable(objective: Objective, x: Tree) -> bool:
    """Whether vmap can follow the pass on x: (1, n, …): no control flow depends on data.

    The objective's network is used up: it must be a copy.
    """
    # Batch statistics stop vmap, too, but they are no control flow, and there is a rule for them.
    for part in objective.network.modules():
        if isinstance(part, _BatchNorm):
            part.forward = _identity  # type: ignore[assignment]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations that vmap does one by one
            vmap(objective.outputs, randomness="different")(x)
    except Exception:
        return False
    return True


def _identity(x: Tensor) -> Tensor:
    return x
