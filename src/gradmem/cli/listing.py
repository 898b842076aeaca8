"""`gradmem learners`, `benchmarks` and `data`: what there is, and what can be set."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gradmem.benchmarks import lookup
from gradmem.cli import options
from gradmem.cli.console import say
from gradmem.data import DataError, load_cifar100, load_mnist
from gradmem.learners import LEARNERS
from gradmem.validation import one_of

__all__ = ["benchmarks_command", "data_command", "learners_command"]

#: Settings whose values are functions or objects, which cannot be typed.
OBJECTS = ("optimizer", "loss", "schedule", "transform", "decide", "memory")


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
        typed = {key: default for key, default in defaults.items() if key not in OBJECTS}
        _show(lookup.shown(name), kind, typed)
        if objects := [key for key in defaults if key in OBJECTS]:
            say(f"  in Python and in a benchmark's settings also: {', '.join(objects)}")


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


def data_command(
    data: Annotated[
        str | None,
        typer.Argument(
            help='A folder, or "sample" (MNIST). Left out: GRADMEM_DATA, cache or download.'
        ),
    ] = None,
    which: Annotated[str, typer.Option("--set", help="mnist or cifar100.")] = "mnist",
) -> None:
    """Find or fetch a data set, check it, and say where it is."""
    load = {"mnist": load_mnist, "cifar100": load_cifar100}[
        one_of("--set", which, ("mnist", "cifar100"))
    ]
    try:
        images = load(data)
    except DataError as error:
        raise DataError(options.as_typed(str(error), "gradmem data ")) from error
    say(f"{which}: {images}\nfrom {images.source}")


def _show(name: str, what: Any, defaults: Mapping[str, Any]) -> None:
    first = (inspect.getdoc(what) or "").partition("\n")[0]
    say(f"{name}  {first}".rstrip())
    texts: dict[str, str] = {}
    for key, default in defaults.items():
        option = options.OPTION_NAMES.get(key, f"--{key.replace('_', '-')}")
        value = "VALUE" if default is inspect.Parameter.empty else str(default)
        texts.setdefault(option, f"{option} {value}")  # --tasks is their number
    say(f"  {'  '.join(texts.values())}")
