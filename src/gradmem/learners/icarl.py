"""iCaRL: a few well-chosen examples of every class, which classify and are not forgotten."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.learners.learner import Learner
from gradmem.memory.stack import masked
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
    network, lr, seed, graphs
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
    ...     learner.observe(torch.randn(20, 2), t, 2 * t + torch.arange(20) % 2)
    >>> {y: len(x) for y, x in learner.exemplars().items()}
    {0: 3, 1: 3, 2: 3, 3: 3}

    References
    ----------
    Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.1,
        distillation: float = 1.0,
        budget: int = 5120,
        rehearsed: int = 32,
        candidates: int = 5000,
        seed: int = 0,
        graphs: bool = True,
    ) -> None:
        super().__init__(network, lr, seed, graphs)
        self.distillation = non_negative("distillation", distillation)
        self.budget = positive_int("budget", budget)
        self.rehearsed = positive_int("rehearsed", rehearsed)
        self.candidates = positive_int("candidates", candidates)
        self.task: Hashable | None = None
        self.new: list[tuple[Tensor, Tensor]] = []  # the current task's last examples
        self.kept: dict[int, Tensor] = {}  # class → exemplars, the most telling first
        self.answers: dict[int, Tensor] = {}  # class → what the network gave for them
        self.task_of: dict[int, Hashable] = {}  # class → the task that brought it last
        self._old: _Old | None = None
        self._prototypes: tuple[int, dict[int, Tensor], Tensor] | None = None

    def check(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        super().check(x, t, y)
        for known in [*self.kept.values(), *(old for old, _ in self.new)][:1]:
            if (known.shape[1:], known.dtype) != (x.shape[1:], x.dtype):
                raise ValueError(
                    f"x must be like what was observed before, {tuple(known.shape[1:])} and "
                    f"{known.dtype} each, got {tuple(x.shape[1:])} and {x.dtype}"
                )

    def check_labels(self, t: Hashable, y: Tensor) -> None:
        super().check_labels(t, y)
        self.check_all([t], y.tolist())

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        current = [labels.tolist() for _, labels in self.new]
        self._share(len({*self.kept, *classes, *chain(*current)}))

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        if self.task is not None and t != self.task:
            self.consolidate()

        def step(x: Tensor, y: Tensor, mask: Tensor | None, *old: Any) -> None:
            self.optimiser.zero_grad()
            self._loss(x, y, mask, *old).backward()
            self.optimiser.step()

        self.take("any task", step, x, y, self.mask(t), *self._drawn())
        self._remember(x, y)
        self.task = t

    def _loss(self, x: Tensor, y: Tensor, mask: Tensor | None, *old: Any) -> Tensor:
        """The loss at new examples, and of earlier tasks the mean divergence of answers, summed up.

        `old` are exemplars, what the network once gave for them, which outputs that concerns, and
        the number of their tasks.
        """
        if not old:
            loss = F.cross_entropy(masked(self.network(x), mask), y)
        else:
            old_x, answers, masks, share = old
            new, again = self.network(torch.cat([x, old_x])).split([len(x), len(old_x)])
            loss = F.cross_entropy(masked(new, mask), y)
            before, now = (masked(z, masks).log_softmax(1) for z in (answers, again))
            change = (before - now).masked_fill(before.isinf(), 0.0)  # masked outputs: ∞ − ∞
            divergence = (before.exp() * change).sum(1)
            loss = loss + self.distillation * share * divergence.mean()
        self.require_finite(loss.detach())
        return loss

    @torch.no_grad()
    def consolidate(self) -> None:
        """The task is over: its classes leave exemplars, and the network's answers are noted."""
        self.task_of = self.task_of | dict.fromkeys(self._candidates(), self.task)
        self.kept = {y: x.clone() for y, x in self.exemplars().items()}  # not views of more
        logits, _ = self._features(torch.cat([*self.kept.values()]))
        sizes = [len(x) for x in self.kept.values()]
        self.answers = dict(zip(self.kept, logits.split(sizes), strict=True))
        self.new, self._old = [], None

    def exemplars(self) -> Mapping[int, Tensor]:
        """Class → exemplars, (n, …), as they would be kept if the current task were over."""
        return self._known()[0]

    def scores(self, x: Tensor, t: Hashable | None) -> Tensor:
        """Minus the distance to each class's mean; the network's own scores where there is none."""
        exemplars, means = self._known()
        logits, features = self._features(x)
        own = self.outputs.get(t, range(logits.shape[1])) if t is not None else [*exemplars]
        places = [i for i, y in enumerate(exemplars) if y in own]
        if not places:
            return masked(logits, self.mask(t))
        scores = torch.full_like(logits, float("-inf"))
        scores[:, [y for y in exemplars if y in own]] = -torch.cdist(features, means[places])
        return scores

    @torch.no_grad()
    def _known(self) -> tuple[dict[int, Tensor], Tensor]:
        """Exemplars of every class seen so far and their mean features, until the next step."""
        if self._prototypes is None or self._prototypes[0] != self.steps:
            exemplars, candidates = dict(self.kept), self._candidates()
            m = self._share(len({*exemplars, *candidates}))
            for y, x in candidates.items():
                if y in exemplars:  # a class that came back
                    candidates[y] = distinct(torch.cat([exemplars[y], x]))
            for y, features in self._features_of(candidates).items():
                exemplars[y] = candidates[y][herd(features, m)]
            exemplars = {y: x[:m] for y, x in exemplars.items()}
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

    def _remember(self, x: Tensor, y: Tensor) -> None:
        self.new.append((x.clone(), y.clone()))  # they may be parts of something larger
        n = sum(len(labels) for _, labels in self.new)
        while n - len(self.new[0][1]) >= self.candidates:
            n -= len(self.new.pop(0)[1])

    def _candidates(self) -> dict[int, Tensor]:
        """The current task's examples by class, each once however often it was observed."""
        if not self.new:
            return {}
        x, y = (torch.cat(parts)[-self.candidates :] for parts in zip(*self.new, strict=True))
        return {one: distinct(x[y == one]) for one in y.unique().tolist()}

    def _drawn(self) -> Sequence[Tensor | None]:
        """Some exemplars of earlier tasks, from a class as often as from any other."""
        if not self.kept or not self.distillation:
            return ()
        if self._old is None:
            counts = torch.tensor([len(x) for x in self.kept.values()])
            tasks = [self.task_of[y] for y in self.kept]
            self._old = _Old(
                x=torch.cat([*self.kept.values()]),
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
        return old.x[of_all], old.answers[of_all], masks, old.share

    def _features_of(self, examples: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Class → features of its examples."""
        if not examples:
            return {}
        _, features = self._features(torch.cat([*examples.values()]))
        parts = features.split([len(x) for x in examples.values()])
        return dict(zip(examples, parts, strict=True))

    def _features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and features of length one, in evaluation mode."""
        seen: dict[int, Tensor] = {}
        parts: list[Tensor] = []

        def note(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            seen[len(parts)] = given[0]  # of several layers in a pass, the last one's

        linear = [part for part in self.network.modules() if isinstance(part, nn.Linear)]
        hooks = [part.register_forward_hook(note) for part in linear]
        try:
            for some in x.split(BATCH):
                parts.append(self.evaluated(some, self.task))
        finally:
            for hook in hooks:
                hook.remove()
        logits = torch.cat(parts)
        features = torch.cat([*seen.values()]) if seen else logits
        return logits, F.normalize(features.flatten(1), dim=1)

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
        self.kept = {y: x.to(self.device) for y, x in state["kept"].items()}
        self.answers = {y: x.to(self.device) for y, x in state["answers"].items()}
        self.new = [(x.to(self.device), y.to(self.device)) for x, y in state["new"]]
        self._old = self._prototypes = None


@dataclass
class _Old:
    """Exemplars of all earlier tasks in one row, with what the loss asks for."""

    x: Tensor
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


def distinct(x: Tensor) -> Tensor:
    """The rows of x: (n, …) that differ, in the order in which they first come."""
    rows = x.flatten(1) + 0  # −0 is 0
    seed = torch.Generator().manual_seed(0)
    direction = torch.rand(rows.shape[1], dtype=torch.float64, generator=seed).to(x.device)
    # Equal rows have equal products: if none are equal, which is usual, that is quickly known.
    if len((rows * direction).sum(1).unique()) == len(x):
        return x
    values = rows.contiguous().view(torch.uint8).cpu().numpy()
    _, first = np.unique(values.view(f"V{values.shape[1]}"), return_index=True)
    return x[np.sort(first).tolist()]
