"""The gradients at past tasks' memories, by the fastest way that is exact and fits into memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import is_recording, total_memory
from gradmem.gradients.batched import layer_without_rule, mixes_examples
from gradmem.gradients.by_task import ROOM, TaskByTask, passes
from gradmem.gradients.chain import ChainGradients, is_chain
from gradmem.gradients.choice import (
    METHODS,
    Method,
    choose,
    few_examples,
    is_enough,
    operations,
)
from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.gradients.gram import Gradients, GramGradients, Outlook, check_segments
from gradmem.gradients.loop import batches_of, loop_gradients, pass_of
from gradmem.gradients.objective import Objective
from gradmem.gradients.precision import PRECISIONS, computing_in
from gradmem.gradients.recorded import RecordedPasses, has_hooks
from gradmem.gradients.segments import Segments
from gradmem.memory.stack import Stack
from gradmem.trees import Tree, leaves, size, take
from gradmem.validation import one_of, positive_int

__all__ = ["MemoryGradients"]


class MemoryGradients:
    """The gradients at the tasks' memories: G, in one buffer that is used again, or without it.

    Parameters
    ----------
    objective
        The loss that is differentiated; of a module, its cross-entropy.
    method
        "chain" (one pass, written out for plain MLPs), "batched" (one pass with a rule per layer),
        "func" (torch.func), "loop" (a pass per task), "gram" (inner products alone; of G few rows
        are held: see `TaskByTask`, for few tasks or few parameters that learn, and
        `GramGradients`), or "auto": the fastest of them that can be used and that agrees with the
        loop on the first memories it is given; "gram" once G would take more than `memory_limit`,
        or a quarter of the device's memory.
    tasks_per_chunk
        Most tasks in one pass.
    memory_limit
        Most bytes that one pass may keep of its activations, roughly; splits it further. With
        "gram", what is not kept is computed again.
    precision
        "fp32": the network's own. "tf32" and "bf16" are faster on GPUs and no longer exact. (With
        "tf32", a chain's gradient of the batch is computed along, and so in the same precision.)
    graphs
        On a GPU, whether the passes of "loop" become CUDA graphs where starting their kernels takes
        longer than running them (see `RecordedPasses`).
    """

    def __init__(
        self,
        objective: Objective | nn.Module,
        method: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
        graphs: bool = False,
    ) -> None:
        if isinstance(objective, nn.Module):
            objective = Objective(objective)
        self.objective = objective
        self._of_batches = replace(objective, moves_statistics=True)
        self.precision = one_of("precision", precision, PRECISIONS)
        _check_method(one_of("gradients", method, ["auto", *METHODS, "gram"]), objective)
        self._asked = method
        self.tasks_per_chunk = (
            None if tasks_per_chunk is None else positive_int("tasks_per_chunk", tasks_per_chunk)
        )
        self.memory_limit = (
            None if memory_limit is None else positive_int("memory_limit", memory_limit)
        )
        self._passes = RecordedPasses(graphs)
        self.start_again()

    def start_again(self) -> None:
        """Forget what was chosen and measured: the network has other parameters now."""
        self.method = None if self._asked == "auto" else self._asked
        self._compute: Method | None = None
        #: The modules, and which have hooks; their modes, and what was chosen in other modes.
        self._looks: list[tuple[nn.Module, bool]] | None = None
        self._modes: tuple[bool, ...] | None = None
        self._choices: dict[tuple[bool, ...], tuple[str | None, Method | None]] = {}
        self._passes.forget()
        self._buffer: Tensor | None = None
        self._limit: int | None = None  # most tasks in one pass, once a memory limit was met
        self._tried = 1  # tasks in the last pass
        #: Whether a pass over memories may change the network's running statistics.
        self.moves_buffers = self._may_move_buffers()
        self._segments: Segments | None = None
        self._uncut: ValueError | None = None  # why it has none
        #: What the last steps with "gram" were like.
        self.outlook = Outlook()
        vars(self).pop("most_stored", None)

    def use(self, method: str | None) -> None:
        """Go on with the method that a state was saved with, unless one was asked for by name."""
        if method is None or self._asked != "auto" or method == self.method:
            return
        _check_method(one_of("the state's method", method, [*METHODS, "gram"]), self.objective)
        self.method, self._compute, self._modes = method, None, None

    def _follow(self) -> None:
        """Choose again where modules were replaced, got hooks, or learn in another mode.

        What was chosen in a mode is known when it comes back.
        """
        modules = [*self.objective.network.modules()]
        looks = [(part, has_hooks(part)) for part in modules]
        if looks != self._looks:
            if self._looks is not None:
                self.start_again()
            self._looks = looks
        modes = tuple([part.training for part in modules])
        if self._modes is not None and modes != self._modes:
            self._choices[self._modes] = self.method, self._compute
            new = None if self._asked == "auto" else self._asked
            self.method, self._compute = self._choices.get(modes, (new, None))
            self.moves_buffers = self._may_move_buffers()
        self._modes = modes

    def _may_move_buffers(self) -> bool:
        return self.objective.moves_statistics and mixes_examples(self.objective.network)

    @property
    def n_parameters(self) -> int:
        """The number of parameters that learn, p."""
        return sum(w.numel() for w in parameters(self.objective.network))

    def at(self, stacks: list[Stack]) -> Gradients:
        """G: (k, p) for the tasks in the stacks, in order, or what stands for it if it is large.

        A tensor is overwritten by the next call. What stands for it is of the parameters at the
        time when it is asked for inner products.
        """
        if self.stores(stacks):
            return self(stacks)
        rows = self._rows_held(stacks[0])
        if self._goes_by_task(sum(map(len, stacks)), rows) or not self._cuts_well(stacks):
            return TaskByTask(self.objective, stacks, self.precision, self._passes, rows)
        return GramGradients(
            self.objective,
            self._cut(stacks),
            stacks,
            self.precision,
            None if self.moves_buffers else self.outlook,
            self._passes,
        )

    def stores(self, stacks: list[Stack]) -> bool:
        """Whether G is stored for these tasks."""
        self._follow()
        k = sum(map(len, stacks))
        if self._asked == "auto" and self.method != "gram" and k > self.most_stored:
            self.method, self._compute, self._buffer = "gram", None, None
        return self.method != "gram" or not stacks

    def _goes_by_task(self, k: int, rows: int) -> bool:
        """Whether k tasks without G are so few that they go one by one, with so many rows held.

        A pass that is made again would move running statistics again.
        """
        return passes(k, rows) <= (1 if self.moves_buffers else 2) * k

    def _rows_held(self, stack: Stack) -> int:
        """Rows of G that are held: a few, and more if each task's pass is better made by itself.

        They take no more memory than a few copies of the network, nor than G may.
        """
        if not is_enough(self.objective, stack):
            return ROOM
        whole = sum(w.numel() * w.itemsize for w in self.objective.network.parameters())
        rows = ROOM * whole // (self.n_parameters * self._new_rows(0).itemsize)
        return max(ROOM, int(min(rows, self.most_stored)))

    @cached_property
    def most_stored(self) -> float:
        """The most tasks for which "auto" stores G: (k, p)."""
        first = parameters(self.objective.network)[0]
        most = self.memory_limit or total_memory(first.device) // 4
        # A limit that not even one gradient fits is one for activations.
        return most // (self.n_parameters * first.itemsize) or math.inf

    def _cuts_well(self, stacks: list[Stack]) -> bool:
        """Whether the network can be cut into segments; ValueError if "gram" was asked for."""
        if self._segments is None and self._uncut is None:
            try:
                self._cut(stacks)
            except ValueError as error:
                if self._asked == "gram":
                    raise
                self._uncut = error
                warnings.warn(f"{error}; tasks go one by one", RuntimeWarning, stacklevel=2)
        return self._uncut is None

    def _cut(self, stacks: list[Stack]) -> Segments:
        """The network in segments, tried once on a few examples."""
        if self._segments is None:
            segments = self._new_segments()
            few = few_examples(stacks) or next(stacks[0][:1].level())
            check_segments(self.objective, segments, few)
            self._segments = segments
        return self._segments

    def _new_segments(self) -> Segments:
        limit, first = self.memory_limit, parameters(self.objective.network)[0]
        if limit is None and first.is_cuda:
            limit = total_memory(first.device) // 4
        return Segments(self.objective.network, limit)

    def bytes_needed(self, stack: Stack, tasks: int) -> int:
        """What a step takes with so many tasks like the first of the stack, roughly.

        Gradients of the tasks, and activations; before a way is chosen, those of all tasks at once.
        """
        self._follow()
        activations = bytes_per_task(self.objective, stack)
        row = self.n_parameters * parameters(self.objective.network)[0].itemsize
        if self.method == "gram" or (self._asked == "auto" and tasks > self.most_stored):
            rows = self._rows_held(stack)
            if self._goes_by_task(tasks, rows):
                return min(rows, tasks) * row + activations
            segments = self._new_segments()
            kept = tasks * activations
            if segments.limit is not None:
                kept = min(kept, segments.limit + activations)
            return GramGradients.bytes_needed(segments, tasks) + kept
        limit = self.memory_limit or tasks * activations
        most = self.tasks_per_chunk or tasks
        at_once = 1 if self.method == "loop" else max(1, min(tasks, most, limit // activations))
        return tasks * row + at_once * activations

    def __call__(self, stacks: list[Stack]) -> Tensor:
        """G: (k, p) for the tasks in the stacks, in order; overwritten by the next call."""
        self._follow()
        G = self._rows(sum(len(stack) for stack in stacks))
        compute = loop_gradients if self.method == "gram" else self._ready(stacks)
        with torch.enable_grad(), computing_in(self.precision, G.device):
            start = 0
            for stack in stacks:
                self._fill(compute, stack, G[start : start + len(stack)])
                start += len(stack)
        return G

    def with_batch(
        self,
        stacks: list[Stack],
        x: Tree,
        t: Hashable,
        y: Tree,
        mask: Tensor | None = None,
        first: int | None = None,
    ) -> tuple[Gradients, Tensor, Tensor]:
        """G: (k, p) as above, then g: (p,) and () of a batch x: (n, …), y: (n, …) of task t.

        These are the gradient of its mean loss and that loss. If others have joined its `first`
        examples, g is the mean of both parts' gradients, and the loss is that of the first ones.
        `mask` says which outputs count for x, (classes,), or for each of its examples,
        (n, classes), if not all of them.
        """
        batch = Stack.of_batch(x, y, mask, t, first)
        k = sum(len(stack) for stack in stacks)
        g = self._new_rows(1)
        if not self.stores(stacks):
            return self.at(stacks), *self._batch_alone(batch, g, first)
        # Alone, a batch takes the loop whatever was chosen since: a learner that is put back to its
        # start does what a new one does, to the last bit.
        alone = self._asked in ("auto", "gram") and not stacks
        mixed = mask is not None and mask.ndim > 1  # of several tasks: no example of one
        compute = loop_gradients if alone else self._ready(stacks if mixed else [*stacks, batch])
        whole = all(self._chunk(stack) == len(stack) for stack in stacks)
        # Others know no shares, and change all inputs or none.
        alike = first is None or self.objective.criterion.is_plain
        alike = alike and self.objective.changes_batches
        if isinstance(compute, ChainGradients) and whole and alike:
            G = self._rows(k)
            self._tried = k
            outs = torch.split(G, [len(stack) for stack in stacks])
            try:
                with computing_in(self.precision, g.device):
                    parts = [*zip(stacks, outs, strict=True), (batch, g)]
                    *_, outputs = compute.together(self.objective, parts)
                    with torch.no_grad():
                        loss = self._loss(outputs, y, mask, slice(first))
                return G, g[0], loss
            except torch.cuda.OutOfMemoryError:
                if is_recording():
                    raise
                self._shrink(k)
        # The batch goes first, as in a loop of one's own; where running statistics move, it goes
        # last, so that they end with the newest data.
        if self.moves_buffers:
            return self(stacks), *self._batch_alone(batch, g, first)
        g, loss = self._batch_alone(batch, g, first)
        return self(stacks), g, loss

    def _batch_alone(
        self, batch: Stack, g: Tensor, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        ((x, t, y, mask),) = batches_of(batch)
        new = size(x) if first is None else first
        spared = 0 if self.objective.changes_batches else new
        with torch.enable_grad(), computing_in("fp32", g.device):
            if first is None:
                return g[0], pass_of(self._of_batches, (x, t, y, mask), g[0], spared)
            outputs = self._of_batches.outputs(x, spared)
            parts = slice(first), slice(first, None)
            own, others = (self._loss(outputs, y, mask, part) for part in parts)
            loss_gradient((own + others) / 2, parameters(self.objective.network), out=g[0])
        return g[0], own.detach()

    def _loss(self, outputs: Any, y: Tree, mask: Tensor | None, part: slice) -> Tensor:
        """The mean loss of a part of a batch; `mask` is one for all examples, or one for each."""
        mask = mask if mask is None or mask.ndim == 1 else mask[part]
        return self.objective.criterion.mean(take(outputs, part), take(y, part), mask)

    def prepare(self, stacks: list[Stack]) -> None:
        """Choose the way by these tasks, for those who then compute the rows of some at a time."""
        self._follow()
        self._ready(stacks)

    def _ready(self, stacks: list[Stack]) -> Method:
        """The method; it is chosen once there are two tasks to try it on, the loop until then."""
        if self._compute is None:
            if self.method is None:
                few = few_examples(stacks)
                if few is None:
                    return loop_gradients
                work = max(operations(self.objective, stack) for stack in stacks)
                self.method = choose(self.objective, few, self.precision, work)
            self._compute = METHODS[self.method]()
            if self._compute is loop_gradients:
                self._compute = partial(loop_gradients, one_pass=self._passes)
        return self._compute

    def _fill(self, compute: Method, stack: Stack, out: Tensor) -> None:
        size = self._chunk(stack)
        start = 0
        while start < len(stack):
            part = stack[start : start + size]
            self._tried = size
            before = self._running_statistics()
            try:
                compute(self.objective, part, out[start : start + len(part)])
            except torch.cuda.OutOfMemoryError:
                if size == 1 or is_recording():
                    raise
                size = self._shrink(size)
                with torch.no_grad():  # what was done of the pass must not be done twice
                    for buffer, value in before:
                        buffer.copy_(value)
                continue
            start += len(part)

    def _running_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """The network's buffers and their values, if a pass changes them and may have to be undone.

        On a GPU only: elsewhere nothing is tried again.
        """
        network = self.objective.network
        if not self.moves_buffers or not parameters(network)[0].is_cuda or is_recording():
            return []
        return [(buffer, buffer.clone()) for buffer in network.buffers()]

    def _chunk(self, stack: Stack) -> int:
        """How many of the stack's tasks go into one pass."""
        if self._limit is None and self.memory_limit is not None:
            self._limit = max(1, self.memory_limit // bytes_per_task(self.objective, stack))
        limits = (self.tasks_per_chunk, self._limit)
        return min([len(stack), *(limit for limit in limits if limit is not None)])

    def use_less_memory(self) -> bool:
        """Take fewer tasks at once than in the last pass; False if there was only one."""
        if self._tried > 1:
            self._tried = self._shrink(self._tried)
            return True
        return False

    def _shrink(self, size: int) -> int:
        smaller = max(1, size // 2)
        if self._limit is None:
            warnings.warn(
                f"the gradients of {size} tasks at once do not fit the GPU's memory: computed in "
                "smaller chunks from here on (tasks_per_chunk sets their size)",
                RuntimeWarning,
                stacklevel=2,
            )
        self._limit = smaller
        torch.cuda.empty_cache()
        return smaller

    def _rows(self, k: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < k:
            self._buffer = self._new_rows(
                k if self._buffer is None else max(k, 2 * len(self._buffer))
            )
        return self._buffer[:k]

    def _new_rows(self, k: int) -> Tensor:
        """(k, p), in a dtype that holds the gradients of all parameters."""
        weights = parameters(self.objective.network)
        dtype = reduce(torch.promote_types, {w.dtype for w in weights})
        return weights[0].detach().new_empty((k, self.n_parameters), dtype=dtype)


def _check_method(method: str, objective: Objective) -> None:
    """Refuse a method that was asked for by name and does not fit."""
    network = objective.network
    if method == "chain" and not is_chain(network):
        raise ValueError(
            'gradients="chain" is for an nn.Sequential of Linear and ReLU whose parameters all '
            f'learn, got {type(network).__name__}; "auto" finds what fits'
        )
    if method == "batched" and (layer := layer_without_rule(network)) is not None:
        raise ValueError(
            f'gradients="batched" has no rule for {type(layer).__name__}; "auto" finds a way'
        )
    if objective.own_loss is not None and method not in ("auto", "loop", "gram"):
        raise ValueError(
            f'gradients="{method}" works on the loss of outputs, and this learner has a loss() of '
            'its own: "auto", "loop" or "gram"'
        )


def bytes_per_task(objective: Objective, stack: Stack) -> int:
    """What autograd keeps of one task's forward pass, and the same again for the backward pass."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive

    copied = objective.copied()
    x = take(stack.x, 0)
    owned = {w.untyped_storage().data_ptr() for w in copied.network.parameters()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        copied.outputs(x)  # the first pass is on a copy of x
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            copied.outputs(x)
    owned |= {leaf.untyped_storage().data_ptr() for leaf in leaves(x)}
    return max(1, 2 * sum(size for pointer, size in seen.items() if pointer not in owned))
