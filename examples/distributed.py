"""Processes learn together: torchrun --nproc-per-node 2 --max-restarts 3 distributed.py

With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; if one is lost, all go on from the last checkpoint.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradmem as gm

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
learner = gm.GEM(DistributedDataParallel(gm.mlp()), lr=0.1, memories=100)
if Path("checkpoint").exists():
    learner.load("checkpoint")
continuum = gm.mnist_rotations(5, data="sample")
for step, (x, t, y) in enumerate(continuum, start=1):
    if step > learner.steps:  # it was not learned before
        learner.observe(x[rank::size], t, y[rank::size])
        if step % 100 == 0:
            learner.save("checkpoint")
tests = [test[:] for test in continuum.tests.values()]
right = [(learner.predict(x) == y).float().mean() for x, y in tests]
print(f"process {rank}: mean accuracy {sum(right) / len(right):.3f}")
dist.destroy_process_group()
