"""What tests let several real processes do together: every check is called in all of them."""

import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradmem as gm
from tests.networks import CLASSES, Transformer

#: Processes that are started; groups of fewer are the first ones of them.
MOST = 4
CHECKS = {}
GROUPS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def work(rank, folder):
    """One of `MOST` processes: all checks, one after the other, until one fails."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=MOST,
        timeout=timedelta(seconds=120),
    )
    for n in range(1, MOST + 1):
        GROUPS[n] = dist.new_group(range(n))
    for name, function in CHECKS.items():
        try:
            function(rank, Path(folder))
            dist.barrier()
        except BaseException:
            Path(folder, f"{name}-{rank}.failed").write_text(traceback.format_exc())
            return
        Path(folder, f"{name}-{rank}.passed").touch()
    dist.destroy_process_group()


def convnet():
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, CLASSES))


MODELS = {"mlp": lambda: gm.mlp([6, 9, 8, CLASSES]), "convnet": convnet, "transformer": Transformer}
SHAPES = {"mlp": (6,), "convnet": (3, 6, 6), "transformer": None}


def examples(kind, n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    if SHAPES[kind] is None:
        return torch.randint(1, 11, (n, 4), generator=generator), y
    return torch.randn((n, *SHAPES[kind]), generator=generator), y


def made(kind, double=False):
    torch.manual_seed(3)
    model = MODELS[kind]()
    return model.double() if double else model


def sharded(model, n):
    mesh = DeviceMesh.from_group(GROUPS[n], "cpu")
    for part in model.children():
        if any(True for _ in part.parameters(recurse=False)):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


#: Task → how many examples of it each process adds: unequal, and "only" in one process.
PARTS = {"a": (5, 2, 7, 1), "only": (0, 4, 0, 0), "b": (3, 3, 3, 3), "c": (1, 6, 2, 2)}


def fill(memory, kind, rank, n):
    """Add a process's part; with one process, "only" is its as well."""
    for i, (t, counts) in enumerate(PARTS.items()):
        count = 4 if t == "only" and n == 1 else counts[rank]
        if count:
            memory.add(*_placed(examples(kind, count, 100 * i + rank), t))


def _placed(both, t):
    x, y = both
    return x, t, y


def everything(memory, n):
    """All processes' memories as those of one."""
    found = [None] * n
    own = {t: memory.memory[t] for t in memory.memory}
    dist.all_gather_object(found, own, group=GROUPS[n])
    tasks = {t: None for one in found for t in one}
    joined = {
        t: tuple(torch.cat(parts) for parts in zip(*(one[t] for one in found if t in one)))
        for t in tasks
    }
    alone = gm.EpisodicMemory(memories=1000)
    for t, (x, y) in joined.items():
        alone.add(x, t, y)
    return alone


def whole(w, rank=0):
    """A parameter or gradient with all its shards."""
    return w.full_tensor() if hasattr(w, "full_tensor") else w.detach().clone()


def same_step(model, module, memory, kind, rank, n, constrain, tolerance=1e-6):
    """A step of n processes is that of one process with all their memories, to 1e-6."""
    alone_model = made(kind)
    alone = gm.GradientMemory(
        alone_model, memory=everything(memory, n), margin=0.3, constrain=constrain
    )
    x, y = examples(kind, 6, 999 + rank)
    (-F.cross_entropy(model(x), y)).backward()  # goes against what is remembered
    for w, other in zip(module.parameters(), alone_model.parameters(), strict=True):
        other.grad = whole(w.grad)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    one = torch.optim.SGD(alone_model.parameters(), lr=0.5, momentum=0.9)
    memory.step(optimizer, "new")
    alone.step(one, "new")
    for w, other in zip(module.parameters(), alone_model.parameters(), strict=True):
        torch.testing.assert_close(whole(w.grad), other.grad, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(whole(w), other.detach(), rtol=tolerance, atol=tolerance)
    assert set(memory.last.tasks) == set(PARTS)
    assert set(memory.last.violated) == set(alone.last.violated)
    assert memory.last.violated, "nothing was projected"
    return memory


def agreed(numbers, n):
    """Whether all processes have the same bits."""
    found = [None] * n
    dist.all_gather_object(found, numbers.tolist(), group=GROUPS[n])
    return all(one == found[0] for one in found)


@check
def ddp_gives_the_step_of_one_process(rank, folder):
    for n in range(1, MOST + 1):
        for kind in MODELS:
            for constrain in ("gradient", "update"):
                if rank >= n:
                    continue
                module = made(kind)
                model = DDP(module, process_group=GROUPS[n])
                memory = gm.GradientMemory(model, memories=100, margin=0.3, constrain=constrain)
                fill(memory, kind, rank, n)
                same_step(model, module, memory, kind, rank, n, constrain)
                assert agreed(memory.project.last.v, n)
                assert agreed(torch.cat([w.detach().flatten() for w in module.parameters()]), n)


@check
def fsdp_gives_the_step_of_one_process(rank, folder):
    for n in range(1, MOST + 1):
        for kind in MODELS:
            for constrain in ("gradient", "update"):
                if rank >= n:
                    continue
                model = sharded(made(kind), n)
                memory = gm.GradientMemory(model, memories=100, margin=0.3, constrain=constrain)
                fill(memory, kind, rank, n)
                same_step(model, model, memory, kind, rank, n, constrain)
                assert agreed(memory.project.last.v, n)
