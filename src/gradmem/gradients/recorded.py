"""A task's forward and backward pass as a CUDA graph, where the host is what takes the time.

In a loop of one's own, passes of a model in half precision end on a GPU before the host has started
the kernels of the next. Recorded once, a pass is started as a whole.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradmem.cuda.devices import is_recording
from gradmem.cuda.graphs import GraphedSteps
from gradmem.gradients.again import buffers_put_back
from gradmem.gradients.loop import Batch, pass_of
from gradmem.gradients.objective import Objective
from gradmem.trees import Tree, kind, size

__all__ = ["RecordedPasses", "has_hooks"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: A pass is recorded if the host needs more than this share of its time to start it: the GPU then
#: waits for the host now and then.
SHARE = 0.4
#: How far the gradient of a recorded pass may be from that of the pass itself, by its length: in
#: single precision, and in half precision, where other kernels may be chosen.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.02
#: Kinds of passes that are known. Beyond them it starts again: most are no longer in use, as those
#: of memories that have become smaller.
KINDS = 64


class RecordedPasses:
    """`pass_of`, on a GPU from a recording once it is known that this is faster.

    The first pass of a kind runs as it is, the second is timed. If the host takes much of that
    time, the third is recorded and compared with what it gives without; from then on the recording
    runs. Passes that draw random numbers on the CPU, or that call hooks, may do something else
    every time and are not recorded.

    Parameters
    ----------
    enabled
        Whether passes are recorded at all.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.forget()

    def forget(self) -> None:
        """Start again: what was recorded is no longer in use."""
        self._graphed = GraphedSteps(self.enabled)
        #: How the next pass of a kind is made. Functions, since bound methods would be a cycle.
        self._next: dict[Hashable, Callable[..., Tensor]] = {}
        self._row: Tensor | None = None

    def __call__(self, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        """Write the gradient of a batch's mean loss into out: (p,); that loss: ()."""
        records = self._graphed.enabled and out.is_cuda and not is_recording()
        if not records or objective.own_loss is not None or _has_hooks(objective.network):
            return pass_of(objective, batch, out)
        key = _kind(objective, batch)
        if key is None:
            return pass_of(objective, batch, out)
        return self._next.get(key, RecordedPasses._first)(self, key, objective, batch, out)

    def _first(self, key: Hashable, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        if len(self._next) >= KINDS:
            self.forget()
        self._next[key] = RecordedPasses._timed
        return pass_of(objective, batch, out)

    def _timed(self, key: Hashable, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        """A pass, and whether it is worth a recording."""
        torch.cuda.synchronize(out.device)
        start = time.perf_counter()
        loss = pass_of(objective, batch, out)
        started = time.perf_counter() - start
        torch.cuda.synchronize(out.device)
        worth = started > SHARE * (time.perf_counter() - start)
        self._next[key] = RecordedPasses._recorded if worth else RecordedPasses._never
        return loss

    def _never(self, key: Hashable, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        return pass_of(objective, batch, out)

    def _recorded(self, key: Hashable, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        """A pass as it is, then its recording, which must give the same and leaves no trace."""
        before = _random_states()
        loss = self._replayed(key, objective, batch, out)  # as it is: the first with this key
        if not out.isfinite().all():  # what can be said of it is said elsewhere
            return loss
        self._next[key] = RecordedPasses._never
        if not _are_same(before, _random_states()):
            return loss
        again = torch.empty_like(out)
        with torch.random.fork_rng([out.device]), buffers_put_back(objective.network):
            self._replayed(key, objective, batch, again)
        if not self._graphed.enabled:  # it could not be recorded, which was said
            return loss
        off = float((again - out).norm() / out.norm().clamp(min=torch.finfo(out.dtype).tiny))
        halved = torch.is_autocast_enabled("cuda") or out.itemsize < 4
        most = HALF_TOLERANCE if halved else TOLERANCE
        if off <= most or _drops_out(objective.network):
            self._next[key] = RecordedPasses._replayed
            torch.cuda.empty_cache()  # what passes took outside of the recording
        else:
            self.enabled = False
            self.forget()
            warnings.warn(
                "a pass of this network gives another gradient as a CUDA graph (by "
                f"{off:.1g} of its length): its passes are not recorded",
                RuntimeWarning,
                stacklevel=2,
            )
        return loss

    def _replayed(self, key: Hashable, objective: Objective, batch: Batch, out: Tensor) -> Tensor:
        if self._row is None:
            self._row = torch.empty_like(out)
        row, (x, t, y, mask) = self._row, batch

        def step(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            torch.clear_autocast_cache()  # weights are converted inside the recording
            loss = pass_of(objective, (x, t, y, mask), row)
            torch.clear_autocast_cache()
            return (loss,)

        loss = self._graphed(key, step, x, y, mask)
        assert loss is not None
        out.copy_(row)
        return loss


def _kind(objective: Objective, batch: Batch) -> Hashable | None:
    """What a recording depends on; None where that cannot be told."""
    network = objective.network
    modes = (*[part.training for part in network.modules()], *objective.criterion.key)
    places = tuple(w.data_ptr() for w in (*network.parameters(), *network.buffers()))
    if 0 in places:  # a tensor that hides where it is
        return None
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    x, _, y, mask = batch
    return modes, places, autocast, kind(x), kind(y), size(x), mask is None


def _has_hooks(network: nn.Module) -> bool:
    everywhere = (getattr(nn.modules.module, f"_global{name}") for name in HOOKS)
    return any(everywhere) or any(map(has_hooks, network.modules()))


def has_hooks(part: nn.Module) -> bool:
    """Whether a module calls anything beside its own `forward`."""
    return any(getattr(part, name) for name in HOOKS)


def _drops_out(network: nn.Module) -> bool:
    """Whether two passes over the same batch may differ, as far as one can see."""
    shares = [
        getattr(part, name, 0.0)
        for part in network.modules()
        if part.training
        for name in ("p", "dropout")
    ]
    return any(isinstance(share, float) and share > 0 for share in shares)


#: The states of the generators of random numbers on the CPU: torch's, Python's and NumPy's.
States = tuple[Tensor, Any, Any]


def _random_states() -> States:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _are_same(before: States, after: States) -> bool:
    drawn = [torch.equal(before[0], after[0]), before[1] == after[1]]
    pairs = zip(before[2], after[2], strict=True)
    return all(drawn) and all(np.array_equal(one, other) for one, other in pairs)
