"""Run folders: written whole or not at all, and read back."""

import json
import os

import numpy as np
import pytest

import gradmem as gm
from gradmem.files import write_json
from gradmem.reports import draw_pictures, markdown_table, summarize
from gradmem.reports.summary import Estimate
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import find_runs, newest
from gradmem.runs.write_folder import RunFolder
from tests.synthetic import write_run

TOO_DEEP = "lists nested too deeply"
TINY = {"data": "sample", "n_tasks": 2, "examples_per_task": 30}


def finished(folder, **changes):
    experiment = Experiment("mnist-rotations", **({"learner": "single"} | TINY | changes))
    target = RunFolder(folder, experiment)
    target.open()
    result = experiment.run()
    target.save(result)
    return result


def test_a_folder_holds_everything_about_its_run(tmp_path):
    result = finished(tmp_path, learner="gem", seed=3, every=20)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["learner"] == "gem"
    assert config["settings"] == {
        "lr": 0.1,
        "memories": 256,
        "margin": 0.5,
        "margin_rule": "shift",
    }
    written = json.loads((tmp_path / "result.json").read_text())
    assert np.array_equal(written["R"], result.R)
    assert np.array_equal(written["baseline"], result.baseline)
    assert (written["acc"], written["bwt"], written["fwt"]) == (result.acc, result.bwt, result.fwt)
    assert written["seed"] == 3
    assert written["curves"]["examples"] == [0, 20, 30, 40, 60]
    assert np.array_equal(written["curves"]["accuracy"], result.curves)
    assert written["seconds_training"] + written["seconds_evaluation"] == written["seconds"]
    assert written["steps"] == 6
    assert written["violations"] == result.statistics["violations"]
    assert {"gradmem", "python", "torch", "numpy"} <= set(written["versions"])
    assert sorted(os.listdir(tmp_path)) == ["config.json", "result.json"]


def test_what_is_not_defined_is_null_not_nan(tmp_path):
    finished(tmp_path, n_tasks=1)
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text)["bwt"] is None
    assert "NaN" not in text


def test_the_same_experiment_may_run_again_but_not_over_another(tmp_path):
    finished(tmp_path)
    finished(tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match=r"another experiment .*: seed was 0 and is 1\. "):
        finished(tmp_path, seed=1)
    assert (tmp_path / "config.json").read_text() == before
    (tmp_path / "config.json").write_text(before[:-9])
    with pytest.raises(ValueError, match=r"another experiment .*: its config\.json is another"):
        finished(tmp_path)


def test_a_result_that_is_replaced_is_not_taken_for_the_new_ones(tmp_path):
    """Also if the new run is never finished."""
    finished(tmp_path)
    RunFolder(tmp_path, Experiment("mnist-rotations", "ewc", data="sample")).open(overwrite=True)
    with pytest.raises(ValueError, match="no finished run"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("result.json", {"R": []}, "no matrix of numbers for R"),
        ("result.json", {"R": [[0.1, None]]}, "no matrix of numbers for R"),
        ("result.json", {"R": [[0.1, 0.2], [0.3]]}, "no matrix of numbers for R"),
        ("result.json", {"acc": "abc"}, "no number for acc"),
        ("result.json", {"curves": None}, "no learning curves"),
        ("result.json", {"learned": [0]}, "no task for each row of R in learned"),
        ("result.json", {"learned": list("abcde")}, "no task for each row of R in learned"),
        ("result.json", {"curves": {}}, "no learning curves"),
        ("config.json", {"settings": None}, "settings that are no dictionary"),
        ("result.json", {"acc": 10**400}, "a number that is too large"),
        ("result.json", {"seconds": True}, "no number for seconds"),
        ("result.json", {"steps": "many"}, "no number for steps"),
        ("result.json", {"R": [[10**400]]}, "a number that is too large"),
        ("result.json", {"R": [[1e300]]}, "no matrix of numbers for R"),
        ("result.json", {"bwt": 1e300}, "no number for bwt"),
        ("result.json", {"baseline": [0.1]}, "no baseline for each column of R"),
        ("result.json", {"learned": [0, 1, 2, 3, 5]}, "no task for each row of R in learned"),
        ("result.json", {"tasks": "abc"}, "no list of tasks"),
        ("result.json", {"versions": "new"}, "versions that are no dictionary"),
        ("result.json", {"tasks": [[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]}, TOO_DEEP),
        (
            "result.json",
            {"curves": {"examples": [0], "accuracy": [[0.1] * 5] * 2}},
            "learning curves of another size than R",
        ),
    ],
)
def test_a_file_with_wrong_contents_is_left_out(file, change, says, tmp_path):
    for name in ("good", "bad"):
        write_run(tmp_path / name)
    path = tmp_path / "bad" / file
    write_json(path, json.loads(path.read_text()) | change)
    said = []
    (run,) = find_runs([tmp_path], lambda folder, why: said.append((folder.name, why)))
    assert run.folder.name == "good"
    assert said == [("bad", f"{file} has {says}")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, TOO_DEEP),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, TOO_DEEP),
        ('{"seconds": NaN}', "NaN is no number"),
        ('{"seconds": -Infinity}', "-Infinity is no number"),
        ('{"seconds": ' + "9" * 5000 + "}", "result.json is not whole"),
        ("[]", "result.json has no dictionary"),
        ("\udcff", "result.json is not whole"),
    ],
)
def test_a_hostile_file_is_one_sentence(text, says, tmp_path):
    write_run(tmp_path)
    (tmp_path / "result.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=says) as caught:
        find_runs([tmp_path])
    assert "result.json" in str(caught.value)


def test_a_config_that_says_little_is_a_run_all_the_same(tmp_path):
    write_run(tmp_path / "run")
    strange = {"learner": ["a", 1], "settings": {"memories": "many", "budget": 10**300}}
    for i, config in enumerate(({}, {"benchmark": None, "seed": [1]}, strange)):
        write_json(tmp_path / "run" / "config.json", config)
        page = gm.report(tmp_path / "run", tmp_path / f"report-{i}")
        assert page.stat().st_size > 1_000_000
        assert "learner" in page.with_name("table.md").read_text()


def test_a_part_of_ones_own_is_called_by_its_name(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    own = {"benchmark": "folder/file.py:digits", "learner": "mine:<locals>.MyLearner"}
    write_json(path, config | own)
    (run,) = find_runs([tmp_path])
    assert (run.benchmark, run.name) == ("digits", "MyLearner")


# What `run` measured, saved and reported


@pytest.fixture(scope="module")
def results():
    """Of two learners on one continuum."""
    continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=30, data="sample")
    return [gm.run(kind(gm.mlp()), continuum) for kind in (gm.Single, gm.GEM)]


def test_a_result_saves_itself_as_a_run(results, tmp_path):
    folder = results[1].save(tmp_path / "new" / "gem", benchmark="digits", seed=7)
    assert sorted(os.listdir(folder)) == ["config.json", "result.json"]
    (run,) = find_runs([tmp_path])
    assert (run.benchmark, run.learner, run.config["seed"]) == ("digits", "gem", 7)
    assert (run.result["benchmark"], run.result["seed"]) == ("digits", 7)
    assert run.result["score"] == "accuracy"
    assert np.array_equal(run.R, results[1].R)


def test_a_folder_never_mixes_two_runs(results, tmp_path):
    single, gem = results
    single.save(tmp_path)
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds the result of another experiment"):
        gem.save(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before
    single.save(tmp_path)  # the same once more
    gem.save(tmp_path, overwrite=True)
    (run,) = find_runs([tmp_path])
    assert (run.learner, run.result["learner"]) == ("gem", "gem")
    assert run.result["acc"] == gem.acc


def test_what_json_cannot_write_is_named(results, tmp_path):
    results[0].save(tmp_path, loss=np.mean, network=object(), lr=np.float32(0.5), bad=float("nan"))
    (run,) = find_runs([tmp_path])
    known = {name: run.config[name] for name in ("loss", "network", "lr", "bad")}
    assert known == {"loss": "mean", "network": "<object object>", "lr": 0.5, "bad": None}


def test_folders_and_results_share_a_report(results, tmp_path):
    single, gem = results
    gem.save(tmp_path / "gem")
    page = gm.report([tmp_path / "gem", single, gem], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    written = {path.name for path in page.parent.iterdir()}
    assert {"table.md", "bars-continuum.png", "R-continuum-gem.pdf"} <= written
    table = page.with_name("table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| single", "| gem"]


def test_runs_whose_seeds_are_not_known_are_all_counted(tmp_path):
    """The network's seed is in no config."""
    continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=30, data="sample")
    for seed in range(3):
        gm.run(gm.Single(gm.mlp(seed=seed)), continuum).save(tmp_path / str(seed))
    gm.run(gm.Single(gm.mlp(seed=0)), continuum).save(tmp_path / "again")
    (row,) = summarize(newest(find_runs([tmp_path])))
    assert len(row.runs) == 3


def test_a_run_that_cannot_be_read_is_left_out_with_a_warning(results, tmp_path):
    for name in ("good", "bad"):
        results[0].save(tmp_path / name)
    (tmp_path / "bad" / "result.json").write_text("{")
    with pytest.warns(UserWarning, match="left out of the report: .*bad .result.json is not whole"):
        gm.report(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="at least one run's folder or Result, got none"):
        gm.report([], tmp_path / "out")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"acc": 1})

    def no_space(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"acc": 2})
    assert json.loads(path.read_text()) == {"acc": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_runs_are_found_below_a_folder_and_grouped_over_seeds(tmp_path):
    for seed in (0, 1):
        finished(tmp_path / f"s{seed}", seed=seed)
    finished(tmp_path / "gem", learner="gem")
    finished(tmp_path / "fast", settings={"lr": 0.1})
    rows = summarize(find_runs([tmp_path]))
    assert [(row.name, len(row.runs)) for row in rows] == [
        ("single (lr=0.003)", 2),
        ("single (lr=0.1)", 1),
        ("gem", 1),
    ]
    table = markdown_table(rows)
    assert table.splitlines()[0] == "| learner | ACC | BWT | FWT | seconds |"
    assert len(table.splitlines()) == 5


def test_missing_and_broken_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no finished run"):
        find_runs([tmp_path])
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ValueError, match="is not a run's folder"):
        find_runs([tmp_path])


def test_a_run_that_is_found_twice_counts_once(tmp_path, monkeypatch):
    write_run(tmp_path / "cmp" / "gem-seed0")
    monkeypatch.chdir(tmp_path)
    assert len(find_runs(["cmp", "cmp/gem-seed0", tmp_path])) == 1


def test_of_an_experiment_and_seed_the_newest_run_counts(tmp_path):
    for time, name in enumerate(("old", "new", "older")):
        write_run(tmp_path / name)
        os.utime(tmp_path / name / "result.json", (time % 2, time % 2))
    write_run(tmp_path / "other-seed", seed=1)
    write_run(tmp_path / "other-experiment", epochs=2)
    kept = newest(find_runs([tmp_path]))
    assert [run.folder.name for run in kept] == ["new", "other-experiment", "other-seed"]


def test_damaged_runs_can_be_left_out(tmp_path):
    for name in ("cut", "empty", "half", "no-config", "whole"):
        write_run(tmp_path / name)
    (tmp_path / "cut" / "result.json").write_text('{"R": [[0.1, ')
    (tmp_path / "empty" / "result.json").write_text("")
    (tmp_path / "half" / "result.json").write_text('{"R": [[0.1]]}')
    (tmp_path / "no-config" / "config.json").unlink()
    damaged = {}
    (run,) = find_runs([tmp_path, tmp_path], lambda path, why: damaged.update({path.name: why}))
    assert run.folder.name == "whole"
    assert damaged.keys() == {"cut", "empty", "half", "no-config"}
    assert damaged["cut"].startswith("result.json is not whole")
    assert damaged["half"] == "result.json has no acc, bwt, fwt, seconds, curves"
    assert damaged["no-config"] == "config.json: No such file or directory"
    with pytest.raises(ValueError, match="no finished run that can be read in"):
        find_runs([tmp_path / "cut"], lambda *_: None)


def test_an_interval_by_hand():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.half_width == pytest.approx(4.302653 / 3**0.5)  # Student's t, 2 degrees
    assert estimate.format(".2f") == "2.00 ± 2.48"
    assert Estimate.of([0.5]).format("+.1f") == "+0.5"
    assert Estimate.of([None]).format(".2f") == "–"


def test_pictures_are_drawn_for_every_row(tmp_path):
    finished(tmp_path / "single")
    finished(tmp_path / "shuffled", shuffled=True)
    written = draw_pictures(summarize(find_runs([tmp_path])), tmp_path)
    names = [
        "R-mnist-rotations-single",
        "R-mnist-rotations-single-shuffled-data",
        "first-task-mnist-rotations",
        "bars-mnist-rotations",
    ]
    assert [path.name for path in written] == [
        f"{name}.{kind}" for name in names for kind in ("png", "pdf")
    ]
    for path in written:
        start = {".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix]
        assert path.read_bytes().startswith(start)
        assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learner": "gme"},
            "learner must be one of single, independent, multimodal, ewc, icarl",
        ),
        ({"benchmark": "mnist"}, "benchmark must be one of mnist-rotations, mnist-permutations"),
        ({"settings": {"margin": 1}}, "single has no setting margin .* it has lr"),
        ({"settings": {"lr": -1}}, "lr must be above 0, got -1"),
        ({"n_tasks": 0}, "n_tasks must be at least 1, got 0"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
    ],
)
def test_a_wrong_experiment_is_refused_before_it_starts(changes, message):
    asked = {"benchmark": "mnist-rotations", "learner": "single"} | TINY | changes
    with pytest.raises(ValueError, match=message):
        Experiment(**asked).new_learner()
