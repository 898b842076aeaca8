"""How a learner takes a step: random numbers, errors, optimizers, CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradmem.cuda.graphs import GraphedSteps, Step
from gradmem.cuda.rates import Rates, make_capturable
from gradmem.gradients import parameters
from gradmem.interrupts import Lock
from gradmem.learners.optimizers import OptimizerFactory, ScheduleFactory
from gradmem.trees import Tree
from gradmem.validation import non_negative_int, positive

__all__ = ["Stepping"]

#: Held while torch's global generator stands in for a learner's own.
GENERATOR = Lock()


class Stepping:
    """The part of a learner that takes steps; `Learner` says what is learned."""

    network: nn.Module
    optimizer: Optimizer
    steps: int

    def prepare_steps(
        self,
        network: nn.Module,
        optimizer: OptimizerFactory,
        schedule: ScheduleFactory | None,
        clip: float | None,
        seed: int,
        graphs: bool,
    ) -> None:
        """Make the optimizer and what a step needs; see `Learner` for the parameters."""
        if non_negative_int("seed", seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {seed}")
        self.clip = None if clip is None else positive("clip", clip)
        self._make_optimizer, self._make_schedule = optimizer, schedule
        self._schedules: dict[Optimizer, LRScheduler] = {}
        self.optimizer = self.new_optimizer(network)
        self._randomness = torch.Generator().manual_seed(seed).get_state()
        self._watched = torch.zeros((), device=self.device)
        self._noted: list[tuple[Tensor, Tensor]] = []
        self._has_buffers = any(True for _ in network.buffers())
        #: Whether the network draws random numbers as it learns, as far as one can see.
        self.is_random = any(_is_random(part) for part in network.modules())
        self.graphed = GraphedSteps(graphs and not self.is_random)
        self._rates = Rates()

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def module(self, t: Hashable | None) -> nn.Module:
        """The module that gives the outputs of task t."""
        return self.network

    def descend(self, loss: Tensor, *optimizers: Optimizer) -> None:
        """Step along the gradients of `loss` that lie in `.grad`, with these optimizers.

        Raises FloatingPointError before anything changes if the loss or a gradient is not finite.
        """
        gradients = [w.grad for w in _weights(optimizers) if w.grad is not None]
        self.require_finite(loss.detach(), torch.stack(torch._foreach_norm(gradients)).sum())
        self.clip_and_step(*optimizers)

    def clip_and_step(self, *optimizers: Optimizer) -> None:
        """Clip the gradients, if asked for, and let the optimizers step."""
        if self.clip is not None:
            clip_grad_norm_(_weights(optimizers), self.clip)
        for optimizer in optimizers:
            optimizer.step()

    def require_finite(self, loss: Tensor, size: Tensor) -> None:
        """Raise FloatingPointError if a loss, or the sum or norm of its gradient, is not finite.

        On a GPU that is noted and raised later, by `settle`.
        """
        if size.is_cuda:
            self._watched = self._watched.to(size.device)  # if the network was moved
            self._watched.add_(size + loss, alpha=0)  # 0 · NaN and 0 · ∞ are NaN, and stay
        elif not math.isfinite(float(size + loss)):
            self._diverge("gradient" if loss.isfinite() else "loss")

    def settle(self) -> None:
        """Wait for the device, and raise what could not be known without waiting."""
        if self._watched.is_cuda and bool(self._watched.isnan()):
            self._diverge("loss or its gradient")

    def _diverge(self, what: str) -> None:
        raise FloatingPointError(
            f"the {what} is not finite after {self.steps} steps: a learning rate below "
            f"lr={float(self.optimizer.param_groups[0]['lr'])} or smaller inputs may help"
        )

    def optimizers_of(self, t: Hashable) -> Sequence[Optimizer]:
        """Those that step when task t is observed."""
        return (self.optimizer,)

    def take(self, key: Hashable, t: Hashable, step: Step, *inputs: Tree | None) -> Tensor | None:
        """Take a step on task t and return its loss; on a GPU as a CUDA graph (`GraphedSteps`).

        `key` says what the step depends on beside its inputs, modes and rates.
        """
        if self.graphed.records(inputs[0]):
            optimizers = self.optimizers_of(t)
            if changed := self._rates.changed(optimizers):
                self.graphed.forget()
            modes = tuple(part.training for part in self.network.modules())
            key = (key, modes, self._rates.update(optimizers, as_tensors=changed))
        return self.graphed(key, step, *inputs)

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

    @contextmanager
    def _restored_on_error(self, t: Hashable, device: torch.device) -> Iterator[None]:
        """Put attributes, buffers and noted tensors back if `learn` raises.

        Attributes are put back as they were before, so `learn` replaces their values before a step
        and does not change them in place. Buffers are put back on the CPU only.
        """
        noted: list[tuple[Tensor, Tensor]] = []
        self._noted = noted
        if self._has_buffers and device.type != "cuda":
            self.note(self.module(t).buffers())
        before = vars(self).copy()
        try:
            yield
        except BaseException:  # an interrupt as well
            vars(self).update(before)
            with torch.no_grad():
                for tensor, value in noted:
                    tensor.copy_(value)
            raise
        finally:
            noted.clear()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note what is about to be changed in place: it is put back if `learn` raises."""
        self._noted += [(tensor, tensor.clone()) for tensor in tensors]

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Random numbers drawn inside come from the learner's generator."""
        with GENERATOR:
            yield from self._with_own_generator()

    def _with_own_generator(self) -> Iterator[None]:
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


def _weights(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    return [w for o in optimizers for group in o.param_groups for w in group["params"]]


def _is_random(part: nn.Module) -> bool:
    """Whether a module draws random numbers in train mode: dropout of its own, or inside it."""
    inner = getattr(part, "dropout", 0.0)
    return isinstance(part, _DropoutNd) or (isinstance(inner, float) and inner > 0)
