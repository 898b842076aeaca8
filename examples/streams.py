"""A stream without an end: digits seen by a camera that is turned after every 100 batches."""

from functools import partial
from itertools import count, islice

import torch
from torch.optim.lr_scheduler import LambdaLR

import gradmem as gm
from gradmem.data import load_mnist


def camera(x, y):
    for i in count():
        turns, seen = i // 100 % 4, torch.randint(len(y), (10,))
        yield x[seen].rot90(turns, (1, 2)).flatten(1) / 255, turns, y[seen]


def main(kind, batches=400):
    torch.manual_seed(0)
    digits, slower = load_mnist("sample"), lambda step: (1 + step / 100) ** -0.5
    learner = kind(gm.mlp(), schedule=partial(LambdaLR, lr_lambda=slower))
    learner.learn_from(islice(camera(digits.train_x, digits.train_y), batches))
    tests = islice(camera(digits.test_x, digits.test_y), batches)
    return sum((learner.predict(x, t) == y).float().mean().item() for x, t, y in tests) / batches


if __name__ == "__main__":
    print(f"mean accuracy: Single {main(gm.Single):.3f}, GEM {main(gm.GEM):.3f}")
