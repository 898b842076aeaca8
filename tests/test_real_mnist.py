"""The paper's own data, where it is at hand: `GRADMEM_DATA` names the folder."""

import os

import pytest

import gradmem as gm
from gradmem.benchmarks.data_sets import kind_of_data
from tests.memory import growth, measured

pytestmark = pytest.mark.skipif(
    "GRADMEM_DATA" not in os.environ, reason="set GRADMEM_DATA to a folder that holds MNIST"
)


@measured
@pytest.mark.parametrize("benchmark", ["mnist_rotations", "mnist_permutations"])
def test_twenty_tasks_stay_under_a_gigabyte(benchmark):
    """The whole process: 20 × 11,000 images, the 70,000 they come from, and torch itself."""
    code = f"""
import gradmem as gm
from gradmem.benchmarks.data_sets import kind_of_data
continuum = gm.{benchmark}()
assert continuum.n_examples == 20_000 and len(continuum) == 2_000
assert [len(test) for test in continuum.tests.values()] == [10_000] * 20
"""
    peak = growth("", code)
    assert peak < 1e9, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("benchmark", "least"), [(gm.mnist_rotations, 0.80), (gm.mnist_permutations, 0.70)]
)
def test_gem_learns_and_keeps_the_first_tasks_of_the_paper(benchmark, least):
    continuum = benchmark()[:5]
    gem = gm.run(gm.GEM(gm.mlp(), lr=0.1, memories=256, margin=0.5), continuum)
    single = gm.run(gm.Single(gm.mlp(), lr=0.1), continuum)
    assert gem.acc > least
    assert gem.bwt > -0.05
    assert gem.acc > single.acc + 0.02
    assert gem.bwt > single.bwt


def test_the_papers_data_are_known_by_their_test_set():
    assert kind_of_data("mnist-permutations", None) == "whole"
