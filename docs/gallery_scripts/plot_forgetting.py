"""
Forgetting, and not forgetting
==============================

MNIST rotations with the digits that come with gradmem: twenty tasks, one after another, digits
turned by a larger angle in each, 500 digits a task. Plain SGD and GEM (256 memories a task) see the
same mini-batches of ten once, with the same network (784-100-100-10). The curves are the accuracy
on the *first* task, which is never trained on again.

GEM and SGD have the same learning rate, 0.1. SGD's own best of 0.003, 0.01, 0.03 and 0.1, by the
mean accuracy over all tasks at the end, is 0.003: it forgets less then, and has learned little.
"""

import sys

import matplotlib.pyplot as plt

import gradmem as gm
from gradmem.reports.styles import styles

look = styles(["single", "gem"])
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, kind, lr, title, line in (
    ("gem", gm.GEM, 0.1, "GEM, rate 0.1", "-"),
    ("single", gm.Single, 0.1, "SGD, rate 0.1", "-"),
    ("single", gm.Single, 0.003, "SGD, rate 0.003", "--"),
):
    continuum = gm.mnist_rotations(n_tasks=20, examples_per_task=500, data="sample")
    result = gm.run(kind(gm.mlp(), lr=lr), continuum, every=250)
    first = result.curves[:, 0]
    print(
        f"{title}: first task {first[2]:.2f} when it was over, {first[-1]:.2f} at the end; {result}"
    )
    axes.plot(
        result.curve_examples, first, color=look[name].colour, marker=look[name].marker,
        linestyle=line, markevery=4,
    )  # fmt: skip
    axes.annotate(
        f"{title}: {first[-1]:.2f}", (10_000, first[-1]), xytext=(10, 0),
        textcoords="offset points", va="center", color=look[name].colour,
    )  # fmt: skip
for n in range(0, 10_001, 500):
    axes.axvline(n, color="0.9", zorder=0)
axes.set(
    xlim=(0, 12_900), ylim=(0, 1), xlabel="examples observed (a new task every 500)",
    ylabel="accuracy on the first task", xticks=range(0, 10_001, 2_000),
)  # fmt: skip
axes.spines[["top", "right"]].set_visible(False)
if len(sys.argv) > 1:  # python docs/gallery_scripts/plot_forgetting.py docs/forgetting.png
    figure.savefig(sys.argv[1], dpi=150)
