"""Our recipe: GEM, soft targets, rehearsal, averaged weights, several steps a batch, noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from gradmem.learners.gem import Constraining
from gradmem.learners.softgem import SoftGEM
from gradmem.memory import Policy

__all__ = ["SteadyGEM"]


class SteadyGEM(SoftGEM):
    """Made for the highest accuracy at a given memory: exact GEM, and what goes with it.

    How it compares with other learners at equal memory is measured in the documentation's board.

    1. Constraints are at soft targets, a mixture of an example's label and what the network
       answered when it was stored (`soft`, see `SoftGEM`): an answer says more than a label. With
       few memories it helps to hold the answers' logits as well (`match`).
    2. Remembered examples, those of the current task among them, join each mini-batch
       (`rehearse`): the gradient that is projected is half that of what has just come and half
       that of what is remembered, and batch norm normalises and predicts by statistics of both.
    3. Predictions are made with averages of the weights (`average`): single steps on ten examples
       go astray, in directions that no memory forbids, and an average does not. A task that is long
       past is predicted with a long one, the task at hand with a short one.
    4. Each mini-batch is learned in several gradient steps (`glances`), all of them constrained:
       what would overfit the mini-batch is held by the memories.
    5. A part of each input is hidden while learning (`input_dropout`), at the memories, too: few
       examples, seen often, are not learned by heart.

    Memories are shared out equally among classes (`keep="balanced"`), which counts where there are
    few. Each part is a setting, and without it the others work as they are; what each is worth is
    in the board's ablation. Settings were found on held-out data (`benchmarks/recipe.py`).

    It learns in one process: averaged weights and rehearsing are refused for a network under DDP or
    FSDP2. With `average=None` and `rehearse=0` it takes one, as `GEM` does.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, augment,
    not_finite, seed, graphs
        See `Learner`. The loss is cross-entropy without options. On the board the rate is 0.2 on
        MNIST and 0.05 on CIFAR-100.
    memory, memories, budget, margin_rule, constrain, constraints, sample, augmented, gradients,
    tasks_per_chunk, memory_limit, precision
        See `GEM`.
    temperature, teacher
        See `SoftGEM`.
    margin
        γ ≥ 0 (see `GEM`).
    soft
        Share of the stored answers in the targets of the memories.
    match
        Weight of the mean square of what the logits at the memories have changed by. It helps where
        a task has few memories (the default is for 10 to 25). With hundreds it helps on CIFAR-100,
        with a ResNet-18, and not on MNIST: take 0 there.
    rehearse
        Remembered examples that join each mini-batch (see `GEM`).
    average
        Decay of the averaged weights, or several of them, here for averages 50, 200, 1,000 and
        5,000 steps long; None for none. Each takes as much memory as the network. A task is
        predicted with the one that fits the time since it was last learned (see `Learner`), so
        `predict` should be given t. These suit streams of hundreds to thousands of steps; choose
        lengths from a fraction of a task to the whole stream.
    glances
        Gradient steps per mini-batch.
    input_dropout
        Share of an input's numbers that are zero while learning. For tabular data set
        input_dropout=0; integer inputs such as tokens are never dropped.
    keep
        Which examples are remembered; with another `memory`, that one's own policy counts.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.SteadyGEM(gm.mlp([2, 8, 2]), budget=50)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> learner.predict(torch.randn(3, 2), "first").shape
    torch.Size([3])
    """

    KEEP = "balanced"

    def __init__(  # type: ignore[misc]  # these have other defaults here
        self,
        network: nn.Module,
        *,
        keep: str | Policy = KEEP,
        margin: float = 0.1,
        soft: float = 0.5,
        match: float = 0.5,
        rehearse: int = 50,
        average: float | Sequence[float] | None = (0.98, 0.995, 0.999, 0.9998),
        glances: int = 3,
        input_dropout: float = 0.05,
        temperature: float = 1.0,
        teacher: str = "network",
        **common: Unpack[Constraining],
    ) -> None:
        super().__init__(
            network,
            margin=margin,
            soft=soft,
            match=match,
            rehearse=rehearse,
            temperature=temperature,
            teacher=teacher,
            keep=keep,
            average=average,
            glances=glances,
            input_dropout=input_dropout,
            **common,
        )
