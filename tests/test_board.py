"""The board: settings chosen on held-out data, costs beside ACC, a page from what is kept."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from gradmem.benchmarks import BENCHMARKS as KNOWN
from gradmem.benchmarks.data_sets import DATA_SETS
from gradmem.board import (
    ENTRIES,
    Cell,
    Column,
    Conditions,
    Entry,
    Searched,
    cells_of,
    keep,
    learner_text,
    load,
    make_cells,
    page_text,
    write_board,
)
from gradmem.board.compare import INSIDE, OUTSIDE, difference, verdict
from gradmem.board.plan import BENCHMARKS, final_seeds
from gradmem.reports import Estimate
from gradmem.reports.pictures.frontier import Point, frontier
from gradmem.runs.read_folder import Run
from gradmem.sweeps import InTurn, Store
from gradmem.sweeps.runner import check_settings

ROTATIONS = "mnist-rotations"
TINY = Conditions(data="sample", n_tasks=2, examples_per_task=20)
SIZE = ["--data", "sample", "--tasks", 2, "--examples", 20, "--seeds", 2]
VERSIONS = {"gradmem": "1", "torch": "2", "processor": "a processor", "threads": 2, "gpu": None}
RESULTS = Path(__file__).parents[1] / "results" / "board"
PAGE = Path(__file__).parents[1] / "docs" / "BOARD.md"


def board(monkeypatch, *arguments):
    """`gradmem board` in this process; its exit code."""
    from gradmem.cli import main

    monkeypatch.setattr(sys, "argv", ["gradmem", "board", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


def started(out):
    """How often each run was started."""
    return Counter(entry["key"] for entry in Store(out).log() if entry["event"] == "started")


def cell(name="gem", memories=200, benchmark=ROTATIONS):
    return Cell(Column(benchmark, memories), ENTRIES[name])


def made_up(seed, acc, **result):
    """A run that never was, of the board's size."""
    config = {"settings": {"lr": 0.1}, "seed": seed, "device": "cpu"}
    config |= {"n_tasks": 20, "examples_per_task": 1000, "batch_size": 10}
    found = {"acc": acc, "bwt": -0.1, "fwt": 0.5, "seconds": 3.0, "versions": VERSIONS}
    found |= {"steps": 2000, "example_gradients": 40000, "examples": 20000, "memory_bytes": 627200}
    return Run(Path(), config, found | result)


def keep_made_up(folder, which, accs, searched=None, **result):
    runs = [made_up(1000 + i, acc, **result) for i, acc in enumerate(accs)]
    return keep(folder, which, searched, runs, "gradmem board", "whole")


# The plan ------------------------------------------------------------------------------------


def test_every_setting_on_the_board_is_one_that_its_learner_takes():
    cells = cells_of()
    assert {one.entry.name for one in cells} == {*ENTRIES}
    runs = [run for one in cells for run in one.sweep(Conditions(data="sample")).experiments()]
    check_settings([run for run in runs if DATA_SETS[run.benchmark] == "mnist"], False)


@pytest.mark.parametrize("one", cells_of(), ids=lambda one: one.slug)
def test_a_search_is_small_and_no_learner_remembers_more_than_its_column(one):
    benchmark, memories = one.column.benchmark, one.column.memories
    whole = Conditions().size(benchmark)
    settings = one.settings(Conditions())
    assert len(settings) <= (12 if DATA_SETS[benchmark] == "mnist" else 4)
    if memories is not None:
        for found in settings:
            each = found.get("memories")
            total = found["budget"] if each is None else each * whole["n_tasks"]
            assert total <= memories


def test_settings_are_reported_with_other_seeds_than_they_are_chosen_with():
    for one in cells_of():
        sweep = one.sweep(Conditions())
        assert sweep.select == "validation"
        assert not {*sweep.seeds} & {*sweep.final_seeds}
    assert len(final_seeds(ROTATIONS)) == 5
    assert len(final_seeds("cifar100-incremental")) == 3


def test_mer_is_run_as_published_and_not_searched():
    one = cell("mer", 5120)
    (settings,) = one.settings(Conditions())
    assert not one.is_searched
    published = {"lr": 0.03, "beta": 0.03, "gamma": 1.0, "sample": 100, "batches": 10}
    assert settings == published | {"budget": 5120, "groups": 1}
    assert one.final(settings, TINY)[0].stream["batch_size"] == 1


def test_many_permutations_are_a_hundred_tasks_of_two_hundred_examples():
    benchmark = KNOWN["mnist-many-permutations"]
    assert (benchmark.options["n_tasks"], benchmark.options["examples_per_task"]) == (100, 200)
    few = benchmark.continuum(seed=3, n_tasks=2, data="sample")
    same = KNOWN["mnist-permutations"].continuum(
        seed=3, n_tasks=2, examples_per_task=200, data="sample"
    )
    assert [len(task.train) for task in few.tasks] == [200, 200]
    for one, other in zip(few.tasks, same.tasks, strict=True):
        assert (one.train.x == other.train.x).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("permuted-mnist", {"n_tasks": 20, "examples_per_task": 60_000, "batch_size": 128}),
        ("rotated-mnist", {"n_tasks": 20, "examples_per_task": 60_000, "batch_size": 128}),
        ("permuted-mnist-17", {"n_tasks": 17, "examples_per_task": 55_000, "batch_size": 10}),
    ],
)
def test_streams_of_other_papers_have_their_size(name, size):
    options = KNOWN[name].options
    assert {option: options[option] for option in size} == size
    assert options["epochs"] == 1
    few = KNOWN[name].continuum(seed=3, n_tasks=2, examples_per_task=20, data="sample")
    assert few.batch_size == size["batch_size"]
    assert Column(name, BENCHMARKS[name][0]) in {one.column for one in cells_of([name])}


def test_rotated_mnist_turns_digits_by_angles_in_no_order():
    def angles(name):
        few = KNOWN[name].continuum(seed=3, n_tasks=8, examples_per_task=1, data="sample")
        return [float(label.removesuffix("°")) for label in few.labels()]

    found, slices = angles("rotated-mnist"), angles("mnist-rotations")
    assert slices == sorted(slices)
    assert found != sorted(found)
    assert all(0 <= angle < 180 for angle in found)
    assert len({int(angle / 22.5) for angle in slices}) == 8 > len({int(a / 22.5) for a in found})


def test_the_wide_network_starts_as_in_the_released_code():
    network = KNOWN["permuted-mnist-17"].new_network(4)
    weights = [p for p in network.parameters() if p.dim() == 2]
    biases = [p for p in network.parameters() if p.dim() == 1]
    assert [tuple(w.shape) for w in weights] == [(256, 784), (256, 256), (10, 256)]
    assert all(0.08 < w.std() < 0.095 and w.abs().max() <= 0.2 for w in weights)
    assert all((b == 0.1).all() for b in biases)
    same, other = (KNOWN["permuted-mnist-17"].new_network(seed) for seed in (4, 5))
    assert (next(same.parameters()) == weights[0]).all()
    assert (next(other.parameters()) != weights[0]).any()


# Running -------------------------------------------------------------------------------------


def test_the_command_chooses_on_held_out_data_and_goes_on(tmp_path, monkeypatch):
    where = ["--benchmarks", ROTATIONS, "--memories", 200, "--out", tmp_path]
    assert board(monkeypatch, *where, *SIZE, "--learners", "single,gem", "--workers", 1) == 0
    made = started(tmp_path)
    assert len(made) == (5 + 6) * 2 + 2 * 2
    kept = {one.entry: one for one in load(tmp_path / "kept")}
    assert {one.column.memories for one in kept.values()} == {None, 200}
    for one in kept.values():
        assert one.seeds == (1000, 1001)
        assert one.about["search"]["seeds"] == [0, 1]
        means = {json.dumps(s["settings"]): sum(s["acc"]) for s in one.tried}
        assert means[json.dumps(one.about["settings"])] == max(means.values())
        found = [run for run in map(Store(tmp_path).run, made) if run.learner == one.entry]
        by_seed = {run.config["seed"]: run for run in found}
        assert {seed for seed, run in by_seed.items() if run.config.get("held_out")} == {0, 1}
        for line in one.runs:
            run = by_seed[line["seed"]].result
            assert line["acc"] == pytest.approx(run["acc"], abs=1e-4)
            assert line["example_gradients"] == run["example_gradients"] >= 40
    assert kept["gem"].about["settings"]["memories"] == 100
    assert board(monkeypatch, *where, *SIZE, "--learners", "gem,mer", "--workers", 1) == 0
    assert set(started(tmp_path).values()) == {1}
    assert len(started(tmp_path)) == len(made) + 2
    (mer,) = (one for one in load(tmp_path / "kept") if one.entry == "mer")
    assert mer.tried == []
    assert mer.per_example("steps") > 10
    page = (tmp_path / "BOARD.md").read_text()
    assert page == page_text(tmp_path / "kept")
    assert "3 of 3 results are trials" in page
    (picture,) = re.findall(r"\]\((.*\.png)\)", page)
    assert (tmp_path / picture).stat().st_size > 10_000


def test_what_was_interrupted_goes_on_and_ablations_have_the_settings_of_the_whole(
    tmp_path, monkeypatch
):
    class Stopped:
        """Stops after three runs, as by Ctrl-C."""

        def __call__(self, function, items):
            for i, outcome in enumerate(InTurn()(function, items)):
                if i == 3:
                    raise KeyboardInterrupt
                yield outcome

    whole = Entry("whole", "gem", {"mnist": {"lr": [0.1, 1e-5], "glances": [2]}}, "memories")
    for entry in (whole, whole.without("whole without glances", glances=1)):
        monkeypatch.setitem(ENTRIES, entry.name, entry)
    cells = cells_of([ROTATIONS], [200], ["whole", "whole without glances"])
    told = {}

    def finished(one, searched, runs):
        told[one.entry.name] = searched, runs
        keep(tmp_path / "kept", one, searched, runs, "gradmem board", "sample")

    with pytest.raises(KeyboardInterrupt):
        make_cells(tmp_path, cells, TINY, Stopped(), 2)
    assert make_cells(tmp_path, cells, TINY, InTurn(), 2, on_finished=finished) == []
    assert set(started(tmp_path).values()) == {1}
    assert len(started(tmp_path)) == 2 * 2 + 2 * 2
    (searched, runs), (not_searched, parts) = told.values()
    assert [len(accs) for _, accs in searched.tried] == [2, 2]
    assert not_searched is None
    for run, part in zip(runs, parts, strict=True):
        assert part.config["settings"] == run.config["settings"] | {"glances": 1}
        assert run.result["steps"] == 2 * part.result["steps"]
    page = page_text(tmp_path / "kept")
    line = r"\| MNIST rotations, 200 memories \| whole without glances \| .* \| whole \| .* ± .* \|"
    assert re.search(line, page.partition("## What each part is worth")[2])
    assert "without glances" not in page.partition("## What each part is worth")[0]


def test_what_is_kept_is_not_made_again(tmp_path, monkeypatch):
    where = ["--benchmarks", ROTATIONS, "--memories", 200, "--learners", "single,steadygem"]
    where += ["--workers", 1, "--keep", tmp_path / "kept"]
    assert board(monkeypatch, *where, *SIZE, "--out", tmp_path / "first") == 0
    before = {one.entry: one for one in load(tmp_path / "kept")}
    assert board(monkeypatch, *where, *SIZE, "--out", tmp_path / "second") == 0
    assert started(tmp_path / "second") == {}
    assert (tmp_path / "second" / "BOARD.md").is_file()
    assert board(monkeypatch, *where, *SIZE, "--seeds", 3, "--out", tmp_path / "third") == 0
    runs = [Store(tmp_path / "third").run(key) for key in started(tmp_path / "third")]
    assert {(run.learner, run.config["seed"]) for run in runs} == {
        ("single", 1002),
        ("steadygem", 1002),
    }
    for one in load(tmp_path / "kept"):
        assert one.seeds == (1000, 1001, 1002)
        assert one.runs[:2] == before[one.entry].runs
        assert one.about["search"] == before[one.entry].about["search"]
    larger = [*where, *SIZE, "--examples", 30, "--out", tmp_path / "larger"]
    assert board(monkeypatch, *larger) == 0
    assert len(started(tmp_path / "larger")) == 5 * 2 + 2 + 2


def test_searches_that_are_planned_otherwise_now_or_failed_in_part_are_made_again(
    tmp_path, monkeypatch
):
    def made(folder, rates, retry_failed=False):
        entry = Entry("wild", "single", {"mnist": {"lr": rates}})
        monkeypatch.setitem(ENTRIES, entry.name, entry)
        kept = load(tmp_path / "kept") if (tmp_path / "kept").exists() else []

        def finished(one, searched, runs):
            keep(tmp_path / "kept", one, searched, runs, "gradmem board", "sample")

        make_cells(
            tmp_path / folder,
            *([Cell(Column(ROTATIONS, None), entry)], TINY, InTurn(), 2),
            retry_failed=retry_failed,
            on_finished=finished,
            kept=kept,
        )
        return len(started(tmp_path / folder))

    assert made("first", [0.1, 1e30]) == 4 + 2
    (one,) = load(tmp_path / "kept")
    assert [None in tried["acc"] for tried in one.tried] == [False, True]
    assert made("same", [0.1, 1e30]) == 0
    assert made("again", [0.1, 1e30], retry_failed=True) == 4
    assert made("others", [0.1, 1e31]) == 4
    assert [tried["settings"]["lr"] for tried in load(tmp_path / "kept")[0].tried] == [0.1, 1e30]
    assert made("chosen otherwise", [1e-6, 1e-7]) == 4 + 2


def test_settings_that_all_fail_are_told_and_nothing_is_kept_of_them(tmp_path, monkeypatch):
    entry = Entry("wild", "single", {"mnist": {"lr": [1e30, 1e31]}})
    monkeypatch.setitem(ENTRIES, entry.name, entry)
    told = []
    failed = make_cells(
        tmp_path, [cell("wild", None)], TINY, InTurn(), on_finished=lambda *one: told.append(one)
    )
    assert len(failed) == 4
    assert all("FloatingPointError" in error for _, error in failed)
    assert told == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memories", "7"], "--memories must be one of 5120, 4250, 500, 200"),
        (["--learners", "gem,who"], "learner must be one of single, "),
        (["--benchmarks", "cifar100-incremental", "--learners", "mer"], "the board has no mer on"),
        (["--from", "here", "--seeds", "3"], "--from makes the whole page and runs nothing"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--data", "sample", "--tasks", "1"], "n_tasks must be at least 2"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    assert board(monkeypatch, *arguments, "--out", tmp_path) == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


# What is kept --------------------------------------------------------------------------------


def test_better_results_are_not_replaced(tmp_path):
    assert keep_made_up(tmp_path, cell(), [0.7, 0.8, 0.9])
    assert keep_made_up(tmp_path, cell(), [0.1, 0.2]) is None
    (kept,) = load(tmp_path)
    assert kept.values("acc") == [0.7, 0.8, 0.9]
    assert kept.per_example("example_gradients") == 2
    assert keep_made_up(tmp_path, cell(), [0.1, 0.2, 0.3])
    assert load(tmp_path)[0].values("acc") == [0.1, 0.2, 0.3]


def test_runs_join_those_of_other_seeds_that_were_made_in_the_same_way(tmp_path):
    tried = (({"lr": 0.1}, (0.75, 0.77)),)
    keep_made_up(tmp_path, cell(), [0.7, 0.8], Searched((0, 1), 0.1, tried))
    other = made_up(1002, 0.9, versions={**VERSIONS, "gpu": "a GPU", "threads": 1})
    other.config["device"] = "cuda"
    assert keep(tmp_path, cell(), None, [other], "gradmem board --device cuda", "whole")
    (kept,) = load(tmp_path)
    assert kept.values("acc") == [0.7, 0.8, 0.9]
    assert [kept.machine(run)["device"] for run in kept.runs] == ["cpu", "cpu", "cuda"]
    assert kept.searched == Searched((0, 1), 0.1, tried)
    page = page_text(tmp_path)
    assert "| 3.0 (A, B) |" in page
    assert "a processor, 2 threads" in page
    assert "a GPU, torch 2" in page
    assert keep(tmp_path, cell(), None, [made_up(1003, 0.7)], "gradmem board", "whole")
    assert len(load(tmp_path)[0].about["machines"]) == 2
    otherwise = made_up(1004, 0.1)
    otherwise.config["settings"] = {"lr": 0.2}
    assert keep(tmp_path, cell(), None, [otherwise], "gradmem board", "whole") is None
    assert keep(tmp_path, cell(), None, [made_up(1004, 0.1)], "gradmem board", "sample") is None
    assert load(tmp_path)[0].values("acc") == [0.7, 0.8, 0.9, 0.7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": []}, "it has no runs"),
        ({"memories": 7}, "memories must be one of 5120, 500, 200, got 7"),
        ({"entry": "other"}, "it should be called mnist-rotations-200-other.json"),
        ({"benchmark": "mnist"}, "benchmark must be one of"),
        ({"learner": "a|b"}, "a text that is not plain"),
        ({"search": {"seeds": [1001]}}, "search has no chosen_on, held_out, tried"),
        (
            {"search": {"seeds": [1001], "chosen_on": "x", "held_out": 0.1, "tried": []}},
            "a seed of its runs is one that settings were chosen with",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(changes, message, tmp_path):
    path = keep_made_up(tmp_path, cell(), [0.7, 0.8])
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(f"{path} is no kept result")) as error:
        load(tmp_path)
    assert message in str(error.value)


# The page ------------------------------------------------------------------------------------


def test_rows_are_sorted_by_acc_and_have_costs_and_what_was_published(tmp_path):
    tried = (({"lr": 0.1}, (0.75, 0.77)), ({"lr": 9.0}, (0.1, None)))
    keep_made_up(tmp_path, cell("gem"), [0.70, 0.71, 0.72], Searched((0, 1), 0.1, tried))
    keep_made_up(tmp_path, cell("mer"), [0.771, 0.772, 0.773], steps=1_000_000)
    keep_made_up(tmp_path, cell("single", None), [0.50, 0.55, 0.56], memory_bytes=None)
    page = page_text(tmp_path)
    table = page.partition("## MNIST rotations, 200 memories")[2].partition("Seconds on")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| MER", "| GEM", "| single"]
    assert [row[4] for row in rows] == ["50", "0.1", "0.1"]
    assert [row[5] for row in rows] == ["2"] * 3
    assert [row[7] for row in rows] == ["0.63 MB", "0.63 MB", "–"]
    assert [row[8] for row in rows] == ["0.772 inside |", "– |", "0.5307 inside |"]
    chosen = "| MNIST rotations, 200 memories | GEM | 2 | 1 | 0.760 | 0.710 ± 0.025 | lr 0.1 |"
    assert chosen in page
    assert "| MER | 0.772 ± 0.002 | 50 | 2 | GEM | +0.062 ± 0.022 | 2 of 12 |" in page
    written = write_board(tmp_path, tmp_path / "docs")
    assert [path.name for path in written] == ["BOARD.md", "frontier-mnist-rotations-200.png"]


def test_a_published_value_far_from_the_runs_is_outside(tmp_path):
    for accs, mark in (([0.7719, 0.772, 0.7721], INSIDE), ([0.76, 0.7601, 0.7602], OUTSIDE)):
        keep_made_up(tmp_path, cell("mer"), accs)
        assert verdict(load(tmp_path)[0]).mark == mark
    keep_made_up(tmp_path / "other", cell("gem"), [0.7, 0.8])
    assert verdict(load(tmp_path / "other")[0]) is None
    far = cell("lamaml", 200, "cifar100-incremental")
    runs = [made_up(1000 + i, 0.6 + i / 1000) for i in range(2)]
    for run in runs:
        run.config["examples_per_task"] = 2500
    keep(tmp_path / "cifar", far, None, runs, "gradmem board", "whole")
    (other_network,) = load(tmp_path / "cifar")
    assert not other_network.is_trial
    assert verdict(other_network).mark == "not compared"


def test_streams_of_other_papers_are_compared_with_what_was_published_alone(tmp_path):
    runs = [made_up(1000 + i, acc) for i, acc in enumerate([0.835, 0.836, 0.837])]
    for run in runs:
        run.config["examples_per_task"] = 60_000
    keep(tmp_path, cell("derpp", 200, "permuted-mnist"), None, runs, "gradmem board", "whole")
    (kept,) = load(tmp_path)
    assert verdict(kept).mark == INSIDE
    before, _, after = page_text(tmp_path).partition("## Published numbers")
    line = r"\| Permuted MNIST, 200 memories \| DER\+\+ \| 0.836 ± .* \| 0.8358 \| inside \|"
    assert re.search(line, after)
    assert "Permuted MNIST" not in before
    assert [path.name for path in write_board(tmp_path, tmp_path / "docs")] == ["BOARD.md"]


def test_differences_are_taken_seed_by_seed(tmp_path):
    keep_made_up(tmp_path, cell("gem"), [0.5, 0.7, 0.9])
    keep_made_up(tmp_path, cell("er"), [0.4, 0.6])
    er, gem = load(tmp_path)
    more = difference(gem, er)
    assert (round(more.mean, 6), round(more.half_width, 6)) == (0.1, 0.0)


def test_the_frontier_has_those_that_none_outdoes_at_its_cost():
    def point(name, acc, cost):
        return Point(name, name, Estimate(acc, None), {"steps": cost})

    found = [point("dear", 0.8, 10), point("best", 0.9, 100), point("cheap", 0.7, 1)]
    found += [point("worse", 0.6, 1), point("wasteful", 0.8, 50)]
    assert [one.name for one in frontier(found, "steps")] == ["cheap", "dear", "best"]


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no results are kept yet")
def test_the_page_in_the_repository_is_made_from_the_results_beside_it(tmp_path):
    assert PAGE.read_text() == page_text(RESULTS), (
        "make it again: gradmem board --from results/board --out docs"
    )
    assert not [one.slug for one in load(RESULTS) if one.is_trial]
    written = write_board(RESULTS, tmp_path)
    assert {path.name for path in written[1:]} == {
        path.name for path in PAGE.with_name("board").iterdir()
    }


@pytest.mark.parametrize("one", load(RESULTS), ids=lambda one: one.slug)
def test_what_is_kept_was_run_with_settings_that_are_planned(one):
    entry = ENTRIES[one.entry]
    planned = Cell(one.column, entry).grid(one.about["n_tasks"])
    planned |= {name: [value] for name, value in entry.changes.items()}
    settings = one.about["settings"]
    assert {name for name in planned if name not in settings} == set()
    assert all(settings[name] in values for name, values in planned.items())


@pytest.mark.parametrize("memories", BENCHMARKS["cifar100-incremental"])
@pytest.mark.parametrize("name", ["er", "derpp"])
def test_with_averages_on_cifar_it_has_the_settings_that_were_chosen_without(name, memories):
    (plain,) = (
        one for one in load(RESULTS) if one.slug == f"cifar100-incremental-{memories}-{name}"
    )
    (settings,) = cell(f"{name} with averages", memories, "cifar100-incremental").settings(TINY)
    assert settings == plain.about["settings"] | {"average": settings["average"]}


def test_a_learners_places_are_those_of_the_page():
    kept = load(RESULTS)
    for name in {one.about["learner"] for one in kept if one.about["part_of"] is None}:
        text = learner_text(RESULTS, name)
        page = page_text(RESULTS)
        accs = re.findall(r"\| (0\.\d{3} ± 0\.\d{3}) \|", text)
        assert accs
        assert all(acc in page for acc in accs)
    assert learner_text(RESULTS, "nobody") == ""
