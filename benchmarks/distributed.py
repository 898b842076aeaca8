"""Several processes: what they send, what they gain on two cores, and what 64 GPUs would.

    python -m benchmarks.distributed bytes     # bytes per step and process, k = 20, p = 1.1 million
    python -m benchmarks.distributed times     # two processes of one thread, one of two threads
    python -m benchmarks.distributed simulate  # up to 64 GPUs and 10,000 tasks, from measured parts

`simulate` measures here what does not depend on a GPU: solving the dual on the host, and the
bookkeeping of a step. What it takes from an H200 is in `RESULTS.md`; rates of networks are assumed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradmem as gm
from benchmarks.measure import Times, machine
from gradmem.distributed.agreement import Agreement
from gradmem.distributed.collectives import Traffic
from gradmem.distributed.copies import Copies
from gradmem.projection.inner import weights_on_host

#: An MLP of 1.09 million parameters, and what is remembered.
SIZES, TASKS, MEMORIES = [784, 720, 720, 10], 20, 64

#: From `RESULTS.md`, one H200: milliseconds of a task of 256 images through the thin ResNet-18 in
#: bf16 (128 to 141 s in 5,000 steps with 9.5 past tasks on average), of GGᵀ of 100 rows of 89,610
#: numbers in double precision, and of a constraint that enters the dual.
TASK, GRAM, ENTERS = 2.8, 0.120 / (100 * 100 * 89_610), 0.006
#: Assumed: bytes per millisecond from one GPU to others (400 Gbit/s), milliseconds per collective,
#: and bytes per millisecond that a constraint that enters the dual reads and writes in a GPU.
RATE, LATENCY, MEMORY = 50e6, 0.02, 4.8e9
#: Parameters of the thin ResNet-18.
PARAMETERS = 1_100_000


def join(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    init = f"file://{store}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)


def start(work: Callable[..., None], size: int, *args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (size, f"{folder}/store", *args), size)


def count_bytes(rank: int, size: int, store: str) -> None:
    """Print the bytes of a step by what is sent: the most that any process sends."""
    join(rank, size, store)
    torch.manual_seed(0)
    model = DistributedDataParallel(gm.mlp(SIZES))
    memory = gm.GradientMemory(model, memories=MEMORIES)
    generator = torch.Generator().manual_seed(rank)
    for t in range(TASKS):
        x = torch.rand(MEMORIES, 784, generator=generator)
        memory.add(x, t, torch.randint(10, (MEMORIES,), generator=generator))
    assert memory.processes is not None
    names = ("rows of G", "inner products", "g̃", "counts", "copies of examples")
    p = sum(w.numel() for w in model.parameters())
    if rank == 0:
        bound = 8 * (TASKS**2 + TASKS) + 4 * p
        print(f"\n{size} processes, k = {TASKS}, p = {p:,}; k² + k + p: {bound:,} bytes")
        print("| step | " + " | ".join(names) + " | in all |\n" + "|---" * (len(names) + 2) + "|")
    x, y = torch.rand(10, 784, generator=generator), torch.arange(10)
    for step in range(3):
        model.zero_grad()
        (-F.cross_entropy(model(x), y)).backward()
        memory.processes.traffic.clear()
        memory.project_("new")
        sent = torch.tensor([memory.processes.traffic.bytes.get(name, 0) for name in names])
        most = torch.cat([sent, sent.sum()[None]])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"| {step + 1} | " + " | ".join(f"{n:,}" for n in most.tolist()) + " |")
    dist.destroy_process_group()


def time_steps(rank: int, size: int, store: str, pasts: list[int], repeats: int) -> None:
    """Print milliseconds of a step on MNIST, by turns: of one process, and of two.

    The best on the wall, the median with the 10th and 90th percentile, and the first process's mean
    on the processor: where other work is on the machine, the best and the last say more.
    """
    join(rank, size, store)
    if rank == 0:
        print(machine("cpu"))
        print(
            "| past tasks | one process, 1 thread | one process, 2 threads | two processes of 1 |"
        )
        print("|---|---|---|---|")
    for k in pasts:
        continuum = gm.mnist_rotations(k + 1, 256, data="sample")
        torch.manual_seed(0)
        network = gm.mlp()
        both = gm.GEM(DistributedDataParallel(network), memories=256)
        alone = gm.GEM(gm.mlp(), memories=256)
        for task in continuum.tasks[:k]:
            x, y = task.train[:]
            both.memory.add(x[rank::size], task.t, y[rank::size])
            alone.memory.add(x, task.t, y)
        batches = list(continuum[k])
        times: dict[str, list[float]] = {"1 thread": [], "2 threads": [], "2 processes": []}
        used = dict.fromkeys(times, 0.0)
        for i, (x, t, y) in enumerate(itertools.islice(itertools.cycle(batches), repeats + 5)):
            for name, found in times.items():
                dist.barrier()
                torch.set_num_threads(2 if name == "2 threads" else 1)
                begin, busy = time.perf_counter(), time.process_time()
                if name == "2 processes":
                    both.observe(x[rank::size], t, y[rank::size])
                elif rank == 0:  # the other one waits
                    alone.observe(x, t, y)
                took, busy = time.perf_counter() - begin, time.process_time() - busy
                if i >= 5:
                    found.append(took * 1e3)
                    used[name] += busy / repeats * 1e3
        torch.set_num_threads(1)
        if rank == 0:
            cells = [
                f"{min(found):.3g}, {spread(found)}, {used[name]:.3g}"
                for name, found in times.items()
            ]
            print(f"| {k} | " + " | ".join(cells) + " |")
            assert both.processes is not None
            sent = both.processes.traffic.total / (repeats + 5)
            print(f"  {sent / 1e6:.3g} MB sent by the first process in a step", flush=True)
    dist.destroy_process_group()


def spread(times: list[float]) -> Times:
    low, median, high = np.percentile(times, [10, 50, 90])
    return Times(float(median), float(low), float(high))


def dual(k: int) -> tuple[float, int]:
    """Milliseconds to solve a dual of k constraints on the host, and how many of them bind."""
    generator = torch.Generator().manual_seed(k)
    # Tasks in families, of which the gradient goes against some.
    families = torch.randn(max(2, k // 10), 2048, generator=generator)
    which = torch.randint(len(families), (k,), generator=generator)
    G = (families[which] + torch.randn(k, 2048, generator=generator)).double()
    g = torch.randn(2048, generator=generator).double()
    GGt, Gg, gg = (G @ G.T).numpy(), (G @ g).numpy(), float(g @ g)
    times = []
    for _ in range(3 if k < 2000 else 1):
        begin = time.perf_counter()
        _, (_, _, binding, _), _ = weights_on_host(GGt, Gg, gg, 0.5, "shift")
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times), binding


class OtherProcesses:
    """Stands for the collectives of so many processes that are all like this one."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size, self.traffic = size, Traffic()

    def gather(self, tensor: Tensor, what: str) -> Tensor:
        return tensor.repeat(self.size)

    def gather_objects(self, one: Any) -> list[Any]:
        return [one] * self.size

    def collect(self, one: Any, where: int = 0) -> list[Any] | None:
        return [one] * self.size if where == self.rank else None


def bookkeeping(k: int, size: int) -> float:
    """Milliseconds to agree on k tasks and on who computes them, without the network."""
    memory = gm.EpisodicMemory(memories=1)
    for t in range(k):
        memory.add(torch.zeros(1, 1), t, torch.zeros(1))
    others: Any = OtherProcesses(size)
    agreement, copies = Agreement(others), Copies(others)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        copies.work(agreement.past("new", memory))
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times[3:])


def simulate() -> None:
    """Print a step's parts in milliseconds, for numbers of GPUs and of past tasks."""
    torch.set_num_threads(1)
    p, ks, sizes = PARAMETERS, [20, 100, 1000, 10_000], [1, 8, 64]
    print(machine("cpu"))
    solved = {k: dual(k) for k in [20, 100, 300, 1000, 3000]}
    print("\n| constraints | binding | dual on the host, ms |\n|---|---|---|")
    for k, (ms, binding) in solved.items():
        print(f"| {k} | {binding} | {ms:.3g} |")
    a, b = solved[1000], solved[3000]
    power = np.log(b[0] / a[0]) / np.log(3)
    solved[10_000] = (b[0] * (10 / 3) ** power, round(b[1] * 10 / 3))
    print(
        f"| 10000, extrapolated as k^{power:.1f} | {solved[10_000][1]} | {solved[10_000][0]:.3g} |"
    )
    print(
        "\n| GPUs | past tasks | gradients | rows sent | GGᵀ | products sent | dual on the host | "
        "dual on a GPU | g̃ sent | bookkeeping | step | MB sent | GB of G, GGᵀ |\n"
        + "|---" * 13
        + "|"
    )
    for size, k in itertools.product(sizes, ks):
        row = step_parts(size, k, p, solved[k])
        print(f"| {size} | {k:,} | " + " | ".join(f"{part:.3g}" for part in row) + " |")


def step_parts(size: int, k: int, p: int, solved: tuple[float, int]) -> list[float]:
    """Milliseconds of a step's parts under DDP and in all, megabytes sent, gigabytes kept."""
    others = (size - 1) / size
    together = k % size  # tasks that all processes compute a part of
    gradients = TASK * (k // size + together / size)
    rows = 4 * p * others * (k // size + together)
    products = 2 * 8 * (k * (k + 1) / 2 + k) * others
    counts = 8 * (3 + 2 * k) * (size - 1)
    last = 4 * p * others
    sent = [n / RATE + (LATENCY if size > 1 else 0) for n in (rows, products, last)]
    gram = GRAM * k * k * p / size
    on_gpu = solved[1] * (ENTERS + 2 * 8 * k * k / MEMORY)
    kept = bookkeeping(k, size) if size > 1 else 0.0
    exchanged = max(gradients, sent[0])  # rows are sent while others are computed
    total = exchanged + gram + sent[1] + min(solved[0], on_gpu) + sent[2] + kept
    total += counts / RATE
    megabytes = (rows + products + counts + last) / 1e6
    gigabytes = (4 * k * p / size + 2 * 8 * k * k) / 1e9
    return [
        gradients, sent[0], gram, sent[1], solved[0], on_gpu, sent[2], kept, total, megabytes,
        gigabytes,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["bytes", "times", "simulate"])
    parser.add_argument("--past", type=int, nargs="+", default=[1, 5, 10, 19])
    parser.add_argument("--repeats", type=int, default=60)
    given = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    if given.what == "bytes":
        for size in (2, 4):
            start(count_bytes, size)
    elif given.what == "times":
        start(time_steps, 2, given.past, given.repeats)
    else:
        simulate()


if __name__ == "__main__":
    main()
