"""What is given to be learned or remembered: looked at before anything is done with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.gradients.loss import Criterion
from gradmem.trees import Kind, Tree, check, kind, leaves, take, tree_map
from gradmem.validation import class_ids

__all__ = ["Inputs"]

#: A few examples → the network's outputs for them, in evaluation mode.
Ask = Callable[[Tree], Any]


class Inputs:
    """Refuses inputs and labels that a network and a loss cannot take, and says why.

    Values are looked at every time, which on a GPU means to wait for it. Whether the network takes
    a kind of input is found out once, by asking it about two examples.

    Attributes
    ----------
    n_outputs
        The size of the outputs' second dimension; None until something was asked.
    are_classes
        Whether labels are class ids, so that predictions are classes: known from the loss, or from
        the labels.
    """

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.n_outputs: int | None = None
        self.are_classes = criterion.is_cross_entropy
        self._shapes: dict[Kind, tuple[int, ...] | None] = {}  # of the outputs, without n
        self._labels: set[tuple[Kind, Kind]] = set()

    def forget(self) -> None:
        """Ask again: the network has changed."""
        self.n_outputs = None
        self._shapes, self._labels = {}, set()

    def check_x(self, x: Tree, ask: Ask) -> None:
        """Refuse inputs that are no examples, not finite, or not what the network takes."""
        check("x", x)
        _check_finite("x", x)
        if kind(x) not in self._shapes:
            self._shapes[kind(x)] = self._ask(x, ask)

    def check_y(self, x: Tree, y: Tree, ask: Ask, grows: bool = False) -> None:
        """Refuse labels that the loss cannot take; x was checked before.

        `grows` says that class ids above the outputs are no error.
        """
        n = len(leaves(x)[0])
        if isinstance(y, Tensor) and y.ndim < 1:
            raise ValueError(f"y must have shape ({n},) as x has, got ()")
        if (found := check("y", y)) != n:
            got = tuple(leaves(y)[0].shape)
            raise ValueError(f"y must have shape ({n},) as x has, got {got}: {found} labels")
        if leaves(y)[0].device != leaves(x)[0].device:
            raise ValueError(
                f"y must be on x's device {leaves(x)[0].device}, got {leaves(y)[0].device}"
            )
        _check_finite("y", y)
        shape = self._shapes[kind(x)]
        if self.criterion.is_cross_entropy:
            self._check_classes(y, shape, grows)
        elif (kind(x), kind(y)) not in self._labels:
            self._try_loss(x, y, ask)
            self._labels.add((kind(x), kind(y)))
            whole = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
            self.are_classes = whole and y.dtype != torch.bool and len(shape or ()) == 1

    def check_labels(self, x: Tree, y: Tree, grows: bool = False) -> None:
        """`check_y` for many more labels than inputs: x are some of their examples."""
        _check_finite("y", y)
        if self.criterion.is_cross_entropy:
            self._check_classes(y, self._shapes[kind(x)], grows)

    def check_own(self, t: Hashable, y: Tree, own: Sequence[int] | None) -> None:
        """Refuse class ids that are not among task t's own, if it has its own."""
        if own is None or not isinstance(y, Tensor) or y.is_floating_point():
            return
        ids = torch.as_tensor(class_ids(f"outputs of task {t!r}", own), device=y.device)
        allowed = torch.isin(y, ids) | (y == self.criterion.ignored)
        if not allowed.all():
            wrong = int(y[~allowed][0])
            raise ValueError(f"y must hold task {t!r}'s classes {own}, got {wrong}")

    def _check_classes(self, y: Tree, shape: tuple[int, ...] | None, grows: bool) -> None:
        """Refuse what cross-entropy cannot take with outputs of this shape (without n)."""
        if shape is None or not shape:
            raise ValueError("the network must give logits of shape (n, classes) for cross-entropy")
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor of class ids, got {type(y).__name__}")
        classes, n = shape[0], len(y)
        if y.is_floating_point() and y.shape[1:] == shape:
            return  # probabilities
        if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
            raise TypeError(f"y must hold class ids as whole numbers, got {y.dtype}")
        if y.shape[1:] != shape[1:]:
            raise ValueError(
                f"y must have shape {(n, *shape[1:])} for outputs of shape {(n, *shape)}, got "
                f"{tuple(y.shape)}"
            )
        if y.ndim > 1 or not self.criterion.is_plain:
            y = y[y != self.criterion.ignored]
            if not len(y):
                raise ValueError(f"y must hold a class, got only {self.criterion.ignored}")
        low, high = int(y.min()), int(y.max())
        if low < 0 or (high >= classes and not grows):
            wrong = low if low < 0 else high
            more = f"; gm.networks.widen(network, {wrong + 1}) makes room" if low >= 0 else ""
            raise ValueError(f"y must hold classes from 0 to {classes - 1}, got {wrong}{more}")

    def _ask(self, x: Tree, ask: Ask) -> tuple[int, ...] | None:
        """The shape of the outputs without n; None if they are no tensor."""
        few = take(x, slice(2))  # batch statistics of one example may not exist
        try:
            outputs = ask(few)
        except Exception as error:
            shown = " and ".join(map(_described, leaves(x)))
            raise ValueError(
                f"the network does not take x of shape {shown}: {error}{_cast(few, ask)}"
            ) from error
        n = len(leaves(few)[0])
        if not isinstance(outputs, Tensor):
            if self.criterion.is_cross_entropy:
                raise ValueError(
                    "the network must give logits of shape (n, classes), got "
                    f"{type(outputs).__name__}"
                )
            return None
        least = 2 if self.criterion.is_cross_entropy else 1
        if outputs.ndim < least or len(outputs) != n:
            wanted = "logits of shape (n, classes)" if least == 2 else "outputs of shape (n, …)"
            raise ValueError(
                f"the network must give {wanted}, got {tuple(outputs.shape)} for x of shape "
                f"{tuple(leaves(few)[0].shape)}"
            )
        if outputs.ndim > 1:
            self.n_outputs = outputs.shape[1]
        return tuple(outputs.shape[1:])

    def _try_loss(self, x: Tree, y: Tree, ask: Ask) -> None:
        """Refuse labels that a loss cannot take, or takes only by spreading them out."""
        few = slice(2)
        outputs = ask(take(x, few))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss = self.criterion.mean(outputs, take(y, few))
        except Exception as error:
            of = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            shapes = ", ".join(str((*leaf.shape[1:], leaf.dtype)) for leaf in leaves(y))
            raise ValueError(
                f"the loss does not take outputs {of} with y of (n, …) {shapes}: {error}"
            ) from error
        if loss.ndim:
            raise ValueError(f"the loss must be one value per example, got {tuple(loss.shape)}")


def _described(leaf: Tensor) -> str:
    """The shape of a batch, its type and where it is."""
    sizes = "".join(f" {size}," for size in leaf.shape[1:])
    return f"(n,{sizes.removesuffix(',')}), {leaf.dtype}, on {leaf.device}"


def _cast(x: Tree, ask: Ask) -> str:
    """The end of a message: that x would do in another type, if it would."""
    if all(leaf.dtype == torch.float32 for leaf in leaves(x)):
        return ""
    try:
        ask(tree_map(Tensor.float, x))
    except Exception:
        return ""
    return "; it takes x.float()" if isinstance(x, Tensor) else "; it takes them as torch.float32"


def _check_finite(name: str, tree: Tree) -> None:
    for leaf in leaves(tree):
        # A finite sum has only finite terms; it is cheaper to form than to look at every term.
        if leaf.is_floating_point() and not leaf.sum().isfinite() and not leaf.isfinite().all():
            bad = (~leaf.isfinite()).nonzero()[0]
            raise ValueError(
                f"{name} must be finite, got {leaf[tuple(bad)].item()} at {bad.tolist()}"
            )
