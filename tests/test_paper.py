"""The paper run again: nothing twice, honest marks, and a page that follows from what is kept."""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradmem.learners import LEARNERS
from gradmem.metrics import transfer_metrics
from gradmem.paper import appendix_b, reasons
from gradmem.paper.compare import INSIDE, OUTSIDE, compare, compare_cells, next_run
from gradmem.paper.kept import keep, load
from gradmem.paper.numbers import Number, numbers, second_values
from gradmem.paper.page import page_text, summary, write_reproduction
from gradmem.paper.plan import (
    BENCHMARKS,
    PARTS,
    Conditions,
    Setting,
    parts_of,
    settings_of,
)
from gradmem.paper.runs import default_workers, make_runs
from gradmem.paper.search import keep_search, load_searches, search
from gradmem.recipes import RECIPES
from gradmem.report import Estimate
from gradmem.results import Run, write_json
from gradmem.sweep import InTurn, Store

MNIST = ["mnist-rotations", "mnist-permutations"]
TINY = Conditions(data="sample", n_tasks=2, examples_per_task=20)
GEM = Setting("mnist-rotations", "gem")
VERSIONS = {"gradmem": "1", "torch": "2", "processor": "a processor", "threads": 2, "gpu": None}
RESULTS = Path(__file__).parents[1] / "results" / "paper"
PAGE = Path(__file__).parents[1] / "docs" / "REPRODUCTION.md"


def paper(monkeypatch, *arguments):
    """`gradmem paper` in this process; its exit code."""
    from gradmem.cli import main

    monkeypatch.setattr(sys, "argv", ["gradmem", "paper", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


def started(out):
    """How often each run was started, in both folders."""
    return Counter(
        (name, entry["key"])
        for name in ("alone", "others")
        for entry in Store(out / name).log()
        if entry["event"] == "started"
    )


def made_up(setting, seed, R, baseline, seconds=10.0, **changes):
    """A run that never was."""
    config = {
        "benchmark": setting.benchmark,
        "learner": setting.learner,
        "settings": RECIPES.get(setting.benchmark, {}).get(setting.learner, {"lr": 0.1})
        | dict(setting.changes),
        "seed": seed,
        "data": None,
        "n_tasks": 20,
        "examples_per_task": BENCHMARKS[setting.benchmark],
        "batch_size": 10,
        "epochs": setting.epochs,
        "shuffled": setting.shuffled,
        "device": "cpu",
    }
    config |= changes
    R, baseline = np.array(R).round(4), np.array(baseline).round(4)
    metrics = transfer_metrics(R, baseline, [None] if setting.shuffled else None)
    result = {
        "acc": metrics.acc,
        "bwt": None if math.isnan(metrics.bwt) else metrics.bwt,
        "fwt": None if math.isnan(metrics.fwt) else metrics.fwt,
        "seconds": seconds,
        "steps": 2000,
        "baseline": baseline.tolist(),
        "R": R.tolist(),
        "curves": {"examples": [i * 1000 for i in range(len(R) + 1)]},
        "versions": VERSIONS,
    }
    return Run(Path("nowhere"), config, result)


def keep_like_published(folder, settings, seeds=5, shift=0.0, noise=0.02, **changes):
    """Keep runs scattered about the published matrix, or about one of the same kind."""
    random = np.random.default_rng(0)
    for setting in settings:
        entry = appendix_b()[setting.benchmark][setting.learner]
        R = np.array(entry["R"][-1:] if setting.shuffled else entry["R"])
        runs = [
            made_up(
                setting,
                seed,
                np.clip(R + shift + random.normal(0, noise, R.shape), 0, 1),
                np.clip(np.array(entry["baseline"]) + random.normal(0, noise, 20), 0, 1),
                seconds=10 + random.random(),
                **changes,
            )
            for seed in range(seeds)
        ]
        timed = "table-1" in parts_of(setting)
        keep(folder, setting, [(run, timed) for run in runs], "gradmem paper")


def comparisons(folder):
    found = compare(numbers(), load(folder))
    return {(c.number.part, c.number.setting, c.number.metric): c for c in found}


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
    assert parts_of(GEM) == ["figure-1", "table-1", "table-3", "appendix-b"]
    assert 5 * len(settings_of(PARTS, MNIST)) == 115


def test_every_setting_is_a_run_at_the_published_best_values():
    made = [setting for setting in settings_of(PARTS) if setting.learner in LEARNERS]
    for setting in made:
        experiment = Conditions().experiment(setting, seed=3)
        recipe = RECIPES[setting.benchmark][setting.learner]
        assert experiment.settings == recipe | dict(setting.changes)
        size = 2500 if setting.benchmark == "cifar100-incremental" else 1000
        assert (experiment.n_tasks, experiment.examples_per_task) == (20, size)
        assert (experiment.epochs, experiment.seed) == (setting.epochs, 3)
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
    recipes = RECIPES["cifar100-incremental"]
    assert recipes["gem"]["memories"] * 20 == recipes["icarl"]["budget"] == 5120


def test_precision_is_gems_alone():
    conditions = replace(TINY, precision="bf16")
    assert conditions.experiment(GEM, 0).settings["precision"] == "bf16"
    single = conditions.experiment(Setting("mnist-rotations", "single"), 0)
    assert "precision" not in single.settings


def test_workers_have_two_cores_each_and_a_gpu_one_worker(monkeypatch):
    monkeypatch.setattr("gradmem.machine.cores", lambda: 2)
    assert default_workers(TINY) == 1
    monkeypatch.setattr("gradmem.machine.cores", lambda: 16)
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
    made = make_runs(tmp_path, some, range(4), TINY, InTurn())
    assert [len(runs) for runs in made.runs.values()] == [4, 4, 4]
    assert [run.config["seed"] for run, _ in made.runs[some[1]]] == [0, 1, 2, 3]
    assert len(started(tmp_path)) == 12
    assert set(started(tmp_path).values()) == {1}  # the sixth had finished when it was stopped


def test_runs_whose_seconds_are_compared_are_made_alone_whatever_part_needs_them(tmp_path):
    class Elsewhere:
        """An executor that says what it was given."""

        seen: list = []  # noqa: RUF012

        def __call__(self, function, items):
            self.seen += [run.experiment.epochs for run in items]
            yield from InTurn()(function, items)

    two = Setting("mnist-rotations", "single", (), 2)
    made = make_runs(tmp_path, [replace(two, epochs=1), two], (0,), TINY, Elsewhere())
    assert Elsewhere.seen == [2]
    assert {s.epochs: alone for s, runs in made.runs.items() for _, alone in runs} == {
        1: True,
        2: False,
    }


def test_a_run_that_fails_is_told_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES["mnist-rotations"], "single", {"lr": 1e30})
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
        (["--seeds", 0], "--seeds must be at least 1, got 0"),
        (["--tasks", 0], "--tasks must be at least 1, got 0"),
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
    made = make_runs(tmp_path, [setting], (0, 1), TINY, InTurn())
    keep(tmp_path / "kept", setting, made.runs[setting], "gradmem paper table-3")
    (kept,) = load(tmp_path / "kept").values()
    assert kept.setting == setting
    assert kept.about["command"] == "gradmem paper table-3"
    assert kept.about["settings"] == RECIPES["mnist-rotations"]["gem"]
    for (run, _), again in zip(made.runs[setting], kept.row.runs, strict=True):
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


def test_a_file_that_is_no_result_is_named(tmp_path):
    write_json(tmp_path / "odd.json", {"benchmark": "mnist-rotations"})
    with pytest.raises(ValueError, match=r"odd\.json is no kept result: KeyError\('runs'\)"):
        load(tmp_path)


# Marks ---------------------------------------------------------------------------------------


def test_one_more_run_lies_in_its_interval_ninety_five_times_in_a_hundred():
    random = np.random.default_rng(1)
    draws = random.normal(0.5, 0.1, (4000, 6))
    hits = 0
    for *seen, new in draws:
        low, high = next_run(Estimate.of(seen), 5)
        hits += low <= new <= high
    assert 0.94 < hits / len(draws) < 0.96


def test_one_seed_has_no_interval():
    assert all(math.isnan(end) for end in next_run(Estimate.of([0.5]), 1))


@pytest.mark.parametrize(
    ("published", "digits", "mark"),
    [
        (0.5, 2, INSIDE),
        (0.75, 2, INSIDE),  # the interval ends at 0.748
        (0.76, 2, OUTSIDE),
        (0.7484, 4, INSIDE),
        (0.7490, 4, OUTSIDE),
        (0.25, 2, INSIDE),
        (0.24, 2, OUTSIDE),
    ],
)
def test_inside_is_the_interval_for_one_more_run_give_or_take_rounding(
    published, digits, mark, tmp_path
):
    accs = (0.45, 0.5, 0.55)  # s = 0.05 and t = 4.303: 0.5 ± 0.248
    runs = [made_up(GEM, s, np.full((20, 20), acc), [0.1] * 20) for s, acc in enumerate(accs)]
    keep(tmp_path, GEM, [(run, True) for run in runs], "gradmem paper")
    (found,) = compare([Number("table-3", GEM, "acc", published, digits)], load(tmp_path))
    assert (found.low, found.high) == pytest.approx((0.2516, 0.7484), abs=1e-4)
    assert found.mark == mark


def test_runs_like_the_published_one_put_its_numbers_inside(tmp_path):
    keep_like_published(tmp_path, settings_of(["appendix-b"]))
    found = comparisons(tmp_path)
    own = [c for c in found.values() if c.number.part == "appendix-b"]
    assert sum(c.mark == INSIDE for c in own) >= 40
    cells = compare_cells(GEM, appendix_b()["mnist-rotations"]["gem"]["R"], load(tmp_path)[GEM])
    assert cells.inside >= 365
    assert cells.cells == 400
    keep_like_published(tmp_path, [GEM], shift=-0.3)
    cells = compare_cells(GEM, appendix_b()["mnist-rotations"]["gem"]["R"], load(tmp_path)[GEM])
    assert cells.inside < 100
    assert cells.difference == pytest.approx(0.3, abs=0.1)


def test_a_number_outside_has_the_reasons_that_are_known_and_no_others(tmp_path):
    keep_like_published(tmp_path, settings_of(PARTS, MNIST), shift=-0.1, noise=0.001)
    found = comparisons(tmp_path)
    above = found["appendix-b", GEM, "acc"]
    assert above.mark == OUTSIDE
    assert [why for why in above.perhaps if "chose settings by the test sets" in why]
    keep_like_published(tmp_path, settings_of(PARTS, MNIST), shift=0.05, noise=0.001)
    found = comparisons(tmp_path)
    below = found["appendix-b", GEM, "acc"]
    assert below.mark == OUTSIDE
    assert below.why == below.perhaps == ()
    page = page_text(tmp_path)
    assert re.search(r"Appendix B, GEM on MNIST rotations, ACC: .* Reason not known\.", page)


def test_of_two_published_values_one_inside_explains_the_other(tmp_path):
    keep_like_published(tmp_path, [GEM], noise=0.003)
    c = comparisons(tmp_path)["table-3", GEM, "bwt"]
    assert c.mark == OUTSIDE
    assert c.why[0] == (
        "The paper has two values for this; the other, +0.0051 in Appendix B, is inside."
    )


def test_a_table_divided_by_t_is_recognised(tmp_path):
    value = Number("table-3", GEM, "bwt", -0.40, 2)
    R = np.full((20, 20), 0.9)
    R[-1] = 0.9 - 0.42 * (np.arange(20) < 19)
    runs = [made_up(GEM, s, R + 0.001 * s * np.eye(20), [0.1] * 20) for s in range(3)]
    keep(tmp_path, GEM, [(run, True) for run in runs], "gradmem paper")
    (found,) = compare([value], load(tmp_path))
    assert found.mark == OUTSIDE
    assert "multiplied by 20/19 it is inside" in found.why[0]


def test_an_fwt_that_began_elsewhere_is_recognised(tmp_path):
    """The same R after an untrained network that knew more: less is left to be transferred."""
    published = appendix_b()["mnist-rotations"]["gem"]
    R, baseline = np.array(published["R"]), np.array(published["baseline"])
    noise = np.random.default_rng(0).normal(0, 0.001, (3, 20, 20))
    for more, known in ((0.1, True), (0.0, False)):
        shift = 0 if known else 0.1  # or R itself is another
        runs = [made_up(GEM, s, R - shift + noise[s], baseline + more) for s in range(3)]
        keep(tmp_path, GEM, [(run, True) for run in runs], "gradmem paper")
        found = comparisons(tmp_path)["appendix-b", GEM, "fwt"]
        assert found.mark == OUTSIDE
        assert any("an untrained network" in why for why in found.perhaps) == known


def test_every_reason_is_about_something_that_is_compared():
    names = {"part", "benchmark", "learner", "epochs", "shuffled", "metric", "side"}
    for reason in reasons():
        assert set(reason) in ({"when", "why"}, {"when", "perhaps"})
        assert set(reason["when"]) <= names
        about = {k: v for k, v in reason["when"].items() if k in ("benchmark", "learner", "epochs")}
        matched = [
            n for n in numbers() if all(getattr(n.setting, k) in v for k, v in about.items())
        ]
        assert matched, reason


def test_seconds_of_runs_that_shared_the_machine_are_not_compared(tmp_path):
    number = Number("table-1", GEM, "seconds", 135, 0)
    R = appendix_b()["mnist-rotations"]["gem"]["R"]
    runs = [made_up(GEM, s, R, [0.1] * 20, seconds=20.0 + s) for s in range(4)]
    keep(tmp_path, GEM, [(run, s < 2) for s, run in enumerate(runs)], "gradmem paper")
    (found,) = compare([number], load(tmp_path))
    assert found.estimate.mean == 20.5
    assert found.mark == OUTSIDE
    assert "another machine" in found.why[0]
    keep(tmp_path, GEM, [(run, False) for run in runs], "gradmem paper")
    assert compare([number], load(tmp_path))[0].mark == "not run"


@pytest.mark.parametrize("change", [{"n_tasks": 19}, {"examples_per_task": 50}, {"data": "sample"}])
def test_a_trial_is_not_compared(change, tmp_path):
    keep_like_published(tmp_path, [GEM], **change)
    found = comparisons(tmp_path)
    assert {c.mark for key, c in found.items() if key[1] == GEM} == {"trial"}
    entry = appendix_b()["mnist-rotations"]["gem"]
    assert compare_cells(GEM, entry["R"], load(tmp_path)[GEM]).mark == "trial"


# The page ------------------------------------------------------------------------------------


def test_the_summary_counts_what_is_inside_outside_and_missing(tmp_path):
    keep_like_published(tmp_path, [GEM], noise=0.003)
    keep_like_published(tmp_path, [Setting("mnist-rotations", "ewc")], seeds=1)
    found = compare(numbers(), load(tmp_path))
    assert summary(found) == (
        "Of the paper's 86 values of ACC, BWT and FWT, 5 have been compared: **4 are inside the "
        "95% interval for one more run, 1 outside** (1 of them for a known reason, 0 for a "
        "possible one). 76 have not been run. 5 have been run with one seed only. Table 1's times "
        "are of another machine and are not counted."
    )


def test_the_page_shows_both_published_values(tmp_path):
    keep_like_published(tmp_path, settings_of(PARTS))
    rows = [line for line in page_text(tmp_path).splitlines() if line.startswith("|")]
    for start, both in (
        ("| GEM | 5,120 |", "| 0.654; Appendix B: 0.6783 |"),
        ("| iCaRL | 5,120 |", "| 0.508; Appendix B: 0.5462 |"),
        ("| independent | 1 | ACC |", "| 0.56; Appendix B: 0.6241 |"),
        ("| GEM | 1 | BWT |", "| +0.05; Appendix B: +0.0051 |"),
        ("| GEM | BWT |", "| +0.0051 (printed +0.0048); Table 3: +0.05 |"),
        ("| GEM | ACC |", "| 0.6783; Table 2: 0.654 |"),
    ):
        assert any(row.startswith(start) and both in row for row in rows), (start, both)


def test_every_published_number_is_on_the_page_run_or_not(tmp_path):
    tmp_path.joinpath("kept").mkdir()
    nothing = page_text(tmp_path / "kept")
    assert "0 have been compared" in nothing
    assert "86 have not been run" in nothing
    keep_like_published(tmp_path / "kept", settings_of(PARTS, MNIST))
    some = page_text(tmp_path / "kept")
    for page in (nothing, some):
        assert len(re.findall(r"^\|.*\| (not run|inside|\*\*outside\*\*.*) \|$", page, re.M)) == 96
    assert "incremental CIFAR-100: not run." in some
    assert "MNIST rotations: not run." not in some


def test_the_page_follows_from_what_is_kept_and_the_command_writes_it(tmp_path, monkeypatch):
    keep_like_published(tmp_path / "kept", settings_of(PARTS))
    assert paper(monkeypatch, "--from", tmp_path / "kept", "--out", tmp_path / "docs") == 0
    page = (tmp_path / "docs" / "REPRODUCTION.md").read_text()
    assert page == page_text(tmp_path / "kept")
    shown = re.findall(r"\]\((.*\.png)\)", page)
    assert len(shown) == 6
    assert all((tmp_path / "docs" / name).stat().st_size > 10_000 for name in shown)
    file = tmp_path / "kept" / f"{GEM.slug}.json"
    kept = json.loads(file.read_text())
    kept["runs"][0]["R"][-1] = [0.1] * 20
    file.write_text(json.dumps(kept))
    assert page_text(tmp_path / "kept") != page


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no results are kept yet")
def test_the_page_in_the_repository_is_made_from_the_results_beside_it(tmp_path):
    assert PAGE.read_text() == page_text(RESULTS), (
        "make it again: gradmem paper --from results/paper --out docs"
    )
    written = write_reproduction(RESULTS, tmp_path)
    assert {path.name for path in written[1:]} == {
        path.name for path in PAGE.with_name("reproduction").iterdir()
    }
    assert sum(file.stat().st_size for file in RESULTS.iterdir()) < 3e6
