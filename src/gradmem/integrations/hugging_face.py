"""Hugging Face models as the engine takes them: inputs by name, logits, and the model's own loss.

A model computes its loss itself when it is given labels. The fast ways to compute the gradients at
the memories need the logits, so the loss is taken apart: which loss of the logits is the model's
own is found out by comparing values on a few examples, and a model with a loss of another kind is
asked for it, task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.gradients import Criterion, Objective, evaluating
from gradmem.trees import Tree

__all__ = ["HEADS", "Head", "Logits", "head_of", "lengthened", "objective_of", "split"]

#: The label that the losses leave out.
IGNORED = -100


class Logits(nn.Module):
    """A model as a network of one argument, {name: input} → logits, classes in dimension 1.

    Logits of every position are (n, classes, positions). The autocast that accelerate puts around
    a model is left out: the engine has its own (`precision`).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = _plain_forward(self.model)(**inputs).logits
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # as the models' own losses do
        return logits.movedim(-1, 1)


@dataclass(frozen=True)
class Head:
    """A loss of logits, and what it compares them with.

    Attributes
    ----------
    name
        One of `HEADS`.
    loss
        `loss(logits, targets)`.
    targets
        Labels as the loss takes them.
    predicts_classes
        Whether targets are class ids.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[Tensor], Tensor]
    predicts_classes: bool

    def fits(self, logits: Tensor, targets: Tensor) -> bool:
        """Whether the shapes are those of the loss."""
        if self.predicts_classes:
            shape = (len(logits), *logits.shape[2:])
            return targets.shape == shape and not targets.is_floating_point()
        return targets.shape == logits.shape and targets.is_floating_point()


def _next_tokens(labels: Tensor) -> Tensor:
    """The label that each position predicts: that of the next one, none at the end."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _as_they_are(labels: Tensor) -> Tensor:
    return labels


def _column(labels: Tensor) -> Tensor:
    return labels.reshape(len(labels), -1)


#: Name → the losses that models have, tried in this order.
HEADS: dict[str, Head] = {
    head.name: head
    for head in (
        Head("class", F.cross_entropy, _as_they_are, True),
        Head("next token", F.cross_entropy, _next_tokens, True),
        Head("number", F.mse_loss, _column, False),
        Head("several labels", F.binary_cross_entropy_with_logits, _as_they_are, False),
    )
}


@torch.no_grad()
def head_of(model: nn.Module, inputs: Tree, labels: Mapping[str, Tensor]) -> Head | None:
    """The head whose loss is the model's own on these examples; None if no one's is."""
    if [*labels] != ["labels"]:
        return None
    with evaluating(model):
        try:
            own = _plain_forward(model)(**inputs, **labels).loss
            logits = Logits(model)(inputs)
        except Exception:
            return None  # it needs the labels to answer
        tolerance = 1e-4 if own.dtype == torch.float32 else 3e-2
        for head in HEADS.values():
            targets = head.targets(labels["labels"])
            if head.fits(logits, targets):
                found = head.loss(logits, targets)
                if torch.allclose(found.float(), own.float(), rtol=tolerance, atol=1e-6):
                    return head
    return None


def objective_of(
    model: nn.Module,
    head: Head | None,
    smoothing: float = 0.0,
    batch_loss: Callable[[Any, Any], Tensor] | None = None,
) -> Objective:
    """What is differentiated at the memories: the mean over a task's remembered labels.

    Labels of −100 do not count. `smoothing` is the Trainer's `label_smoothing_factor`, `batch_loss`
    its `compute_loss_func`.
    """
    if head is None:

        def own_loss(x: Tree, t: Any, y: Any, mask: Tensor | None) -> Tensor:
            forward = _plain_forward(model)
            if batch_loss is not None:
                return batch_loss(forward(**x), y["labels"])
            return forward(**x, **y).loss  # type: ignore[no-any-return]

        return Objective(Logits(model), own_loss=own_loss)
    loss: Callable[..., Tensor] = head.loss
    if smoothing and head.predicts_classes:
        loss = partial(loss, label_smoothing=smoothing)
    return Objective(Logits(model), Criterion(loss))


def split(
    batch: Mapping[str, Any], label_names: Sequence[str], head: Head | None
) -> tuple[Tree, Tree]:
    """A collated batch as (x, y): inputs by name, and what the head compares with.

    Without a head, y are the labels by name.
    """
    # in one order, so that memories of all tasks are of one kind
    tensors = {name: batch[name] for name in sorted(batch) if isinstance(batch[name], Tensor)}
    labels = {name: tensors.pop(name) for name in label_names if name in tensors}
    if not labels:
        names = ", ".join(map(repr, label_names))
        raise ValueError(f"a batch must have {names}, got only {', '.join(map(repr, batch))}")
    return tensors, labels if head is None else head.targets(labels["labels"])


def lengthened(
    batch: Mapping[str, Any],
    length: int,
    pad_token: int = 0,
    left: bool = False,
    with_mask: bool = True,
) -> dict[str, Any]:
    """A batch of sequences padded to `length`, with an attention mask; as it is if it has no ids.

    Labels that there are for every position are padded by −100. Without `with_mask`, none is made
    where there was none.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return dict(batch)
    missing = length - ids.shape[1]
    if missing < 0:
        raise ValueError(f"max_length must be at least {ids.shape[1]} for this task, got {length}")
    values = {"input_ids": pad_token, "labels": IGNORED}
    around = (missing, 0) if left else (0, missing)
    mask = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
    return {
        name: F.pad(value, around, value=values.get(name, 0))
        if isinstance(value, Tensor) and value.shape == ids.shape
        else value
        for name, value in {**mask, **batch}.items()
    }


def _plain_forward(model: nn.Module) -> Callable[..., Any]:
    """The model without the autocast that accelerate wraps its forward in."""
    forward: Callable[..., Any] = vars(model).get("_original_forward", model)
    return forward
