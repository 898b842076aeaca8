"""GEM for a training loop of one's own: an episodic memory that projects gradients or updates."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradmem.checkpoint import CheckpointError, load_state
from gradmem.constraints import Constraints
from gradmem.cuda.devices import is_recording
from gradmem.distributed import Past, processes_of
from gradmem.distributed.states import save_together
from gradmem.gradients import (
    Criterion,
    Forward,
    Inputs,
    Loss,
    Objective,
    Transform,
    evaluating,
)
from gradmem.gradients.flat import parameters
from gradmem.memory import EpisodicMemory, Policy, Stack, memory_of
from gradmem.streams.mixed import is_mixed, parts_of
from gradmem.trees import Tree, leaves
from gradmem.validation import descriptor

__all__ = ["GradientMemory"]


class GradientMemory(Constraints):
    """Remembers examples of every task and keeps steps from raising the loss at them.

    The loop stays yours: your forward pass, autocast, accumulation, clipping and optimizer.

    Under `DistributedDataParallel` or `fully_shard` (FSDP2) every process has a memory of its own
    part of the stream, and all take the same steps: `project_`, `step`, `around_step`, `gradients`,
    `save` and `load` are called by all of them (see the guide "Several GPUs and machines").

    Parameters
    ----------
    model
        Any module, or one wrapped by DDP or sharded by FSDP2. Its parameters that require gradients
        are those that are projected; it is used in the mode (train or eval) that its modules are
        in. With batch norm in train mode, a pass over the memories moves the running statistics, as
        any pass does.
    loss
        `loss(outputs, y)`: one value per example, or their mean; None for cross-entropy.
    memories, budget, keep
        Examples remembered per task, or in all, and which (see `EpisodicMemory`). These are limits
        of all processes together.
    margin, margin_rule
        γ ≥ 0, the paper's memory strength, and what it does (see `project`).
    constraints
        Most constraints of a step, for very many tasks; None for all of them, which is exact; 0 for
        none. Half of them are those that the step goes against the most, as estimated from their
        last known gradients, the other half those that the solution with the first half would
        violate; both are computed and solved exactly (see `Shortlist`).
    sample
        Memories of each past task that its gradient is taken at, drawn anew for each step; None for
        all of them. A step then computes that many for each task, however many are remembered, and
        the constraints are about the loss at these. (Of memories on another device than the model
        all are still copied to it.) Not under DDP or FSDP2.
    constrain
        "gradient" (the paper's): the gradient is projected. With plain SGD no remembered loss then
        rises, to first order, at margin 0 or with the rule "floor"; other optimizers do not step
        along the gradient. "update": the step that the optimizer made is projected, so that this
        holds for every optimizer and any margin.
    not_finite
        What to do about a gradient that is not finite, of the step or at the memories: "stop"
        raises FloatingPointError, "skip" leaves `.grad` as it is and counts it in `skipped`. A
        `GradScaler` meets such gradients from time to time and skips their steps itself: take
        "skip" with it. On a GPU, looking waits for it once a step; inside a CUDA graph that you
        record, nothing is looked at.
    memory
        An `EpisodicMemory` of your own, in place of `memories`, `budget` and `keep`.
    transform
        Applied to remembered examples whenever they are used, so that raw ones are remembered.
    objective
        What is differentiated, in place of `loss` and `transform` (see `MemoryGradients`).
    gradients, tasks_per_chunk, memory_limit, precision
        How the gradients at the memories are computed (see `MemoryGradients`). For models of many
        parameters, "gram" takes inner products alone, and no memory for a gradient per task.
    graphs
        On a GPU, whether passes over single tasks' memories become CUDA graphs where starting their
        kernels takes longer than running them. A recording repeats what was computed when it was
        made: turn it off if the model's `forward`, the loss or the transform does something else
        from time to time, or with other numbers, beyond train and eval mode.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> memory = gm.GradientMemory(model, loss=nn.functional.cross_entropy, memories=20)
    >>> for step in range(20):
    ...     x, t, y = torch.randn(10, 4), step // 10, torch.randint(3, (10,))
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     memory.project_(t)
    ...     optimizer.step(); optimizer.zero_grad()
    ...     memory.add(x, t, y)
    >>> memory
    GradientMemory(Sequential, memories=20, margin=0.5, constrain='gradient', 2 tasks)
    >>> memory.gradients().shape
    torch.Size([2, 131])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        memories: int = 256,
        budget: int | None = None,
        margin: float = 0.5,
        margin_rule: str = "shift",
        constrain: str = "gradient",
        *,
        constraints: int | None = None,
        sample: int | None = None,
        not_finite: str = "stop",
        keep: str | Policy = "last",
        memory: EpisodicMemory | None = None,
        transform: Transform | None = None,
        objective: Objective | None = None,
        gradients: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
        graphs: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
        if not parameters(model):
            raise ValueError("model has no parameter that learns (requires_grad)")
        module, processes = processes_of(model)
        super().__init__(
            objective or Objective(module, Criterion(loss), Forward(transform)),
            memory_of(memory, memories, budget, keep),
            processes,
            margin=margin,
            margin_rule=margin_rule,
            constrain=constrain,
            constraints=constraints,
            sample=sample,
            not_finite=not_finite,
            gradients=gradients,
            tasks_per_chunk=tasks_per_chunk,
            memory_limit=memory_limit,
            precision=precision,
            graphs=graphs,
        )
        self._inputs = Inputs(self.engine.objective.criterion)

    def add(self, x: Tree, t: Any, y: Tree) -> None:
        """Remember x: (n, …) and y: (n, …) of task t; trees of tensors, kept as they come.

        `t` may be a list, 1-d tensor or array of one descriptor per example. Add each example once:
        what is added in every epoch is remembered again. On a CPU, values that model and loss could
        not take are refused; on a GPU that would mean to wait for it.
        """
        parts = parts_of(x, t, y) if is_mixed(t) else [(x, t, y)]
        for part_x, one, part_y in parts:
            self.memory.check(part_x, descriptor(one), part_y)
        alone = self.processes is None or self.processes.passes_alone
        if alone and leaves(x)[0].device.type == "cpu" and self.engine.objective.own_loss is None:
            self._inputs.check_x(x, self._evaluated)
            self._inputs.check_y(x, y, self._evaluated)
        for part in parts:
            self.memory.put(*part)

    @torch.no_grad()
    def _evaluated(self, x: Tree) -> Any:
        """The model's outputs in evaluation mode; its parts are put back into their modes."""
        with evaluating(self.model):
            return self.engine.objective.outputs(x)

    def project_(self, t: Hashable) -> None:
        """Project the parameters' `.grad` in place, for a step on task t.

        Every remembered task but t is a constraint. If there is none, or none is violated, `.grad`
        is left as it is. Under a `GradScaler`, call `scaler.unscale_(optimizer)` first.
        """
        if self.constrain == "update":
            raise RuntimeError(
                'constrain="update" projects what the optimizer does: call '
                "memory.step(optimizer, t) in place of project_ and optimizer.step"
            )
        past = self._past(t)
        found = self._finite_gradients(past) if past else None
        if found is not None:
            with self._counting_skips(found[1]):
                self._project_gradient(*found)

    def step(self, optimizer: Optimizer, t: Hashable) -> None:
        """Let the optimizer step on task t, within the constraints: gradient or update."""
        skipped = self.skipped
        with self.around_step(t, optimizer):
            if self.skipped == skipped:
                optimizer.step()

    @contextmanager
    def around_step(self, t: Hashable, optimizer: Optimizer | None = None) -> Iterator[None]:
        """The constraints around a step that is made some other way (by a `GradScaler`, say).

        With "gradient" `.grad` is projected before, with "update" the parameters after the block.
        Only the parameters of `optimizer` are changed, all of the model's if it is left out.
        """
        found = self._finite_gradients(self._past(t))
        if found is None:
            yield
            return
        past, G = found
        if optimizer is not None:
            self._leave_out(optimizer, G)
        with self.constrained(past, G):
            yield

    def save(self, path: str | os.PathLike[str], /, **others: Any) -> None:
        """Write the memory, and what else the loop goes on from, to one file.

        The file that was there stays until the new one is whole, so that whenever the loop is
        killed, model, optimizer and memory on the disk are of the same step. Nothing is executed
        when it is read.

        Parameters
        ----------
        path
            The file. Descriptors in it are texts, numbers, or tuples of them.
        **others
            What is saved beside the memory, under names of your own: whatever has a `state_dict`
            (model, optimizer, schedule, `GradScaler`), or numbers, texts, tensors, and lists,
            tuples and dicts of them.

        Examples
        --------
        >>> import tempfile, gradmem as gm
        >>> model = nn.Linear(4, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> memory = gm.GradientMemory(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     memory.save(f"{folder}/loop", model=model, optimizer=optimizer, step=120)
        ...     memory.load(f"{folder}/loop", model=model, optimizer=optimizer)
        {'step': 120}
        """
        states = {
            name: one.state_dict() if hasattr(one, "state_dict") else one
            for name, one in others.items()
        }
        save_together(
            path, {**self.state_dict(), "others": states}, "GradientMemory", self.processes
        )

    def load(self, path: str | os.PathLike[str], /, **others: Any) -> dict[str, Any]:
        """Go on from a file that `save` wrote, with the memories on the model's device.

        Raises `CheckpointError` if the file is damaged, of something else or of a newer gradmem,
        and ValueError if what it holds does not fit; everything stays as it was then.

        Parameters
        ----------
        path
            The file.
        **others
            What takes over its state with `load_state_dict`, under the name it was saved by.

        Returns
        -------
        dict
            What else was saved, by name.
        """
        state = load_state(path, "GradientMemory")
        rest = state.get("others", {})
        for name, one in others.items():
            if name not in rest:
                names = ", ".join(rest) or "nothing"
                raise CheckpointError(f"{path} holds no {name!r} beside the memory, but {names}")
            if not hasattr(one, "load_state_dict"):
                raise TypeError(f"{name} must have load_state_dict, got {type(one).__name__}")
        parts = [(one, rest.pop(name)) for name, one in others.items()]
        if self.processes is not None:
            parts = [(one, self.processes.sharded(own, one)) for one, own in parts]
        parts.append((self, state))
        before = [(one, copy.deepcopy(one.state_dict())) for one, _ in parts]
        try:
            for one, own in parts:
                one.load_state_dict(own)
        except Exception as error:
            for one, own in before:
                one.load_state_dict(own)
            raise ValueError(f"{path} does not fit: {error}") from error
        return dict(rest)

    def __repr__(self) -> str:
        memory = self.memory
        limit = (
            f"memories={memory.memories}" if memory.budget is None else f"budget={memory.budget}"
        )
        return (
            f"GradientMemory({type(self.model).__name__}, {limit}, margin={self.project.margin}, "
            f"constrain={self.constrain!r}, {len(memory)} tasks)"
        )

    def follow_model(self) -> bool:
        follows = super().follow_model()
        if follows:
            self._inputs.forget()
        return follows

    def _past(self, t: Hashable) -> list[Stack] | Past:
        self.follow_model()
        self._last = None
        self.steps += 1
        self._task = t
        past = self.others(descriptor(t))
        if self.sample is not None and is_recording():
            raise RuntimeError("sample draws on the host, which no CUDA graph repeats: take None")
        # by the memory's own generator: the same in all processes, and saved with it
        held, _ = self.held(past, self.draw(past, self.memory.generator))
        return held
