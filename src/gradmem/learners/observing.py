"""How a learner is given mini-batches: of one task, of several, without labels, many in a row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from gradmem.cuda.devices import current_device
from gradmem.interrupts import uninterrupted
from gradmem.learners.boundaries import Boundaries, InferredTask, Rule
from gradmem.learners.predicting import Predicting
from gradmem.streams.examples import are_class_ids
from gradmem.streams.mixed import is_mixed, parts_of
from gradmem.trees import Tree, leaves, size, take, tree_map
from gradmem.validation import positive_int

__all__ = ["Observing"]


class Observing(Predicting):
    """The part of a learner that takes mini-batches; `Learner` says what is learned."""

    #: What to do about a mini-batch whose loss or gradient is not finite.
    not_finite: str

    @abstractmethod
    def check(self, x: Tree, t: Hashable, y: Tree) -> None: ...

    @abstractmethod
    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None: ...

    @abstractmethod
    def loss(self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def _widen(self, t: Hashable, y: Tree) -> None: ...

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
        keeps a task's first or last examples and draws none).

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
        if t is None or is_mixed(t):
            raise TypeError(f"t must be one task's descriptor, got {t!r}")
        loss, start, n = None, 0, size(y)
        with self._lock:
            while start < n:
                part = slice(start, start + batch_size)
                costs = self.updates, self.example_gradients
                repeats = self.repeats(t)  # before the step, after which memories may move
                loss = self.observe(take(x, part), t, take(y, part), check=check)
                start += batch_size
                whole = (n - start) // batch_size * batch_size
                if whole > 0 and not check and repeats and self._can_repeat(t):
                    rest = slice(start, start + whole)
                    with uninterrupted(), current_device(self.device):
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
        usual = type(self).observe is Observing.observe
        return self.graphed.can_repeat and plain and alone and usual and self.repeats(t)

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

    def learn_from(self, stream: Iterable[tuple[Tree, ...]], *, progress: bool = True) -> Self:
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
