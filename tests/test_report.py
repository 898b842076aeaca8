"""What `gradmem report` makes of runs: tables, pictures, and what is in the page."""

import io
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from markupsafe import escape
from rich.console import Console

import gradmem as gm
from gradmem.evaluation.metrics import transfer_metrics
from gradmem.files import write_json
from gradmem.learners import LEARNERS
from gradmem.published import appendix_b, settings
from gradmem.reports import (
    draw_pictures,
    markdown_table,
    page,
    summarize,
    terminal_table,
    write_page,
)
from gradmem.reports.pictures import heat_map
from gradmem.reports.pictures.figure import slug
from gradmem.reports.published import published
from gradmem.reports.styles import styles
from gradmem.reports.summary import failed_lines, leading, memory_lines
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import find_failures, find_runs

from .reports import rows_of, write_held_out, write_scored, write_several
from .synthetic import write_run


def printed(rows, width):
    """The lines of the table on a terminal."""
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(rows))
    return console.file.getvalue().splitlines()


def test_tasks_of_a_heat_map_have_their_own_names(tmp_path, monkeypatch):
    write_run(tmp_path / "run", n_tasks=3)
    path = tmp_path / "run" / "result.json"
    figures = []
    monkeypatch.setattr(heat_map, "save", lambda figure, *_: figures.append(figure) or [])
    for labels in (["task a", "task b", "task $c"], ["task 0", "task 1", "task 2"]):
        write_json(path, json.loads(path.read_text()) | {"tasks": labels})
        (row,) = rows_of(tmp_path)
        heat_map.draw_heat_map(row, tmp_path)
    shown = [
        [[tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)]
        for axes in (figure.axes[0] for figure in figures)
    ]
    assert shown == [[["a", "b", r"\$c"]] * 2, [["1", "2", "3"]] * 2]


def test_a_function_with_its_arguments_is_named_as_it_is_called(tmp_path):
    data = (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    continuum = gm.Continuum([gm.Task("a", data, data), gm.Task("b", data, data)])
    for lr in (0.001, 0.01):
        optimizer = partial(torch.optim.AdamW, lr=lr)
        gm.run(gm.GEM(gm.mlp([2, 2]), optimizer=optimizer), continuum).save(tmp_path / str(lr))
    rows = rows_of(tmp_path)
    assert [row.name for row in rows] == [f"gem (optimizer=AdamW(lr={lr}))" for lr in (0.001, 0.01)]
    assert slug(rows[0].name) == "gem-optimizer=AdamW-lr=0.001"


# What is in the page


@pytest.mark.parametrize(("benchmark", "is_said"), [("mnist-rotations", True), ("mine", False)])
def test_the_papers_figure_is_named_for_its_benchmarks_only(tmp_path, benchmark, is_said):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    write_json(path, json.loads(path.read_text()) | {"benchmark": benchmark})
    text = write_page(rows_of(tmp_path), tmp_path / "report.html").read_text()
    assert ("As in the paper’s Figure 1" in text) is is_said
    assert '<label for="find">Filter by text</label>' in text


def test_the_page_carries_everything_it_needs(tmp_path):
    write_several(tmp_path)
    text = write_page(rows_of(tmp_path), tmp_path / "report.html").read_text()
    outside_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(", outside_scripts)
    assert "default-src 'none'" in outside_scripts  # a browser would refuse to fetch anything
    assert len(text) < 5_500_000


def test_without_scripts_the_table_is_there(tmp_path):
    write_several(tmp_path)
    rows = rows_of(tmp_path)
    text = write_page(rows, tmp_path / "report.html").read_text()
    for row in rows:
        assert row.estimate("acc").format(".3f") in text


def test_what_runs_are_called_is_text_not_markup(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    attack = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
    config = json.loads(path.read_text()) | {"benchmark": attack, "learner": attack}
    write_json(path, config | {"settings": {attack: attack}})
    text = write_page(rows_of(tmp_path), tmp_path / "report.html").read_text()
    assert "<img" not in text
    assert "<script>document.title" not in text
    assert str(escape(attack)) in text  # it is still shown


def test_accuracies_are_rounded_and_metrics_are_not(tmp_path):
    write_run(tmp_path / "run", seed=3)
    (run,) = find_runs([tmp_path])
    data = page.page_data(summarize([run]))
    (entry,), unit = data["runs"], data["rows"][0]["unit"]
    assert np.allclose(np.array(entry["R"]) * unit, run.R, atol=unit / 2)
    assert (entry["acc"], entry["bwt"]) == (run.result["acc"], run.result["bwt"])
    assert entry["seed"] == "3"


def test_a_curve_that_R_already_has_is_not_written_twice(tmp_path):
    write_run(tmp_path / "plain")
    write_run(tmp_path / "finer", points=4, every=200)
    entries = page.page_data(rows_of(tmp_path))["runs"]
    assert sorted("curve" in entry for entry in entries) == [False, True]
    finer = next(entry for entry in entries if "curve" in entry)
    assert np.shape(finer["curve"]) == (5, len(finer["examples"])) == (5, 26)


def test_long_curves_are_thinned_out_to_their_share(tmp_path, monkeypatch):
    write_several(tmp_path, seeds=2, points=9, every=100)
    monkeypatch.setattr(page, "CURVE_NUMBERS", 6 * 5 * 11)
    for entry in page.page_data(rows_of(tmp_path))["runs"]:
        assert entry["examples"] == list(range(0, 5001, 500))


def test_with_very_many_runs_only_mean_matrices_are_kept(tmp_path, monkeypatch):
    write_several(tmp_path, seeds=2)
    rows = rows_of(tmp_path)
    monkeypatch.setattr(page, "MATRIX_NUMBERS", 100)
    data = page.page_data(rows)
    assert all("R" not in entry for entry in data["runs"])
    for entry, row in zip(data["rows"], rows, strict=True):
        assert np.allclose(np.array(entry["R"]) * entry["unit"], row.R, atol=entry["unit"] / 2)


@pytest.mark.parametrize("benchmark", settings())
def test_the_papers_settings_are_those_of_its_experiments(benchmark):
    paper = settings()[benchmark]
    assert set(paper["learners"]) == set(appendix_b()[benchmark])
    for learner, best in paper["learners"].items():
        assert Experiment(benchmark, learner).settings == best


def test_published_values_stand_beside_the_same_experiment_only(tmp_path):
    write_run(tmp_path / "paper", n_tasks=20)
    write_run(tmp_path / "short", n_tasks=5)
    write_run(tmp_path / "other", n_tasks=20, settings={"memories": 10})
    write_run(tmp_path / "rival", "agem", n_tasks=20)
    write_run(tmp_path / "sample", n_tasks=20, data="sample")
    write_run(tmp_path / "few", n_tasks=20, examples_per_task=20)
    write_run(tmp_path / "batches", n_tasks=20, batch_size=5)
    write_run(tmp_path / "budget", n_tasks=20, settings={"budget": 512})
    found = {row.runs[0].folder.name: published(row) for row in rows_of(tmp_path)}
    entry = appendix_b()["mnist-rotations"]["gem"]
    assert found["paper"]["bwt"] == transfer_metrics(entry["R"], entry["baseline"]).bwt
    assert [name for name, values in found.items() if values] == ["paper"]


def test_rows_with_different_memories_make_a_line(tmp_path):
    for memories in (1024, 64, 256):
        for margin in (0.0, 0.5):
            settings = {"memories": memories, "margin": margin}
            write_run(tmp_path / f"{memories}-{margin}", settings=settings)
    write_run(tmp_path / "budget", settings={"budget": 100, "margin": 0.5})
    write_run(tmp_path / "single", "single")
    lines = memory_lines(rows_of(tmp_path))
    assert {line.name: [row.memory for row in line.rows] for line in lines} == {
        "gem (margin=0.0)": [320, 1280, 5120],
        "gem (margin=0.5)": [100, 320, 1280, 5120],
    }
    written = draw_pictures(lines[0].rows, tmp_path / "pictures")
    assert "acc-memory-mnist-rotations.pdf" in [path.name for path in written]


def test_rows_are_in_the_order_of_their_numbers(tmp_path):
    for memories in (1024, 64, 256):
        write_run(tmp_path / f"{memories}", settings={"memories": memories})
    assert [row.memory for row in rows_of(tmp_path)] == [320, 1280, 5120]


def test_of_too_many_rows_every_learner_keeps_its_best(tmp_path):
    for memories in (16, 64, 256, 1024):
        write_run(tmp_path / f"gem-{memories}", settings={"memories": memories})
    write_run(tmp_path / "single", "single")
    kept = leading(rows_of(tmp_path), 3)
    assert [row.name for row in kept] == ["single", "gem (memories=256)", "gem (memories=1024)"]


def test_pictures_with_very_long_and_odd_names_have_different_files(tmp_path):
    for seed, end in enumerate("ab"):
        write_run(tmp_path / end, seed=seed)
        path = tmp_path / end / "config.json"
        config = json.loads(path.read_text())
        write_json(path, config | {"settings": {"note": 300 * "$a^$ " + end}})
    written = draw_pictures(rows_of(tmp_path), tmp_path / "pictures")
    assert len({path.name for path in written}) == len(written) == 8


# Scores that are not accuracies


def test_a_score_is_named_in_tables_and_on_the_page(tmp_path):
    write_scored(tmp_path)
    rows = rows_of(tmp_path)
    assert {row.benchmark for row in rows} == {"mnist-rotations, minus_error"}
    assert markdown_table(rows).endswith("\nACC, BWT and FWT are of minus_error.\n")
    lines = printed(rows, 100)
    assert "mnist-rotations, minus_error: mean of 2 seeds" in lines[0]
    assert lines[-1].strip() == "ACC, BWT and FWT are of minus_error."
    text = write_page(rows, tmp_path / "report.html").read_text()
    assert "The score is <b>minus_error</b>" in text
    assert published(rows[0]) is None


def test_scores_and_accuracies_are_rows_of_their_own(tmp_path):
    write_scored(tmp_path / "a", n_tasks=4)
    write_several(tmp_path / "b", ("single", "gem"), 2, n_tasks=4)
    names = [row.benchmark for row in rows_of(tmp_path)]
    assert names == ["mnist-rotations"] * 2 + ["mnist-rotations, minus_error"] * 2


@pytest.mark.parametrize(
    ("scale", "digits"), [(1, 3), (0.01, 5), (100, 1), (1e5, 0), (1e9, None), (1e-7, None)]
)
def test_scores_of_any_size_keep_three_digits(tmp_path, scale, digits):
    write_scored(tmp_path, seeds=1, scale=scale)
    row = rows_of(tmp_path)[0]
    assert row.digits == digits
    assert float(row.text("acc")) == pytest.approx(row.estimate("acc").mean, rel=5e-3)


@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_the_page_keeps_the_digits_of_any_score(tmp_path, scale):
    write_scored(tmp_path, scale=scale)
    rows = rows_of(tmp_path)
    data = page.page_data(rows)
    assert {(row["score"], row["bounded"], row["unit"]) for row in data["rows"]} == {
        ("minus_error", False, 1)
    }
    for entry, run in zip(data["runs"], [run for row in rows for run in row.runs], strict=True):
        assert np.allclose(entry["R"], run.R, rtol=1e-5, atol=0)


def test_pictures_of_scores_have_axes_of_their_own(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []

    def look(figure, *_, **__):
        axes, *bar = figure.axes
        label = bar[0].get_ylabel() if bar else axes.get_ylabel()
        clim = axes.images[0].get_clim() if axes.images else axes.get_ylim()
        drawn.append((label, clim))

    monkeypatch.setattr(Figure, "savefig", look)
    write_scored(tmp_path, scale=50)
    rows = rows_of(tmp_path)
    paths = draw_pictures(rows, tmp_path / "pictures")
    seen = {path.stem: look for path, look in zip(paths, drawn, strict=True)}
    label, clim = seen["R-mnist-rotations-minus-error-gem"]
    assert (label, clim) == ("test minus_error", (rows[1].R.min(), rows[1].R.max()))
    label, (low, high) = seen["first-task-mnist-rotations-minus-error"]
    assert label == "test minus_error on the first task"
    assert -60 < low < -20 < high < 10


def test_names_cannot_steer_a_terminal_or_break_a_table(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    write_json(path, config | {"learner": "a\x1b[2J|b\n\\|<i>\u202ec\x9b", "benchmark": "x\ry|"})
    rows = rows_of(tmp_path)
    text = "\n".join(printed(rows, 100))
    assert not set(text) & set("\x1b\r\x9b\u202e")
    table = markdown_table(rows).splitlines()
    assert len(table) == 3
    assert table[2].startswith("| a�[2J\\|b�\\\\\\|\\<i>�c� | ")
    failure = {"type": "E", "message": "\x1b]0;taken\x07|"}
    (tmp_path / "run" / "result.json").unlink()
    write_json(tmp_path / "run" / "failure.json", failure)
    (line,) = failed_lines(find_failures([tmp_path]))
    assert line.endswith("E: �]0;taken�|")


@pytest.mark.parametrize("name", ["_Mine", "Ünï", "a b/../c"])
def test_learners_of_any_name_have_pictures_of_their_own(tmp_path, name):
    for i, end in enumerate("äö"):
        write_run(tmp_path / end, seed=i)
        path = tmp_path / end / "config.json"
        write_json(path, json.loads(path.read_text()) | {"learner": name + end})
    written = draw_pictures(rows_of(tmp_path), tmp_path / "pictures")
    assert len(set(written)) == len(written) == 8
    assert {path.parent.name for path in written} == {"pictures"}


# What is told apart


def test_held_out_data_are_a_group_of_their_own(tmp_path):
    write_held_out(tmp_path)
    rows = rows_of(tmp_path)
    names = [
        "mnist-rotations",
        "mnist-rotations, held-out data",
        "mnist-rotations, held-out data, first 3 tasks",
    ]
    assert [(row.benchmark, row.name) for row in rows] == [(name, "gem") for name in names]
    assert [published(row) is None for row in rows] == [False, True, True]
    assert "| mnist-rotations, held-out data, gem | " in markdown_table(rows)
    assert any("mnist-rotations, held-out data, gem" in line for line in printed(rows, 120))
    written = {path.name for path in draw_pictures(rows, tmp_path / "pictures")}
    assert {"bars-mnist-rotations.png", "bars-mnist-rotations-held-out-data.png"} <= written
    text = write_page(rows, tmp_path / "report.html").read_text()
    assert '<th scope="rowgroup" colspan="6">mnist-rotations, held-out data</th>' in text
    assert "not on the test sets" in text


def test_what_experiments_differ_in_is_told_across_learners(tmp_path):
    write_run(tmp_path / "single", "single", examples_per_task=100)
    write_run(tmp_path / "gem-0", seed=0, examples_per_task=50)
    write_run(tmp_path / "gem-1", seed=1, examples_per_task=50)
    write_run(tmp_path / "permutations", benchmark="mnist-permutations", examples_per_task=70)
    rows = rows_of(tmp_path)
    assert [row.name for row in rows] == [
        "gem",
        "single (examples_per_task=100)",
        "gem (examples_per_task=50)",
    ]
    assert "mean of 1 to 2 seeds" in " ".join(printed(rows, 120))
    assert "mean of 2 seeds" in " ".join(printed(rows[2:], 120))


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (30, ["ACC"]),
        (50, ["ACC"]),
        (60, ["ACC", "BWT"]),
        (80, ["ACC", "BWT", "seconds"]),
        (120, ["ACC", "BWT", "FWT", "seconds"]),
    ],
)
def test_a_narrow_terminal_has_whole_names_and_numbers(tmp_path, width, columns):
    for examples in (50, 100):
        write_several(tmp_path / str(examples), ["gem"], 2, examples_per_task=examples)
    rows = rows_of(tmp_path)
    lines = printed(rows, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    headings = next(line for line in lines if "learner" in line)
    assert re.findall(r"\w+", headings) == ["learner", *columns]
    names = "".join(line.split("│")[1].replace(" ", "") for line in lines if "│" in line)
    assert names == "gem(examples_per_task=50)gem(examples_per_task=100)"
    for row in rows:
        assert row.estimate("acc").format(".3f") in text
        assert ("BWT" in columns) == (row.estimate("bwt").format("+.3f") in text)
    assert ("No room for" in text) == (len(columns) < 4)


def test_what_failed_is_told(tmp_path):
    write_run(tmp_path / "good")
    for seed in range(2):
        write_run(tmp_path / f"bad-{seed}", seed=seed, settings={"lr": 1e30})
        (tmp_path / f"bad-{seed}" / "result.json").unlink()
        failure = {"type": "FloatingPointError", "message": "the loss is <not> finite\nat all"}
        write_json(tmp_path / f"bad-{seed}" / "failure.json", failure)
    write_json(tmp_path / "good" / "failure.json", {"type": "OSError", "message": "once"})
    (line,) = failed_lines(find_failures([tmp_path, tmp_path / "bad-0"]))
    assert line.startswith("mnist-rotations, gem (lr=1e+30, ")
    assert line.endswith("): 2 runs, FloatingPointError: the loss is <not> finite")
    rows = rows_of(tmp_path)
    assert "the loss is \\<not> finite\n" in markdown_table(rows, [line])
    text = write_page(rows, tmp_path / "report.html", [line]).read_text()
    assert "Not shown: 1 setting with runs that failed" in text
    assert "the loss is &lt;not&gt; finite" in text


def test_a_learner_of_ones_own_has_a_look_of_its_own():
    look = styles(["single", "gem", "mine", "mine2"])
    assert len(set(look.values())) == 4
    assert look["gem"] == styles(["gem"])["gem"]


def test_many_learners_have_looks_of_their_own():
    names = [*LEARNERS, *(f"mine{i}" for i in range(40))]
    look = styles(names)
    assert len({(style.colour, style.marker) for style in look.values()}) == len(names)
    assert len(styles(f"mine{i}" for i in range(200))) == 200  # in the end they repeat


def test_legends_fit_into_their_pictures(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    widths = []

    def look(figure, *arguments, **options):
        figure.draw_without_rendering()
        for legend in figure.legends:
            widths.append(legend.get_window_extent().width / figure.bbox.width)

    monkeypatch.setattr(Figure, "savefig", look)
    for length in (1, 4, 12, 24, 40, 90):
        for place in range(3):
            settings = {"memories": 10 + place}
            write_run(tmp_path / f"{length}-{place}", settings=settings)
            path = tmp_path / f"{length}-{place}" / "config.json"
            config = json.loads(path.read_text())
            write_json(path, config | {"learner": length * "m", "settings": {"lr": place}})
        draw_pictures(rows_of(tmp_path), tmp_path / "pictures")
    assert len(widths) >= 18
    assert max(widths) <= 1
