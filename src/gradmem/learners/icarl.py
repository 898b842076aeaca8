"""iCaRL: a few well-chosen examples of every class, which classify and are not forgotten."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.gradients import masked, with_last_inputs
from gradmem.learners.learner import Learner
from gradmem.learners.settings import Common
from gradmem.memory import EpisodicMemory
from gradmem.trees import Tree, concatenate, kind, leaves, size, take
from gradmem.validation import non_negative, positive_int

__all__ = ["ICaRL"]

#: Exemplars in all, if nothing is said.
BUDGET = 5120
#: Images that go through the network at once where nothing is learned.
BATCH = 2000


class ICaRL(Learner):
    """An incremental classifier that keeps exemplars of every class.

    It learns a task as a single predictor does, while the network's answers to the exemplars of
    earlier classes are held to what they were when the task began (distillation). When another
    task begins, each class of the last one leaves the exemplars whose mean is closest to that of
    all its examples (herding), and the earlier ones give up their last for them: the memory is
    shared equally by the classes seen so far. What is predicted is the class whose exemplars'
    features are closest in the mean.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. An example's features are what goes into the linear layer that comes last as
        the network computes; the outputs, if there is none. All inputs have one shape.
    distillation
        λ ≥ 0, how much the exemplars' answers count beside the new examples.
    budget
        Exemplars in all.
    memory
        An `EpisodicMemory` for the exemplars, in place of `budget`: a row per class, with
        keep="first", since exemplars come in the order of what they tell.
    rehearsed
        Exemplars whose answers are compared in a step, drawn anew in each.
    candidates
        How many of the current task's examples herding can choose from: its last ones. They are
        kept, in addition, until the next task begins.

    Attributes
    ----------
    memory
        Class → exemplars of the tasks that are over, the most telling first.
    current
        The current task's last examples.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.ICaRL(gm.mlp([2, 8, 4]), budget=12)
    >>> for t in range(2):
    ...     loss = learner.observe(torch.randn(20, 2), t, 2 * t + torch.arange(20) % 2)
    >>> {y: len(x) for y, x in learner.exemplars().items()}
    {0: 3, 1: 3, 2: 3, 3: 3}

    References
    ----------
    Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017.
    """

    averages_by_task = False  # features of all classes are compared

    def __init__(
        self,
        network: nn.Module,
        *,
        distillation: float = 1.0,
        budget: int = BUDGET,
        memory: EpisodicMemory | None = None,
        rehearsed: int = 32,
        candidates: int = 5000,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        if not self.criterion.is_cross_entropy:
            raise ValueError(
                f"ICaRL is for classes, and its loss cross-entropy; got {self.criterion.name}"
            )
        self.distillation = non_negative("distillation", distillation)
        self.memory = _exemplar_memory(memory, budget)
        self.rehearsed = positive_int("rehearsed", rehearsed)
        self.current = EpisodicMemory(budget=positive_int("candidates", candidates))
        self.task: Hashable | None = None
        self.answers: dict[int, Tensor] = {}  # class → what the network gave for them
        self.task_of: dict[int, Hashable] = {}  # class → the task that brought it last
        self._old: _Old | None = None
        self._prototypes: tuple[int, dict[int, Tree], Tensor] | None = None

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        super().check(x, t, y)
        if y.ndim != 1:
            raise ValueError(f"y must be class ids (n,), got {tuple(y.shape)}")
        x = self.described(x, t)
        for known, _ in (*self.memory.kinds, *self.current.kinds):
            if known != kind(x):
                raise ValueError(f"x must be like what was observed before, {known}, got {kind(x)}")
        self.check_all([t], y.tolist())

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        current = self.current.labels(self.task).tolist() if self.task in self.current else ()
        self._share(len({*self.memory, *classes, *current}))

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        if self.task is not None and t != self.task:
            self.consolidate()

        def step(x: Tree, y: Tree, mask: Tensor | None, *old: Any) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self._distilled_loss(x, t, y, mask, *old) if old else self.loss(x, t, y, mask)
            loss.backward()
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        def rehearsed() -> Sequence[Tree | None]:
            old = self._drawn()
            self.count(1, size(x) + (self.rehearsed if old else 0))
            return old

        loss = self.take("any task", t, step, x, y, self.mask(t), draw=rehearsed)
        self.current.put(x, t, y)
        self.task = t
        return loss

    def _distilled_loss(
        self,
        x: Tree,
        t: Hashable,
        y: Tree,
        mask: Tensor | None,
        old_x: Tree,
        answers: Tensor,
        masks: Tensor | None,
        share: Tensor,
    ) -> Tensor:
        """The loss at new examples, and of earlier tasks the mean divergence of answers, summed up.

        `old_x` are exemplars, `answers` what the network once gave for them, `masks` which outputs
        that concerns, and `share` the number of their tasks.
        """
        if self.has_own_loss:
            loss, again = self.loss(x, t, y, mask), self.passes(self.network, old_x)
        else:
            outputs: Tensor = self.passes(self.network, concatenate([x, old_x]))
            new, again = outputs.split([size(x), size(old_x)])
            loss = self.criterion.mean(new, y, mask)
        before, now = (masked(z, masks).log_softmax(1) for z in (answers, again))
        change = (before - now).masked_fill(before.isinf(), 0.0)  # masked outputs: ∞ − ∞
        divergence = (before.exp() * change).sum(1)
        total: Tensor = loss + self.distillation * share * divergence.mean()
        return total

    @torch.no_grad()
    def consolidate(self) -> None:
        """The task is over: its classes leave exemplars, and the network's answers are noted."""
        self.task_of = self.task_of | dict.fromkeys(self._candidates(), self.task)
        exemplars = self.exemplars()
        # New memories, not the old ones changed: they are put back if the next step cannot be made.
        self.memory = self.memory.holding(
            {y: (x, torch.full((size(x),), y, device=self.device)) for y, x in exemplars.items()}
        )
        self.current = self.current.holding({})
        logits, _ = self._features(concatenate([*exemplars.values()]))
        if logits.isnan().any():
            raise FloatingPointError(f"the outputs for task {self.task!r}'s exemplars are NaN")
        sizes = [size(x) for x in exemplars.values()]
        self.answers = dict(zip(exemplars, logits.split(sizes), strict=True))
        self._old = None

    @property
    def kept(self) -> dict[int, Tree]:
        """Class → exemplars of the tasks that are over, the most telling first; copies."""
        return {y: self.memory[y][0] for y in self.answers}

    def exemplars(self) -> Mapping[int, Tree]:
        """Class → exemplars, (n, …), as they would be kept if the current task were over."""
        return self._known()[0]

    def scores(self, x: Tree, t: Hashable | None) -> Tensor:
        """Minus the distance to each class's mean; the network's own scores where there is none."""
        exemplars, means = self._known()
        logits, features = self._features(x)
        own = self.outputs.get(t, range(logits.shape[1])) if t is not None else [*exemplars]
        places = [i for i, y in enumerate(exemplars) if y in own]
        if not places:
            own_logits: Tensor = masked(logits, self.mask(t))
            return own_logits
        scores = torch.full_like(logits, float("-inf"))
        scores[:, [y for y in exemplars if y in own]] = -torch.cdist(features, means[places])
        return scores

    @torch.no_grad()
    def _known(self) -> tuple[dict[int, Tree], Tensor]:
        """Exemplars of every class seen so far and their mean features, until the next step."""
        if self._prototypes is None or self._prototypes[0] != self.steps:
            exemplars, candidates = self.kept, self._candidates()
            m = self._share(len({*exemplars, *candidates}))
            for y, x in candidates.items():
                if y in exemplars:  # a class that came back
                    candidates[y] = distinct(concatenate([exemplars[y], x]))
            for y, features in self._features_of(candidates).items():
                exemplars[y] = take(candidates[y], herd(features, m))
            exemplars = {y: take(x, slice(m)) for y, x in exemplars.items()}
            means = [own.mean(0) for own in self._features_of(exemplars).values()]
            together = F.normalize(torch.stack(means), dim=1) if means else torch.empty(0)
            self._prototypes = self.steps, exemplars, together
        return self._prototypes[1], self._prototypes[2]

    def _share(self, n_classes: int) -> int:
        """Exemplars that each of `n_classes` classes may keep."""
        most = self.memory.most_rows
        if most is not None and n_classes > most:
            raise ValueError(
                f"budget must allow one exemplar for each of {n_classes} classes, got {most}"
            )
        return self.memory.share(n_classes)

    def _candidates(self) -> dict[int, Tree]:
        """The current task's examples by class, each once however often it was observed."""
        if self.task not in self.current:
            return {}
        x, y = self.current[self.task]
        return {one: distinct(take(x, y == one)) for one in y.unique().tolist()}

    def _drawn(self) -> Sequence[Tree | None]:
        """Some exemplars of earlier tasks, from a class as often as from any other."""
        if not self.answers or not self.distillation:
            return ()
        if self._old is None:
            kept = self.kept
            counts = torch.tensor([size(x) for x in kept.values()])
            tasks = [self.task_of[y] for y in kept]
            self._old = _Old(
                x=concatenate([*kept.values()]),
                answers=torch.cat([*self.answers.values()]),
                masks=self.masks(tasks),
                share=torch.tensor(float(len({*tasks})), device=self.device),
                counts=counts,
                starts=counts.cumsum(0) - counts,
            )
        old = self._old
        classes = torch.randint(len(old.counts), (self.rehearsed,))
        places = old.starts[classes] + (torch.rand(len(classes)) * old.counts[classes]).long()
        drawn = torch.stack([classes, places])
        if self.device.type == "cuda":
            drawn = drawn.pin_memory()  # or the copy would wait for the GPU
        of_class, of_all = drawn.to(self.device, non_blocking=True)
        masks = None if old.masks is None else old.masks[of_class]
        return take(old.x, of_all), old.answers[of_all], masks, old.share

    def _features_of(self, examples: Mapping[int, Tree]) -> dict[int, Tensor]:
        """Class → features of its examples."""
        if not examples:
            return {}
        _, features = self._features(concatenate([*examples.values()]))
        parts = features.split([size(x) for x in examples.values()])
        return dict(zip(examples, parts, strict=True))

    def _features(self, x: Tree) -> tuple[Tensor, Tensor]:
        """Logits, and features of length one, in evaluation mode."""
        batches = (take(x, slice(start, start + BATCH)) for start in range(0, size(x), BATCH))
        ask = partial(self.evaluated, t=self.task)
        found = [with_last_inputs(self.network, partial(ask, batch)) for batch in batches]
        logits, features = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logits, F.normalize(features.flatten(1), dim=1)

    def statistics(self) -> dict[str, Any]:
        answers = sum(own.numel() * own.element_size() for own in self.answers.values())
        return super().statistics() | {
            "memory_bytes": self.memory.bytes + self.current.bytes + answers
        }

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """What the network gave for exemplars has no value for outputs that came later."""
        few = [take(self.memory[y][0], slice(2)) for y in islice(self.memory, 1)]
        for n in [self.evaluated(x, self.task).shape[1] for x in few]:
            self.answers = {
                y: F.pad(old, (0, max(0, n - old.shape[1])), value=float("-inf"))
                for y, old in self.answers.items()
            }
        self._old = self._prototypes = None

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {
            "task": self.task,
            "task_of": self.task_of,
            "memory": self.memory.state_dict(),
            "answers": self.answers,
            "current": self.current.state_dict(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.task, self.task_of = state["task"], dict(state["task_of"])
        self.memory.load_state_dict(state["memory"], self.device)
        self.current.load_state_dict(state["current"], self.device)
        self.answers = {y: x.to(self.device) for y, x in state["answers"].items()}
        for y in self.answers:
            if y not in self.task_of or y not in self.memory:
                raise ValueError(f"class {y!r} must have a task and exemplars as it has answers")
        self._old = self._prototypes = None


def _exemplar_memory(memory: EpisodicMemory | None, budget: int) -> EpisodicMemory:
    """The memory of exemplars that was given, or one with this budget; not both."""
    if memory is None:
        return EpisodicMemory(budget=budget, keep="first")
    if not isinstance(memory, EpisodicMemory) or memory.policy.name != "first":
        raise ValueError(
            'memory must be an EpisodicMemory(…, keep="first"): herding chooses, and a class that '
            f"gives up exemplars keeps its first; got {memory!r}"
        )
    if budget != BUDGET:
        raise ValueError("memory has limits of its own: budget goes without it")
    return memory


@dataclass
class _Old:
    """Exemplars of all earlier tasks in one row, with what the loss asks for."""

    x: Tree
    answers: Tensor
    masks: Tensor | None  # of each class
    share: Tensor  # how many tasks they are of
    counts: Tensor  # of each class
    starts: Tensor


def herd(features: Tensor, m: int) -> list[int]:
    """Positions of m of the features (n, d), each bringing their mean closest to that of all."""
    F = features.double().cpu().numpy()
    inner = F @ F.T
    to_mean, to_chosen = inner.mean(1), np.zeros(len(F))
    cost = inner.diagonal().copy()
    chosen: list[int] = []
    for i in range(1, min(m, len(F)) + 1):
        # |mean − (Σ chosen + f) / i|², times i², without what is the same for all f
        best = int((cost + 2 * to_chosen - 2 * i * to_mean).argmin())
        to_chosen += inner[best]
        cost[best] = np.inf
        chosen.append(best)
    return chosen


def distinct(x: Tree) -> Tree:
    """The examples of x: (n, …) that differ, in the order in which they first come."""
    parts = [leaf.flatten(1) + 0 for leaf in leaves(x)]  # −0 is 0
    seed = torch.Generator().manual_seed(0)
    products = torch.zeros(size(x), dtype=torch.float64, device=parts[0].device)
    for part in parts:
        direction = torch.rand(part.shape[1], dtype=torch.float64, generator=seed)
        products += (part * direction.to(part.device)).sum(1)
    # Equal rows have equal products: if none are equal, which is usual, that is quickly known.
    if len(products.unique()) == size(x):
        return x
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    values = rows.cpu().numpy()
    _, first = np.unique(values.view(f"V{values.shape[1]}"), return_index=True)
    return take(x, np.sort(first).tolist())
