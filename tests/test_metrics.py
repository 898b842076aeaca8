"""ACC, BWT and FWT by hand, by the published matrices, and of odd matrices."""

import math

import numpy as np
import pytest
import torch

import gradmem as gm
from gradmem.published import appendix_b

PUBLISHED = [(b, m) for b, methods in appendix_b().items() for m in methods]


def test_fifteen_matrices_are_published():
    assert len(PUBLISHED) == 15


@pytest.mark.parametrize(("benchmark", "method"), PUBLISHED)
def test_published_matrices(benchmark, method):
    published = appendix_b()[benchmark][method]
    R, baseline, printed = np.array(published["R"]), published["baseline"], published["printed"]
    m = gm.transfer_metrics(R, baseline)
    T = len(R)
    # The paper's matrices and metrics are rounded to four digits, and the printed transfer
    # divides by T instead of T - 1.
    assert m.acc == pytest.approx(printed["acc"], abs=1e-4)
    assert m.bwt * (T - 1) / T == pytest.approx(printed["bwt"], abs=2e-4)
    assert m.fwt * (T - 1) / T == pytest.approx(printed["fwt"], abs=2e-4)
    # The equations, written out once more.
    assert m.bwt == pytest.approx(sum(R[-1, i] - R[i, i] for i in range(T - 1)) / (T - 1))
    assert m.fwt == pytest.approx(sum(R[i - 1, i] - baseline[i] for i in range(1, T)) / (T - 1))
    assert m.learning_accuracy == pytest.approx(np.diag(R))
    assert m.forgetting == pytest.approx([R[j:, j].max() - R[-1, j] for j in range(T)])


def test_by_hand():
    m = gm.transfer_metrics([[0.8, 0.3, 0.1], [0.6, 0.9, 0.4], [0.7, 0.5, 1.0]], [0.1, 0.1, 0.2])
    assert m.acc == pytest.approx((0.7 + 0.5 + 1.0) / 3)
    assert m.bwt == pytest.approx(((0.7 - 0.8) + (0.5 - 0.9)) / 2)
    assert m.fwt == pytest.approx(((0.3 - 0.1) + (0.4 - 0.2)) / 2)
    assert m.forgetting == pytest.approx((0.1, 0.4, 0.0))
    assert m.learning_accuracy == pytest.approx((0.8, 0.9, 1.0))
    assert all(type(value) is float for value in (m.acc, m.bwt, m.fwt))


def test_scores_of_any_size_have_metrics():
    m = gm.transfer_metrics([[-1e6, -4e6], [-3e6, -2e-3]], [-9e6, -9e6])
    assert (m.bwt, m.fwt) == (-2e6, 5e6)
    assert m.acc == pytest.approx(-1.5e6)
    assert m.forgetting == (2e6, 0.0)


def test_one_task_has_no_transfer():
    m = gm.transfer_metrics([[0.8]], [0.1])
    assert m.acc == 0.8
    assert math.isnan(m.bwt)
    assert math.isnan(m.fwt)


def test_a_task_that_comes_back_counts_from_its_last_visit_backward_and_its_first_forward():
    # learned: 0, 1, 0 again
    R = [[0.9, 0.2], [0.5, 0.8], [0.95, 0.6]]
    m = gm.transfer_metrics(R, [0.1, 0.1], learned=[0, 1, 0])
    assert m.bwt == pytest.approx(0.6 - 0.8)  # nothing came after task 0's last visit
    assert m.fwt == pytest.approx(0.2 - 0.1)
    assert m.learning_accuracy == pytest.approx((0.95, 0.8))


def test_iid_data_has_accuracy_only():
    m = gm.transfer_metrics([[0.8, 0.6]], [0.1, 0.1], learned=[None])
    assert m.acc == pytest.approx(0.7)
    assert math.isnan(m.bwt)
    assert math.isnan(m.fwt)


def test_lists_arrays_and_tensors_are_the_same():
    R, b = [[0.9, 0.3], [0.8, 0.9]], [0.1, 0.1]
    expected = gm.transfer_metrics(R, b)
    assert gm.transfer_metrics(np.array(R), np.array(b)) == expected
    double = torch.float64
    assert gm.transfer_metrics(torch.tensor(R, dtype=double), torch.tensor(b, dtype=double)) == (
        expected
    )


@pytest.mark.parametrize(
    ("R", "baseline", "message"),
    [
        ([[0.1, 0.2]], [0.1, 0.1], "R must be square"),
        ([[0.1, 0.2], [0.3, 0.4]], [0.1], "baseline must have R's 2 columns, got 1"),
        ([[0.1, float("nan")], [0.3, 0.4]], [0.1, 0.1], "R must be finite"),
        ([0.1, 0.2], [0.1, 0.1], r"R must have 2 dimension"),
        ([], [], r"R must have 2 dimension"),
        ([["high"]], [0.1], "R must be a matrix of numbers"),
        ([[0.1, 0.2], [0.3]], [0.1, 0.1], "R must be a matrix of numbers"),
    ],
)
def test_wrong_matrices_are_named(R, baseline, message):
    with pytest.raises(ValueError, match=message):
        gm.transfer_metrics(R, baseline)
