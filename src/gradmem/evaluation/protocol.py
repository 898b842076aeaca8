"""The training and evaluation protocol (Algorithm 1): a learner, a continuum, a matrix R."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.checkpoint import CheckpointError
from gradmem.evaluation.callback import Progress
from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.evaluation.clocks import Clock, DeviceClock, WallClock
from gradmem.evaluation.measuring import Measurement, TestSets, is_on_gpu
from gradmem.evaluation.result import Matrix, Result
from gradmem.evaluation.result_folder import what_changed
from gradmem.evaluation.scores import Score, accuracy, name_of
from gradmem.files import plain
from gradmem.learners import LEARNERS, Learner
from gradmem.streams import IID, Continuum, Examples
from gradmem.streams.examples import are_class_ids
from gradmem.trees import leaves, size
from gradmem.validation import positive_int

__all__ = ["run"]

#: What a callback may have.
HOOKS = ("on_resume", "on_batch", "on_task", "on_end")


def run(
    learner: Any,
    continuum: Continuum,
    every: int | None = None,
    *,
    score: Score | None = None,
    callbacks: Iterable[Any] = (),
    on_progress: Callable[[Progress], None] | None = None,
    checkpoint: str | os.PathLike[str] | RunCheckpoint | None = None,
    save_every: int | None = None,
) -> Result:
    """Train `learner` on `continuum` and measure it on all tasks as it goes (Algorithm 1).

    Parameters
    ----------
    learner
        Anything that answers `observe(x, t, y)` and `predict(x, t)`; it is trained in place. A
        `Learner` is told which outputs are which task's (`Learner.outputs`) and the tasks'
        descriptions (`Learner.descriptions`), unless it knows. One with `boundaries` is not told
        the tasks: `observe(x, y=y)` and `predict(x)`; its tasks must share their outputs. The
        baseline of FWT is what it can do when the run begins.
    continuum
        The data and the test sets.
    every
        If given, all tasks are also evaluated every so many examples inside tasks: a learning
        curve per task. The rows of R themselves are always part of the curves.
    score
        `score(prediction, y)` gives a real number for each example, (n,), the higher the better;
        R holds their means. If left out, accuracy: whether the predicted class id is y.
    callbacks
        Objects with any of `on_resume(progress)`, `on_batch(progress)`, `on_task(progress)` and
        `on_end(result)`, see `Callback`. A run prints nothing itself: the `gradmem` command shows
        its progress by such an object, and `on_progress=print` shows all of it.
    on_progress
        Called with a `Progress` after every mini-batch and every row of R.
    checkpoint
        A folder. The run is saved there after every task, and the same call goes on from where the
        last one was stopped or killed, to the same numbers, bit for bit on a CPU. SIGINT and
        SIGTERM finish the step, save and end the run; a second SIGINT ends it at once.
    save_every
        Examples after which the run is also saved inside tasks.

    Examples
    --------
    >>> import gradmem as gm
    >>> continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=100, data="sample")
    >>> result = gm.run(gm.GEM(gm.mlp(), memories=20), continuum)
    >>> result.R.shape, result.baseline.shape
    ((2, 2), (2,))

    Another score:

    >>> def closeness(prediction, y):
    ...     return -(prediction - y).abs()
    >>> gm.run(gm.Single(gm.mlp()), continuum, score=closeness).score
    'closeness'
    """
    if every is not None:
        positive_int("every", every)
    if not isinstance(continuum, Continuum):
        given = f"{type(learner).__name__} and {type(continuum).__name__}"
        raise TypeError(f"run takes a learner and a Continuum, in this order; got {given}")
    _check_learner(learner)
    hooks = _hooks(callbacks)
    if on_progress is not None:
        for name in ("on_batch", "on_task"):
            hooks[name].append(on_progress)
    if checkpoint is None and save_every is not None:
        raise ValueError("save_every needs a checkpoint folder to save to")
    if checkpoint is not None and not isinstance(checkpoint, RunCheckpoint):
        checkpoint = RunCheckpoint(checkpoint, save_every)
    started = _Run(learner, continuum, every, score or accuracy, hooks, checkpoint)
    with checkpoint.watched() if checkpoint else nullcontext():
        return started.result()


class _Run:
    """The state of a run: the learner, the clocks, and the scores measured so far."""

    def __init__(
        self,
        learner: Any,
        continuum: Continuum,
        every: int | None,
        score: Score,
        hooks: dict[str, list[Callable[..., None]]],
        checkpoint: RunCheckpoint | None = None,
    ) -> None:
        if checkpoint is not None and not hasattr(learner, "load_state_dict"):
            raise TypeError(
                "a checkpoint needs a learner with state_dict and load_state_dict, got "
                f"{type(learner).__name__}"
            )
        self.checkpoint = checkpoint
        self.position = (0, 0)  # tasks that are learned, mini-batches of the next one
        self.learner, self.every, self.score, self.hooks = learner, every, score, hooks
        self.device = torch.device(getattr(learner, "device", None) or "cpu")
        self.on_gpu = is_on_gpu(learner)
        self.continuum = continuum.to(self.device)
        self.tests = TestSets(self.continuum.tests)
        self.observe, self.predict = learner.observe, learner.predict
        in_memory = False
        if isinstance(learner, Learner):
            learner.outputs = {**continuum.outputs, **learner.outputs}
            learner.descriptions = {**continuum.descriptions, **learner.descriptions}
            _check_labels_can_be_withheld(learner)
            in_memory = _check_data(learner, self.continuum)
            if in_memory or self.on_gpu:  # checking every batch would wait for the GPU each time
                self.observe = _unchecked(learner.observe)
                self.predict = _unchecked(learner.predict)
            if learner.boundaries is not None:
                self.observe, self.predict = _without_labels(self.observe, self.predict)
        self.settle = getattr(learner, "settle", None)
        #: Whether nothing has to happen between the batches of a task, on a GPU.
        self.in_a_row = (
            self.on_gpu
            and isinstance(learner, Learner)
            and getattr(learner.observe, "__func__", None) is Learner.observe
            and learner.boundaries is None
            and not (every or hooks["on_batch"] or checkpoint)
        )
        #: Whether scores are read a task later, so that the host is a task ahead of the GPU.
        self.runs_ahead = self.in_a_row and in_memory and not hooks["on_task"]
        self.training, self.evaluation = self._clock(), self._clock()
        self.examples = 0
        self.R: list[Matrix] = []
        self.curves: list[tuple[int, Matrix]] = []
        #: Scores that are not read yet: examples, where they go, what is being measured.
        self.measured: list[tuple[int, Matrix, Measurement]] = []
        self.config = _config(learner, self.continuum, every, self.device)

    def _clock(self) -> Clock:
        return DeviceClock(self.device) if self.runs_ahead else WallClock()

    def result(self) -> Result:
        """Train and evaluate on all tasks, and call the callbacks."""
        if self._resume():
            self._tell("on_resume", min(self.position[0], self.continuum.n_tasks - 1))
        else:
            self._measure()
        for i in range(self.position[0], self.continuum.n_tasks):
            self._learn(i)
            self.R.append(self.curves[-1][1])
            self.position = (i + 1, 0)
            if self.checkpoint is not None and self.checkpoint.may_save():
                self._save()
            self._tell("on_task", i)
        self._read()
        if self.settle is not None:
            self.settle()
        result = self._so_far()
        for hook in self.hooks["on_end"]:
            hook(result)
        return result

    def _learn(self, i: int) -> None:
        """Train on the i-th task, and measure the scores after it."""
        if self.in_a_row:
            self._observe_in_a_row(i)
        else:
            self._observe(i)
        if self.curves[-1][0] < self.examples:
            self._measure()
        if self.settle is not None and not self.runs_ahead:
            self.settle()

    def _observe_in_a_row(self, i: int) -> None:
        """Train on the i-th task, several batches at a time."""
        task = self.continuum[i]
        for x, t, y in task.fetches():
            with self.training:
                self.learner.observe_each(x, t, y, task.batch_size, check=False)
            self.examples += size(y)

    def _observe(self, i: int) -> None:
        """Train on the i-th task, batch by batch, from where the run is in it."""
        skipped = self.position[1]
        for n, (x, t, y) in enumerate(self.continuum[i]):
            if n < skipped:
                continue
            with self.training:
                loss = self.observe(x, t, y)
            before, self.examples = self.examples, self.examples + size(y)
            if self.every is not None and self.examples // self.every > before // self.every:
                self._measure()
            self.position = (i, n + 1)
            self._tell("on_batch", i, loss=loss)
            if self.checkpoint is not None and self.checkpoint.is_due(before, self.examples):
                self._save()

    def _save(self) -> None:
        """Save the run as it is, between two steps."""
        assert self.checkpoint is not None
        state = {
            "config": self._identity(),
            "position": self.position,
            "examples": self.examples,
            "R": [torch.from_numpy(row) for row in self.R],
            "curves": [(n, torch.from_numpy(row)) for n, row in self.curves],
            "seconds": (self.training.seconds, self.evaluation.seconds),
            "learner": self.learner.state_dict(),
        }
        self.checkpoint.save(state)
        self.checkpoint.stop_if_asked()

    def _resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        state = None if self.checkpoint is None else self.checkpoint.load()
        if state is None or self.checkpoint is None:
            return False
        try:
            if changed := what_changed(json.loads(state["config"]), json.loads(self._identity())):
                raise ValueError(f"it is of another run: {changed}")
            self.learner.load_state_dict(state["learner"])
            self.position, self.examples = tuple(state["position"]), int(state["examples"])
            self.R = [row.numpy() for row in state["R"]]
            self.curves = [(int(n), row.numpy()) for n, row in state["curves"]]
            self.training.seconds, self.evaluation.seconds = state["seconds"]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.checkpoint.path} does not fit this run: {error}. Choose another folder, or "
                "delete it to start again"
            ) from error
        return True

    def _identity(self) -> str:
        """What a run must share with the one whose checkpoint it goes on from."""
        known = {name: v for name, v in self.config.items() if name != "device"}
        known |= {"labels": self.continuum.labels(), "score": name_of(self.score)}
        parts = [task.train for task in self.continuum.tasks] + [*self.continuum.tests.values()]
        # What is read lazily may come out otherwise every time, and is not looked at.
        known["data"] = [part.fingerprint() for part in parts if isinstance(part, Examples)]
        return json.dumps(plain(known), sort_keys=True)

    def _measure(self) -> None:
        """Add a point to the learning curves."""
        if self.on_gpu and not self.runs_ahead:
            with self.training:  # `observe` returns before the GPU has done its step
                torch.cuda.synchronize(self.device)
        with self.evaluation:
            found = Measurement(self.learner, self.predict, self.tests, self.score)
            row = np.full(len(self.continuum.tests), np.nan)
            self.curves.append((self.examples, row))
            self.measured.append((self.examples, row, found))
            self._read(all_but=1 if self.runs_ahead else 0)

    def _read(self, all_but: int = 0) -> None:
        """Wait for scores that were measured, but for the last ones, and put them in their rows."""
        while len(self.measured) > all_but:
            examples, row, found = self.measured.pop(0)
            row[:] = found.means()
            finite = np.isfinite(row)
            if self.settle is not None and (found.stopped or not finite.all()):
                self.settle()  # raises the learner's own error, which says more
            if not finite.all():
                raise FloatingPointError(
                    f"{name_of(self.score)} is not finite on "
                    f"{self.continuum.labels()[int(np.argmin(finite))]} after {examples} examples: "
                    "the learner may have diverged"
                )

    def _tell(self, hook: str, i: int, loss: Tensor | None = None) -> None:
        if not self.hooks[hook]:
            return
        progress = Progress(
            task=i,
            n_tasks=self.continuum.n_tasks,
            label=self.continuum.tasks[i].label,
            examples=self.examples,
            n_examples=self.continuum.n_examples,
            seconds=self.training.seconds + self.evaluation.seconds,
            acc=_acc_so_far(self.R, self.continuum.learned),
            partial=self._so_far() if hook == "on_task" else None,
            loss=loss,
            learner=self.learner,
        )
        for call in self.hooks[hook]:
            call(progress)

    def _so_far(self) -> Result:
        statistics = getattr(self.learner, "statistics", dict)
        return Result(
            R=np.array(self.R),
            baseline=self.curves[0][1],
            curve_examples=[n for n, _ in self.curves],
            curves=np.array([row for _, row in self.curves]),
            learned=self.continuum.learned[: len(self.R)],
            labels=self.continuum.labels(),
            seconds_training=self.training.seconds,
            seconds_evaluation=self.evaluation.seconds,
            statistics=statistics(),
            score=name_of(self.score),
            config=dict(self.config),
        )


def _check_learner(learner: Any) -> None:
    """Refuse a class, and what cannot observe and predict."""
    if isinstance(learner, type):
        given = learner in LEARNERS.values()
        make = f"{'gm.' if given else ''}{learner.__name__}(network)"
        raise TypeError(f"got the class {learner.__name__}, not a learner: {make} makes one")
    if missing := [name for name in ("observe", "predict") if not hasattr(learner, name)]:
        kind = type(learner).__name__
        raise TypeError(f"a learner needs observe and predict, got {kind} without {missing[0]}")


def _hooks(callbacks: Iterable[Any]) -> dict[str, list[Callable[..., None]]]:
    hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in HOOKS}
    for callback in callbacks:
        own = {name: getattr(callback, name) for name in HOOKS if hasattr(callback, name)}
        if not own:
            raise TypeError(f"a callback needs one of {', '.join(HOOKS)}, got {callback!r}")
        for name, method in own.items():
            hooks[name].append(method)
    return hooks


def _check_data(learner: Learner, continuum: Continuum) -> bool:
    """Check the data before the run; of a `DatasetExamples`, the first batch.

    Returns whether all data were checked.
    """
    classes: set[int] = set()
    size = continuum.batch_size
    for task in continuum.tasks:
        _check_examples(learner, task.t, task.train, learner.check, size)
        if size == 1 or len(task.train) % size == 1:  # a batch of one is not for every network
            x, y = task.train[:1]
            learner.check(x, task.t, y)
        if isinstance(task.train, Examples) and are_class_ids(task.train.y):
            classes |= set(task.train.y.unique().tolist())
    for t, test in continuum.tests.items():
        _check_examples(learner, t, test, learner.check_test, size)
    known = [task.t for task in continuum.tasks] if learner.boundaries is None else []
    learner.check_all(known, classes)
    sets = [*(task.train for task in continuum.tasks), *continuum.tests.values()]
    return all(isinstance(examples, Examples) for examples in sets)


def _check_examples(
    learner: Learner, t: Any, examples: Any, check: Callable[..., None], batch_size: int
) -> None:
    if not isinstance(examples, Examples):
        x, y = examples[:batch_size]
        return check(x, t, y)
    # Integers are always finite: of such inputs two are checked, and all labels.
    whole = any(leaf.is_floating_point() for leaf in leaves(examples.x))
    x, y = examples[:] if whole else examples[:2]
    check(x, t, y)
    if not whole:
        learner.check_labels(x, t, examples.y)


def _unchecked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with `check=False`; as it is if a subclass's method has no such parameter."""
    has_check = "check" in inspect.signature(method).parameters
    return partial(method, check=False) if has_check else method


def _check_labels_can_be_withheld(learner: Learner) -> None:
    """Refuse a learner that has boundaries, and could not predict without a descriptor."""
    if learner.boundaries is not None and (learner.outputs or not learner.shares_outputs):
        why = "the tasks have outputs of their own" if learner.outputs else "it predicts per task"
        raise ValueError(
            f"a {type(learner).__name__} with boundaries, {learner.boundaries!r}, is not told the "
            f"tasks, but {why}: take tasks that share their outputs, or boundaries=None"
        )


def _without_labels(
    observe: Callable[..., Any], predict: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`observe(x, t, y)` and `predict(x, t)` that keep t to themselves."""
    return (lambda x, t, y: observe(x, y=y)), (lambda x, t: predict(x))


def _acc_so_far(R: list[Matrix], learned: list[int | None]) -> float | None:
    if not R:
        return None
    seen = {j for j in learned[: len(R)] if j is not None}
    return float(R[-1][sorted(seen)].mean() if seen else R[-1].mean())


def _config(
    learner: Any, continuum: Continuum, every: int | None, device: torch.device
) -> dict[str, Any]:
    """What is known of a run, with the names that `Experiment.config` uses."""
    names = {kind: name for name, kind in LEARNERS.items()}
    offered = getattr(learner, "settings", None)
    settings = dict(offered) if isinstance(offered, Mapping) else {}
    settings.pop("network", None)
    seeds = {"continuum": continuum.seed, "learner": settings.pop("seed", None)}
    sizes = {len(task.train) for task in continuum.tasks}
    config = {
        "benchmark": getattr(continuum, "name", None) or "continuum",
        "learner": names.get(type(learner), type(learner).__name__),
        "settings": settings,
        "seeds": {name: seed for name, seed in seeds.items() if seed is not None},
        "n_tasks": continuum.n_tasks,
        "examples_per_task": sizes.pop() if len(sizes) == 1 else None,
        "batch_size": continuum.batch_size,
        "epochs": continuum.epochs,
        "shuffled": any(task.t == IID for task in continuum.tasks),
        "every": every,
        "device": str(device),
    }
    return plain(config)  # type: ignore[no-any-return]
