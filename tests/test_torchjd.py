"""`ExactProjector` in TorchJD's aggregators, against TorchJD's own projector."""

import subprocess
import sys

import pytest
import torch

import gradmem.projection.pivoting as pivoting
from gradmem.projection import solve_all

pytest.importorskip("torchjd")
pytest.importorskip("qpsolvers")
from torchjd.aggregation import DualProj, UPGrad
from torchjd.linalg import QuadprogProjector

from gradmem.integrations.torchjd import ExactProjector

KINDS = ["random", "ill-conditioned", "singular", "opposite rows", "a zero row"]


def jacobian(kind, m, dtype=torch.float64):
    generator = torch.Generator().manual_seed(m + KINDS.index(kind))
    J = torch.randn(m, 2 * m, dtype=torch.float64, generator=generator)
    if kind == "ill-conditioned":
        U, s, V = torch.linalg.svd(J, full_matrices=False)
        J = (U * torch.logspace(0, -8, len(s), dtype=torch.float64)) @ V
    if kind == "singular":
        J[m // 4 :] = torch.randn(m - m // 4, m // 4, generator=generator).double() @ J[: m // 4]
    if kind == "opposite rows":
        J[m // 2 :] = -J[: m - m // 2]
    if kind == "a zero row":
        J[0] = 0
    return J.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [8, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_torchjd_s_own_projector(kind, m, dtype):
    J = jacobian(kind, m, dtype)
    G, U = J @ J.T, torch.eye(m, dtype=dtype) / m
    ours, theirs = ExactProjector()(U, G), QuadprogProjector()(U, G)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["random", "ill-conditioned"])
def test_so_they_are_for_many_objectives(kind):
    J = jacobian(kind, 256)
    G, U = J @ J.T, torch.eye(256, dtype=torch.float64)[::32] / 256  # theirs takes seconds for all
    torch.testing.assert_close(ExactProjector()(U, G), QuadprogProjector()(U, G), rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregator", [UPGrad, DualProj])
@pytest.mark.parametrize("preference", [None, torch.tensor([0.25, 1.0, 3.0, 0.0])])
def test_aggregators_give_the_same_with_either(aggregator, preference):
    J = jacobian("random", 4, torch.float32) - 2.0
    J[0] *= -1
    ours = aggregator(preference, ExactProjector())(J)
    torch.testing.assert_close(ours, aggregator(preference)(J), rtol=0, atol=1e-5)
    exact = aggregator(
        None if preference is None else preference.double(), ExactProjector(norm_eps=0, reg_eps=0)
    )(J.double())
    assert (J.double() @ exact > -1e-9).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("kind", KINDS)
def test_without_regularization_the_projection_is_exact_at_any_scale(kind, scale):
    """It lies in the cone, and what was added is along constraints that it meets exactly."""
    J = scale * jacobian(kind, 12)
    U = torch.eye(12, dtype=torch.float64)
    W = ExactProjector(norm_eps=0, reg_eps=0)(U, J @ J.T)
    lengths = J.norm(dim=1).clamp_min(1e-300)
    along = W @ J @ J.T / lengths / lengths[:, None]
    added = (W - U) * lengths / lengths[:, None]
    assert (added >= 0).all()
    assert along.min() > -1e-8
    assert (added * along).abs().max() < 1e-8 * max(1.0, float(added.max()))


def test_a_single_vector_and_any_leading_dimensions_are_taken():
    J = jacobian("random", 6)
    G, U = J @ J.T, torch.randn(2, 3, 6, dtype=torch.float64)
    W = ExactProjector()(U, G)
    assert W.shape == U.shape
    torch.testing.assert_close(ExactProjector()(U[1, 2], G), W[1, 2])


def test_problems_that_pivoting_does_not_settle_are_solved_one_by_one(monkeypatch):
    J = torch.nn.functional.normalize(jacobian("random", 12))
    A = J @ J.T
    expected = solve_all(A, A)
    monkeypatch.setattr(pivoting, "MOST_CORRECTIONS", 1)
    assert expected.any()
    torch.testing.assert_close(solve_all(A, A), expected)


def test_settings_are_checked_and_shown():
    with pytest.raises(ValueError, match="reg_eps must not be negative"):
        ExactProjector(reg_eps=-1.0)
    assert repr(ExactProjector(reg_eps=0)) == "ExactProjector(norm_eps=0.0001, reg_eps=0.0)"


def test_without_torchjd_the_error_says_what_to_install():
    code = "import sys; sys.modules['torchjd'] = None; import gradmem.integrations.torchjd"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install gradmem[torchjd]" in found.stderr.splitlines()[-1]


def test_neither_qpsolvers_nor_quadprog_is_imported():
    code = (
        "import sys, torch; sys.modules['qpsolvers'] = sys.modules['quadprog'] = None\n"
        "from torchjd.aggregation import UPGrad\n"
        "from gradmem.integrations.torchjd import ExactProjector\n"
        "print(UPGrad(projector=ExactProjector())(torch.eye(2)).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "[0.5, 0.5]\n", found.stderr
