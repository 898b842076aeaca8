"""Sweeps: nothing runs twice, nothing is lost, and what is reported was not chosen on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gradmem as gm
from gradmem.experiment import Experiment
from gradmem.learners import LEARNERS
from gradmem.paper import grids
from gradmem.recipes import RECIPES
from gradmem.results import find_runs
from gradmem.sweep import (
    Died,
    InTurn,
    Planned,
    Processes,
    Standings,
    Store,
    Sweep,
    key_of,
    run_sweep,
    select,
)
from gradmem.sweep.perform import Perform
from gradmem.sweep.timing import TimeLeft

TINY = {"data": "sample", "n_tasks": 2, "examples_per_task": 40}
TWO = {"mnist-rotations": {"single": {"lr": [0.01, 0.1]}}}


@pytest.fixture(autouse=True)
def one_thread():
    """Bits depend on the number of threads, which other tests may have set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(**changes):
    return Sweep(**({"grids": TWO, "seeds": (0,), "common": TINY} | changes))


def events(folder):
    return Counter(entry["event"] for entry in Store(folder).log())


def results(folder):
    """Key → the numbers of each finished run, without its times."""
    found = {}
    for run in find_runs([folder]):
        times = [name for name in run.result if name.startswith("seconds")]
        numbers = {name: value for name, value in run.result.items() if name not in times}
        found[run.folder.name] = numbers
    return found


def assert_nothing_finished_twice(folder):
    finished = set()
    for entry in Store(folder).log():
        assert entry["key"] not in finished, f"{entry} after it had finished"
        if entry["event"] in ("finished", "failed"):
            finished.add(entry["key"])
    return finished


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
                assert RECIPES[benchmark][learner][name] in values, (benchmark, learner, name)


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
        ({"common": {"seed": 3}}, "a field in common must be one of data, n_tasks"),
    ],
)
def test_a_wrong_sweep_is_refused_when_it_is_made(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


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
        return key_of(
            Experiment(**({"benchmark": "mnist-rotations", "learner": "single"} | TINY | changes))
        )

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
        return key_of(Experiment("mnist-rotations", "single", **(TINY | {"data": str(data)})))

    assert key("sample") == key(tmp_path / "here") == key(tmp_path / "there")
    assert key("sample") != key(tmp_path / "other")


def test_a_new_version_of_gradmem_makes_runs_anew(monkeypatch):
    experiment = Experiment("mnist-rotations", "single", **TINY)
    before = key_of(experiment)
    monkeypatch.setattr(gm, "__version__", "99")
    assert key_of(experiment) != before


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


def test_an_experiment_without_held_out_data_has_the_config_it_always_had():
    plain = Experiment("mnist-rotations", "single", **TINY)
    assert not {"held_out", "first_tasks"} & set(plain.config())
    assert Experiment(**plain.config()) == plain
    chosen_on = replace(plain, held_out=0.25, first_tasks=1)
    assert Experiment(**chosen_on.config()) == chosen_on
    assert chosen_on.run().R.shape == (1, 1)
    assert len(chosen_on.continuum().tests[0]) == 10


# Running -------------------------------------------------------------------------------------


def test_a_sweep_runs_everything_once_and_a_report_can_be_made_of_it(tmp_path):
    done = run_sweep(tmp_path, tiny(seeds=(0, 1)), InTurn())
    assert events(tmp_path) == {"started": 6, "finished": 6}  # 2 settings × 2 seeds, 2 final
    assert len(find_runs([tmp_path])) == 6
    assert [(c.benchmark, c.learner, c.considered) for c in done.choices] == [
        ("mnist-rotations", "single", 2)
    ]
    assert run_sweep(tmp_path, None, InTurn()).choices == done.choices
    assert run_sweep(tmp_path, tiny(seeds=(0, 1)), InTurn()).choices == done.choices
    assert events(tmp_path) == {"started": 6, "finished": 6}


def test_only_what_is_new_is_run_when_a_sweep_is_extended(tmp_path):
    run_sweep(tmp_path, tiny(), InTurn())
    before = results(tmp_path)
    assert events(tmp_path)["started"] == 2 + 1
    done = run_sweep(tmp_path, tiny(seeds=(1,), final_seeds=(1000,)), InTurn())
    assert Store(tmp_path).sweep().seeds == (0, 1)
    new = 2 + (done.choices[0].settings["lr"] != select_with_one_seed(before))
    assert events(tmp_path)["started"] == 3 + new
    more = tiny(grids={"mnist-rotations": {"single": {"lr": [0.03]}}}, final_seeds=(1000,))
    run_sweep(tmp_path, more, InTurn())
    assert Store(tmp_path).sweep().grids["mnist-rotations"]["single"]["lr"] == [0.01, 0.1, 0.03]
    assert_nothing_finished_twice(tmp_path)
    assert all(results(tmp_path)[key] == numbers for key, numbers in before.items())
    with pytest.raises(ValueError, match=r"its common is .* choose another folder"):
        run_sweep(tmp_path, tiny(common=TINY | {"n_tasks": 3}), InTurn())


def select_with_one_seed(found):
    accs = {0.01: 0.0, 0.1: 0.0}
    for key, numbers in found.items():
        if "held-out" in key:
            accs[0.01 if "lr0.01" in key else 0.1] = numbers["acc"]
    return min(accs, key=lambda lr: (-accs[lr], lr))


def test_a_run_that_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    sweep = tiny(grids={"mnist-rotations": {"single": {"lr": [1e30, 0.1]}}})
    done = run_sweep(tmp_path, sweep, InTurn())
    assert done.choices[0].settings == {"lr": 0.1}
    assert (done.choices[0].considered, done.choices[0].failed) == (1, 1)
    ((run, error),) = done.failed
    assert run.experiment.settings == {"lr": 1e30}
    assert "FloatingPointError: the loss is not finite" in error
    failure = Store(tmp_path).failure(run.key)
    assert failure["type"] == "FloatingPointError"
    assert any("_diverge" in line for line in failure["traceback"])
    assert events(tmp_path) == {"started": 3, "finished": 2, "failed": 1}
    run_sweep(tmp_path, None, InTurn())  # it counts as done …
    assert events(tmp_path)["failed"] == 1
    run_sweep(tmp_path, None, InTurn(), retry_failed=True)  # … unless asked otherwise
    assert events(tmp_path) == {"started": 4, "finished": 2, "failed": 2}


def test_a_learner_that_never_finishes_is_not_chosen_and_does_not_stop_the_others(tmp_path):
    found = {"mnist-rotations": {"single": {"lr": [1e30]}, "ewc": {"lr": [0.1]}}}
    done = run_sweep(tmp_path, tiny(grids=found), InTurn())
    assert [choice.learner for choice in done.choices] == ["ewc"]
    assert {run.config["learner"] for run in done.runs} == {"ewc"}


@pytest.mark.parametrize(
    "learner", [name for name in LEARNERS if name in RECIPES["mnist-rotations"]]
)
def test_a_learner_used_again_for_the_next_seed_gives_a_new_ones_results(tmp_path, learner):
    common = TINY | {"n_tasks": 3}
    experiments = [Experiment("mnist-rotations", learner, seed=s, **common) for s in (0, 1)]
    perform = Perform(tmp_path)
    used = []
    for experiment in experiments:
        perform(Planned(experiment))
        used.append(perform._learner)
    assert used[0] is used[1]
    new = experiments[1].new_learner()
    result = experiments[1].run(learner=new)
    for name, weight in new.network.state_dict().items():
        assert torch.equal(weight, used[1].network.state_dict()[name]), name
    stored = Store(tmp_path).run(key_of(experiments[1]))
    assert np.array_equal(stored.R, result.R)
    assert {name: stored.result[name] for name in result.statistics} == result.statistics


def test_a_learner_is_not_used_again_for_other_settings_or_after_a_failure(tmp_path):
    perform = Perform(tmp_path)

    def learner_after(**changes):
        perform(Planned(Experiment("mnist-rotations", "single", **(TINY | changes))))
        return perform._learner

    first = learner_after()
    assert learner_after(seed=1) is first
    second = learner_after(settings={"lr": 0.2})
    assert second is not first
    assert second.lr == 0.2
    assert learner_after(settings={"lr": 1e30}) is None
    assert perform._group  # the group alone does not bring it back
    assert learner_after(settings={"lr": 1e30}, seed=1) is None


def test_the_data_are_made_once_for_all_runs_on_them(tmp_path, monkeypatch):
    from gradmem import benchmarks

    made = []
    real = benchmarks.BENCHMARKS["mnist-rotations"]

    def counted(*arguments):
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setitem(benchmarks.BENCHMARKS, "mnist-rotations", counted)
    sweep = tiny(seeds=(0, 1), common=TINY | {"examples_per_task": 41})
    planned = [Planned(experiment) for experiment in sweep.experiments()]
    made.clear()
    for run in planned:
        Perform(tmp_path / "by-seed")(run)
    assert len(made) == 2
    made.clear()
    perform = Perform(tmp_path / "by-setting", continuums=2)
    for run in sorted(planned, key=lambda run: run.experiment.settings["lr"]):
        perform(run)
    assert len(made) == 2


# Executors -----------------------------------------------------------------------------------


def test_workers_give_the_bits_that_this_process_gives_however_many_they_are(tmp_path):
    found = {"mnist-rotations": {"single": {"lr": [0.1]}, "gem": {"lr": [0.03, 0.1]}}}
    planned = [Planned(experiment) for experiment in tiny(grids=found).experiments()]
    executors = {"here": InTurn(), "1": Processes(1, threads=1), "2": Processes(2, threads=1)}
    for name, executor in executors.items():
        answers = {
            run.key: outcome.kind for run, outcome in executor(Perform(tmp_path / name), planned)
        }
        assert answers == {run.key: "finished" for run in planned}
    assert results(tmp_path / "here") == results(tmp_path / "1") == results(tmp_path / "2")
    pids = {entry["pid"] for entry in Store(tmp_path / "2").log()}
    assert len(pids) == 2
    assert os.getpid() not in pids


def threads_of(_):
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_each_worker_has_its_share_of_the_cores(monkeypatch):
    from gradmem.sweep import executors

    monkeypatch.setattr(executors, "cores", lambda: 6)
    assert Processes().workers == 6
    assert Processes().threads == 1
    assert Processes(2).threads == 3
    assert Processes(100).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert [outcome for _, outcome in Processes(2)(threads_of, [0, 1])] == [(3, "3")] * 2
    assert os.environ["OMP_NUM_THREADS"] == "5"
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Processes(0)


class Deadly:
    """Does what the function does, and dies as by the out-of-memory killer at some runs."""

    def __init__(self, function, lr):
        self.function, self.lr = function, lr

    def __call__(self, run):
        if run.experiment.settings["lr"] == self.lr:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(run)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_worker_that_dies_is_its_runs_failure_and_the_rest_goes_on(tmp_path):
    class Executor:
        def __call__(self, function, items):
            yield from Processes(1, threads=1)(Deadly(function, 0.01), items)

    done = run_sweep(tmp_path, tiny(select="test-as-published"), Executor())
    ((run, error),) = done.failed
    assert run.experiment.settings == {"lr": 0.01}
    assert error == "LostWorkerError: the worker was ended by SIGKILL (out of memory?)"
    assert done.choices[0].settings == {"lr": 0.1}
    assert len(done.runs) == 1


def test_a_death_says_how():
    assert str(Died(3)) == "the worker ended with exit code 3"
    assert str(Died(-9)) == "the worker was ended by SIGKILL (out of memory?)"


# Several processes, and sudden ends ----------------------------------------------------------


def command(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "150", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gradmem", "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def said_by(process, code=0):
    said = process.communicate(timeout=120)[0]
    assert process.returncode == code, said
    return said


def test_two_processes_share_a_sweep_and_run_nothing_twice(tmp_path):
    found = {"mnist-rotations": {"single": {"lr": [0.01, 0.1]}, "gem": {"lr": [0.01, 0.1]}}}
    Store(tmp_path).open(tiny(grids=found, seeds=(0, 1, 2, 3)))
    both = [command(tmp_path, "--workers", 1) for _ in range(2)]
    tables = [said_by(process).split("mean of 4 seeds")[1] for process in both]
    runs = 4 * 4 + 2 * 4
    assert events(tmp_path) == {"started": runs, "finished": runs}
    assert len(assert_nothing_finished_twice(tmp_path)) == runs
    assert tables[0].split("Written")[0] == tables[1].split("Written")[0]


def test_a_run_that_another_process_has_is_waited_for(tmp_path):
    """Here, the other one gives up without a result: its run is then made after all."""
    sweep = tiny()
    key = key_of(sweep.experiments()[0])
    store = Store(tmp_path)
    store.open(sweep)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); "
            "lock.acquire(); print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "locks" / f"{key}.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    assert store.is_claimed(key)
    seen = []

    def on_event(event):
        seen.append(event)
        if event.phase == "selection" and event.done == 1:
            assert event.run.key != key
            holder.kill()

    try:
        run_sweep(tmp_path, None, InTurn(), on_event=on_event)
    finally:
        holder.kill()
        holder.communicate()
    assert store.is_finished(key)
    assert [event.done for event in seen if event.phase == "selection"] == [0, 1, 2]


def killed(*arguments):
    script = Path(__file__).with_name("kill_sweep.py")
    process = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


def assert_whole(folder):
    """Every file is whole, and nothing that a killed process left is in the way."""
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    assert [path for path in folder.rglob(".*") if path.is_file()] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_sweep_killed_twenty_times_finishes_and_runs_nothing_twice(tmp_path):
    folder = tmp_path / "sweep"
    seed = time.time_ns() % 2**32
    seen = killed("at-random", folder, seed, 20)
    assert seen["hits"] == 20
    assert seen["status"] == 0
    assert seen["changed"] == [], f"results were written again (seed {seed})"
    assert_whole(folder)
    store = Store(folder)
    sweep = store.sweep()
    keys = {key_of(experiment) for experiment in sweep.experiments()}
    final = [(c.benchmark, c.learner, c.settings) for c in select(folder)]
    keys |= {key_of(experiment) for experiment in sweep.final(final)}
    assert all(store.is_finished(key) for key in keys)
    assert_nothing_finished_twice(folder)
    starts = Counter(entry["key"] for entry in store.log() if entry["event"] == "started")
    assert sum(starts.values()) - len(starts) <= 20  # only what was killed began again
    undisturbed = run_sweep(tmp_path / "undisturbed", sweep, InTurn())
    assert undisturbed.choices == select(folder)
    expected = results(tmp_path / "undisturbed")
    assert {key: results(folder)[key] for key in expected} == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_sweep_killed_at_any_write_finishes_and_runs_nothing_twice(tmp_path):
    sites = killed("at-each-write", tmp_path)
    # sweep.json, two times config.json and result.json, chosen.json; before and after each
    assert len(sites) == 12
    for site in sites:
        folder = Path(site["folder"])
        assert site["status"] == 0
        assert_whole(folder)
        assert_nothing_finished_twice(folder)
        assert len(find_runs([folder])) == 2
        assert (folder / "chosen.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupted_sweep_ends_its_workers_and_says_how_to_go_on(tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"gem": {"lr": [0.01, 0.1]}}')
    out = tmp_path / "sweep"
    options = ["--benchmark", "mnist-rotations", "--grid", grid, "--data", "sample", "--seeds", 1]
    size = ["--tasks", 20, "--examples", 200]
    process = command(*options, *size, "--out", out, "--workers", 2)
    deadline = time.monotonic() + 60
    while events(out)["started"] < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does, to parent and workers
    said = said_by(process, code=130)
    assert f"`gradmem sweep {out}` goes on" in said
    assert "Traceback" not in said
    assert workers_in(out) == []
    assert events(out)["failed"] == 0
    assert not list(out.rglob("failure.json"))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_workers_whose_parent_is_killed_finish_their_runs_and_end(tmp_path):
    Store(tmp_path).open(tiny(grids={"mnist-rotations": {"gem": {"lr": [0.01, 0.03, 0.1, 0.3]}}}))
    process = command(tmp_path, "--workers", 2)
    deadline = time.monotonic() + 60
    while events(tmp_path)["started"] < 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    while workers_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert workers_in(tmp_path) == []
    assert events(tmp_path)["started"] == events(tmp_path)["finished"] >= 1
    run_sweep(tmp_path, None, InTurn())
    assert events(tmp_path) == {"started": 5, "finished": 5}


def workers_in(folder):
    """The processes that ran something and are still there."""
    alive = []
    for pid in {entry["pid"] for entry in Store(folder).log()}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        stat = Path(f"/proc/{pid}/stat")  # an orphan may stay a zombie where nobody collects it
        if not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"):
            alive.append(pid)
    return alive


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


# Progress and the command --------------------------------------------------------------------


def test_the_time_left_knows_that_learners_differ(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gradmem.sweep.timing.time.monotonic", lambda: now[0])
    single, gem = (Experiment("mnist-rotations", name, **TINY) for name in ("single", "gem"))
    clock = TimeLeft([single] * 3 + [gem] * 3)
    assert clock.left() is None
    now[0] = 11.0
    clock.add(single, 2.0)
    clock.add(gem, 20.0)  # 22 seconds of work in 11 on the wall: two at a time
    assert clock.left() == (2 * 2.0 + 2 * 20.0) / 2
    clock.add(gem, None)  # one that failed
    assert clock.left() == (2 * 2.0 + 1 * 20.0) / 2


def test_the_command_makes_continues_and_reports_a_sweep(tmp_path, monkeypatch):
    from gradmem.cli import main

    out = tmp_path / "sweep"
    grid = tmp_path / "grid.json"
    grid.write_text('{"single": {"lr": [0.001, 0.1, 1e30]}, "gem": {}}')
    options = ["--benchmark", "mnist-rotations", "--learners", "single", "--grid", grid]
    size = ["--data", "sample", "--tasks", 2, "--examples", 100, "--workers", 1]
    said = said_by(command(*options, *size, "--seeds", 2, "--final-seeds", 1, "--out", out))
    assert "selection: 6 of 6 runs" in said
    assert "best: mnist-rotations, single, lr=0.1: ACC 0." in said
    assert "2 runs failed" in said
    assert "final: 1 of 1 runs" in said
    assert str(out / "chosen.json") in said
    table = (out / "report" / "table.md").read_text()
    assert len(table.splitlines()) == 3  # one row: what was chosen
    assert json.loads((out / "chosen.json").read_text())["choices"][0]["settings"] == {"lr": 0.1}
    monkeypatch.setattr(sys, "argv", ["gradmem", "sweep", str(out)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    assert events(out) == {"started": 7, "finished": 5, "failed": 2}
    assert (out / "report" / "table.md").read_text() == table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--benchmark for a new sweep, or the FOLDER"),
        (["nowhere"], "nowhere is no sweep's folder"),
        (["nowhere", "--data", "sample"], "--benchmark is missing"),
        (["nowhere", "--seeds", "4"], "--benchmark is missing"),
        (["nowhere", "--select", "nonsense"], "--benchmark is missing"),
        (["nowhere", "--held-out", "0.2"], "--benchmark is missing"),
        (["--benchmark", "mnist-rotations", "--seeds", "0"], "--seeds must be at least 1"),
        (
            ["--benchmark", "mnist-rotations", "--select", "first-tasks", "--tasks", "2"],
            "--first-tasks must be at most --tasks, 2, got 3",
        ),
        (["--benchmark", "mnist-rotations", "--grid", "no.json"], 'must be "paper" or a JSON file'),
        (["--benchmark", "mnist-rotations", "--learners", "agem"], "a learner in the grid must be"),
        (
            ["--benchmark", "mnist-rotations", "--select", "best"],
            "select must be one of validation",
        ),
    ],
)
def test_a_wrong_command_says_what_is_right(arguments, message, monkeypatch, capsys):
    from gradmem.cli import main

    monkeypatch.setattr(sys, "argv", ["gradmem", "sweep", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
