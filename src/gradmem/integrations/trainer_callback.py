"""GEM in a Hugging Face `Trainer` of one's own, as a callback."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.gradient_memory import GradientMemory
from gradmem.integrations.hugging_face import (
    HEADS,
    Head,
    head_of,
    lengthened,
    objective_of,
    split,
)
from gradmem.trees import Tree, take, to
from gradmem.validation import positive_int

try:
    from transformers import TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import find_labels
except ImportError as error:
    raise ImportError(
        "GEM for Hugging Face's Trainer needs transformers and accelerate: "
        'pip install "gradmem[transformers]"'
    ) from error

__all__ = ["FILE", "MEMORY_SETTINGS", "GEMCallback", "some_of"]

#: The memory's file in a checkpoint's folder.
FILE = "gradient_memory"

#: `GradientMemory`'s arguments that the model does not settle.
MEMORY_SETTINGS = tuple(
    name
    for name in inspect.signature(GradientMemory).parameters
    if name not in ("model", "loss", "transform", "objective")
)


class GEMCallback(TrainerCallback):
    """GEM in a `Trainer` of one's own: say which task it trains, then train as always.

    With `constrain="update"`, no step on `task` raises the loss at another task's memories, to
    first order, whatever the optimizer; with "gradient", the default, that holds for plain SGD with
    margin 0 or the rule "floor". When `train` ends, examples of its training set are remembered, so
    every example is offered once however many epochs there are. Every checkpoint holds the
    memories, and a resumed `train` goes on with them.

    Parameters
    ----------
    task
        The task that is trained: a text, a number, or a tuple of them. Set `callback.task` before
        each `train`.
    candidates
        Examples of a training set that are offered to the memory, drawn with the Trainer's seed;
        `keep` says which of them stay.
    max_length
        Pad remembered sequences to this length; as the data collator pads them if None. Tasks whose
        memories have the same length are computed together, which is faster.
    compute_loss_func
        The Trainer's, if it has one: `f(outputs, labels)`, the loss of a batch.
    constrain
        "gradient" or "update" (see `GradientMemory`); None for plain training, to compare with.
    **settings
        `GradientMemory`'s: memories, budget, keep, margin, gradients, memory_limit, …

    Notes
    -----
    Trainer clips the gradient, unscaled, and calls `on_pre_optimizer_step` after that: with
    "gradient" the clipped gradient is projected. What is stepped along then still raises no
    remembered loss; at margin 0 it is no longer than the clipped gradient, with a margin it may be.
    `GEMTrainer` projects first and clips afterwards.

    The loss at the memories is the model's own on all of a task's memories as one batch: the mean
    over their labels that are not −100. Dropout acts on it as on any batch.

    Examples
    --------
    ::

        gem = GEMCallback(memories=64, constrain="update")
        trainer = Trainer(model, args, callbacks=[gem])
        for gem.task, trainer.train_dataset in tasks.items():
            trainer.train()
    """

    def __init__(
        self,
        task: Any = None,
        *,
        candidates: int = 4096,
        max_length: int | None = None,
        compute_loss_func: Callable[[Any, Any], Tensor] | None = None,
        constrain: str | None = "gradient",
        **settings: Any,
    ) -> None:
        self.task = task
        self.compute_loss_func = compute_loss_func
        self.constrain = constrain
        self.candidates = positive_int("candidates", candidates)
        self.max_length = None if max_length is None else positive_int("max_length", max_length)
        if unknown := [name for name in settings if name not in MEMORY_SETTINGS]:
            raise TypeError(f"GEMCallback has no argument {unknown[0]!r}")
        self.settings = settings
        #: The memory and its projection; None until the first `train` begins.
        self.memory: GradientMemory | None = None
        self.head: Head | None = None
        #: What is saved beside the memory, as numbers, texts, tensors, and lists and dicts of them.
        self.notes: dict[str, Any] = {}
        self._label_names: list[str] = ["labels"]
        self._takes_mask = True
        self._step = ExitStack()
        self._is_in_step = False
        self._resumed: str | os.PathLike[str] | None = None

    def start(self, args: Any, model: nn.Module, dataloader: Any) -> None:
        """Make the memory for a model, whose loss is looked at on a few examples."""
        if self.memory is not None:
            known: Any = self.memory.model
            if known.model is not model:
                raise ValueError("the memory belongs to another model: make a new GEMCallback")
            return
        if args.fsdp or args.deepspeed:
            raise ValueError("GEM needs whole gradients: FSDP and DeepSpeed are not supported")
        inside = _unwrapped(model)
        self._takes_mask = "attention_mask" in inspect.signature(inside.forward).parameters
        if args.label_names is not None:
            self._label_names = [*args.label_names]
        else:
            self._label_names = find_labels(inside.__class__) or ["labels"]
        if self.compute_loss_func is None:
            few = dataloader.collate_fn(some_of(dataloader.dataset, 8, args))
            x, labels = self.split(few, args)
            self.head = head_of(model, x, labels)
            if args.label_smoothing_factor and self.head is None and [*labels] == ["labels"]:
                # the Trainer then takes the logits' own loss, whatever the model's is
                causal = inside._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
                self.head = HEADS["next token" if causal else "class"]
        objective = objective_of(
            model, self.head, args.label_smoothing_factor, self.compute_loss_func
        )
        usual = {
            "constrain": self.constrain or "gradient",
            "precision": "bf16" if args.bf16 else "fp32",
            "not_finite": "skip" if args.fp16 else "stop",  # a scaler meets such gradients
        }
        network = objective.network
        self.memory = GradientMemory(network, objective=objective, **(usual | self.settings))

    def remember(self, args: Any, dataloader: Any, tokenizer: Any = None) -> None:
        """Offer examples of a training set as the task's."""
        assert self.memory is not None
        some = some_of(dataloader.dataset, self.candidates, args)
        batch = dataloader.collate_fn(some)
        if self.max_length is not None:
            token = _pad_token(tokenizer, self.memory.model)
            left = getattr(tokenizer, "padding_side", "right") == "left"
            batch = lengthened(batch, self.max_length, token, left, self._takes_mask)
        x, y = self.split(batch, args)
        for start in range(0, len(some), args.train_batch_size):
            part = slice(start, start + args.train_batch_size)
            self.memory.add(take(x, part), self.task, take(y, part))

    def split(self, batch: Mapping[str, Any], args: Any) -> tuple[Tree, Tree]:
        """A collated batch as (x, y) on the Trainer's device."""
        x, y = split(batch, self._label_names, self.head)
        return to(x, args.device), to(y, args.device)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the memory into a checkpoint's folder, which makes it whole: do it last."""
        assert self.memory is not None
        self.memory.save(Path(folder) / FILE, task=self.task, notes=self.notes)

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint's folder: when the next `train` begins, its memory is read.

        Only needed where the folder is not `output_dir/checkpoint-N` of the arguments.
        """
        self._resumed = checkpoint

    def enter(self, optimizer: Any) -> None:
        """Begin a step on the task: its gradient lies in `.grad`, unscaled."""
        assert self.memory is not None
        if self.task is None:
            raise ValueError("set callback.task to the task that is trained")
        if self.constrain is None:
            return
        self._step.pop_all()  # of a step that was not taken to its end
        self._step.enter_context(self.memory.around_step(self.task, optimizer))
        self._is_in_step = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the memory, or go on with that of a checkpoint."""
        self.start(args, kwargs["model"], kwargs["train_dataloader"])
        assert self.memory is not None
        self._step, self._is_in_step = ExitStack(), False
        folder, self._resumed = self._resumed, None
        if folder is None and state.global_step:
            folder = _folder(args, state)
        if folder is not None:
            if not (Path(folder) / FILE).exists():
                raise ValueError(
                    f"{folder} holds no memory ({FILE}): call callback.load with the checkpoint "
                    "that is resumed from"
                )
            saved = self.memory.load(Path(folder) / FILE)
            self.notes, self.task = saved["notes"], saved["task"]

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Project the gradient, or note where the update begins."""
        if not self._is_in_step:
            self.enter(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Project the update, if it is what is constrained."""
        self._is_in_step = False
        self._step.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember examples of what was trained."""
        self.remember(args, kwargs["train_dataloader"], kwargs.get("processing_class"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the checkpoint with the memory."""
        if args.should_save:
            self.save(_folder(args, state))


def some_of(dataset: Any, n: int, args: Any) -> list[Any]:
    """At most n examples of a dataset, drawn with the Trainer's seed; a stream's first ones."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        stream: Iterable[Any] = dataset
        return list(islice(stream, n))
    seed = args.seed if args.data_seed is None else args.data_seed
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return [dataset[i] for i in order[:n].tolist()]


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _pad_token(tokenizer: Any, network: Any) -> int:
    """What sequences are padded with: the tokenizer's token, else the model's, else 0."""
    config: Any = getattr(_unwrapped(network.model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    tokens = (getattr(one, "pad_token_id", None) for one in (tokenizer, config, text))
    return next((token for token in tokens if isinstance(token, int)), 0)


def _unwrapped(model: Any) -> Any:
    """The model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
