"""Settings found by Optuna: the same whenever it is stopped, chosen on held-out data alone."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gradmem.sweeps import InTurn, Standings, Store, Sweep, run_sweep, select, trials

from .sweeps import TINY, assert_nothing_finished_twice, events, results, tiny

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.usefixtures("one_thread")

GRIDS = {
    "mnist-rotations": {
        "single": {"lr": [0.001, 1.0]},
        "gem": {"lr": [0.001, 1.0], "margin": [0.0, 1.0], "memories": [10, 40]},
    }
}


def searching(**changes):
    return tiny(**({"grids": GRIDS, "search": "optuna", "trials": 12, "seeds": (0, 1)} | changes))


def tried_in(folder):
    return json.loads((folder / "trials.json").read_text())["mnist-rotations"]


def test_a_search_that_is_killed_goes_on_with_the_same_trials(tmp_path):
    """Killed in its first round and in its second one."""
    sweep = searching(seeds=(0,))
    here = run_sweep(tmp_path / "here", sweep, InTurn())
    Store(tmp_path / "killed").open(sweep)
    code = (
        "import sys, torch; torch.set_num_threads(1); from gradmem.sweeps import *; "
        "run_sweep(sys.argv[1], None, InTurn())"
    )
    for finished in (5, 21):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "killed")])
        deadline = time.monotonic() + 120
        while events(tmp_path / "killed")["finished"] < finished and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = run_sweep(tmp_path / "killed", None, InTurn())
    assert tried_in(tmp_path / "killed") == tried_in(tmp_path / "here")
    assert {learner: len(tried) for learner, tried in tried_in(tmp_path / "killed").items()} == {
        "single": 12,
        "gem": 12,
    }
    assert done.choices == here.choices == select(tmp_path / "killed")
    assert results(tmp_path / "killed") == results(tmp_path / "here")
    assert len(assert_nothing_finished_twice(tmp_path / "killed")) == 2 * 12 + 2
    assert [choice.considered for choice in done.choices] == [12, 12]


def test_settings_are_suggested_and_chosen_on_held_out_data_and_other_seeds(tmp_path, monkeypatch):
    told_of = []
    real = trials.suggest

    def suggest(sweep, benchmark, learner, told, n):
        told_of.append([acc for _, acc in told])
        return real(sweep, benchmark, learner, told, n)

    monkeypatch.setattr(trials, "suggest", suggest)
    sweep = searching(grids={"mnist-rotations": {"single": {"lr": [0.001, 1.0]}}})
    done = run_sweep(tmp_path, sweep, InTurn())
    store = Store(tmp_path)
    log = [entry["key"] for entry in store.log() if entry["event"] == "finished"]
    chosen_on, final = log[:24], log[24:]
    configs = [store.run(key).config for key in chosen_on]
    assert all(config["held_out"] == 0.1 for config in configs)
    assert {config["seed"] for config in configs} == {0, 1}
    assert [store.run(key).config["seed"] for key in final] == [1000, 1001]
    assert all("held_out" not in store.run(key).config for key in final)
    # What Optuna is told are the means of the runs on held-out data, round by round.
    standings = Standings()
    means = {}
    for experiment in sweep.experiments(store.trials()):
        standings.add(experiment, store.run(experiment.key).result["acc"])
        means.setdefault(experiment.settings["lr"], []).append(
            store.run(experiment.key).result["acc"]
        )
    tried = [settings["lr"] for settings in tried_in(tmp_path)["single"]]
    assert told_of == [[], [sum(means[lr]) / 2 for lr in tried[:10]]]
    assert done.choices == standings.best(seeds=2)


def test_suggestions_are_the_same_each_time_and_use_what_is_known():
    sweep = searching()
    told = [({"lr": 0.001 * 1.4**i}, 0.9 - 0.04 * abs(i - 6)) for i in range(20)]
    first = trials.suggest(sweep, "mnist-rotations", "single", told, 20)
    assert first == trials.suggest(sweep, "mnist-rotations", "single", told, 20)
    others = [(settings, -acc) for settings, acc in told]
    assert first != trials.suggest(sweep, "mnist-rotations", "single", others, 20)
    blind = trials.suggest(sweep, "mnist-rotations", "single", [], 20)
    assert sum(one["lr"] < 0.05 for one in first) > sum(one["lr"] < 0.05 for one in blind)
    # Settings with which a run failed count as worse than all others.
    failed = [(settings, None if settings["lr"] > 0.05 else acc) for settings, acc in told]
    worst = [(settings, -1.0 if acc is None else acc) for settings, acc in failed]
    careful = trials.suggest(sweep, "mnist-rotations", "single", failed, 20)
    assert careful == trials.suggest(sweep, "mnist-rotations", "single", worst, 20)


def test_a_range_lies_between_a_grids_values_and_words_are_chosen_among():
    grid = {"lr": [0.3, 0.003], "regularization": [1, 10, 30000], "memories": [7]}
    sweep = searching(grids={"mnist-rotations": {"ewc": grid}})
    some = trials.suggest(sweep, "mnist-rotations", "ewc", [], 40)
    assert {one["memories"] for one in some} == {7}
    assert all(0.003 <= one["lr"] <= 0.3 and 1 <= one["regularization"] <= 30000 for one in some)
    assert sum(one["lr"] < 0.03 for one in some) > 8  # factors count, not differences
    assert all(float(f"{one['lr']:.3g}") == one["lr"] for one in some)
    grid = {"margin": [0.0, 1.0], "memories": [10, 40], "margin_rule": ["shift", "floor"]}
    sweep = searching(grids={"mnist-rotations": {"gem": grid}})
    some = trials.suggest(sweep, "mnist-rotations", "gem", [], 40)
    assert {one["margin_rule"] for one in some} == {"shift", "floor"}
    assert all(type(one["memories"]) is int and 10 <= one["memories"] <= 40 for one in some)
    assert sum(one["margin"] > 0.5 for one in some) > 8
    told = [(one, 0.5) for one in some]
    assert len(trials.suggest(sweep, "mnist-rotations", "gem", told, 3)) == 3


def test_a_search_is_extended_by_trials_and_says_how_far_it_is(tmp_path):
    sweep = searching(grids={"mnist-rotations": {"single": {"lr": [0.001, 1.0]}}}, seeds=(0,))
    seen = []

    def on_event(event):
        if event.phase == "selection":
            seen.append((event.done, event.total))

    run_sweep(tmp_path / "a", sweep, InTurn(), on_event=on_event)
    assert [done for done, _ in seen] == [*range(11), 10, 11, 12]  # two rounds
    assert {total for _, total in seen} == {12}
    before = tried_in(tmp_path / "a")["single"]
    done = run_sweep(tmp_path / "a", replace(sweep, trials=15), InTurn())
    assert tried_in(tmp_path / "a")["single"][:12] == before
    assert done.choices[0].considered == len(
        {one["lr"] for one in tried_in(tmp_path / "a")["single"]}
    )
    assert_nothing_finished_twice(tmp_path / "a")
    with pytest.raises(ValueError, match="its search is 'optuna', got 'grid'"):
        run_sweep(tmp_path / "a", replace(sweep, search="grid", trials=None), InTurn())


def test_the_same_settings_twice_are_run_once(tmp_path):
    grids = {"mnist-rotations": {"gem": {"margin_rule": ["shift", "floor"]}}}
    seen = []
    done = run_sweep(
        tmp_path,
        searching(grids=grids, seeds=(0,)),
        InTurn(),
        on_event=lambda event: seen.append((event.done, event.total)),
    )
    assert len(tried_in(tmp_path)["gem"]) == 12
    assert done.choices[0].considered == 2
    assert events(tmp_path) == {"started": 3, "finished": 3}
    assert (2, 2) in seen


def test_trials_are_the_same_in_whichever_order_runs_end(tmp_path):
    class Backwards:
        def __call__(self, function, items):
            yield from InTurn()(function, reversed(list(items)))

    sweep = searching(grids={"mnist-rotations": {"single": {"lr": [0.001, 1.0]}}})
    run_sweep(tmp_path / "here", sweep, InTurn())
    run_sweep(tmp_path / "backwards", sweep, Backwards())
    assert tried_in(tmp_path / "here") == tried_in(tmp_path / "backwards")
    assert results(tmp_path / "here") == results(tmp_path / "backwards")


def test_a_file_of_trials_that_is_not_one_is_refused(tmp_path):
    store = Store(tmp_path)
    store.open(searching())
    with pytest.raises(ValueError, match="0 of 12 trials were begun"):
        select(tmp_path)
    for wrong in ("[", '{"mnist-rotations": 3}', '{"mnist-rotations": {"gem": [{"lr": 1}]}}'):
        (tmp_path / "trials.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"trials\.json"):
            store.trials()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": "random"}, "search must be one of grid, optuna; got 'random'"),
        ({"search": "grid", "trials": 3}, 'trials go with search="optuna"'),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"trials": 10**6}, "a sweep has at most 100,000 runs"),
    ],
)
def test_a_wrong_search_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        searching(**changes)


def test_the_command_searches(tmp_path, monkeypatch, capsys):
    from gradmem.cli import main

    size = ["--data", "sample", "--tasks", "2", "--examples", "40", "--seeds", "1"]
    search = ["--search", "optuna", "--trials", "3", "--workers", "1", "--learners", "single"]
    out = ["--out", str(tmp_path / "sweep")]
    words = ["gradmem", "sweep", "--benchmark", "mnist-rotations", *size, *search, *out]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    assert "selection: 3 of 3 runs" in capsys.readouterr().out
    assert len(tried_in(tmp_path / "sweep")["single"]) == 3
    chosen = json.loads((tmp_path / "sweep" / "chosen.json").read_text())
    assert chosen["search"] == "optuna"
    assert chosen["choices"][0]["settings"] in tried_in(tmp_path / "sweep")["single"]


def test_a_search_goes_through_json():
    sweep = searching()
    assert Sweep.from_json(json.loads(json.dumps(sweep.to_json()))) == sweep
    assert Sweep(GRIDS, search="optuna", common=TINY).trials == 50
