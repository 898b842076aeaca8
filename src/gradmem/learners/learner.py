"""What every learner answers: `observe` and `predict`; its state is in keeping.py."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradmem.cuda.devices import current_device
from gradmem.distributed import processes_of
from gradmem.gradients import (
    Criterion,
    Forward,
    Inputs,
    Loss,
    Transform,
    dropout_of_inputs,
    masked,
    parameters,
)
from gradmem.interrupts import Lock, uninterrupted
from gradmem.learners.boundaries import Boundaries, InferredTask, Rule
from gradmem.learners.descriptions import Describing
from gradmem.learners.keeping import Keeping
from gradmem.learners.masks import OutputMasks
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
from gradmem.streams.examples import are_class_ids
from gradmem.streams.mixed import is_mixed, parts_of, places_of
from gradmem.trees import Tree, check, concatenate, leaves, size, take, tree_map
from gradmem.validation import close_to, descriptor, one_of, positive, positive_int

__all__ = ["Learner"]


class Learner(Keeping, ABC):
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

    #: Whether all tasks share their outputs, so that `predict(x)` works without a descriptor.
    shares_outputs = True
    #: Whether one network is trained in place, whose layers may be replaced or widened.
    one_network = True
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
        noise = dropout_of_inputs(input_dropout)
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
        if self.averaged is not None and len(self.averaged) > 1 and not self.one_network:
            raise ValueError(
                f"several averages are for one network, {type(self).__name__} has one per task: "
                f"average must be one decay, got {average!r}"
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

    @abstractmethod
    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        """Learn from one checked mini-batch, and return its loss."""

    @property
    def boundaries(self) -> Rule | None:
        """What finds tasks in a stream without labels; it can be set until a task was found."""
        return None if self._boundaries is None else self._boundaries.rule

    @boundaries.setter
    def boundaries(self, rule: Rule | None) -> None:
        if self.tasks:
            raise ValueError(f"boundaries cannot be changed after {len(self.tasks)} tasks, {rule=}")
        if rule is not None and self.processes is not None:
            raise ValueError("boundaries are for one process: others may find other tasks")
        self._boundaries = None if rule is None else Boundaries(rule)

    @property
    def tasks(self) -> list[InferredTask]:
        """The tasks that the boundaries have found, in their order."""
        return [] if self._boundaries is None else list(self._boundaries.tasks)

    def observe(
        self, x: Tree, t: Any = None, y: Tree = None, *, check: bool = True
    ) -> Tensor | None:
        """Learn from a mini-batch of task t.

        Parameters
        ----------
        x
            (n, …) finite inputs, n ≥ 1: a tensor, or a dict, tuple or list of tensors.
        t
            The task's descriptor: any hashable value. In a mixed batch a list, 1-d tensor or array
            with one descriptor per example: the examples of each task are learned together, one
            step per task, tasks in the order in which they first come. If it is left out, as in
            `observe(x, y=y)`, the learner's `boundaries` find the task: 0, 1, … They are not asked
            about batches that come with t.
        y
            (n, …) what the loss takes: class ids (n,) for cross-entropy.
        check
            False skips the look at x, y and the network's layers, for data that was looked at
            before, and on a GPU does not wait for the step.

        Returns
        -------
        Tensor
            The batch's loss before the step; None if the batch was skipped (`not_finite`). Of a
            mixed batch the mean over the examples that were learned.

        Raises
        ------
        FloatingPointError
            If the loss or its gradient is not finite; the learner is as before the batch. On a GPU
            with check=False nothing waits for the step: from the first such step on, parameters
            and buffers no longer change, and the next call that waits (`settle`) raises.
            Of a mixed batch, all tasks' examples are checked before the first step; if the step of
            a later task raises, those of the earlier ones were learned, each as a whole.
        """
        if y is None:
            raise TypeError("y is missing: observe(x, t, y), or observe(x, y=y) with boundaries")
        with self._lock, uninterrupted():
            look = check or self._inputs.n_outputs is None
            if look:
                self.settle()
            if is_mixed(t):
                return self._observe_mixed(x, t, y, look)
            if t is None:
                return self._observe_unlabelled(x, y, look)
            if look:
                self.check(x, t, y)
            return self._step(x, t, y, look)

    def observe_each(
        self, x: Tree, t: Hashable, y: Tree, batch_size: int, *, check: bool = True
    ) -> Tensor | None:
        """Learn from mini-batches of task t, one after the other: `observe` for each of them.

        On a GPU with check=False, steps that are CUDA graphs follow each other without the host's
        part in them, where a learner does nothing else between its steps (`Single`, and `GEM` that
        keeps a task's first or last examples).

        Parameters
        ----------
        x, t, y, check
            See `observe`; t is one descriptor. x and y hold all mini-batches.
        batch_size
            Examples of a mini-batch; the last one may have fewer.

        Returns
        -------
        Tensor
            The loss of the last mini-batch that was looked at by itself, before the step on it.

        Examples
        --------
        >>> import torch, gradmem as gm
        >>> learner = gm.Single(gm.mlp([2, 8, 2]))
        >>> loss = learner.observe_each(torch.randn(25, 2), "a", torch.randint(2, (25,)), 10)
        >>> learner.steps, learner.examples
        (3, 25)
        """
        positive_int("batch_size", batch_size)
        loss, start, n = None, 0, size(y)
        while start < n:
            part = slice(start, start + batch_size)
            costs = self.updates, self.example_gradients
            loss = self.observe(take(x, part), t, take(y, part), check=check)
            start += batch_size
            whole = (n - start) // batch_size * batch_size
            if whole > 0 and not check and self._can_repeat(t):
                rest = slice(start, start + whole)
                with self._lock, uninterrupted(), current_device(self.device):
                    self._repeat(take(x, rest), t, take(y, rest), batch_size, costs)
                start += whole
        return loss

    def repeats(self, t: Hashable) -> bool:
        """Whether steps on task t follow each other with nothing but `remember` between them."""
        del t
        return False

    def remember(self, x: Tree, t: Hashable, y: Tree) -> None:
        """Remember examples that were learned; of a learner that `repeats`, many at once."""

    def _can_repeat(self, t: Hashable) -> bool:
        """Whether the last step can be taken again with other examples and nothing else."""
        plain = not (self._waits or self.is_random or self._schedules or self.grow)
        alone = self.glances == 1 and self.describing.size is None
        return self.graphed.can_repeat and plain and alone and self.repeats(t)

    def _repeat(self, x: Tree, t: Hashable, y: Tree, n: int, costs: tuple[int, int]) -> None:
        """Learn from mini-batches of n examples as by the last step, before which costs were so."""
        steps, gradients = self.updates - costs[0], self.example_gradients - costs[1]
        for _ in self.graphed.repeat([leaf.detach() for leaf in (*leaves(x), *leaves(y))]):
            self._recent.append((t, self.steps))
            self.steps += 1
            self.examples += n
            self.count(steps, gradients)
        if self.averaged is not None:
            self.averaged.learned[t] = self.steps
        self.remember(x, t, y)

    def _observe_mixed(self, x: Tree, t: Any, y: Tree, look: bool) -> Tensor | None:
        """Learn from the examples of several tasks, a step for each task."""
        if self.processes is not None:
            raise ValueError(
                "a mixed batch is a step for each of its tasks, and other processes may have "
                "others: let t be one task in each process"
            )
        parts = parts_of(x, t, y)
        if look:
            for part in parts:
                self.check(*part)
            self.check_all([t for _, t, _ in parts], set(y.tolist()) if are_class_ids(y) else ())
        losses = [(size(x), self._step(x, t, y, look)) for x, t, y in parts]
        known = [(n, loss) for n, loss in losses if loss is not None]
        if len(known) < 2:
            return known[0][1] if known else None
        total = torch.stack([n * loss for n, loss in known]).sum()
        return total / sum(n for n, _ in known)

    def _observe_unlabelled(self, x: Tree, y: Tree, look: bool) -> Tensor | None:
        """Learn from a mini-batch of the task that the boundaries find."""
        if self._boundaries is None:
            raise TypeError(
                "t must be a task descriptor, got None: without t, the learner must be given "
                f"boundaries, {type(self).__name__}(network, boundaries=gm.Every(1000))"
            )
        if look:
            self.check(x, self._boundaries.current, y)
        t, rule = self._boundaries.next(partial(self._loss_before, x, y))
        steps = self.steps
        loss = self._step(x, t, y, look)
        if self.steps > steps:  # it was not skipped
            self._boundaries.add(t, size(x), rule)
        return loss

    @torch.no_grad()
    def _loss_before(self, x: Tree, y: Tree) -> float:
        """A batch's mean loss in evaluation mode, which changes nothing; waits for a GPU.

        Infinite where the network has no output for a class yet.
        """
        assert self._boundaries is not None
        t, before = self._boundaries.current, self._randomness
        if self.grow and are_class_ids(y) and int(y.max()) >= (self._inputs.n_outputs or 0):
            return float("inf")
        with current_device(self.device), self._evaluating(t), self.own_randomness():
            loss = self.loss(self.described(x, t), t, y, self.mask(t))
        self._randomness = before
        return float(loss)

    def _step(self, x: Tree, t: Hashable, y: Tree, waits: bool) -> Tensor | None:
        """Learn from a checked mini-batch and count it; None if it was skipped."""
        self._waits = waits or self.not_finite == "skip"
        try:
            loss = self._learn(x, t, y)
        except FloatingPointError:
            if self.not_finite == "stop":
                raise
            self.skipped += 1
            return None
        self.steps += 1
        self.examples += size(x)
        if self.averaged is not None:
            self.averaged.learned[t] = self.steps
        for optimizer in self.optimizers_of(t) if self._schedules else ():
            self._schedules[optimizer].step()
        return loss

    def _learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        """Learn from a mini-batch, or raise and stay as before it."""
        device = self.device
        with current_device(device), self._restored_on_error(t, device), self.own_randomness():
            self._widen(t, y)
            self._taken, counted = False, self.updates
            loss = self.learn(tree_map(Tensor.detach, self.described(x, t)), t, y)
            if not self._taken:  # a learner that steps its own way
                self.average_weights(t)
            if self.updates == counted:
                self.count(self.glances, self.glances * size(x))
            if self.processes is not None:
                self.processes.share_buffers(self.network)
            return loss

    def backward(self, loss: Tensor, n: int) -> Tensor:
        """Add the gradient of n examples' mean loss to `.grad`; the loss.

        Of several processes, of which each has n of its own, the mean is over all examples.
        """
        if self.processes is None:
            loss.backward()
            return loss
        return self.processes.backward(loss, n, self._followed)

    def learn_from(self, stream: Iterable[tuple[Tree, ...]], *, progress: bool = True) -> Learner:
        """Observe all (x, t, y) of a stream, which may be endless; with boundaries also (x, y).

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
            pairs = "" if self._boundaries is None else " or pairs (x, y)"
            if not isinstance(item, tuple | list) or len(item) not in ((2, 3) if pairs else (3,)):
                what = f"{len(item)} items" if isinstance(item, tuple | list) else repr(item)
                raise TypeError(f"a stream must hold triplets (x, t, y){pairs}, got {what}")
            self.observe(item[0], item[1] if len(item) == 3 else None, item[-1])
        return self

    def described(self, x: Tree, t: Hashable | None) -> Tree:
        """What the network is given for x: with task t's description, where it takes one."""
        return self.describing(x, t, self.descriptions)

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

    @torch.no_grad()
    def predict(self, x: Tree, t: Any = None, *, check: bool = True) -> Any:
        """What x: (n, …) is for task t, at any time and for any task, seen or not.

        Class ids (n,) where labels are classes, the outputs elsewhere, or what `decide` makes of
        them. `t` may be a list, 1-d tensor or array of one descriptor per example, and may be left
        out where the tasks share their outputs; for `check`, see `observe`.
        """
        with self._lock, uninterrupted(), current_device(self.device):
            look = check or self._inputs.n_outputs is None
            if look:
                self.settle()
            outputs = self._by_task(self.scores, x, t, look)
        if self.decide is not None:
            return self.decide(outputs)
        return outputs.argmax(1) if self._inputs.are_classes else outputs

    @torch.no_grad()
    def forward(self, x: Tree, t: Any = None) -> Any:
        """The network's outputs for x as task t sees them, in evaluation mode, as they are."""
        with self._lock, uninterrupted(), current_device(self.device):
            return self._by_task(self.evaluated, x, t, True)

    def _by_task(self, outputs: Callable[[Tree, Any], Any], x: Tree, t: Any, look: bool) -> Any:
        """`outputs(x, t)` in x's order, where t may be one descriptor per example."""
        if is_mixed(t):
            places = places_of(t, check("x", x))
            parts = [
                self._by_task(outputs, take(x, those), one, look) for one, those in places.items()
            ]
            order = torch.tensor([i for those in places.values() for i in those]).argsort()
            return take(concatenate(parts), order.to(self.device))
        self._require_descriptor(t)
        x = self.described(x, t)
        if look:
            self._inputs.check_x(x, partial(self.evaluated, t=t))
        return outputs(x, t)

    @property
    def predicts_alike(self) -> bool:
        """Whether an example is predicted alike whatever its task."""
        own = type(self)
        names = ("predict", "scores", "evaluated", "module", "described")
        usual = all(getattr(own, name) is getattr(Learner, name) for name in names)
        described = self.describing.size is not None
        one_average = self.averaged is None or len(self.averaged) == 1
        shared = self.shares_outputs and not self.outputs
        return usual and shared and not described and one_average

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
            counts["average_bytes"] = self.averaged.bytes
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

    def _require_descriptor(self, t: Hashable | None) -> None:
        if t is not None:
            descriptor(t)
        elif not self.shares_outputs or self.outputs:
            what = "its outputs differ per task" if self.outputs else "it predicts per task"
            raise TypeError(f"{type(self).__name__} needs t, for {what}; got None")

    @torch.no_grad()
    def evaluated(self, x: Tree, t: Hashable | None, *, live: bool = False) -> Any:
        """Outputs in evaluation mode, of the averaged weights if there is an average.

        With `live`, of the weights that learn.
        """
        with self._evaluating(t) as module:
            if self.averaged is None or live:
                return self.passes(module, x)
            with self.averaged.standing_in(module, self.averaged.which(t, self.steps)):
                return self.passes(module, x)

    def modules_by_task(self) -> dict[Hashable, nn.Module]:
        """The modules that learn: one for all tasks, under None, or one for each."""
        return {None: self.network}

    @contextmanager
    def _evaluating(self, t: Hashable | None) -> Iterator[nn.Module]:
        """Task t's module in evaluation mode; every part is put back into the mode it was in."""
        module = self.module(t)
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            yield module
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


Learner.__signature__ = signature_of(Learner, Learner)  # type: ignore[attr-defined]
