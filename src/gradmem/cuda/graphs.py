"""Steps as CUDA graphs: recorded the second time they are taken, replayed from then on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["GraphedSteps", "Step"]

Step = Callable[..., Any]


class GraphedSteps:
    """Runs steps on tensors on a GPU without the host's part in them, once they are known.

    The first step with a key runs as it is, which also warms up what it calls; the second is
    recorded. A step must do the same for the same key and find its other inputs where they were.
    A step that cannot be recorded (it waits for the device, say) ends the recording for good.

    Parameters
    ----------
    enabled
        Whether steps are recorded at all.

    Attributes
    ----------
    need_less
        Called when memory does not suffice for a recording, which lies beside what other steps
        hold. Makes the step need less, or says that it cannot: False.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.need_less: Callable[[], bool] = lambda: False
        self._known: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor | None], Any]] = {}
        self._pool: Any = None

    def records(self, x: Tensor) -> bool:
        """Whether steps with such an input become graphs."""
        return self.enabled and x.is_cuda

    def __call__(self, key: Hashable, step: Step, x: Tensor, *others: Tensor | None) -> None:
        inputs = (x, *others)
        if not self.records(x):
            step(*inputs)
            return
        shapes = (None if tensor is None else tensor.shape for tensor in inputs)
        key = (key, *shapes)
        if key not in self._graphs:
            if key not in self._known:
                self._known.add(key)
                step(*inputs)
                return
            if not self._record(key, step, inputs):
                step(*inputs)
                return
        graph, own, _ = self._graphs[key]
        for mine, given in zip(own, inputs, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        graph.replay()

    def forget(self) -> None:
        """Record anew from here on: what the graphs refer to is no longer in use."""
        self._known, self._graphs, self._pool = set(), {}, None

    def _record(self, key: Hashable, step: Step, inputs: tuple[Tensor | None, ...]) -> bool:
        own = [None if tensor is None else tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # a pool ends with the last graph that used it
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
                kept = step(*own)  # what the graph refers to must not be freed
        except Exception as error:
            torch.cuda.synchronize()
            if isinstance(error, torch.cuda.OutOfMemoryError) and self.need_less():
                return False  # this step runs as it is, and the next one is recorded
            self._give_up(error)
            return False
        self._graphs[key] = graph, own, kept
        return True

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        self.forget()
        torch.cuda.empty_cache()
        warnings.warn(
            f"steps of this network cannot be recorded as CUDA graphs and run without: {error}",
            RuntimeWarning,
            stacklevel=5,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: graphs of a learner long gone, if among it, end a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
