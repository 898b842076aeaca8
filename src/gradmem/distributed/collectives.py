"""What processes that train one model send each other, counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collectives", "LostProcessError", "Pending", "Traffic"]


class LostProcessError(RuntimeError):
    """Another process of the job ended or does not answer, so that this one cannot go on."""


class Traffic:
    """Bytes that this process has sent to others, by what was sent.

    They are those of the usual algorithms, which send no more than they must: an all-reduce of n
    bytes among W processes sends 2n(W − 1)/W from each, a broadcast n from the first.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def add(self, what: str, n: float) -> None:
        self.bytes[what] = self.bytes.get(what, 0) + round(n)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def clear(self) -> None:
        """Count from zero again."""
        self.bytes.clear()


class Pending:
    """A collective that is under way, and the tensor that it fills."""

    def __init__(self, owner: Collectives, work: Any, filled: Tensor, sent: Tensor) -> None:
        self._owner, self._work, self._filled, self._sent = owner, work, filled, sent

    def wait(self) -> Tensor:
        """The tensor, filled; on a GPU what follows on the current stream waits for it."""
        with self._owner.guarded():
            if self._work is not None:
                self._work.wait()
        return self._filled


class Collectives:
    """Collectives of one group of processes; each is called by all of them, in the same order.

    Attributes
    ----------
    rank, size
        Which process of the group this is, and how many there are.
    traffic
        What this process has sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Say what it means if a collective fails."""
        try:
            yield
        except RuntimeError as error:
            raise LostProcessError(
                f"process {self.rank} of {self.size} cannot reach the others: one of them ended, "
                "or does not take part in this step. Every process must take the same steps. Start "
                "the job again from its last checkpoint; torchrun --max-restarts N does so by "
                f"itself ({error})"
            ) from error

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """The sum over all processes, in place; the same bits in each."""
        return self.start_sum(tensor, what).wait()

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """Begin `sum`."""
        self.traffic.add(what, 2 * tensor.nbytes * (self.size - 1) / self.size)
        with self.guarded():
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Pending(self, work, tensor, tensor)

    def gather(self, tensor: Tensor, what: str) -> Tensor:
        """All processes' tensors (n, …), equally long, one after the other: (W·n, …)."""
        self.traffic.add(what, tensor.nbytes * (self.size - 1))
        found = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        with self.guarded():
            parts = list(found.chunk(self.size))
            dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return found

    def start_exchange(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending:
        """Begin to give process r its `sent[r]` numbers of the tensor, and get `received[r]`.

        The tensor is left alone until it is waited for.
        """
        self.traffic.add(what, (sum(sent) - sent[self.rank]) * tensor.itemsize)
        found = tensor.new_empty(sum(received))
        with self.guarded():
            work = dist.all_to_all_single(
                found, tensor, list(received), list(sent), group=self.group, async_op=True
            )
        return Pending(self, work, found, tensor)

    def first(self, tensor: Tensor, what: str) -> Tensor:
        """The first process's tensor, in place."""
        self.traffic.add(what, tensor.nbytes if self.rank == 0 else 0)
        with self.guarded():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather_objects(self, one: Any) -> list[Any]:
        """All processes' objects, in every process; for what is small and rare."""
        found: list[Any] = [None] * self.size
        with self.guarded():
            dist.all_gather_object(found, one, group=self.group)
        return found

    def collect(self, one: Any, where: int = 0) -> list[Any] | None:
        """All processes' objects, in one process; None elsewhere. Tensors arrive on the CPU."""
        found: list[Any] | None = [None] * self.size if self.rank == where else None
        with self.guarded():
            dist.gather_object(_on_host(one), found, group=self.group, group_dst=where)
        return found

    def wait_for_all(self) -> None:
        """Return when all processes have come here."""
        with self.guarded():
            dist.barrier(group=self.group)

    @property
    def device(self) -> torch.device:
        """Where small numbers are exchanged: the GPU if the group is one of GPUs."""
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _on_host(one: Any) -> Any:
    """The same with tensors on the CPU: a GPU of one process is no place in another."""
    if isinstance(one, Tensor):
        return one.detach().cpu()
    if isinstance(one, dict):
        return {key: _on_host(value) for key, value in one.items()}
    if isinstance(one, tuple | list):
        return type(one)(_on_host(value) for value in one)
    return one
