"""The options of the commands, each once, and what is read from them."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gradmem.benchmarks import lookup
from gradmem.learners import LEARNERS
from gradmem.validation import close_to, one_of

__all__ = [
    "ANY_OPTION",
    "OPTION_NAMES",
    "OWN",
    "Benchmark",
    "Cpus",
    "Device",
    "Every",
    "Gpus",
    "Job",
    "Learner",
    "Learners",
    "On",
    "Out",
    "Overwrite",
    "RetryFailed",
    "SaveEvery",
    "Seed",
    "Set",
    "Shuffled",
    "TensorBoard",
    "Workers",
    "absolute",
    "as_typed",
    "assignments",
    "names_in",
    "of_command",
    "read_settings",
    "repeated",
    "some_of",
    "takes_stream",
    "what",
    "where",
]

#: Headings in a command's help.
WHAT = "What is run"
STREAM = "The continuum (where left out, as the benchmark has it)"
WHERE = "Where it is run"

#: For commands that take any `--name value` as a setting.
ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}

#: Options with another name than in Python.
OPTION_NAMES = {"n_tasks": "--tasks", "examples_per_task": "--examples"}

#: Types of settings that can be typed.
TYPED = {"int", "float", "str", "bool", "Literal"}

#: How a part of your own is named, for help.
OWN = "or your own: module:name"


def what(text: str, *names: str, **more: Any) -> Any:
    """An option about what is run, with its help text."""
    return typer.Option(*names, help=text, rich_help_panel=WHAT, **more)


def where(text: str, *names: str, **more: Any) -> Any:
    """An option about where it is run, with its help text."""
    return typer.Option(*names, help=text, rich_help_panel=WHERE, **more)


def _completes(names: Iterable[str]) -> dict[str, Any]:
    """For a shell: the names that may be typed."""
    return {"autocompletion": lambda: [*names]}


Benchmark = Annotated[
    str,
    what(f"{', '.join(lookup.BENCHMARKS)}, {OWN}.", "--benchmark", **_completes(lookup.BENCHMARKS)),
]
Learner = Annotated[
    str, what(f"{', '.join(LEARNERS)}, {OWN}.", "--learner", **_completes(LEARNERS))
]
Learners = Annotated[
    str | None,
    what("Names with commas between them. (default: all that the benchmark has settings for)"),
]
Set = Annotated[
    list[str] | None,
    what(
        "A setting of the learners that have it, or of one: gem.margin=0. For run and compare "
        "--NAME VALUE does the same. `gradmem learners` lists them. (default: the benchmark's)",
        "--set",
        metavar="NAME=VALUE",
    ),
]
Seed = Annotated[int, what("Of data, network and learner.")]
Shuffled = Annotated[bool, what("Mix all tasks' examples (iid data).", "--shuffled")]
Every = Annotated[
    int | None, what("Also evaluate every so many examples, for learning curves. (default: off)")
]
Out = Annotated[Path | None, where("Folder for the results.")]
SaveEvery = Annotated[
    int | None,
    where(
        "Save every so many examples, too; each task's end is saved. A run that was stopped "
        "goes on when the same command is given again."
    ),
]
Overwrite = Annotated[
    bool, where("Compute again, also in place of another experiment's result.", "--overwrite")
]
Device = Annotated[str | None, where("cpu, cuda, cuda:1, …")]
Workers = Annotated[
    int | None,
    where(
        "Runs at a time. (default: by the number of cores; on a GPU: 1; on ray: as many as it has "
        "room for; on slurm: 16)"
    ),
]
On = Annotated[
    str | None,
    where(
        "Where runs are made: here, ray (starts one), ray:ADDRESS, slurm, slurm:local. "
        '(default: here; needs "gradmem\\[ray]" or "gradmem\\[slurm]"; see docs/CLUSTER.md)'
    ),
]
Cpus = Annotated[int | None, where("Cores of each worker on ray or slurm. (default: 1)")]
Gpus = Annotated[
    float | None,
    where(
        "GPUs of each worker on ray or slurm; on ray also a part, such as 0.25. (default: 1 with "
        "--device cuda)"
    ),
]
Job = Annotated[
    list[str] | None,
    where(
        "What submitit knows of Slurm's jobs: timeout_min=60, slurm_partition=gpu, …",
        "--job",
        metavar="NAME=VALUE",
    ),
]
RetryFailed = Annotated[bool, where("Run again what failed.", "--retry-failed")]
TensorBoard = Annotated[
    Path | None,
    where('Folder to log to for TensorBoard. (default: off; needs "gradmem\\[tensorboard]")'),
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
    benchmark: str,
    learners: Iterable[str],
    assigned: Iterable[str],
    others: Iterable[str] = (),
    own: Iterable[str] = (),
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The settings in `--set NAME=VALUE` and in other options, `--NAME VALUE`.

    `own` are the options of the command itself, one of which may have been meant.

    Returns
    -------
    dict, dict
        Learner → settings; what the benchmark takes.
    """
    names = lookup.short_names(map(lookup.learner_reference, learners))
    kinds = {name: lookup.find_learner(text) for text, name in names.items()}
    takes = lookup.find_benchmark(lookup.benchmark_reference(benchmark)).options
    further = [*map(_option, takes), *own]
    settings: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    stream = {}
    for name, value in map(_assignment, [*assigned, *_assignments(others)]):
        one, _, rest = name.rpartition(".")
        having = [who for who, kind in kinds.items() if name in lookup.setting_parameters(kind)]
        if one in kinds:
            _check_setting(one, kinds[one], rest, value, further)
            settings[one][rest] = value
        elif having:
            for who in having:
                settings[who][name] = value
        elif name in takes:
            stream[name] = value
        else:
            who, kind = next(iter(kinds.items()))
            _check_setting(who, kind, name, value, further)
    return settings, stream


def of_command(ctx: typer.Context) -> list[str]:
    """The options that a command has of its own."""
    return [name for parameter in ctx.command.params for name in parameter.opts]


def as_typed(message: str, option: str = "--data ") -> str:
    """A message about missing data with what is typed in place of what Python is told."""
    for quoted, value in (("FOLDER", "FOLDER"), ('"sample"', "sample")):
        message = message.replace(f"pass data={quoted}", f"give {option}{value}")
    return message


def _check_setting(
    learner: str, kind: lookup.LearnerKind, name: str, value: Any, further: Iterable[str]
) -> None:
    """Refuse a setting that a learner lacks; the message lists what can be typed."""
    known = lookup.setting_parameters(kind)
    if name in known:
        return
    typed = [_option(own) for own, parameter in known.items() if _can_be_typed(parameter)]
    meant = close_to(_option(name), [*typed, *further])
    raise ValueError(
        f"{learner} has no setting {name} (got {value!r}); it has {', '.join(typed) or 'none'}"
        f"{meant}"
    )


def _option(name: str) -> str:
    return OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")


def _can_be_typed(parameter: inspect.Parameter) -> bool:
    """Whether a setting may be a number, a text or a switch; one without a type may be."""
    if parameter.annotation is parameter.empty:
        return not callable(parameter.default) or parameter.default is parameter.empty
    kind = parameter.annotation
    words = {kind.__name__} if isinstance(kind, type) else set(re.findall(r"\w+", str(kind)))
    return parameter.name != "seed" and "Callable" not in words and bool(words & TYPED)


def assignments(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """Name → value of `option NAME=VALUE`, which may be given several times."""
    return dict(_assignment(text, option) for text in texts)


def names_in(text: str) -> list[str]:
    """Names with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def some_of(what: str, text: str, known: Iterable[str]) -> list[str]:
    """Those of the known names that a text has, in their own order."""
    asked = [one_of(what, name, known) for name in names_in(text)]
    return [name for name in known if name in asked]


def repeated(words: Iterable[str], options: Mapping[str, Any]) -> str:
    """The command that repeats runs: its words, and options with their values, None for none.

    The folder of the data is no part of it, nor is a device that is the usual one.
    """
    usual = {"--device": "cpu"}
    found = {name: value for name, value in options.items() if value != usual.get(name)}
    if found.get("--data") != "sample":
        found.pop("--data", None)
    return " ".join([*words, *(f"{name} {value}" for name, value in found.items())])


def absolute(stream: Mapping[str, Any]) -> dict[str, Any]:
    """`stream` with an absolute path to the data, for runs that go on from another folder."""
    data = stream.get("data")
    if data in (None, "sample") or not Path(os.path.expanduser(data)).exists():
        return dict(stream)
    return {**stream, "data": os.path.abspath(os.path.expanduser(data))}


def _assignment(text: str, option: str = "--set") -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{option} takes NAME=VALUE such as lr=0.1, got {text!r}")
    return name.strip().replace("-", "_"), _value(value)


def _assignments(words: Iterable[str]) -> list[str]:
    """`--name value` and `--name=value` as `name=value`; a name without a value is true."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word[2:])
        elif found and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            raise ValueError(f"an option such as --lr was expected, got {word!r}")
    return [text if "=" in text else f"{text}=true" for text in found]


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
