"""Streams without task labels, what finds their tasks, and batches of several tasks."""

import copy
import json
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradmem as gm
from gradmem.checkpoint import CheckpointError
from gradmem.checks import _same
from gradmem.learners import InferredTask
from gradmem.reports import page, summarize
from gradmem.reports.pictures import first_task
from gradmem.reports.pictures.first_task import draw_first_task
from gradmem.reports.styles import styles
from gradmem.runs.read_folder import find_runs, read_run


class Above:
    """A detector with the interface of river's: a change is a value above a limit."""

    def __init__(self, limit):
        self.limit = limit
        self.seen = []
        self.drift_detected = False

    def update(self, x):
        self.seen.append(x)
        self.drift_detected = x > self.limit


class Opaque(Above):
    """One whose state is not made of plain numbers."""

    def __init__(self, limit):
        super().__init__(limit)
        self.helper = np.zeros(3)


def network(seed=0):
    return gm.mlp([4, 8, 3], seed=seed)


def learner(boundaries=None, kind=gm.GEM, seed=0, **settings):
    return kind(network(seed), boundaries=boundaries, **settings)


def batch(n=6, seed=0, y=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(3, (n,), generator=generator) if y is None else torch.full((n,), y)


def observe(learner, batches, n=6):
    for seed in batches:
        x, y = batch(n, seed)
        learner.observe(x, y=y)
    return learner


# Every


def test_without_boundaries_a_descriptor_is_needed():
    with pytest.raises(TypeError, match=r"got None: without t.*GEM\(network, boundaries=gm.Every"):
        observe(learner(), [0])


def test_without_y_nothing_is_learned():
    with pytest.raises(TypeError, match=r"y is missing: observe\(x, t, y\), or observe\(x, y=y\)"):
        learner(gm.Every(10)).observe(batch()[0])


def test_a_batch_is_of_one_task_and_the_count_goes_on_over_it():
    found = observe(learner(gm.Every(10)), range(6)).tasks
    # Batches begin at 0, 6 | 12, 18 | 24 | 30.
    assert found == [
        InferredTask(0, 0, 12),
        InferredTask(1, 12, 12),
        InferredTask(2, 24, 6),
        InferredTask(3, 30, 6),
    ]


def test_a_batch_larger_than_a_task_is_a_task():
    assert [task.t for task in observe(learner(gm.Every(2)), range(3)).tasks] == [0, 1, 2]


def test_a_descriptor_that_is_given_is_used_and_the_boundaries_are_not_asked():
    one = observe(learner(gm.Every(12)), range(2))
    x, y = batch()
    one.observe(x, "named", y)
    assert list(one.memory) == [0, "named"]
    assert one.tasks == [InferredTask(0, 0, 12)]


@pytest.mark.parametrize("wrong", [1000, "every", gm.Every, object()])
def test_boundaries_are_every_or_a_detector(wrong):
    with pytest.raises(TypeError, match=r"boundaries must be gm\.Every"):
        learner(wrong)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        gm.Every(0)


def test_boundaries_cannot_be_changed_once_they_have_found_tasks():
    one = observe(learner(gm.Every(6)), range(2))
    with pytest.raises(ValueError, match="boundaries cannot be changed after 2 tasks"):
        one.boundaries = gm.Every(7)


def test_a_stream_may_hold_pairs():
    pairs = [batch(seed=seed) for seed in range(4)]
    assert len(learner(gm.Every(12)).learn_from(pairs).tasks) == 2
    with pytest.raises(TypeError, match=r"triplets \(x, t, y\), got 2 items"):
        learner().learn_from(pairs, progress=False)


def test_threads_can_observe_together():
    one = learner(gm.Every(12), gm.Single)
    threads = [Thread(target=observe, args=(one, range(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [task.examples for task in one.tasks] == [12] * 20


# Detectors


def test_a_detector_is_given_the_loss_before_the_batch_is_learned_in_evaluation_mode():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    given = Above(1e9)
    one = gm.Single(net, boundaries=given)
    expected = []
    for seed in range(3):
        x, y = batch(seed=seed)
        with torch.no_grad():
            expected.append(cross_entropy(copy.deepcopy(net).eval()(x), y).item())
        one.observe(x, y=y)
        assert net.training
    assert one.boundaries.seen == pytest.approx(expected)
    assert given.seen == []  # the learner has a copy


def test_asking_a_detector_changes_nothing_that_is_learned():
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    asked, told = gm.GEM(nets[0], boundaries=Above(1e9)), gm.GEM(nets[1])
    observe(asked, range(4))
    for seed in range(4):
        x, y = batch(seed=seed)
        told.observe(x, 0, y)
    state = asked.state_dict()
    state.pop("boundaries")
    _same(told.state_dict(), state, "the loss before changed something")


def test_the_batch_in_which_a_change_is_detected_begins_a_task():
    one = learner(Above(3.0))
    for size in (0.1, 0.1, 50.0, 0.1):  # inputs that raise the loss
        x, y = batch()
        one.observe(size * x, y=y)
    assert one.tasks == [InferredTask(0, 0, 12), InferredTask(1, 12, 12)]
    assert list(one.memory) == [0, 1]


@pytest.mark.parametrize("not_finite", ["stop", "skip"])
def test_a_batch_that_is_not_learned_leaves_no_trace(not_finite):
    one = learner(Above(1e9), not_finite=not_finite)
    observe(one, range(2))
    before = one.state_dict()
    x, y = batch()
    huge = torch.full_like(x, 3e38)
    if not_finite == "stop":
        with pytest.raises(FloatingPointError):
            one.observe(huge, y=y)
    else:
        assert one.observe(huge, y=y) is None
        before |= {"skipped": 1}
    _same(before, one.state_dict(), "something was learned")


def test_a_class_without_an_output_yet_is_no_loss():
    one = learner(Above(1e9), grow=True)
    for y in (0, 5, 5):
        one.observe(batch()[0], y=batch(y=y)[1])
    assert len(one.boundaries.seen) == 2
    assert one.network[-1].out_features == 6


# The detector of one's own


def noise(n, seed, mean=1.0, spread=0.3):
    return mean + spread * np.random.default_rng(seed).standard_normal(n)


def detected(detector, values):
    found = []
    for i, value in enumerate(values):
        detector.update(float(value))
        if detector.drift_detected:
            found.append(i)
    return found


def test_a_jump_is_detected_soon_and_noise_is_not():
    for seed in range(5):
        values = [*noise(200, seed), *noise(200, seed + 50, 2.5), *noise(200, seed + 90, 4.0)]
        found = detected(gm.RisingLoss(), values)
        assert len(found) == 2
        assert 200 <= found[0] < 206
        assert 400 <= found[1] < 406


def test_the_unit_of_the_loss_does_not_matter():
    values = np.array([*noise(100, 0), *noise(100, 1, 3.0)])
    assert detected(gm.RisingLoss(), values) == detected(gm.RisingLoss(), 1024 * values - 4096)


def test_one_outlier_and_a_falling_loss_are_no_change():
    values = noise(200, 0) * np.linspace(3, 1, 200)
    values[150] = 1000.0
    assert detected(gm.RisingLoss(), values) == []


def test_a_larger_threshold_detects_later():
    values = [*noise(100, 0), *noise(100, 1, 2.0)]
    early, late = (detected(gm.RisingLoss(threshold=h), values)[0] for h in (8, 16))
    assert 100 <= early < late


def test_a_stream_that_never_jumps_can_be_cut_all_the_same():
    values = [*noise(50, 0), *noise(50, 1, 4.0)]
    assert detected(gm.RisingLoss(longest=20), values)[:2] == [20, 40]
    first, second, *_ = detected(gm.RisingLoss(longest=45), values)
    assert first == 45
    assert 50 <= second < 55  # a jump is seen soon after a cut


@pytest.mark.parametrize("wrong", [{"threshold": 0}, {"slack": -1}, {"window": 0}, {"longest": 0}])
def test_settings_of_the_detector_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        gm.RisingLoss(**wrong)


# States


@pytest.mark.parametrize("rule", [gm.Every(15), gm.RisingLoss(window=3, threshold=1), Above(1.3)])
def test_a_saved_learner_goes_on_bit_for_bit(tmp_path, rule):
    one = observe(learner(rule), range(8))
    one.save(tmp_path / "learner")
    other = learner(rule, seed=5)
    other.load(tmp_path / "learner")
    assert other.tasks == one.tasks
    for each in (one, other):
        observe(each, range(8, 24))
    assert len(one.tasks) > 1
    _same(one.state_dict(), other.state_dict(), "a restored learner went another way")


def test_a_detector_that_is_not_made_of_numbers_is_copied_but_not_written(tmp_path):
    one, other = learner(Opaque(1.3)), learner(Opaque(1.3), seed=5)
    other.load_state_dict(observe(one, range(4)).state_dict())
    assert other.boundaries.seen == one.boundaries.seen
    observe(other, [9])
    assert len(one.boundaries.seen) == 4
    with pytest.raises(CheckpointError, match=r"\['boundaries'\]\['detector'\].*saved: Opaque"):
        one.save(tmp_path / "learner")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, r"boundaries must be Every\(n=12\) as when the state was saved, got None"),
        (gm.Every(13), r"must be Every\(n=12\) .* got Every\(n=13\)"),
        (Above(1), r"must be Every\(n=12\) .* got Above"),
    ],
)
def test_a_state_of_other_boundaries_is_refused(other, message):
    state = observe(learner(gm.Every(12)), range(3)).state_dict()
    one = learner(other)
    before = one.state_dict()
    with pytest.raises(ValueError, match=message):
        one.load_state_dict(state)
    _same(before, one.state_dict(), "it was changed")


# Runs


def continuum(**changes):
    tasks = []
    for t in range(3):
        x, y = batch(24, seed=t)
        tasks.append(gm.Task(f"task {t}", (x, y), (x, y), **changes))
    return gm.Continuum(tasks, batch_size=6)


class Blind(gm.Single):
    """Would notice if it were told a task."""

    def observe(self, x, t=None, y=None, *, check=True):
        assert t is None
        return super().observe(x, t, y, check=check)

    def predict(self, x, t=None, *, check=True):
        assert t is None
        return super().predict(x, t, check=check)


def test_a_run_withholds_the_labels():
    result = gm.run(Blind(network(), boundaries=gm.Every(24)), continuum())
    assert result.statistics["boundaries"] == [0, 24, 48]
    assert result.config["settings"]["boundaries"] == "Every(n=24)"
    told = gm.run(gm.Single(network()), continuum())
    assert np.array_equal(result.R, told.R)
    assert "boundaries" not in told.statistics


def test_what_must_be_told_the_task_is_refused_before_a_run():
    with pytest.raises(ValueError, match=r"Independent with boundaries.*predicts per task"):
        gm.run(learner(gm.Every(24), gm.Independent), continuum())
    with pytest.raises(ValueError, match=r"GEM with boundaries.*outputs of their own"):
        gm.run(learner(gm.Every(24)), continuum(classes=[0, 1, 2]))


def test_a_run_that_was_stopped_finds_the_same_tasks(tmp_path, one_thread):
    class Stop(gm.Callback):
        def on_batch(self, progress):
            if progress.examples == 42:
                raise KeyboardInterrupt

    def run(folder, callbacks=()):
        one = learner(gm.RisingLoss(window=2, threshold=0.5))
        result = gm.run(one, continuum(), checkpoint=folder, save_every=6, callbacks=callbacks)
        return one, result

    whole, expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", [Stop()])
    again, result = run(tmp_path / "stopped")
    assert len(whole.tasks) > 1
    assert result.statistics["boundaries"] == expected.statistics["boundaries"]
    _same(whole.state_dict(), again.state_dict(), "it went another way")


def test_reports_draw_where_tasks_were_found(tmp_path, monkeypatch):
    for name, rule in (("told", None), ("found", gm.Every(24))):
        result = gm.run(learner(rule), continuum())
        result.save(tmp_path / name, benchmark="three", learner=name, seed=0)
    rows = summarize(find_runs([tmp_path]))
    assert {row.learner: row.boundaries for row in rows} == {"told": [], "found": [24, 48]}
    data = page.page_data(rows)
    assert sorted(run["boundaries"] for run in data["runs"]) == [[], [24, 48]]
    drawn = []
    monkeypatch.setattr(first_task, "save", lambda figure, *_: drawn.append(figure) or [])
    draw_first_task("three", rows, tmp_path, styles(row.learner for row in rows))
    lines = [line.get_xdata() for line in drawn[0].axes[0].lines]
    assert [list(x) for x in lines if len(x) == 2 and x[0] == x[1]] == [[24, 24], [48, 48]]


def test_boundaries_that_are_no_numbers_are_refused(tmp_path):
    gm.run(learner(gm.Every(24)), continuum()).save(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boundaries": ["x"]}))
    with pytest.raises(ValueError, match="no numbers for boundaries"):
        read_run(tmp_path / "run")


# Mixed batches


@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
def test_a_descriptor_per_example_may_be_a_list_a_tensor_or_an_array(make):
    x, y = batch()
    one = learner()
    one.observe(x, make([1, 0, 1, 1, 0, 1]), y)
    assert list(one.memory) == [1, 0]
    assert torch.equal(one.memory[0][0], x[[1, 4]])
    assert (one.steps, one.examples) == (2, 6)
    assert torch.equal(one.predict(x, make([1, 0, 1, 1, 0, 1])), one.predict(x))


def test_a_tuple_is_one_descriptor():
    x, y = batch()
    one = learner()
    one.observe(x, (1, 0, 1, 1, 0, 1), y)
    assert list(one.memory) == [(1, 0, 1, 1, 0, 1)]


def test_predictions_of_a_mixed_batch_are_masked_by_each_examples_task():
    x, y = batch()
    one = learner()
    one.outputs = {"low": (0,), "high": (1, 2)}
    one.observe(x, ["low" if label == 0 else "high" for label in y], y)
    assert torch.equal(one.predict(x, ["low", "high"] * 3) == 0, torch.tensor([True, False] * 3))
    assert torch.equal(one.forward(x, ["low", "high"] * 3), one.forward(x, "low"))


def test_networks_of_their_own_predict_their_own_examples():
    x, y = batch()
    one = learner(kind=gm.Independent)
    one.observe(x, list("ababab"), y)
    assert torch.equal(one.forward(x, list("ababab"))[1::2], one.forward(x[1::2], "b"))


def test_all_examples_are_checked_before_the_first_step():
    x, y = batch()
    one = learner()
    one.observe(x, "a", y)
    before = one.state_dict()
    for t, labels, message in (
        (["a"] * 5, y, "one per example: 6, got"),
        (["a"] * 5 + [None], y, "must be a task descriptor, got None"),
        (list("aaaaab"), torch.tensor([0, 0, 0, 0, 0, 3]), "classes from 0 to 2, got 3"),
        (list("aaaaab"), y[:5], "6 inputs and 5 labels"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            one.observe(x, t, labels)
        _same(before, one.state_dict(), "something was learned")


def test_a_gradient_memory_takes_a_descriptor_per_example():
    x, y = batch()
    mixed, apart = (gm.GradientMemory(network()) for _ in range(2))
    mixed.add(x, list("abbaba"), y)
    for t, places in (("a", [0, 3, 5]), ("b", [1, 2, 4])):
        apart.add(x[places], t, y[places])
    _same(apart.state_dict(), mixed.state_dict(), "something else is remembered")
    with pytest.raises(TypeError, match="descriptor, got None"):
        mixed.add(x, [*"abbab", None], y)
    _same(apart.state_dict(), mixed.state_dict(), "a part was remembered")
