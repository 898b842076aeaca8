"""Benchmarks and learners by name: gradmem's own, and anybody's as `module:name`.

A part is written down as text, so that runs can be described in files and made in other processes.
`my_module:digits` is the benchmark or the learner's class `digits` of a module that can be
imported, also from the current folder; `folder/file.py:digits` is that of a file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from gradmem.benchmarks.benchmark import Benchmark
from gradmem.benchmarks.cifar import CIFAR100_INCREMENTAL
from gradmem.benchmarks.code import is_same_part
from gradmem.benchmarks.mnist import (
    MNIST_COMPOSED,
    MNIST_MANY_PERMUTATIONS,
    MNIST_PERMUTATIONS,
    MNIST_ROTATIONS,
    PERMUTED_MNIST,
    PERMUTED_MNIST_17,
    ROTATED_MNIST,
)
from gradmem.learners import LEARNERS, Learner
from gradmem.validation import one_of

__all__ = [
    "BENCHMARKS",
    "LearnerKind",
    "benchmark_reference",
    "can_be_imported",
    "find_benchmark",
    "find_learner",
    "is_given",
    "is_own",
    "learner_reference",
    "learners_of",
    "setting_parameters",
    "short_names",
    "shown",
]

#: A learner's class, or a function that makes one: called with a network, settings and a seed.
LearnerKind = Callable[..., Learner]

#: Every benchmark of gradmem by its name.
BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        MNIST_ROTATIONS,
        MNIST_PERMUTATIONS,
        MNIST_MANY_PERMUTATIONS,
        CIFAR100_INCREMENTAL,
        MNIST_COMPOSED,
        PERMUTED_MNIST,
        ROTATED_MNIST,
        PERMUTED_MNIST_17,
    )
}

#: Stands in the reference of a part that no other process can import.
LOCAL = "<locals>"

#: The parts that were passed as objects to this process, by reference.
_passed: dict[str, Any] = {}

#: The references that led this process to a part.
_found: set[str] = set()


def find_benchmark(text: str) -> Benchmark:
    """The benchmark of a reference."""
    found = _find("benchmark", text, BENCHMARKS)
    if not isinstance(found, Benchmark):
        raise TypeError(f"{text} must be a gradmem.Benchmark, got {found!r}")
    return found


def find_learner(text: str) -> LearnerKind:
    """The learner's class of a reference, or the function that makes it."""
    found = _find("learner", text, LEARNERS)
    needed = ("observe", "predict") if isinstance(found, type) else ("__call__",)
    if not all(hasattr(found, name) for name in needed):
        raise TypeError(f"{text} must be a class with observe and predict, got {found!r}")
    return found  # type: ignore[no-any-return]


def benchmark_reference(part: str | Benchmark) -> str:
    """The text by which a benchmark is found again: its name, or its module and its name."""
    if isinstance(part, str):
        found, where = find_benchmark(part), _absolute(part).rpartition(":")[0]
        return f"{where}:{found.name}" if where and LOCAL not in part else part
    if not isinstance(part, Benchmark):
        raise TypeError(f"a benchmark must be a name or a gradmem.Benchmark, got {part!r}")
    if BENCHMARKS.get(part.name) is part:
        return part.name
    for module in (part.module, *list(sys.modules)):
        values = getattr(sys.modules.get(module), "__dict__", {}).values()
        if any(value is part for value in values):
            return _remember(part, module, part.name, True)
    return _remember(part, part.module, part.name, False)


def learner_reference(part: str | LearnerKind) -> str:
    """The text by which a learner is found again: its name, or its module and its name.

    Examples
    --------
    >>> import gradmem as gm
    >>> learner_reference(gm.GEM), learner_reference("my_module:MyLearner")
    ('gem', 'my_module:MyLearner')
    """
    if isinstance(part, str):
        return _absolute(part)
    for name, value in LEARNERS.items():
        if value is part:
            return name
    module, name = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    if not callable(part) or not name:
        raise TypeError(f"a learner must be a name, a class or a function, got {part!r}")
    return _remember(part, module, name, _attribute(sys.modules.get(module), name) is part)


def shown(text: str) -> str:
    """A part's name for people and files.

    Examples
    --------
    >>> shown("gem"), shown("my_module:digits"), shown("module:<locals>.digits")
    ('gem', 'digits', 'digits')
    """
    name = text.rpartition(":")[2].rpartition(f"{LOCAL}.")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def learners_of(benchmark: str, names: Iterable[str]) -> list[str]:
    """References of the learners that a benchmark names: gradmem's, or of its own module."""
    module = benchmark.rpartition(":")[0]
    return [name if name in LEARNERS else f"{module}:{name}" for name in names]


def short_names(references: Iterable[str]) -> dict[str, str]:
    """Reference → a name for people and files, longer where two would have the same.

    Examples
    --------
    >>> short_names(["gem", "old:Mine", "new:Mine"])
    {'gem': 'gem', 'old:Mine': 'old-Mine', 'new:Mine': 'new-Mine'}
    """
    short = {text: shown(text) for text in references}
    names = list(short.values())
    return {
        text: name if names.count(name) == 1 else re.sub(r"[^\w.-]+", "-", text).strip("-.")
        for text, name in short.items()
    }


def can_be_imported(text: str) -> bool:
    """Whether another process can find what a reference means."""
    return LOCAL not in text and not text.startswith("__main__:")


def is_own(text: str) -> bool:
    """Whether a reference means a part of gradmem's own."""
    return text in BENCHMARKS or text in LEARNERS


def is_given(text: str) -> bool:
    """Whether a reference means gradmem's own part, or one this process has used before.

    A file may name such parts: no other code runs because of it.
    """
    return is_own(text) or text in _passed or text in _found


def setting_parameters(kind: LearnerKind) -> dict[str, inspect.Parameter]:
    """What can be set for a learner by name: its constructor's parameters but the network.

    A constructor that passes `**settings` on has those of the next class as well.

    Examples
    --------
    >>> import gradmem as gm
    >>> setting_parameters(gm.GEM)["memories"].default
    256
    """
    if isinstance(kind, type):
        makers = [vars(c)["__init__"] for c in kind.__mro__ if "__init__" in vars(c)]
    else:
        makers = [kind]
    found: dict[str, inspect.Parameter] = {}
    for maker in makers:
        parameters = list(inspect.signature(maker).parameters.values())
        for one in parameters[2 if isinstance(kind, type) else 1 :]:  # after self, network
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                found.setdefault(one.name, one)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


def _find(what: str, text: str, known: Mapping[str, Any]) -> Any:
    if text in known:
        return known[text]
    if text in _passed:
        return _passed[text]
    where, _, name = text.rpartition(":")
    if not where:
        one_of(what, text, [*known, "module:name"])
    if not can_be_imported(text):
        raise ValueError(
            f"{what} {shown(text)} is known to the process that made it and to no other: define it "
            "at the top of a module"
        )
    module = _load(where)
    found = (_benchmark_in if what == "benchmark" else _attribute)(module, name)
    if found is None:
        kinds = Benchmark if what == "benchmark" else type
        has = [key for key, value in vars(module).items() if isinstance(value, kinds)]
        raise ValueError(f"{where} has no {name}; it has {', '.join(has) or 'none'}")
    _found.add(text)
    return found


def _load(where: str) -> ModuleType:
    """The module of a name or a file; errors raised inside it are passed on."""
    if where.endswith(".py"):
        return _load_file(Path(where))
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {where} in {here} or among what is installed"
        ) from None


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    whole = os.path.abspath(file)
    numbered = f"{file.stem}_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    for name in (file.stem, numbered):
        known = sys.modules.get(name)
        if known is None:
            break
        if os.path.abspath(getattr(known, "__file__", None) or "") == whole:
            return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that it finds its neighbours, as a script does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _remember(part: Any, module: str, name: str, is_in_module: bool) -> str:
    """The reference of a part that was passed as an object, by which this process finds it."""
    name = name if is_in_module else f"{LOCAL}.{name.rpartition('.')[2]}"
    first = text = f"{_importable_name(module)}:{name}"
    numbers = count(2)
    while not is_in_module and text in _passed and not is_same_part(_passed[text], part):
        text = f"{first}-{next(numbers)}"  # another class or function of that name
    _passed[text] = part
    return text


def _absolute(text: str) -> str:
    """A reference to a file with the file's whole path; other references as they are."""
    where, _, name = text.rpartition(":")
    return f"{os.path.abspath(where)}:{name}" if where.endswith(".py") else text


def _attribute(module: ModuleType | None, name: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def _benchmark_in(module: ModuleType, name: str) -> Any:
    """The module's benchmark of that name, else the value of the variable of that name."""
    for value in vars(module).values():
        if isinstance(value, Benchmark) and value.name == name:
            return value
    return _attribute(module, name)


def _importable_name(module: str) -> str:
    """The module's name for other processes, also if it runs as a script here."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module
