"""Several processes that train one model: how their steps become one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradmem.distributed.agreement import Agreement, Past
from gradmem.distributed.collectives import Collectives, Traffic
from gradmem.distributed.rows import Columns
from gradmem.gradients import MemoryGradients
from gradmem.memory import EpisodicMemory, Masks
from gradmem.memory.stack import Stack

__all__ = ["Processes"]


class Processes(ABC):
    """The processes of one model, each with a part of the stream and of the memories.

    Attributes
    ----------
    rank, size
        Which process this is, and how many there are.
    traffic
        The bytes that this process has sent, by what was sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.collectives = Collectives(group)
        self.agreement = Agreement(self.collectives)

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def size(self) -> int:
        return self.collectives.size

    @property
    def traffic(self) -> Traffic:
        return self.collectives.traffic

    #: Whether a process may pass examples through the model while the others do something else.
    passes_alone = True

    def check(self, gradients: str, constraints: int | None) -> None:
        """Refuse ways to compute that are of one process."""
        if gradients == "gram":
            raise ValueError(
                'gradients="gram" is for one process: of several, each stores its part of G alone, '
                "under FSDP or with more processes a smaller one"
            )
        if constraints is not None:
            raise ValueError(f"constraints must be None for several processes, got {constraints}")

    def state(self) -> dict[str, Any]:
        """What says whose part a state is: a process, the number of them, and their tasks."""
        return {
            "rank": self.rank,
            "size": self.size,
            "tasks": list(self.agreement.order),
            "marks": {},
        }

    def restore(self, tasks: Sequence[Hashable], marks: Mapping[Hashable, Sequence[int]]) -> None:
        """Go on with the tasks, and what was noted about them, of a state."""
        del marks
        self.agreement.order = tuple(tasks)

    def past(
        self, t: Hashable | None, memory: EpisodicMemory, masks: Masks | None = None, batch: int = 0
    ) -> Past:
        """The constraints of a step on task t; see `Agreement.past`."""
        return self.agreement.past(t, memory, masks, batch)

    @abstractmethod
    def gradients(self, engine: MemoryGradients, past: Past) -> Columns:
        """G: (k, p), the mean gradients over all examples that all processes remember."""

    @abstractmethod
    def with_batch(
        self, engine: MemoryGradients, past: Past, batch: Stack
    ) -> tuple[Columns, Tensor, Tensor]:
        """G as above, and the gradient and the loss of a batch of which each process has a part.

        Both are means over all examples of all parts.
        """

    @abstractmethod
    def backward(self, loss: Tensor, n: int, weights: Sequence[nn.Parameter]) -> Tensor:
        """Make `.grad` the gradient of the mean loss over all processes' examples; that mean: ().

        `loss` is this process's, over its n examples.
        """

    def share(self, n: int) -> float:
        """What n examples of this process are of all processes' examples."""
        own = torch.tensor([n], device=self.collectives.device)
        return n / int(self.collectives.sum(own, "counts"))

    @abstractmethod
    def local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters or gradients as tensors of what this process has of them."""

    @abstractmethod
    def set_gradient(self, weights: Sequence[nn.Parameter], g: Tensor) -> None:
        """Make g what the optimizer will step along: (p,), or this process's part of it."""

    @abstractmethod
    def gradient(self, weights: Sequence[nn.Parameter]) -> Tensor:
        """The `.grad`s as one vector: (p,), or this process's part of it."""

    @abstractmethod
    def length(self, z: Tensor) -> Tensor:
        """|z|: () of a vector over all parameters, in z's precision."""

    @abstractmethod
    def settle(self) -> None:
        """Bring the parameters into the form in which they are stored."""

    @abstractmethod
    def agree(self, number: Tensor) -> Tensor:
        """A number that is finite if it is finite in all processes: the same in all of them."""

    def share_buffers(self, network: nn.Module) -> None:
        """Take over the first process's buffers, so that all predict alike."""
        for kind in dict.fromkeys(buffer.dtype for buffer in network.buffers()):
            own = [buffer for buffer in network.buffers() if buffer.dtype == kind]
            together = torch.cat([buffer.detach().reshape(-1) for buffer in own])
            self.collectives.first(together, "buffers")
            parts = together.split([buffer.numel() for buffer in own])
            with torch.no_grad():
                for buffer, part in zip(own, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    def full(self, state: Any) -> Any:
        """A state with whole tensors in place of shards; called by all processes."""
        return state

    def sharded(self, state: Any, owner: Any) -> Any:
        """A state with shards where `owner`, which will take it over, has shards."""
        del owner
        return state
