"""Sweeps: nothing runs twice, nothing is lost, and what is reported was not chosen on."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradmem.benchmarks import BENCHMARKS
from gradmem.learners import LEARNERS
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Run, find_runs
from gradmem.sweeps import (
    Died,
    Elsewhere,
    InTurn,
    Processes,
    Store,
    run_sweep,
)
from gradmem.sweeps.perform import Compute, Perform
from gradmem.sweeps.store import Failed
from gradmem.sweeps.timing import TimeLeft

from .sweeps import (
    TINY,
    assert_nothing_finished_twice,
    command,
    events,
    results,
    said_by,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Running -------------------------------------------------------------------------------------


def test_a_sweep_runs_everything_once_and_a_report_can_be_made_of_it(tmp_path):
    done = run_sweep(tmp_path, tiny(seeds=(0, 1)), InTurn())
    assert events(tmp_path) == {"started": 6, "finished": 6}  # 2 settings × 2 seeds, 2 final
    assert len(find_runs([tmp_path])) == 6
    assert [(c.benchmark, c.learner, c.considered) for c in done.choices] == [
        ("mnist-rotations", "single", 2)
    ]
    settings, acc = done.choices[0].settings, np.mean([run.result["acc"] for run in done.runs])
    best = f"mnist-rotations, single lr={settings['lr']}: ACC {acc:.3f}, seeds: 2"
    assert repr(done) == f"Finished(\n  {best}\n  failed: 0\n)"
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
    ((failed, error),) = done.failed
    assert failed.settings == {"lr": 1e30}
    assert "FloatingPointError: the loss is not finite" in error
    failure = Store(tmp_path).failure(failed.key)
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
    "learner", [name for name in LEARNERS if name in BENCHMARKS["mnist-rotations"].settings]
)
def test_a_learner_used_again_for_the_next_seed_gives_a_new_ones_results(tmp_path, learner):
    common = TINY | {"n_tasks": 3}
    experiments = [Experiment("mnist-rotations", learner, seed=s, **common) for s in (0, 1)]
    perform = Perform(tmp_path)
    used = []
    for experiment in experiments:
        perform(experiment)
        used.append(perform.compute._learner)
    assert used[0] is used[1]
    new = experiments[1].new_learner()
    result = experiments[1].run(learner=new)
    for name, weight in new.network.state_dict().items():
        assert torch.equal(weight, used[1].network.state_dict()[name]), name
    stored = Store(tmp_path).run(experiments[1].key)
    assert np.array_equal(stored.R, result.R)
    assert {name: stored.result[name] for name in result.statistics} == result.statistics


def test_a_learner_is_not_used_again_for_other_settings_or_after_a_failure(tmp_path):
    perform = Perform(tmp_path)

    def learner_after(**changes):
        perform(Experiment("mnist-rotations", "single", **(TINY | changes)))
        return perform.compute._learner

    first = learner_after()
    assert learner_after(seed=1) is first
    second = learner_after(settings={"lr": 0.2})
    assert second is not first
    assert second.lr == 0.2
    assert learner_after(settings={"lr": 1e30}) is None
    assert perform.compute._group  # the group alone does not bring it back
    assert learner_after(settings={"lr": 1e30}, seed=1) is None


def test_the_data_are_made_once_for_all_runs_on_them(tmp_path, monkeypatch):
    made = []
    real = BENCHMARKS["mnist-rotations"]

    def counted(seed, n_tasks=20, examples_per_task=1000, data=None):
        made.append(seed)
        return real.continuum(n_tasks, examples_per_task, seed=seed, data=data)

    monkeypatch.setitem(BENCHMARKS, "mnist-rotations", replace(real, continuum=counted))
    sweep = tiny(seeds=(0, 1), common=TINY | {"examples_per_task": 41})
    planned = sweep.experiments()
    assert len({experiment.key for experiment in planned}) == 4
    made.clear()
    for experiment in planned:
        Perform(tmp_path / "by-seed")(experiment)
    assert len(made) == 2
    made.clear()
    perform = Perform(tmp_path / "by-setting", Compute(continuums=2))
    for experiment in sorted(planned, key=lambda experiment: experiment.settings["lr"]):
        perform(experiment)
    assert len(made) == 2


# Executors -----------------------------------------------------------------------------------


def test_workers_give_the_bits_that_this_process_gives_however_many_they_are(tmp_path):
    found = {"mnist-rotations": {"single": {"lr": [0.1]}, "gem": {"lr": [0.03, 0.1]}}}
    planned = tiny(grids=found).experiments()
    executors = {"here": InTurn(), "1": Processes(1, threads=1), "2": Processes(2, threads=1)}
    for name, executor in executors.items():
        answers = list(executor(Perform(tmp_path / name), planned))
        assert {experiment.key for experiment, _ in answers} == {one.key for one in planned}
        assert all(isinstance(run, Run) for _, run in answers)
    assert results(tmp_path / "here") == results(tmp_path / "1") == results(tmp_path / "2")
    pids = {entry["pid"] for entry in Store(tmp_path / "2").log()}
    assert len(pids) == 2
    assert os.getpid() not in pids


def threads_of(_):
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_each_worker_has_its_share_of_the_cores(monkeypatch):
    from gradmem.sweeps import executors

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

    def __call__(self, experiment):
        if experiment.settings["lr"] == self.lr:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(experiment)


class DeadlyOnce(Deadly):
    """Dies at the first of these runs only, as by a machine that is short of memory for a while."""

    def __init__(self, function, lr, mark):
        super().__init__(function, lr)
        self.mark = mark

    def __call__(self, experiment):
        if self.mark.exists():
            return self.function(experiment)
        if experiment.settings["lr"] == self.lr:
            self.mark.touch()
        return super().__call__(experiment)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_worker_that_dies_once_says_nothing_about_the_settings(tmp_path):
    class Executor:
        def __call__(self, function, items):
            deadly = DeadlyOnce(function, 0.1, tmp_path / "died")
            yield from Processes(1, threads=1)(deadly, items)

    done = run_sweep(tmp_path / "sweep", tiny(select="test-as-published"), Executor())
    assert (tmp_path / "died").exists()
    assert done.failed == []
    assert done.choices[0].settings == {"lr": 0.1}  # the better one, whose worker was lost


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_worker_that_dies_is_its_runs_failure_and_the_rest_goes_on(tmp_path):
    class Executor:
        def __call__(self, function, items):
            yield from Processes(1, threads=1)(Deadly(function, 0.01), items)

    done = run_sweep(tmp_path, tiny(select="test-as-published"), Executor())
    ((failed, error),) = done.failed
    assert failed.settings == {"lr": 0.01}
    assert error == "LostWorkerError: the worker was ended by SIGKILL (out of memory?)"
    assert done.choices[0].settings == {"lr": 0.1}
    assert len(done.runs) == 1


def behind(error):
    """An error that was raised because of another one."""
    raised = ValueError("the state does not fit this learner")
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        behind(torch.OutOfMemoryError("CUDA out of memory.")),
    ],
)
@pytest.mark.parametrize("times", [1, 100])
def test_a_gpu_whose_memory_is_full_says_nothing_about_the_settings(
    tmp_path, monkeypatch, error, times
):
    run, full = Experiment.run, []

    def fails_at_first(self, **options):
        if self.settings["lr"] == 0.1 and len(full) < times:
            full.append(self.key)
            raise error
        return run(self, **options)

    monkeypatch.setattr(Experiment, "run", fails_at_first)
    done = run_sweep(tmp_path, tiny(select="test-as-published"), InTurn())
    if times == 1:
        assert done.failed == []
        assert done.choices[0].settings == {"lr": 0.1}
    else:
        assert "memory was full" in done.failed[0][1]
        assert done.choices[0].settings == {"lr": 0.01}


def test_a_death_says_how():
    assert str(Died.with_exit_code(3)) == "the worker ended with exit code 3"
    assert str(Died.with_exit_code(-9)) == "the worker was ended by SIGKILL (out of memory?)"


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ("ray", ["--on", "ray"]),
        ("slurm", ["--on", "slurm:local"]),
        ("optuna", ["--search", "optuna"]),
    ],
)
def test_a_missing_extra_is_named(extra, options, monkeypatch, capsys):
    from gradmem.cli import main

    monkeypatch.setitem(sys.modules, {"slurm": "submitit"}.get(extra, extra), None)
    size = ["--data", "sample", "--tasks", "2", "--examples", "40", "--learners", "single"]
    words = ["sweep", "--benchmark", "mnist-rotations", *size, *options]
    monkeypatch.setattr(sys, "argv", ["gradmem", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert f'pip install "gradmem[{extra}]"' in capsys.readouterr().err
    assert not Path("sweeps").exists()


def test_runs_for_a_device_that_is_not_here_can_be_planned_and_made_elsewhere_only(tmp_path):
    there = "cuda" if not torch.cuda.is_available() else "cuda:99"
    sweep = tiny(common=TINY | {"device": there})
    assert all(experiment.key for experiment in sweep.experiments())
    with pytest.raises(ValueError, match=f"device '{there}' cannot be used here"):
        run_sweep(tmp_path / "here", sweep, InTurn())
    assert not (tmp_path / "here").exists()
    asked = []

    class Nowhere(Elsewhere):
        def __call__(self, function, items):
            asked.extend(items)
            yield from ((item, Failed("ValueError", "no", [])) for item in asked)

    done = run_sweep(tmp_path / "there", sweep, Nowhere())
    assert {experiment.device for experiment in asked} == {there}
    assert [error for _, error in done.failed] == ["ValueError: no"] * 2
    with pytest.raises(ValueError, match="cannot be used here"):  # and makes no failures of it
        run_sweep(tmp_path / "there", None, InTurn(), retry_failed=True)


# Progress and the command --------------------------------------------------------------------


def test_the_time_left_knows_that_learners_differ(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gradmem.sweeps.timing.time.monotonic", lambda: now[0])
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
    assert str(out / "report.html") in said
    table = (out / "table.md").read_text()
    assert len(table.splitlines()) == 3  # one row: what was chosen
    assert json.loads((out / "chosen.json").read_text())["choices"][0]["settings"] == {"lr": 0.1}
    monkeypatch.setattr(sys, "argv", ["gradmem", "sweep", str(out)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    assert events(out) == {"started": 7, "finished": 5, "failed": 2}
    assert (out / "table.md").read_text() == table


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
            ["--benchmark", "mnist-rotations", "--final-seeds", "0"],
            "--final-seeds must be at least",
        ),
        (
            ["--benchmark", "mnist-rotations", "--data", "sample", "--examples", "100000"],
            "examples_per_task must be at most the 4000 training images, got 100000 (",
        ),
        (["--benchmark", "mnist-rotations", "--first-tasks", "1"], "--first-tasks goes with"),
        (["--benchmark", "mnist-rotations", "--out", "README.md/x"], "--out must be a folder"),
        (
            ["--benchmark", "mnist-rotations", "--select", "first-tasks", "--tasks", "2"],
            "first_tasks must be at most n_tasks, 2, got 3 (n_tasks is --tasks)",
        ),
        (["--benchmark", "mnist-rotations", "--grid", "no.json"], 'must be "paper" or a JSON file'),
        (["--benchmark", "mnist-rotations", "--learners", "agem"], "a learner in the grid must be"),
        (["--benchmark", "mnist-rotations", "--trials", "3"], "--trials goes with --search optuna"),
        (
            ["--benchmark", "mnist-rotations", "--search", "luck"],
            "search must be one of grid, optuna; got 'luck'",
        ),
        (
            ["--benchmark", "mnist-rotations", "--on", "mars"],
            "on must be one of here, ray, slurm; got 'mars'",
        ),
        (
            ["--benchmark", "mnist-rotations", "--gpus", "0.5"],
            "cpus, gpus and parameters of jobs are for runs on ray or slurm",
        ),
        (
            ["--benchmark", "mnist-rotations", "--on", "ray", "--job", "timeout_min=3"],
            "parameters of jobs are for runs on slurm",
        ),
        (
            ["--benchmark", "mnist-rotations", "--on", "ray", "--device", "cuda:1"],
            "a cluster chooses which GPU a worker has: the device must be cuda, got cuda:1",
        ),
        (
            ["--benchmark", "mnist-rotations", "--on", "ray", "--gpus", "0.5"],
            "gpus go with the device cuda",
        ),
        (["--benchmark", "mnist-rotations", "--on", "slurm", "--job", "x"], "--job takes NAME="),
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
    assert not Path("sweeps").exists()
