"""GEM in Lightning, with its real Trainer."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision

from gradmem.gradients.flat import flat, parameters
from gradmem.integrations.lightning import GEMCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


class Module(pl.LightningModule):
    def __init__(self, optimizer=torch.optim.SGD, lr=0.5, loss=F.cross_entropy):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer, self.lr, self.loss = optimizer, lr, loss

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        x, y = batch[:2]
        return self.loss(self(x), y)

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


class Watch(pl.Callback):
    """Notes the gradients at the memories, the step, and the gradient after clipping."""

    def __init__(self, gem):
        self.gem, self.steps, self.norms = gem, [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before = flat([w.detach() for w in parameters(module)], parameters(module)).clone()
        memory = self.gem.memory
        others = [t for t in memory.memory if t != self.gem._now]
        self.G = memory.gradients(others) if others else None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        after = flat([w.detach() for w in parameters(module)], parameters(module))
        if not torch.equal(after, self.before):
            self.steps.append((self.G, self.before - after))
            grads = flat([w.grad for w in parameters(module)], parameters(module))
            self.norms.append(float(grads.norm()))

    @property
    def worst(self):
        return min(float((G @ u / (G.norm(dim=1) * u.norm())).min())
                   for G, u in self.steps if G is not None)  # fmt: skip


def tasks(n=48, k=3):
    """Tasks that disagree: the same inputs, other labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    y = x[:, :3].argmax(1)
    return {t: TensorDataset(x, (y + t) % 3) for t in range(k)}


def loader(dataset, size=8):
    return DataLoader(dataset, size)


def trainer(folder, *callbacks, **settings):
    usual = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
             "enable_model_summary": False, "enable_checkpointing": False}  # fmt: skip
    return pl.Trainer(default_root_dir=folder, callbacks=[*callbacks], **{**usual, **settings})


def learn(folder, module, gem, data=None, **settings):
    watch = Watch(gem)
    for gem.task, dataset in (data or tasks()).items():
        trainer(folder, gem, watch, **settings).fit(module, loader(dataset))
    return watch


def make(seed=0, **settings):
    torch.manual_seed(seed)
    return Module(**settings)


def test_no_step_goes_against_a_memory(tmp_path):
    gem = GEMCallback(memories=16, margin=0.0)
    watch = learn(
        tmp_path, make(), gem, accumulate_grad_batches=2, gradient_clip_val=0.05, max_epochs=2
    )
    assert len(watch.steps) == 18
    assert gem.memory.steps == 18
    assert gem.memory.violations > 0
    assert watch.worst > -1e-4
    assert max(watch.norms) < 0.0501  # projected, then clipped
    assert [gem.memory.memory.count(t) for t in range(3)] == [16, 16, 16]


def test_without_gem_steps_go_against_the_memories(tmp_path):
    """The test above could fail."""
    gem = GEMCallback(memories=16)
    gem.on_before_optimizer_step = lambda *_: None
    assert learn(tmp_path, make(), gem).worst < -0.1


def test_under_adamw_the_update_is_what_holds(tmp_path):
    worst = {}
    for constrain in ("gradient", "update"):
        gem = GEMCallback(memories=16, margin=0.0, constrain=constrain)
        module = make(optimizer=torch.optim.AdamW, lr=0.05)
        worst[constrain] = learn(tmp_path, module, gem, max_epochs=2).worst
    assert worst["update"] > -1e-4 > worst["gradient"]


def test_bf16(tmp_path):
    gem = GEMCallback(memories=16, margin=0.0)
    watch = learn(tmp_path, make(), gem, precision="bf16-mixed")
    assert gem.memory.engine.precision == "bf16"
    assert gem.memory.violations > 0
    assert watch.worst > -1e-3


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_steps_that_a_scaler_skips_are_counted_and_change_nothing(tmp_path, constrain):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    gem = GEMCallback(memories=16, margin=0.0, constrain=constrain)
    watch = learn(tmp_path, make(), gem, plugins=[plugin])
    assert gem.memory.skipped > 0
    assert len(watch.steps) == 18 - gem.memory.skipped
    assert watch.worst > -1e-3


def test_a_function_names_the_task_of_a_batch(tmp_path):
    data = tasks()
    x = torch.cat([dataset.tensors[0] for dataset in data.values()])
    y = torch.cat([dataset.tensors[1] for dataset in data.values()])
    t = torch.arange(3).repeat_interleave(48)
    gem = GEMCallback(
        memories=100,
        margin=0.0,
        task=lambda batch, module: int(batch[2][0]),
        split=lambda batch: (batch[0], batch[1]),
    )
    watch = Watch(gem)
    trainer(tmp_path, gem, watch, max_epochs=2).fit(make(), loader(TensorDataset(x, y, t)))
    # each example once, though there were two epochs
    assert {t: gem.memory.memory.count(t) for t in gem.memory.memory} == {0: 48, 1: 48, 2: 48}
    assert watch.worst > -1e-4


def test_each_fit_remembers_in_its_first_epoch(tmp_path):
    data, gem, module = tasks(), GEMCallback(memories=200), make()
    for gem.task, epochs in ((0, 3), (1, 2), (0, 2)):
        trainer(tmp_path, gem, max_epochs=epochs).fit(module, loader(data[gem.task]))
    assert {t: gem.memory.memory.count(t) for t in gem.memory.memory} == {0: 96, 1: 48}


def test_another_loss(tmp_path):
    data = {t: TensorDataset(torch.randn(16, 6), torch.randn(16, 3)) for t in range(2)}
    gem = GEMCallback(F.mse_loss, memories=8, margin=0.0)
    module = make(loss=F.mse_loss, lr=0.1)
    assert learn(tmp_path, module, gem, data).worst > -1e-4
    x, y = gem.memory.memory[0]
    g = torch.autograd.grad(F.mse_loss(module(x), y), parameters(module))
    torch.testing.assert_close(gem.memory.gradients([0])[0], flat(g, parameters(module)))


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_fit_from_a_checkpoint_goes_on_with_the_memories(tmp_path, constrain):
    def begin():
        gem = GEMCallback(memories=16, constrain=constrain, keep="reservoir")
        return make(optimizer=torch.optim.AdamW, lr=0.05), gem

    data = tasks(k=2)
    whole, gem = begin()
    learn(tmp_path, whole, gem, data, max_epochs=4)

    module, gem = begin()
    gem.task = 0
    trainer(tmp_path, gem, max_epochs=4).fit(module, loader(data[0]))
    gem.task = 1
    half = trainer(tmp_path, gem, max_epochs=2)
    half.fit(module, loader(data[1]))
    half.save_checkpoint(tmp_path / "half.ckpt")

    module, gem = begin()
    gem.task = 1
    rest = trainer(tmp_path, gem, max_epochs=4)
    rest.fit(module, loader(data[1]), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [*gem.memory.memory] == [0, 1]


def test_what_does_not_fit_is_refused(tmp_path):
    data = tasks()
    with pytest.raises(ValueError, match=r"set callback\.task"):
        trainer(tmp_path, GEMCallback()).fit(make(), loader(data[0]))
    gem = GEMCallback(task=0)
    trainer(tmp_path, gem).fit(make(), loader(data[0]))
    with pytest.raises(ValueError, match="another module"):
        trainer(tmp_path, gem).fit(make(), loader(data[0]))
    three = TensorDataset(*data[0].tensors, torch.zeros(48))
    with pytest.raises(TypeError, match="must be a pair"):
        trainer(tmp_path, GEMCallback(task=0)).fit(make(), loader(three))


def test_without_lightning_the_extra_is_named():
    code = """
import sys
sys.modules["lightning"] = None
try:
    import gradmem.integrations.lightning
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "gradmem[lightning]"' in done.stdout
