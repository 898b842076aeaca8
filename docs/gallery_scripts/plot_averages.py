"""
An average for every age
========================

Averages of the weights forget less than the weights themselves: the longer, the less. But a long
one has not taken up what was learned last. With several, SteadyGEM predicts each task with the one
whose length is nearest to 0.7 of the steps since the task was learned. Twelve rotations of 300
digits each, one memory of 60 digits for all, 90 steps a task.
"""

import matplotlib.pyplot as plt

import gradmem as gm

tasks = 12
decays = (0.98, 0.995, 0.999)
averages = {
    "no average": None,
    **{f"{1 / (1 - decay):,.0f} steps": decay for decay in decays},
    "by the task's age": decays,
}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, average), color in zip(
    averages.items(), ("#9a9a9a", "#e0a458", "#5b8e7d", "#8e7cc3", "#1b1b3a"), strict=True
):
    continuum = gm.mnist_rotations(tasks, examples_per_task=300, data="sample")
    learner = gm.SteadyGEM(gm.mlp(), budget=60, average=average)
    learner.learn_from(continuum, progress=False)
    tests = [(t, *test[:]) for t, test in continuum.tests.items()]
    right = [(learner.predict(x, t) == y).float().mean().item() for t, x, y in tests]
    acc = sum(right) / len(right)
    print(f"{name:>18}: ACC {acc:.3f}")
    width = 2.5 if name.startswith("by") else 1.2
    axes.plot(range(1, tasks + 1), right, "o-", color=color, lw=width, ms=3, label=name)
axes.set(xlabel="task, in the order of learning", ylabel="accuracy at the end")
axes.legend(title="average of the weights", fontsize="small", title_fontsize="small")
axes.grid(alpha=0.3)
