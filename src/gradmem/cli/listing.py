"""`gradmem learners` and `gradmem benchmarks`: what there is, and what can be set."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gradmem.benchmarks import lookup
from gradmem.cli import options
from gradmem.cli.console import say
from gradmem.learners import LEARNERS

__all__ = ["benchmarks_command", "learners_command"]


def learners_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Some of them, or your own: module:name.")
    ] = None,
) -> None:
    """List the learners and what can be set for each, with its default.

    gradmem learners gem my_module:MyLearner
    """
    for name in names or LEARNERS:
        kind = lookup.find_learner(name)
        parameters = lookup.setting_parameters(kind)
        defaults = {key: p.default for key, p in parameters.items() if key != "seed"}
        _show(lookup.shown(name), kind, defaults)


def benchmarks_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Some of them, or your own: module:name.")
    ] = None,
) -> None:
    """List the benchmarks, what each takes, and the learners it has settings for."""
    for name in names or lookup.BENCHMARKS:
        benchmark = lookup.find_benchmark(name)
        _show(benchmark.name, benchmark.continuum, benchmark.options)
        for learner, settings in benchmark.settings.items():
            text = ", ".join(f"{key}={value}" for key, value in settings.items())
            say(f"  {learner}: {text}")


def _show(name: str, what: Any, defaults: Mapping[str, Any]) -> None:
    first = (inspect.getdoc(what) or "").partition("\n")[0]
    say(f"{name}  {first}".rstrip())
    texts = [
        options.OPTION_NAMES.get(key, f"--{key.replace('_', '-')}")
        + (" VALUE" if default is inspect.Parameter.empty else f" {default}")
        for key, default in defaults.items()
    ]
    say(f"  {'  '.join(texts)}")
