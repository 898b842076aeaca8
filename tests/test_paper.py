"""The paper run again: what is run, nothing twice, and what is kept."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gradmem.benchmarks import BENCHMARKS
from gradmem.benchmarks.data_sets import kind_of_data
from gradmem.data import load_mnist
from gradmem.files import write_json
from gradmem.learners import LEARNERS
from gradmem.reproduction.kept import keep, load
from gradmem.reproduction.numbers import Number, numbers, second_values
from gradmem.reproduction.page import page_text
from gradmem.reproduction.plan import (
    PARTS,
    Conditions,
    Setting,
    settings_of,
)
from gradmem.reproduction.runs import default_workers, make_runs
from gradmem.reproduction.search import keep_search, load_searches, search
from gradmem.sweeps import InTurn

from .papers import GEM, MNIST, TINY, keep_like_published, made_up, paper, started
from .test_data import idx

# What was published --------------------------------------------------------------------------


def test_there_are_ninety_six_published_numbers():
    parts = Counter(number.part for number in numbers())
    assert parts == {"table-1": 10, "table-2": 8, "table-3": 33, "appendix-b": 45}
    things = {(number.part, number.setting, number.metric) for number in numbers()}
    assert len(things) == len(numbers())


def test_transfer_in_appendix_b_is_computed_by_the_equations_not_as_printed():
    found = [n for n in numbers() if n.part == "appendix-b" and n.metric in ("bwt", "fwt")]
    for number in found:
        assert number.value * 19 / 20 == pytest.approx(number.printed, abs=1.1e-4)
    assert any(abs(number.value - number.printed) > 0.005 for number in found)


def test_where_the_paper_has_two_values_both_are_known():
    def values(part, benchmark, learner, metric):
        (number,) = [
            n
            for n in numbers()
            if (n.part, n.setting, n.metric) == (part, Setting(benchmark, learner), metric)
        ]
        return [round(n.printed or n.value, 4) for n in (number, *second_values(number))]

    assert values("table-2", "cifar100-incremental", "gem", "acc") == [0.654, 0.6783]
    assert values("table-2", "cifar100-incremental", "icarl", "acc") == [0.508, 0.5462]
    assert values("table-3", "mnist-rotations", "independent", "acc") == [0.56, 0.6241]
    assert values("table-3", "mnist-rotations", "gem", "bwt") == [0.05, 0.0048]
    assert values("appendix-b", "mnist-rotations", "gem", "bwt") == [0.0048, 0.05]


def test_values_that_differ_by_rounding_are_one():
    table = Number("table-3", GEM, "acc", 0.86, 2)
    assert second_values(table, [table, Number("appendix-b", GEM, "acc", 0.8607, 4)]) == []
    far = Number("appendix-b", GEM, "acc", 0.8661, 4)
    assert second_values(table, [table, far]) == [far]


# The plan ------------------------------------------------------------------------------------


def test_parts_share_their_settings():
    each = {part: settings_of([part]) for part in PARTS}
    assert {part: len(found) for part, found in each.items()} == {
        "figure-1": 15,
        "table-1": 10,
        "table-2": 8,
        "table-3": 18,
        "appendix-b": 15,
    }
    assert len(settings_of(PARTS)) == len({s for found in each.values() for s in found}) == 34
    assert [part for part in PARTS if GEM in settings_of([part])] == [
        "figure-1",
        "table-1",
        "table-3",
        "appendix-b",
    ]
    assert 5 * len(settings_of(PARTS, MNIST)) == 115


def test_every_setting_is_a_run_at_the_published_best_values():
    made = [setting for setting in settings_of(PARTS) if setting.learner in LEARNERS]
    for setting in made:
        experiment = Conditions().experiment(setting, seed=3)
        recipe = BENCHMARKS[setting.benchmark].settings[setting.learner]
        assert experiment.settings == recipe | dict(setting.changes)
        size = 2500 if setting.benchmark == "cifar100-incremental" else 1000
        stream = experiment.stream
        assert (stream["n_tasks"], stream["examples_per_task"]) == (20, size)
        assert (stream["epochs"], experiment.seed) == (setting.epochs, 3)
    mnist = [setting for setting in settings_of(PARTS, MNIST) if setting.changes]
    assert all(setting.shuffled for setting in mnist)


def test_table_2_varies_the_memory_and_shares_its_largest_with_appendix_b():
    found = settings_of(["table-2"])
    sizes = {s.learner: [] for s in found}
    for setting in found:
        sizes[setting.learner].append(dict(setting.changes))
    assert sizes == {
        "gem": [{"memories": 10}, {"memories": 64}, {"memories": 128}, {}],
        "icarl": [{"budget": 200}, {"budget": 1280}, {"budget": 2560}, {}],
    }
    recipes = BENCHMARKS["cifar100-incremental"].settings
    assert recipes["gem"]["memories"] * 20 == recipes["icarl"]["budget"] == 5120


def test_precision_is_gems_alone():
    conditions = replace(TINY, precision="bf16")
    assert conditions.experiment(GEM, 0).settings["precision"] == "bf16"
    single = conditions.experiment(Setting("mnist-rotations", "single"), 0)
    assert "precision" not in single.settings


def test_workers_have_two_cores_each_and_a_gpu_one_worker(monkeypatch):
    monkeypatch.setattr("gradmem.evaluation.machine.cores", lambda: 2)
    assert default_workers(TINY) == 1
    monkeypatch.setattr("gradmem.evaluation.machine.cores", lambda: 16)
    assert default_workers(TINY) == 8
    assert default_workers(Conditions(device="cuda")) == 1


# Running -------------------------------------------------------------------------------------


def test_parts_run_nothing_twice_and_another_part_goes_on(tmp_path, monkeypatch, capsys):
    size = ["--data", "sample", "--tasks", 2, "--examples", 20, "--seeds", 2, "--out", tmp_path]
    rotations = ["--benchmarks", "mnist-rotations"]
    assert paper(monkeypatch, "table-3", *size, "--workers", 1) == 0
    assert len(started(tmp_path)) == 18 * 2
    assert "48 have been run only in a trial" in capsys.readouterr().out
    assert paper(monkeypatch, "table-1", "appendix-b", *rotations, *size) == 0
    assert len(started(tmp_path)) == 18 * 2  # Table 3 had them all
    assert paper(monkeypatch, *rotations, *size[:-4], "--seeds", 3, "--out", tmp_path) == 0
    assert len(started(tmp_path)) == 18 * 3
    assert set(started(tmp_path).values()) == {1}
    kept = load(tmp_path / "kept")
    assert len(kept) == 18
    assert {one.seeds for one in kept.values()} == {3}


def test_some_learners_can_have_more_seeds(tmp_path, monkeypatch):
    size = ["--data", "sample", "--tasks", 2, "--examples", 20]
    where = ["--out", tmp_path, "--benchmarks", "mnist-rotations", "appendix-b"]
    assert paper(monkeypatch, *size, *where, "--learners", "single,ewc", "--seeds", 1) == 0
    assert paper(monkeypatch, *size, *where, "--learners", "single", "--seeds", 3) == 0
    kept = {s.learner: k for s, k in load(tmp_path / "kept").items()}
    assert {name: k.seeds for name, k in kept.items()} == {"single": 3, "ewc": 1}
    assert "--learners single --seeds 3" in kept["single"].about["command"]
    assert set(started(tmp_path).values()) == {1}


def test_what_was_interrupted_goes_on(tmp_path):
    class Stopped:
        """Stops after five runs, as by Ctrl-C."""

        def __call__(self, function, items):
            for i, outcome in enumerate(InTurn()(function, items)):
                if i == 5:
                    raise KeyboardInterrupt
                yield outcome

    some = [replace(GEM, learner="single", epochs=n) for n in (1, 2, 5)]
    told = {}
    with pytest.raises(KeyboardInterrupt):
        make_runs(tmp_path, some, range(4), TINY, Stopped(), on_finished=told.__setitem__)
    assert len(started(tmp_path)) == 4 + 6
    assert [len(told[setting]) for setting in some] == [4, 4, 1]  # nothing waits for the end
    made, failed = make_runs(tmp_path, some, range(4), TINY, InTurn())
    assert failed == []
    assert [len(runs) for runs in made.values()] == [4, 4, 4]
    assert [run.config["seed"] for run, _ in made[some[1]]] == [0, 1, 2, 3]
    assert len(started(tmp_path)) == 12
    assert set(started(tmp_path).values()) == {1}  # the sixth had finished when it was stopped


def test_runs_whose_seconds_are_compared_are_made_alone_whatever_part_needs_them(tmp_path):
    class Elsewhere:
        """An executor that says what it was given."""

        seen: list = []  # noqa: RUF012

        def __call__(self, function, items):
            self.seen += [experiment.stream["epochs"] for experiment in items]
            yield from InTurn()(function, items)

    two = Setting("mnist-rotations", "single", (), 2)
    made, _ = make_runs(tmp_path, [replace(two, epochs=1), two], (0,), TINY, Elsewhere())
    assert Elsewhere.seen == [2]
    assert {s.epochs: alone for s, runs in made.items() for _, alone in runs} == {
        1: True,
        2: False,
    }


def test_a_run_that_fails_is_told_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BENCHMARKS["mnist-rotations"].settings, "single", {"lr": 1e30})
    size = ["--data", "sample", "--tasks", 2, "--examples", 40, "--seeds", 1, "--out", tmp_path]
    assert paper(monkeypatch, "table-1", *size) == 0
    said = capsys.readouterr().out
    assert re.search(r"mnist-rotations-single-lr.* failed: FloatingPointError", said)
    assert len(load(tmp_path / "kept")) == 9
    page = (tmp_path / "REPRODUCTION.md").read_text()
    assert "| MNIST rotations | single | – | 11 | – | not run |" in page


def test_two_at_once_in_one_folder_are_refused(tmp_path):
    from filelock import FileLock

    with (
        FileLock(tmp_path / "paper.lock"),
        pytest.raises(ValueError, match="another `gradmem paper` is at work in"),
    ):
        make_runs(tmp_path, [GEM], (0,), TINY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-4"], "a part must be one of all, figure-1, .*; got 'table-4'"),
        (["table-2"], "table-2 has nothing on mnist-permutations, mnist-rotations"),
        (["--benchmarks", "mnist"], "benchmark must be one of .*; got 'mnist'"),
        (["--learners", "single,sgd"], "learner must be one of .*; got 'sgd'"),
        (["--learners", "icarl"], "has nothing of icarl on mnist-permutations, mnist-rotations"),
        (["--learners", "gem", "--grid"], "--grid is for all learners"),
        (["--seeds", 0], "--seeds must be at least 1, got 0"),
        (["--tasks", 0], r"n_tasks must be at least 1, got 0 \(n_tasks is --tasks\)"),
        (["--from", "nowhere"], "nowhere is no folder with kept results"),
        (["table-1", "--from", "."], "only --out goes with it"),
        (["--from", ".", "--device", "foo"], "only --out goes with it"),
        (["--from", "tests"], "tests has no kept results"),
    ],
)
def test_a_wrong_command_says_what_is_right(arguments, message, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    data = [] if "--from" in arguments else ["--data", "sample"]
    assert paper(monkeypatch, *arguments, *data, "--out", out) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize("arguments", [[], ["--from", "results/paper"]])
def test_a_file_where_a_folder_is_needed_is_named(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").touch()
    assert paper(monkeypatch, *arguments, "--out", tmp_path / "taken") == 2
    assert "--out must be a folder" in capsys.readouterr().err


def test_the_search_is_kept_with_what_it_chose(tmp_path):
    grid = {"single": {"lr": [0.0001, 0.1]}, "gem": {"lr": [0.1], "margin": [0.5]}}
    conditions = replace(TINY, examples_per_task=60)
    done = search(tmp_path, "mnist-rotations", conditions, 2, InTurn(), grid=grid)
    keep_search(tmp_path / "kept", "mnist-rotations", done, conditions, "gradmem paper --grid")
    (found,) = load_searches(tmp_path / "kept")
    chosen = {choice["learner"]: choice for choice in found["choices"]}
    assert chosen["single"]["settings"] == {"lr": 0.1}
    assert chosen["single"]["considered"] == 2
    assert [run["seed"] for run in chosen["gem"]["test"]] == [1000, 1001]
    page = page_text(tmp_path / "kept")
    assert "## The search for settings" in page
    assert "| MNIST rotations | single | – | lr 0.1 | 2 | – |" in page
    assert "This one is a trial" in page


# What is kept --------------------------------------------------------------------------------


def test_what_is_kept_is_what_was_measured(tmp_path):
    setting = Setting("mnist-rotations", "gem", (), 2)
    made, _ = make_runs(tmp_path, [setting], (0, 1), TINY, InTurn())
    keep(tmp_path / "kept", setting, made[setting], "gradmem paper table-3")
    (kept,) = load(tmp_path / "kept").values()
    assert kept.setting == setting
    assert kept.about["command"] == "gradmem paper table-3"
    assert kept.about["settings"] == BENCHMARKS["mnist-rotations"].settings["gem"]
    for (run, _), again in zip(made[setting], kept.row.runs, strict=True):
        assert np.abs(run.R - again.R).max() <= 0.5e-4
        for name in ("acc", "bwt", "fwt"):
            assert again.result[name] == pytest.approx(run.result[name], abs=1e-4)
        for name in ("steps", "violations", "active_constraints"):
            assert again.result[name] == run.result[name]
        assert again.result["seconds"] == pytest.approx(run.result["seconds"], abs=1e-6)
        assert again.result["versions"] == run.result["versions"]
        assert again.config["seed"] == run.config["seed"]
    examples, accuracy = kept.row.first_task
    assert examples == [0, 40, 80]
    assert len(accuracy) == 3


def test_no_path_of_the_machine_is_kept(tmp_path, monkeypatch):
    from gradmem.data.mnist import FILES, load_mnist
    from tests.test_data import idx, write

    images = load_mnist("sample")
    parts = {name: getattr(images, name).numpy().astype(np.uint8) for name in FILES}
    folder = tmp_path / "my-data"
    write(folder, {FILES[n].name: idx(p.shape, p.tobytes()) for n, p in parts.items()})
    size = ["--data", folder, "--tasks", 2, "--examples", 20, "--seeds", 1]
    out = tmp_path / "out"
    assert paper(monkeypatch, "table-1", *size, "--out", out, "--keep", tmp_path / "kept") == 0
    texts = [file.read_text() for file in (tmp_path / "kept").iterdir()]
    texts.append((out / "REPRODUCTION.md").read_text())
    assert len(texts) == 11
    assert not [text for text in texts if "my-data" in text or str(tmp_path) in text]
    assert "`gradmem paper table-1 --seeds 1 --tasks 2 --examples 20`" in texts[-1]


def test_all_of_the_paper_is_small(tmp_path):
    keep_like_published(tmp_path, settings_of(PARTS))
    assert len(load(tmp_path)) == 34
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1e6


def test_fewer_seeds_or_a_trial_do_not_replace_what_is_kept(tmp_path):
    def kept():
        (one,) = load(tmp_path).values()
        return one.seeds, one.is_trial

    keep_like_published(tmp_path, [GEM], seeds=2, data="sample")
    assert kept() == (2, True)
    keep_like_published(tmp_path, [GEM], seeds=1)
    assert kept() == (1, False)
    keep_like_published(tmp_path, [GEM], seeds=3)
    for seeds, data in ((2, None), (5, "sample")):
        keep_like_published(tmp_path, [GEM], seeds=seeds, data=data)
        assert kept() == (3, False)


def test_data_that_are_not_the_papers_make_a_trial(tmp_path):
    digits = load_mnist("sample")
    for name, part in (("train", "train"), ("t10k", "test")):
        x, y = (getattr(digits, f"{part}_{which}").numpy() for which in "xy")
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(x.shape, x.tobytes()))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(y.shape, bytes(y.tolist())))
    assert kind_of_data("mnist-rotations", "sample") == "sample"
    kind = kind_of_data("mnist-rotations", str(tmp_path))
    assert kind == "other"
    runs = [(made_up(GEM, 0, np.full((20, 20), 0.5), np.full(20, 0.1)), True)]
    keep(tmp_path / "kept", GEM, runs, "gradmem paper", kind)
    assert load(tmp_path / "kept")[GEM].is_trial


@pytest.mark.parametrize("name", ["mnist-rotations-gem.json", "grid-mnist-rotations.json"])
@pytest.mark.parametrize("content", ["{}", "{", "[]"])
def test_a_damaged_file_is_named_before_anything_is_run(
    name, content, tmp_path, monkeypatch, capsys
):
    (tmp_path / name).write_text(content)
    size = ["--data", "sample", "--tasks", 2, "--examples", 20, "--seeds", 1]
    where = ["--out", tmp_path / "out", "--keep", tmp_path]
    assert paper(monkeypatch, "table-1", *size, *where) == 2
    assert f"{name} is no kept" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_result_is_named(tmp_path):
    write_json(tmp_path / "odd.json", {"benchmark": "mnist-rotations"})
    with pytest.raises(ValueError, match=r"odd\.json is no kept result: it has no "):
        load(tmp_path)
