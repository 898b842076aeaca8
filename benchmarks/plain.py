"""GEM as it is usually written: a backward pass per past task, a quadratic program on the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.learners import Learner
from gradmem.memory import EpisodicMemory

__all__ = ["PlainGEM"]


class PlainGEM(Learner):
    """The yardstick: nothing is wasted on purpose, nothing is batched."""

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.1,
        memories: int = 256,
        margin: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(network, lr=lr, seed=seed)
        self.memory = EpisodicMemory(memories)
        self.margin = margin

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        self.memory.add(x, t, y)
        past = [k for k in self.memory if k != t]
        rows = []
        for k in past:
            (stack,) = self.memory.stacks([k])
            n = stack.counts[0]
            rows.append(self._gradient(stack.x[0, :n], stack.y[0, :n]))
        g = self._gradient(x, y)
        if rows:
            G = torch.stack(rows)
            if (G @ g < 0).any():
                g = self._project(g, G)
        start = 0
        for w in self.network.parameters():
            w.grad = g[start : start + w.numel()].view_as(w)
            start += w.numel()
        self.optimizer.step()

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        self.network.zero_grad()
        F.cross_entropy(self.network(x), y).backward()
        return torch.cat([w.grad.reshape(-1) for w in self.network.parameters()])  # type: ignore[union-attr]

    def _project(self, g: Tensor, G: Tensor) -> Tensor:
        memories, gradient = G.cpu().double().numpy(), g.cpu().double().numpy()
        P, q = memories @ memories.T, memories @ gradient
        L = np.linalg.cholesky(P + 1e-9 * np.trace(P) * np.eye(len(P)))
        v, _ = scipy.optimize.nnls(L.T, -np.linalg.solve(L, q))
        return torch.as_tensor(gradient + (v + self.margin) @ memories).to(g)

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"memory": self.memory.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.memory.load_state_dict(state["memory"])
