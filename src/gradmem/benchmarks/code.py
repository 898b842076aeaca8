"""A hash of the code that a run is made with, as far as it is not gradmem's or a library's.

With it, runs are told apart whose settings have the same names: after a change in a file, with
another lambda, with the same loss of other class weights.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradmem.benchmarks.benchmark import Benchmark

__all__ = ["code_of", "is_same_part"]

#: Packages whose code is known by their version.
LIBRARIES = {"gradmem", "torch", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"}

#: Attributes of a class that say nothing of what it does, or where it stands in a file.
NOT_CODE = {"__dict__", "__doc__", "__weakref__", "__firstlineno__", "__static_attributes__"}


def code_of(parts: Iterable[Any], settings: Mapping[str, Any]) -> str | None:
    """A hash of what parts and settings are made of; None if their names say it all.

    Parts are benchmarks, classes and functions. Of those that are not a library's, the files are
    hashed in which they are defined, or the code itself where there is no file. Comments and layout
    do not change it, nor do files that these files import.
    """
    texts = [text for part in parts for text in _part_texts(part)]
    texts += [text for name in settings for text in _value_texts(settings[name])]
    if not texts:
        return None
    return hashlib.sha256("".join(sorted({*texts})).encode()).hexdigest()[:12]


def is_same_part(one: Any, other: Any) -> bool:
    """Whether two classes or functions are one, or functions of the same code and values."""
    if one is other:
        return True
    if not isinstance(one, FunctionType) or not isinstance(other, FunctionType):
        return False
    mine, others = _values_in(one), _values_in(other)
    return (one.__module__, _text(one.__code__), len(mine)) == (
        other.__module__,
        _text(other.__code__),
        len(others),
    ) and all(
        a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)
        for a, b in zip(mine, others, strict=True)
    )


def _part_texts(part: Any) -> Iterator[str]:
    if isinstance(part, Benchmark):
        yield from _module_texts(part.module)
        for maker in (part.continuum, part.network, part.score):
            yield from _part_texts(maker) if maker else ()
    for one in part.__mro__ if isinstance(part, type) else (part,):
        module = getattr(one, "__module__", None) or ""
        if found := [*_module_texts(module)]:
            yield from found
        elif not _is_library(module):
            yield _code_text(one)


def _value_texts(value: Any) -> Iterator[str]:
    """What the name or the text of a setting's value does not say."""
    if value is None or isinstance(value, str | int | float | Tensor | np.ndarray | os.PathLike):
        return
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _value_texts(one)
    elif isinstance(value, partial):
        yield from _value_texts([value.func, *value.args, value.keywords])
    elif not _is_known_by_name(value):
        kind = value if isinstance(value, type | FunctionType) else type(value)
        yield from _part_texts(kind)
        yield _text(value)


def _module_texts(name: str) -> Iterator[str]:
    file = getattr(sys.modules.get(name), "__file__", None)
    if not _is_library(name) and file and os.path.isfile(file):
        yield _file_text(file, os.stat(file).st_mtime_ns)


def _is_library(module: str) -> bool:
    return not module or module.partition(".")[0] in LIBRARIES


@cache
def _file_text(file: str, written: int) -> str:
    return ast.dump(ast.parse(Path(file).read_text("utf-8")))


def _is_known_by_name(value: Any) -> bool:
    """Whether it is a library's function or class, at the top of a module."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return False
    return _is_library(value.__module__ or "") and "<" not in value.__qualname__


def _values_in(function: FunctionType) -> list[Any]:
    """What a function was made with: values of the variables around it, and its defaults."""
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*around, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _code_text(part: Any, inside: frozenset[int] = frozenset()) -> str:
    """The code of a function or a class, with the values that it was made with."""
    if isinstance(part, type):
        own = {name: one for name, one in vars(part).items() if name not in NOT_CODE}
        return _text(own, inside)
    part = getattr(part, "__func__", part)
    if not isinstance(part, FunctionType):
        return _text(part, inside)
    return _text([part.__code__, *_values_in(part)], inside)


def _text(value: Any, inside: frozenset[int] = frozenset()) -> str:
    """A text that differs where values do, and is the same in every process.

    Of objects of Python's own library it names the class alone. `inside` are the objects that the
    value was found in: one that refers to itself comes to an end.
    """
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if id(value) in inside:
        return "…"
    inside = inside | {id(value)}
    within = partial(_text, inside=inside)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{within(name)}:{within(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(within, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(within, value))) + "}"
    if isinstance(value, CodeType):
        return within([value.co_code.hex(), value.co_names, value.co_consts])
    if isinstance(value, Tensor):
        return within(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()) + str(
            (value.dtype, tuple(value.shape))
        )
    if isinstance(value, np.ndarray):
        shape = f"{value.dtype}{value.shape}"
        return shape + hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, partial):
        return within([value.func, value.args, value.keywords])
    if isinstance(value, MethodType):
        return within([value.__func__, value.__self__])
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, BuiltinFunctionType | ModuleType) or _is_known_by_name(value):
        return getattr(value, "__name__", "") if isinstance(value, ModuleType) else name
    if isinstance(value, type):
        return name + _code_text(value, inside)
    if isinstance(value, FunctionType | staticmethod | classmethod):
        return _code_text(value, inside)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return str(value) if isinstance(value, os.PathLike) else kind
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):  # hooks have numbers that differ between processes
        parts = ("_parameters", "_buffers", "_modules")
        own = {name: one for name, one in own.items() if name[0] != "_" or name in parts}
    return kind + (within(own) if own else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)))
