"""Examples of a PyTorch dataset, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data import default_collate as stack

from gradmem.streams.examples import Pair, Seed, permutation, served
from gradmem.trees import check, take, tree_map

__all__ = ["DatasetExamples"]

# Arguments of a DataLoader that the continuum sets.
_SET_BY_CONTINUUM = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}


class DatasetExamples:
    """Examples of a PyTorch dataset: each batch is read when it is asked for.

    It has the methods of `Examples` and holds only the batches that are being read.

    Parameters
    ----------
    dataset
        A map-style dataset, that is, one with a length. Its items are pairs (x, y), each a tensor,
        array or number, or a dict, tuple or list of these.
    loader
        Further arguments of `torch.utils.data.DataLoader`, such as `num_workers` (processes that
        read; 0 for this one), `collate_fn` (which makes a batch (x, y) from a list of items) or
        `multiprocessing_context`. The order of examples does not depend on them. What a dataset
        itself draws at random (augmentation) does depend on the number of workers.

    Examples
    --------
    >>> class Squares(Dataset):
    ...     def __len__(self):
    ...         return 5
    ...     def __getitem__(self, i):
    ...         return torch.tensor([float(i)]), i**2
    >>> squares = DatasetExamples(Squares())
    >>> squares[3:]
    (tensor([[3.],
            [4.]]), tensor([ 9, 16]))
    >>> [y.tolist() for x, y in squares.batches(2)]
    [[0, 1], [4, 9], [16]]
    """

    def __init__(self, dataset: Any, **loader: Any) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                "a dataset must be map-style, with len(dataset) and dataset[i], got "
                f"{type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise ValueError(f"a dataset must have at least one example, got {dataset!r}")
        if refused := sorted(_SET_BY_CONTINUUM & {*loader}):
            raise TypeError(f"{', '.join(refused)}: decided by the continuum, not by the loader")
        self.dataset = dataset
        self.loader = {"collate_fn": collate, **loader}
        self.device = torch.device("cpu")
        DataLoader(self.dataset, **self.loader)  # refuses wrong arguments

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"DatasetExamples({self.dataset!r})"

    def __getitem__(self, which: Any) -> Pair:
        """Inputs and targets of a slice, a mask or positions, read by this process."""
        which = which.cpu() if isinstance(which, Tensor) else which
        positions = torch.arange(len(self))[which]
        together = getattr(self.dataset, "__getitems__", None)
        ids = positions.reshape(-1).tolist()
        items = together(ids) if together else [self.dataset[i] for i in ids]
        x, y = self._served(self.loader["collate_fn"](items))
        return (x, y) if positions.ndim else (take(x, 0), take(y, 0))

    def to(self, device: torch.device | str) -> DatasetExamples:
        """The same examples, whose batches arrive on a device; itself if they do already."""
        moved = self._of(self.dataset)
        moved.device = torch.device(device)
        return self if moved.device == self.device else moved

    def part(self, which: Tensor) -> DatasetExamples:
        """The examples at these positions."""
        return self._of(Subset(self.dataset, which.tolist()))

    def joined(self, *others: Any) -> DatasetExamples:
        """These examples and then those of the others, read with this one's loader."""
        for other in others:
            if not isinstance(other, DatasetExamples):
                raise TypeError(f"a dataset cannot be joined with {type(other).__name__} in memory")
        return self._of(ConcatDataset([self.dataset, *(other.dataset for other in others)]))

    def is_same(self, other: Any) -> bool:
        """Whether the other reads the very same dataset."""
        return isinstance(other, DatasetExamples) and self.dataset is other.dataset

    def fetches(self, size: int, shuffle: bool = False, seed: Seed = 0) -> Iterator[Pair]:
        """`batches` of `size`, by `shuffle` and `seed`: no more than one is read at a time."""
        return self.batches(size, shuffle, seed)

    def batches(self, size: int, shuffle: bool = False, seed: Seed = 0) -> Iterator[Pair]:
        """All examples, `size` at a time, in their order; if `shuffle`, in one drawn by `seed`.

        The order is that of `Examples.batches` for the same seed. The seed also governs what worker
        processes draw at random; PyTorch's own generator is not touched. If all examples are one
        batch, this process reads it.
        """
        order = permutation(len(self), seed) if shuffle else torch.arange(len(self))
        if len(order) <= size:  # nothing that workers could do at the same time
            yield self[order]
            return
        workers = int(np.random.SeedSequence(seed).generate_state(1)[0])
        options = {"pin_memory": self.device.type == "cuda", **self.loader}
        batches = DataLoader(
            self.dataset,
            batch_sampler=[some.tolist() for some in torch.split(order, size)],
            generator=torch.Generator().manual_seed(workers),
            **options,
        )
        yield from map(self._served, batches)

    def _of(self, dataset: Dataset[Any]) -> DatasetExamples:
        made = DatasetExamples(dataset, **self.loader)
        made.device = self.device
        return made

    def _served(self, batch: Any) -> Pair:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"items of {type(self.dataset).__name__} must be pairs (x, y), got a batch of type "
                f"{type(batch).__name__}"
            )
        for name, tree in zip("xy", batch, strict=True):
            check(name, tree)
        # The host does not wait for copies to a GPU: the GPU does its work in order.
        on_gpu = self.device.type == "cuda"
        x, y = tree_map(lambda leaf: leaf.to(self.device, non_blocking=on_gpu), tuple(batch))
        return x, served(y)


def collate(items: Sequence[Any]) -> Any:
    """A batch of items: `torch.utils.data.default_collate`, but tuples stay tuples.

    Examples
    --------
    >>> collate([((1, 2.0), "a"), ((3, 4.0), "b")])
    ((tensor([1, 3]), tensor([2., 4.], dtype=torch.float64)), ['a', 'b'])
    """
    return tree_map(lambda *parts: stack([*parts]), *items)
