"""A run's key: the same for the same run, and for no other."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from gradmem.runs.experiment import Experiment
from gradmem.streams import Examples
from gradmem.trees import leaves
from gradmem.version import __version__

__all__ = ["Planned", "key_of", "settings_text"]


@dataclass(frozen=True)
class Planned:
    """A run that a sweep consists of."""

    experiment: Experiment
    key: str = ""

    def __post_init__(self) -> None:
        # Found once, where the sweep is planned; it then travels with the run.
        object.__setattr__(self, "key", self.key or key_of(self.experiment))


def key_of(experiment: Experiment) -> str:
    """A name for people and a hash of everything that determines the run's numbers.

    That is its config and gradmem's version. Of the data it is what they are that counts, not the
    folder they lie in.

    Examples
    --------
    >>> experiment = Experiment("mnist-rotations", "single", {"lr": 0.01}, data="sample")
    >>> key_of(experiment)
    'mnist-rotations-single-lr0.01-seed0-...'
    """
    config = experiment.config()
    config |= {"data": fingerprint(experiment.benchmark, experiment.data), "gradmem": __version__}
    config = _as_one(config)
    text = json.dumps(config, sort_keys=True)
    name = [experiment.benchmark, experiment.learner]
    name += [f"{name}{value}" for name, value in config["settings"].items()]
    name += [f"{part}{config[part]}" for part in ("held_out", "first_tasks") if part in config]
    readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", "-".join([*name, f"seed{experiment.seed}"]))
    return f"{readable[:150]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@cache
def fingerprint(benchmark: str, data: str | None) -> str:
    """What the data are: a hash of some of the training and all of the test examples."""
    few = Experiment(benchmark, "single", data=data, n_tasks=1, examples_per_task=100).continuum()
    hashed = hashlib.sha256()
    for examples in (few.tasks[0].train, *few.tests.values()):
        given = (examples.x, examples.y) if isinstance(examples, Examples) else examples[:100]
        for part in leaves(given):
            hashed.update(f"{tuple(part.shape)} {part.dtype}".encode())
            hashed.update(_bytes(part))
    return hashed.hexdigest()


def settings_text(settings: Any) -> str:
    """Settings as one text, the same for the same settings."""
    return json.dumps(_as_one(dict(settings)), sort_keys=True)


def _bytes(part: Tensor) -> memoryview:
    return part.cpu().contiguous().numpy().data


def _as_one(value: Any) -> Any:
    """1 and 1.0 are the same setting."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _as_one(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_one(item) for item in value]
    return value
