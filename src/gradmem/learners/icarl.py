"""iCaRL: a few well-chosen examples of every class, which classify and are not forgotten."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.gradients import masked
from gradmem.learners.learner import Learner
from gradmem.learners.settings import Common
from gradmem.trees import Tree, concatenate, kind, leaves, size, take, to, tree_map
from gradmem.validation import non_negative, positive_int

__all__ = ["ICaRL"]

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
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, not_finite, seed, graphs
        See `Learner`. An example's features are what goes into the linear layer that comes last as
        the network computes; the outputs, if there is none. All inputs have one shape.
    distillation
        λ ≥ 0, how much the exemplars' answers count beside the new examples.
    budget
        Exemplars in all.
    rehearsed
        Exemplars whose answers are compared in a step, drawn anew in each.
    candidates
        How many of the current task's examples herding can choose from: its last ones. They are
        kept, in addition, until the next task begins.

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

    def __init__(
        self,
        network: nn.Module,
        *,
        distillation: float = 1.0,
        budget: int = 5120,
        rehearsed: int = 32,
        candidates: int = 5000,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        if not self.criterion.is_cross_entropy:
            raise ValueError(
                f"ICaRL is for classes, and its loss cross-entropy; got {self.criterion}"
            )
        self.distillation = non_negative("distillation", distillation)
        self.budget = positive_int("budget", budget)
        self.rehearsed = positive_int("rehearsed", rehearsed)
        self.candidates = positive_int("candidates", candidates)
        self.task: Hashable | None = None
        self.new: list[tuple[Tree, Tensor]] = []  # the current task's last examples
        self.kept: dict[int, Tree] = {}  # class → exemplars, the most telling first
        self.answers: dict[int, Tensor] = {}  # class → what the network gave for them
        self.task_of: dict[int, Hashable] = {}  # class → the task that brought it last
        self._old: _Old | None = None
        self._prototypes: tuple[int, dict[int, Tree], Tensor] | None = None

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        super().check(x, t, y)
        if y.ndim != 1:
            raise ValueError(f"y must be class ids (n,), got {tuple(y.shape)}")
        for known in [*self.kept.values(), *(old for old, _ in self.new)][:1]:
            if kind(known) != kind(x := self.described(x, t)):
                raise ValueError(
                    f"x must be like what was observed before, {kind(known)}, got {kind(x)}"
                )
        self.check_all([t], y.tolist())

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        current = [labels.tolist() for _, labels in self.new]
        self._share(len({*self.kept, *classes, *chain(*current)}))

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        if self.task is not None and t != self.task:
            self.consolidate()

        def step(x: Tree, y: Tree, mask: Tensor | None, *old: Any) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self._distilled_loss(x, t, y, mask, *old) if old else self.loss(x, t, y, mask)
            loss.backward()
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        loss = self.take("any task", t, step, x, y, self.mask(t), *self._drawn())
        self._remember(x, y)
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
        # clones: they would be views of more
        self.kept = {y: tree_map(Tensor.clone, x) for y, x in self.exemplars().items()}
        logits, _ = self._features(concatenate([*self.kept.values()]))
        sizes = [size(x) for x in self.kept.values()]
        self.answers = dict(zip(self.kept, logits.split(sizes), strict=True))
        self.new, self._old = [], None

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
            exemplars, candidates = dict(self.kept), self._candidates()
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
        share = self.budget // max(1, n_classes)
        if share < 1:
            raise ValueError(
                f"budget must allow one exemplar for each of {n_classes} classes, got {self.budget}"
            )
        return share

    def _remember(self, x: Tree, y: Tensor) -> None:
        self.new.append((tree_map(Tensor.clone, x), y.clone()))  # parts of something larger
        n = sum(len(labels) for _, labels in self.new)
        while n - len(self.new[0][1]) >= self.candidates:
            n -= len(self.new.pop(0)[1])

    def _candidates(self) -> dict[int, Tree]:
        """The current task's examples by class, each once however often it was observed."""
        if not self.new:
            return {}
        last = slice(-self.candidates, None)
        x, y = (take(concatenate(parts), last) for parts in zip(*self.new, strict=True))
        return {one: distinct(take(x, y == one)) for one in y.unique().tolist()}

    def _drawn(self) -> Sequence[Tree | None]:
        """Some exemplars of earlier tasks, from a class as often as from any other."""
        if not self.kept or not self.distillation:
            return ()
        if self._old is None:
            counts = torch.tensor([size(x) for x in self.kept.values()])
            tasks = [self.task_of[y] for y in self.kept]
            self._old = _Old(
                x=concatenate([*self.kept.values()]),
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
        seen: dict[int, Tensor] = {}
        parts: list[Tensor] = []

        def note(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            seen[len(parts)] = given[0]  # of several layers in a pass, the last one's

        linear = [part for part in self.network.modules() if isinstance(part, nn.Linear)]
        hooks = [part.register_forward_hook(note) for part in linear]
        try:
            for start in range(0, size(x), BATCH):
                parts.append(self.evaluated(take(x, slice(start, start + BATCH)), self.task))
        finally:
            for hook in hooks:
                hook.remove()
        logits = torch.cat(parts)
        features = torch.cat([*seen.values()]) if seen else logits
        return logits, F.normalize(features.flatten(1), dim=1)

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """What the network gave for exemplars has no value for outputs that came later."""
        few = [take(x, slice(2)) for x in self.kept.values()][:1]
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
            "kept": self.kept,
            "answers": self.answers,
            "new": self.new,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.task, self.task_of = state["task"], dict(state["task_of"])
        self.kept = {y: to(x, self.device) for y, x in state["kept"].items()}
        self.answers = {y: x.to(self.device) for y, x in state["answers"].items()}
        self.new = [(to(x, self.device), y.to(self.device)) for x, y in state["new"]]
        self._old = self._prototypes = None


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
