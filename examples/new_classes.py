"""New classes: two more digits in every task, for a network that begins with two outputs."""

import gradmem as gm
from gradmem.data import load_mnist


def main(kind):
    digits = load_mnist("sample")
    continuum = gm.Continuum.split_by_class(
        digits.train_x.flatten(1),
        digits.train_y,
        n_tasks=5,
        test=(digits.test_x.flatten(1), digits.test_y),
        own_outputs=False,  # a digit is to be told from all others, not from that of its task
        divisor=255,
    )
    return gm.run(kind(gm.mlp([784, 100, 2]), lr=0.03, grow=True), continuum)


if __name__ == "__main__":
    print(f"Single: {main(gm.Single)}\nGEM:    {main(gm.GEM)}")
