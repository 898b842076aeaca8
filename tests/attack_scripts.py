"""Random scripts of right and wrong calls over all learners and kinds of network.

Only documented errors may come out, and what raises one changes nothing. On the way the learner is
replaced by fresh ones that load its file; a script ends in the same state, to the bit, without.

python -m tests.attack_scripts 10000
"""

from __future__ import annotations

import argparse
import collections
import copy
import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import gradmem as gm
from gradmem.checkpoint import CheckpointError
from gradmem.checks import _same
from gradmem.learners import LEARNERS, Learner

DOCUMENTED = (TypeError, ValueError, FloatingPointError, CheckpointError)
CLASSES = 3
TASKS = ("a", "b", ("c", 1), 2.5)


class Last(nn.Module):
    """A recurrent layer's last answer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0][:, -1]


def _shared() -> nn.Module:
    block, prelu = nn.Linear(6, 6), nn.PReLU()
    return nn.Sequential(nn.Linear(4, 6), prelu, block, block, prelu, nn.Linear(6, CLASSES))


def _convnet() -> nn.Module:
    normed = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
    return nn.Sequential(*normed, nn.Flatten(), nn.Linear(27, CLASSES))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def _recurrent() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), Last(), nn.Linear(5, CLASSES))


#: Kind of network → how it is made, and the shape of its inputs (whole numbers for "tokens").
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | str]] = {
    "mlp": (lambda: nn.Sequential(*gm.mlp([4, 7, CLASSES])), (4,)),
    "convnet": (_convnet, (1, 5, 5)),
    "batch norm": (_batch_norm, (4,)),
    "dropout": (_dropout, (4,)),
    "shared": (_shared, (4,)),
    "recurrent": (_recurrent, "tokens"),
}
OPTIMIZERS = (
    None,
    partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    partial(torch.optim.AdamW, lr=0.01),
)
MEMORIES = (
    {"memories": 4},
    {"budget": 9},
    {"budget": 2},
    {"memory": partial(gm.EpisodicMemory, 5, keep="reservoir")},
)
OWN: dict[str, tuple[dict[str, Any], ...]] = {
    "gem": tuple(
        own | more
        for own in MEMORIES
        for more in ({}, {"constrain": "update"}, {"margin_rule": "floor"}, {"margin": 0.0})
    ),
    "agem": tuple(own | {"sample": n} for own in MEMORIES for n in (3, None)),
    "ewc": ({"fisher": "batch", "regularization": 0.5}, {"fisher": "example", "memories": 6}),
    "icarl": ({"budget": 6}, {"budget": 40, "candidates": 9}, {"distillation": 0.0}),
    "independent": ({"start": "copy"}, {"start": "random"}),
}


class Script:
    """The i-th script: a learner and what is done with it; all of it follows from i."""

    def __init__(self, i: int) -> None:
        rng = random.Random(i)
        self.i = i
        self.learner = rng.choice([*LEARNERS])
        self.network = rng.choice([*NETWORKS])
        self.shape = NETWORKS[self.network][1]
        self.settings = dict(rng.choice(OWN.get(self.learner, ({},))))
        self.settings["optimizer"] = rng.choice(OPTIMIZERS)
        self.settings["clip"] = rng.choice([None, None, 0.5])
        self.settings["schedule"] = rng.choice([None, None, partial(ExponentialLR, gamma=0.9)])
        self.settings["grow"] = rng.random() < 0.3 and LEARNERS[self.learner].one_network
        self.outputs = {"a": (0, 2), "b": (1,)} if rng.random() < 0.15 else {}
        names = rng.choices([*OPERATIONS], [weight for _, weight in OPERATIONS.values()], k=20)
        self.steps = [(name, rng.randrange(2**31)) for name in names[: rng.randint(5, 20)]]
        self.handed_over = {rng.randrange(len(self.steps)) for _ in range(2)}

    def make(self, seed: int = 0, **other: Any) -> Learner:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = NETWORKS[self.network][0]()
        settings = self.settings | other
        if (memory := settings.get("memory")) is not None:
            settings["memory"] = memory()
        learner = LEARNERS[self.learner](network, seed=seed, **settings)
        learner.outputs = dict(self.outputs)
        return learner

    def __str__(self) -> str:
        settings = {name: value for name, value in self.settings.items() if value}
        return f"script {self.i}: {self.learner} {settings} on {self.network}, {self.outputs}"


class Running:
    """A script as it runs, in a folder of its own."""

    def __init__(self, script: Script, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.learner = script.make()
        self.seen: collections.Counter[str] = collections.Counter()

    def go(self, handed_over: bool) -> dict[str, Any]:
        """The state at the end; `handed_over` says to go on in fresh learners twice."""
        for place, (name, seed) in enumerate(self.script.steps):
            if handed_over and place in self.script.handed_over:
                self.hand_over()
            self.step(name, random.Random(seed))
        return whole(self.learner)

    def step(self, name: str, rng: random.Random) -> None:
        action = OPERATIONS[name][0]
        torch.manual_seed(rng.randrange(2**31))  # the script's data; the learner has its own
        call, kind = action(self, rng)
        before = whole(self.learner)
        error: Exception | None = None
        try:
            call()
        except DOCUMENTED as raised:
            error = raised
        if error is None:
            assert kind != "wrong", f"{name} was not refused"
        else:
            assert kind != "right", f"{name} was refused: {error!r}"
            assert str(error), f"{name}: the error says nothing"
        if error is not None or kind == "right":
            _same(before, whole(self.learner), f"{name} ({error!r}) changed something")
        self.seen[name if error is None else f"{name}: {type(error).__name__}"] += 1

    def hand_over(self) -> None:
        fresh = self.script.make(seed=7)
        path = self.folder / "handed over"
        self.learner.save(path)
        fresh.load(path)
        _same(whole(self.learner), whole(fresh), "a fresh learner loaded something else")
        self.learner = fresh

    def data(self, rng: random.Random, n: int | None = None) -> tuple[Tensor, Any, Tensor]:
        """Some examples of some task, with labels that the task may have."""
        t = rng.choice(TASKS)
        own = self.script.outputs.get(t, range(CLASSES))
        n = rng.choice([2, 3, 5, 8]) if n is None else n
        y = torch.tensor([rng.choice(own) for _ in range(n)])
        if self.script.shape == "tokens":
            return torch.randint(7, (n, 5)), t, y
        return torch.randn(n, *self.script.shape), t, y


def whole(learner: Learner) -> dict[str, Any]:
    """All there is of a learner, and the global generator."""
    modules = [learner.module(t).modules() for t in TASKS]
    return {
        "state": learner.state_dict(),
        "statistics": copy.deepcopy(learner.statistics()),
        "modes": [part.training for parts in modules for part in parts],
        "global generator": torch.get_rng_state(),
    }


# Operations: what is called, and whether it is "right" (nothing is raised, nothing changes),
# "wrong" (an error is raised), "learns" (something may change) or "either".

Call = tuple[Callable[[], Any], str]


def observe(run: Running, rng: random.Random) -> Call:
    return partial(run.learner.observe, *run.data(rng)), "learns"


def observe_one(run: Running, rng: random.Random) -> Call:
    """Refused where there are batch statistics."""
    return partial(run.learner.observe, *run.data(rng, 1)), "learns"


def observe_new_class(run: Running, rng: random.Random) -> Call:
    x, _, y = run.data(rng)
    y[0] = CLASSES + rng.randrange(2)
    grows = run.learner.grow
    return partial(run.learner.observe, x, "new", y), "learns" if grows else "wrong"


def observe_huge(run: Running, rng: random.Random) -> Call:
    x, t, y = run.data(rng)
    return partial(run.learner.observe, x * 1e30 if x.is_floating_point() else x, t, y), "learns"


def observe_wrong(run: Running, rng: random.Random) -> Call:
    x, t, y = run.data(rng, 6)
    if rng.random() < 0.5 and x.is_floating_point():
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([float("nan"), float("inf")])
        return partial(run.learner.observe, x, t, y), "wrong"
    wrong = rng.choice(
        [
            (x[0], t, y[0]),
            (x[:0], t, y[:0]),
            (x.tolist(), t, y),
            (x.bool(), t, y),
            (None, t, y),
            ({}, t, y),
            (torch.randn(6, 2, 2, 2, 2), t, y),
            (x, t, y + 50 * (1 - 2 * run.learner.grow)),
            (x, t, y.float()),
            (x, t, y > 0),
            (x, t, y[:3]),
            (x, t, y[:, None]),
            (x, t, y.tolist()),
            (x, t, None),
            (x, ["a"], y),
            (x, torch.tensor(1), y),
            (x, None, y),
            (x, float("nan"), y),
        ]
    )
    return partial(run.learner.observe, *wrong), "wrong"


def observe_other_labels(run: Running, rng: random.Random) -> Call:
    x, _, y = run.data(rng)
    y[:] = 1
    wrong = "a" in run.script.outputs
    return partial(run.learner.observe, x, "a", y), "wrong" if wrong else "learns"


def predict(run: Running, rng: random.Random) -> Call:
    x, t, _ = run.data(rng, rng.randint(1, 9))
    t = rng.choice([t, "never observed", (9, 9)])
    return partial(rng.choice([run.learner.predict, run.learner.forward]), x, t), "right"


def predict_without_task(run: Running, rng: random.Random) -> Call:
    shared = run.learner.shares_outputs and not run.learner.outputs
    return partial(run.learner.predict, run.data(rng)[0]), "right" if shared else "wrong"


def predict_wrong(run: Running, rng: random.Random) -> Call:
    x, t, _ = run.data(rng, 4)
    wrong = [(x[0, 0], t), (x[:0], t), (x.tolist(), t), (x, ["a"]), (x, float("nan")), (None, t)]
    if x.is_floating_point():
        wrong += [(x / 0, t), (x[..., :2], t), (x.double(), t)]
    return partial(run.learner.predict, *rng.choice(wrong)), "wrong"


def save(run: Running, rng: random.Random) -> Call:
    return partial(run.learner.save, run.folder / f"saved {rng.randrange(2)}"), "right"


def save_nowhere(run: Running, rng: random.Random) -> Call:
    path = rng.choice([run.folder, run.folder / "no folder" / "file"])
    return partial(run.learner.save, path), "wrong"


def load(run: Running, rng: random.Random) -> Call:
    """What this or another learner saved before, if anything."""
    path = run.folder / f"saved {rng.randrange(2)}"
    return partial(run.learner.load, path), "learns" if path.exists() else "wrong"


def load_damaged(run: Running, rng: random.Random) -> Call:
    path = run.folder / "damaged"
    run.learner.save(path)
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        content = content[: rng.randrange(len(content))]
    else:
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    # A bit of the metadata that nothing depends on (the version of torch) may be another.
    return partial(run.learner.load, path), "either"


def load_foreign(run: Running, rng: random.Random) -> Call:
    path = run.folder / "foreign"
    kind = rng.choice([name for name in LEARNERS if name != run.script.learner])
    other: Any = LEARNERS[kind](nn.Sequential(*gm.mlp([4, 7, CLASSES])))
    if rng.random() < 0.3:
        other = gm.GradientMemory(nn.Linear(4, CLASSES))
    other.save(path)
    return partial(run.learner.load, path), "wrong"


def load_other_settings(run: Running, rng: random.Random) -> Call:
    path = run.folder / "other settings"
    other = run.script.make(clip=0.25)
    with torch.random.fork_rng():
        other.observe(*run.data(rng))
    other.save(path)
    return partial(run.learner.load, path), "wrong"


def load_state(run: Running, rng: random.Random) -> Call:
    """A state of its own: loading it changes nothing."""
    return partial(run.learner.load_state_dict, run.learner.state_dict()), "right"


def load_wrong_state(run: Running, rng: random.Random) -> Call:
    state = run.learner.state_dict()
    place = rng.choice([*places(state)])
    value: Any = state
    for key in place[:-1]:
        value = value[key]
    spoiled = rng.choice([None, "text", float("nan"), -1, [], {}, torch.zeros(2), "missing"])
    if spoiled == "missing":
        del value[place[-1]]
    else:
        value[place[-1]] = spoiled
    return partial(run.learner.load_state_dict, state), "spoiled"


def load_no_state(run: Running, rng: random.Random) -> Call:
    wrong: Any = rng.choice([None, [], {}, {"learner": run.learner}, 3, "state", torch.zeros(3)])
    return partial(run.learner.load_state_dict, wrong), "wrong"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a state, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list) and item:
            yield from places(item, (*path, key))


OPERATIONS: dict[str, tuple[Callable[[Running, random.Random], Call], float]] = {
    "observe": (observe, 8),
    "observe one": (observe_one, 0.7),
    "observe a new class": (observe_new_class, 1),
    "observe huge values": (observe_huge, 0.5),
    "observe something wrong": (observe_wrong, 2),
    "observe another's labels": (observe_other_labels, 0.5),
    "predict": (predict, 2),
    "predict without t": (predict_without_task, 0.5),
    "predict something wrong": (predict_wrong, 1),
    "save": (save, 1),
    "save nowhere": (save_nowhere, 0.3),
    "load": (load, 1),
    "load a damaged file": (load_damaged, 0.7),
    "load a foreign file": (load_foreign, 0.4),
    "load other settings": (load_other_settings, 0.4),
    "load its own state": (load_state, 0.7),
    "load a wrong state": (load_wrong_state, 1),
    "load no state": (load_no_state, 0.4),
}


def attack(i: int) -> tuple[collections.Counter[str], str]:
    """Run the i-th script, one in three twice; what was seen, and what went wrong."""
    script = Script(i)
    states = []
    seen: collections.Counter[str] = collections.Counter()
    try:
        for handed_over in (False, True) if i % 3 == 0 else (True,):
            with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
                run = Running(script, Path(folder))
                states.append(run.go(handed_over))
                seen += run.seen
        _same(states[0], states[-1], "with fresh learners on the way it ended elsewhere")
    except Exception:
        return seen, f"{script}\n{traceback.format_exc()}"
    return seen, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    seen: collections.Counter[str] = collections.Counter()
    failures = []
    which = range(options.first, options.first + options.n)
    with multiprocessing.get_context("spawn").Pool(
        options.workers, torch.set_num_threads, (1,)
    ) as pool:
        for done, (counts, failure) in enumerate(pool.imap_unordered(attack, which, 20), 1):
            seen += counts
            failures += [failure] * bool(failure)
            if done % 1000 == 0:
                print(f"{done} after {time.perf_counter() - begin:.0f} s", flush=True)
    for failure in failures[:20]:
        print(failure)
    for name, count in sorted(seen.items()):
        print(f"{count:8d}  {name}")
    calls = sum(seen.values())
    seconds = time.perf_counter() - begin
    print(
        f"{options.n} scripts, each twice, {calls} calls, {seconds:.0f} s: {len(failures)} failed"
    )
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
