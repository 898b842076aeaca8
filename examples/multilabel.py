"""Several labels at once: five archives of pictures, one after another, with the same six tags."""

import torch

import gradmem as gm


def pictures(n=800):
    """Style and content (5 n, 14), which of six tags a picture has (5 n, 6), its archive (5 n,)."""
    torch.manual_seed(0)
    archive = torch.arange(5).repeat_interleave(n)
    style, meaning, content = torch.randn(5, 6), torch.randn(5, 8, 6), torch.randn(5 * n, 8)
    tags = torch.einsum("ni,nij->nj", content, meaning[archive]) > 0
    return torch.cat([2 * style[archive], content], 1), tags.float(), archive


def tags_right(prediction, y):
    return (prediction == y.bool()).float().mean(1)


def main(kind):
    continuum = gm.Continuum.from_arrays(*pictures(), test=0.2, epochs=2)
    loss = torch.nn.BCEWithLogitsLoss()
    learner = kind(gm.mlp([14, 100, 6]), loss=loss, decide=lambda z: z > 0)
    return gm.run(learner, continuum, score=tags_right)


if __name__ == "__main__":
    print(f"Single: {main(gm.Single)}\nGEM:    {main(gm.GEM)}")
