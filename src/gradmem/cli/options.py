"""The options of the commands, each once, and what is read from them."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradmem.benchmarks.parts import (
    BENCHMARKS,
    benchmark_reference,
    find_benchmark,
    find_learner,
    learner_reference,
    setting_parameters,
    short_names,
)
from gradmem.learners import LEARNERS

__all__ = [
    "ANY_OPTION",
    "OWN",
    "TYPED",
    "WHAT",
    "WHERE",
    "BenchmarkOption",
    "DeviceOption",
    "EveryOption",
    "LearnerOption",
    "LearnersOption",
    "OutOption",
    "OverwriteOption",
    "RetryFailedOption",
    "SaveEveryOption",
    "SeedOption",
    "SetOption",
    "ShuffledOption",
    "TensorBoardOption",
    "WorkersOption",
    "absolute",
    "names_in",
    "read_settings",
    "say",
    "takes_stream",
]

#: Headings in a command's help.
WHAT = "What is run"
STREAM = "The continuum (where left out, as the benchmark has it)"
WHERE = "Where it is run"

#: For commands that take any `--name value` as a setting.
ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}

#: What is typed otherwise than it is called in Python.
TYPED = {"n_tasks": "--tasks", "examples_per_task": "--examples"}

#: How a part of your own is named, for help.
OWN = "or your own: module:name"

BenchmarkOption = Annotated[
    str,
    typer.Option("--benchmark", help=f"{', '.join(BENCHMARKS)}, {OWN}.", rich_help_panel=WHAT),
]
LearnerOption = Annotated[
    str, typer.Option("--learner", help=f"{', '.join(LEARNERS)}, {OWN}.", rich_help_panel=WHAT)
]
LearnersOption = Annotated[
    str | None,
    typer.Option(
        "--learners",
        help="Names with commas between them. (default: all that the benchmark has settings for)",
        rich_help_panel=WHAT,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the learners that have it, or of one: gem.margin=0. For run and compare "
        "--NAME VALUE does the same. `gradmem learners` lists them. (default: the benchmark's)",
        rich_help_panel=WHAT,
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Of data, network and learner.", rich_help_panel=WHAT)
]
ShuffledOption = Annotated[
    bool,
    typer.Option("--shuffled", help="Mix all tasks' examples (iid data).", rich_help_panel=WHAT),
]
EveryOption = Annotated[
    int | None,
    typer.Option(
        "--every",
        help="Also evaluate every so many examples, for learning curves. (default: off)",
        rich_help_panel=WHAT,
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results.", rich_help_panel=WHERE)
]
SaveEveryOption = Annotated[
    int | None,
    typer.Option(
        "--save-every",
        help="Save every so many examples, too; each task's end is saved. A run that was stopped "
        "goes on when the same command is given again.",
        rich_help_panel=WHERE,
    ),
]
OverwriteOption = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Compute again, also in place of another experiment's result.",
        rich_help_panel=WHERE,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …", rich_help_panel=WHERE)
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="Processes that run at a time. (default: by the number of cores; on a GPU: 1)",
        rich_help_panel=WHERE,
    ),
]
RetryFailedOption = Annotated[
    bool, typer.Option("--retry-failed", help="Run again what failed.", rich_help_panel=WHERE)
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        help='Folder to log to for TensorBoard. (default: off; needs "gradmem\\[tensorboard]")',
        rich_help_panel=WHERE,
    ),
]

#: Option → its type, the name in Python, and what it is.
_STREAM = {
    "data": (str, "data", '"sample" (bundled digits) or a folder. Left out: GRADMEM_DATA, the '
             "cache, or a download."),
    "tasks": (int, "n_tasks", "How many."),
    "examples": (int, "examples_per_task", "Training examples per task."),
    "batch_size": (int, "batch_size", "Examples per step."),
    "epochs": (int, "epochs", "Passes over each task."),
    "order": (str, "order", '"random", or numbers such as 2,0,1,0 (a task may come back).'),
}  # fmt: skip


def takes_stream(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's `stream` becomes the options of these names, all if none is given.

    The command is given those that were typed, by their names in Python.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        known = {name: _STREAM[name] for name in names or _STREAM}

        @functools.wraps(command)
        def wrapped(**typed: Any) -> None:
            found = {python: typed.pop(name) for name, (_, python, _) in known.items()}
            stream = {name: value for name, value in found.items() if value is not None}
            if "order" in stream:
                stream["order"] = _order(stream["order"])
            command(stream=stream, **typed)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "stream"]
        new = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, typer.Option(help=text, rich_help_panel=STREAM)],
            )
            for name, (kind, _, text) in known.items()
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapped.__signature__ = signature.replace(parameters=[*own, *new])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *new]}
        return wrapped

    return decorate


def read_settings(
    benchmark: str, learners: Iterable[str], assigned: Iterable[str], others: Iterable[str] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What `--set NAME=VALUE` and options without a name of their own ask for.

    Returns
    -------
    dict, dict
        Learner → settings; what the benchmark takes.
    """
    names = short_names(map(learner_reference, learners))
    kinds = {name: find_learner(text) for text, name in names.items()}
    takes = find_benchmark(benchmark_reference(benchmark)).options
    settings: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    stream = {}
    for name, value in [*map(_assignment, assigned), *_pairs(others)]:
        one, _, rest = name.rpartition(".")
        having = [who for who, kind in kinds.items() if name in setting_parameters(kind)]
        if one in kinds:
            settings[one][rest] = value
        elif having:
            for who in having:
                settings[who][name] = value
        elif name in takes:
            stream[name] = value
        else:  # the first learner's error says what there is
            settings[next(iter(kinds))][name] = value
    return settings, stream


def names_in(text: str) -> list[str]:
    """Names with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def say(console: Console, line: str) -> None:
    """Print a line as it is: paths may look like markup."""
    console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def absolute(stream: Mapping[str, Any]) -> dict[str, Any]:
    """`stream` for runs that may be gone on with from another folder."""
    data = stream.get("data")
    if data in (None, "sample") or not Path(data).expanduser().exists():
        return dict(stream)
    return {**stream, "data": os.path.abspath(Path(data).expanduser())}


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--set takes NAME=VALUE such as lr=0.1, got {text!r}")
    return name.strip().replace("-", "_"), _value(value)


def _pairs(words: Iterable[str]) -> list[tuple[str, Any]]:
    """`--name value` and `--name=value` as names and values; a name alone is True."""
    found = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"an option such as --lr was expected, got {word!r}")
        if "=" in word:
            found.append(_assignment(word[2:]))
        else:
            alone = not waiting or waiting[0].startswith("--")
            value = True if alone else _value(waiting.pop(0))
            found.append((word[2:].replace("-", "_"), value))
    return found


def _value(text: str) -> Any:
    """A Python or JSON literal; a text that is none is itself."""
    text = text.strip()
    words = {"true": True, "false": False, "null": None}
    try:
        return words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _order(text: str) -> str | tuple[int, ...]:
    if text == "random":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f'--order must be "random" or numbers such as 2,0,1; got {text!r}'
        ) from None
