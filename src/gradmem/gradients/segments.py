"""A task's pass in segments, so that several tasks' backward passes can go side by side.

The network is cut at the calls of some of its modules. What such a call gives goes on as new
leaves, so the backward pass of every segment can be run when it is wanted: for one task after
another, segment by segment, where a plain backward pass takes all segments of one task. The
derivatives are autograd's own, whatever a segment contains. What lies between the segments, the
loss at the end among it, is differentiated along with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradmem.gradients.again import as_it_was

__all__ = ["Call", "Pass", "Segments", "cuts"]

#: A segment has at most this share of the parameters, if its module can be cut further.
SHARE = 1 / 8
#: Parameters, the place of a task and shares of the task's gradients by them.
Sink = Callable[[Sequence[nn.Parameter], int, Sequence[Tensor | None]], None]


def cuts(network: nn.Module) -> list[nn.Module]:
    """The modules whose calls are segments: small enough, or without parts that learn."""
    total = sum(w.numel() for w in network.parameters() if w.requires_grad)
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        parts = [part for part in module.children() if _learns(part)]
        size = sum(w.numel() for w in module.parameters() if w.requires_grad)
        called = type(module).forward is not nn.Module.forward
        if called and module is not network and (size <= SHARE * total or not parts):
            found[module] = None
        else:
            for part in parts:
                visit(part)

    visit(network)
    return list(found)


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters of one segment that lie next to each other in the network: columns of G."""

    weights: tuple[nn.Parameter, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)


def blocks(
    weights: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> dict[nn.Parameter, Block]:
    """The block of each parameter; one that is in no segment, or in several, is a block itself."""
    owners: dict[nn.Parameter, list[int]] = {w: [] for w in weights}
    for number, module in enumerate(modules):
        for w in module.parameters():
            if w in owners:
                owners[w].append(number)
    found: dict[nn.Parameter, Block] = {}
    start = 0
    alone = [
        (number, *owners[w]) if len(owners[w]) != 1 else owners[w][0]
        for number, w in enumerate(weights)
    ]
    for _, run in groupby(zip(weights, alone, strict=True), key=lambda pair: pair[1]):
        members = tuple(w for w, _ in run)
        stop = start + sum(w.numel() for w in members)
        block = Block(members, start, stop)
        found |= dict.fromkeys(members, block)
        start = stop
    return found


@dataclass(eq=False)
class Call:
    """One call of a module that is a segment.

    Attributes
    ----------
    weights
        Its parameters that learn.
    inputs, leaves
        The tensors that it was given and that need a gradient, and what it computed with: leaves.
    again
        Computes `results`, if they were not kept.
    results, outputs
        What came out of it, with its graph, and the leaves that went on in its place.
    gradients
        Of the loss by `outputs`, once the backward pass was here.
    """

    weights: list[nn.Parameter]
    inputs: list[Tensor]
    leaves: list[Tensor]
    again: Callable[[], list[Tensor]]
    results: list[Tensor] | None
    outputs: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)

    def differentiate(
        self, by: Sequence[Tensor], scale: Tensor | None = None
    ) -> Sequence[Tensor | None]:
        """The loss's gradients by leaves and weights of this segment, times `scale`: ()."""
        results = self.again() if self.results is None else self.results
        pairs = [
            (result, gradient if scale is None else gradient * scale.to(gradient.dtype))
            for result, gradient in zip(results, self.gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if not pairs:
            return [None] * len(by)
        return torch.autograd.grad(
            [result for result, _ in pairs],
            by,
            [gradient for _, gradient in pairs],
            retain_graph=self.results is not None,
            allow_unused=True,
        )

    def let_go(self) -> None:
        """Free everything: nothing more is asked of this segment."""
        self.inputs, self.leaves, self.results, self.gradients = [], [], [], []
        self.outputs, self.again = [], list


@dataclass
class Pass:
    """A task's forward pass: its calls in order, its loss, and gradients that have arrived."""

    calls: list[Call] = field(default_factory=list)
    loss: Tensor | None = None
    arrived: dict[int, Tensor] = field(default_factory=dict)
    remaining: int = 0

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        before = self.arrived.get(id(leaf))
        self.arrived[id(leaf)] = gradient if before is None else before + gradient


class Segments:
    """Forward and backward passes of a network in segments.

    Parameters
    ----------
    network
        Its modules are used as they are, and are the same afterwards.
    limit
        Most bytes of activations that are kept for the backward passes, of all tasks together;
        segments beyond that are computed again when they are needed. None keeps all of them.
    """

    def __init__(self, network: nn.Module, limit: int | None = None) -> None:
        self.network = network
        self.limit = limit
        self.modules = cuts(network)
        self.weights = [w for w in network.parameters() if w.requires_grad]
        self.blocks = blocks(self.weights, self.modules)
        #: Blocks that are used in several segments, or outside of any.
        self.shared: set[Block] = set()
        self._bytes: dict[Any, int] = {}  # that autograd keeps of a segment
        self.kept = 0  # bytes of activations
        self._copies = False  # whether outputs are copied: something changes them in place
        self._inside = False  # whether a segment is being computed
        #: Whether segments had to be computed again.
        self.recomputes = False

    def forward(self, loss: Callable[[], Tensor]) -> Pass:
        """The pass that computes a task's loss."""
        try:
            return self._forward(loss)
        except RuntimeError as error:
            if self._copies or "in-place" not in str(error):
                raise
            self._copies = True
            return self._forward(loss)

    def _forward(self, loss: Callable[[], Tensor]) -> Pass:
        one = Pass()
        with self._cut(one), torch.enable_grad():
            one.loss = loss()
        return one

    def end(self, one: Pass, place: int, sink: Sink) -> None:
        """The backward pass from the loss to the segments' outputs."""
        loss, one.loss = one.loss, None
        if loss is not None and loss.requires_grad:
            self._between(one, place, [loss], [torch.ones_like(loss)], len(one.calls), sink)

    def back(self, one: Pass, number: int, place: int, sink: Sink) -> None:
        """The backward pass of a task's call, and on to the outputs of the calls before it."""
        call = one.calls[number]
        call.gradients = [one.arrived.pop(id(leaf), None) for leaf in call.outputs]
        found = call.differentiate([*call.leaves, *call.weights])
        sink(call.weights, place, found[len(call.leaves) :])
        arrived = [
            (given, gradient)
            for given, gradient in zip(call.inputs, found, strict=False)
            if gradient is not None
        ]
        self._between(one, place, [g for g, _ in arrived], [d for _, d in arrived], number, sink)

    def _between(
        self,
        one: Pass,
        place: int,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor],
        number: int,
        sink: Sink,
    ) -> None:
        """From tensors after the first `number` calls to these calls' outputs and to parameters."""
        earlier = [leaf for call in one.calls[:number] for leaf in call.outputs]
        known = {id(leaf) for leaf in earlier}
        rest = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if id(tensor) in known:
                one.add(tensor, gradient)
            else:
                rest.append((tensor, gradient))
        if not rest:
            return
        found = torch.autograd.grad(
            [tensor for tensor, _ in rest],
            [*earlier, *self.weights],
            [gradient for _, gradient in rest],
            retain_graph=True,  # other segments may come from the same tensors
            allow_unused=True,
        )
        for leaf, gradient in zip(earlier, found, strict=False):
            if gradient is not None:
                one.add(leaf, gradient)
        sink(self.weights, place, found[len(earlier) :])

    @contextmanager
    def _cut(self, one: Pass) -> Iterator[None]:
        """Calls of the modules are noted in the pass, and are segments."""
        with ExitStack() as undo:
            for module in self.modules:
                own = vars(module).get("forward")
                if own is None:
                    undo.callback(delattr, module, "forward")
                else:
                    undo.callback(setattr, module, "forward", own)
                module.forward = partial(self._call, one, module, module.forward)
            for part in self.network.modules():
                if getattr(part, "inplace", False):  # outputs of segments are not to be changed
                    undo.callback(setattr, part, "inplace", True)
                    part.inplace = False  # type: ignore[assignment]
            yield

    def _call(
        self, one: Pass, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._inside:  # a segment of another segment's
            return forward(*args, **kwargs)
        parts, tree = tree_flatten((args, kwargs))
        places = [i for i, part in enumerate(parts) if _needs_gradient(part)]
        inputs = [parts[i] for i in places]
        for i in places:
            parts[i] = parts[i].detach().requires_grad_()
        keep = self.limit is None or self.kept < self.limit or _is_hooked()
        compute = partial(self._compute, forward, parts, tree)
        restored = as_it_was(module, self.weights[0].device) if not keep else None
        with torch.set_grad_enabled(keep), self._counting(module, parts, keep):
            output = compute()
        flat, shape = tree_flatten(output)
        results = [part for part in flat if _is_real(part) and (part.requires_grad or not keep)]
        leaves = {id(part): part.detach().requires_grad_() for part in results}

        def again() -> list[Tensor]:
            assert restored is not None
            self.recomputes = True
            with restored(), torch.enable_grad():
                computed, _ = tree_flatten(compute())
            return [part for part in computed if _is_real(part)]

        one.calls.append(
            Call(
                [w for w in module.parameters() if w.requires_grad],
                inputs,
                [parts[i] for i in places],
                again,
                results if keep else None,
                [leaves[id(part)] for part in results],
            )
        )
        return tree_unflatten([self._handed_on(leaves.get(id(part), part)) for part in flat], shape)

    def _handed_on(self, part: Any) -> Any:
        return part.clone() if self._copies and isinstance(part, Tensor) else part

    def _compute(self, forward: Callable[..., Any], parts: list[Any], tree: Any) -> Any:
        args, kwargs = tree_unflatten(parts, tree)
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False

    @contextmanager
    def _counting(self, module: nn.Module, parts: list[Any], keep: bool) -> Iterator[None]:
        """Count the bytes that autograd keeps of a segment, if there is a limit.

        They are measured once for each shape of its inputs.
        """
        if self.limit is None or not keep or _is_hooked():
            yield
            return
        key = (module, *(part.shape for part in parts if isinstance(part, Tensor)))
        if key in self._bytes:
            self.kept += self._bytes[key]
            yield
            return
        before = self.kept
        seen = {w.untyped_storage().data_ptr() for w in module.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.kept += storage.nbytes()
            return tensor.detach()  # the tensor itself would keep its own graph alive

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._bytes[key] = self.kept - before


def _is_hooked() -> bool:
    """Whether something else says what autograd keeps, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _learns(module: nn.Module) -> bool:
    return any(w.requires_grad for w in module.parameters())


def _is_real(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def _needs_gradient(part: Any) -> bool:
    return _is_real(part) and part.requires_grad
