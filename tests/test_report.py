"""The page of `gradmem report`: what is in it, and what a browser makes of it."""

import html
import io
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import escape
from rich.console import Console

from gradmem.metrics import transfer_metrics
from gradmem.paper import appendix_b
from gradmem.report import (
    draw_pictures,
    markdown_table,
    page,
    summarize,
    terminal_table,
    write_page,
)
from gradmem.report.published import published
from gradmem.report.styles import styles
from gradmem.report.summary import failed_lines, leading, memory_lines
from gradmem.results import find_failures, find_runs, write_json
from tests.synthetic import write_run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH, none in CHROMIUM")


def rows_of(folder):
    return summarize(find_runs([folder]))


def printed(rows, width):
    """The lines of the table on a terminal."""
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(rows))
    return console.file.getvalue().splitlines()


def write_several(folder, learners=("single", "ewc", "gem"), seeds=3, **changes):
    for learner in learners:
        for seed in range(seeds):
            write_run(folder / f"{learner}-{seed}", learner, seed, **changes)


# What is in the page


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
    (entry,) = data["runs"]
    assert np.allclose(np.array(entry["R"]) * data["unit"], run.R, atol=data["unit"] / 2)
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
        assert np.allclose(np.array(entry["R"]) * data["unit"], row.R, atol=data["unit"] / 2)


def test_published_values_stand_beside_the_same_experiment_only(tmp_path):
    write_run(tmp_path / "paper", n_tasks=20)
    write_run(tmp_path / "short", n_tasks=5)
    write_run(tmp_path / "other", n_tasks=20, settings={"memories": 10})
    write_run(tmp_path / "rival", "agem", n_tasks=20)
    write_run(tmp_path / "sample", n_tasks=20, data="sample")
    write_run(tmp_path / "few", n_tasks=20, examples_per_task=20)
    write_run(tmp_path / "batches", n_tasks=20, batch_size=5)
    found = {row.runs[0].folder.name: published(row) for row in rows_of(tmp_path)}
    entry = appendix_b()["mnist-rotations"]["gem"]
    assert found["paper"]["bwt"] == transfer_metrics(entry["R"], entry["baseline"]).bwt
    assert [name for name, values in found.items() if values] == ["paper"]


def test_rows_with_different_memories_make_a_line(tmp_path):
    for memories in (1024, 64, 256):
        for margin in (0.0, 0.5):
            settings = {"memories": memories, "margin": margin}
            write_run(tmp_path / f"{memories}-{margin}", settings=settings)
    write_run(tmp_path / "budget", settings={"budget": 100, "memories": 1, "margin": 0.5})
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


# What is told apart


def write_held_out(folder):
    """The same learner on test sets, on held-out data, and on those of the first tasks."""
    write_run(folder / "test", n_tasks=20)
    write_run(folder / "held-out", n_tasks=20, held_out=0.1)
    write_run(folder / "first", n_tasks=20, held_out=0.1, first_tasks=3)


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
    assert f"- {line}" in markdown_table(rows, [line])
    text = write_page(rows, tmp_path / "report.html", [line]).read_text()
    assert "Not shown: 1 setting with runs that failed" in text
    assert "the loss is &lt;not&gt; finite" in text


def test_a_learner_of_ones_own_has_a_look_of_its_own():
    look = styles(["single", "gem", "mine", "mine2"])
    assert len(set(look.values())) == 4
    assert look["gem"] == styles(["gem"])["gem"]


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


# What a browser makes of it

PROBE = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  ACTIONS
  const plots = (section) => [...document.querySelectorAll(`#${section} .plot`)];
  const inLegend = (plot) => plot.data.filter((trace) => trace.showlegend !== false);
  const named = (section) => plots(section).map(inLegend);
  const each = (section, look) => named(section).map((some) => some.map(look));
  const traces = (section) => named(section).map((some) => some.length);
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify({
    ready: document.documentElement.dataset.ready,
    title: document.title,
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
    z: document.getElementById("matrix").data?.[0].z,
    names: each("bars", (trace) => trace.name),
    looks: each("curves", ({ line, marker }) => [line.color, line.dash, marker.symbol]),
    bar_looks: each("bars", ({ marker }) => [marker.color, marker.pattern?.shape]),
    after: document.getElementById("matrix").layout?.yaxis.ticktext,
    active: [...document.querySelectorAll("#diagnostics-table td")].map((td) => td.textContent),
    bars: traces("bars"), curves: traces("curves"), memory: traces("memory"), time: traces("time"),
    address: location.hash,
    status: document.getElementById("count").textContent,
    nothing: !document.getElementById("nothing").hidden,
    width: document.documentElement.scrollWidth,
  });
  document.body.append(probe);
}, 100));
</script></body>"""


class Page(HTMLParser):
    """A document as a browser left it: the text of its table, and what the probe saw."""

    def __init__(self, dom):
        super().__init__()
        self.cells, self.matrix, self.table = [], 0, None
        self.feed(dom)
        probe = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
        assert probe, dom[-2000:]
        self.probe = json.loads(html.unescape(probe[1]))

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        if tag == "table":
            self.table = names.get("id")
        if tag == "tr" and self.table == "table":
            self.cells.append([])
        if tag in ("td", "th") and self.table == "table":
            self.cells[-1].append("")
        if tag == "td" and self.table == "matrix-table":
            self.matrix += 1

    def handle_endtag(self, tag):
        if tag == "table":
            self.table = None

    def handle_data(self, data):
        if self.table == "table" and self.cells and self.cells[-1]:
            self.cells[-1][-1] += data

    @property
    def rows(self):
        """The summary's rows: name, ACC, BWT, FWT, seconds, seeds."""
        return [tuple(text.strip() for text in row) for row in self.cells[1:] if len(row) == 6]


def browse(path, address="", width=1400, actions=""):
    """Open the page in a browser without a network; nothing may be said on the console.

    `actions` is a script that does what a reader would do, before the page is looked at.
    """
    before, after = path.read_text().rsplit("</body>", 1)
    probed = path.with_name("probed.html")
    probed.write_text(before + PROBE.replace("ACTIONS", actions) + after)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={path.parent / 'browser'}", f"--window-size={width},2000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"]
    command += ["--dump-dom", f"{probed.as_uri()}{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return Page(done.stdout)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A page about three learners on two benchmarks, three seeds each."""
    folder = tmp_path_factory.mktemp("several")
    for benchmark in ("mnist-rotations", "mnist-permutations"):
        write_several(folder / benchmark, benchmark=benchmark, n_tasks=6)
    return write_page(rows_of(folder), folder / "report.html"), rows_of(folder)


@pytest.fixture(scope="module")
def seen(several):
    """That page as it opens."""
    return browse(several[0])


@in_a_browser
def test_it_opens_without_errors_or_a_network(seen):
    assert seen.probe["ready"] == "yes"
    assert seen.probe["fetched"] == []
    assert seen.probe["status"] == "18 runs"


@in_a_browser
def test_the_heat_map_has_a_cell_for_every_pair_of_tasks(several, seen):
    _, rows = several
    best = max(rows, key=lambda row: row.estimate("acc").mean)
    assert np.shape(seen.probe["z"]) == (6, 6)
    assert np.allclose(seen.probe["z"], best.R, atol=1e-4)
    assert seen.matrix == 36  # the same as a table


@in_a_browser
def test_means_and_intervals_agree_with_those_of_the_terminal(several, seen):
    _, rows = several
    expected = [
        (
            row.name,
            row.estimate("acc").format(".3f"),
            row.estimate("bwt").format("+.3f"),
            row.estimate("fwt").format("+.3f"),
            row.estimate("seconds").format(".1f"),
            str(len(row.runs)),
        )
        for row in rows
    ]
    assert seen.rows == expected


@in_a_browser
def test_filters_change_everything_that_is_shown(several):
    path, rows = several
    seen = browse(path, "#learner=gem,ewc&benchmark=mnist-rotations&seed=0,2")
    runs = [run for row in rows for run in row.runs if run.config["seed"] in (0, 2)]
    kept = [
        row
        for row in summarize(runs)
        if row.benchmark == "mnist-rotations" and row.name in ("gem", "ewc")
    ]
    assert seen.probe["status"] == "4 of 18 runs"
    assert [row[:2] for row in seen.rows] == [
        (row.name, row.estimate("acc").format(".3f")) for row in kept
    ]
    gem = next(row for row in kept if row.name == "gem")
    assert np.allclose(seen.probe["z"], gem.R, atol=1e-4)
    assert (seen.probe["bars"], seen.probe["curves"], seen.probe["time"]) == ([2], [2], [2])


@in_a_browser
def test_a_click_changes_what_is_shown_and_the_address(several):
    path, rows = several
    boxes = ('[name="learner"][value="gem"]', '[name="seed"][value="1"]')
    clicks = [f"document.querySelector('input{box}').click();" for box in boxes]
    seen = browse(path, actions="".join(clicks))
    assert {row[0] for row in seen.rows} == {"single", "ewc"}
    assert {row[5] for row in seen.rows} == {"2"}
    assert seen.probe["bars"] == [2, 2]
    assert seen.probe["address"] == f"#learner=single,ewc&seed=0,2&row={len(rows) - 2}"


@in_a_browser
def test_a_row_and_a_seed_can_be_picked_for_the_heat_map(several):
    path, rows = several
    place = next(i for i, row in enumerate(rows) if row.name == "single")
    seen = browse(path, f"#row={place}&one=2")
    (run,) = [run for run in rows[place].runs if run.config["seed"] == 2]
    assert np.allclose(seen.probe["z"], run.R, atol=1e-4)


@in_a_browser
def test_one_seed_has_no_interval(several):
    path, _ = several
    seen = browse(path, "#learner=gem&seed=1")
    assert [row[5] for row in seen.rows] == ["1", "1"]
    assert all("±" not in cell for row in seen.rows for cell in row)


@in_a_browser
def test_names_and_settings_can_be_searched(several):
    path, _ = several
    assert {row[0] for row in browse(path, "#find=regularization%3D1000").rows} == {"ewc"}


@in_a_browser
def test_a_setting_that_is_searched_for_is_taken_as_a_whole(tmp_path):
    for memories in (1, 10, 100):
        write_run(tmp_path / f"{memories}", settings={"memories": memories})
    path = write_page(rows_of(tmp_path), tmp_path / "report.html")
    assert [row[0] for row in browse(path, "#find=memories%3D10").rows] == ["gem (memories=10)"]
    assert len(browse(path, "#find=memories%3D").rows) == 3


@in_a_browser
def test_eight_rows_of_one_learner_all_look_different(tmp_path):
    for memories in range(10, 18):
        write_run(tmp_path / f"{memories}", settings={"memories": memories})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    for looks in (seen.probe["looks"][0], seen.probe["bar_looks"][0]):
        assert len({json.dumps(look) for look in looks}) == 8


@in_a_browser
def test_a_task_that_comes_back_is_called_by_its_own_number(tmp_path):
    write_run(tmp_path / "run", n_tasks=3)
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    write_json(path, result | {"R": [*result["R"], result["R"][-1]], "learned": [0, 1, 2, 1]})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert seen.probe["after"] == ["1", "2", "3", "2"]


@in_a_browser
def test_a_seed_without_projections_does_not_hide_the_others(tmp_path):
    write_several(tmp_path, ["gem"], seeds=2)
    path = tmp_path / "gem-0" / "result.json"
    none = dict.fromkeys(("violations", "violated_constraints", "active_constraints"), 0)
    write_json(path, json.loads(path.read_text()) | none | {"solver_steps": 0})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert re.fullmatch(r"\d\.\d{3} \(1 of 2 seeds\)", seen.probe["active"][2])


@in_a_browser
def test_a_choice_of_nothing_says_so(several):
    seen = browse(several[0], "#find=no-such-setting")
    assert seen.probe["status"] == "0 of 18 runs"
    assert seen.probe["nothing"]


@in_a_browser
def test_rows_of_different_shapes_share_a_page(tmp_path):
    write_run(tmp_path / "a", n_tasks=4)
    write_run(tmp_path / "b", n_tasks=7)
    write_run(tmp_path / "one", n_tasks=1)
    write_run(tmp_path / "mixed", "single", n_tasks=7, shuffled=True)
    path = write_page(rows_of(tmp_path), tmp_path / "report.html")
    seen = browse(path, "#find=shuffled=true")
    assert np.shape(seen.probe["z"]) == (1, 7)
    assert seen.rows[0][2:4] == ("–", "–")  # BWT and FWT are not defined
    assert browse(path).probe["status"] == "4 runs"


@in_a_browser
def test_mean_matrices_are_enough_for_the_page(tmp_path, monkeypatch):
    write_several(tmp_path, ["gem"], n_tasks=4)
    monkeypatch.setattr(page, "MATRIX_NUMBERS", 1)
    (row,) = rows_of(tmp_path)
    seen = browse(write_page([row], tmp_path / "report.html"), "#seed=0,1")
    assert np.allclose(seen.probe["z"], row.R, atol=1e-4)  # of all seeds, as the caption says
    assert (seen.rows[0][5], seen.probe["curves"]) == ("2", [1])


@in_a_browser
def test_an_attack_in_a_name_is_shown_and_does_nothing(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    attack = "</script><img src=x onerror=\"document.title='taken'\"><b>%{x}</b>"
    config = json.loads(path.read_text()) | {"benchmark": attack, "learner": attack}
    write_json(path, config | {"settings": {attack: attack}})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert seen.rows[0][0] == attack
    assert seen.probe["title"] == "gradmem: 1 run"


@in_a_browser
def test_many_rows_are_all_in_the_table_and_some_in_the_charts(tmp_path):
    for i in range(40):
        settings = {"lr": 0.01 * (i // 4 + 1), "memories": 2 ** (i % 4 + 5)}
        write_run(tmp_path / f"{i}", settings=settings)
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"), width=500)
    assert len(seen.rows) == 40
    assert (seen.probe["bars"], seen.probe["curves"], seen.probe["memory"]) == ([8], [8], [8])
    assert seen.probe["width"] <= 500  # long names do not push the page aside


@in_a_browser
def test_charts_do_not_mix_held_out_data_and_test_sets(tmp_path):
    write_held_out(tmp_path)
    write_run(tmp_path / "best", n_tasks=20, held_out=0.1, settings={"memories": 1024})
    rows = rows_of(tmp_path)
    seen = browse(write_page(rows, tmp_path / "report.html"))
    assert seen.probe["curves"] == [1, 2, 1]
    assert np.allclose(seen.probe["z"], rows[0].R, atol=1e-4)  # the best on the test sets


@in_a_browser
def test_charts_say_what_experiments_differ_in(tmp_path):
    write_run(tmp_path / "single", "single", examples_per_task=100)
    write_run(tmp_path / "gem", examples_per_task=50)
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    names = ["single (examples_per_task=100)", "gem (examples_per_task=50)"]
    assert seen.probe["names"] == [names]
