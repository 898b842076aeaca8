"""How a learner takes a step: random numbers, errors, optimizers, CUDA graphs."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradmem.cuda.devices import has_triton
from gradmem.cuda.graphs import GraphedSteps, Step
from gradmem.cuda.rates import Rates, make_capturable
from gradmem.distributed import Processes
from gradmem.gradients import Criterion, parameters
from gradmem.interrupts import Lock
from gradmem.learners.averaging import Averages
from gradmem.learners.optimizers import OptimizerFactory, ScheduleFactory
from gradmem.trees import Tree, leaves
from gradmem.validation import non_negative_int, positive, positive_int

if TYPE_CHECKING:
    from gradmem.cuda.guard import Guard

__all__ = ["Stepping"]

#: Steps on a GPU, not waited for, of which the task is known.
RECENT = 16384

#: Held while torch's global generator stands in for a learner's own.
GENERATOR = Lock()


class Stepping:
    """The part of a learner that takes steps; `Learner` says what is learned."""

    network: nn.Module
    criterion: Criterion
    one_network: bool
    optimizer: Optimizer
    steps: int
    updates: int
    example_gradients: int
    #: The processes that train the network together; None for this one alone.
    processes: Processes | None
    #: The network's parameters that learn, and its modules, when it was last looked at.
    _followed: list[nn.Parameter]
    _parts: list[nn.Module]

    def prepare_steps(
        self,
        network: nn.Module,
        optimizer: OptimizerFactory,
        schedule: ScheduleFactory | None,
        clip: float | None,
        seed: int,
        graphs: bool,
        average: float | Sequence[float] | None = None,
        glances: int = 1,
        noisy: bool = False,
    ) -> None:
        """Make the optimizer and what a step needs; see `Learner` for the parameters."""
        if non_negative_int("seed", seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {seed}")
        self.clip = None if clip is None else positive("clip", clip)
        self.glances = positive_int("glances", glances)
        by_part = not self.one_network
        self.averaged = None if average is None else Averages(average, by_part=by_part)
        if self.averaged is not None and self.one_network:
            self.averaged.tensors(network)
        self._make_optimizer, self._make_schedule = optimizer, schedule
        self._schedules: dict[Optimizer, LRScheduler] = {}
        self.optimizer = self.new_optimizer(network)
        self._randomness = torch.Generator().manual_seed(seed).get_state()
        self._guard: Guard | None = None
        self._recent: deque[tuple[Hashable, int]] = deque(maxlen=RECENT)
        self._task: Hashable | None = None
        self._waits = False
        self._taken = False  # whether a step was taken for this mini-batch
        self._noted: list[tuple[Tensor, Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        self._parts = list(network.modules())
        self._has_buffers = any(True for _ in network.buffers())
        #: Whether random numbers are drawn as it learns, as far as one can see.
        self.is_random = any(_is_random(part) for part in network.modules()) or noisy
        # Without Triton, a step on a GPU is waited for. A recurrent layer's dropout has a state of
        # its own, which a graph would not find again.
        recurrent = any(isinstance(part, nn.RNNBase) and part.dropout for part in self._parts)
        self.graphed = GraphedSteps(
            graphs and not recurrent and has_triton() and self.processes is None
        )
        self._rates = Rates()

    @property
    def device(self) -> torch.device:
        return self._followed[0].device

    def module(self, t: Hashable | None) -> nn.Module:
        """The module that gives the outputs of task t."""
        return self.network

    def descend(self, loss: Tensor, *optimizers: Optimizer) -> None:
        """Clip the gradients of `loss` that lie in `.grad`, if asked for, and step along them.

        Raises FloatingPointError before anything changes if the loss or a gradient is not finite.
        On a GPU nothing waits: from such a step on nothing changes, until `settle` raises.
        """
        weights = [w for o in optimizers for group in o.param_groups for w in group["params"]]
        gradients = [w.grad for w in weights if w.grad is not None]
        if self._guard is None:
            self.require_finite(loss, torch.stack([g.sum() for g in gradients]))
        else:
            self._guard.look(loss, gradients)
        if self.clip is not None:
            clip_grad_norm_(weights, self.clip)
        for optimizer in optimizers:
            if self._guard is None:
                optimizer.step()
            else:
                self._guard.step(optimizer)

    def look(self, loss: Tensor) -> None:
        """Let a loss that nothing descends along be as `descend` asks for."""
        if self._guard is None:
            self.require_finite(loss, loss)
        else:
            self._guard.look(loss, [])

    def put_values(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Replace in place what a learner keeps, after `descend`; it stays where steps are held."""
        if self._guard is not None:
            held = self._guard.found.bool()
            pairs = zip(tensors, values, strict=True)
            values = [torch.where(held, old, new) for old, new in pairs]
        torch._foreach_copy_(list(tensors), list(values))

    @property
    def rate(self) -> float | Tensor:
        """The learning rate of the optimizer's first group, as it is now."""
        rate: float | Tensor = self.optimizer.param_groups[0]["lr"]
        return rate

    def require_finite(self, loss: Tensor, g: Tensor) -> None:
        """Raise FloatingPointError if a loss or its gradient is not finite; on a CPU only.

        For a gradient that something is made of before `descend` looks at it.
        """
        loss = loss.detach()
        if self._guard is None and not math.isfinite(float(g.sum() + loss)):
            self._diverge("gradient" if loss.isfinite() else "loss", self.steps, float(loss))

    @property
    def held(self) -> Tensor | None:
        """(), 1 on a GPU from a step on that was not finite; None where steps are waited for."""
        return None if self._guard is None else self._guard.found

    def settle(self) -> None:
        """Wait for the device, and raise what could not be known without waiting."""
        self._settle(self.steps)

    def _settle(self, taken: int) -> None:
        """`settle` after so many steps were taken, the one under way among them."""
        found = None if self._guard is None else self._guard.read()
        recent, self._recent = self._recent, deque(maxlen=RECENT)
        if found is not None:
            late, loss = found
            before = max(0, taken - late)
            self._task, steps = recent[-late] if late <= len(recent) else (None, before)
            self._diverge("gradient" if math.isfinite(loss) else "loss", steps, loss)

    def _diverge(self, what: str, steps: int, loss: float) -> None:
        on = "" if self._task is None else f"on task {self._task!r} "
        raise FloatingPointError(
            f"the {what} is not finite after {steps} steps: a learning rate below "
            f"lr={float(self.optimizer.param_groups[0]['lr'])} or smaller inputs may help "
            f"({on}the loss is {loss:.6g})"
        )

    def optimizers_of(self, t: Hashable) -> Sequence[Optimizer]:
        """Those that step when task t is observed."""
        return (self.optimizer,)

    def count(self, steps: int, examples: int) -> None:
        """Count what a mini-batch costs, in whole numbers of the host.

        `steps` are changes of the weights along a gradient, one after another, those inside an
        algorithm among them. `examples` are those whose gradient was computed, each time again,
        whichever way it was computed. A learner's `learn` calls this; of one that does not, the
        mini-batch itself is counted, once for every glance.
        """
        self.updates += steps
        self.example_gradients += examples

    def take(
        self,
        key: Hashable,
        t: Hashable,
        step: Step,
        *inputs: Tree | None,
        draw: Callable[[], Sequence[Tree | None]] = tuple,
    ) -> Tensor | None:
        """Take a step on task t, `glances` times, and return its first loss.

        On a GPU a step is a CUDA graph (`GraphedSteps`). `key` says what it depends on beside its
        inputs, modes and rates; what `draw` gives follows the inputs, drawn anew for each glance.
        """
        if self.glances == 1:
            return self.take_once(key, t, step, *inputs, *draw())
        self.note_steps(t, leaves(inputs[0])[0].device)
        first = self.take_once(key, t, step, *inputs, *draw())
        for _ in range(1, self.glances):
            self.steps += 1
            self.take_once(key, t, step, *inputs, *draw())
        return first

    def take_once(
        self, key: Hashable, t: Hashable, step: Step, *inputs: Tree | None, moves: bool = True
    ) -> Tensor | None:
        """`take` for one glance; `moves` says whether averages of the weights follow it."""
        if self.graphed.records(inputs[0]):
            optimizers = self.optimizers_of(t)
            if changed := self._rates.changed(optimizers):
                self.graphed.forget()
            modes = (*[part.training for part in self._parts], *self.criterion.key)
            key = (key, modes, self._rates.update(optimizers, as_tensors=changed))
        self._watch(t, leaves(inputs[0])[0].device)
        self._taken = True
        step = self._with_statistics_put_back(step, t)
        step = self._with_average(step, t) if moves else step
        loss = self.graphed(key, step, *inputs)
        if self._waits and self._guard is not None:
            self._settle(self.steps + 1)
        return loss

    def note_steps(self, t: Hashable, device: torch.device) -> None:
        """Note what a first step changes, in case a later one on the mini-batch cannot be made.

        On a GPU that is not waited for, steps that were made stay.
        """
        if device.type == "cuda" and not self._waits:
            return
        for optimizer in self.optimizers_of(t):
            self.note_step(optimizer)
        if self.graphed.enabled:
            self._undo.append(self.graphed.forget)  # the optimizers' state lies elsewhere then
        if self.averaged is not None:
            self.note(self.averaged.tensors(self.module(t)))

    def _with_average(self, step: Step, t: Hashable) -> Step:
        """The step, after which the averages of the weights follow, if there are any."""
        if self.averaged is None:
            return step
        self.averaged.tensors(self.module(t))  # they begin before the step

        def averaging(*inputs: Any) -> tuple[Any, ...]:
            kept = step(*inputs)
            self.average_weights(t)
            return kept

        return averaging

    def average_weights(self, t: Hashable) -> None:
        """Let the averages follow the weights of task t's module, unless steps are held."""
        if self.averaged is not None:
            held = None if self._guard is None else self._guard.found
            self.averaged.update(self.module(t), held)

    def _watch(self, t: Hashable, device: torch.device) -> None:
        """Note which task a step is on, and let a guard watch over steps on a GPU."""
        self._task = t
        self._recent.append((t, self.steps))
        if device.type != "cuda" or not has_triton() or self.processes is not None:
            self._guard = None  # the step is waited for
        elif self._guard is None or self._guard.found.device != device:
            from gradmem.cuda.guard import Guard

            self._guard = Guard(device)

    def _with_statistics_put_back(self, step: Step, t: Hashable) -> Step:
        """The step, after which the network's buffers are as before if it was not finite."""
        if not self._has_buffers or self._guard is None:
            return step

        def guarded(*inputs: Any) -> tuple[Any, ...]:
            assert self._guard is not None
            before = self._guard.copies(self.module(t).buffers())
            kept = step(*inputs)
            self._guard.put_back(self.module(t).buffers(), before)
            return (*kept, before)

        return guarded

    def new_optimizer(self, module: nn.Module) -> Optimizer:
        """An optimizer for the module's parameters, with its schedule."""
        optimizer = self._make_optimizer(parameters(module))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be a callable that gives a torch optimizer for parameters, got one "
                f"that gives {type(optimizer).__name__}"
            )
        make_capturable(optimizer)
        if self._make_schedule is not None:
            self._schedules = self._schedules | {optimizer: self._make_schedule(optimizer)}
        return optimizer

    def let_go(self, optimizers: Iterable[Optimizer]) -> None:
        """Forget the schedules of optimizers that are no longer used."""
        gone = {*optimizers}
        self._schedules = {o: one for o, one in self._schedules.items() if o not in gone}

    def own_parts(self) -> Sequence[object]:
        """Objects of the learner's own whose attributes `learn` replaces."""
        return ()

    @contextmanager
    def _restored_on_error(self, t: Hashable, device: torch.device) -> Iterator[None]:
        """Put attributes, buffers and noted tensors back if `learn` raises.

        Attributes, of the learner and of its own parts, are put back as they were before, so
        `learn` replaces their values before a step and does not change them in place. What cannot
        be put back that way is undone by functions in `self._undo`.
        """
        noted: list[tuple[Tensor, Tensor]] = []
        self._noted, self._undo = noted, []
        if self._has_buffers and (device.type != "cuda" or self._waits):
            self.note(self.module(t).buffers())
        before = [(part, vars(part).copy()) for part in (self, *self.own_parts())]
        try:
            yield
        except BaseException:  # an interrupt as well
            for undo in reversed(self._undo):
                undo()
            for part, values in before:
                vars(part).update(values)
            with torch.no_grad():
                for tensor, value in noted:
                    tensor.copy_(value)
            raise
        finally:
            noted.clear()

    def note_step(self, optimizer: Optimizer) -> None:
        """Note all that a step of the optimizer changes, for what may still fail after it."""
        self.note(w for group in optimizer.param_groups for w in group["params"])
        before = copy.deepcopy(optimizer.state_dict())
        self._undo.append(lambda: optimizer.load_state_dict(before))

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note what is about to be changed in place: it is put back if `learn` raises."""
        self._noted += [(tensor, tensor.detach().clone()) for tensor in tensors]

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Random numbers drawn inside come from the learner's generator."""
        with GENERATOR:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._randomness)
            try:
                if self.is_random and self.device.type == "cuda":
                    # A GPU has a generator of its own, which is seeded from the learner's.
                    with torch.random.fork_rng([self.device]):
                        torch.cuda.manual_seed(int(torch.randint(2**62, ())))
                        yield
                else:
                    yield
                self._randomness = torch.get_rng_state()  # not after an error
            finally:
                torch.set_rng_state(outside)


def _is_random(part: nn.Module) -> bool:
    """Whether a module draws random numbers in train mode: dropout of its own, or inside it."""
    inner = getattr(part, "dropout", 0.0)
    return isinstance(part, _DropoutNd) or (isinstance(inner, float) and inner > 0)
