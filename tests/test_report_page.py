"""The report's page as a browser shows it."""

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from gradmem.evaluation.metrics import transfer_metrics
from gradmem.files import write_json
from gradmem.reports import page, summarize, write_page

from .reports import rows_of, write_held_out, write_scored, write_several
from .synthetic import write_run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH, none in CHROMIUM")

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
    scale: (({ zmin, zmax, colorbar }) => [zmin, zmax, colorbar.title.text])(
      document.getElementById("matrix").data?.[0] || { colorbar: { title: {} } }),
    axes: ["curves", "time"].map((section) => plots(section).map(({ layout: { yaxis } }) =>
      [yaxis.title.text, yaxis.range])),
    boundaries: plots("curves").map(({ layout }) => layout.shapes.map(({ x0 }) => x0)),
    caption: document.getElementById("matrix-caption").textContent,
    active: [...document.querySelectorAll("#diagnostics-table td")].map((td) => td.textContent),
    bars: traces("bars"), curves: traces("curves"), memory: traces("memory"), time: traces("time"),
    on: document.getElementById("matrix").layout?.xaxis.ticktext,
    tasks: (document.getElementById("tasks").data || []).map((trace) => trace.name),
    task: [...document.querySelectorAll("#task option")].map((option) => option.textContent),
    time_looks: each("time", ({ name, marker }) => [name, marker.color, marker.symbol]),
    hidden: [...document.querySelectorAll("main > section[hidden]")].map(({ id }) => id),
    links: [...document.querySelectorAll("nav a:not([hidden])")].map((one) => one.textContent),
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
    found = folder / "mnist-rotations" / "gem-0" / "result.json"
    found.write_text(json.dumps(json.loads(found.read_text()) | {"boundaries": [0, 1000, 2100]}))
    return write_page(rows_of(folder), folder / "report.html"), rows_of(folder)


@pytest.fixture(scope="module")
def seen(several):
    """That page as it opens."""
    return browse(several[0])


def test_it_opens_without_errors_or_a_network(seen):
    assert seen.probe["ready"] == "yes"
    assert seen.probe["fetched"] == []
    assert seen.probe["status"] == "18 runs"


def test_lines_stand_where_a_task_was_found_without_labels(seen):
    assert seen.probe["boundaries"] == [[], [1000, 2100]]  # permutations, rotations


def test_the_heat_map_has_a_cell_for_every_pair_of_tasks(several, seen):
    _, rows = several
    best = max(rows, key=lambda row: row.estimate("acc").mean)
    assert np.shape(seen.probe["z"]) == (6, 6)
    assert np.allclose(seen.probe["z"], best.R, atol=1e-4)
    assert seen.matrix == 36  # the same as a table


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


def test_a_click_changes_what_is_shown_and_the_address(several):
    path, rows = several
    boxes = ('[name="learner"][value="gem"]', '[name="seed"][value="1"]')
    clicks = [f"document.querySelector('input{box}').click();" for box in boxes]
    seen = browse(path, actions="".join(clicks))
    assert {row[0] for row in seen.rows} == {"single", "ewc"}
    assert {row[5] for row in seen.rows} == {"2"}
    assert seen.probe["bars"] == [2, 2]
    assert seen.probe["address"] == f"#learner=single,ewc&seed=0,2&row={len(rows) - 2}"


def test_a_row_and_a_seed_can_be_picked_for_the_heat_map(several):
    path, rows = several
    place = next(i for i, row in enumerate(rows) if row.name == "single")
    seen = browse(path, f"#row={place}&one=2")
    (run,) = [run for run in rows[place].runs if run.config["seed"] == 2]
    assert np.allclose(seen.probe["z"], run.R, atol=1e-4)


def test_one_seed_has_no_interval(several):
    path, _ = several
    seen = browse(path, "#learner=gem&seed=1")
    assert [row[5] for row in seen.rows] == ["1", "1"]
    assert all("±" not in cell for row in seen.rows for cell in row)


def test_names_and_settings_can_be_searched(several):
    path, _ = several
    assert {row[0] for row in browse(path, "#find=regularization%3D1000").rows} == {"ewc"}


def test_a_setting_that_is_searched_for_is_taken_as_a_whole(tmp_path):
    for memories in (1, 10, 100):
        write_run(tmp_path / f"{memories}", settings={"memories": memories})
    path = write_page(rows_of(tmp_path), tmp_path / "report.html")
    assert [row[0] for row in browse(path, "#find=memories%3D10").rows] == ["gem (memories=10)"]
    assert len(browse(path, "#find=memories%3D").rows) == 3


def test_eight_rows_of_one_learner_all_look_different(tmp_path):
    for memories in range(10, 18):
        write_run(tmp_path / f"{memories}", settings={"memories": memories})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    in_time = [look[1:] for look in seen.probe["time_looks"][0]]
    for looks in (seen.probe["looks"][0], seen.probe["bar_looks"][0], in_time):
        assert len({json.dumps(look) for look in looks}) == 8


def test_a_task_that_comes_back_is_called_by_its_own_name(tmp_path):
    write_run(tmp_path / "run", n_tasks=3)
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    R, learned = [*result["R"], result["R"][-1]], [0, 1, 2, 1]
    metrics = transfer_metrics(np.array(R), np.array(result["baseline"]), learned)
    result |= {name: getattr(metrics, name) for name in ("acc", "bwt", "fwt")}
    write_json(path, result | {"R": R, "learned": learned})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert seen.probe["after"] == ["0°", "10°", "20°", "10°"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["task a", "task b", "<i>c</i>"], ["a", "b", "&lt;i&gt;c&lt;/i&gt;"]),
        (["task 0", "task 1", "task 2"], ["1", "2", "3"]),
        (["task a", "task b", "a name that is long"], ["1", "2", "3"]),
    ],
)
def test_tasks_have_their_own_names_where_these_are_short(tmp_path, labels, names):
    write_run(tmp_path / "run", n_tasks=3)
    path = tmp_path / "run" / "result.json"
    write_json(path, json.loads(path.read_text()) | {"tasks": labels})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html")).probe
    assert seen["on"] == seen["after"] == names
    assert seen["tasks"] == [f"task {name}" for name in names]
    second = "task 2 (b)" if names[1] == "b" else "task 2"
    assert seen["task"][1] == second


def test_rows_of_one_learner_are_told_apart_over_time_and_empty_sections_left_out(tmp_path):
    for lr in (0.01, 0.1):
        write_run(tmp_path / str(lr), settings={"lr": lr})
    page = write_page(rows_of(tmp_path), tmp_path / "report.html")
    seen = browse(page).probe
    ((one, other),) = seen["time_looks"]
    assert (one[0], other[0]) == ("gem (lr=0.01)", "gem (lr=0.1)")
    assert one[1:] != other[1:]
    assert seen["hidden"] == ["memory"]
    assert "Memory" not in seen["links"]


def test_a_seed_without_projections_does_not_hide_the_others(tmp_path):
    write_several(tmp_path, ["gem"], seeds=2)
    path = tmp_path / "gem-0" / "result.json"
    none = dict.fromkeys(("violations", "violated_constraints", "active_constraints"), 0)
    write_json(path, json.loads(path.read_text()) | none | {"solver_steps": 0})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert re.fullmatch(r"\d\.\d{3} \(1 of 2 seeds\)", seen.probe["active"][2])


def test_a_choice_of_nothing_says_so(several):
    seen = browse(several[0], "#find=no-such-setting")
    assert seen.probe["status"] == "0 of 18 runs"
    assert seen.probe["nothing"]


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


def test_mean_matrices_are_enough_for_the_page(tmp_path, monkeypatch):
    write_several(tmp_path, ["gem"], n_tasks=4)
    monkeypatch.setattr(page, "MATRIX_NUMBERS", 1)
    (row,) = rows_of(tmp_path)
    seen = browse(write_page([row], tmp_path / "report.html"), "#seed=0,1")
    assert np.allclose(seen.probe["z"], row.R, atol=1e-4)  # of all seeds, as the caption says
    assert (seen.rows[0][5], seen.probe["curves"]) == ("2", [1])


def test_an_attack_in_a_name_is_shown_and_does_nothing(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    attack = "</script><img src=x onerror=\"document.title='taken'\"><b>%{x}</b>"
    config = json.loads(path.read_text()) | {"benchmark": attack, "learner": attack}
    write_json(path, config | {"settings": {attack: attack}})
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert seen.rows[0][0] == attack
    assert seen.probe["title"] == "gradmem: 1 run"


def test_many_rows_are_all_in_the_table_and_some_in_the_charts(tmp_path):
    for i in range(40):
        settings = {"lr": 0.01 * (i // 4 + 1), "memories": 2 ** (i % 4 + 5)}
        write_run(tmp_path / f"{i}", settings=settings)
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"), width=500)
    assert len(seen.rows) == 40
    assert (seen.probe["bars"], seen.probe["curves"], seen.probe["memory"]) == ([8], [8], [8])
    assert seen.probe["width"] <= 500  # long names do not push the page aside


def test_charts_do_not_mix_held_out_data_and_test_sets(tmp_path):
    write_held_out(tmp_path)
    write_run(tmp_path / "best", n_tasks=20, held_out=0.1, settings={"memories": 1024})
    rows = rows_of(tmp_path)
    seen = browse(write_page(rows, tmp_path / "report.html"))
    assert seen.probe["curves"] == [1, 2, 1]
    assert np.allclose(seen.probe["z"], rows[0].R, atol=1e-4)  # the best on the test sets


def test_charts_say_what_experiments_differ_in(tmp_path):
    write_run(tmp_path / "single", "single", examples_per_task=100)
    write_run(tmp_path / "gem", examples_per_task=50)
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    names = ["single (examples_per_task=100)", "gem (examples_per_task=50)"]
    assert seen.probe["names"] == [names]


@pytest.mark.parametrize("scale", [50.0, 1e-7, 3e9])
def test_scores_have_their_name_and_their_range(tmp_path, scale):
    write_scored(tmp_path, scale=scale)
    rows = rows_of(tmp_path)
    seen = browse(write_page(rows, tmp_path / "report.html"))
    best = max(rows, key=lambda row: row.estimate("acc").mean)
    assert np.allclose(seen.probe["z"], best.R, rtol=1e-5, atol=0)
    low, high, name = seen.probe["scale"]
    assert (low, high) == pytest.approx((best.R.min(), best.R.max()))
    assert name == "minus_error"
    (curves,), (time,) = seen.probe["axes"]
    assert (curves[0], time[0]) == ("minus_error on task 0°", "ACC (minus_error)")
    assert -2 * scale < curves[1][0] < -0.5 * scale
    expected = [(row.name, *map(row.text, ("acc", "bwt", "fwt"))) for row in rows]
    assert [row[:4] for row in seen.rows] == expected


def test_scores_and_accuracies_share_a_page(tmp_path):
    write_scored(tmp_path / "a", scale=50)
    write_several(tmp_path / "b", ["gem"])
    seen = browse(write_page(rows_of(tmp_path), tmp_path / "report.html"))
    assert seen.probe["scale"] == [0, 1, "accuracy"]
    (accuracy, score), _ = seen.probe["axes"]
    assert accuracy == ["accuracy on task 0°", [0, 1.02]]
    assert score[1][0] < -20


def test_runs_without_a_seed_are_counted(tmp_path):
    write_several(tmp_path, ["gem"], seeds=2)
    for path in tmp_path.rglob("config.json"):
        config = json.loads(path.read_text())
        write_json(path, config | {"seed": None})
        result = json.loads((path.parent / "result.json").read_text())
        write_json(path.parent / "result.json", result | {"seed": None})
    page = write_page(rows_of(tmp_path), tmp_path / "report.html")
    seen = browse(page, "#seed=run%202")
    assert seen.probe["status"] == "1 of 2 runs"
    assert ", run 2: ACC" in seen.probe["caption"]
