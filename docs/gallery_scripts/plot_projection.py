"""
The projection in two dimensions
================================

A network with two parameters, and two tasks that are remembered. Each task's gradient is a
constraint: the step may not point away from it. The shaded half-planes are where a step would
raise a remembered loss.

Left, the step of the new task keeps both constraints, and is taken as it is. Right, it goes
against task 2 and is replaced by the closest vector that goes against neither.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import gradmem as gm

G = torch.tensor([[1.0, 0.35], [-0.15, 1.0]])
steps = {
    "kept: taken as it is": torch.tensor([0.9, 0.9]),
    "violated: projected": torch.tensor([1.1, -0.7]),
}
figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", sharey=True)
for axes, (title, g) in zip(panels, steps.items(), strict=True):
    g_tilde = gm.project(g, G)
    print(f"{title}: G g = {(G @ g).numpy().round(2)}, G g~ = {(G @ g_tilde).numpy().round(2)}")
    x, y = np.meshgrid(np.linspace(-1, 1.6, 300), np.linspace(-1, 1.4, 300))
    for row, colour in zip(G, ("#56b4e9", "#009e73"), strict=True):
        against = float(row[0]) * x + float(row[1]) * y < 0
        axes.contourf(x, y, against, levels=[0.5, 1.5], colors=[colour], alpha=0.18)

    def arrow(v, text, colour, axes=axes, **more):
        axes.annotate(
            "", v, (0, 0), arrowprops={"arrowstyle": "-|>", "lw": 2, "color": colour, **more}
        )
        axes.annotate(text, v, xytext=(6, 4), textcoords="offset points", color=colour, fontsize=12)

    arrow(G[0].tolist(), "$g_1$", "#56b4e9")
    arrow(G[1].tolist(), "$g_2$", "#009e73")
    changed = not torch.equal(g, g_tilde)
    arrow(g.tolist(), "$g$", "#d55e00", ls="--" if changed else "-")
    if changed:
        arrow(g_tilde.tolist(), r"$\tilde g$", "#1b1b3a")
        axes.plot(*torch.stack([g, g_tilde], 1).tolist(), ":", color="0.4")
    axes.set(title=title, xlim=(-1, 1.6), ylim=(-1, 1.4), aspect="equal", xticks=[], yticks=[])
