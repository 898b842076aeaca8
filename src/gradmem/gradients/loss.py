"""The loss of a network's outputs, of a batch and of several tasks' memories at once.

A loss is any callable `loss(outputs, y)` that gives one value per example, or their mean. Torch's
own functions and modules with a `reduction` are taken apart into elements, so that the losses of
all tasks are one call; a callable that only gives a mean is called once per task.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from gradmem.cuda.devices import has_triton
from gradmem.memory.stack import Stack
from gradmem.trees import Tree, leaves, size, take

__all__ = ["Criterion", "Loss", "masked"]

#: Outputs, y → one value per example, or their mean.
Loss = Callable[[Any, Any], Tensor]

REDUCTIONS = ("mean", "sum", "none")


def masked(logits: Any, mask: Tensor | None, value: float = float("-inf")) -> Any:
    """Logits (…, classes) with −∞ for the outputs that are not in the mask, if there is one."""
    return logits if mask is None else logits.masked_fill(~mask, value)


class Criterion:
    """A loss, and what is known about it.

    Parameters
    ----------
    loss
        `loss(outputs, y)`, a torch loss module (whatever its reduction, the mean is taken), or None
        for cross-entropy.

    Attributes
    ----------
    is_cross_entropy
        Whether y holds class ids (or probabilities) and outputs are logits of classes.
    is_plain
        Whether it is cross-entropy without options, whose gradient is written out.
    ignored
        The class id that cross-entropy leaves out of the mean.

    Examples
    --------
    >>> criterion = Criterion(nn.MSELoss(reduction="sum"))
    >>> criterion.mean(torch.ones(4, 2), torch.zeros(4, 2))
    tensor(1.)
    """

    def __init__(self, loss: Loss | None = None) -> None:
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a callable of outputs and y, got {loss!r}")
        if isinstance(loss, type):
            raise TypeError(f"loss is called with outputs and y: give {loss.__name__}(), no class")
        self.loss: Loss = F.cross_entropy if loss is None else loss
        self._function = _function_of(self.loss)
        self.is_cross_entropy = self._function in (F.cross_entropy, F.nll_loss) or isinstance(
            loss, nn.CrossEntropyLoss | nn.NLLLoss
        )
        self._by_element = _elementwise(self.loss)
        self._scalar: bool | None = None  # whether an unknown callable gives a mean

    @property
    def _options(self) -> dict[str, Any]:
        """What the loss was told beside outputs and y; a module's attributes as they are now."""
        return _options_of(self.loss)

    @property
    def is_plain(self) -> bool:
        return self._function is F.cross_entropy and not self._options

    @property
    def ignored(self) -> int:
        return int(self._options.get("ignore_index", -100))

    @property
    def key(self) -> tuple[Any, ...]:
        """What the loss was told, to compare with: a CUDA graph has it as it was."""
        given = self._options.items()
        return tuple([(name, id(v) if isinstance(v, Tensor) else repr(v)) for name, v in given])

    @property
    def _means(self) -> bool:
        return bool(self._options.get("reduction", "mean") == "mean")

    @property
    def _elements(self) -> Loss | None:
        """The loss with a value for each element, if torch's own way tells how to get it."""
        return None if self._by_element is None else self._by_element()

    @property
    def name(self) -> str:
        """The loss as a message names it."""
        return str(getattr(self.loss, "__name__", self.loss))

    def __repr__(self) -> str:
        return f"Criterion({self.name})"

    def mean(self, outputs: Any, y: Tree, mask: Tensor | None = None) -> Tensor:
        """The mean loss of a batch: ().

        `mask` says which outputs count: (classes,), or (n, classes) for each example.
        """
        outputs, y = self._masked(outputs, mask, y), self._classes(y)
        if self._by_element is not None and not self._means:
            values, weights = self._parts(outputs, y)
            return values.sum() / weights.sum()
        loss = self.loss(*self._by_position(outputs, y))
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must give a tensor, got {type(loss).__name__}")
        if loss.ndim and len(loss) % size(y):  # several per example may be in one row
            raise ValueError(
                f"loss must give one value per example or their mean, got {len(loss)} values for "
                f"{size(y)} examples"
            )
        return loss.mean() if loss.ndim else loss

    def by_task(self, outputs: Any, stack: Stack) -> Tensor:
        """The mean loss at each task's memories (equation 5): (k,) from outputs (k·m, …)."""
        k, m = stack.room
        if stack.masks is not None:
            whole = outputs.unflatten(0, (k, m))
            outputs = self._masked(whole, stack.masks_by_slot, stack.y).flatten(0, 1)
        y = self._classes(stack.flat_y)
        if self.is_plain and outputs.ndim == 2:
            losses = F.cross_entropy(outputs, y, reduction="none").view(k, m)
            return (losses * stack.shares.to(losses.dtype)).sum(1)
        if self._by_element is not None:
            return self._ratio(*self._parts(outputs, y), stack)
        if self._scalar is not True:
            losses = self.loss(outputs, y)
            self._scalar = losses.ndim == 0
            if not self._scalar:
                return self._ratio(losses, torch.ones_like(losses), stack)
        return torch.stack(
            [
                self.loss(
                    _pytree.tree_map(lambda leaf, i=i, n=n: leaf[i * m : i * m + n], outputs),
                    take(y, slice(i * m, i * m + n)),
                )
                for i, n in enumerate(stack.counts)
            ]
        )

    def outputs_gradient(self, outputs: Tensor, stack: Stack, out: Tensor) -> None:
        """Write the gradient of the tasks' summed losses by the outputs (k·m, …) into out."""
        if self.is_plain and outputs.ndim == 2:
            _softmax_gradient(outputs, stack, self._classes(stack.flat_y), out)
            return
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            total = self.by_task(leaf, stack).sum()
            out.copy_(torch.autograd.grad(total, leaf)[0])

    def _masked(self, outputs: Any, mask: Tensor | None, y: Tree) -> Any:
        """Outputs without those that are not in the mask, as the loss takes them.

        Probabilities of zero are multiplied with the logarithm of what is left out: it is finite.
        """
        if mask is None or not self.is_cross_entropy or not leaves(y)[0].is_floating_point():
            return masked(outputs, mask)
        return masked(outputs, mask, torch.finfo(outputs.dtype).min / 4)

    def _classes(self, y: Tree) -> Tree:
        """Class ids as cross-entropy takes them."""
        whole = self.is_cross_entropy and isinstance(y, Tensor) and not y.is_floating_point()
        return y.long() if whole else y

    def _parts(self, outputs: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
        """The elements of a torch loss, and what each counts in the mean: (n, …) or (n·…) both."""
        elements, options = self._elements, self._options
        assert elements is not None
        outputs, y = self._by_position(outputs, y)
        values = elements(outputs, y)
        if not self.is_cross_entropy or y.is_floating_point():
            return values, torch.ones_like(values)
        ignored = y == self.ignored
        counts = (~ignored).to(values.dtype)
        if (weights := options.get("weight")) is not None:
            counts = counts * weights[y.masked_fill(ignored, 0)].to(values.dtype)
        return values, counts

    def _by_position(self, outputs: Any, y: Tree) -> tuple[Any, Tree]:
        """Logits (n, classes, …) of a class id at each position as (n·…, classes), y as (n·…).

        Only where the classes of a position are next to each other in memory, as those of a
        language model are: cross-entropy is the same then and several times faster.
        """
        if not self.is_cross_entropy or self._by_element is None:
            return outputs, y
        if outputs.ndim < 3 or y.ndim != outputs.ndim - 1 or outputs.stride(1) != 1:
            return outputs, y
        return outputs.movedim(1, -1).flatten(0, -2), y.flatten()

    def _ratio(self, values: Tensor, weights: Tensor, stack: Stack) -> Tensor:
        """Each task's Σ values / Σ weights over its filled slots."""
        k, m = stack.room
        filled = (stack.shares > 0).to(values.dtype)
        total, weight = (
            (part.reshape(k, m, -1).sum(2) * filled).sum(1) for part in (values, weights)
        )
        return total / weight


def _softmax_gradient(logits: Tensor, stack: Stack, y: Tensor, out: Tensor) -> None:
    """(softmax(logits) − onehot(y)) · shares, the gradient of plain cross-entropy, into out.

    Of y: (n, classes), probabilities, (softmax(logits) Σy − y) · shares.
    """
    if stack.masks is not None:
        whole = logits.unflatten(0, stack.room)
        logits = masked(whole, stack.masks_by_slot).flatten(0, 1)
    if y.is_floating_point():
        torch.softmax(logits, 1, out=out)
        out.mul_(y.sum(1, keepdim=True)).sub_(y).mul_(stack.shares.to(out.dtype).reshape(-1, 1))
        return
    if logits.is_cuda and logits.dtype == torch.float32 and has_triton():
        from gradmem.gradients.device import softmax_gradient

        softmax_gradient(logits, y, stack.shares.flatten(), out)
        return
    torch.softmax(logits, 1, out=out)
    one = out.new_full((), -1.0).expand(len(out), 1)
    out.scatter_add_(1, y.reshape(-1, 1), one)
    out.mul_(stack.shares.to(out.dtype).reshape(-1, 1))


#: Options of cross-entropy that change nothing.
USUAL = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}


def _is_torchs(loss: Any) -> bool:
    """Whether a loss is a torch module that computes what torch's own does."""
    if not isinstance(loss, nn.modules.loss._Loss):
        return False
    return getattr(type(loss).forward, "__module__", "") == nn.modules.loss.__name__


def _function_of(loss: Any) -> Any:
    """The function behind a loss: that of cross-entropy's modules, of a partial, or itself."""
    if isinstance(loss, partial) and not loss.args:
        return _function_of(loss.func)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and _is_torchs(loss):
        return F.cross_entropy if isinstance(loss, nn.CrossEntropyLoss) else F.nll_loss
    return loss


def _options_of(loss: Any) -> dict[str, Any]:
    """What a loss was told, but for cross-entropy's usual options."""
    if isinstance(loss, partial) and not loss.args:
        return _options_of(loss.func) | loss.keywords
    if not isinstance(loss, nn.Module) or not _is_torchs(loss):
        return {}
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        given = {name: getattr(loss, name) for name in USUAL if hasattr(loss, name)}
        return {name: v for name, v in given.items() if v is not None and v != USUAL[name]}
    return {"reduction": loss.reduction}


def _elementwise(loss: Any) -> Callable[[], Loss] | None:
    """What gives the loss with a value for each element, if torch's own way tells how."""
    if isinstance(loss, nn.Module):
        if not _is_torchs(loss) or loss.reduction not in REDUCTIONS:
            return None
        return partial(_without_reduction, loss)
    function = loss.func if isinstance(loss, partial) else loss
    if getattr(function, "__module__", "") != F.__name__:
        return None
    if "reduction" not in inspect.signature(function).parameters:
        return None
    elements = partial(loss, reduction="none")
    return lambda: elements


def _without_reduction(loss: nn.Module) -> Loss:
    elements = copy.copy(loss)
    elements.reduction = "none"  # type: ignore[assignment]
    return elements
