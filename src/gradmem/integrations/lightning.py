"""GEM in Lightning: a callback for the Trainer, the LightningModule stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

from gradmem.gradient_memory import GradientMemory
from gradmem.gradients import Loss
from gradmem.trees import Tree

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError(
        'GEM for Lightning needs lightning: pip install "gradmem[lightning]"'
    ) from error

__all__ = ["GEMCallback"]


class GEMCallback(Callback):
    """Keeps the steps of `Trainer.fit` from raising the loss at other tasks' memories.

    Parameters
    ----------
    loss
        `loss(outputs, y)` of the module's outputs, one value per example or their mean: what its
        `training_step` computes. None for cross-entropy.
    task
        The task of all batches, `callback.task = …` before each `fit`; or `task(batch, module)`.
    split
        A batch as (x, y), so that `module(x)` gives the outputs; None for batches that are pairs.
    **settings
        `GradientMemory`'s: memories, budget, keep, margin, constrain, gradients, memory_limit, …

    Notes
    -----
    Lightning calls the callback when a step's gradients are accumulated and unscaled, and clips
    them afterwards: they are projected first. "update" is projected when the batch ends. Where a
    step is made of several batches, its task is the last one's.

    A task's examples are remembered after the step, in the first epoch of a `fit` in which it is
    met; those of a task that comes back in another `fit` are remembered as new ones. A checkpoint
    has the memories as plain tensors in the callback's state; `fit(ckpt_path=…)` goes on
    with them. Training in several processes is refused: each would remember other examples.

    Examples
    --------
    ::

        gem = GEMCallback(memories=100, constrain="update")
        for gem.task, loader in tasks.items():
            Trainer(max_epochs=1, callbacks=[gem]).fit(module, loader)
    """

    def __init__(
        self,
        loss: Loss | None = None,
        *,
        task: Hashable | Callable[[Any, Any], Hashable] = None,
        split: Callable[[Any], tuple[Tree, Tree]] | None = None,
        **settings: Any,
    ) -> None:
        self.loss, self.task, self.settings = loss, task, settings
        self.split = _pair if split is None else split
        #: The memory and its projection; None until the first `fit` begins.
        self.memory: GradientMemory | None = None
        #: Task → the epoch of this `fit` in which it was met first.
        self._epochs: dict[Hashable, int] = {}
        self._now: Hashable = None
        self._step = ExitStack()
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the memory, or go on with that of a checkpoint."""
        if trainer.world_size > 1:
            raise ValueError(f"GEMCallback is for one process, got {trainer.world_size}")
        if self.memory is None:
            usual = {
                "precision": "bf16" if trainer.precision == "bf16-mixed" else "fp32",
                "not_finite": "skip"
                if getattr(trainer.precision_plugin, "scaler", None) is not None
                else "stop",
            }
            self.memory = GradientMemory(pl_module, self.loss, **(usual | self.settings))
        elif self.memory.model is not pl_module:
            raise ValueError("the memory belongs to another module: make a new GEMCallback")
        self._step.pop_all()  # of a step that was not taken to its end
        self._epochs = {}
        if self._state is not None:
            self.memory.load_state_dict(self._state["memory"])
            self._epochs = dict(self._state["epochs"])
            self._state = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Find out the batch's task."""
        self._now = self.task(batch, pl_module) if callable(self.task) else self.task
        if self._now is None:
            raise ValueError("set callback.task to the task that is trained")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Project the gradient, or note where the update begins."""
        assert self.memory is not None
        self._step.close()  # of another optimizer in the same batch
        self._step.enter_context(self.memory.around_step(self._now, optimizer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Project the update, if it is what is constrained, and remember the batch."""
        assert self.memory is not None
        self._step.close()
        if self._epochs.setdefault(self._now, trainer.current_epoch) == trainer.current_epoch:
            x, y = self.split(batch)
            self.memory.add(x, self._now, y)

    def state_dict(self) -> dict[str, Any]:
        """The memories and counts, as tensors, numbers and texts."""
        if self._state is not None or self.memory is None:
            return self._state or {}
        return {"memory": self.memory.state_dict(), "epochs": dict(self._epochs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state when `fit` begins."""
        self._state = state_dict


def _pair(batch: Any) -> tuple[Tree, Tree]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"a batch must be a pair (x, y), got {type(batch).__name__}: give "
            "GEMCallback(split=…), a function of a batch"
        )
    x, y = batch
    return x, y
