"""Text: reviews of four things, one after another; what a word says depends on the thing."""

from functools import partial

import torch

import gradmem as gm


class Reader(torch.nn.Sequential):
    def forward(self, x):
        words = self[0](x["ids"]) * x["mask"][..., None]
        return self[1](words.sum(1) / x["mask"].sum(1, keepdim=True))  # the mean without padding


def main(kind, n=2400, **settings):
    torch.manual_seed(0)
    thing, value = torch.arange(4).repeat_interleave(n // 4), torch.rand(4, 24).argsort(1) - 11.5
    ids, mask = torch.randint(20, (n, 12)), torch.arange(12) < torch.randint(4, 13, (n, 1))
    ids[:, 0] = 20 + thing  # a review begins with what it is about
    y = ((value[thing[:, None], ids] * mask).sum(1) > 0).long()
    continuum = gm.Continuum.from_arrays({"ids": ids, "mask": mask}, y, thing, test=0.2, epochs=4)
    network = Reader(torch.nn.Embedding(24, 32), gm.mlp([32, 64, 2]))
    learner = kind(network, optimizer=partial(torch.optim.AdamW, lr=5e-3), **settings)
    return gm.run(learner, continuum)


if __name__ == "__main__":
    print(f"Single: {main(gm.Single)}\nGEM:    {main(gm.GEM, constrain='update')}")
