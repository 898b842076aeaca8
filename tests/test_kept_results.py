"""The pages of docs/ that are made from what benchmarks measured."""

import json
import re

import pytest

from benchmarks import kept, recipe
from gradmem.board.entries import ENTRIES
from gradmem.board.plan import Cell, Column, Conditions, final_seeds


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


RECIPES = kept.ROOT / "results/recipe"


@pytest.mark.parametrize("name", ["recipe-mnist", "recipe-cifar"])
def test_what_was_tried_for_the_recipe_is_in_its_table(name):
    runs = json.loads((RECIPES / f"{name}.json").read_text("utf-8"))["runs"]
    assert (RECIPES / f"{name}.md").read_text("utf-8") == recipe.table(runs)


@pytest.mark.parametrize("memories", [5120, 500, 200])
@pytest.mark.parametrize("benchmark", ["mnist-rotations", "mnist-permutations"])
def test_the_boards_settings_of_steadygem_were_chosen_on_held_out_data(benchmark, memories):
    """They are among the best, on both benchmarks, and seeds are others than the board's."""
    grid = dict(ENTRIES["steadygem"].grid(benchmark, memories))
    settings = {name: value for name, (value,) in grid.items()}
    runs = json.loads((RECIPES / "recipe-mnist.json").read_text("utf-8"))["runs"]
    used = {*final_seeds(benchmark), *Cell(Column(benchmark, memories), ENTRIES["gem"]).sweep(
        Conditions()
    ).seeds}  # fmt: skip
    assert not used & {run["seed"] for run in runs}
    tried = {}
    for run in runs:
        if run["memories"] == memories:
            tried.setdefault(json.dumps(run["settings"], sort_keys=True), []).append(run)
    accs = {key: [*recipe.means(own).values()] for key, own in tried.items()}
    means = {key: sum(own) / 2 for key, own in accs.items() if len(own) == 2}
    chosen = means[json.dumps(settings, sort_keys=True)]
    # the noise of one run is 0.003; of equals the one that is best for all sizes was taken
    assert chosen >= max(means.values()) - 0.003


def test_the_boards_settings_of_steadygem_on_cifar_were_chosen_on_held_out_data():
    """With half of the board's tasks and memories; the same for both its columns."""
    grids = [dict(ENTRIES["steadygem"].grid("cifar100-incremental", m)) for m in (200, 5120)]
    for grid in grids:
        settings = {name: value for name, (value,) in grid.items()}
        assert settings.items() >= recipe.CIFAR_RECIPE.items()
    runs = json.loads((RECIPES / "recipe-cifar.json").read_text("utf-8"))["runs"]
    assert not {*final_seeds("cifar100-incremental")} & {run["seed"] for run in runs}
    tried = {}
    for run in runs:
        tried.setdefault(recipe.name_of(run), []).append(run)
    means = {name: recipe.means(own) for name, own in tried.items()}
    chosen = means.pop("the recipe")
    assert len(chosen) == 2
    # the noise of one run is 0.015
    for own in means.values():
        both = own.keys() & chosen.keys()
        assert all(chosen[column] >= own[column] - 0.015 for column in both)
