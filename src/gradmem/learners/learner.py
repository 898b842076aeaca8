"""What every learner answers: `observe`, `predict`, and its whole state in a dictionary."""

from __future__ import annotations

import copy
import inspect
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradmem.checkpoint import load_state, save_state
from gradmem.cuda.devices import current_device
from gradmem.cuda.graphs import GraphedSteps, Step
from gradmem.cuda.rates import Rates, make_capturable
from gradmem.gradients import Criterion, Forward, Inputs, Loss, Transform, masked, parameters
from gradmem.gradients.objective import TaskLoss
from gradmem.interrupts import Lock, uninterrupted
from gradmem.learners.masks import OutputMasks
from gradmem.learners.optimizers import (
    OptimizerFactory,
    ScheduleFactory,
    follow,
    load_optimizer,
    optimizer_state,
    predecessor,
)
from gradmem.networks import widen
from gradmem.trees import Tree, size, tree_map
from gradmem.validation import class_ids, descriptor, non_negative_int, positive

__all__ = ["Common", "Learner", "weak_loss"]

LR = 0.1

#: Settings that may differ between a learner and the one whose state it takes over: how things are
#: computed, what is part of the state itself, and functions.
FREE = {
    "network", "lr", "seed", "graphs", "gradients", "tasks_per_chunk", "memory_limit", "precision",
    "optimizer", "loss", "schedule", "transform", "decide", "memory",
}  # fmt: skip

#: Held while torch's global generator stands in for a learner's own.
GENERATOR = Lock()


class Common(TypedDict, total=False):
    """What every learner can be given by keyword (see `Learner`)."""

    lr: float
    optimizer: OptimizerFactory | None
    loss: Loss | None
    schedule: ScheduleFactory | None
    clip: float | None
    transform: Transform | None
    decide: Callable[[Any], Any] | None
    grow: bool
    seed: int
    graphs: bool


class Learner(ABC):
    """A predictor f(x, t) that learns from triplets (x, t, y) as they come.

    A learner's own file says how it learns, in `learn`; here is what all of them share: looking at
    what they are given, predicting, and saving. A learner stays as it was when it is given
    something wrong.

    Parameters
    ----------
    network
        Any module. It is trained in place and in the mode (train or eval) that its modules are in.
        The parameters that require gradients now are those that learn.
    lr
        Learning rate of plain SGD; `optimizer` replaces it.
    optimizer
        Parameters → a torch optimizer: `partial(torch.optim.AdamW, lr=1e-3)`.
    loss
        `loss(outputs, y)`, one value per example or their mean; a torch loss module; None for
        cross-entropy.
    schedule
        Optimizer → a torch learning-rate schedule, advanced after every mini-batch.
    clip
        Largest norm of the gradient that the optimizer is given; longer ones are scaled down. A
        gradient that is projected is clipped after that.
    transform
        Applied to x whenever it goes through the network, so that memories hold x as it came.
    decide
        Outputs → predictions. If left out: the class with the largest output where labels are
        classes, the outputs themselves elsewhere.
    grow
        Whether the network's last linear layer gets wider when a class arrives that it has no
        output for (see `gradmem.networks.widen`).
    seed
        Of everything random that happens inside the learner (dropout, new layers). The global
        generator is neither read nor moved.
    graphs
        On a GPU, whether steps become CUDA graphs.

    Attributes
    ----------
    outputs
        Descriptor → class ids, for tasks that have outputs of their own: the others are masked when
        the task is learned and predicted. A task that is not in it has all outputs. `run` fills it
        from the continuum; elsewhere, set a task's entry before the task is observed.
    settings
        What the learner was made with, by name; for results and `repr`.
    """

    #: Whether all tasks share their outputs, so that `predict(x)` works without a descriptor.
    shares_outputs = True
    #: Whether one network is trained in place, whose layers may be replaced or widened.
    one_network = True
    settings: dict[str, Any]

    def __new__(cls, *args: Any, **settings: Any) -> Learner:
        known = inspect.signature(cls).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
        if unknown := [] if open_ended else [name for name in settings if name not in known]:
            names = ", ".join(name for name in known if name != "network")
            raise TypeError(f"{cls.__name__} has no setting {unknown[0]!r}; it has {names}")
        learner = super().__new__(cls)
        learner.settings = settings
        return learner

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show what a learner can be given, with the names behind `**common`, as its signature."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __init__(
        self,
        network: nn.Module,
        *,
        lr: float = LR,
        optimizer: OptimizerFactory | None = None,
        loss: Loss | None = None,
        schedule: ScheduleFactory | None = None,
        clip: float | None = None,
        transform: Transform | None = None,
        decide: Callable[[Any], Any] | None = None,
        grow: bool = False,
        seed: int = 0,
        graphs: bool = True,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module, got {network!r}")
        if not parameters(network):
            raise ValueError("network has no parameter that learns (requires_grad)")
        self.lr = positive("lr", lr)
        for name, make in (("optimizer", optimizer), ("schedule", schedule)):
            if make is not None and not callable(make):
                kind = type(make).__name__
                raise TypeError(f"{name} must be a callable, partial({kind}, …), got one {kind}")
        if optimizer is not None and lr != LR:
            raise ValueError(f"lr is plain SGD's, and an optimizer was given, too: got lr={lr!r}")
        if non_negative_int("seed", seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {seed}")
        if grow and not self.one_network:
            raise ValueError(f"grow is for one network, {type(self).__name__} has one per task")
        self.network = network
        self.criterion = Criterion(loss)
        self.passes = Forward(transform)
        self.clip = None if clip is None else positive("clip", clip)
        if decide is not None and not callable(decide):
            raise TypeError(f"decide must be a callable of outputs, got {decide!r}")
        self.decide = decide
        if not isinstance(grow, bool):
            raise TypeError(f"grow must be True or False, got {grow!r}")
        self.grow = grow
        self.steps = 0
        self.examples = 0
        self.outputs: dict[Hashable, Sequence[int]] = {}
        self._learning = [w.requires_grad for w in network.parameters()]
        self._followed = parameters(network)
        self._make_optimizer = optimizer or partial(torch.optim.SGD, lr=self.lr)
        self._make_schedule = schedule
        self._schedules: dict[Optimizer, LRScheduler] = {}
        self.optimizer = self.new_optimizer(network)
        self._randomness = torch.Generator().manual_seed(seed).get_state()
        self._inputs = Inputs(self.criterion)
        self._output_masks = OutputMasks()
        self._watched = torch.zeros((), device=self.device)
        self._noted: list[tuple[Tensor, Tensor]] = []
        self._has_buffers = any(True for _ in network.buffers())
        #: Whether the network draws random numbers as it learns, as far as one can see.
        self.is_random = any(_is_random(part) for part in network.modules())
        self.graphed = GraphedSteps(graphs and not self.is_random)
        self._rates = Rates()
        self._lock = Lock()

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({type(self.network).__name__}{settings})"

    @abstractmethod
    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        """Learn from one checked mini-batch, and return its loss."""

    def observe(self, x: Tree, t: Hashable, y: Tree, *, check: bool = True) -> Tensor | None:
        """Learn from a mini-batch of task t.

        Parameters
        ----------
        x
            (n, …) finite inputs, n ≥ 1: a tensor, or a dict, tuple or list of tensors.
        t
            The task's descriptor: any hashable value.
        y
            (n, …) what the loss takes: class ids (n,) for cross-entropy.
        check
            False skips the look at x, y and the network's layers, for data that was looked at
            before: on a GPU, looking means waiting for it.

        Returns
        -------
        Tensor
            The batch's loss before the step; on a GPU nothing waits for it.
        """
        with self._lock, uninterrupted():
            if check or self._inputs.n_outputs is None:
                self.settle()
                self.check(x, t, y)
            device = self.device
            with current_device(device), self._restored_on_error(t, device), self.own_randomness():
                self._widen(t, y)
                loss = self.learn(tree_map(Tensor.detach, x), t, y)
            self.steps += 1
            self.examples += size(x)
            for optimizer in self.optimizers_of(t) if self._schedules else ():
                self._schedules[optimizer].step()
            return loss

    def learn_from(
        self, stream: Iterable[tuple[Tree, Hashable, Tree]], *, progress: bool = True
    ) -> Learner:
        """Observe all (x, t, y) of a stream, which may be endless.

        Ctrl-C raises KeyboardInterrupt between two steps: what was observed is learned as a whole.

        Parameters
        ----------
        stream
            Mini-batches; each is let go before the next is asked for.
        progress
            Whether to show tasks, examples, speed and loss where there is a terminal.

        Examples
        --------
        >>> import gradmem as gm
        >>> stream = ((torch.randn(10, 2), "noise", torch.randint(2, (10,))) for _ in range(3))
        >>> gm.Single(gm.mlp([2, 8, 2])).learn_from(stream, progress=False).examples
        30
        """
        from gradmem.learners.watching import watched

        for item in watched(stream, self) if progress else stream:
            if not isinstance(item, tuple | list) or len(item) != 3:
                what = f"{len(item)} items" if isinstance(item, tuple | list) else repr(item)
                raise TypeError(f"a stream must hold triplets (x, t, y), got {what}")
            self.observe(*item)
        return self

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if `observe` cannot take this."""
        self._follow_network()
        self.check_test(x, t, y)
        if size(x) == 1:
            self._check_single(x, t)

    def check_test(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if x cannot be predicted, or y not be right."""
        descriptor(t)
        ask = partial(self.evaluated, t=t)
        self._inputs.check_x(x, ask)
        self._inputs.check_y(x, y, ask, self.grow)
        self._inputs.check_own(t, y, self.outputs.get(t))

    def check_labels(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if labels are not right; x are some of their examples."""
        self._inputs.check_labels(x, y, self.grow)
        self._inputs.check_own(t, y, self.outputs.get(t))

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        """Raise ValueError if these are too many to be observed, one after another."""
        del tasks, classes  # any number will do

    @torch.no_grad()
    def predict(self, x: Tree, t: Hashable | None = None, *, check: bool = True) -> Any:
        """What x: (n, …) is for task t, at any time and for any task, seen or not.

        Class ids (n,) where labels are classes, the outputs elsewhere, or what `decide` makes of
        them. `t` may be left out where the tasks share their outputs; for `check`, see `observe`.
        """
        self._require_descriptor(t)
        with self._lock, uninterrupted(), current_device(self.device):
            if check or self._inputs.n_outputs is None:
                self.settle()
                self._inputs.check_x(x, partial(self.evaluated, t=t))
            outputs = self.scores(x, t)
        if self.decide is not None:
            return self.decide(outputs)
        return outputs.argmax(1) if self._inputs.are_classes else outputs

    @torch.no_grad()
    def forward(self, x: Tree, t: Hashable | None = None) -> Any:
        """The network's outputs for x as task t sees them, in evaluation mode, as they are."""
        self._require_descriptor(t)
        with self._lock, uninterrupted(), current_device(self.device):
            self._inputs.check_x(x, partial(self.evaluated, t=t))
            return self.evaluated(x, t)

    def scores(self, x: Tree, t: Hashable | None) -> Any:
        """The outputs for x without those of other tasks: (n, classes) for classes."""
        return masked(self.evaluated(x, t), self.mask(t))

    def mask(self, t: Hashable | None) -> Tensor | None:
        """Which outputs are task t's: (classes,), or None if all of them are."""
        masks = self.masks([t])
        return None if masks is None else masks[0]

    def masks(self, tasks: Sequence[Hashable | None]) -> Tensor | None:
        """Which outputs are each task's: (k, classes), or None if all tasks have all of them."""
        if not self.outputs:
            return None
        n = self._inputs.n_outputs
        return self._output_masks(self.outputs, tasks, n, self.device, self.grow)

    def module(self, t: Hashable | None) -> nn.Module:
        """The module that gives the outputs of task t."""
        return self.network

    def loss(self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None) -> Tensor:
        """The mean loss of a mini-batch; a subclass may compute it another way.

        `mask` says which outputs count, (classes,) or (n, classes): `self.mask(t)`, unless it was
        handed on to a step that may be a graph.
        """
        return self.criterion.mean(self.passes(self.module(t), x), y, mask)

    @property
    def has_own_loss(self) -> bool:
        """Whether a subclass computes the loss of a mini-batch its own way."""
        return type(self).loss is not Learner.loss

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
            self._schedules[optimizer] = self._make_schedule(optimizer)
        return optimizer

    def statistics(self) -> dict[str, Any]:
        """What belongs into a run's results: counts, and how things were computed."""
        return {"steps": self.steps, "examples": self.examples}

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that `observe` and `predict` depend on.

        Settings are in it to be compared when it is loaded.
        """
        with self._lock, uninterrupted():
            self.settle()
            state = {
                "learner": type(self).__name__,
                "settings": self._compared_settings(),
                "steps": self.steps,
                "examples": self.examples,
                "classes": self._inputs.are_classes,
                "randomness": self._randomness,
                "outputs": {t: tuple(map(int, own)) for t, own in self.outputs.items()},
                **self.get_state(),
            }
            return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the learner that made `state` was; settings must be the same."""
        if not isinstance(state, dict):
            raise TypeError(f"state must be what state_dict() gave, got {type(state).__name__}")
        if state.get("learner") != type(self).__name__:
            raise ValueError(
                f"state must be one of {type(self).__name__}, got one of {state.get('learner')!r}"
            )
        with self._lock, uninterrupted():
            self._watched.zero_()
            before, state = self.state_dict(), copy.deepcopy(state)
            try:
                self._check_state(state)
                self.set_state(state)
            except Exception as error:
                self.set_state(before)
                raise ValueError(f"the state does not fit this learner: {error}") from error
            self.steps, self.examples = state["steps"], state["examples"]
            self.outputs = dict(state.get("outputs", {}))
            self._randomness = state["randomness"].cpu()
            self._inputs.are_classes = state.get("classes", self._inputs.are_classes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the learner's state to one file, from which nothing is executed when it is read.

        The file that was there stays until the new one is whole. It can be loaded on another
        machine and device. Descriptors in it are texts, numbers, or tuples of them.
        """
        save_state(path, self.state_dict(), type(self).__name__)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` wrote; the learner's settings must be the same.

        Raises `CheckpointError` if the file is damaged, of something else or of a newer gradmem,
        and ValueError if its state does not fit; the learner stays as it was then.
        """
        self.load_state_dict(load_state(path, type(self).__name__))

    def _compared_settings(self) -> dict[str, Any]:
        """The settings that a learner must share with one whose state it takes over."""
        parameters = inspect.signature(type(self)).parameters
        usual = {name: p.default for name, p in parameters.items()}
        settings = usual | self.settings
        return {
            name: value
            for name, value in settings.items()
            if name not in FREE and (value is None or isinstance(value, str | bool | int | float))
        }

    def _check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that would be taken over and fail later."""
        mine, given = self._compared_settings(), state.get("settings", {})
        for name in {*mine} & {*given}:
            if mine[name] != given[name]:
                raise ValueError(
                    f"{name} must be {given[name]!r} as when the state was saved, got "
                    f"{mine[name]!r}"
                )
        for name in ("steps", "examples"):
            non_negative_int(name, state[name])
        if not isinstance(state.get("classes", False), bool):
            raise TypeError(f"classes must be a bool, got {state['classes']!r}")
        for t, own in dict(state.get("outputs", {})).items():
            class_ids(f"outputs of task {descriptor(t)!r}", own)
        randomness = state["randomness"]
        torch.Generator().set_state(randomness.cpu())
        _refuse_nan(state, "state")

    def get_state(self) -> dict[str, Any]:
        """The part of the state that a learner's own kind knows about."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.state_of(self.optimizer),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        self.network.load_state_dict(state["network"])
        self.load_state_of(self.optimizer, state["optimizer"])

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of one of the learner's optimizers and of its schedule."""
        return optimizer_state(optimizer, self._schedules.get(optimizer))

    def load_state_of(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take over what `state_of` gave."""
        load_optimizer(optimizer, self._schedules.get(optimizer), state)

    def _follow_network(self) -> None:
        """Let the optimizer follow a network whose layers were replaced or widened."""
        everything = list(self.network.parameters())
        learning = [w.requires_grad for w in everything]
        if len(learning) == len(self._learning) and learning != self._learning:
            raise ValueError(
                "requires_grad of the network's parameters must stay as it was when the learner "
                "was made: make another learner for it"
            )
        if not self.one_network:
            return
        weights = [w for w in everything if w.requires_grad]
        known = {id(w) for w in self._followed}
        if len(weights) == len(known) and all(id(w) in known for w in weights):
            return
        follow(self.optimizer, weights, self._followed)
        self._followed = weights
        self.follow([(w, predecessor(w)) for w in weights])
        self._learning = learning
        self._has_buffers = any(True for _ in self.network.buffers())
        self._inputs.forget()
        self.graphed.forget()

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Adapt to other parameters, each given with the one that it is a wider copy of, if any."""
        del weights  # nothing of a learner's own belongs to them, unless it says so

    def _widen(self, t: Hashable, y: Tree) -> None:
        """Make room for classes of y and of task t that the network has no output for."""
        n = self._inputs.n_outputs
        if not self.grow or n is None or not self.criterion.is_cross_entropy:
            return
        if (classes := max(int(y.max()), *self.outputs.get(t, (0,))) + 1) > n:
            widen(self.network, classes)
            self._follow_network()
            self._inputs.n_outputs = classes

    def _require_descriptor(self, t: Hashable | None) -> None:
        if t is not None:
            descriptor(t)
        elif not self.shares_outputs or self.outputs:
            what = "its outputs differ per task" if self.outputs else "it predicts per task"
            raise TypeError(f"{type(self).__name__} needs t, for {what}; got None")

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

    @torch.no_grad()
    def evaluated(self, x: Tree, t: Hashable | None) -> Any:
        """Outputs in evaluation mode; every part is put back into the mode it was in."""
        module = self.module(t)
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            return self.passes(module, x)
        finally:
            for part in training:
                part.training = True

    @torch.no_grad()
    def _check_single(self, x: Tree, t: Hashable) -> None:
        """Batch statistics of one example may not exist: try it, before anything is changed."""
        module = self.module(t)
        if not any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
            return
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            self.passes(module, x)
        except ValueError as error:
            raise ValueError(
                f"x must have more than one example for this network: {error}"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


def _signature(cls: type[Learner]) -> inspect.Signature:
    """The parameters of a learner; those behind `**…` are the ones of the class above it."""
    lineage = list(cls.__mro__)
    definer = next(kind for kind in lineage if "__init__" in vars(kind))
    _, *own = inspect.signature(vars(definer)["__init__"]).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in own):
        return inspect.Signature(own)
    above = lineage[lineage.index(definer) + 1 :]
    parent = next(kind for kind in above if issubclass(kind, Learner) and "__init__" in vars(kind))
    first, *inherited = _signature(parent).parameters.values()
    mine = {p.name: p for p in own if p.kind is p.KEYWORD_ONLY}
    kept = [p for p in inherited if p.name not in mine]
    return inspect.Signature([first, *kept[:3], *mine.values(), *kept[3:]])


def _weights(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    return [w for o in optimizers for group in o.param_groups for w in group["params"]]


def _refuse_nan(value: Any, where: str) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point() and bool(value.isnan().any()):
            raise ValueError(f"{where} holds numbers that are none (NaN)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(item, f"{where}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            _refuse_nan(item, f"{where}[{i}]")


def weak_loss(learner: Learner) -> TaskLoss:
    """A learner's own loss for what the learner holds: without a cycle, it is freed at once."""
    method = weakref.WeakMethod(learner.loss)

    def loss(x: Tree, t: Hashable, y: Tree, mask: Tensor | None) -> Tensor:
        own = method()
        assert own is not None
        return own(x, t, y, mask)

    return loss


def _is_random(part: nn.Module) -> bool:
    """Whether a module draws random numbers in train mode: dropout of its own, or inside it."""
    inner = getattr(part, "dropout", 0.0)
    return isinstance(part, _DropoutNd) or (isinstance(inner, float) and inner > 0)
