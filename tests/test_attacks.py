"""Short forms of the recorded attacks, and a test for each fault that they found."""

import copy
import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import gradmem as gm
from gradmem.checkpoint import CheckpointError
from gradmem.checks import _same
from gradmem.learners import LEARNERS
from gradmem.projection.dual import least_distance
from tests import attack_checkpoints, attack_projections, attack_scripts

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def examples(seed=0, n=8, classes=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(classes, (n,), generator=generator)


# Projections


def test_ten_thousand_projections_keep_within_the_stated_bounds():
    summary = attack_projections.Summary()
    for found in attack_projections.attacks(10_000, most_numbers=1_000):
        summary.add(found)
    assert not summary.outside, str(summary)
    assert summary.projected > 5_000


def test_a_margin_far_larger_than_g_does_not_overflow():
    """The shares of g and of the margin in g̃ may be 1e27 apart, in single precision too."""
    rng = np.random.default_rng(0)
    G = torch.from_numpy(1e12 * rng.standard_normal((30, 40))).float()
    g = torch.from_numpy(1e-15 * rng.standard_normal(40)).float()
    g_tilde = gm.project(g, G, 0.5, "floor").double()
    along = G.double() @ g_tilde
    assert bool((along >= -1e-5 * G.double().norm(dim=1) * g_tilde.norm()).all())


@pytest.mark.parametrize("seed", range(40))
def test_columns_that_depend_on_each_other_do_not_mislead_the_least_distance(seed):
    rng = np.random.default_rng(seed)
    R = rng.standard_normal((rng.integers(2, 20), 60)) * (rng.random((1, 60)) < 0.8)
    R = R[:, rng.integers(25, size=60)] + 10.0 ** -rng.integers(8, 17) * R
    lengths = np.linalg.norm(R, axis=0)
    R /= np.where(lengths > 0, lengths, 1)
    d = rng.standard_normal(len(R)) - R.sum(1)
    v, _ = least_distance(R, d)
    left, size = R @ v + d, np.linalg.norm(d) + v.sum()
    assert (v >= 0).all()
    assert (R.T @ left).min() >= -1e-12 * size
    assert abs(v @ (R.T @ left)) <= 1e-12 * size * max(1, v.sum())


# Scripts


def test_a_hundred_scripts_end_with_documented_errors_and_unchanged_states():
    failures = [failure for i in range(100) if (failure := attack_scripts.attack(i)[1])]
    assert not failures, failures[0]


@pytest.mark.parametrize("name", [name for name in LEARNERS if LEARNERS[name].one_network])
def test_a_network_that_has_grown_goes_on_in_a_fresh_learner(name, tmp_path):
    def make():
        return LEARNERS[name](gm.mlp([4, 8, 2], seed=1), grow=True, optimizer=ADAMW)

    learner, fresh = make(), make()
    start = learner.state_dict()
    for i, classes in enumerate((2, 2, 4, 6)):
        learner.observe(*_with_task(examples(i, classes=classes), i))
    learner.save(tmp_path / "learner")
    fresh.load(tmp_path / "learner")
    for one in (learner, fresh):
        one.observe(*_with_task(examples(9, classes=7), "last"))
    _same(learner.state_dict(), fresh.state_dict(), "the fresh learner went another way")
    learner.load_state_dict(start)  # fewer outputs again
    _same(start, learner.state_dict(), "an earlier state was not taken over")
    assert learner.predict(examples()[0], 0).max() < 2


def _with_task(batch, t):
    return batch[0], t, batch[1]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("optimizer", "state", 0, "exp_avg"), "text"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(2)),
        (("optimizer", "param_groups", 0, "lr"), torch.zeros(2)),
        (("optimizer", "param_groups", 0, "lr"), float("nan")),
        (("optimizer", "param_groups", 0, "betas"), 0.9),
        (("schedule", "gamma"), "text"),
        (("schedule", "_last_lr"), []),
    ],
)
def test_an_optimizer_state_that_would_fail_later_is_refused_when_it_is_loaded(where, value):
    learner = gm.Single(
        gm.mlp([4, 6, 3]), optimizer=ADAMW, schedule=partial(ExponentialLR, gamma=0.9)
    )
    for seed in range(3):
        learner.observe(*_with_task(examples(seed), 0))
    before = learner.state_dict()
    spoiled = copy.deepcopy(before)
    place = spoiled["optimizer"]
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(ValueError, match="the state does not fit this learner"):
        learner.load_state_dict(spoiled)
    _same(before, learner.state_dict(), "a spoiled state changed the learner")


def test_a_schedule_that_is_at_its_end_is_loaded():
    def make():
        schedule = partial(OneCycleLR, max_lr=0.1, total_steps=3)
        return gm.Single(gm.mlp([4, 6, 3], seed=1), schedule=schedule)

    learner, other = make(), make()
    for seed in range(2):
        learner.observe(*_with_task(examples(seed), 0))
    other.load_state_dict(learner.state_dict())
    _same(learner.state_dict(), other.state_dict(), "the schedule is elsewhere")


@pytest.mark.parametrize("name", ["independent", "multimodal"])
def test_loading_again_and_again_keeps_no_schedules_of_earlier_optimizers(name):
    learner = LEARNERS[name](gm.mlp([4, 6, 3]), schedule=partial(ExponentialLR, gamma=0.9))
    for t in "ab":
        learner.observe(*_with_task(examples(), t))
    kept = len(learner._schedules)
    for _ in range(3):
        learner.load_state_dict(learner.state_dict())
    assert len(learner._schedules) == kept


# A loop of one's own


def test_a_loop_of_ones_own_that_is_killed_goes_on_bit_for_bit(capsys):
    """Three kills; attack_checkpoints.py makes a hundred."""
    attack_checkpoints.loop(3, steps=100)
    assert "3 kills" in capsys.readouterr().out


def parts():
    model = gm.mlp([4, 6, 3], seed=1)
    memory = gm.GradientMemory(model, memories=5)
    return model, ADAMW(model.parameters()), memory


def test_model_optimizer_and_memory_are_saved_and_loaded_in_one_file(tmp_path):
    model, optimizer, memory = parts()
    for t in "ab":
        x, y = examples()
        nn.functional.cross_entropy(model(x), y).backward()
        memory.step(optimizer, t)
        memory.add(x, t, y)
    path = tmp_path / "loop"
    memory.save(path, model=model, optimizer=optimizer, step=2, seen=["a", ("b", 1.5)])
    other_model, other_optimizer, other = parts()
    rest = other.load(path, model=other_model, optimizer=other_optimizer)
    assert rest == {"step": 2, "seen": ["a", ("b", 1.5)]}
    for one, loaded in ((model, other_model), (optimizer, other_optimizer), (memory, other)):
        _same(dict(one.state_dict()), dict(loaded.state_dict()), "something else was loaded")
    assert set(other.load(path)) == {"model", "optimizer", "step", "seen"}


def test_a_file_that_does_not_fit_changes_neither_model_nor_optimizer_nor_memory(tmp_path):
    model, optimizer, memory = parts()
    memory.add(*_with_task(examples(), "a"))
    path = tmp_path / "loop"
    memory.save(path, model=model, optimizer=optimizer, step=2)
    wider = gm.mlp([4, 6, 5])
    others = (wider, ADAMW(wider.parameters()), gm.GradientMemory(model, memories=7))
    before = copy.deepcopy([dict(one.state_dict()) for one in others])
    wide, its_optimizer, other = others
    for given, error, message in (
        ({"model": wide}, ValueError, "loop does not fit: .*size mismatch"),
        ({"optimizer": its_optimizer}, ValueError, "does not fit: .*memories, budget and keep"),
        ({"schedule": its_optimizer}, CheckpointError, "holds no 'schedule' .* but model, opt"),
        ({"step": 3}, TypeError, "step must have load_state_dict, got int"),
    ):
        with pytest.raises(error, match=f"(?s){message}"):
            other.load(path, **given)
    after = [dict(one.state_dict()) for one in others]
    _same(before, after, "a file that does not fit changed something")
    with pytest.raises(CheckpointError, match=r"\['rate'\] cannot be saved: function"):
        memory.save(path, rate=examples)
    with pytest.raises(ValueError, match="the state does not fit this memory"):
        memory.load_state_dict({"memory": None})
    assert memory.load(path)["step"] == 2


# Load


def objects():
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("steps", [attack_checkpoints.gem_steps, attack_checkpoints.memory_steps])
def test_observing_and_saving_leave_nothing_behind(steps, tmp_path):
    """A short one; attack_checkpoints.py observes a million examples."""
    going = steps(1_000_000)

    def some():
        for _ in range(100):
            examples_so_far, save = next(going)
            if examples_so_far % 200 == 0:
                save(tmp_path / "saved")

    some()
    before = objects()
    some()
    assert objects() - before < 50  # less than one for two steps
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


class Descriptor:
    """Any hashable value may be one."""


@pytest.mark.parametrize("own_outputs", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_predicting_for_unseen_tasks_leaves_nothing_behind(name, own_outputs):
    """Ten thousand of them in all."""
    learner = LEARNERS[name](gm.mlp([4, 6, 3]))
    if own_outputs:
        learner.outputs = {"a": (0, 1, 2)}
    x, y = examples()
    learner.observe(x, "a", y)
    descriptors = weakref.WeakSet()
    for _ in range(720):
        descriptors.add(t := Descriptor())
        learner.predict(x, t)
    del t
    gc.collect()
    assert not descriptors


@pytest.mark.parametrize("name", LEARNERS)
def test_saves_and_predictions_in_other_threads_change_nothing(name, tmp_path):
    def make():
        return LEARNERS[name](gm.mlp([4, 8, 3], seed=1), lr=0.01)

    learner, alone = make(), make()
    learner.observe(*_with_task(examples(), "a"))
    done, errors = threading.Event(), []

    def disturb(number):
        try:
            while not done.is_set():
                learner.predict(examples()[0], "a")
                learner.save(tmp_path / str(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=disturb, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(20):
        learner.observe(*_with_task(examples(seed), "abc"[seed % 3]))
    done.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    alone.observe(*_with_task(examples(), "a"))
    for seed in range(20):
        alone.observe(*_with_task(examples(seed), "abc"[seed % 3]))
    _same(alone.state_dict(), learner.state_dict(), "threads led elsewhere")
    for number in range(2):
        make().load(tmp_path / str(number))  # a whole state, of some step
