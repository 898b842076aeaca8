"""GEM in other libraries that are installed beside, on the same digits: seconds and ACC.

    python -m benchmarks.libraries --tasks 20 --examples 1000 --repeats 3 --data FOLDER

Each trains the same network from the same weights on the same tensors with plain SGD, batches of
10, one pass, 256 memories a task and a margin of 0.5. What is timed is training, on the wall and in
processor seconds, alternately. Libraries: avalanche-lib (`pip install avalanche-lib`).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradmem as gm
from gradmem.evaluation.machine import cores, processor

LR, BATCH, MEMORIES, MARGIN = 0.1, 10, 256, 0.5

#: Seconds on the wall, and of the processor.
Taken = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", default="sample", help="folder with MNIST's files")
    arguments = parser.parse_args()
    ways: dict[str, Callable[[gm.Continuum, nn.Module], Taken]] = {
        f"gradmem {gm.__version__}": gradmem_seconds
    }
    if find_spec("avalanche"):
        ways[f"avalanche-lib {version('avalanche-lib')}"] = avalanche_seconds
    seconds: dict[str, list[Taken]] = {name: [] for name in ways}
    accs: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(arguments.repeats):
        continuum = gm.mnist_rotations(
            arguments.tasks, arguments.examples, BATCH, seed=repeat, data=arguments.data
        )
        for name, train in ways.items():
            network = gm.mlp(seed=repeat)
            seconds[name].append(train(continuum, network))
            accs[name].append(accuracy(continuum, network))
    print(
        f"{arguments.tasks} rotated tasks of {arguments.examples}, {arguments.repeats} seeds; "
        f"{processor()}, {cores()} cores, {torch.get_num_threads()} threads; "
        f"torch {torch.__version__}\n\n| | training, seconds | processor seconds | ACC |\n"
        "|---|---|---|---|"
    )
    for name in ways:
        wall, processor_time = (
            ", ".join(f"{value:.1f}" for value in values)
            for values in zip(*seconds[name], strict=True)
        )
        acc = ", ".join(f"{value:.3f}" for value in accs[name])
        print(f"| {name} | {wall} | {processor_time} | {acc} |")


def timed(train: Callable[[], object]) -> Taken:
    """Seconds on the wall and of the processor."""
    begun = time.perf_counter(), time.process_time()
    train()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def gradmem_seconds(continuum: gm.Continuum, network: nn.Module) -> Taken:
    learner = gm.GEM(network, lr=LR, memories=MEMORIES, margin=MARGIN, margin_rule="floor")
    return timed(lambda: learner.learn_from(continuum, progress=False))


def avalanche_seconds(continuum: gm.Continuum, network: nn.Module) -> Taken:
    declare_operators()
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.training.plugins import EvaluationPlugin, GEMPlugin
    from avalanche.training.supervised import Naive

    def datasets(sets: Any) -> list[Any]:
        made = []
        for one in sets:
            x, y = one[:]
            pairs: Any = TensorDataset(x, y)
            pairs.targets = y.tolist()
            made.append(as_classification_dataset(pairs))
        return made

    train = datasets(task.train for task in continuum.tasks)
    test = datasets(continuum.tests.values())
    plain = benchmark_from_datasets(train=train, test=test)
    stream = task_incremental_benchmark(plain, reset_task_labels=True).train_stream
    strategy = Naive(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=LR),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=1,
        plugins=[GEMPlugin(patterns_per_experience=MEMORIES, memory_strength=MARGIN)],
        evaluator=EvaluationPlugin(),
    )
    return timed(lambda: [strategy.train(experience) for experience in stream])


def declare_operators() -> None:
    """Let torchvision load beside a torch that its binary was not built for.

    Avalanche imports it; nothing that is timed calls its operators.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    text = Path(found.origin).with_name("_meta_registrations.py").read_text("utf-8")
    names = {*re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', text)}
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []  # operators live as long as their library


@torch.no_grad()
def accuracy(continuum: gm.Continuum, network: nn.Module) -> float:
    """Mean accuracy over all tasks' test sets."""
    network.eval()
    tests = [test[:] for test in continuum.tests.values()]
    right = [(network(x).argmax(1) == y).float().mean().item() for x, y in tests]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
