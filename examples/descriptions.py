"""Tasks with descriptions: predictions for angles that were never learned, from the angle alone."""

import gradmem as gm

LEARNED = [9, 3, 13, 0, 6, 11, 4, 14, 1, 8]
NEVER_LEARNED = [2, 5, 7, 10, 12]


def main(described):
    network = gm.mlp(seed=0)
    if described:
        network = gm.networks.conditioned(network, size=4)  # cos θ, sin θ, cos 2θ, sin 2θ
    learned, others = (
        gm.mnist_rotations(15, 500, order=order, data="sample")
        for order in (LEARNED, NEVER_LEARNED)
    )
    learner = gm.Single(network, lr=0.03)
    learner.descriptions = learned.descriptions | others.descriptions
    learner.learn_from(learned, progress=False)
    right = [
        (learner.predict(x, t) == y).float().mean().item()
        for t, test in others.tests.items()
        for x, y in test.batches(1000)
    ]
    return sum(right) / len(right)


if __name__ == "__main__":
    print(f"accuracy {main(False):.3f} without descriptions, {main(True):.3f} with them")
