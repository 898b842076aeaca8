"""What holds a step: the gradients at past tasks' memories, and the projection on them.

`GradientMemory` puts it around the steps of a loop of one's own, the learner GEM around its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradmem.cuda.devices import is_recording
from gradmem.distributed import Past, Processes
from gradmem.distributed.states import own_part
from gradmem.gradients import (
    Gradients,
    MemoryGradients,
    Objective,
    attach,
    longest,
    most_violated,
)
from gradmem.gradients.flat import flat, parameters, rows_by_parameter, set_gradient, split
from gradmem.memory import EpisodicMemory, Masks, Stack
from gradmem.projection import Projection, Shortlist
from gradmem.trees import Tree, leaves, take
from gradmem.validation import non_negative_int, one_of, positive_int

__all__ = ["CONSTRAINED", "Constraints", "LastProjection"]

#: What is projected: the gradient, as in the paper, or the step that the optimizer makes of it.
CONSTRAINED = ("gradient", "update")


@dataclass(frozen=True)
class LastProjection:
    """What the last projection found, for logging.

    Attributes
    ----------
    tasks
        The past tasks, in the order of the other fields. Of tasks that share their memories, the
        first one (see `EpisodicMemory.groups`).
    violated
        Those whose loss the step would have raised.
    cosines
        (k,) of the angle between the gradient (or update) and each task's gradient.
    v
        (k,) the dual's solution v★; zero if nothing was violated.
    """

    tasks: tuple[Hashable, ...]
    violated: tuple[Hashable, ...]
    cosines: Tensor
    v: Tensor


class Constraints:
    """No remembered task's loss may rise: a constraint for each of them, on every step.

    Parameters
    ----------
    objective
        The loss at the memories, of the model that learns.
    memory
        What is remembered.
    processes
        Those that train the model together; None for this one alone.
    margin, margin_rule, constrain, constraints, sample, not_finite, gradients, tasks_per_chunk,
    memory_limit, precision, graphs
        See `GradientMemory`.
    """

    def __init__(
        self,
        objective: Objective,
        memory: EpisodicMemory,
        processes: Processes | None = None,
        *,
        margin: float = 0.5,
        margin_rule: str = "shift",
        constrain: str = "gradient",
        constraints: int | None = None,
        sample: int | None = None,
        not_finite: str = "stop",
        gradients: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
        graphs: bool = False,
    ) -> None:
        self.model, self.memory, self.processes = objective.network, memory, processes
        self.constrain = one_of("constrain", constrain, CONSTRAINED)
        self.not_finite = one_of("not_finite", not_finite, ("stop", "skip"))
        self.steps = self.skipped = 0
        self._task: Hashable | None = None
        if processes is not None:
            memory.split(processes.rank, processes.size)
            processes.check(gradients, constraints)
        self.sample = None if sample is None else positive_int("sample", sample)
        if self.sample is not None and processes is not None:
            raise ValueError(f"sample must be None for several processes, got {sample!r}")
        self.project = Projection(margin, margin_rule)
        # A margin may push a step over a constraint; an update is put back with this one.
        self._project_again = Projection()
        self.is_free = constraints is not None and non_negative_int("constraints", constraints) == 0
        self.shortlist = Shortlist(constraints) if constraints else None
        self.engine = MemoryGradients(
            objective,
            gradients,
            tasks_per_chunk,
            memory_limit,
            precision,
            graphs and processes is None,
        )
        attach(memory, objective)
        self._weights = parameters(self.model)
        self._last: list[Stack] | Past | None = None

    def others(self, t: Hashable, masks: Masks | None = None, batch: int = 0) -> list[Stack] | Past:
        """The constraints of a step on task t; those that all processes agree on, if several.

        `masks` says which outputs are the tasks', `batch` how many examples the step learns from.
        """
        if self.is_free:
            return []
        if self.processes is not None:
            return self.processes.past(t, self.memory, masks, batch)
        return self.memory.others(t) if masks is None else self.memory.others(t, masks)

    def draw(
        self, past: list[Stack] | Past, generator: torch.Generator | None = None
    ) -> list[Tree]:
        """What a step is given of the past tasks' memories, drawn anew; nothing if it has all."""
        if self.sample is None or isinstance(past, Past):
            return []
        stacks = [stack.drawn(self.sample, generator) for stack in past]
        return [(stack.x, stack.y, stack.shares) for stack in stacks]

    def held(
        self, past: list[Stack] | Past, given: Sequence[Tree]
    ) -> tuple[list[Stack] | Past, Sequence[Tree]]:
        """The constraints of a step that is given what `draw` gave, and the rest of what it is."""
        if self.sample is None or isinstance(past, Past):
            return past, given
        drawn = zip(past, given, strict=False)
        return [stack.having(*own) for stack, own in drawn], given[len(past) :]

    def selects(self, past: list[Stack] | Past) -> bool:
        """Whether there are more constraints than a step may have."""
        if self.shortlist is None or isinstance(past, Past):
            return False
        return sum(map(len, past)) > self.shortlist.most

    def differs(self, past: list[Stack] | Past) -> bool:
        """Whether what is computed differs from step to step, or waits for other processes."""
        return isinstance(past, Past) or self.selects(past) or not self.engine.stores(past)

    def places(self, past: list[Stack] | Past) -> Hashable:
        """What says where the memories of a step lie, for one that does not differ.

        Memories that are drawn are given to it: of those, their tasks, how many, and the masks.
        """
        if isinstance(past, Past):
            return ()
        if self.sample is None:
            return tuple(stack.key for stack in past)
        return tuple((stack.tasks, stack.counts, id(stack.masks)) for stack in past)

    def examples_in(self, past: list[Stack] | Past) -> int:
        """How many remembered examples some constraints have; of several processes, this one's."""
        if isinstance(past, Past):
            assert self.processes is not None
            return int(past.counts[self.processes.rank].sum())
        counts = [count for stack in past for count in stack.counts]
        return sum(counts if self.sample is None else (min(n, self.sample) for n in counts))

    def with_batch(
        self,
        past: list[Stack] | Past,
        x: Tree,
        t: Hashable,
        y: Tree,
        mask: Tensor | None = None,
        first: int | None = None,
    ) -> tuple[list[Stack] | Past, Gradients, Tensor, Tensor]:
        """The constraints of a step, G: (k, p), and g: (p,) and the loss: () of a batch of task t.

        For `past`, `mask` and `first`, see `others` and `MemoryGradients.with_batch`.
        """
        if isinstance(past, Past):
            assert self.processes is not None
            batch = Stack.of_batch(x, y, mask, t)
            return past, *self.processes.with_batch(self.engine, past, batch)
        if not self.selects(past):
            return past, *self.engine.with_batch(past, x, t, y, mask, first)
        _, g, loss = self.engine.with_batch([], x, t, y, mask, first)
        assert self.shortlist is not None
        return *most_violated(self.engine, self.shortlist, past, g), g, loss

    @contextmanager
    def constrained(
        self, past: list[Stack] | Past, G: Gradients, g: Tensor | None = None
    ) -> Iterator[None]:
        """`around_step` for G: (k, p) at the memories `past`; the gradient lies in `.grad`.

        `g`: (p,), if it is known, is that gradient, of which `set_gradient` made the `.grad`s.
        """
        if not past:
            yield
        elif self.constrain == "gradient":
            with self._counting_skips(G):
                self._project_gradient(past, G, g)
            yield
        else:
            self._require_finite(G, g)
            before = [w.detach().clone() for w in self._own()]
            length = self._length(self._gradient() if g is None else g)
            yield
            with self._counting_skips(G):
                self._project_update(past, G, before, length)

    @contextmanager
    def _counting_skips(self, G: Gradients) -> Iterator[None]:
        """Leave a step as it was before if a G that is not stored is not finite, if asked for."""
        try:
            yield
        except FloatingPointError:
            if self.not_finite == "stop" or isinstance(G, Tensor):
                raise
            self.skipped += 1

    def gradients(self, tasks: Sequence[Hashable] | None = None) -> Tensor:
        """G: (k, p), the gradients at the memories of these tasks, or of all; a new tensor.

        Tasks that share their memories have one row. Of several processes, all tasks that any of
        them remembers, in an order that they agree on; under FSDP, this process's columns.
        """
        if self.processes is not None:
            if tasks is not None:
                raise ValueError(f"several processes compute all tasks, got {tasks=}")
            self.follow_model()
            past = self.processes.past(None, self.memory)
            return self.processes.gradients(self.engine, past).whole()
        tasks = list(self.memory if tasks is None else tasks)
        if unknown := [t for t in tasks if t not in self.memory]:
            raise KeyError(f"no examples of task {unknown[0]!r} are remembered")
        self.follow_model()
        return self.engine(self.memory.stacks(tasks)).clone()

    def bytes_needed(self, tasks: int, x: Tree | None = None) -> int:
        """What a step with so many past tasks takes, roughly, beside model, optimizer and memories.

        That is gradients and activations of the tasks' memories, in bytes. `x`: (n, …) are inputs
        of as many examples as one task has; left out, those of a task that is remembered.
        """
        tasks = positive_int("tasks", tasks)
        if x is not None:
            stack = Stack.of_batch(x, torch.zeros(len(leaves(x)[0])))
        elif len(self.memory):
            stack = self.memory.stacks([next(iter(self.memory))])[0]
        else:
            raise ValueError("nothing is remembered yet: give x, the inputs of one task's memories")
        self.follow_model()
        if self.sample is not None:
            some = (slice(None), slice(self.sample))
            stack = stack.having(take(stack.x, some), take(stack.y, some), stack.shares[some])
        return 0 if self.is_free else self.engine.bytes_needed(stack, tasks)

    @property
    def violations(self) -> int:
        """Steps so far that violated a constraint; on a GPU, asking waits for it."""
        return self.project.counts()["violations"]

    @property
    def last(self) -> LastProjection | None:
        """What the last projection found; None if there was nothing to project on."""
        found = self.project.last
        if self._last is None or found is None:
            return None
        if isinstance(self._last, Past):
            tasks = self._last.tasks
        else:
            tasks = tuple(t for stack in self._last for t in stack.tasks)
        signs = zip(tasks, found.cosines.tolist(), strict=True)
        violated = tuple(t for t, cosine in signs if cosine < 0)
        return LastProjection(tasks, violated, found.cosines, found.v)

    def set_gradient(self, g: Tensor) -> None:
        """Make g: (p,) the parameters' `.grad`; under FSDP, this process's part of it."""
        if self.processes is None:
            set_gradient(self.model, g)
        else:
            self.processes.set_gradient(self._weights, g)

    def follow_model(self) -> bool:
        """Notice a model whose layers were replaced, widened, frozen or unfrozen: whether so."""
        if self.processes is not None:
            self.processes.settle()
        weights = parameters(self.model)
        same = len(weights) == len(self._weights) and all(
            one is other for one, other in zip(weights, self._weights, strict=True)
        )
        if not same:
            self._weights = weights
            self.engine.start_again()
            if self.shortlist is not None:
                self.shortlist.forget()
        return not same

    def _finite_gradients(
        self, past: list[Stack] | Past
    ) -> tuple[list[Stack] | Past, Gradients] | None:
        """The constraints of a step and G: (k, p); None if it or `.grad` is not finite.

        Raises then, unless such steps are skipped. A G that is not stored is not known yet.
        """
        on_gpu = self._weights[0].is_cuda
        grads: Sequence[Tensor] = [w.grad for w in self._weights if w.grad is not None]
        if self.processes is not None:
            grads = self.processes.local(grads)
        if not on_gpu and not self._is_finite(grads):
            return None
        G: Gradients
        if isinstance(past, Past):
            assert self.processes is not None
            G = self.processes.gradients(self.engine, past)
        elif self.selects(past):
            assert self.shortlist is not None
            past, G = most_violated(self.engine, self.shortlist, past, self._gradient())
        else:
            G = self.engine.at(past)
        if not isinstance(G, Tensor):
            known = not on_gpu or self._is_finite(grads)
        elif on_gpu:  # which is waited for once
            known = is_recording() or self._is_finite([*grads, G])
        else:  # the projection looks at G, and raises
            known = self.not_finite == "stop" or self._is_finite([G])
        return (past, G) if known else None

    def _is_finite(self, gradients: Sequence[Tensor]) -> bool:
        """Whether gradients are finite; raises unless such steps are skipped."""
        summed = sum((_sum(gradient) for gradient in gradients), torch.zeros(()))
        total = float(summed if self.processes is None else self.processes.agree(summed))
        if math.isfinite(total):
            return True
        if self.not_finite == "stop":
            raise FloatingPointError(
                f"the gradient is not finite in step {self.steps}, on task {self._task!r} (its sum "
                f"is {total}): a smaller learning rate or smaller inputs may help; with a "
                'GradScaler, not_finite="skip"'
            )
        self.skipped += 1
        return False

    def _require_finite(self, G: Gradients, g: Tensor | None) -> None:
        """Find now, before anything has changed, that an update could not be projected.

        On a GPU, which nothing waits for, g becomes what a step would be refused for.
        """
        if not isinstance(G, Tensor):
            return  # it is not known before the step
        if not G.is_cuda:
            if not _sum(G).isfinite():
                raise FloatingPointError("the gradients at the memories are not finite")
        elif g is not None:
            bad = ~G.sum().isfinite()
            G.masked_fill_(bad, 0.0)
            set_gradient(self.model, g.masked_fill_(bad, float("nan")))

    def _gradient(self) -> Tensor:
        if self.processes is not None:
            return self.processes.gradient(self._weights)
        return flat([w.grad for w in self._weights], self._weights)

    @torch.no_grad()
    def _project_gradient(
        self, past: list[Stack] | Past, G: Gradients, g: Tensor | None = None
    ) -> None:
        """Equation 12, on `.grad`."""
        given = self._gradient() if g is None else g
        g_tilde = self.project(given, G)
        self._last = past
        if g_tilde is given:
            return
        if g is not None or not self._has_whole_gradients():
            self.set_gradient(g_tilde)
            return
        for w, part in zip(self._weights, split(g_tilde, self._weights), strict=True):
            if w.grad is not None:
                w.grad.copy_(part)
            elif bool(part.any()):  # the loss does not depend on it, a remembered task's does
                w.grad = part.clone()

    def _has_whole_gradients(self) -> bool:
        return self.processes is None or self.processes.passes_alone

    @torch.no_grad()
    def _project_update(
        self, past: list[Stack] | Past, G: Gradients, before: list[Tensor], length: Tensor
    ) -> None:
        """Take back of the step that was made what goes against a remembered task.

        `before` are the parameters before it, `length` is that of the gradient.
        """
        own = self._own()
        u = flat([b - w for b, w in zip(before, own, strict=True)], own)
        with nullcontext() if isinstance(G, Tensor) else self._put_back(before):
            # The margin is in units of the gradient; under plain SGD the ratio is the learning
            # rate. |g| may vanish while momentum still moves the parameters.
            size = torch.maximum(length, longest(G, u).to(length) / 10)
            scale = self._length(u) / size.clamp(min=torch.finfo(size.dtype).tiny)
            u_tilde = self.project(u, G, scale)
            self._last = past
            if self.project.margin:
                u_tilde = self._project_again(u_tilde, G)
        if u_tilde is not u:
            for w, change in zip(own, split(u - u_tilde, own), strict=True):
                w.add_(change)

    @contextmanager
    def _put_back(self, before: list[Tensor]) -> Iterator[None]:
        """The parameters before a step, for gradients that are computed after it.

        After an error they stay.
        """
        own = self._own()
        after = [w.detach().clone() for w in own]
        for w, value in zip(own, before, strict=True):
            w.copy_(value)
        yield
        for w, value in zip(own, after, strict=True):
            w.copy_(value)

    def _own(self) -> Sequence[Tensor]:
        """The parameters, or this process's shards of them."""
        return self._weights if self.processes is None else self.processes.local(self._weights)

    def _length(self, z: Tensor) -> Tensor:
        """|z|: () of a vector over all parameters."""
        length: Tensor = z.norm() if self.processes is None else self.processes.length(z)
        return length

    def _leave_out(self, optimizer: Optimizer, G: Gradients) -> None:
        """Zero in G what the optimizer does not change."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, got {optimizer!r}")
        owned = {id(w) for group in optimizer.param_groups for w in group["params"]}
        if not any(id(w) in owned for w in self._weights):
            raise ValueError("optimizer must have parameters of the model, got one without any")
        others = [w for w in self._weights if id(w) not in owned]
        if not isinstance(G, Tensor):
            G.leave_out(others)
        elif others:
            rows = rows_by_parameter(G, self._weights)
            for w in others:
                rows[w].zero_()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, and the counts; model and optimizer have states of their own."""
        state = {
            "memory": self.memory.state_dict(),
            "counts": self.project.counts(),
            "progress": (self.steps, self.skipped),
            "shortlist": None if self.shortlist is None else self.shortlist.state_dict(),
            "calm": self.engine.outlook.calm,
            "method": self.engine.method,
        }
        return state if self.processes is None else state | {"process": self.processes.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, with the memories on the model's device.

        Raises ValueError if it does not fit; the memory stays as it was then.
        """
        before = self.state_dict()
        try:
            self._set_state(own_part(state, self.processes, self.memory))
        except Exception as error:
            self._set_state(before)
            raise ValueError(f"the state does not fit this memory: {error}") from error

    def _set_state(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"], self._weights[0].device)
        self.project.set_counts(state["counts"])
        self.steps, self.skipped = map(
            non_negative_int, ("steps", "skipped"), state.get("progress", (0, 0))
        )
        if self.shortlist is not None:
            self.shortlist.forget()
            if state.get("shortlist") is not None:
                self.shortlist.load_state_dict(state["shortlist"], self._weights[0].device)
        self.engine.use(state["method"])
        self.engine.outlook.calm = non_negative_int("calm", state.get("calm", 0))


def _sum(values: Tensor) -> Tensor:
    """Their sum, not in half precision, which many ordinary numbers are too much for."""
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
