"""Long attacks on checkpoints, for recorded figures; short ones are in test_checkpoints.py.

python -m tests.attack_checkpoints kills 100     # SIGKILLs at random moments, over all learners
python -m tests.attack_checkpoints files 100000  # mutated files
"""

from __future__ import annotations

import collections
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import gradmem as gm
from gradmem.learners import LEARNERS


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


if __name__ == "__main__":
    {"kills": kills, "files": files}[sys.argv[1]](int(sys.argv[2]))
