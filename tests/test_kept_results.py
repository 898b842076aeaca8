"""The pages of docs/ that are made from what benchmarks measured."""

import json
import re

import pytest

from benchmarks import kept


@pytest.mark.parametrize("page", kept.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_results_beside_it(page):
    text = page.read_text("utf-8")
    assert kept.PLACE.search(text)
    assert kept.with_tables(text) == text, "make them again: python -m benchmarks.kept"


def test_a_page_shows_every_picture_that_is_drawn(tmp_path):
    kept.draw(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in kept.PICTURES.iterdir()}
    shown = re.findall(r"\]\(memory-and-streams/([\w-]+\.png)\)", kept.PAGES[0].read_text("utf-8"))
    assert set(shown) == drawn


def test_other_results_make_another_table(tmp_path, monkeypatch):
    result = json.loads((kept.ROOT / "results/policies/policies.json").read_text("utf-8"))
    result["runs"][0]["acc"] = 0.5
    (tmp_path / "results/policies").mkdir(parents=True)
    (tmp_path / "results/policies/policies.json").write_text(json.dumps(result), "utf-8")
    page = "a\n<!-- table: policies -->\nold\n<!-- end -->\nb\n"
    before = kept.with_tables(page)
    assert "old" not in before
    assert kept.with_tables(before) == before
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    assert kept.with_tables(page) != before
