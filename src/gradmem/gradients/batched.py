"""G in one forward and one backward pass over all tasks' memories.

The tasks' examples form one large batch and share the weights. What a layer's weights would need is
read off on the way: what went into the layer, and the gradient of what came out. Each layer's rule
then reduces that per task. The weights' own gradients, summed over all tasks, are never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.gradients.flat import parameters, rows_by_parameter
from gradmem.gradients.layer_rules import FORWARDS, Forward, registered, rule_for, write
from gradmem.gradients.objective import Objective
from gradmem.gradients.thin import cut, is_thin, keeps_zeros, padded_forward
from gradmem.memory.stack import Stack

__all__ = ["UnsuitableError", "batched_gradients", "layer_without_rule", "mixes_examples"]


class UnsuitableError(ValueError):
    """A network that a method is not made for."""


def layer_without_rule(network: nn.Module) -> nn.Module | None:
    """A module with parameters that learn and no rule, if there is one."""
    return next((layer for layer in _layers(network) if rule_for(layer) is None), None)


def mixes_examples(network: nn.Module) -> bool:
    """Whether some layer's output for an example depends on the task's other examples."""
    return any(registered(layer) in FORWARDS for layer in network.modules())


def batched_gradients(objective: Objective, stack: Stack, out: Tensor) -> None:
    """Write the gradient of each task's mean loss into its row of out: (k, p)."""
    network = objective.network
    if mixes_examples(network) and len(set(stack.counts)) > 1:
        start = 0
        for part in stack.level():
            batched_gradients(objective, part, out[start : start + len(part)])
            start += len(part)
        return
    if mixes_examples(network):
        (stack,) = stack.level()
    _in_one_pass(objective, stack, out, keeps_zeros(objective, stack, _in_one_pass))


def _in_one_pass(objective: Objective, stack: Stack, out: Tensor, pads: bool) -> None:
    """The same for one level; `pads` says whether thin convolutions are padded."""
    network = objective.network
    k = len(stack)
    weights = parameters(network)
    with _recording(network, weights, stack.room, pads) as calls:
        losses = objective.criterion.by_task(objective.outputs(stack.flat_x), stack)
        grads = torch.autograd.grad(losses.sum(), [y for _, _, y in calls], allow_unused=True)

    _reduce(calls, grads, rows_by_parameter(out, weights), k)


@torch.no_grad()
def _reduce(
    calls: Sequence[tuple[nn.Module, Tensor, Tensor]],
    grads: Sequence[Tensor | None],
    rows: dict[nn.Parameter, Tensor],
    k: int,
) -> None:
    """Every recorded call's share in its layer's gradients, per task."""
    written: set[nn.Parameter] = set()
    for (layer, x, y), grad in zip(calls, grads, strict=True):
        own = {name: w for name, w in layer.named_parameters(recurse=False) if w in rows}
        if grad is None or not own:
            continue
        rule = rule_for(layer)
        assert rule is not None
        # One flag serves all of a layer's parameters, so those not written yet start from zero.
        beta = int(any(w in written for w in own.values()))
        if beta:
            for w in own.values():
                if w not in written:
                    rows[w].zero_()
        out = {name: rows[w] for name, w in own.items()}
        known = getattr(y.grad_fn, "by_parameter", None)
        if known is not None:  # computed in the backward pass of the layer itself
            for name, row in out.items():
                write(row, cut(known[name], row.shape), beta)
        else:
            x, grad = (tensor.unflatten(0, (k, -1)) for tensor in (x, grad))
            rule(layer, x, grad, out, beta)
        written.update(own.values())
    for w, row in rows.items():
        if w not in written:
            row.zero_()


@contextmanager
def _recording(
    network: nn.Module, weights: list[nn.Parameter], room: tuple[int, int], pads: bool
) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Note every call of a layer that learns as (layer, input, output), in order."""
    k, m = room
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    met: set[nn.Module] = set()

    def note(
        layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> Tensor:
        known = registered(layer) is not None
        if not isinstance(output, Tensor) or (not known and (options or len(inputs) != 1)):
            raise UnsuitableError(
                f'gradients="batched" has no rule for {type(layer).__name__} with several inputs '
                'or outputs; "auto" finds a way'
            )
        x: Tensor = inputs[0]
        if len(x) == 1 < k * m:  # one for all examples, as embeddings of positions are
            x, output = (part.expand(k * m, *part.shape[1:]) for part in (x, output))
        if not output.requires_grad:
            output.requires_grad_()
        calls.append((layer, x, output))
        return output  # type: ignore[no-any-return]

    with ExitStack() as undo:
        for layer in _layers(network):
            undo.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        for layer in network.modules():
            kind = registered(layer)
            if kind in FORWARDS:
                undo.callback(delattr, layer, "forward")
                layer.forward = partial(_by_task, FORWARDS[kind], layer, k, met)
            elif pads and is_thin(layer):
                undo.callback(delattr, layer, "forward")
                layer.forward = partial(padded_forward, layer)
            if getattr(layer, "inplace", False):
                # What a layer gave must still be there when its gradient is asked for.
                undo.callback(setattr, layer, "inplace", True)
                layer.inplace = False  # type: ignore[assignment]
        for w in weights:
            undo.callback(w.requires_grad_, True)
            w.requires_grad_(False)
        yield calls


def _by_task(forward: Forward, layer: Any, k: int, met: set[nn.Module], x: Tensor) -> Tensor:
    if layer in met and k > 1 and layer.training and layer.track_running_stats:
        # Task by task, its second call would move the running statistics before the next task.
        raise UnsuitableError(
            f'gradients="batched" takes a {type(layer).__name__} that is used once in a pass, here '
            'it is used twice; "auto" finds a way'
        )
    met.add(layer)
    return forward(layer, x, k)


def _layers(network: nn.Module) -> list[nn.Module]:
    """The modules that own a parameter that learns."""
    return [
        layer
        for layer in network.modules()
        if any(w.requires_grad for w in layer.parameters(recurse=False))
    ]
