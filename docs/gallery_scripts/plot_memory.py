"""
How many memories
=================

More memories make each constraint a better estimate of its task's loss, and each step dearer.
Eight permutations of pixels, 500 digits each.
"""

import matplotlib.pyplot as plt

import gradmem as gm

sizes = (5, 10, 25, 50, 100, 250)
results = [
    gm.run(
        gm.GEM(gm.mlp(), lr=0.1, memories=n),
        gm.mnist_permutations(n_tasks=8, examples_per_task=500, data="sample"),
    )
    for n in sizes
]
for n, result in zip(sizes, results, strict=True):
    print(f"{n:>4} memories a task: ACC {result.acc:.3f}, BWT {result.bwt:+.3f}")
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.semilogx(sizes, [result.acc for result in results], "o-", color="#1b1b3a")
axes.set(xlabel="memories per task", ylabel="ACC at the end", xticks=sizes, xticklabels=sizes)
axes.minorticks_off()
axes.grid(alpha=0.3)
