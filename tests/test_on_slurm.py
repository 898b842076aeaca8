"""Sweeps as Slurm's jobs, by submitit's local executor: jobs are processes on this machine."""

import os
import signal
import sys

import pytest

from gradmem.sweeps import Died, Elsewhere, InTurn, Store, run_sweep

from .sweeps import assert_nothing_finished_twice, events, results, tiny
from .test_sweep import DeadlyOnce

pytest.importorskip("submitit")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def on_slurm(tmp_path):
    from gradmem.sweeps.on_slurm import OnSlurm

    with OnSlurm(tmp_path / "jobs", "local", workers=1) as executor:
        yield executor


def test_a_job_that_is_killed_is_repeated_and_results_are_those_of_here(
    tmp_path, on_slurm, monkeypatch
):
    monkeypatch.setattr("gradmem.sweeps.on_slurm.SHARES", 1)  # all runs in one job

    lost = []

    class Executor(Elsewhere):
        def __call__(self, function, items):
            deadly = DeadlyOnce(function, 0.1, tmp_path / "died")
            for item, answer in on_slurm(deadly, items):
                if isinstance(answer, Died):
                    lost.append((item.key, answer))
                yield item, answer

    sweep = tiny(
        grids={"mnist-rotations": {"single": {"lr": [0.01, 0.1, 0.3]}, "gem": {"lr": [0.01, 0.1]}}},
        seeds=(0, 1),
    )
    done = run_sweep(tmp_path / "slurm", sweep, Executor())
    here = run_sweep(tmp_path / "here", sweep, InTurn())
    assert results(tmp_path / "slurm") == results(tmp_path / "here")  # to the last bit
    assert (done.choices, done.failed) == (here.choices, [])
    runs = 5 * 2 + 2 * 2
    assert len(assert_nothing_finished_twice(tmp_path / "slurm")) == runs
    # The job was killed at its third run; that and those after it were given to another.
    assert [died.blameless for _, died in lost] == [False, *[True] * 7]
    assert len({key for key, _ in lost}) == 8
    assert events(tmp_path / "slurm") == {"started": runs + 8, "finished": runs}


def square_or_die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_jobs_answers_before_its_end_are_kept(tmp_path):
    from gradmem.sweeps.on_slurm import OnSlurm

    class Numbers:  # 16 left and one worker: the first job has eight
        def __init__(self):
            self.left = list(range(16))

        def __iter__(self):
            return self

        def __length_hint__(self):
            return 16

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    answers = OnSlurm(tmp_path, "local", workers=1)(square_or_die, Numbers())
    found = dict(next(answers) for _ in range(8))
    died = [found.pop(number) for number in range(3, 8)]
    assert found == {0: 0, 1: 1, 2: 4}
    assert [one.blameless for one in died] == [False, True, True, True, True]
    answers.close()  # cancels what has begun


def test_what_slurm_does_not_know_is_refused(tmp_path):
    from gradmem.sweeps.on_slurm import OnSlurm

    with pytest.raises(ValueError, match="slurm: must be one of slurm, local; got 'gpu'"):
        OnSlurm(tmp_path, "gpu")
    with pytest.raises(ValueError, match=r"gpus must be a whole number on Slurm, got 0\.5"):
        OnSlurm(tmp_path, "local", gpus=0.5)
    wrong = OnSlurm(tmp_path, "local", parameters={"no_such_thing": 1})
    with pytest.raises(ValueError, match="Slurm cannot be used like this"):
        list(wrong(abs, [1]))


def test_the_command_makes_a_sweep_of_jobs(tmp_path, monkeypatch, capsys):
    from gradmem.cli import main

    grid = tmp_path / "grid.json"
    grid.write_text('{"single": {"lr": [0.1]}}')
    options = ["--benchmark", "mnist-rotations", "--grid", grid, "--data", "sample", "--seeds", 1]
    size = ["--tasks", 2, "--examples", 40, "--out", tmp_path / "sweep"]
    place = ["--on", "slurm:local", "--workers", 1, "--job", "timeout_min=10"]
    monkeypatch.setattr(sys, "argv", ["gradmem", "sweep", *map(str, [*options, *size, *place])])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    said = capsys.readouterr().out
    assert "selection: 1 of 1 runs" in said
    assert "final: 1 of 1 runs" in said
    assert events(tmp_path / "sweep") == {"started": 2, "finished": 2}
    run_sweep(tmp_path / "here", Store(tmp_path / "sweep").sweep(), InTurn())
    assert results(tmp_path / "sweep") == results(tmp_path / "here")
