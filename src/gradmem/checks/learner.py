"""Checks that every learner must pass.

Each is a function of `make`, which builds a learner around a small network.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.checks.same import _same
from gradmem.checks.toys import (
    N_CLASSES,
    N_INPUTS,
    Counting,
    Doubling,
    Joining,
    Root,
    dropout_network,
    shared_modules,
    task,
)
from gradmem.learners import Every, Learner
from gradmem.networks import conditioned, mlp

__all__ = ["CHECKS", "Make", "check_learner"]

Make = Callable[[nn.Module, int], Learner]

#: Descriptors of every kind that is promised to work.
DESCRIPTORS: tuple[Hashable, ...] = (0, "sort by colour", (1, "b"), 2.5, frozenset({3}))


def check_learner(make: Make) -> None:
    """Run all checks on the learner that `make(network, seed)` builds.

    Examples
    --------
    >>> import gradmem as gm
    >>> check_learner(lambda network, seed: gm.GEM(network, memories=20, seed=seed))
    """
    for check in CHECKS:
        check(make)


def learns_a_toy_task(make: Make) -> None:
    learner = _new(make)
    for batch in range(60):
        x, y = task("a", 10, seed=batch)
        learner.observe(x, "a", y)
    x, y = task("a", 300, seed=1000)
    accuracy = (learner.predict(x, "a") == y).float().mean().item()
    assert accuracy > 0.9, f"accuracy {accuracy:.2f} on a task that is easy to learn"


def predicts_before_and_after_training(make: Make) -> None:
    learner = _new(make)
    x, y = task("a", 7)
    for _ in range(2):
        for t in ("a", "never observed"):
            answer = learner.predict(x, t)
            assert answer.shape == (7,), f"predict gave shape {tuple(answer.shape)} for 7 inputs"
            assert answer.dtype == torch.int64, f"predict gave {answer.dtype}"
            assert ((answer >= 0) & (answer < N_CLASSES)).all(), f"predict gave {answer}"
        learner.observe(x, "a", y)


def predicts_without_descriptor_where_outputs_are_shared(make: Make) -> None:
    learner = _new(make)
    x, y = task("a", 7)
    learner.observe(x, "a", y)
    if learner.shares_outputs:
        assert torch.equal(learner.predict(x), learner.predict(x, "a")), "predict(x) differs"
    else:
        _refused(learner, lambda: learner.predict(x), (TypeError,), "predict(x) without t")


def takes_any_hashable_descriptor(make: Make) -> None:
    learner = _new(make)
    for t in DESCRIPTORS:
        x, y = task("a", 5)
        learner.observe(x, t, y)
    for t in DESCRIPTORS:
        assert learner.predict(x, t).shape == (5,)


def survives_a_returning_task(make: Make) -> None:
    learner = _new(make)
    for visit, t in enumerate("abcab"):
        for batch in range(3):
            x, y = task(t, 10, seed=10 * visit + batch)
            learner.observe(x, t, y)
    _finite(learner)


def takes_batches_of_any_size(make: Make) -> None:
    learner = _new(make)
    for t in "ab":
        for n in (10, 3, 1, 40, 1):
            x, y = task(t, n, seed=n)
            learner.observe(x, t, y)
            assert learner.predict(x, t).shape == (n,)
    assert learner.examples == 110, f"counted {learner.examples} examples of 110"
    steps = 10 * learner.glances
    assert learner.steps == steps, f"counted {learner.steps} steps of {steps}"
    costs = learner.statistics()
    assert costs["steps"] >= steps, f"counted {costs['steps']} updates in {steps} steps"
    gradients = costs["example_gradients"]
    assert gradients >= 110, f"counted {gradients} example gradients for 110 examples"
    _finite(learner)


def is_deterministic_from_its_seed(make: Make) -> None:
    """Also with dropout, and whatever happens to the global generator meanwhile."""
    first, second = (_new(make, network=dropout_network()) for _ in range(2))
    _train(first)
    torch.rand(17)  # moves the global generator
    _train(second)
    _same(first.state_dict(), second.state_dict(), "the same seed gave another learner")


def leaves_the_global_generator_alone(make: Make) -> None:
    before = torch.get_rng_state()
    learner = _new(make, network=dropout_network())
    _train(learner)
    assert torch.equal(before, torch.get_rng_state()), "the global generator was moved"


def predicting_changes_nothing(make: Make) -> None:
    learner = _new(make, network=dropout_network())
    _train(learner)
    before = learner.state_dict()
    modes = [part.training for part in learner.network.modules()]
    for t in ("a", "b", "never observed"):
        learner.predict(task("a", 5)[0], t)
    _same(before, learner.state_dict(), "predict changed the learner")
    after = [part.training for part in learner.network.modules()]
    assert modes == after, "predict changed the network's mode"


def continues_identically_from_its_state(make: Make) -> None:
    """Through a file, into a learner that started elsewhere; the state is a copy, not a view."""
    learner = _new(make, network=dropout_network())
    _train(learner, "aab")
    state = learner.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    _train(learner, "bca")
    expected = learner.state_dict()

    for saved in (state, torch.load(file, weights_only=True)):
        other = _new(make, network=dropout_network(seed=5), seed=9)
        _train(other, "c")
        other.load_state_dict(saved)
        _train(other, "bca")
        _same(expected, other.state_dict(), "a restored learner went another way")
        x = task("a", 20)[0]
        for t in ("a", "b", "never observed"):
            assert torch.equal(learner.predict(x, t), other.predict(x, t)), f"differs on {t}"


def starts_again_from_the_state_of_a_new_one(make: Make) -> None:
    """So that one learner, with what it recorded and chose, can do run after run."""
    networks = [mlp([N_INPUTS, 16, 16, N_CLASSES], seed=seed) for seed in (1, 5, 5)]
    used, new, state_of = (
        _new(make, network, seed) for network, seed in zip(networks, (0, 9, 9), strict=True)
    )
    _train(used, "abca")
    used.load_state_dict(state_of.state_dict())
    for learner in (used, new):
        _train(learner, "abc")
    _same(new.state_dict(), used.state_dict(), "a learner that started again went another way")


def refuses_another_kind_of_state(make: Make) -> None:
    learner = _new(make)
    _train(learner)
    state = learner.state_dict() | {"learner": "Another"}
    _refused(learner, lambda: learner.load_state_dict(state), (ValueError,), "another's state")


def refuses_bad_input_and_stays_as_it_was(make: Make) -> None:
    learner = _new(make)
    x, y = task("a", 6)
    for bad, xs, t, ys in _bad_inputs(x, y):  # before it has learned anything …
        _refused(learner, _observe(learner, xs, t, ys), (ValueError, TypeError), bad)
    _train(learner)
    for bad, xs, t, ys in _bad_inputs(x, y):  # … and after
        _refused(learner, _observe(learner, xs, t, ys), (ValueError, TypeError), bad)


def keeps_to_a_tasks_own_outputs(make: Make) -> None:
    """In training and in prediction; other labels are refused, and a copy knows it, too."""
    learner = _new(make)
    learner.outputs = {"a": (0, 2), "b": (1,)}
    x, y = task("a", 40)
    mine = y != 1
    for _ in range(3):
        learner.observe(x[mine], "a", y[mine])
        learner.observe(x[y == 1], "b", y[y == 1])
    other = _new(make, seed=3)
    other.load_state_dict(learner.state_dict())
    for one in (learner, other):
        assert {*one.predict(x, "a").tolist()} <= {0, 2}, "predicted an output of another task"
        assert {*one.predict(x, "b").tolist()} == {1}, "predicted an output of another task"
    _refused(learner, _observe(learner, x, "a", y), (ValueError,), "a label of another task")
    _refused(learner, lambda: learner.predict(x), (TypeError,), "predict(x) without t")
    _finite(learner)


def returns_the_loss_of_the_batch(make: Make) -> None:
    learner = _without_noise(_new(make))
    x, y = task("a", 8)
    learner.observe(x, "a", y)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(learner.module("a")(x), y)
    loss = learner.observe(x, "a", y)
    assert loss is not None, "observe returned no loss"
    assert torch.allclose(loss, expected, atol=1e-5), f"observe returned {loss}, not {expected}"
    assert not loss.requires_grad, "the loss keeps the graph it came from"


def leaves_modules_as_they_are(make: Make) -> None:
    """Also those that are used twice, and those that replace their buffers as they compute."""
    for first in (nn.PReLU(), Counting(N_INPUTS, N_INPUTS)):
        network = shared_modules(first)
        learner = _new(make, network)
        tensors = [*network.parameters()]
        _train(learner, "aba")
        for before, after in zip(tensors, network.parameters(), strict=True):
            assert before is after, "a parameter was replaced by another object"
            assert type(after) is nn.Parameter, f"a parameter became a {type(after).__name__}"
        copy.deepcopy(learner.network)
        _finite(learner)


def remembers_what_came_in(make: Make) -> None:
    """Also if the network changes its inputs in place."""
    doubling = Doubling(N_INPUTS, N_INPUTS)
    learner = _new(make, nn.Sequential(doubling, *mlp([N_INPUTS, 16, N_CLASSES], seed=1)))
    given = []
    for visit, t in enumerate("aabb"):
        x, y = task(t, 8, seed=visit)
        before = x.clone()
        learner.observe(x, t, y)
        learner.predict(x, t)
        assert torch.equal(x, before), "what was given to the learner was changed"
        given += [row.tolist() for row in before]
    for t in getattr(learner, "memory", ()):
        kept = learner.memory[t][0].tolist()  # type: ignore[attr-defined]
        assert all(row in given for row in kept), f"task {t}'s memories are not what came in"


def refuses_a_gradient_that_is_not_finite(make: Make) -> None:
    """The loss may be finite all the same."""
    root = Root(N_INPUTS, N_INPUTS, bias=False)
    network = nn.Sequential(root, *mlp([N_INPUTS, 16, N_CLASSES], seed=1))
    learner = _without_noise(_new(make, network))
    for t in "ab":
        x, y = task(t, 8)
        learner.observe(x, t, y)
    x, y = task("a", 8)
    for t in "ac":
        bad = _observe(learner, torch.zeros_like(x), t, y)
        _refused(learner, bad, (FloatingPointError,), "a gradient that is not finite")


def learns_with_a_layer_that_was_replaced(make: Make) -> None:
    learner = _new(make)
    if not learner.one_network or not isinstance(learner.network, nn.Sequential):
        return
    _train(learner)
    layer = learner.network[-1] = nn.Linear(16, N_CLASSES)
    before = layer.weight.detach().clone()
    _train(learner, "abc")
    assert not torch.equal(before, layer.weight), "a replaced layer does not learn"


def refuses_the_state_of_another_optimizer(make: Make) -> None:
    learner = _new(make)
    _train(learner)
    state = _of_another_optimizer(learner.state_dict())
    _refused(learner, lambda: learner.load_state_dict(state), (ValueError,), "another optimizer's")


def takes_inputs_of_any_structure(make: Make) -> None:
    """The same is learned from a tensor and from a dict of its parts."""
    whole = _without_noise(_new(make))
    if not whole.one_network:
        return  # a first layer per task is a first layer of tensors
    joining = Joining(mlp([N_INPUTS, 16, 16, N_CLASSES], seed=1))
    parts = _without_noise(_new(make, joining))
    for visit, t in enumerate("abcab"):
        x, y = task(t, 8, seed=visit)
        whole.observe(x, t, y)
        parts.observe({"left": x[:, :1], "right": x[:, 1:]}, t, y)
    x, _ = task("a", 50, seed=99)
    one, other = (
        learner.forward(given, "a")
        for learner, given in ((whole, x), (parts, {"left": x[:, :1], "right": x[:, 1:]}))
    )
    assert torch.allclose(one, other, atol=1e-4), "a dict of inputs was learned another way"


def learns_without_labels_as_with_them(make: Make) -> None:
    """`Every` finds the tasks 0, 1, …; half-way through a state."""
    labelled, unlabelled, other = (_new(make, dropout_network(), seed) for seed in (0, 0, 9))
    for learner in (unlabelled, other):
        learner.boundaries = Every(24)
    for visit, t in enumerate("abc"):
        for batch in range(3):
            x, y = task(t, 8, seed=10 * visit + batch)
            labelled.observe(x, visit, y)
            unlabelled.observe(x, y=y)
            if (visit, batch) == (1, 1):
                other.load_state_dict(unlabelled.state_dict())
                unlabelled = other
    found = [(one.t, one.first, one.examples) for one in unlabelled.tasks]
    assert found == [(0, 0, 24), (1, 24, 24), (2, 48, 24)], f"Every(24) found {found}"
    state = unlabelled.state_dict()
    state.pop("boundaries")
    _same(labelled.state_dict(), state, "what was learned without labels is something else")


def learns_a_mixed_batch_task_by_task(make: Make) -> None:
    """And predicts one in the order of its examples."""
    mixed, apart = _new(make, dropout_network()), _new(make, dropout_network())
    each = list("abaacb")
    places = {t: [i for i, one in enumerate(each) if one == t] for t in "abc"}
    x, y = task("a", len(each))
    losses = [apart.observe(x[i], t, y[i]) for t, i in places.items()]
    loss = mixed.observe(x, each, y)
    assert loss is not None, "observe returned no loss"
    parts = zip(losses, places.values(), strict=True)
    mean = sum(float(one) * len(i) for one, i in parts if one is not None) / len(each)
    assert math.isclose(loss, mean, rel_tol=1e-5), f"observe returned {loss}, not {mean}"
    _same(apart.state_dict(), mixed.state_dict(), "a mixed batch was learned another way")
    predicted = mixed.predict(x, each)
    for t, i in places.items():
        assert torch.equal(predicted[i], mixed.predict(x[i], t)), f"predicted {predicted}"
    y[3] = N_CLASSES
    _refused(mixed, _observe(mixed, x, each, y), (ValueError,), "a label too large in a part")
    _refused(mixed, _observe(mixed, x, each[:-1], y), (ValueError,), "too few descriptors")


def learns_with_descriptions(make: Make) -> None:
    """A copy predicts from its descriptions, too; a task without one is refused."""
    if not _new(make).one_network:
        return  # a task has layers of its own
    learner, other = (
        _new(make, conditioned(mlp([N_INPUTS, 16, 16, N_CLASSES], seed=seed), 2), seed)
        for seed in (1, 3)
    )
    learner.descriptions = {"a": [0.6, 0.8], "never observed": [-0.8, 0.6]}
    for batch in range(60):
        x, y = task("a", 10, seed=batch)
        learner.observe(x, "a", y)
    other.load_state_dict(learner.state_dict())
    x, y = task("a", 300, seed=1000)
    accuracy = (learner.predict(x, "a") == y).float().mean().item()
    assert accuracy > 0.9, f"accuracy {accuracy:.2f} on a described task that is easy to learn"
    for t in ("a", "never observed"):
        same = torch.equal(learner.predict(x, t), other.predict(x, t))
        assert same, f"a copy predicts something else for the described task {t!r}"
    outputs = [learner.forward(x, t) for t in ("a", "never observed")]
    assert not torch.equal(*outputs), "descriptions make no difference"
    _refused(learner, lambda: learner.predict(x, "b"), (ValueError,), "a task not described")
    _refused(learner, _observe(learner, x, "b", y), (ValueError,), "a task not described")


CHECKS: tuple[Callable[[Make], None], ...] = (
    learns_a_toy_task,
    predicts_before_and_after_training,
    predicts_without_descriptor_where_outputs_are_shared,
    takes_any_hashable_descriptor,
    survives_a_returning_task,
    takes_batches_of_any_size,
    is_deterministic_from_its_seed,
    leaves_the_global_generator_alone,
    predicting_changes_nothing,
    continues_identically_from_its_state,
    starts_again_from_the_state_of_a_new_one,
    refuses_another_kind_of_state,
    refuses_bad_input_and_stays_as_it_was,
    keeps_to_a_tasks_own_outputs,
    returns_the_loss_of_the_batch,
    leaves_modules_as_they_are,
    remembers_what_came_in,
    refuses_a_gradient_that_is_not_finite,
    learns_with_a_layer_that_was_replaced,
    refuses_the_state_of_another_optimizer,
    takes_inputs_of_any_structure,
    learns_without_labels_as_with_them,
    learns_a_mixed_batch_task_by_task,
    learns_with_descriptions,
)


def _of_another_optimizer(state: Any) -> Any:
    """The state with the name of another optimizer wherever it has one."""
    if not isinstance(state, dict):
        return state
    changed = {key: _of_another_optimizer(value) for key, value in state.items()}
    return changed | {"kind": "Another"} if "kind" in changed else changed


def _bad_inputs(x: Tensor, y: Tensor) -> list[tuple[str, Any, Any, Any]]:
    nan, inf = x.clone(), x.clone()
    nan[2, 1], inf[0, 0] = float("nan"), float("inf")
    return [
        ("NaN in x", nan, "a", y),
        ("infinity in x", inf, "a", y),
        ("x of another width", x[:, :2], "a", y),
        ("x without a batch dimension", x[0], "a", y[0]),
        ("x of another dtype", x.double(), "a", y),
        ("x of whole numbers", x.long(), "a", y),
        ("x as a list", x.tolist(), "a", y),
        ("an empty batch", x[:0], "a", y[:0]),
        ("a label too large", x, "a", y + N_CLASSES),
        ("a negative label", x, "a", y - N_CLASSES),
        ("labels as floats", x, "a", y.float()),
        ("labels as booleans", x, "a", y > 0),
        ("too few labels", x, "a", y[:3]),
        ("labels of another shape", x, "a", y[:, None]),
        ("labels as a list", x, "a", y.tolist()),
        ("an unhashable t", x, ["a"], y),
        ("a tensor as t", x, torch.tensor(1), y),
        ("no t", x, None, y),
        ("a t that does not equal itself", x, float("nan"), y),
    ]


def _observe(learner: Learner, x: Any, t: Any, y: Any) -> Callable[[], Any]:
    return lambda: learner.observe(x, t, y)


def _refused(
    learner: Learner, action: Callable[[], Any], errors: tuple[type[Exception], ...], what: str
) -> None:
    before = learner.state_dict()
    try:
        action()
    except errors as error:
        assert str(error), f"the error about {what} says nothing"
    else:
        raise AssertionError(f"{what} was not refused")
    _same(before, learner.state_dict(), f"{what} changed the learner")


def _new(make: Make, network: nn.Module | None = None, seed: int = 0) -> Learner:
    return make(mlp([N_INPUTS, 16, 16, N_CLASSES], seed=1) if network is None else network, seed)


def _without_noise(learner: Learner) -> Learner:
    """The learner, whose inputs are learned as they are: to compare with what is known of them."""
    learner.passes.noise = None
    return learner


def _train(learner: Learner, tasks: str = "ab") -> None:
    for visit, t in enumerate(tasks):
        for batch in range(3):
            x, y = task(t, 8, seed=10 * visit + batch)
            learner.observe(x, t, y)


def _finite(learner: Learner) -> None:
    for name, weight in learner.network.named_parameters():
        assert weight.isfinite().all(), f"{name} is not finite"
