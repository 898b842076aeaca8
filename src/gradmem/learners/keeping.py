"""How a learner is saved and loaded: all that `observe` and `predict` depend on."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradmem.checkpoint import load_state
from gradmem.distributed.states import own_part, save_together
from gradmem.gradients import Inputs
from gradmem.interrupts import Lock, uninterrupted
from gradmem.learners.boundaries import Boundaries, restored
from gradmem.learners.optimizers import load_optimizer, optimizer_state
from gradmem.learners.settings import compared_settings
from gradmem.learners.states import check_state, load_weights
from gradmem.learners.stepping import Stepping
from gradmem.networks import fit_outputs
from gradmem.streams.task import as_description

__all__ = ["Keeping"]


class Keeping(Stepping):
    """The part of a learner that is saved and loaded; `Learner` says what is learned."""

    settings: dict[str, Any]
    examples: int
    skipped: int
    grow: bool
    outputs: dict[Hashable, Sequence[int]]
    descriptions: dict[Hashable, Any]
    _inputs: Inputs
    _boundaries: Boundaries | None
    _lock: Lock

    @abstractmethod
    def modules_by_task(self) -> dict[Hashable, nn.Module]:
        """The modules that learn, by a task that each of them serves."""

    @abstractmethod
    def _follow_network(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that `observe` and `predict` depend on.

        Settings are in it to be compared when it is loaded.
        """
        with self._lock, uninterrupted():
            self.settle()
            state = {
                "learner": type(self).__name__,
                "settings": compared_settings(type(self), self.settings),
                "steps": self.steps,
                "examples": self.examples,
                "costs": {"steps": self.updates, "example_gradients": self.example_gradients},
                "skipped": self.skipped,
                "classes": self._inputs.are_classes,
                "randomness": self._randomness,
                "outputs": {t: tuple(map(int, own)) for t, own in self.outputs.items()},
                "descriptions": {t: as_description(t, d) for t, d in self.descriptions.items()},
                **self.get_state(),
            }
            if self.averaged is not None:
                state["average"] = self.averaged.state_of(self.modules_by_task())
            if self._boundaries is not None:
                state["boundaries"] = self._boundaries.state_dict()
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
            if self._guard is not None:
                self._guard.clear()
            before, state = self.state_dict(), copy.deepcopy(state)
            try:
                state = own_part(state, self.processes, getattr(self, "memory", None))
                check_state(state, compared_settings(type(self), self.settings), before)
                boundaries = restored(self._boundaries, state.get("boundaries"))
                self._set_state(state)
            except Exception as error:
                self._set_state(before)
                raise ValueError(f"the state does not fit this learner: {error}") from error
            self.steps, self.examples = state["steps"], state["examples"]
            self.skipped = state.get("skipped", 0)
            costs = state.get("costs", {})  # states of old have none: counted from here on
            self.updates = costs.get("steps", state["steps"])
            self.example_gradients = costs.get("example_gradients", 0)
            self._boundaries = boundaries
            self.outputs = dict(state.get("outputs", {}))
            self.descriptions = dict(state.get("descriptions", {}))
            self._randomness = state["randomness"].cpu()
            self._inputs.are_classes = state.get("classes", self._inputs.are_classes)

    def _set_state(self, state: dict[str, Any]) -> None:
        self.set_state(state)
        if self.averaged is not None:
            self.averaged.load(self.modules_by_task(), state["average"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the learner's state to one file, from which nothing is executed when it is read.

        The file that was there stays until the new one is whole. It can be loaded on another
        machine and device. Descriptors in it are texts, numbers, or tuples of them. Of several
        processes all call this, and the first one writes.
        """
        save_together(path, self.state_dict(), type(self).__name__, self.processes)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` wrote; the learner's settings must be the same.

        Raises `CheckpointError` if the file is damaged, of something else or of a newer gradmem,
        and ValueError if its state does not fit; the learner stays as it was then. All of several
        processes read the file; there may be more or fewer of them than when it was written.
        """
        self.load_state_dict(load_state(path, type(self).__name__))

    def get_state(self) -> dict[str, Any]:
        """The part of the state that a learner's own kind knows about."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.state_of(self.optimizer),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave; a network that grows gets the outputs that it had."""
        if self.grow:
            fit_outputs(self.network, state["network"])
            self._follow_network()
        network = state["network"]
        if self.processes is not None:
            network = self.processes.sharded(network, self.network)
        load_weights(self.network, network)
        self.load_state_of(self.optimizer, state["optimizer"])

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of one of the learner's optimizers and of its schedule."""
        return optimizer_state(optimizer, self._schedules.get(optimizer))

    def load_state_of(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Let an `optimizer` take over the `state` that `state_of` gave."""
        if self.processes is not None:
            own = self.processes.sharded(state["optimizer"], optimizer)
            state = {**state, "optimizer": own}
        load_optimizer(optimizer, self._schedules.get(optimizer), state)
