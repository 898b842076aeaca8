"""A user's own loop that goes on where it was when it is started again (attack_checkpoints.py).

python -m tests.user_loop FILE
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradmem as gm

STEPS, SAVE_EVERY = 400, 7


def main(path: Path, steps: int = STEPS) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2)
    model = nn.Sequential(*hidden, nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory = gm.GradientMemory(model, memories=12, keep="reservoir", constrain="update")
    start = 0
    if path.exists():
        rest = memory.load(path, model=model, optimizer=optimizer)
        start = rest["step"]
        torch.set_rng_state(rest["generator"])
    for step in range(start, steps):
        t = ("task", step // 50 % 5)  # five tasks, which come back
        x = torch.randn(8, 6) + t[1]
        y = x[:, :4].argmax(1)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        memory.step(optimizer, t)
        memory.add(x, t, y)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            parts = {"model": model, "optimizer": optimizer}
            memory.save(path, **parts, step=step + 1, generator=torch.get_rng_state())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
