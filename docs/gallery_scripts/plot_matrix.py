"""
The matrix R
============

Row *i*: the accuracy on every task after task *i* was learned. Below the diagonal lies what
became of tasks that are over (their mean change is BWT), above it tasks that are still to come
(FWT, over chance). The last row's mean is ACC.
"""

import matplotlib.pyplot as plt

import gradmem as gm

figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
for axes, kind in zip(panels, (gm.Single, gm.GEM), strict=True):
    continuum = gm.mnist_rotations(n_tasks=8, examples_per_task=500, data="sample")
    result = gm.run(kind(gm.mlp(), lr=0.1), continuum)
    image = axes.imshow(result.R, vmin=0, vmax=1, cmap="viridis")
    axes.set(
        title=f"{kind.__name__}: ACC {result.acc:.2f}, BWT {result.bwt:+.2f}",
        xlabel="accuracy on task", ylabel="after learning task",
        xticks=range(8), yticks=range(8), xticklabels=range(1, 9), yticklabels=range(1, 9),
    )  # fmt: skip
figure.colorbar(image, ax=panels, label="accuracy", shrink=0.8)
