"""Long attacks on checkpoints, for recorded figures; short ones are in test_checkpoints.py.

python -m tests.attack_checkpoints kills 100     # SIGKILLs at random moments, over all learners
python -m tests.attack_checkpoints files 100000  # mutated files
python -m tests.attack_checkpoints loop 100      # SIGKILLs of a user's own loop (user_loop.py)
python -m tests.attack_checkpoints load 1000000  # observed examples and saves, resident memory
"""

from __future__ import annotations

import collections
import gc
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import gradmem as gm
from gradmem.checkpoint import load_state
from gradmem.checks import _same
from gradmem.learners import LEARNERS
from tests import user_loop


def command(out: Path, learner: str) -> list[str]:
    """A run of about two seconds, saved every 20 examples."""
    sizes = ["--tasks", "4", "--examples", "300", "--batch-size", "5", "--save-every", "20"]
    options = ["--benchmark", "mnist-rotations", "--learner", learner, "--data", "sample", *sizes]
    return [sys.executable, "-m", "gradmem", "run", *options, "--out", str(out)]


def result_of(out: Path) -> dict[str, object]:
    result = json.loads((out / "result.json").read_text())
    return {name: value for name, value in result.items() if not name.startswith("seconds")}


def kills(n: int) -> None:
    """Kill runs n times in all; every run of every learner ends as an undisturbed one."""
    rng = random.Random(0)
    done = finished = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, learner in enumerate(LEARNERS):
            whole, killed = Path(folder, f"{learner}-whole"), Path(folder, f"{learner}-killed")
            begin = time.perf_counter()
            subprocess.run(command(whole, learner), check=True, capture_output=True)
            seconds = time.perf_counter() - begin
            share = n * (i + 1) // len(LEARNERS)
            while done < share or not (killed / "result.json").exists():
                if (killed / "result.json").exists():
                    assert result_of(killed) == result_of(whole), learner
                    finished += 1
                    shutil.rmtree(killed)
                # most of a short run is its start, so the moments lie late
                limit = seconds * rng.uniform(0.4, 0.9) if done < share else None
                process = subprocess.Popen(
                    command(killed, learner), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                try:
                    process.communicate(timeout=limit)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    done += 1
            assert result_of(killed) == result_of(whole), learner
            finished += 1
            print(f"{learner}: {done} kills so far, the same results", flush=True)
    print(f"{done} kills, {finished} runs of {len(LEARNERS)} learners: identical results")


def files(n: int) -> None:
    """Load n mutated files: only our own errors come out, and the learner is as before."""
    rng = random.Random(0)
    learner = gm.GEM(gm.mlp([4, 6, 3]), memories=4)
    for t in "abc":
        for _ in range(4):
            learner.observe(torch.randn(6, 4), t, torch.randint(3, (6,)))
    before = learner.state_dict()
    seen: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "learner")
        learner.save(path)
        content = path.read_bytes()
        for _ in range(n):
            mutated = bytearray(content)
            for _ in range(rng.choice([1, 1, 2, 5, 30])):
                kind, place = rng.randrange(3), rng.randrange(len(mutated))
                if kind == 0:
                    mutated[place] = rng.randrange(256)
                elif kind == 1:
                    mutated[place] ^= 1 << rng.randrange(8)
                else:
                    mutated[place : place + rng.randrange(9)] = bytes(rng.randrange(9))
            whole, part = len(mutated), rng.randrange(len(mutated))
            path.write_bytes(mutated[: rng.choice([whole, whole, whole, part])])
            try:
                learner.load(path)
            except ValueError as error:
                seen[type(error).__name__] += 1
            else:
                seen["loaded"] += 1
                learner.load_state_dict(before)
    print(n, "files:", dict(seen))


def loop(n: int, steps: int = user_loop.STEPS) -> None:
    """Kill a user's own loop n times; model, optimizer and memory end as undisturbed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.user_loop"])
    rng = random.Random(0)
    done = advanced = finished = 0
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        first = context.Process(target=pass_by)  # when it has ended, the server has started
        first.start()
        first.join()
        begin = time.perf_counter()
        process = context.Process(target=user_loop.main, args=(whole, steps))
        process.start()
        process.join()
        seconds = time.perf_counter() - begin
        expected = load_state(whole, "GradientMemory")
        while done < n or step_of(killed) < steps:
            if step_of(killed) == steps:
                _same(expected, load_state(killed, "GradientMemory"), "it went another way")
                finished += 1
                killed.unlink()
            before = step_of(killed)
            process = context.Process(target=user_loop.main, args=(killed, steps))
            process.start()
            process.join(0.7 * seconds * rng.random() if done < n else None)
            if process.is_alive():
                process.kill()
                process.join()
                done += 1
                advanced += step_of(killed) > before
            else:
                assert process.exitcode == 0, f"a resumed loop ended with {process.exitcode}"
        _same(expected, load_state(killed, "GradientMemory"), "it went another way")
        left = len([path for path in Path(folder).iterdir() if path.name.startswith(".")])
    print(f"{done} kills of a user's loop, {advanced} of them after it had saved something new;")
    print(f"{finished + 1} loops to their end: the same weights, optimizer and memory, to the bit")
    print(f"{left} of the kills left a file that was not whole yet beside the checkpoint")


def pass_by() -> None:
    """Nothing: a process that ends at once."""


def step_of(path: Path) -> int:
    """How many steps of a user's loop are saved."""
    return load_state(path, "GradientMemory")["others"]["step"] if path.exists() else 0


def resident() -> int:
    """Resident memory of this process, in bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load(n: int) -> None:
    """Observe n examples, and save once for every 100 of them: resident memory stays flat."""
    torch.set_num_threads(1)
    for name, make in (("GEM", gem_steps), ("GradientMemory", memory_steps)):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "saved")
            early, sizes = 0, []
            for examples, save in make(n):
                if examples % 100 == 0:
                    save(path)
                if examples % (n // 10) == 0:
                    sizes.append((examples, resident(), path.stat().st_size))
                    early = early or sizes[0][1]
                    print(name, *sizes[-1], flush=True)
        grown = sizes[-1][1] - early
        seconds = time.perf_counter() - begin
        print(
            f"{name}: {n} examples, {n // 100} saves in {seconds:.0f} s; resident after a tenth "
            f"{early / 1e6:.1f} MB, at the end {sizes[-1][1] / 1e6:.1f} MB ({grown / 1e6:+.1f}); "
            f"file {sizes[0][2]} → {sizes[-1][2]} bytes"
        )


Steps = Iterator[tuple[int, Callable[[Path], None]]]


def batches(n: int) -> Iterator[tuple[int, torch.Tensor, int, torch.Tensor]]:
    """Examples so far, x, t, y: fifty at a time, of five tasks that come back."""
    generator = torch.Generator().manual_seed(0)
    for i in range(n // 50):
        x = torch.randn(50, 4, generator=generator)
        yield 50 * (i + 1), x, i // 20 % 5, x[:, :3].argmax(1)


def gem_steps(n: int) -> Steps:
    learner = gm.GEM(gm.mlp([4, 6, 3]), memories=10)
    for examples, x, t, y in batches(n):
        learner.observe(x, t, y)
        learner.predict(x, f"never observed {examples}")
        yield examples, learner.save


def memory_steps(n: int) -> Steps:
    model = gm.mlp([4, 6, 3])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = gm.GradientMemory(model, memories=10, keep="reservoir")
    for examples, x, t, y in batches(n):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        memory.step(optimizer, t)
        memory.add(x, t, y)
        yield examples, partial(memory.save, model=model, optimizer=optimizer)


if __name__ == "__main__":
    {"kills": kills, "files": files, "loop": loop, "load": load}[sys.argv[1]](int(sys.argv[2]))
