"""What learning cost: steps one after another, and examples whose gradient was computed."""

import pytest
import torch

import gradmem as gm

N = 4  # examples of a mini-batch
TASKS = "aabbc"  # a mini-batch of each


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 3, generator=generator), torch.randint(3, (N,), generator=generator)


def trained(kind, **settings):
    learner = kind(gm.mlp([3, 5, 3]), lr=0.01, **settings)
    for seed, t in enumerate(TASKS):
        x, y = data(seed)
        learner.observe(x, t, y)
    return learner


def costs(learner):
    found = learner.statistics()
    assert found["examples"] == N * len(TASKS)
    return found["steps"], found["example_gradients"]


# Learner, settings, and for each of the five mini-batches its steps and example gradients, for one
# glance: of tasks a, a, b, b, c.
COSTS = [
    (gm.Single, {}, [(1, 4)] * 5),
    (gm.Independent, {}, [(1, 4)] * 5),
    (gm.Multimodal, {}, [(1, 4)] * 5),
    # 6 of task a's 8 examples are remembered, then also 6 of b's 8
    (gm.GEM, {"memories": 6}, [(1, 4), (1, 4), (1, 10), (1, 10), (1, 16)]),
    (gm.SoftGEM, {"memories": 6}, [(1, 4), (1, 4), (1, 10), (1, 10), (1, 16)]),
    # and all memories join a batch, but for the first one of a task
    (gm.SteadyGEM, {"memories": 6}, [(1, 4), (1, 8), (1, 10), (1, 20), (1, 16)]),
    # two of each other task's
    (gm.GEM, {"memories": 6, "sample": 2}, [(1, 4), (1, 4), (1, 6), (1, 6), (1, 8)]),
    (gm.AGEM, {"memories": 6, "sample": 5}, [(1, 4), (1, 4), (1, 9), (1, 9), (1, 9)]),
    (gm.AGEM, {"memories": 6, "sample": None}, [(1, 4), (1, 4), (1, 10), (1, 10), (1, 16)]),
    (gm.MEGA, {"memories": 6, "sample": 5}, [(1, 4), (1, 4), (1, 9), (1, 9), (1, 9)]),
    # replay draws from what is remembered of all tasks
    (gm.ER, {"memories": 6, "sample": 5}, [(1, 4), (1, 8), (1, 9), (1, 9), (1, 9)]),
    (
        gm.ER,
        {"budget": 7, "groups": 1, "sample": 50},
        [(1, 4), (1, 8), (1, 11), (1, 11), (1, 11)],
    ),
    # two samples
    (gm.DERpp, {"memories": 6, "sample": 5}, [(1, 4), (1, 12), (1, 14), (1, 14), (1, 14)]),
    # for each of four examples, two batches of it and up to five remembered ones
    (
        gm.MER,
        {"budget": 7, "groups": 1, "sample": 5, "batches": 2},
        [(8, 8), (40, 40), (48, 48), (48, 48), (48, 48)],
    ),
    # four inner steps and one from the start; the look ahead at the batch and up to three others
    (
        gm.LaMAML,
        {"budget": 7, "groups": 1, "sample": 3, "meta": "last"},
        [(5, 8), (5, 11), (5, 11), (5, 11), (5, 11)],
    ),
    (
        gm.LaMAML,
        {"budget": 7, "groups": 1, "sample": 3, "meta": "every"},
        [(5, 20), (5, 32), (5, 32), (5, 32), (5, 32)],
    ),
    # three examples for a step, then one
    (
        gm.LaMAML,
        {"budget": 7, "groups": 1, "sample": 3, "meta": "every", "inner": 3},
        [(3, 12), (3, 18), (3, 18), (3, 18), (3, 18)],
    ),
    # exemplars are there from the second task on
    (gm.ICaRL, {"budget": 6, "rehearsed": 7}, [(1, 4), (1, 4), (1, 11), (1, 11), (1, 11)]),
]


@pytest.mark.parametrize("glances", [1, 3])
@pytest.mark.parametrize(("kind", "settings", "each"), COSTS)
def test_a_learner_counts_its_steps_and_example_gradients(kind, settings, each, glances):
    learner = trained(kind, glances=glances, **settings)
    steps, examples = (sum(column) for column in zip(*each, strict=True))
    assert costs(learner) == (glances * steps, glances * examples)


def test_ewc_counts_the_examples_of_its_fisher_information_once():
    learner = trained(gm.EWC, memories=6, glances=3)
    assert costs(learner) == (15, 3 * 20 + 6 + 6)  # tasks a and b are over


def test_gem_with_few_constraints_counts_those_it_computed():
    learner = gm.GEM(gm.mlp([3, 5, 3]), lr=0.01, memories=4, constraints=2)
    for seed, t in enumerate("abcde"):
        x, y = data(seed)
        learner.observe(x, t, y)
    steps, examples = costs(learner)
    assert steps == 5
    # two of three and two of four other tasks in the last steps, not all
    assert 4 + 8 + 12 + 8 + 8 <= examples <= 4 + 8 + 12 + 12 + 12


def test_tasks_that_share_their_memories_count_once():
    memory = gm.EpisodicMemory(memories=6, groups=1)
    learner = trained(gm.AGEM, memory=memory, sample=None)
    _, examples = costs(learner)
    assert examples == 4 + 4 + 10 + 10 + 10


def test_what_was_skipped_costs_nothing():
    learner = gm.ER(gm.mlp([3, 5, 3]), memories=6, not_finite="skip")
    x, y = data(0)
    learner.observe(x, "a", y)
    before = learner.statistics()
    with torch.no_grad():
        bias = learner.network[-1].bias
        kept = bias.clone()
        bias.fill_(float("inf"))
    assert learner.observe(x, "a", y) is None
    with torch.no_grad():
        bias.copy_(kept)
    after = learner.statistics()
    assert after["skipped"] == 1
    for name in ("steps", "example_gradients"):
        assert after[name] == before[name]


def test_a_learner_of_ones_own_counts_its_mini_batches():
    class Own(gm.Learner):
        def learn(self, x, t, y):
            loss = self.loss(x, t, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    assert costs(trained(Own)) == (5, 20)


def test_costs_are_saved_and_restored():
    learner = trained(gm.LaMAML, budget=7, groups=1)
    other = gm.LaMAML(gm.mlp([3, 5, 3]), lr=0.01, budget=7, groups=1)
    state = learner.state_dict()
    other.load_state_dict(state)
    assert other.statistics() == learner.statistics()
    del state["costs"]  # as states of old are
    other.load_state_dict(state)
    found = other.statistics()
    assert (found["steps"], found["example_gradients"]) == (5, 0)


def test_a_result_has_costs_and_the_bytes_of_the_memory():
    continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=20, data="sample")
    learner = gm.GEM(gm.mlp([784, 10, 10]), memories=5)
    found = gm.run(learner, continuum).described()
    assert found["steps"] == 4
    assert found["example_gradients"] == 40 + 2 * 5
    assert found["memory_bytes"] == learner.memory.bytes > 0
    assert "memory_bytes" not in gm.Single(gm.mlp([3, 5, 3])).statistics()
