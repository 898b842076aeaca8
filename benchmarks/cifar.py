"""CIFAR-100 on a GPU: what each way to compute the gradients costs, and a whole run of GEM.

    python -m benchmarks.cifar choices [--past 19]
    python -m benchmarks.cifar run --data FOLDER [--precision bf16] [--limit GIGABYTES]

`choices` prints milliseconds for the gradients of all past tasks (256 memories each, thin
ResNet-18), the peak of memory and how far G is from the same in double precision; then the time it
would take to move the activations through memory and nothing else. `run` is a run with the paper's
settings and says where its time went; with a limit, the process may not use more of the GPU's
memory.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradmem as gm
from benchmarks.measure import machine, time_it
from gradmem.gradients import MemoryGradients, loss_gradient, parameters
from gradmem.memory import Stack
from gradmem.runs.experiment import Experiment

CHOICES = [
    # method, precision, channels last, tasks per chunk
    ("loop", "fp32", False, None),
    ("loop", "tf32", True, None),
    ("loop", "bf16", True, None),
    ("batched", "fp32", False, None),
    ("batched", "fp32", True, None),
    ("batched", "tf32", False, None),
    ("batched", "tf32", True, None),
    ("batched", "bf16", False, None),
    ("batched", "bf16", True, None),
    ("batched", "bf16", True, 4),
]


def memories(k: int, m: int, device: str) -> Stack:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(k, m, 3, 32, 32, generator=generator).to(device)
    y = 5 * torch.arange(k)[:, None] + torch.randint(5, (k, m), generator=generator)
    masks = torch.arange(100) // 5 == torch.arange(k)[:, None]
    return Stack(x, y.to(device), (m,) * k, masks.to(device))


def network(channels_last: bool, device: str) -> nn.Module:
    net: nn.Module = gm.resnet18(seed=1).to(device)
    return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[call-overload,no-any-return]


def compiled_loop(net: nn.Module, stack: Stack) -> Callable[[], Tensor]:
    """One pass per task through a compiled network, in bf16."""
    fast, weights = torch.compile(net), parameters(net)
    out = torch.empty(len(stack), sum(w.numel() for w in weights), device=stack.x.device)

    def gradients() -> Tensor:
        with torch.autocast(stack.x.device.type, torch.bfloat16):
            for i, row in enumerate(out):
                one = stack[i : i + 1]
                loss_gradient(one.losses(fast(one.x[0])[None]).sum(), weights, out=row)
        return out

    return gradients


def recorded(action: Callable[[], object], device: str) -> Callable[[], object]:
    """The action as a CUDA graph, where there is one."""
    if device == "cpu":
        return action
    for _ in range(2):
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def choices(k: int, m: int, device: str) -> None:
    stack = memories(k, m, device)
    exact = Stack(stack.x.double(), stack.y, stack.counts, stack.masks)
    reference = MemoryGradients(network(False, device).double(), "loop")([exact]).clone()
    names = "method, precision, channels last, tasks per pass, ms, first (s), error, peak GiB"
    print(f"| {names.replace(', ', ' | ')} |\n|{'---|' * 8}")
    for method, precision, last, chunk in CHOICES:
        net = network(last, device)
        engine = MemoryGradients(net, method, chunk, precision=precision)
        row = _measured(lambda engine=engine: engine([stack]), reference, device)  # type: ignore[misc]
        print(f"| {method} | {precision} | {last} | {chunk or 'all'} | {row}", flush=True)
    row = _measured(compiled_loop(network(True, device), stack), reference, device)
    print(f"| loop, compiled | bf16 | True | 1 | {row}", flush=True)
    print(f"\nmoving the activations: {moving(stack, device):.1f} ms (bf16)")


def _measured(gradients: Callable[[], Tensor], reference: Tensor, device: str) -> str:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    G = gradients().double()
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    error = float(((G - reference).norm(dim=1) / reference.norm(dim=1)).median())
    del G
    times = time_it(recorded(gradients, device), device, 3, 3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return f"{times.median:.1f} | {first:.1f} | {error:.1e} | {peak:.2f} |"


def moving(stack: Stack, device: str) -> float:
    """Milliseconds to write and read what layers give, forth and back, and to read it once more."""
    sizes: list[int] = []
    net = network(True, device)
    layers = [part for part in net.modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d)]
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: sizes.append(out[0].numel()))
    with torch.no_grad():
        net(stack.x[0, :2])
    values = 5 * sum(sizes) * stack.y.numel()
    block = torch.empty(2**28 if device == "cuda" else 2**22, dtype=torch.bfloat16, device=device)
    copy = time_it(lambda: block.clone(), device, 5, 5).median  # reads and writes each value
    return values / (2 * block.numel()) * copy


def run(data: str, precision: str, limit: float | None, seed: int, **settings: object) -> None:
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * 1e9 / total)
    experiment = Experiment(
        "cifar100-incremental", "gem", {"precision": precision, **settings},
        seed=seed, data=data, device="cuda",
    )  # fmt: skip
    rows = itertools.count(1)

    class Show(gm.Callback):
        def on_task(self, progress: gm.Progress) -> None:
            if (row := next(rows)) % 5 == 0:
                print(f"{row} tasks: {progress.seconds:.1f} s", flush=True)

    result = experiment.run([Show()])
    peak, held = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    print(
        f"seed {seed}, {precision}, limit {limit} GB: {result.seconds:.1f} s (training "
        f"{result.seconds_training:.1f}, evaluation {result.seconds_evaluation:.1f}); "
        f"ACC {result.acc:.4f} BWT {result.bwt:+.4f}; {result.statistics}; "
        f"peak {peak:.2f} GB in use, {held:.2f} GB held"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("choices")
    first.add_argument("--past", type=int, default=19)
    first.add_argument("--memories", type=int, default=256)
    first.add_argument("--device", default="cuda")
    second = commands.add_parser("run")
    second.add_argument("--data")
    second.add_argument("--precision", default="bf16")
    second.add_argument("--limit", type=float)
    second.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "choices":
        print(machine(arguments.device))
        choices(arguments.past, arguments.memories, arguments.device)
    else:
        print(machine("cuda"))
        run(arguments.data, arguments.precision, arguments.limit, arguments.seed)


if __name__ == "__main__":
    main()
