"""Gradient episodic memory: no step may raise the loss at what is remembered (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradmem.constraints import Constraints
from gradmem.learners.learner import Learner
from gradmem.learners.objectives import objective_of
from gradmem.learners.settings import Common
from gradmem.memory import EpisodicMemory, Policy, memory_of
from gradmem.trees import Tree, concatenate, size
from gradmem.validation import non_negative_int, one_of

__all__ = ["GEM", "Constraining"]

#: Which examples are changed by `augment` and `input_dropout`.
AUGMENTED = ("all", "memories")


class Constraining(Common, total=False):
    """What GEM can be given by keyword."""

    memory: EpisodicMemory | None
    memories: int
    budget: int | None
    keep: str | Policy
    margin: float
    margin_rule: str
    constrain: str
    constraints: int | None
    sample: int | None
    rehearse: int
    augmented: str
    gradients: str
    tasks_per_chunk: int | None
    memory_limit: int | None
    precision: str


class GEM(Learner):
    """A single predictor; a step against a remembered task is projected before it is taken.

    Every observed task but the current one is a constraint, also when the current one comes back.

    With margin 0 or the rule "floor" no remembered loss rises, to first order, and so for a small
    rate. The default, margin 0.5 with the rule "shift", adds γ to all of the dual's solution: that
    pushes towards lowering old losses, and can let one of them rise a little. With another
    optimizer than plain SGD the promise holds with `constrain="update"`. With batch norm it is
    about the network as it learns, normalising each task's memories by themselves; the running
    statistics that predictions use move with every pass (but see `rehearse`). A task's inputs have
    one shape.

    With a network that is wrapped by DDP or sharded by FSDP2, every process observes its own part
    of each batch and remembers its own part of the memories (see the guide "Several GPUs and
    machines").

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.
    memory
        An `EpisodicMemory`, in place of `memories`, `budget` and `keep`.
    memories
        Examples remembered per task.
    budget
        Examples remembered in all, shared equally by the tasks seen so far; replaces `memories`.
    keep
        Which examples are remembered: a task's "last", or another policy of `EpisodicMemory`.
    margin
        γ ≥ 0, the paper's memory strength (see `project`).
    margin_rule
        "shift" or "floor" (see `project`).
    constrain
        "gradient" (the paper's) or "update": what is projected (see `GradientMemory`).
    constraints
        Most constraints of a step, for very many tasks; None, the exact choice, for all of them. 0
        for none: what is left is replay, if memories are rehearsed.
    sample
        Memories of each past task that its gradient is taken at, drawn anew in each step; None, as
        in the paper, for all of them. A step then computes that many for each task, however many
        are remembered, and the constraints are about the loss at these. (Of memories on another
        device than the network all are still copied to it.) For one process.
    rehearse
        Remembered examples, of all tasks and the current one alike, that join the mini-batch in
        each step, drawn anew; 0 in the paper. The gradient that is projected is then the mean of
        the mini-batch's and of theirs, however many they are. A task's first mini-batch is learned
        alone. Running statistics of batch norm, which predictions use, are then those of mini-batch
        and rehearsed examples together: passes for the constraints do not move them. For one
        process.
    augmented
        Which examples `augment` and `input_dropout` change: "all", or "memories" only, which are
        seen time and again; the mini-batch is then learned as it came. For one process.
    gradients, tasks_per_chunk, memory_limit, precision
        How the gradients at the memories are computed, bounds on the memory that takes, and their
        precision (see `MemoryGradients`). All ways are exact in "fp32"; `learner.gradients` says
        which is in use.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.GEM(gm.mlp([2, 8, 2]), lr=0.1, memories=5)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> x, y = learner.memory["first"]
    >>> x.shape, y.shape
    (torch.Size([5, 2]), torch.Size([5]))

    References
    ----------
    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NIPS 2017.
    """

    distributes = True
    #: Which examples are remembered where nothing is said.
    KEEP = "last"

    def __init__(
        self,
        network: nn.Module,
        *,
        memory: EpisodicMemory | None = None,
        memories: int = 256,
        budget: int | None = None,
        keep: str | Policy = "last",
        margin: float = 0.5,
        margin_rule: str = "shift",
        constrain: str = "gradient",
        constraints: int | None = None,
        sample: int | None = None,
        rehearse: int = 0,
        augmented: str = "all",
        gradients: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        seed = common.get("seed", 0)
        self.memory = memory_of(memory, memories, budget, keep, default=self.KEEP, seed=seed)
        self.rehearse = non_negative_int("rehearse", rehearse)
        self.augmented = one_of("augmented", augmented, AUGMENTED)
        objective = replace(
            objective_of(self),
            moves_statistics=not self.rehearse,
            changes_batches=augmented == "all",
        )
        self.constraints = Constraints(
            objective,
            self.memory,
            self.processes,
            margin=margin,
            margin_rule=margin_rule,
            constrain=constrain,
            constraints=constraints,
            sample=sample,
            gradients=gradients,
            tasks_per_chunk=tasks_per_chunk,
            memory_limit=memory_limit,
            precision=precision,
        )
        if self.processes is not None:
            self._require_one_kind("for several processes")
        if self.has_own_loss:  # it is given one task's examples, all alike
            self._require_one_kind("with a loss of one's own")
        self.graphed.use_less_memory = self.constraints.engine.use_less_memory

    def _require_one_kind(self, where: str) -> None:
        if self.rehearse:
            raise ValueError(f"rehearse must be 0 {where}, got {self.rehearse!r}")
        if self.augmented != "all":
            raise ValueError(f'augmented must be "all" {where}, got {self.augmented!r}')

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        self.memory.check(x, t, y)
        past = self.constraints.others(t, self.masks, size(x))
        selects = self.constraints.selects(past)

        def step(x: Tree, y: Tree, mask: Tensor | None, *given: Tree) -> tuple[Any, ...]:
            held, some = self.constraints.held(past, given)
            first = size(x) if some else None
            x, y, mask = _joined(x, y, mask, some)
            chosen, G, g, loss = self.constraints.with_batch(held, x, t, y, mask, first)
            if selects:  # which differs from step to step: no graph repeats it
                self.count(1, size(x) + self.constraints.examples_in(chosen))
            self.require_finite(loss, g)
            self.constraints.set_gradient(g)
            may_fail_late = not (g.is_cuda and isinstance(G, Tensor))
            if chosen and self.constraints.constrain == "update" and may_fail_late:
                self.note_step(self.optimizer)
            with self.constraints.constrained(chosen, G, g):  # equation 12
                self.descend(loss, self.optimizer)
            return loss, held, G, g

        def memories() -> Sequence[Tree]:
            drawn, some = self.constraints.draw(past), self.rehearsed(t)
            if not selects:
                n = size(x) + sum(map(size, some[:1]))
                self.count(1, n + self.constraints.examples_in(past))
            return [*drawn, *some]

        if self.constraints.differs(past):
            self.graphed.enabled = False  # what is computed differs from step to step
        # On a GPU, a graph per place and number of memories; elsewhere, the step as it stands.
        places = self.constraints.places(past)
        loss = self.take(places, t, step, x, y, self.mask(t), draw=memories)
        self.remember(x, t, y)  # at the end: what could not be learned is not remembered
        return loss

    def rehearsed(self, t: Hashable) -> Sequence[Tree]:
        """Some memories of all tasks whose examples are of task t's kind: x, y, masks if any."""
        if not self.rehearse or t not in self.memory:
            return ()
        found = self.memory.sample(self.memory.like(t), self.rehearse, self.masks)
        return found[0] if found else ()

    def remember(self, x: Tree, t: Hashable, y: Tree) -> None:
        self.memory.put(x, t, self.remembered(x, t, y), self.mask(t))

    def repeats(self, t: Hashable) -> bool:
        names = ("learn", "rehearsed", "remember", "remembered")
        same = all(getattr(type(self), name) is getattr(GEM, name) for name in names)
        drawn = self.rehearse or self.constraints.sample is not None
        return same and not drawn and self.memory.takes_many(t)

    def remembered(self, x: Tree, t: Hashable, y: Tree) -> Tree:
        """What is remembered as y of a mini-batch, of y's kind, after the step on it."""
        return y

    def own_parts(self) -> Sequence[object]:
        own = self.constraints
        lists = () if own.shortlist is None else (own.shortlist,)
        return own, own.engine, own.project, *lists

    @property
    def gradients(self) -> str:
        """The way gradients at the memories are computed, such as "chain"; "auto" until chosen."""
        return self.constraints.engine.method or "auto"

    def statistics(self) -> dict[str, Any]:
        engine = self.constraints.engine
        computed = {"gradients": self.gradients, "precision": engine.precision}
        return super().statistics() | self.constraints.project.counts() | computed

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        self.constraints.follow_model()

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | self.constraints.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.constraints.load_state_dict(state)


def _joined(
    x: Tree, y: Tree, mask: Tensor | None, others: Sequence[Tree]
) -> tuple[Tree, Tree, Tensor | None]:
    """A mini-batch with what joins it: x, y, and masks where tasks have outputs of their own."""
    if not others:
        return x, y, mask
    n, masks = size(x), others[2:]
    x, y = (concatenate(pair) for pair in zip((x, y), others[:2], strict=True))
    if masks:
        own = torch.ones_like(masks[0][0]) if mask is None else mask
        mask = torch.cat([own.expand(n, -1), masks[0]])
    return x, y, mask
