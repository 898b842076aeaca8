"""What the snippets of docs/LARGE_MODELS.md take for granted: a model, tasks and trainers."""

import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import gradmem as gm

__all__ = ["Trainer", "data_collator", "gm", "model", "module", "tasks", "tests", "torch"]

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
data_collator = transformers.default_data_collator


def texts(n):
    rows = torch.randint(32, (n, 6))
    return [{"input_ids": row, "labels": row} for row in rows]


tasks = {"greek": texts(16), "german": texts(16)}
tests = {"greek": texts(4), "german": texts(4)}


class Module(pl.LightningModule):
    """A classifier of a text's first token by the mean of its tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    def forward(self, x):
        return self.output(self.embedding(x).mean(1))

    def training_step(self, batch, i):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module = Module()


class OnTexts(pl.Trainer):
    """Lightning's Trainer, with a loader of pairs in place of the texts."""

    def __init__(self, **settings):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        super().__init__(**settings, **quiet)

    def fit(self, module, dataset):
        pairs = [(one["input_ids"], one["input_ids"][0]) for one in dataset]
        super().fit(module, DataLoader(pairs, batch_size=8))


def Trainer(*args, **settings):
    """The page's `Trainer`: Lightning's where it is given epochs, else Hugging Face's."""
    if "max_epochs" in settings:
        return OnTexts(**settings)
    return transformers.Trainer(*args, **settings)
