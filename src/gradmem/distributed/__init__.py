"""Several processes, started by torchrun: exact GEM under DDP and FSDP2."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradmem.distributed.agreement import Past
from gradmem.distributed.collectives import LostProcessError, Traffic
from gradmem.distributed.processes import Processes
from gradmem.distributed.rows import Columns

__all__ = ["Columns", "LostProcessError", "Past", "Processes", "Traffic", "processes_of"]


def processes_of(model: nn.Module) -> tuple[nn.Module, Processes | None]:
    """The model itself, out of a wrapper, and the processes that train it; None for this one."""
    if isinstance(model, DistributedDataParallel):
        from gradmem.distributed.replicated import Replicated

        return model.module, Replicated(model)
    if "torch.distributed.tensor" in sys.modules:  # there are no shards without it
        from torch.distributed.tensor import DTensor

        if any(isinstance(w, DTensor) for w in model.parameters()):
            from gradmem.distributed.sharded import Sharded

            return model, Sharded(model)
    return model, None
