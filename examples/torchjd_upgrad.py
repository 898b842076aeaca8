"""TorchJD with gradmem's projector: the losses at all memories are objectives of every step."""

from torch import manual_seed, nn, optim
from torchjd.aggregation import UPGrad
from torchjd.autojac import backward, jac_to_grad

import gradmem as gm
from gradmem.integrations.torchjd import ExactProjector


def main(jacobian_descent):
    manual_seed(0)
    model, loss = gm.mlp(), nn.functional.cross_entropy
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    aggregator, memory = UPGrad(projector=ExactProjector()), gm.EpisodicMemory(100)
    continuum = gm.mnist_rotations(5, data="sample")
    for x, t, y in continuum:
        past = [memory[task] for task in memory if task != t] if jacobian_descent else []
        backward([loss(model(x), y), *(loss(model(x), y) for x, y in past)])
        jac_to_grad(model.parameters(), aggregator)
        optimizer.step()
        optimizer.zero_grad()
        memory.add(x, t, y)
    tests = [test[:] for test in continuum.tests.values()]
    return sum((model(x).argmax(1) == y).float().mean().item() for x, y in tests) / len(tests)


if __name__ == "__main__":
    print(f"mean accuracy: SGD {main(False):.3f}, Jacobian descent {main(True):.3f}")
