"""Steps as CUDA graphs: recorded the second time they are taken, replayed from then on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradmem.cuda.copies import copy_in_turn, copy_together
from gradmem.trees import Tree, kind, leaves, tree_map

__all__ = ["GraphedSteps", "Step"]

#: Takes its inputs, and gives the loss followed by whatever a recording must keep alive.
Step = Callable[..., tuple[Any, ...]]

#: The share of a GPU's memory that may lie idle, in graphs and outside of them, at a recording.
IDLE = 1 / 8

#: Steps that are recorded in a row without one being taken again, before that is said.
NEVER_REPLAYED = 8


class GraphedSteps:
    """Runs steps on a GPU without the host's part in them, once they are known.

    The first step with a key runs as it is, which also warms up what it calls; the second is
    recorded. A step must do the same for the same key and find its other inputs where they were.
    A step that cannot be recorded (it waits for the device, say) ends the recording for good.

    Parameters
    ----------
    enabled
        Whether steps are recorded at all.

    Attributes
    ----------
    use_less_memory
        Called when the memory does not suffice for a recording. Makes the step need less, or
        returns False if it cannot.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.use_less_memory: Callable[[], bool] = lambda: False
        self._known: set[Hashable] = set()
        self._recorded: set[Hashable] = set()  # also of graphs that were let go of
        self._graphs: dict[
            Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, ...]]
        ] = {}
        self._pool: Any = None
        self._unused = 0  # graphs recorded since one was replayed again
        self._last: tuple[torch.cuda.CUDAGraph, list[Tensor]] | None = None

    def records(self, x: Tree) -> bool:
        """Whether steps with such an input become graphs."""
        return self.enabled and leaves(x)[0].is_cuda

    def __call__(self, key: Hashable, step: Step, *inputs: Tree | None) -> Tensor | None:
        """Take a step and return its loss. Inputs are trees of tensors, or None."""
        self._last = None
        if not self.records(inputs[0]):
            return _loss(step(*inputs))
        key = (key, *(None if tree is None else _shapes(tree) for tree in inputs))
        if key not in self._graphs:
            if key not in self._known:
                self._known.add(key)
                return _loss(step(*inputs))
            if not self._record(key, step, inputs):
                return _loss(step(*inputs))
        else:
            self._unused = 0
        graph, own, (loss, *_) = self._graphs[key]
        given = [leaf for tree in inputs if tree is not None for leaf in leaves(tree)]
        copy_together(own, given)
        graph.replay()
        self._last = graph, own
        return None if loss is None else loss.clone()

    @property
    def can_repeat(self) -> bool:
        """Whether the last step was a graph."""
        return self._last is not None

    def repeat(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Take the last step again and again, with the next parts of its first inputs each time.

        What else it depends on is as it was.
        """
        assert self._last is not None
        graph, own = self._last
        for _ in copy_in_turn(own[: len(inputs)], inputs):
            graph.replay()
            yield

    def forget(self) -> None:
        """Record anew from here on: what the graphs refer to is no longer in use."""
        self._last = None
        self._known, self._recorded, self._graphs, self._pool = set(), set(), {}, None

    def _record(self, key: Hashable, step: Step, inputs: tuple[Tree | None, ...]) -> bool:
        own = [None if tree is None else tree_map(Tensor.clone, tree) for tree in inputs]
        # Once for each step: where one graph holds so much by itself, they would go each time.
        if key not in self._recorded and _much_lies_idle():
            self._let_go()
        self._recorded.add(key)
        try:
            try:
                graph, kept = self._captured(step, own)
            except torch.cuda.OutOfMemoryError:  # what lies idle may suffice
                self._let_go()
                graph, kept = self._captured(step, own)
        except Exception as error:
            torch.cuda.synchronize()
            if isinstance(error, torch.cuda.OutOfMemoryError) and self.use_less_memory():
                return False  # this step runs as it is, and the next one is recorded
            self._give_up(error)
            return False
        static = [leaf for tree in own if tree is not None for leaf in leaves(tree)]
        self._graphs[key] = graph, static, kept
        self._unused += 1
        if self._unused == NEVER_REPLAYED:
            warnings.warn(
                f"{self._unused} steps were recorded as CUDA graphs and none was taken again: "
                "something that a step depends on changes all the time (shapes, modes, or a rate "
                "that this optimizer cannot take as a tensor); graphs=False avoids the recording",
                RuntimeWarning,
                stacklevel=4,
            )
        return True

    def _let_go(self) -> None:
        """Give back what graphs hold and what lies idle; a step that comes again is recorded anew.

        Each new task needs a little more than the last, in larger pieces than those that lie idle,
        so that what is held is many times what is in use.
        """
        self._graphs.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _captured(
        self, step: Step, own: Sequence[Tree | None]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Any, ...]]:
        """A graph of the step, and what the step gave meanwhile: what the graph refers to.

        As `torch.cuda.graph` does it, but for two things before: emptying the allocator's cache,
        after which the next step that is not recorded would have to ask the driver for all of its
        memory again, and making the host wait for the GPU. Recording runs no step; what torch does
        for it on the recording's stream, such as setting the seed that all graphs draw with, comes
        after the steps that are under way, and before those that follow.
        """
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # a pool ends with the last graph that used it
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        stream = _recorded_stream(torch.cuda.current_device())
        stream.wait_stream(current)
        with _no_collection(), torch.cuda.stream(stream):
            # Other threads, such as one that pins a loader's batches, may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                kept = step(*own)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph, kept

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        self.forget()
        torch.cuda.empty_cache()
        warnings.warn(
            f"steps of this network cannot be recorded as CUDA graphs and run without: {error}",
            RuntimeWarning,
            stacklevel=5,
        )


def _loss(kept: tuple[Any, ...]) -> Tensor | None:
    """A step's loss without its autograd graph.

    A graph that stays alive keeps autograd's nodes of the parameters on the stream where they were
    made, and no later step can be recorded on another one.
    """
    loss: Tensor | None = kept[0]
    return None if loss is None else loss.detach()


def _shapes(tree: Tree) -> tuple[Any, ...]:
    """Equal for trees that can be copied to each other, leaf by leaf."""
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves(tree))
    return shapes if isinstance(tree, Tensor) else (kind(tree), *shapes)


def _much_lies_idle() -> bool:
    """Whether this process holds much of the current GPU's memory, and does not use it.

    Much is an eighth of it, or more than is free, for this process and others.
    """
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    return idle > min(free, IDLE * total)


@cache
def _recorded_stream(device: int) -> torch.cuda.Stream:
    """A stream of a GPU's that nothing but recordings is on."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: destroying another learner's graphs would end the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
