"""What each policy keeps, and what holds for all of them."""

from functools import partial

import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.checks import CHECKS, POLICY_CHECKS, check_policy
from gradmem.memory.policies import POLICIES, First, KCentre, Policy

BY_GRADIENTS = pytest.param(KCentre("gradients"), id="k-centre of gradients")
KEEPS = [*POLICIES, BY_GRADIENTS]
NEW = [keep for keep in KEEPS if keep != "last"]


@pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("keep", KEEPS)
def test_policy(keep, check):
    check(lambda: keep)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("keep", NEW)
def test_gem_with_every_policy(keep, check):
    check(lambda network, seed: gm.GEM(network, seed=seed, budget=16, keep=keep))


def test_a_policy_of_ones_own_is_checked():
    class Old(Policy):
        """As it could be written before there were offers."""

        name = "old"

        def places(self, row, n, generator):
            if row.count < row.size:
                yield slice(0, min(n, row.size - row.count)), row.count

        def kept(self, row, size, generator):
            return slice(0, min(size, row.count))

    check_policy(Old)


def test_a_policy_may_keep_nothing():
    class Nothing(First):
        name = "nothing"

        def places(self, row, n, generator):
            return ()

    memory = gm.GradientMemory(gm.mlp([4, 3]), memories=5, keep=Nothing())
    memory.add(torch.randn(6, 4), "a", torch.zeros(6, dtype=torch.long))
    assert memory.memory["a"][0].shape == (0, 4)
    assert memory.memory.others(None)[0].x.count_nonzero() == 0


@pytest.mark.parametrize("fault", ["random", "too many", "mixed"])
def test_a_policy_with_a_fault_is_found(fault):
    class Faulty(First):
        def places(self, row, n, generator):
            if fault == "random" and row.count == row.size and torch.rand(()) > 0.5:
                yield slice(0, 1), 0
            yield from super().places(row, n, generator)

        def kept(self, row, size, generator):
            if fault == "mixed":
                return torch.zeros(size, dtype=torch.long)
            return slice(0, size + (fault == "too many"))

    with pytest.raises((AssertionError, RuntimeError)):
        check_policy(Faulty)


def kept_of(keep, x, y=None, memories=4, seed=0, batch=5, losses=None, gradients=None):
    """The numbers of the examples that are kept; x: (n, d)."""
    numbers = torch.arange(len(x))
    y = numbers * 0 if y is None else y
    memory = gm.EpisodicMemory(memories, keep=keep, seed=seed)
    memory.attach(lambda both, t: both[:, 1:], losses, gradients)
    for some in numbers.split(batch):
        memory.add(torch.cat([some[:, None].float(), x[some]], 1), "a", y[some])
    return memory["a"][0][:, 0].long().tolist()


def test_balanced_has_equally_many_of_each_class_and_a_uniform_sample_of_each():
    y = torch.cat([torch.zeros(40), torch.ones(15), torch.full((2,), 2)]).long()
    y = y[torch.randperm(57, generator=torch.Generator().manual_seed(0))]
    times = torch.zeros(57)
    for seed in range(300):
        kept = kept_of("balanced", torch.zeros(57, 1), y, memories=10, seed=seed)
        assert torch.bincount(y[kept]).tolist() == [4, 4, 2]
        times[kept] += 1
    for c, share in enumerate((4 / 40, 4 / 15, 1)):
        expected = 300 * share
        assert (times[y == c] - expected).abs().max() <= 4.5 * (expected * (1 - share)) ** 0.5


def test_balanced_stays_balanced_when_its_share_shrinks():
    memory = gm.EpisodicMemory(budget=12, keep="balanced")
    y = torch.tensor([0] * 20 + [1] * 3 + [5] * 2)
    for t in "ab":
        memory.add(torch.zeros(25, 1), t, y)
    assert memory["a"][1].bincount(minlength=6).tolist() == [2, 2, 0, 0, 0, 2]


def test_balanced_needs_class_ids():
    memory = gm.EpisodicMemory(4, keep="balanced")
    with pytest.raises(ValueError, match=r"needs class ids y: \(n,\).*got \(3, 1\) torch.float32"):
        memory.add(torch.zeros(3, 2), "a", torch.zeros(3, 1))
    assert list(memory) == []


def test_herding_keeps_the_mean():
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1)) ** 3
    mean = x.mean(0)

    def away(keep, seed=0):
        return float((x[kept_of(keep, x, memories=20, seed=seed)].mean(0) - mean).norm())

    assert away("herding") < 0.2 * min(away("reservoir", seed) for seed in range(5))


def test_herding_exchanges_as_a_search_over_all_exchanges_does():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(2))
    kept = [*range(6)]
    for i in range(6, 30):
        mean = x[: i + 1].mean(0)
        choices = [kept, *([i if k == one else k for k in kept] for one in kept)]
        kept = min(choices, key=lambda some: float((x[some].mean(0) - mean).norm()))
    assert sorted(kept) == sorted(kept_of("herding", x, memories=6))


def test_k_centre_keeps_what_is_far_apart():
    corners = torch.tensor([[0.0, 0], [9, 0], [0, 9], [9, 9]])
    near = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * 0.1
    x = torch.cat([near[:60], corners[1:2], near[60:], corners[2:]])
    kept = x[kept_of("k-centre", x)]
    assert (torch.cdist(corners, kept).min(1).values < 0.5).all()


def test_k_centre_covers_almost_as_well_as_a_greedy_choice_from_all():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    greedy = [0]
    for _ in range(19):
        greedy.append(int(torch.cdist(x, x[greedy]).min(1).values.argmax()))
    radius = [float(torch.cdist(x, x[some]).min(1).values.max())
              for some in (greedy, kept_of("k-centre", x, memories=20))]  # fmt: skip
    assert radius[1] < 2 * radius[0]


def test_k_centre_of_gradients_takes_no_notice_of_features():
    numbers = torch.arange(30.0)[:, None]
    keep = KCentre("gradients")
    kept = kept_of(keep, numbers, gradients=lambda both, t, y, mask: (both[:, 1:] == 7).float())
    assert 7 in kept
    assert kept_of("k-centre", numbers) != kept
    with pytest.raises(ValueError, match="needs the gradients of examples"):
        kept_of(keep, numbers)


def test_what_is_hard_is_kept_more_often():
    x, times = torch.ones(40, 1), torch.zeros(40)
    x[::4] = 8.0
    for seed in range(200):
        kept = kept_of("loss", x, seed=seed, losses=lambda both, t, y, mask: both[:, 1])
        times[kept] += 1
    hard, easy = times[::4].mean(), times[torch.arange(40) % 4 > 0].mean()
    assert 5 < hard / easy < 9  # without replacement it is a little less than 8
    assert times.min() > 0


def test_loss_says_what_it_needs():
    memory = gm.EpisodicMemory(4, keep="loss")
    with pytest.raises(ValueError, match="needs the losses of examples: use the memory in a lear"):
        memory.add(torch.zeros(3, 2), "a", torch.zeros(3))


@pytest.mark.parametrize("kind", [gm.GEM, gm.AGEM, gm.EWC])
def test_learners_attach_features_and_losses_of_their_network(kind):
    network = nn.Sequential(*gm.mlp([4, 8, 3]), nn.Dropout(0.5))
    learner = kind(network, memory=gm.EpisodicMemory(6))
    learner.outputs = {"a": (0, 1)}
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    learner.observe(x, "a", y)
    offer = learner.memory._offer(x, "a", y, learner.mask("a"))
    logits = learner.network[:-1](x)
    assert torch.equal(offer.features(), learner.network[:-2](x))
    expected = nn.functional.cross_entropy(logits[:, :2], y, reduction="none")
    torch.testing.assert_close(offer.losses().float(), expected)
    last = [*learner.network[2].parameters()]
    for loss, found in zip(expected, offer.gradients(), strict=True):
        rows = torch.autograd.grad(loss, last, retain_graph=True)
        torch.testing.assert_close(found, torch.cat([row.flatten() for row in rows]))
    assert all(part.training for part in network.modules())


def test_losses_of_a_learners_own_kind_are_asked_for_one_by_one():
    class Mine(gm.GEM):
        def loss(self, x, t, y, mask=None):
            return self.network(x)[range(len(y)), y].square().mean()

    learner = Mine(gm.mlp([4, 3]), keep="loss")
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 1])
    learner.observe(x, "a", y)
    expected = learner.network(x)[range(5), y].square()
    offered = learner.memory._offer(x, "a", y).losses()
    torch.testing.assert_close(offered.float(), expected)
    rows = learner.memory._offer(x, "a", y).gradients()
    last = [*learner.network[-1].parameters()]
    gradient = torch.autograd.grad(expected.sum(), last)
    torch.testing.assert_close(rows.sum(0), torch.cat([part.flatten() for part in gradient]))


def test_gradients_of_several_outputs_per_example_are_those_of_their_sum():
    """As in a language model, whose last layer is used once for every token."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))

    def loss(outputs, y):
        return nn.functional.cross_entropy(outputs.mT, y, reduction="none").mean(1)

    memory = gm.GradientMemory(model, loss=loss, keep=KCentre("gradients"))
    x = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(0))
    memory.add(x, "a", x.flip(1))
    found = memory.memory._offer(x, "a", x.flip(1)).gradients()
    for one, value in zip(found, loss(model(x), x.flip(1)), strict=True):
        rows = torch.autograd.grad(value, [*model[1].parameters()], retain_graph=True)
        torch.testing.assert_close(one, torch.cat([row.flatten() for row in rows]))


def test_without_a_network_the_inputs_are_the_features():
    memory = gm.EpisodicMemory(6)
    x = {"a": torch.ones(5, 2, 3), "b": torch.tensor([0, 1, 2, 3, 4])}
    assert memory._offer(x, "a", torch.zeros(5)).features().shape == (5, 7)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_loop_of_ones_own_with_every_policy(keep):
    model = gm.mlp([4, 8, 3], seed=0)
    memory = gm.GradientMemory(model, budget=9, keep=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for t in range(12):
        for _ in range(3):
            x, y = torch.randn(7, 4, generator=generator), torch.arange(7) % 3
            nn.functional.cross_entropy(model(x), y).backward()
            memory.step(optimizer, t)
            optimizer.zero_grad()
            memory.add(x, t, y)
    assert len(memory.gradients()) == len(memory.memory.groups) == 9
    other = gm.GradientMemory(gm.mlp([4, 8, 3], seed=0), budget=9, keep=keep)
    other.load_state_dict(memory.state_dict())
    assert other.memory.groups == memory.memory.groups


@pytest.mark.parametrize("keep", NEW)
def test_a_layer_that_was_replaced_by_a_wider_one_has_other_features(keep):
    model = gm.mlp([4, 8, 3])
    memory = gm.GradientMemory(model, budget=8, keep=keep)
    for width, tasks in ((8, "abc"), (12, "adefghijkl")):
        model[0], model[2] = nn.Linear(4, width), nn.Linear(width, 3)
        for t in tasks:
            memory.add(torch.randn(9, 4), t, torch.arange(9) % 3)
    assert len(memory.memory.groups) == 8


@pytest.mark.parametrize("keep", KEEPS)
def test_a_network_that_diverges_does_not_stop_a_policy(keep):
    memory = gm.EpisodicMemory(4, keep=keep)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, 0.0])
    rows = bad[:, None].expand(5, 3)
    memory.attach(lambda x, t: rows, lambda x, t, y, mask: bad, lambda x, t, y, mask: rows)
    for step in range(4):
        memory.add(torch.zeros(5, 1) + step, "a", torch.arange(5))
    state = memory.state_dict()["tasks"]["a"]
    assert not any(own.isnan().any() for part in state[4:] for own in part.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", KEEPS)
def test_memory_on_the_cpu_serves_a_network_on_a_gpu(keep):
    def learned(**where):
        network = gm.mlp([4, 8, 3], seed=0).cuda()
        learner = gm.GEM(network, memory=gm.EpisodicMemory(6, keep=keep, **where))
        generator = torch.Generator().manual_seed(0)
        for t in range(4):
            for _ in range(5):
                x = torch.randn(7, 4, generator=generator)
                learner.observe(x.cuda(), t, torch.arange(7).cuda() % 3)
        return learner

    there, here = learned(), learned(device="cpu", pin=True)
    for one, other in zip(there.network.parameters(), here.network.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    make = partial(gm.AGEM, gm.mlp([4, 8, 3]).cuda(), sample=4)
    make(memory=here.memory).observe(torch.randn(3, 4).cuda(), 9, torch.arange(3).cuda())
