"""Published beside measured: honest marks, and a page that follows from what is kept."""

import json
import math
import re

import numpy as np
import pytest

from gradmem.published import appendix_b
from gradmem.reports import Estimate, next_run
from gradmem.reproduction.compare import (
    INSIDE,
    OUTSIDE,
    compare,
    compare_cells,
    reasons,
)
from gradmem.reproduction.kept import keep, load
from gradmem.reproduction.numbers import Number, numbers
from gradmem.reproduction.page import page_text, summary, write_reproduction
from gradmem.reproduction.plan import (
    PARTS,
    Setting,
    settings_of,
)

from .papers import (
    GEM,
    MNIST,
    PAGE,
    RESULTS,
    comparisons,
    keep_like_published,
    made_up,
    paper,
)

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
