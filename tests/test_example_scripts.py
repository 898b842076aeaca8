"""The scripts in examples/: GEM learns its tasks and forgets less than Single."""

import runpy
from pathlib import Path

import pytest

import gradmem as gm

EXAMPLES = Path(__file__).parents[1] / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize(
    ("name", "settings", "least", "ahead"),
    [
        ("regression", {}, -0.2, 0.4),
        ("multilabel", {}, 0.83, 0.1),
        ("text", {"constrain": "update"}, 0.8, 0.1),
        ("new_classes", {}, 0.85, 0.6),
    ],
)
def test_a_run_of_gem_scores_higher_and_forgets_less(name, settings, least, ahead):
    main = main_of(name)
    single, gem = main(gm.Single), main(gm.GEM, **settings)
    assert gem.acc > max(least, single.acc + ahead)
    assert gem.bwt > single.bwt + ahead


def test_a_loop_of_one_s_own_forgets_less_with_a_gradient_memory():
    main = main_of("own_loop")
    assert main(gem=True) > max(0.65, main(gem=False) + 0.2)


def test_an_endless_stream_is_learned_as_far_as_it_is_read():
    main = main_of("streams")
    assert main(gm.GEM) > max(0.55, main(gm.Single) + 0.12)


def test_angles_never_learned_are_predicted_from_their_descriptions():
    main = main_of("descriptions")
    assert main(described=True) > max(0.75, main(described=False) + 0.1)


def test_numbers_are_logged_elsewhere():
    logged = []
    result = main_of("callbacks")(lambda numbers, step: logged.append((step, *numbers)))
    assert [step for step, name in logged if name == "ACC so far"] == [1000, 2000, 3000, 4000, 5000]
    assert [name for _, name in logged].count("loss") == 5
    assert result.acc > 0.6


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_a_language_model_with_lora_forgets_less_in_a_trainer(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main = main_of("trainer_lora")
    plain, gem = main(tmp_path, constrain=None), main(tmp_path)
    assert gem.acc > max(0.7, plain.acc + 0.2)
    assert gem.bwt > plain.bwt + 0.3
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_a_lightning_module_forgets_less_with_a_callback():
    pytest.importorskip("lightning")
    main = main_of("lightning_gem")
    assert main(gem=True) > max(0.6, main(gem=False) + 0.15)


def test_jacobian_descent_with_a_memory_forgets_less():
    pytest.importorskip("torchjd")
    main = main_of("torchjd_upgrad")
    assert main(jacobian_descent=True) > max(0.6, main(jacobian_descent=False) + 0.2)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    limit = {"own_benchmark": 40, "trainer_lora": 35, "lightning_gem": 45}.get(path.stem, 30)
    assert len(path.read_text().splitlines()) < limit
