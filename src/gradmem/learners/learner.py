"""What every learner is made of.

How it is given mini-batches is in observing.py, how it predicts in predicting.py, how it takes
steps in stepping.py, and how it is saved in keeping.py.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradmem.distributed import processes_of
from gradmem.gradients import (
    Criterion,
    Forward,
    Inputs,
    Loss,
    Transform,
    noise_of,
    parameters,
)
from gradmem.interrupts import Lock
from gradmem.learners.boundaries import Boundaries, Rule
from gradmem.learners.descriptions import Describing
from gradmem.learners.masks import OutputMasks
from gradmem.learners.observing import Observing
from gradmem.learners.optimizers import (
    OptimizerFactory,
    ScheduleFactory,
    follow,
    predecessor,
    unfollowed,
)
from gradmem.learners.settings import LR, signature_of
from gradmem.memory import EpisodicMemory
from gradmem.networks import unwidened, widen
from gradmem.trees import Tree, size
from gradmem.validation import close_to, descriptor, one_of, positive

__all__ = ["Learner"]


class Learner(Observing, ABC):
    """A predictor f(x, t) that learns from triplets (x, t, y) as they come.

    A learner's own file says how it learns, in `learn`; here is what all of them share: looking at
    what they are given, predicting, and saving. A learner stays as it was when it is given
    something wrong.

    Parameters
    ----------
    network
        Any module. It is trained in place and in the mode (train or eval) that its modules are in.
        The parameters that require gradients now are those that learn. `Single` and `GEM` also take
        a module that is wrapped by DDP or sharded by FSDP2: every process then observes its part of
        each batch (see the guide "Several GPUs and machines").
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
    boundaries
        Where tasks begin in a stream without labels, `observe(x, y=y)`: `gm.Every(n)`, or a
        detector of change, any object with `update(value)` and `drift_detected` (`gm.RisingLoss()`,
        river's `ADWIN()`). A detector is given each batch's mean loss in evaluation mode before
        the batch is learned, which on a GPU waits for it; where it detects a change, the batch
        begins a new task. The learner has a copy of its own.
    average
        Decay, between 0 and 1, of an exponential average of the weights, which predictions are
        made with: θ̄ ← decay θ̄ + (1 − decay) θ after every step, and the plain mean of all weights
        so far during the first 1 / (1 − decay) steps. Learning goes on with the weights themselves.
        Buffers of real numbers, the running statistics of batch norm, are averaged, too. None for
        no average. Of several, `(0.99, 0.999)`, each as large as the network, a task is predicted
        with the one whose length, 1 / (1 − decay) steps, is nearest to 0.7 of the steps since the
        task was last learned; with the shortest if it never was. Where t is left out, it is taken
        for a task that was learned when half of the steps had been made.
    glances
        Gradient steps per mini-batch; what is remembered of it is remembered once, after the last.
    input_dropout
        Share of each input's numbers that are zero while learning, at the mini-batch and at the
        memories, drawn anew in every pass; the others are scaled by 1 / (1 − share). For tabular
        data set input_dropout=0; integer inputs such as tokens are never dropped.
    augment
        Changes inputs while learning, at the mini-batch and at the memories, anew in every pass: a
        function of x, after `transform`, or "images", which shifts each image (n, channels, height,
        width) by up to an eighth of its side and mirrors half of them. None for nothing. Memories
        hold x as it came. A function that draws random numbers draws them by torch, on x's device;
        for one that does otherwise, set graphs=False on a GPU, where its first draws would stay.
    not_finite
        What to do about a mini-batch whose loss or gradient is not finite: "stop" raises
        FloatingPointError, "skip" leaves it out and counts it in `skipped`. On a GPU, "skip" waits
        for every step.
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
    descriptions
        Descriptor → description, (k,) numbers, for a network that takes one beside x
        (`gradmem.networks.conditioned`). `run` fills it from the continuum; elsewhere, set a task's
        entry before the task is observed or predicted. Other networks take no notice of it.
    settings
        What the learner was made with, by name; for results and `repr`.
    """

    #: Whether one network is trained in place, whose layers may be replaced or widened.
    one_network = True
    #: Whether tasks can be predicted with different averages of the same weights.
    averages_by_task = True
    #: Whether several processes can train the network together.
    distributes = False
    #: What makes the loss of outputs and y.
    criterion_kind: type[Criterion] = Criterion
    settings: dict[str, Any]

    def __new__(cls, *args: Any, **settings: Any) -> Learner:
        known = inspect.signature(cls).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
        if unknown := [] if open_ended else [name for name in settings if name not in known]:
            names = [name for name in known if name != "network"]
            raise TypeError(
                f"{cls.__name__} has no setting {unknown[0]!r}; it has {', '.join(names)}"
                f"{close_to(unknown[0], names)}"
            )
        learner = super().__new__(cls)
        learner.settings = settings
        return learner

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show what a learner can be given, with the names behind `**common`, as its signature."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = signature_of(cls, Learner)  # type: ignore[attr-defined]

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
        boundaries: Rule | None = None,
        average: float | Sequence[float] | None = None,
        glances: int = 1,
        input_dropout: float = 0.0,
        augment: str | Transform | None = None,
        not_finite: str = "stop",
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
        if grow and not self.one_network:
            raise ValueError(f"grow is for one network, {type(self).__name__} has one per task")
        network, self.processes = processes_of(network)
        if self.processes is not None:
            self._check_distributed(grow, average)
        self.network = network
        self.criterion = self.criterion_kind(loss)
        self.describing = Describing(network)
        noise = noise_of(augment, input_dropout)
        self.passes = Forward(self.describing.of_x(transform), self.describing.of_x(noise))
        if decide is not None and not callable(decide):
            raise TypeError(f"decide must be a callable of outputs, got {decide!r}")
        self.decide = decide
        if not isinstance(grow, bool):
            raise TypeError(f"grow must be True or False, got {grow!r}")
        self.grow = grow
        self._boundaries: Boundaries | None = None
        self.boundaries = boundaries
        self.not_finite = one_of("not_finite", not_finite, ("stop", "skip"))
        self.steps = self.examples = self.skipped = 0
        self.updates = self.example_gradients = 0
        self.outputs: dict[Hashable, Sequence[int]] = {}
        self.descriptions: dict[Hashable, Any] = {}
        self._learning = [w.requires_grad for w in network.parameters()]
        self._followed = parameters(network)
        self._inputs = Inputs(self.criterion)
        self._output_masks = OutputMasks()
        make = optimizer or partial(torch.optim.SGD, lr=self.lr)
        noisy = self.passes.noise is not None
        self.prepare_steps(network, make, schedule, clip, seed, graphs, average, glances, noisy)
        if self.averaged is not None and len(self.averaged) > 1 and not self.averages_by_task:
            raise ValueError(
                f"several averages are chosen by the task, {type(self).__name__} predicts with "
                f"one: average must be one decay, got {average!r}"
            )
        self._lock = Lock()

    def _check_distributed(self, grow: bool, average: float | Sequence[float] | None) -> None:
        """Refuse what several processes cannot do together."""
        if not self.distributes:
            raise ValueError(
                f"{type(self).__name__} learns in one process: give it the module itself; GEM and "
                "Single take one that is wrapped by DDP or sharded by FSDP2"
            )
        if grow:
            raise ValueError("grow is for one process: others may not see the new class")
        if average is not None:
            raise ValueError(f"average must be None for several processes, got {average}")

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({type(self.network).__name__}{settings})"

    def backward(self, loss: Tensor, n: int) -> Tensor:
        """Add the gradient of n examples' mean loss to `.grad`; the loss.

        Of several processes, of which each has n of its own, the mean is over all examples.
        """
        if self.processes is None:
            loss.backward()
            return loss
        return self.processes.backward(loss, n, self._followed)

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if `observe` cannot take this."""
        self._follow_network()
        self.check_test(x, t, y)
        if size(x) == 1 and self.processes is None:
            self._check_single(self.described(x, t), t)

    def check_test(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if x cannot be predicted, or y not be right."""
        descriptor(t)
        x = self.described(x, t)
        ask = partial(self.evaluated, t=t)
        self._inputs.check_x(x, ask)
        self._inputs.check_y(x, y, ask, self.grow)
        self._inputs.check_own(t, y, self.outputs.get(t))

    def check_labels(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Raise ValueError or TypeError if labels are not right; x are some of their examples."""
        self._inputs.check_labels(self.described(x, t), y, self.grow)
        self._inputs.check_own(t, y, self.outputs.get(t))

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        """ValueError if so many `tasks` or `classes` cannot be observed, one after another."""
        del tasks, classes  # any number will do

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

    def statistics(self) -> dict[str, Any]:
        """What belongs into a run's results: counts, and how things were computed.

        `steps` and `example_gradients` are what learning cost (see `count`), `memory_bytes` what
        the memory takes now, with the room that it has for more, `average_bytes` what averages of
        the weights take.
        """
        counts = {
            "steps": self.updates,
            "examples": self.examples,
            "example_gradients": self.example_gradients,
            "skipped": self.skipped,
        }
        if isinstance(memory := getattr(self, "memory", None), EpisodicMemory):
            counts["memory_bytes"] = memory.bytes
        if self.averaged is not None:
            counts["average_bytes"] = self.averaged.bytes_of(self.modules_by_task().values())
        if self._boundaries is None:
            return counts
        return counts | {"boundaries": [task.first for task in self.tasks]}

    def _follow_network(self) -> None:
        """Let the optimizer follow a network whose layers were replaced or widened."""
        self._parts = list(self.network.modules())
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
        if self.averaged is not None:
            self.averaged.forget_others(self.network)
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
            self._undo += [unwidened(self.network), unfollowed(self.optimizer)]
            self._undo.append(partial(setattr, self._inputs, "n_outputs", n))
            widen(self.network, classes)
            self._follow_network()
            self._inputs.n_outputs = classes

    def modules_by_task(self) -> dict[Hashable, nn.Module]:
        """The modules that learn: one for all tasks, under None, or one for each."""
        return {None: self.network}

    @torch.no_grad()
    def _check_single(self, x: Tree, t: Hashable) -> None:
        """Batch statistics of one example may not exist: try it, before anything is changed."""
        module = self.module(t)
        if not any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
            return
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            with torch.random.fork_rng(devices=[]):
                self.passes(module, x)
        except ValueError as error:
            raise ValueError(
                f"x must have more than one example for this network: {error}"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


Learner.__signature__ = signature_of(Learner, Learner)  # type: ignore[attr-defined]
