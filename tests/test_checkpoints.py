"""Stopped at any example and gone on with, bit for bit; damaged, foreign and newer files."""

import copy
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

import gradmem as gm
from gradmem.checkpoint import CheckpointError, load_state, previous_of, save_state
from gradmem.checks import _same
from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.learners import LEARNERS

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
VARIANTS = [(name, {}) for name in LEARNERS] + [
    ("gem", {"budget": 30, "optimizer": ADAMW, "constrain": "update"}),
    ("gem", {"memory": partial(gm.EpisodicMemory, 6, keep="reservoir")}),
    ("gem", {"memory": partial(gm.EpisodicMemory, 6, keep="first"), "clip": 0.5}),
    ("gem", {"memory": partial(gm.EpisodicMemory, budget=9, groups=2, keep="k-centre")}),
    ("agem", {"memory": partial(gm.EpisodicMemory, budget=9, groups=1, keep="balanced")}),
    ("single", {"schedule": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97)}),
    ("ewc", {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)
    )


def make(name, settings):
    made = {key: value() if key == "memory" else value for key, value in settings.items()}
    if name == "ewc":
        made |= {"regularization": 0.5}
    return LEARNERS[name](network(), seed=3, **made)


def continuum():
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for t in ("a", ("b", 2), 3.5, "a"):
        x = torch.randn(36, 4, generator=generator)
        y = torch.randint(3, (36,), generator=generator)
        tasks.append(gm.Task(t, (x, y), None if len(tasks) == 3 else (x[:20], y[:20])))
    return gm.Continuum(tasks, batch_size=8)


class Killed(Exception):  # noqa: N818
    pass


class Kill:
    """Ends a run after so many examples."""

    def __init__(self, examples):
        self.examples = examples

    def on_batch(self, progress):
        if progress.examples >= self.examples:
            raise Killed


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_a_run_that_is_killed_goes_on_bit_for_bit(name, settings, tmp_path):
    undisturbed = make(name, settings)
    expected = gm.run(undisturbed, continuum(), every=20)
    for examples in (8, 33, 60, 90, 125):
        with pytest.raises(Killed):
            gm.run(make(name, settings), continuum(), every=20, checkpoint=tmp_path, save_every=10,
                   callbacks=[Kill(examples)])  # fmt: skip
    learner = make(name, settings)
    found = gm.run(learner, continuum(), every=20, checkpoint=tmp_path, save_every=10)
    assert np.array_equal(found.R, expected.R)
    assert np.array_equal(found.curves, expected.curves)
    assert found.curve_examples == expected.curve_examples
    assert found.statistics == expected.statistics
    _same(undisturbed.state_dict(), learner.state_dict(), "the resumed run went another way")
    again = gm.run(make(name, settings), continuum(), every=20, checkpoint=tmp_path)
    assert np.array_equal(again.R, expected.R)  # a run that is over is not made again


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_is_saved_and_loaded(name, tmp_path):
    learner = make(name, {})
    batches = list(continuum())
    for x, t, y in batches[:12]:
        learner.observe(x, t, y)
    learner.save(tmp_path / "learner.safetensors")
    other = LEARNERS[name](network(), seed=8, **({"regularization": 0.5} if name == "ewc" else {}))
    other.load(tmp_path / "learner.safetensors")
    for one in (learner, other):
        for x, t, y in batches[12:]:
            one.observe(x, t, y)
    _same(learner.state_dict(), other.state_dict(), "the loaded learner went another way")
    assert [path.name for path in tmp_path.iterdir()] == ["learner.safetensors"]


def test_a_loop_of_ones_own_goes_on_bit_for_bit(tmp_path):
    def parts():
        model = network()
        memory = gm.GradientMemory(model, memories=6, keep="reservoir", constrain="update")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), memory

    def learn(model, optimizer, memory, batches):
        for x, t, y in batches:
            F.cross_entropy(model(x), y).backward()
            memory.step(optimizer, t)
            optimizer.zero_grad()
            memory.add(x, t, y)

    batches = list(continuum())
    whole, (model, optimizer, memory) = parts(), parts()
    torch.manual_seed(1)
    learn(*whole, batches)
    torch.manual_seed(1)
    learn(model, optimizer, memory, batches[:9])
    memory.save(tmp_path / "memory.safetensors")
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    model, optimizer, memory = parts()
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    memory.load(tmp_path / "memory.safetensors")
    torch.set_rng_state(states[2])
    learn(model, optimizer, memory, batches[9:])
    _same(whole[0].state_dict(), model.state_dict(), "the model went another way")
    _same(whole[2].state_dict(), memory.state_dict(), "the memory went another way")


def saved(tmp_path):
    path = tmp_path / "learner.safetensors"
    learner = gm.GEM(gm.mlp([4, 6, 3]), memories=4)
    for x, t, y in list(continuum())[:12]:
        learner.observe(x, t, y)
    learner.save(path)
    return learner, path


def test_damaged_truncated_foreign_and_newer_files_say_so(tmp_path):
    learner, path = saved(tmp_path)
    content = path.read_bytes()
    before = learner.state_dict()
    cases = {
        "no whole checkpoint": content[: len(content) // 2],
        "no whole checkpoint ": b"",
        "no whole checkpoint  ": b"PK\x03\x04" + content,
        "checksum": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "newer gradmem": content.replace(b'"format":"2"', b'"format":"7"'),
        "no checkpoint of gradmem": content.replace(b"gradmem checkpoint", b"another checkpoint"),
        "must hold the state of GEM, got one of EWC": content.replace(
            b'"about":"GEM"', b'"about":"EWC"'
        ),
    }
    for message, wrong in cases.items():
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message.strip()):
            learner.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        learner.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        learner.load(tmp_path)
    _same(before, learner.state_dict(), "a damaged file changed the learner")


def test_a_file_of_the_first_format_is_read(tmp_path):
    """As format 1 was: one checksum over structure and tensors, no parts."""
    tensor = torch.arange(6.0).view(2, 3)
    text = json.dumps({"dict": [["w", {"tensor": "0"}], ["steps", 7]]})
    digest = hashlib.sha256(text.encode())
    digest.update(b"0 torch.float32 (2, 3)" + tensor.numpy().tobytes())
    about = {"kind": "gradmem checkpoint", "format": "1", "about": "numbers", "state": text}
    content = save({"0": tensor}, about | {"checksum": digest.hexdigest()})
    (tmp_path / "old").write_bytes(content)
    found = load_state(tmp_path / "old", "numbers")
    assert found["steps"] == 7
    assert torch.equal(found["w"], tensor)
    (tmp_path / "old").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="checksum"):
        load_state(tmp_path / "old", "numbers")


def test_mutated_files_give_nothing_but_our_own_errors(tmp_path):
    """A short one; attack_checkpoints.py makes many more."""
    learner, path = saved(tmp_path)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        mutated = bytearray(content)
        for _ in range(rng.choice([1, 1, 3, 20])):
            mutated[rng.randrange(min(len(mutated), 4000))] = rng.randrange(256)
        path.write_bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])])
        with suppress(ValueError):
            learner.load(path)


def test_a_damaged_checkpoint_of_a_run_falls_back_to_the_one_before(tmp_path):
    expected = gm.run(make("gem", {}), continuum())
    with pytest.raises(Killed):
        gm.run(make("gem", {}), continuum(), checkpoint=tmp_path, save_every=8,
               callbacks=[Kill(70)])  # fmt: skip
    path = RunCheckpoint(tmp_path).path
    assert previous_of(path).exists()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(RuntimeWarning, match="going on from the checkpoint before it"):
        found = gm.run(make("gem", {}), continuum(), checkpoint=tmp_path)
    assert np.array_equal(found.R, expected.R)
    for one in (path, previous_of(path)):
        one.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        gm.run(make("gem", {}), continuum(), checkpoint=tmp_path)


def wide_run(folder, n_tasks=6, **options):
    """A run whose memories are many times as large as its network."""
    tasks = []
    for i in range(n_tasks):
        x = torch.randn(80, 300, generator=torch.Generator().manual_seed(i))
        tasks.append(gm.Task(i, (x, torch.arange(80) % 3), (x[:20], torch.arange(20) % 3)))
    learner = gm.GEM(gm.mlp([300, 4, 3], seed=0), memories=80)
    continuum = gm.Continuum(tasks, batch_size=20)
    return gm.run(learner, continuum, checkpoint=folder, **options), learner


def test_memories_that_stay_the_same_are_not_written_again(tmp_path):
    expected, learner = wide_run(None)
    with pytest.raises(Killed):
        wide_run(tmp_path, callbacks=[Kill(5 * 80 + 1)])
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("part-*")}
    assert parts
    newest = RunCheckpoint(tmp_path).path
    one_task = 80 * 300 * 4
    assert newest.stat().st_size < 3.5 * one_task  # of five
    found, resumed = wide_run(tmp_path)
    assert np.array_equal(found.R, expected.R)
    _same(learner.state_dict(), resumed.state_dict(), "going on from parts led elsewhere")
    assert all(path.stat().st_mtime_ns == time for path, time in parts.items())


def test_a_part_that_is_damaged_or_not_ours_is_not_used(tmp_path):
    with pytest.raises(Killed):
        wide_run(tmp_path, callbacks=[Kill(5 * 80 + 1)])
    newest = RunCheckpoint(tmp_path).path
    part = next(tmp_path.glob("part-*"))
    content = part.read_bytes()
    part.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(CheckpointError, match="is damaged: its checksum is another"):
        load_state(newest, "a run")
    part.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_state(newest, "a run")
    name, outside = part.name.encode(), b"../part-" + part.name[8:].encode()
    part.write_bytes(content)
    newest.write_bytes(newest.read_bytes().replace(name, outside))
    with pytest.raises(CheckpointError, match="is no part of a checkpoint"):
        load_state(newest, "a run")


def test_parts_that_no_checkpoint_needs_are_removed(tmp_path):
    wide_run(tmp_path)
    needed = {path.name for path in tmp_path.glob("part-*")}
    stray = tmp_path / f"part-{'0' * 32}.safetensors"
    stray.write_bytes(b"")
    checkpoint = RunCheckpoint(tmp_path)
    checkpoint.save(checkpoint.load())
    checkpoint.wait()
    assert {path.name for path in tmp_path.glob("part-*")} == needed
    checkpoint.clear()
    assert not tmp_path.exists()


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    gm.run(gm.GEM(network(), memories=5), continuum(), checkpoint=tmp_path)
    for learner in (gm.Single(network()), gm.GEM(network(), memories=9)):
        with pytest.raises(CheckpointError, match="does not fit this run"):
            gm.run(learner, continuum(), checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="another run: memories was 5 and is 9"):
        gm.run(gm.GEM(network(), memories=9), continuum(), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="save_every needs a checkpoint"):
        gm.run(gm.Single(network()), continuum(), save_every=10)


@pytest.mark.parametrize("changed", ["x", "y", "test"])
def test_the_checkpoint_of_a_run_with_other_data_is_refused(tmp_path, changed):
    """Of the same shapes, and with the same task names."""

    def stream(other=False):
        x, y = torch.linspace(-1, 1, 200).view(50, 4), torch.arange(50) % 3
        test = (x[:10].clone(), y[:10])
        if other:
            {"x": x, "y": y, "test": test[0]}[changed][9] = 1
        return gm.Continuum([gm.Task("a", (x, y), test), gm.Task("b", (x + 1, y), test)])

    first = gm.run(gm.GEM(network(), memories=5), stream(), checkpoint=tmp_path)
    again = gm.run(gm.GEM(network(), memories=5), stream(), checkpoint=tmp_path)
    assert (first.R == again.R).all()
    with pytest.raises(CheckpointError, match="another run: its data were others"):
        gm.run(gm.GEM(network(), memories=5), stream(other=True), checkpoint=tmp_path)


def test_a_state_of_other_settings_or_with_wrong_values_is_refused():
    learner = gm.GEM(gm.mlp([4, 6, 3]), margin=0.2)
    learner.observe(torch.randn(4, 4), 0, torch.arange(4) % 3)
    state = learner.state_dict()
    with pytest.raises(ValueError, match="as when the state was saved, got"):
        gm.GEM(gm.mlp([4, 6, 3])).load_state_dict(state)
    poisoned = copy.deepcopy(state)
    poisoned["network"]["0.weight"][0, 0] = float("nan")
    for wrong, message in (
        ({"steps": None}, "steps must be a whole number"),
        ({"examples": -1}, "examples must be at least 0"),
        ({"outputs": {0: "all"}}, "outputs of task 0"),
        ({"randomness": torch.zeros(3)}, "RNG state|ByteTensor|generator"),
        (poisoned, r"\['network'\]\['0.weight'\] holds numbers that are none"),
    ):
        before = learner.state_dict()
        with pytest.raises(ValueError, match=message):
            learner.load_state_dict(state | wrong)
        _same(before, learner.state_dict(), "a wrong state changed the learner")


@pytest.mark.parametrize("kind", [gm.GEM, gm.Independent])
def test_a_state_of_another_network_names_the_first_difference(kind):
    state = kind(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))).state_dict()
    with pytest.raises(ValueError, match=r"another one than was saved: 0\.weight") as wider:
        kind(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))).load_state_dict(state)
    assert "(9, 4) in this network, and shape (5, 4) in the state" in str(wider.value)
    assert "\n" not in str(wider.value)
    with pytest.raises(ValueError, match=r"0\.bias has no place in this network"):
        kind(nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 2))).load_state_dict(state)


def test_a_descriptor_that_a_file_cannot_hold_is_named(tmp_path):
    learner = gm.GEM(gm.mlp([4, 6, 3]))
    learner.observe(torch.randn(4, 4), frozenset({3}), torch.arange(4) % 3)
    with pytest.raises(CheckpointError, match=r"descriptor frozenset\(\{3\}\)"):
        learner.save(tmp_path / "learner")
    assert list(tmp_path.iterdir()) == []
    numbers = {np.int64(3): torch.ones(2), (1, "b", 2.5): (None, True, float("inf")), -1.5: [1]}
    save_state(tmp_path / "state", numbers, "numbers")
    found = load_state(tmp_path / "state", "numbers")
    assert list(found) == [3, (1, "b", 2.5), -1.5]
    assert found[1, "b", 2.5] == (None, True, float("inf"))


def test_a_disk_that_is_full_or_closed_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    learner, path = saved(tmp_path)
    content = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        learner.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="cannot be written"):
        learner.save(tmp_path / "no" / "such" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        gm.run(make("single", {}), continuum(), checkpoint=tmp_path / "file" / "folder")


# Signals and threads


def test_an_interrupt_waits_for_the_end_of_a_step():
    learner = make("gem", {})
    batches = list(continuum())
    for x, t, y in batches[:10]:
        learner.observe(x, t, y)
    learn = learner.learn

    def interrupted(x, t, y):
        signal.raise_signal(signal.SIGINT)
        return learn(x, t, y)

    other = copy.deepcopy(learner)
    learner.learn = interrupted
    x, t, y = batches[10]
    with pytest.raises(KeyboardInterrupt):
        learner.observe(x, t, y)
    other.observe(x, t, y)
    _same(other.state_dict(), learner.state_dict(), "an interrupted step was torn")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_predictions_in_other_threads_see_whole_states_only():
    learner = make("gem", {"memory": partial(gm.EpisodicMemory, 8)})
    batches = list(continuum())
    x = batches[0][0]
    known, errors = [], []
    done = threading.Event()

    def predict():
        try:
            while not done.is_set():
                known.append(learner.forward(x, "a"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    states = []
    for _ in range(3):
        for x_i, t, y in batches:
            learner.observe(x_i, t, y)
            states.append(learner.forward(x, "a"))
    done.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not errors
    assert learner.network.training
    first = make("gem", {}).forward(x, "a")
    whole = {tuple(z.flatten().tolist()) for z in [first, *states]}
    assert {tuple(z.flatten().tolist()) for z in known} <= whole


def test_learners_in_several_threads_go_the_same_way_as_alone():
    before = torch.get_rng_state()
    alone = make("gem", {})
    batches = list(continuum())
    for x, t, y in batches:
        alone.observe(x, t, y)
    learners = [make("gem", {}) for _ in range(3)]

    def train(learner):
        for x, t, y in batches:
            learner.observe(x, t, y)

    torch.set_rng_state(before)
    threads = [threading.Thread(target=train, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert torch.equal(before, torch.get_rng_state())
    for learner in learners:
        _same(alone.state_dict(), learner.state_dict(), "a learner in a thread went another way")


def test_callbacks_are_told_from_where_a_run_goes_on(tmp_path):
    told = []

    class Stops(gm.Callback):
        def on_resume(self, progress):
            told.append((progress.task, progress.examples))

        def on_task(self, progress):
            if progress.task == 1 and not told:
                raise RuntimeError("stopped")

    for _ in range(2):
        with suppress(RuntimeError):
            gm.run(make("single", {}), continuum(), callbacks=[Stops()], checkpoint=tmp_path)
    assert told == [(2, 72)]


# The command line


def command(out, learner="gem"):
    sizes = ["--tasks", "4", "--examples", "200", "--batch-size", "5"]
    options = ["--benchmark", "mnist-rotations", "--learner", learner, "--data", "sample", *sizes]
    return [
        sys.executable,
        "-m",
        "gradmem",
        "run",
        *options,
        "--save-every",
        "50",
        "--out",
        str(out),
    ]


def result_of(out):
    result = json.loads((out / "result.json").read_text())
    times = ("seconds", "seconds_training", "seconds_evaluation")
    return {key: value for key, value in result.items() if key not in times}


@pytest.mark.parametrize("learner", ["gem", "icarl"])
def test_runs_that_are_killed_at_any_moment_end_with_the_same_result(learner, tmp_path):
    """Five kills of each; attack_checkpoints.py makes a hundred over all learners."""
    subprocess.run(command(tmp_path / "whole", learner), check=True, capture_output=True)
    rng = random.Random(len(learner))
    kills = 0
    while not (tmp_path / "killed" / "result.json").exists():
        process = subprocess.Popen(
            command(tmp_path / "killed", learner), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            process.communicate(timeout=3 + rng.random() * 4 if kills < 5 else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    assert result_of(tmp_path / "killed") == result_of(tmp_path / "whole")
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left == [".lock", "config.json", "result.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(number, tmp_path):
    process = subprocess.Popen(
        command(tmp_path / "run"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "partial.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    if process.returncode:  # it may have been done before
        assert process.returncode == 128 + number
        assert said.count("goes on") == 1
        assert "Traceback" not in said
        assert "failed" not in said
        assert said.lower().count("stopped") == 1
        state = load_state(tmp_path / "run" / "checkpoint" / "checkpoint.safetensors", "a run")
        assert state["examples"] > 0
    told = {"check": True, "capture_output": True, "text": True}
    again = subprocess.run(command(tmp_path / "run"), **told).stdout
    if process.returncode:
        there = f"of 4, {state['examples']} of 800 examples"
        assert there in again.partition("goes on from its checkpoint: task ")[2]
    assert (tmp_path / "run" / "result.json").exists()


def test_two_runs_into_one_folder_do_not_mix(tmp_path):
    out = tmp_path / "run"
    processes = [
        subprocess.Popen(command(out, name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for name in ("gem", "single")
    ]
    ends = [(process.communicate()[0].decode(), process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 2], ends
    config = json.loads((out / "config.json").read_text())
    assert config["learner"] == json.loads((out / "result.json").read_text())["learner"]


def test_a_moved_file_works_elsewhere(tmp_path):
    learner, path = saved(tmp_path)
    moved = Path(shutil.move(path, tmp_path / "elsewhere"))
    other = gm.GEM(gm.mlp([4, 6, 3]), memories=4)
    other.load(moved)
    _same(learner.state_dict(), other.state_dict(), "the moved file is another")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_state_fits_whatever_way_the_optimizer_computes_its_step(optimizer, tmp_path):
    """As between a CPU and a GPU, where steps are fused."""
    ways = ({"fused": True}, {"foreach": False})
    one, other = (
        gm.GEM(gm.mlp([4, 6, 3]), optimizer=partial(optimizer, lr=0.1, **way), memories=4)
        for way in ways
    )
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for first, second in ((one, other), (other, one)):
        first.observe(x, "a", y)
        first.save(tmp_path / "state")
        second.load(tmp_path / "state")
        assert second.observe(x, "b", y).isfinite()
