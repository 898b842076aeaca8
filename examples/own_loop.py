"""A loop of one's own: batch norm, AdamW, bfloat16, accumulated gradients and clipping."""

from torch import autocast, bfloat16, manual_seed, nn, optim

import gradmem as gm


def main(gem):
    manual_seed(0)
    layers = nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 5, 3), nn.BatchNorm2d(16), nn.ReLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    memory = gm.GradientMemory(model, memories=100, constrain="update")
    continuum = gm.mnist_rotations(5, data="sample")
    for i, (x, t, y) in enumerate(continuum):
        with autocast("cpu", bfloat16):
            loss = nn.functional.cross_entropy(model(x), y) / 2
        loss.backward()
        if i % 2:  # a step for every two mini-batches
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            memory.step(optimizer, t) if gem else optimizer.step()
            optimizer.zero_grad()
        memory.add(x, t, y)
    tests, model = [test[:] for test in continuum.tests.values()], model.eval()
    return sum((model(x).argmax(1) == y).float().mean().item() for x, y in tests) / len(tests)


if __name__ == "__main__":
    print(f"mean accuracy: Single {main(gem=False):.3f}, GEM {main(gem=True):.3f}")
