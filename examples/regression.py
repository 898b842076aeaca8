"""Regression: ten weather stations, one after another, each with a climate of its own."""

import torch

import gradmem as gm


def weather(n=400):
    """Place and readings (10 n, 8), temperature and rain (10 n, 2), and the station (10 n,)."""
    torch.manual_seed(0)
    station = torch.arange(10).repeat_interleave(n)
    place, climate, readings = torch.randn(10, 4), torch.randn(10, 4, 2), torch.randn(10 * n, 4)
    y = torch.einsum("ni,nij->nj", readings, climate[station]).tanh()
    return torch.cat([2 * place[station], readings], 1), y, station


def minus_squared_error(prediction, y):
    return -(prediction - y).square().mean(1)


def main(kind):
    continuum = gm.Continuum.from_arrays(*weather(), test=0.2, epochs=4)
    learner = kind(gm.mlp([8, 100, 2]), lr=0.03, loss=torch.nn.MSELoss())
    return gm.run(learner, continuum, score=minus_squared_error)


if __name__ == "__main__":
    print(f"Single: {main(gm.Single)}\nGEM:    {main(gm.GEM)}")
