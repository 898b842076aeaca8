"""A sweep as data: what is run, under which key, on which data, and how settings are chosen."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gradmem as gm
from gradmem.benchmarks import BENCHMARKS
from gradmem.published import grids
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import find_runs
from gradmem.sweeps import (
    InTurn,
    Standings,
    Store,
    Sweep,
    run_sweep,
    select,
)

from .sweeps import (
    TINY,
    events,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# The plan ------------------------------------------------------------------------------------


def test_the_papers_grids_have_the_published_sizes_and_hold_the_best_values():
    def size(grid):
        return int(np.prod([len(values) for values in grid.values()]))

    sizes = {b: {name: size(grid) for name, grid in found.items()} for b, found in grids().items()}
    mnist = {"single": 7, "independent": 14, "multimodal": 7, "ewc": 70, "gem": 77}
    assert sizes["mnist-rotations"] == sizes["mnist-permutations"] == mnist
    assert sum(mnist.values()) == 175
    assert sizes["cifar100-incremental"]["icarl"] == 7 * 6 * 4
    for benchmark in ("mnist-rotations", "mnist-permutations"):
        for learner, grid in grids()[benchmark].items():
            for name, values in grid.items():
                assert BENCHMARKS[benchmark].settings[learner][name] in values, (
                    benchmark,
                    learner,
                    name,
                )


def test_a_sweep_is_every_setting_with_every_seed_and_goes_through_json():
    grid = {"lr": [0.1, 0.3], "margin": [0.0, 0.5, 1.0]}
    sweep = tiny(grids={"mnist-rotations": {"gem": grid}}, seeds=(0, 1))
    runs = [(e.settings["lr"], e.settings["margin"], e.seed) for e in sweep.experiments()]
    assert len(runs) == len(set(runs)) == 12
    assert {e.settings["memories"] for e in sweep.experiments()} == {256}  # the recipe's
    again = Sweep.from_json(json.loads(json.dumps(sweep.to_json())))
    assert again == sweep
    assert again.experiments() == sweep.experiments()


def test_seeds_follow_each_other_on_a_gpu_and_settings_elsewhere(monkeypatch):
    sweep = tiny(seeds=(0, 1))
    assert [(e.settings["lr"], e.seed) for e in sweep.experiments()] == [
        (0.01, 0),
        (0.1, 0),
        (0.01, 1),
        (0.1, 1),
    ]
    monkeypatch.setattr(Sweep, "device", "cuda")
    assert [(e.settings["lr"], e.seed) for e in sweep.experiments()] == [
        (0.01, 0),
        (0.01, 1),
        (0.1, 0),
        (0.1, 1),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grids": {}}, "grids must be benchmark"),
        ({"grids": {"mnist": {"gem": {}}}}, "benchmark must be one of .*; got 'mnist'"),
        ({"grids": {"mnist-rotations": {"gme": {}}}}, "learner must be one of .*; got 'gme'"),
        ({"grids": {"mnist-rotations": {"single": {"margin": [1]}}}}, "a setting of single must"),
        ({"grids": {"mnist-rotations": {"single": {"lr": 0.1}}}}, "list of values to try, got 0.1"),
        (
            {"grids": {"mnist-rotations": {"single": {"lr": []}}}},
            r"list of values to try, got \[\]",
        ),
        ({"seeds": ()}, "seeds must be different numbers"),
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"select": "test"}, "select must be one of validation, first-tasks, test-as-published"),
        ({"held_out": 1.0}, "held_out must be below 1"),
        ({"common": {"seed": 3}}, "a field in common must be one of n_tasks, examples"),
    ],
)
def test_a_wrong_sweep_is_refused_when_it_is_made(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_final_seeds_are_never_those_to_choose_with(tmp_path):
    assert tiny(seeds=(1000, 1002)).final_seeds == (1001, 1003)
    with pytest.raises(ValueError, match="final_seeds must be others than the seeds to choose"):
        run_sweep(tmp_path / "s", tiny(final_seeds=(5, 0)), InTurn())
    assert not (tmp_path / "s").exists()


def test_a_sweep_is_extended_by_lists_and_with_the_same_common_fields(tmp_path):
    one = tiny(
        grids={"mnist-rotations": {"single": {"average": [[0.9, 0.99], None]}}},
        common=TINY | {"data": Path("sample")},
    )
    again = Sweep.from_json(json.loads(json.dumps(one.to_json())))
    both = again.extended(one)
    assert both.grids["mnist-rotations"]["single"]["average"] == [[0.9, 0.99], None]
    assert both.common["data"] == "sample"
    twice = (
        {"mnist-rotations": {"single": {"lr": [1.0]}}},
        {"mnist-rotations": {"single": {"lr": [1]}}},
    )
    whole, equal = (tiny(grids=grids) for grids in twice)
    assert whole.extended(equal).grids == whole.grids


def test_a_sweep_of_old_with_seeds_used_twice_can_be_read():
    written = tiny(seeds=(0, 1), final_seeds=(0, 1)).to_json()
    assert Sweep.from_json(written).used_twice == {0, 1}


def test_a_wrong_value_is_found_before_a_folder_is_made(tmp_path):
    sweep = tiny(grids={"mnist-rotations": {"single": {"lr": [0.1, -1]}}})
    with pytest.raises(ValueError, match="lr must be above 0, got -1"):
        run_sweep(tmp_path / "s", sweep, InTurn())
    with pytest.raises(gm.DataError):
        run_sweep(tmp_path / "s", tiny(common=TINY | {"data": str(tmp_path)}), InTurn())
    assert not (tmp_path / "s").exists()


# Keys ----------------------------------------------------------------------------------------


def test_a_key_changes_with_whatever_changes_the_numbers():
    def key(**changes):
        asked = {"benchmark": "mnist-rotations", "learner": "single"} | TINY | changes
        return Experiment(**asked).key

    keys = [
        key(),
        key(seed=1),
        key(settings={"lr": 1}),
        key(n_tasks=3),
        key(examples_per_task=41),
        key(batch_size=5),
        key(epochs=2),
        key(order="random"),
        key(shuffled=True),
        key(every=10),
        key(held_out=0.1),
        key(first_tasks=1),
        key(device="meta"),
        key(learner="gem"),
        key(benchmark="mnist-permutations"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(settings={"lr": 1}) == key(settings={"lr": 1.0})


def test_a_key_knows_the_data_by_what_they_are_not_by_where_they_lie(tmp_path):
    from gradmem.data.mnist import FILES, load_mnist
    from tests.test_data import idx, write

    def lay(folder, images):
        parts = {name: getattr(images, name).numpy().astype(np.uint8) for name in FILES}
        write(folder, {FILES[n].name: idx(part.shape, part.tobytes()) for n, part in parts.items()})

    images = load_mnist("sample")
    other = replace(images, test_y=images.test_y.roll(1))
    for name, some in (("here", images), ("there", images), ("other", other)):
        lay(tmp_path / name, some)

    def key(data):
        return Experiment("mnist-rotations", "single", **(TINY | {"data": str(data)})).key

    assert key("sample") == key(tmp_path / "here") == key(tmp_path / "there")
    assert key("sample") != key(tmp_path / "other")


def test_a_new_version_of_gradmem_makes_runs_anew(monkeypatch):
    before = Experiment("mnist-rotations", "single", **TINY).key
    monkeypatch.setattr("gradmem.runs.experiment.__version__", "99")
    assert Experiment("mnist-rotations", "single", **TINY).key != before


# Held-out data -------------------------------------------------------------------------------


def numbered(n_tasks=3, n=20):
    """Tasks whose examples are all different numbers; test examples are negative."""
    tasks = []
    for t in range(n_tasks):
        x = torch.arange(n)[:, None].float() + 100 * t
        tasks.append(gm.Task(t, (x, torch.arange(n) % 2), (-1 - x, torch.arange(n) % 2)))
    return gm.Continuum(tasks, seed=3)


def values(examples):
    return {int(v) for v in examples.x[:, 0]}


def test_held_out_examples_are_tested_on_and_not_trained_on():
    continuum = numbered()
    chosen_on = continuum.held_out(0.25)
    for whole, rest in zip(continuum.tasks, chosen_on.tasks, strict=True):
        held = values(chosen_on.tests[whole.t])
        assert len(held) == 5
        assert values(rest.train) | held == values(whole.train)
        assert values(rest.train) & held == set()
        assert rest.test is chosen_on.tests[whole.t]
    streamed = {int(v) for x, _, _ in chosen_on for v in x[:, 0]}
    assert len(streamed) == 45
    assert min(streamed) >= 0  # no test example, as all of those are negative
    assert all(min(values(test)) >= 0 for test in chosen_on.tests.values())
    assert [len(task.train) for task in continuum.tasks] == [20] * 3  # it is another continuum


def test_what_is_held_out_depends_on_the_seed_and_the_task_alone():
    continuum = numbered()
    held = {t: values(test) for t, test in continuum.held_out(0.25).tests.items()}
    assert held == {t: values(test) for t, test in continuum.held_out(0.25).tests.items()}
    later = continuum[1:].held_out(0.25)
    assert {t: values(test) for t, test in later.tests.items()} == {t: held[t] for t in (1, 2)}
    other = continuum.held_out(0.25, seed=4)
    assert {t: values(test) for t, test in other.tests.items()} != held
    assert {v - 100 for v in held[1]} != held[0]  # each task its own


def test_at_least_one_example_is_held_out_and_one_left():
    assert len(numbered().held_out(0.001).tests[0]) == 1
    with pytest.raises(ValueError, match=r"too few to hold out 0\.99"):
        numbered().held_out(0.99)
    for wrong in (0, 1, -0.5):
        with pytest.raises(ValueError, match="fraction must be"):
            numbered().held_out(wrong)


def test_a_task_that_comes_back_is_tested_on_what_all_its_visits_lose():
    continuum = numbered(2)
    first, second = continuum.tasks
    again = gm.Task(0, (first.train.x + 50, first.train.y), first.test)
    chosen_on = gm.Continuum([first, second, again]).held_out(0.25)
    held = values(chosen_on.tests[0])
    assert len(held) == 10
    assert not held & (values(chosen_on.tasks[0].train) | values(chosen_on.tasks[2].train))
    assert gm.run(gm.Single(gm.mlp([1, 4, 2])), chosen_on).R.shape == (3, 2)


@pytest.mark.parametrize("settings", [{"average": None}, {"average": 0.9, "lr": 0.3}, {}])
def test_another_process_has_the_same_settings(settings):
    """Also those that are None."""
    here = Experiment("mnist-rotations", "steadygem", settings, **TINY)
    there = pickle.loads(pickle.dumps(here))
    assert there.settings == here.settings
    assert there.key == here.key


def test_an_experiment_without_held_out_data_has_the_config_it_always_had():
    plain = Experiment("mnist-rotations", "single", **TINY)
    assert not {"held_out", "first_tasks"} & set(plain.config())
    assert Experiment(**plain.config()) == plain
    chosen_on = plain.changed(held_out=0.25, first_tasks=1)
    assert Experiment(**chosen_on.config()) == chosen_on
    assert chosen_on.run().R.shape == (1, 1)
    assert len(chosen_on.continuum().tests[0]) == 10


# Choosing ------------------------------------------------------------------------------------


def standing(*runs):
    standings = Standings()
    for settings, seed, acc in runs:
        learner = "gem" if "margin" in settings else "single"
        standings.add(Experiment("mnist-rotations", learner, settings, seed=seed), acc)
    return standings


def test_the_best_settings_have_the_best_mean_over_seeds():
    standings = standing(
        ({"lr": 0.1}, 0, 0.9), ({"lr": 0.1}, 1, 0.1), ({"lr": 0.3}, 0, 0.6), ({"lr": 0.3}, 1, 0.5)
    )
    (choice,) = standings.best()
    assert choice.settings == {"lr": 0.3}
    assert choice.acc == 0.55
    assert (choice.seeds, choice.considered, choice.failed) == (2, 2, 0)


def test_ties_go_to_smaller_values_whatever_the_order():
    runs = [({"lr": lr, "margin": m}, 0, 0.5) for lr in (0.3, 0.1) for m in (1.0, 0.5)]
    for some in (runs, runs[::-1]):
        settings = standing(*some).best()[0].settings
        assert (settings["lr"], settings["margin"]) == (0.1, 0.5)


def test_a_setting_with_a_failed_seed_is_out_and_an_unfinished_one_waits():
    standings = standing(
        ({"lr": 0.1}, 0, 0.9), ({"lr": 0.1}, 1, None), ({"lr": 0.3}, 0, 0.8), ({"lr": 1}, 0, 0.1),
        ({"lr": 1}, 1, 0.1),
    )  # fmt: skip
    assert standings.best()[0].settings == {"lr": 0.3}
    assert standings.best(seeds=2)[0].settings == {"lr": 1}


def test_settings_are_chosen_on_data_that_are_not_reported(tmp_path):
    for mode in ("validation", "first-tasks"):
        done = run_sweep(tmp_path / mode, tiny(select=mode, first_tasks=1), InTurn())
        chosen_on = [run for run in find_runs([tmp_path / mode]) if "held_out" in run.config]
        assert len(chosen_on) == 2
        assert {len(run.R) for run in chosen_on} == {1 if mode == "first-tasks" else 2}
        (run,) = done.runs
        assert "held_out" not in run.config
        assert run.R.shape == (2, 2)
        assert run.config["seed"] not in {other.config["seed"] for other in chosen_on}


def test_what_the_paper_did_is_there_under_a_name_that_says_so(tmp_path):
    done = run_sweep(tmp_path, tiny(select="test-as-published", seeds=(0, 1)), InTurn())
    assert events(tmp_path)["started"] == 4  # the runs chosen from are the ones reported
    assert all("held_out" not in run.config for run in find_runs([tmp_path]))
    assert [run.config["seed"] for run in done.runs] == [0, 1]
    assert done.choices[0].acc == np.mean([run.result["acc"] for run in done.runs])
    told = json.loads((tmp_path / "chosen.json").read_text())
    assert "test sets that are also reported" in told["chosen_on"]


def test_nothing_is_chosen_before_all_is_done(tmp_path):
    Store(tmp_path).open(tiny())
    with pytest.raises(ValueError, match="2 of the 2 runs to choose from are missing"):
        select(tmp_path)
    with pytest.raises(ValueError, match=r"is no sweep's folder: it has no sweep\.json"):
        select(tmp_path / "locks")
