"""The command as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from gradmem.cli import doctor, options
from tests.synthetic import write_run

#: Learners of the demo whose first task is compared.
KEPT = ("single", "gem")
TINY = ["--data", "sample", "--tasks", "2", "--examples", "30"]


def gradmem(*arguments, cwd=None, code=0):
    process = subprocess.run(
        [sys.executable, "-m", "gradmem", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout + process.stderr


def test_run_writes_a_folder_and_says_where(tmp_path):
    out = tmp_path / "a" / "b"
    options = ["--benchmark", "mnist-rotations", "--learner", "gem", "--seed", "0"]
    said = gradmem("run", *options, *TINY, "--out", out)
    assert "ACC" in said
    assert str(out / "result.json") in said
    result = json.loads((out / "result.json").read_text())
    assert len(result["R"]) == 2
    assert json.loads((out / "config.json").read_text())["settings"]["margin"] == 0.5
    # a second time it is shown; computed again, it is the same to the last digit
    written = (out / "result.json").stat().st_mtime_ns
    said = gradmem("run", *options, *TINY, "--out", out)
    assert "finished before" in said
    assert "ACC" in said
    assert f"Already there: {out / 'result.json'}" in said
    assert "Written" not in said
    assert (out / "result.json").stat().st_mtime_ns == written
    gradmem("run", *options, *TINY, "--out", out, "--overwrite")
    again = json.loads((out / "result.json").read_text())
    assert again["R"] == result["R"]
    assert again["seconds"] != result["seconds"]
    # something else does not go into the same folder unasked
    other = ["run", *options[:-1], "1", *TINY, "--out", out]
    assert "holds the result of another experiment" in gradmem(*other, code=2)
    said = gradmem("run", *options, *TINY, "--lr", "0.06", "--out", out, code=2)
    assert "(result.json): lr was 0.1 and is 0.06. Choose another folder" in said
    gradmem(*other, "--overwrite")
    assert json.loads((out / "result.json").read_text())["seed"] == 1


def test_compare_and_report_make_one_table_and_pictures(tmp_path):
    options = ["--benchmark", "mnist-permutations", "--learners", "single,ewc", "--seeds", "2"]
    said = gradmem("compare", *options, *TINY, cwd=tmp_path)
    assert "mean of 2 seeds" in said
    root = tmp_path / "runs" / "mnist-permutations"
    made = sorted(path.name for path in root.iterdir())
    pictures = ["R-mnist-permutations-ewc", "R-mnist-permutations-single"]
    pictures += ["bars-mnist-permutations", "first-task-mnist-permutations"]
    runs = ["ewc-seed0", "ewc-seed1", "single-seed0", "single-seed1"]
    files = [f"{name}.{kind}" for name in pictures for kind in ("pdf", "png")]
    assert made == sorted([*files, *runs, "report.html", "table.md"])
    said = gradmem("report", root, "--out", tmp_path / "again")
    assert (tmp_path / "again" / "table.md").read_text() == (root / "table.md").read_text()
    assert str(tmp_path / "again" / "R-mnist-permutations-ewc.png") in said
    assert str(tmp_path / "again" / "report.html") in said


@pytest.mark.parametrize("name", ["a[/b]", "a[red]x:smile:"])
def test_a_folder_may_look_like_markup(name, tmp_path):
    size = ["--benchmark", "mnist-rotations", *TINY]
    said = gradmem("run", *size, "--learner", "single", "--out", tmp_path / name)
    assert f"Written: {tmp_path / name / 'result.json'}" in said


def test_a_terminal_that_lacks_letters_costs_nothing(tmp_path, monkeypatch):
    for seed in range(2):
        write_run(tmp_path / f"{seed}", seed=seed)
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    gradmem("report", tmp_path)
    assert "±" in (tmp_path / "table.md").read_text("utf-8")
    gradmem("paper", "--help")


def test_a_run_looks_at_its_own_folder_only(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_text("{")
    size = ["--benchmark", "mnist-rotations", *TINY]
    assert "Written" in gradmem("run", *size, "--learner", "single", "--out", tmp_path)


def test_report_says_which_runs_do_not_count(tmp_path):
    for name in ("a", "copy", "damaged"):
        write_run(tmp_path / name)
    write_run(tmp_path / "b", seed=1)
    (tmp_path / "damaged" / "result.json").write_text("")
    said = gradmem("report", tmp_path, tmp_path / "a")
    assert "Left out: 1 run (same experiment and seed as a newer run)" in said
    assert f"Left out: {tmp_path / 'damaged'} (result.json is not whole: " in said
    assert "mean of 2 seeds" in said
    assert "that can be read" in gradmem("report", tmp_path / "damaged", code=2)


def test_a_report_needs_a_folder(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        said = gradmem("report", tmp_path / "run", "--out", out, code=2)
        assert f"--out must be a folder, {tmp_path / 'file'} is a file" in said


def test_a_learner_that_diverges_does_not_cost_the_others(tmp_path, monkeypatch):
    from gradmem import cli
    from gradmem.cli import app

    command = ["gradmem", "compare", "--benchmark", "mnist-rotations", *TINY]
    command += ["--learners", "single,gem", "--set", "single.lr=1e30", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert cli.main is app.main
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (0, None)
    assert (tmp_path / "gem-seed0" / "result.json").exists()
    assert not (tmp_path / "single-seed0" / "result.json").exists()


def test_compare_finds_a_folder_that_is_taken_before_it_runs_anything(tmp_path):
    size = ["--benchmark", "mnist-rotations", "--data", "sample", "--tasks", "2", "--examples"]
    gradmem("run", *size, "50", "--learner", "gem", "--out", tmp_path / "gem-seed0")
    said = gradmem("compare", *size, "60", "--learners", "single,gem", "--out", tmp_path, code=2)
    assert "gem-seed0 holds the result of another experiment" in said
    assert not (tmp_path / "single-seed0").exists()


def test_data_says_what_it_found():
    said = gradmem("data", "sample")
    assert "4000 to train on, 1000 to test on" in said
    assert "bundled sample" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--benchmark", "mnist", "--learner", "gem"], "one of mnist-rotations, mnist-perm"),
        (["run", "--benchmark", "mnist-rotations", "--learner", "jem"], "one of single, indep"),
        (
            ["run", "--benchmark", "mnist-rotations", "--learner", "single", "--margin", "1"],
            "single has no setting margin (got 1); it has ",
        ),
        (["compare", "--benchmark", "mnist-rotations", "--seeds", "0"], "--seeds must be at least"),
        (
            ["compare", "--benchmark", "mnist-rotations", "--learners", "gem,sgd"],
            "learner must be one of",
        ),
        (
            ["run", "--benchmark", "mnist-rotations", "--learner", "gem", "--order", "up"],
            '--order must be "random" or numbers such as 2,0,1',
        ),
        (["compare", "--benchmark", "mnist-rotations", "--learners", ""], "learner must be one of"),
        (
            ["run", "--benchmark", "mnist-rotations", "--learner", "gem", "--examples", "0"],
            "examples_per_task must be at least 1, got 0 (examples_per_task is --examples)",
        ),
        (
            ["run", "--benchmark", "mnist-rotation", "--learner", "gem"],
            "got 'mnist-rotation': did you mean mnist-rotations?",
        ),
        (["run", "--benchmark", "mnist-rotations", "--learner", "gemm"], ": did you mean gem?"),
        (
            ["run", "--benchmark", "mnist-rotations", "--learner", "gem", "--sed", "3"],
            ": did you mean --seed?",
        ),
        (["report", "no-such-folder"], "no-such-folder does not exist"),
        (["run", "--benchmark", "mnist-rotations"], "--learner"),
    ],
)
def test_a_wrong_value_says_what_is_right(arguments, message):
    said = gradmem(*arguments, code=2)
    assert message in said
    assert "Traceback" not in said


def test_a_folder_without_data_says_what_to_do(tmp_path):
    options = ["run", "--benchmark", "mnist-rotations", "--learner", "gem"]
    said = gradmem(*options, "--data", tmp_path, code=1)
    assert str(tmp_path) in said
    assert "train-images-idx3-ubyte" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("assigned", "typed"), [((), ("--margn", "1")), (("gem.margn=1",), ())])
def test_an_unknown_setting_lists_what_can_be_typed(assigned, typed):
    with pytest.raises(ValueError, match=r"gem has no setting margn \(got 1\); it has ") as error:
        options.read_settings("mnist-rotations", ["gem"], assigned, typed)
    listed = str(error.value).partition("it has ")[2]
    assert "--margin, --margin-rule, " in listed
    assert listed.endswith(": did you mean --margin?")
    assert not [name for name in ("optimizer", "transform", "decide", "loss") if name in listed]


def test_missing_data_is_told_in_the_words_of_the_command_line(tmp_path):
    command = ["run", "--benchmark", "mnist-rotations", "--learner", "gem"]
    said = " ".join(gradmem(*command, "--data", tmp_path, code=1).split())
    assert "give --data FOLDER or set GRADMEM_DATA=FOLDER; or give --data sample for" in said
    said = " ".join(gradmem("data", tmp_path, code=1).split())
    assert "give gradmem data FOLDER or set" in said


def test_a_function_that_makes_no_learner_is_named(tmp_path):
    (tmp_path / "data.py").write_text("import numpy\ndef make(seed):\n    numpy.array([])[seed]\n")
    (tmp_path / "more.py").write_text("def make(seed):\n    return 3\n")
    options = ["run", "--benchmark", "mnist-rotations", *TINY, "--learner"]
    said = " ".join(gradmem(*options, "more:make", cwd=tmp_path, code=2).split())
    assert "more:make made no learner (a learner is a class with observe and predict" in said
    (tmp_path / "data.py").write_text("def make(seed):\n    return int(seed)\n")
    said = " ".join(gradmem(*options, "data:make", cwd=tmp_path, code=2).split())
    assert "data:make made no learner (a learner is" in said
    assert ": TypeError: int() argument" in said


@pytest.mark.parametrize("command", ["run", "compare", "sweep", "report", "data", "learners"])
def test_help_is_there(command):
    assert "Usage: " in gradmem(command, "--help")
    assert command in gradmem("--help")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupted_run_keeps_what_it_knew(tmp_path):
    out = tmp_path / "run"
    options = ["--benchmark", "mnist-rotations", "--learner", "gem", "--data", "sample"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradmem", "run", *options, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (out / "partial.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode not in (0, None)
    assert "Traceback" not in said
    assert "partial.json" in said
    partial = json.loads((out / "partial.json").read_text())
    assert 1 <= len(partial["R"]) < 20
    assert len(partial["R"][0]) == 20
    assert not (out / "result.json").exists()


def test_the_core_stays_light():
    """What only plots, downloads, rotates or parses a command line is imported where it is used."""
    heavy = ["matplotlib", "PIL", "pooch", "requests", "filelock", "typer", "scipy", "quadprog"]
    heavy += ["plotly", "jinja2", "numba"]
    loaded = f"import sys, gradmem; print([name for name in {heavy} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    light = {name.strip("'[]\n ") for name in said.stdout.split(",")}
    assert light <= {"", "filelock"}, said.stdout  # torch itself may import filelock


def test_help_groups_commands_by_what_one_wants(tmp_path):
    said = gradmem("--help")
    headings = ["See it work", "Train and compare", "Look at results", "Know what there is"]
    places = [said.index(heading) for heading in headings]
    assert places == sorted(places)
    assert places[0] < said.index("│ demo") < places[1] < said.index("│ compare") < places[2]


def test_names_are_completed_in_a_shell():
    typed = {"COMP_WORDS": "gradmem run --benchmark mnist-", "COMP_CWORD": "3"}
    installed = "import sys; sys.argv = ['gradmem']; from gradmem.cli import main; main()"
    completed = subprocess.run(
        [sys.executable, "-c", installed],
        capture_output=True,
        text=True,
        env=os.environ | typed | {"_GRADMEM_COMPLETE": "complete_bash"},
    )
    assert {"mnist-permutations", "mnist-rotations"} <= {*completed.stdout.split()}


def test_doctor_says_what_is_found_and_missing(tmp_path):
    (tmp_path / "cache").mkdir()
    said = subprocess.run(
        [sys.executable, "-m", "gradmem", "doctor"],
        capture_output=True,
        text=True,
        env=os.environ | {"GRADMEM_CACHE": str(tmp_path / "cache"), "GRADMEM_DATA": str(tmp_path)},
        check=True,
    ).stdout
    assert f"torch          {torch.__version__}" in said
    assert "4000 to train on" in said
    assert "! MNIST          not found" in said
    assert "MNIST: gradmem data --set mnist fetches it" in said
    assert not [*(tmp_path / "cache").iterdir()]  # nothing is fetched


def test_doctor_names_a_folder_that_is_not_there(tmp_path):
    said = subprocess.run(
        [sys.executable, "-m", "gradmem", "doctor"],
        capture_output=True,
        text=True,
        env=os.environ | {"GRADMEM_DATA": str(tmp_path / "nowhere")},
        check=True,
    ).stdout
    assert "GRADMEM_DATA must name a folder" in said


def test_doctor_shows_what_one_may_do_without_as_optional(monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(doctor, "_data", lambda: [])
    doctor.doctor_command()
    said = capsys.readouterr().out
    assert "  – optuna         optional, not installed" in said
    assert 'optuna: pip install "optuna>=' in said
    assert "gradmem[" not in said
    assert "! optuna" not in said


def test_demo_shows_rows_and_writes_a_page(tmp_path):
    said = gradmem("demo", "--no-open", cwd=tmp_path)
    assert said.count("after task 10:") == 3
    heading, row = said.splitlines()[1:3]
    assert heading.split()[:3] == ["on", "task", "1"]
    assert len(heading) == len(row)
    assert "(below 0: forgotten)" in said
    assert said.count(".png") == 0
    *lines, last = said.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["single", "ewc", "gem"]
    assert last.startswith("Every chart")
    assert (tmp_path / "demo" / "report.html").exists()
    assert str(tmp_path / "demo" / "report.html") in said
    kept = [json.loads((tmp_path / f"demo/{n}-seed0/result.json").read_text()) for n in KEPT]
    single, gem = (result["R"] for result in kept)
    assert gem[-1][0] > single[-1][0] + 0.3
    best = max(row[0] for row in gem)
    assert lines[-1].endswith(f"  {gem[0][0]:.2f} → {best:.2f} → {gem[-1][0]:.2f}")
