"""A benchmark and a learner of your own: run, compare, sweep and report them like gradmem's.

gradmem run     --benchmark own_benchmark:digits --learner own_benchmark:Boxed --box 0.2
gradmem compare --benchmark own_benchmark:digits --seeds 3 --out my-comparison
gradmem sweep   --benchmark own_benchmark:digits --out my-sweep
"""

import torch

import gradmem as gm


class Boxed(gm.GEM):
    """GEM whose weights stay in a box."""

    def __init__(self, network, *, box=0.2, **settings):
        super().__init__(network, **settings)
        self.box = box

    def learn(self, x, t, y):
        loss = super().learn(x, t, y)
        with torch.no_grad():
            for weight in self.network.parameters():
                weight.clamp_(-self.box, self.box)
        return loss


def rotated(seed, n_tasks=3, examples_per_task=100):
    return gm.mnist_rotations(n_tasks, examples_per_task, seed=seed, data="sample")


digits = gm.Benchmark(
    "digits",
    continuum=rotated,
    network=lambda seed: gm.mlp([784, 50, 10], seed=seed),
    settings={"single": {"lr": 0.05}, "gem": {"memories": 50}, "Boxed": {"memories": 50}},
    grid={"single": {"lr": [0.03, 0.1]}, "Boxed": {"lr": [0.1], "box": [0.2, 0.3]}},
)
