"""What every learner answers: `observe`, `predict`, and its whole state in a dictionary."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradmem.cuda.devices import current_device
from gradmem.cuda.graphs import GraphedSteps, Step
from gradmem.gradients import parameters
from gradmem.memory.stack import masked
from gradmem.validation import class_ids, descriptor, non_negative_int, positive

__all__ = ["Learner"]


class Learner(ABC):
    """A predictor f(x, t) that learns from triplets (x, t, y) as they come.

    A learner's own file says how it learns, in `learn`; here is what all of them share: checking
    what they are given, predicting, and saving. A learner stays as it was when it is given
    something wrong.

    Parameters
    ----------
    network
        Any module that gives logits, (n, classes). It is trained in place and in the mode (train
        or eval) that its modules are in. The parameters that require gradients now are those that
        learn.
    lr
        Learning rate of plain SGD; to change it later, change it in the optimisers that
        `optimisers_in_use` gives.
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
    """

    #: Whether all tasks share their outputs, so that `predict(x)` works without a descriptor.
    shares_outputs = True

    def __init__(
        self, network: nn.Module, lr: float = 0.1, seed: int = 0, graphs: bool = True
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module, got {network!r}")
        if not parameters(network):
            raise ValueError("network has no parameter that learns (requires_grad)")
        self.network = network
        self._learning = [w.requires_grad for w in network.parameters()]
        self.lr = positive("lr", lr)
        self.optimiser = self.new_optimiser(network)
        self.steps = 0
        self.examples = 0
        if non_negative_int("seed", seed) >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {seed}")
        self._randomness = torch.Generator().manual_seed(seed).get_state()
        self._accepted: set[tuple[Any, ...]] = set()  # kinds of inputs
        self._n_outputs: dict[Hashable | None, int] = {}
        self.outputs: dict[Hashable, Sequence[int]] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._watched = torch.zeros((), device=self.device)
        self._has_buffers = any(True for _ in network.buffers())
        self._noted: list[tuple[Tensor, Tensor]] = []
        #: Whether the network draws random numbers as it learns, as far as one can see.
        self.is_random = any(isinstance(part, _DropoutNd) for part in network.modules())
        self.graphed = GraphedSteps(graphs and not self.is_random)

    @abstractmethod
    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        """Learn from one checked mini-batch."""

    def observe(self, x: Tensor, t: Hashable, y: Tensor, check: bool = True) -> None:
        """Learn from a mini-batch of task t.

        Parameters
        ----------
        x
            (n, …) finite inputs, n ≥ 1.
        t
            The task's descriptor: any hashable value.
        y
            (n,) class ids.
        check
            False skips the look at x and y, for data that was looked at before: on a GPU, looking
            means waiting for it. What comes first of a task is looked at in any case.
        """
        if check or t not in self._n_outputs:
            self.check(x, t, y)
        with current_device(self.device), self._undone_by_errors(t), self.own_randomness():
            self.learn(x.detach(), t, y.long())
        self.steps += 1
        self.examples += len(x)

    def check(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        """Raise ValueError or TypeError if `observe` cannot take this."""
        descriptor(t)
        if [w.requires_grad for w in self.network.parameters()] != self._learning:
            raise ValueError(
                "requires_grad of the network's parameters must stay as it was when the learner "
                "was made: make another learner for it"
            )
        self._check_inputs(x, t)
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor, got {type(y).__name__}")
        if y.shape != x.shape[:1]:
            raise ValueError(f"y must have shape ({len(x)},) as x has, got {tuple(y.shape)}")
        if y.device != x.device:
            raise ValueError(f"y must be on x's device {x.device}, got {y.device}")
        self.check_labels(t, y)
        if len(x) == 1:
            self._check_single(x, t)

    def check_test(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        """Raise ValueError or TypeError if x cannot be predicted, or y not be right."""
        descriptor(t)
        self._check_inputs(x, t)
        self.check_labels(t, y)

    def check_labels(self, t: Hashable, y: Tensor) -> None:
        """Raise ValueError or TypeError if y: (n,) are no classes; x was checked before."""
        if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
            raise TypeError(f"y must hold class ids as whole numbers, got {y.dtype}")
        low, high, n_outputs = int(y.min()), int(y.max()), self._n_outputs[t]
        if low < 0 or high >= n_outputs:
            wrong = low if low < 0 else high
            raise ValueError(f"y must hold classes from 0 to {n_outputs - 1}, got {wrong}")
        mask = self.mask(t)
        if mask is not None and not mask[y.long()].all():
            wrong = int(y[~mask[y.long()]][0])
            raise ValueError(f"y must hold task {t!r}'s classes {self.outputs[t]}, got {wrong}")

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        """Raise ValueError if these are too many to be observed, one after another."""
        del tasks, classes  # any number will do

    @torch.no_grad()
    def predict(self, x: Tensor, t: Hashable | None = None, check: bool = True) -> Tensor:
        """Class ids (n,) for x: (n, …), at any time and for any task, seen or not.

        `t` may be left out where the tasks share their outputs; for `check`, see `observe`.
        """
        if t is not None:
            descriptor(t)
        elif not self.shares_outputs or self.outputs:
            what = "its outputs differ per task" if self.outputs else "it predicts per task"
            raise TypeError(f"{type(self).__name__} needs t, for {what}; got None")
        if check or t not in self._n_outputs:
            self._check_inputs(x, t)
        with current_device(self.device):
            return self.scores(x, t).argmax(1)

    def scores(self, x: Tensor, t: Hashable | None) -> Tensor:
        """How well each class fits x, as task t sees it: (n, classes)."""
        return masked(self.evaluated(x, t), self.mask(t))

    def mask(self, t: Hashable | None) -> Tensor | None:
        """Which outputs are task t's: (classes,), or None if all of them are."""
        masks = self.masks([t])
        return None if masks is None else masks[0]

    def masks(self, tasks: Sequence[Hashable | None]) -> Tensor | None:
        """Which outputs are each task's: (k, classes), or None if all tasks have all of them.

        The same tensor for the same outputs, so that a CUDA graph finds it again.
        """
        if not self.outputs:
            return None
        classes = [
            None if t not in self.outputs else class_ids(f"outputs of task {t!r}", self.outputs[t])
            for t in tasks
        ]
        if all(own is None for own in classes):
            return None
        n = next(iter(self._n_outputs.values()), None)
        if n is None:
            raise ValueError("how many outputs there are is known when something was observed")
        key = (n, self.device, *classes)
        if key not in self._masks:
            masks = torch.zeros((len(tasks), n), dtype=torch.bool)
            for t, row, own in zip(tasks, masks, classes, strict=True):
                own = tuple(range(n)) if own is None else own
                if max(own) >= n:
                    raise ValueError(f"outputs of task {t!r} must be below {n}, got {max(own)}")
                row[list(own)] = True
            self._masks[key] = masks.to(self.device)
        return self._masks[key]

    def module(self, t: Hashable | None) -> nn.Module:
        """The module that gives the logits of task t."""
        return self.network

    def loss(self, x: Tensor, t: Hashable, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean loss at a mini-batch; refuses to go on from a loss that is not finite.

        `mask` says which outputs count, (classes,) or (n, classes): `self.mask(t)`, unless it was
        handed on to a step that may be a graph.
        """
        loss = F.cross_entropy(masked(self.module(t)(x), mask), y)
        self.require_finite(loss.detach())
        return loss

    def require_finite(self, number: Tensor) -> None:
        """Go no further if a loss, or the sum of a gradient, is not finite."""
        if number.is_cuda:  # looked at when there is a reason to wait, in `settle`
            self._watched = self._watched.to(number.device)  # if the network was moved
            self._watched.add_(number, alpha=0)  # 0 · NaN and 0 · ∞ are NaN, and stay
        elif not number.isfinite():
            self._diverge()

    def settle(self) -> None:
        """Wait for the device, and raise what could not be known without waiting."""
        if self._watched.is_cuda and bool(self._watched.isnan()):
            self._diverge()

    def _diverge(self) -> None:
        raise FloatingPointError(
            f"the loss is not finite after {self.steps} steps: a learning rate below "
            f"lr={self.lr} or smaller inputs may help"
        )

    def optimisers_in_use(self) -> Sequence[torch.optim.Optimizer]:
        """Those that the next step may use."""
        return (self.optimiser,)

    def take(self, key: Hashable, step: Step, x: Tensor, *others: Tensor | None) -> None:
        """Take a step, on a GPU as a CUDA graph (see `GraphedSteps`)."""
        if self.graphed.records(x):
            key = (key, self._circumstances())
        self.graphed(key, step, x, *others)

    def _circumstances(self) -> Hashable:
        """What decides a step beside its inputs, and can be changed at any time."""
        return (
            tuple(part.training for part in self.network.modules()),
            tuple(w.requires_grad for w in self.network.parameters()),
            tuple(group["lr"] for o in self.optimisers_in_use() for group in o.param_groups),
        )

    def new_optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters(module), lr=self.lr)

    def statistics(self) -> dict[str, Any]:
        """What belongs into a run's results: counts, and how things were computed."""
        return {"steps": self.steps, "examples": self.examples}

    @property
    def device(self) -> torch.device:
        return parameters(self.network)[0].device

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that `observe` and `predict` depend on, settings apart."""
        state = {
            "learner": type(self).__name__,
            "steps": self.steps,
            "examples": self.examples,
            "randomness": self._randomness,
            "outputs": {t: tuple(own) for t, own in self.outputs.items()},
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
        before, state = self.state_dict(), copy.deepcopy(state)
        try:
            counts = state["steps"], state["examples"]
            outputs, randomness = dict(state.get("outputs", {})), state["randomness"].cpu()
            self.set_state(state)
        except Exception as error:
            self.set_state(before)
            raise ValueError(f"the state does not fit this learner: {error}") from error
        self.steps, self.examples = counts
        self.outputs, self._randomness = outputs, randomness
        self._watched.zero_()

    def get_state(self) -> dict[str, Any]:
        """The part of the state that a learner's own kind knows about."""
        return {"network": self.network.state_dict(), "optimiser": self.optimiser.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])

    @contextmanager
    def _undone_by_errors(self, t: Hashable) -> Iterator[None]:
        """What cannot be learned leaves no trace, if `learn` replaces values or has them noted.

        Weights change at the end of a step, running statistics before. A GPU tells too late.
        """
        noted: list[tuple[Tensor, Tensor]] = []
        self._noted = noted
        if self._has_buffers and self.device.type != "cuda":
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
        """Note what is about to be changed in place: it is put back if the step fails."""
        self._noted += [(tensor, tensor.clone()) for tensor in tensors]

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Random numbers drawn inside come from the learner's generator."""
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

    def evaluated(self, x: Tensor, t: Hashable | None) -> Tensor:
        """Logits in evaluation mode; every part is put back into the mode it was in."""
        module = self.module(t)
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            logits = module(x)
        finally:
            for part in training:
                part.training = True
        return logits  # type: ignore[no-any-return]

    def _check_inputs(self, x: Tensor, t: Hashable | None) -> None:
        """Refuse what the network cannot take."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if x.ndim < 1 or len(x) == 0:
            raise ValueError(f"x must be (n, …) with n ≥ 1, got shape {tuple(x.shape)}")
        # A finite sum has only finite terms; it is cheaper to form than to look at every term.
        if x.is_floating_point() and not x.sum().isfinite() and not x.isfinite().all():
            bad = (~x.isfinite()).nonzero()[0]
            raise ValueError(f"x must be finite, got {x[tuple(bad)].item()} at {bad.tolist()}")
        kind = (t, x.shape[1:], x.dtype, x.device)
        if kind not in self._accepted:
            # two examples: batch statistics of one may not exist
            self._n_outputs[t] = self._probe(x[:2], t)
            self._accepted.add(kind)

    @torch.no_grad()
    def _probe(self, x: Tensor, t: Hashable | None) -> int:
        """The number of outputs, by asking for a prediction."""
        try:
            logits = self.evaluated(x, t)
        except Exception as error:
            raise ValueError(
                f"the network does not take x of shape (n, {', '.join(map(str, x.shape[1:]))}), "
                f"{x.dtype}, {x.device}: {error}"
            ) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
            raise ValueError(
                "the network must give logits of shape (n, classes), got "
                f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__} "
                f"for x of shape {tuple(x.shape)}"
            )
        return logits.shape[1]

    @torch.no_grad()
    def _check_single(self, x: Tensor, t: Hashable) -> None:
        """Batch statistics of one example may not exist: try it, before anything is changed."""
        module = self.module(t)
        if not any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
            return
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            module(x)
        except ValueError as error:
            raise ValueError(
                f"x must have more than one example for this network: {error}"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
