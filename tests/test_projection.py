"""`project` against brute force, an independent solver, and everything degenerate."""

import itertools

import numpy as np
import pytest
import quadprog
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradmem as gm
from gradmem.projection import Projection
from gradmem.projection.dual import dual


def unit(rows):
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def brute_force(g, G):
    """The closest vector that satisfies the constraints, over all 2^k sets of active ones."""
    G = unit(G)
    best, least = None, np.inf
    for size in range(len(G) + 1):
        for active in itertools.combinations(range(len(G)), size):
            A = G[list(active)]
            z = g - np.linalg.pinv(A) @ (A @ g) if size else g
            if (G @ z >= -1e-10 * np.linalg.norm(g)).all() and np.linalg.norm(z - g) < least:
                best, least = z, np.linalg.norm(z - g)
    return best


def constraints_hold(g_tilde, g, G, tolerance=1e-10):
    return (unit(G) @ g_tilde >= -tolerance * max(np.linalg.norm(g), 1e-300)).all()


def projected(g, G, **settings):
    return gm.project(torch.tensor(g), torch.tensor(G), **settings).numpy()


KINDS = ["random", "repeated rows", "opposite rows", "a zero row", "any scale", "whole numbers"]


def problem(kind, seed):
    rng = np.random.default_rng([KINDS.index(kind), seed])
    k, p = rng.integers(1, 7), rng.integers(1, 12)  # often more constraints than dimensions
    G, g = rng.standard_normal((k, p)), rng.standard_normal(p)
    if kind == "repeated rows":
        G[-1] = G[0]
    if kind == "opposite rows":
        G[-1] = -G[0]
    if kind == "a zero row":
        G[0] = 0
    if kind == "any scale":
        G *= 10.0 ** rng.integers(-12, 13, (k, 1))
        g *= 10.0 ** rng.integers(-12, 13)
    if kind == "whole numbers":
        G = rng.integers(-1, 2, (k, p)).astype(float)
    return g, G


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(60))
def test_nothing_closer_satisfies_the_constraints(kind, seed):
    g, G = problem(kind, seed)
    ours, best = projected(g, G), brute_force(g, G)
    assert constraints_hold(ours, g, G)
    np.testing.assert_allclose(ours, best, rtol=0, atol=1e-9 * np.linalg.norm(g))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("k", "p"), [(1, 5), (5, 40), (20, 300), (60, 200)])
def test_an_independent_solver_agrees(k, p, seed):
    rng = np.random.default_rng([k, seed])
    G = rng.standard_normal((k, p))
    g = rng.standard_normal(p) - 0.5 * G.mean(0)
    theirs = quadprog.solve_qp(np.eye(p), g, G.T, np.zeros(k))[0]
    np.testing.assert_allclose(projected(g, G), theirs, atol=1e-9 * np.linalg.norm(g))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("margin", [0.1, 0.5, 2.0])
def test_both_margin_rules(seed, margin):
    rng = np.random.default_rng(seed)
    k, p = 6, 30
    G = rng.standard_normal((k, p))
    g = -G[:3].sum(0) + rng.standard_normal(p)
    assert (G @ g < 0).any()
    # Shift: the dual's solution, plus the margin (the paper's text).
    v = scipy.optimize.nnls(G.T, -g)[0]
    np.testing.assert_allclose(projected(g, G, margin=margin), g + G.T @ (v + margin), atol=1e-9)
    # Floor: the dual solved with v ≥ margin (the released code).
    v = quadprog.solve_qp(G @ G.T, -G @ g, np.eye(k), np.full(k, margin))[0]
    ours = projected(g, G, margin=margin, margin_rule="floor")
    np.testing.assert_allclose(ours, g + G.T @ v, atol=1e-8)


@pytest.mark.parametrize("rule", ["shift", "floor"])
def test_without_a_violated_constraint_g_is_used_as_it_is(rule):
    g = torch.tensor([1.0, 2.0])
    G = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert gm.project(g, G, margin=3.0, margin_rule=rule) is g


def test_no_constraints_change_nothing():
    g = torch.randn(5)
    assert gm.project(g, torch.empty(0, 5)) is g


def test_one_constraint_by_hand():
    g, a = torch.tensor([3.0, -4.0, 1.0]), torch.tensor([0.0, 2.0, 0.0])
    assert gm.project(g, a[None]).tolist() == [3.0, 0.0, 1.0]
    assert gm.project(g, -a[None]) is g


def test_opposite_rows_leave_only_what_is_orthogonal_to_both():
    g = torch.tensor([1.0, 1.0])
    G = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    torch.testing.assert_close(gm.project(g, G), torch.tensor([1.0, 0.0]))


def test_zero_gradients():
    zero = torch.zeros(4)
    assert gm.project(zero, torch.randn(3, 4)).tolist() == zero.tolist()
    g = torch.randn(4)
    assert torch.equal(gm.project(g, torch.zeros(3, 4)), g)


def test_a_problem_that_leaves_nothing():
    """Rows that surround the origin: only the zero vector satisfies them."""
    G = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    torch.testing.assert_close(gm.project(torch.tensor([0.3, 2.0]), G), torch.zeros(2))


numbers = st.one_of(
    st.just(0.0),
    st.floats(1e-12, 1e12),
    st.floats(-1e12, -1e-12),
    st.integers(-3, 3).map(float),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_never_an_exception_never_a_nan(data):
    k, p = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 5))
    G = np.array(data.draw(st.lists(numbers, min_size=k * p, max_size=k * p))).reshape(k, p)
    g = np.array(data.draw(st.lists(numbers, min_size=p, max_size=p)))
    margin = data.draw(st.sampled_from([0.0, 0.5]))
    rule = data.draw(st.sampled_from(["shift", "floor"]))
    for dtype in (torch.float32, torch.float64):
        g_tilde = gm.project(
            torch.tensor(g, dtype=dtype), torch.tensor(G, dtype=dtype), margin, rule
        )
        assert g_tilde.dtype == dtype
        assert g_tilde.isfinite().all()


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_even_scales_at_the_edge_of_double_precision(scale):
    g, G = np.array([1.0, -1.0]), np.array([[0.0, 1.0], [1.0, 1.0]])
    expected = projected(g, G)
    np.testing.assert_allclose(projected(g * scale, G), expected * scale)
    np.testing.assert_allclose(projected(g, G * scale), expected)


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e-14, 1e-12, 1e12, 1e30])
def test_any_scale_in_float32(scale):
    rng = np.random.default_rng(0)
    g, G = rng.standard_normal(200), rng.standard_normal((30, 200))
    expected = projected(g, G)
    assert (G @ g < 0).any()
    for small, rows, size in ((g * scale, G, scale), (g, G * scale, 1.0)):
        found = gm.project(torch.tensor(small).float(), torch.tensor(rows).float()).double().numpy()
        np.testing.assert_allclose(found / size, expected, atol=1e-5 * np.linalg.norm(g))


def test_gradients_that_are_part_of_a_graph_are_taken_as_they_are():
    g = torch.tensor([1.0, -1.0], requires_grad=True)
    assert gm.project(g, torch.tensor([[0.0, 1.0]])).tolist() == [1.0, 0.0]


def test_float32_stays_float32_and_satisfies_the_constraints():
    torch.manual_seed(0)
    G = torch.randn(19, 1000)
    g = torch.randn(1000) - 0.3 * G.sum(0)
    g_tilde = gm.project(g, G)
    assert g_tilde.dtype == torch.float32
    assert constraints_hold(g_tilde.double().numpy(), g.double().numpy(), G.double().numpy(), 1e-6)


@pytest.mark.parametrize("k", [50, 200])
def test_the_dual_satisfies_its_optimality_conditions_when_singular(k):
    rng = np.random.default_rng(k)
    G = rng.standard_normal((k, k // 4))  # rank far below k
    A, b = G @ G.T, G @ rng.standard_normal(k // 4)
    v, steps = dual(A, b)
    assert 0 < steps < 10 * k
    slope = A @ v + b
    size = np.sqrt(np.diag(A)).max() * np.linalg.norm(b)
    assert (v >= 0).all()
    assert slope.min() >= -1e-10 * size
    assert abs(v @ slope) <= 1e-10 * size * max(1, v.sum())


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("k", [2, 12, 70])
def test_rows_that_are_almost_dependent(k, apart):
    """g̃ is the projection onto a cone if it lies in it, and g − g̃ is normal to it there."""
    for seed in range(6):
        rng = np.random.default_rng([k, seed])
        G = rng.standard_normal((k, 30 * (1 + seed % 3)))
        G[k // 2 :] = G[: k - k // 2] * rng.choice([-2.0, 1.0, 3.0], (k - k // 2, 1))
        G[k // 2 :] += apart * rng.standard_normal((k - k // 2, G.shape[1]))
        g = rng.standard_normal(G.shape[1]) - unit(G[: 1 + k // 3]).sum(0)
        g_tilde, size = projected(g, G), np.linalg.norm(g)
        assert constraints_hold(g_tilde, g, G, 1e-8)
        assert abs(g_tilde @ (g_tilde - g)) <= 1e-8 * size**2
        _, outside = scipy.optimize.nnls(unit(G).T, (g_tilde - g) / size, maxiter=100 * k)
        assert outside <= 1e-6


@pytest.mark.parametrize(
    ("g", "G", "settings", "error", "message"),
    [
        ([1.0], [[1.0]], {"margin": -1.0}, ValueError, "margin must not be negative, got -1.0"),
        ([1.0], [[1.0]], {"margin_rule": "x"}, ValueError, "margin_rule must be one of"),
        ([1.0, float("nan")], [[1.0, 1.0]], {}, ValueError, "g must be finite"),
        ([1.0], [[float("inf")]], {}, ValueError, "G must be finite"),
        ([1.0, 2.0], [[1.0]], {}, ValueError, r"g must be \(p,\) and G \(k, p\)"),
        ([1.0], [1.0], {}, ValueError, r"g must be \(p,\) and G \(k, p\)"),
        ([1], [[1]], {}, TypeError, "g must hold floating-point numbers, got torch.int64"),
    ],
)
def test_wrong_input_is_named(g, G, settings, error, message):
    with pytest.raises(error, match=message):
        gm.project(torch.tensor(g), torch.tensor(G), **settings)


def test_lists_are_refused():
    with pytest.raises(TypeError, match="g must be a tensor, got list"):
        gm.project([1.0], torch.ones(1, 1))  # type: ignore[arg-type]


def test_gradients_that_are_not_finite_say_what_may_help():
    with pytest.raises(FloatingPointError, match="smaller learning rate or margin may help"):
        Projection(0.5)(torch.ones(2), torch.full((1, 2), float("nan")))


def products(g, G):
    g, G = torch.tensor(g), torch.tensor(G)
    return G @ G.T, G @ g, g @ g


@pytest.mark.parametrize("rule", ["shift", "floor"])
@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["random", "opposite rows", "a zero row", "whole numbers"])
def test_weights_from_inner_products_are_those_of_a_projection(kind, margin, rule):
    whole, parts = Projection(margin, rule), Projection(margin, rule)
    for seed in range(20):
        g, G = problem(kind, seed)
        expected = whole(torch.tensor(g), torch.tensor(G))
        w = parts.weights(*products(g, G))
        np.testing.assert_allclose(g + G.T @ w.numpy(), expected, atol=1e-9 * np.linalg.norm(g))
        torch.testing.assert_close(parts.last.cosines, whole.last.cosines)
        added = margin if (parts.last.cosines < 0).any() else 0.0
        assert torch.equal(parts.last.v + added, w)
    names = ("violations", "violated_constraints")
    assert [parts.counts()[name] for name in names] == [whole.counts()[name] for name in names]
    assert parts.counts()["violations"] > 0


def test_weights_are_zero_where_nothing_is_violated_and_refused_where_not_finite():
    projection = Projection(0.5)
    eye = torch.eye(2, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    assert projection.weights(eye, torch.ones(2).double(), one).tolist() == [0.0, 0.0]
    assert projection.weights(eye[:0, :0], eye[0, :0], one).tolist() == []
    assert projection.counts()["violations"] == 0
    half = torch.tensor([-0.5, 1.0], dtype=torch.float64)
    assert projection.weights(eye, half, one, scale=2 * one).tolist() == [1.5, 1.0]
    with pytest.raises(FloatingPointError, match="not finite"):
        projection.weights(eye * float("nan"), half, one)


@pytest.mark.parametrize("scale", [1e-30, 1e-14, 1.0, 1e30])
def test_the_dual_is_solved_for_any_length_of_g(scale):
    GGt = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    Gg = torch.tensor([-2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        gm.solve_dual(GGt, scale * Gg) / scale, torch.tensor([0.5, 0.0], dtype=torch.float64)
    )


def test_quadprog_s_signs_in_a_solver_of_the_other_convention_double_the_conflict():
    """For one constraint: what the paper's dual gives, and the same arrays given to the wrong form.

    quadprog: min ½ vᵀPv − qᵀv with Cᵀv ≥ b. Others, among them qpsolvers' `solve_qp` and cvxopt's
    `qp`: min ½ vᵀPv + qᵀv with Cv ≤ b. Equation 11 is P = GGᵀ, +(Gg)ᵀv, v ≥ 0, so that quadprog
    wants q = −Gg, C = 1, b = 0.
    """
    g, G = np.array([1.0, -1.0]), np.array([[0.0, 2.0]])
    P, q, C, b = G @ G.T, -G @ g, np.eye(1), np.zeros(1)

    def other_convention(P, q, C, b):
        """Minimise ½ vᵀPv + qᵀv with Cv ≤ b."""
        return quadprog.solve_qp(P, -q, -C.T, -b)[0]

    def along(v):
        return float(G[0] @ (g + G.T @ v))

    conflict = along(np.zeros(1))
    assert conflict == -2.0
    right = quadprog.solve_qp(P, q, C, b)[0]
    assert along(right) == 0.0  # vanishes
    np.testing.assert_allclose(other_convention(P, -q, -C, b), right)
    wrong = other_convention(P, q, C, b)
    assert wrong == -right
    assert along(wrong) == 2 * conflict  # doubles
    np.testing.assert_allclose(projected(g, G), g + G.T @ right)
