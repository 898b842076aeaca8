"""
Steps against a remembered task
===============================

How often does a step go against a task that is remembered? After every step, its inner product
with each remembered task's gradient is looked at. A-GEM keeps the *mean* of the remembered losses
from rising, so that single tasks may still lose; GEM has a constraint for each of them. The
margin is 0 here, so that both are pure projections.
"""

import matplotlib.pyplot as plt
import torch

import gradmem as gm
from gradmem.reports.styles import styles


def flat(network):
    return torch.cat([w.detach().flatten() for w in network.parameters()])


def share_against(kind, **settings):
    """Of the steps after the first task: which share goes against a remembered task, and ACC."""
    continuum = gm.mnist_permutations(n_tasks=8, examples_per_task=300, data="sample")
    learner = kind(gm.mlp(), lr=0.1, **settings)
    known = gm.GradientMemory(learner.network, memory=gm.EpisodicMemory(memories=100))
    against = steps = 0
    for x, t, y in continuum:
        past = [task for task in known.memory if task != t]
        G = known.gradients(past) if past else None
        before = flat(learner.network)
        learner.observe(x, t, y)
        known.add(x, t, y)
        if G is not None:
            step = before - flat(learner.network)  # the direction that was descended
            cosines = G @ step / (G.norm(dim=1) * step.norm())
            against, steps = against + bool((cosines < -1e-5).any()), steps + 1
    right = [
        (learner.predict(x, t) == y).float().mean().item()
        for t, test in continuum.tests.items()
        for x, y in test.batches(1000)
    ]
    return against / steps, sum(right) / len(right)


rows = {
    "single": share_against(gm.Single),
    "agem": share_against(gm.AGEM, memories=100, sample=None),
    "gem": share_against(gm.GEM, memories=100, margin=0),
}
look = styles(rows)
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for name, (share, acc) in reversed(rows.items()):
    print(f"{name}: {share:.0%} of the steps go against a remembered task, ACC {acc:.2f}")
    axes.barh(name, share, color=look[name].colour)
    axes.annotate(f" {share:.0%}, ACC {acc:.2f}", (share, name), va="center")
axes.set(xlim=(0, 1.25), xlabel="share of steps that go against a remembered task")
axes.spines[["top", "right"]].set_visible(False)
