"""An experiment: everything that determines a run, written down as data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch

from gradmem.benchmarks import lookup
from gradmem.benchmarks.benchmark import Benchmark
from gradmem.benchmarks.code import code_of
from gradmem.evaluation import Result, run
from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.files import plain
from gradmem.learners import Learner
from gradmem.streams.continuum import Continuum
from gradmem.trees import leaves
from gradmem.validation import close_to, non_negative_int, positive, positive_int
from gradmem.version import __version__

__all__ = ["Experiment", "keep_continuums", "require_device", "settings_key"]

#: What most benchmarks take, in the order of `config.json`.
COMMON_OPTIONS = ("data", "n_tasks", "examples_per_task", "batch_size", "epochs", "order")

#: Those that must be positive whole numbers.
POSITIVE_OPTIONS = ("n_tasks", "examples_per_task", "batch_size", "epochs")


@dataclass(frozen=True, init=False)
class Experiment:
    """One learner on one benchmark with one seed.

    Parameters
    ----------
    benchmark, learner
        A name of gradmem's, `module:name`, or the benchmark and the learner's class themselves.
        They are kept as text.
    settings
        Of the learner; those left out are the benchmark's for that learner, or its defaults.
    seed
        Of the stream, the network and the learner.
    shuffled
        Whether all tasks' examples are mixed (iid data).
    every
        See `gradmem.run`.
    device
        Where it is computed. Planning a run for a device that this machine lacks is no error, since
        it may be made on another; making its continuum or its learner here is one.
    held_out, first_tasks
        For choosing settings: the fraction of each task's training examples to test on in place
        of the test sets, and the number of tasks after which the continuum ends.
    code
        Ignored: an entry of `config` that is computed anew.
    stream
        What else the benchmark's continuum takes: data, n_tasks, examples_per_task, batch_size, …
        None stands for its default.

    Examples
    --------
    >>> experiment = Experiment("mnist-rotations", "single", {"lr": 0.01}, data="sample",
    ...                         n_tasks=2, examples_per_task=50)
    >>> experiment.settings
    {'lr': 0.01}
    >>> experiment.run().R.shape
    (2, 2)
    """

    benchmark: str
    learner: str
    settings: dict[str, Any]
    seed: int
    stream: dict[str, Any]
    shuffled: bool
    every: int | None
    device: str
    held_out: float | None
    first_tasks: int | None
    code: str | None
    """A hash of code that is not gradmem's or a library's; None if there is none."""

    def __init__(
        self,
        benchmark: str | Benchmark,
        learner: str | lookup.LearnerKind,
        settings: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        shuffled: bool = False,
        every: int | None = None,
        device: str = "cpu",
        held_out: float | None = None,
        first_tasks: int | None = None,
        code: str | None = None,
        **stream: Any,
    ) -> None:
        where, who = lookup.benchmark_reference(benchmark), lookup.learner_reference(learner)
        what, kind = lookup.find_benchmark(where), lookup.find_learner(who)
        every_setting = _settings(what, lookup.shown(who), kind, settings or {})
        vars(self).update(
            benchmark=where,
            learner=who,
            settings=every_setting,
            seed=non_negative_int("seed", seed),
            stream=_stream(what, stream),
            shuffled=shuffled,
            every=None if every is None else positive_int("every", every),
            device=_known(device),
            held_out=held_out,
            first_tasks=first_tasks,
            code=code_of((what, kind), every_setting),
        )
        if held_out is not None and positive("held_out", held_out) >= 1:
            raise ValueError(f"held_out must be below 1, got {held_out!r}")
        if first_tasks is not None:
            positive_int("first_tasks", first_tasks)
            n_tasks = self.stream.get("n_tasks") or first_tasks
            if first_tasks > n_tasks:
                raise ValueError(
                    f"first_tasks must be at most n_tasks, {n_tasks}, got {first_tasks}"
                )

    @property
    def name(self) -> str:
        """The learner's name for people and files."""
        return lookup.shown(self.learner)

    def config(self) -> dict[str, Any]:
        """This experiment as plain data, for `config.json`: what `Experiment` is called with."""
        optional = {name: getattr(self, name) for name in ("held_out", "first_tasks", "code")}
        return {
            "benchmark": self.benchmark,
            "learner": self.learner,
            "settings": dict(self.settings),
            "seed": self.seed,
            **self.stream,
            "shuffled": self.shuffled,
            "every": self.every,
            "device": self.device,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def changed(self, **changes: Any) -> Experiment:
        """The same experiment but for these arguments."""
        return Experiment(**self.config() | changes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the config without the benchmark's settings, which may be functions, and the key.

        Another process finds these settings in the benchmark, and need not compute the key.
        """
        own = lookup.find_benchmark(self.benchmark).settings.get(self.name, {})
        asked = {k: v for k, v in self.settings.items() if k not in own or own[k] is not v}
        return _unpickled, (self.config() | {"settings": asked}, vars(self).get("key"))

    @cached_property
    def key(self) -> str:
        """A readable name and a hash of everything that determines the run's numbers.

        These are the config, with a hash of the data in place of their folder, and the version.

        Examples
        --------
        >>> Experiment("mnist-rotations", "single", {"lr": 0.01}, data="sample").key
        'mnist-rotations-single-lr0.01-seed0-...'
        """
        data = _fingerprint(lookup.find_benchmark(self.benchmark), self.stream.get("data"))
        config = _whole_as_int(plain(self.config() | {"data": data, "gradmem": __version__}))
        text = json.dumps(config, sort_keys=True)
        words = [lookup.shown(self.benchmark), self.name]
        words += [f"{name}{value}" for name, value in config["settings"].items()]
        words += [f"{name}{config[name]}" for name in ("held_out", "first_tasks") if name in config]
        readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", "-".join([*words, f"seed{self.seed}"]))
        return f"{readable[:150]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def continuum(self) -> Continuum:
        """The continuum on this experiment's device; cached for the next experiment with it."""
        require_device(self.device)
        return _continuum(
            lookup.find_benchmark(self.benchmark),
            self.seed,
            tuple(self.stream.items()),
            self.first_tasks,
            self.held_out,
            self.shuffled,
            self.device,
        )

    def new_learner(self) -> Learner:
        """A new, untrained learner; network and learner are made with the seed."""
        require_device(self.device)
        benchmark, kind = lookup.find_benchmark(self.benchmark), lookup.find_learner(self.learner)
        n_tasks = self.stream.get("n_tasks") or len(self.continuum().tests)
        about = {"learner": kind, "n_tasks": n_tasks, "device": self.device}
        network = benchmark.new_network(self.seed, **about).to(self.device)
        seed = {"seed": self.seed} if "seed" in lookup.setting_parameters(kind) else {}
        if isinstance(kind, type):
            return kind(network, **self.settings, **seed)  # type: ignore[no-any-return]
        return _made_by(self.learner, kind, network, {**self.settings, **seed})

    def run(
        self,
        callbacks: Sequence[Any] = (),
        learner: Learner | None = None,
        continuum: Continuum | None = None,
        checkpoint: RunCheckpoint | None = None,
    ) -> Result:
        """Train and measure a learner: a new one, or `learner` in the state of a new one.

        `continuum` is this experiment's, if it has been made before. See `gradmem.run` for
        callbacks and the checkpoint, which a learner without a state does without.
        """
        learner = self.new_learner() if learner is None else learner
        continuum = self.continuum() if continuum is None else continuum
        score = lookup.find_benchmark(self.benchmark).score
        result = run(
            learner,
            continuum,
            self.every,
            score=score,
            callbacks=callbacks,
            checkpoint=checkpoint if hasattr(learner, "load_state_dict") else None,
        )
        result.config = self.config()
        return result


def _unpickled(config: dict[str, Any], key: str | None) -> Experiment:
    experiment = Experiment(**config)
    if key is not None:
        vars(experiment)["key"] = key
    return experiment


def keep_continuums(n: int) -> None:
    """Keep the last `n` continuums in this process, by default one, for runs that use them again.

    One of MNIST's takes 170 MB with all its tasks.
    """
    global _continuum
    if positive_int("n", n) != _continuum.cache_parameters()["maxsize"]:
        _continuum = lru_cache(maxsize=n)(_new_continuum)


def settings_key(settings: Mapping[str, Any]) -> str:
    """Settings as one text, the same for the same settings."""
    return json.dumps(_whole_as_int(plain(dict(settings))), sort_keys=True)


def _whole_as_int(value: Any) -> Any:
    """Floats that are whole numbers as ints, so that 1 and 1.0 are the same setting."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _whole_as_int(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_as_int(item) for item in value]
    return value


def _new_continuum(
    benchmark: Benchmark,
    seed: int,
    stream: tuple[tuple[str, Any], ...],
    first_tasks: int | None,
    held_out: float | None,
    shuffled: bool,
    device: str,
) -> Continuum:
    continuum = benchmark.continuum(seed=seed, **dict(stream))
    if first_tasks is not None:
        continuum = continuum[:first_tasks]
    if held_out is not None:
        continuum = continuum.held_out(held_out)
    if shuffled:
        continuum = continuum.shuffled()
    return continuum.to(device)


#: The last continuum is kept: comparing learners means giving them the same one.
_continuum = lru_cache(maxsize=1)(_new_continuum)


def _settings(
    benchmark: Benchmark, learner: str, kind: lookup.LearnerKind, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The benchmark's settings for a learner, with those asked for."""
    accepted = lookup.setting_parameters(kind)
    allowed = [name for name in accepted if name != "seed"]
    settings = {**benchmark.settings.get(learner, {}), **asked}
    for name, value in settings.items():
        if name not in allowed:
            raise ValueError(
                f"{learner} has no setting {name} (got {value!r}); it has "
                f"{', '.join(allowed) or 'none'}{close_to(name, allowed)}"
            )
        declared = accepted[name]  # an int for a float setting becomes a float
        if type(value) is int and (
            "float" in str(declared.annotation) or isinstance(declared.default, float)
        ):
            settings[name] = float(value)
    return settings


def _stream(benchmark: Benchmark, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the benchmark's continuum is called with: the usual, and what is asked for."""
    asked = {name: value for name, value in asked.items() if value is not None}
    benchmark.check(asked)
    options = benchmark.options
    usual = {name: options[name] for name in COMMON_OPTIONS if name in options}
    stream = {k: tuple(v) if isinstance(v, list) else v for k, v in {**usual, **asked}.items()}
    for name in POSITIVE_OPTIONS:
        if stream.get(name) is not None:
            positive_int(name, stream[name])
    return stream


def _made_by(name: str, make: Any, network: Any, settings: Mapping[str, Any]) -> Learner:
    """The learner that a function makes of a network; TypeError if it makes none."""
    takes = "a learner is a class with observe and predict, or a function of a network that"
    try:
        made = make(network, **settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            f"{name} made no learner ({takes} makes one): {type(error).__name__}: {error}"
        ) from error
    if not all(hasattr(made, method) for method in ("observe", "predict")):
        raise TypeError(f"{name} made no learner ({takes} makes one), but {made!r:.100}")
    return made  # type: ignore[no-any-return]


def _known(device: str) -> str:
    """`device` if it is the name of one, of this machine or of another."""
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} cannot be used here: {error}") from None
    return device


def require_device(device: str) -> None:
    """Raise ValueError if this process cannot compute on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {error}") from None


@cache
def _fingerprint(benchmark: Benchmark, data: Any) -> str:
    """A hash of the data: of the first examples of the continuum with seed 0."""
    few = {"data": data, "n_tasks": 1, "examples_per_task": 100}
    few = {name: value for name, value in few.items() if name in benchmark.options}
    try:
        continuum = benchmark.continuum(seed=0, **few)
    except ValueError:  # the benchmark refuses so few
        given = {"data": data} if "data" in few else {}
        continuum = benchmark.continuum(seed=0, **given)
    hashed = hashlib.sha256()
    for examples in (continuum.tasks[0].train, *continuum.tests.values()):
        for part in leaves(examples[:1000]):
            hashed.update(f"{tuple(part.shape)} {part.dtype}".encode())
            hashed.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
