"""Lightning: five rotations of digits in turn, with AdamW, clipping and accumulated gradients."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradmem as gm
from gradmem.integrations.lightning import GEMCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = gm.mlp([784, 100, 100, 10])

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, i):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(gem):
    pl.seed_everything(0, verbose=False)
    model, callback = Classifier(), GEMCallback(memories=100, constrain="update")
    continuum = gm.mnist_rotations(5, data="sample")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for task in continuum.tasks:
        callback.task = task.t
        loader = DataLoader(TensorDataset(*task.train[:]), batch_size=10)
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, **quiet}
        pl.Trainer(max_epochs=1, callbacks=[callback] if gem else [], **settings).fit(model, loader)
    tests = [test[:] for test in continuum.tests.values()]
    return sum((model(x).argmax(1) == y).float().mean().item() for x, y in tests) / len(tests)


if __name__ == "__main__":
    print(f"mean accuracy: Single {main(gem=False):.3f}, GEM {main(gem=True):.3f}")
