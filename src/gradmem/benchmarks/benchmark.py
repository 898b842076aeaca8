"""A benchmark as one record: how its stream, its network and its learners' settings are made."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradmem import published
from gradmem.learners import Independent
from gradmem.streams.continuum import Continuum

__all__ = ["Benchmark", "paper_benchmark", "shares"]


@dataclass(frozen=True, eq=False)
class Benchmark:
    """What learners are compared on.

    Parameters
    ----------
    name
        Letters, digits, ".", "_" and "-": it becomes part of file names.
    continuum
        A function of `seed` that returns the `Continuum`. What else it takes by name can be asked
        for: `n_tasks` (`--tasks` on the command line), `examples_per_task` (`--examples`), `data`,
        `batch_size`, `epochs`, `order`, or anything of its own.
    network
        A function of `seed` that returns a new network. It may also take `learner` (the learner's
        class), `n_tasks` (the number of different tasks) and `device` (the network is moved there
        in any case).
    settings
        Learner → its settings on this benchmark. What is left out has the learner's default.
    score
        `score(prediction, y)`, (n,) values per example: what R holds the means of. If it is left
        out: accuracy.
    grid
        Learner → setting → the values that a sweep tries.

    Examples
    --------
    >>> import gradmem as gm
    >>> def digits(seed, n_tasks=3):
    ...     return gm.mnist_rotations(n_tasks, examples_per_task=50, seed=seed, data="sample")
    >>> benchmark = gm.Benchmark("digits", digits, lambda seed: gm.mlp(seed=seed))
    >>> benchmark.options
    {'n_tasks': 3}
    >>> sorted(gm.compare(benchmark, ["single", "gem"], seeds=1))
    ['gem', 'single']
    """

    name: str
    continuum: Callable[..., Continuum]
    network: Callable[..., nn.Module]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    score: Callable[..., Any] | None = None
    grid: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    module: str = field(init=False, repr=False)
    """The module that made this record, in which other processes look for it first."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(
                f'name must be letters, digits, ".", "_" and "-", got {self.name!r}: it becomes '
                "part of file names"
            )
        for what in ("continuum", "network"):
            if "seed" not in _parameters(getattr(self, what)):
                raise TypeError(f"{what} must be a function of seed, got {getattr(self, what)!r}")
        caller = sys._getframe(2).f_globals  # 0 is this method, 1 the dataclass's __init__
        object.__setattr__(self, "module", caller.get("__name__", "__main__"))

    @property
    def options(self) -> dict[str, Any]:
        """What `continuum` takes by name beside the seed, with its defaults."""
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = _parameters(self.continuum).values()
        return {p.name: p.default for p in takes if p.kind in by_name and p.name != "seed"}

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise ValueError if `continuum` cannot be called with what is asked for."""
        options = self.options
        kinds = [p.kind for p in _parameters(self.continuum).values()]
        unknown = [name for name in asked if name not in options]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"{self.name} takes no {unknown[0]} (got {asked[unknown[0]]!r}); it takes "
                f"{', '.join(options) or 'nothing but a seed'}"
            )
        for name, default in options.items():
            if default is inspect.Parameter.empty and name not in asked:
                raise ValueError(f"{self.name} needs {name}: it has no default")

    def new_network(self, seed: int, **about: Any) -> nn.Module:
        """`network(seed)`, with those of `about` (learner, n_tasks, device) that it takes."""
        takes = _parameters(self.network)
        return self.network(seed=seed, **{k: v for k, v in about.items() if k in takes})


def paper_benchmark(
    name: str, continuum: Callable[..., Continuum], network: Callable[..., nn.Module]
) -> Benchmark:
    """A benchmark of the paper, with its best settings and its grid (Appendix A).

    A-GEM, which the paper does not have, has as many memories as GEM.
    """
    best = published.settings()[name]["learners"]
    more = {"agem": {"lr": 0.1, "memories": 256, "sample": 256}}
    return Benchmark(name, continuum, network, {**best, **more}, grid=published.grids()[name])


def shares(learner: Any, n_tasks: int) -> int:
    """Among how many tasks a network's units are shared out: independent learners have one each."""
    return n_tasks if isinstance(learner, type) and issubclass(learner, Independent) else 1


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    if not callable(function):
        raise TypeError(f"a function of seed is needed, got {function!r}")
    return inspect.signature(function).parameters
