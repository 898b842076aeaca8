"""
Forgetting, and not forgetting
==============================

Twenty tasks, one after another: digits turned by a larger angle in each, 500 digits a task. Plain
SGD and GEM see the same mini-batches once, with the same network and the same learning rate. The
curves are the accuracy on the *first* task, which is never trained on again.
"""

import sys

import matplotlib.pyplot as plt

import gradmem as gm
from gradmem.reports.styles import styles

look = styles(["single", "gem"])
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, kind, title in (("gem", gm.GEM, "GEM"), ("single", gm.Single, "SGD")):
    continuum = gm.mnist_rotations(n_tasks=20, examples_per_task=500, data="sample")
    result = gm.run(kind(gm.mlp(), lr=0.1), continuum, every=250)
    first = result.curves[:, 0]
    print(
        f"{title}: first task {first[2]:.2f} when it was over, {first[-1]:.2f} at the end; {result}"
    )
    axes.plot(
        result.curve_examples, first, color=look[name].colour, marker=look[name].marker, markevery=4
    )
    axes.annotate(
        f" {title} {first[-1]:.2f}", (10_000, first[-1]), va="center", color=look[name].colour
    )
for n in range(0, 10_001, 500):
    axes.axvline(n, color="0.9", zorder=0)
axes.set(
    xlim=(0, 11_200), ylim=(0, 1), xlabel="examples observed (a new task every 500)",
    ylabel="accuracy on the first task",
)  # fmt: skip
axes.spines[["top", "right"]].set_visible(False)
if len(sys.argv) > 1:  # python docs/gallery_scripts/plot_forgetting.py docs/forgetting.png
    figure.savefig(sys.argv[1], dpi=150)
