"""G: (k, p), one row per past task, by the fastest way that is exact for the network."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import is_recording
from gradmem.gradients.batched import layer_without_rule, mixes_examples
from gradmem.gradients.chain import ChainGradients, is_chain
from gradmem.gradients.choice import METHODS, Method, as_it_was, choose, few_of
from gradmem.gradients.flat import parameters
from gradmem.gradients.loop import loop_gradients
from gradmem.gradients.precision import PRECISIONS, computing_in
from gradmem.memory.stack import Stack
from gradmem.validation import one_of, positive_int

__all__ = ["MemoryGradients"]


class MemoryGradients:
    """Computes the gradients at the tasks' memories into one buffer that is used again.

    Parameters
    ----------
    network
        Whose loss it is.
    method
        "chain" (one pass, written out for plain MLPs), "batched" (one pass with a rule per layer),
        "func" (torch.func), "loop" (a pass per task), or "auto": the first of them that can be
        used and that agrees with the loop on the first memories it is given.
    tasks_per_chunk
        Most tasks in one pass.
    memory_limit
        Most bytes that one pass may keep of its activations, roughly; splits it further.
    precision
        "fp32": the network's own. "tf32" and "bf16" are faster on GPUs and no longer exact. (With
        "tf32", a chain's gradient of the batch is computed along, and so in the same precision.)
    """

    def __init__(
        self,
        network: nn.Module,
        method: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self.network = network
        self.precision = one_of("precision", precision, PRECISIONS)
        one_of("gradients", method, ["auto", *METHODS])
        if method == "chain" and not is_chain(network):
            raise ValueError(
                'gradients="chain" is for an nn.Sequential of Linear and ReLU whose parameters all '
                f'learn, got {type(network).__name__}; "auto" finds what fits'
            )
        if method == "batched" and (layer := layer_without_rule(network)) is not None:
            raise ValueError(
                f'gradients="batched" has no rule for {type(layer).__name__}; "auto" finds a way'
            )
        self.method: str | None = None if method == "auto" else method
        self._automatic = method == "auto"
        self.tasks_per_chunk = (
            None if tasks_per_chunk is None else positive_int("tasks_per_chunk", tasks_per_chunk)
        )
        self.memory_limit = (
            None if memory_limit is None else positive_int("memory_limit", memory_limit)
        )
        self._compute: Method | None = None
        self._buffer: Tensor | None = None
        self._most: int | None = None  # tasks that fit one pass, once a limit was met
        self._tried = 1  # tasks in the last pass
        self._changes = mixes_examples(network)  # the network's buffers, in a pass

    def __call__(self, stacks: list[Stack]) -> Tensor:
        """G: (k, p) for the tasks in the stacks, in order; overwritten by the next call."""
        k = sum(len(stack) for stack in stacks)
        G = self._rows(k)
        compute = self._ready(stacks)
        with computing_in(self.precision, G.device):
            start = 0
            for stack in stacks:
                self._fill(compute, stack, G[start : start + len(stack)])
                start += len(stack)
        return G

    def with_batch(
        self, stacks: list[Stack], x: Tensor, y: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """G: (k, p) as above, then g: (p,), the gradient of the mean loss on x: (n, …), y: (n,).

        `mask`: (classes,) says which outputs count for x, if not all of them.
        """
        batch = Stack(x[None], y[None], (len(y),), None if mask is None else mask[None])
        k = sum(len(stack) for stack in stacks)
        g = self._rows(1).new_empty((1, self._rows(1).shape[1]))
        # Alone, a batch takes the loop whatever was chosen since: a learner that is put back to its
        # start does what a new one does, to the last bit.
        alone = self._automatic and not stacks
        compute = loop_gradients if alone else self._ready([*stacks, batch])
        whole = all(self._chunk(stack) == len(stack) for stack in stacks)
        if isinstance(compute, ChainGradients) and whole:
            G = self._rows(k)
            self._tried = k
            outs = torch.split(G, [len(stack) for stack in stacks])
            try:
                with computing_in(self.precision, g.device):
                    compute.together(self.network, [*zip(stacks, outs, strict=True), (batch, g)])
                return G, g[0]
            except torch.cuda.OutOfMemoryError:
                if is_recording():
                    raise
                self._shrink(k)
        G = self(stacks)
        with computing_in("fp32", g.device):
            loop_gradients(self.network, batch, g)  # one task: nothing is gained by another way
        return G, g[0]

    def _ready(self, stacks: list[Stack]) -> Method:
        """The method; it is chosen once there are two tasks to try it on, the loop until then."""
        if self._compute is None:
            if self.method is None:
                few = few_of(stacks)
                if few is None:
                    return loop_gradients
                self.method = choose(self.network, few, self.precision)
            self._compute = METHODS[self.method]()
        return self._compute

    def _fill(self, compute: Method, stack: Stack, out: Tensor) -> None:
        size = self._chunk(stack)
        start = 0
        while start < len(stack):
            part = stack[start : start + size]
            self._tried = size
            before = self._running_statistics()
            try:
                compute(self.network, part, out[start : start + len(part)])
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
        if not self._changes or not parameters(self.network)[0].is_cuda or is_recording():
            return []
        return [(buffer, buffer.clone()) for buffer in self.network.buffers()]

    def _chunk(self, stack: Stack) -> int:
        """How many of the stack's tasks go into one pass."""
        if self._most is None and self.memory_limit is not None:
            self._most = max(1, self.memory_limit // bytes_per_task(self.network, stack))
        limits = (self.tasks_per_chunk, self._most)
        return min([len(stack), *(limit for limit in limits if limit is not None)])

    def need_less(self) -> bool:
        """Take fewer tasks at once than in the last pass, if there were several."""
        if self._tried > 1:
            self._tried = self._shrink(self._tried)
            return True
        return False

    def _shrink(self, size: int) -> int:
        smaller = max(1, size // 2)
        if self._most is None:
            warnings.warn(
                f"the gradients of {size} tasks at once do not fit the GPU's memory: computed in "
                "smaller chunks from here on (tasks_per_chunk sets their size)",
                RuntimeWarning,
                stacklevel=2,
            )
        self._most = smaller
        torch.cuda.empty_cache()
        return smaller

    def _rows(self, k: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < k:
            weights = parameters(self.network)
            capacity = k if self._buffer is None else max(k, 2 * len(self._buffer))
            self._buffer = weights[0].new_empty((capacity, sum(w.numel() for w in weights)))
        return self._buffer[:k]


def bytes_per_task(network: nn.Module, stack: Stack) -> int:
    """What autograd keeps of one task's forward pass, and the same again for the way back."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    owned = {w.untyped_storage().data_ptr() for w in network.parameters()}
    with (
        as_it_was(network),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        network(stack.x[0])
    owned.add(stack.x.untyped_storage().data_ptr())
    return max(1, 2 * sum(size for pointer, size in seen.items() if pointer not in owned))
