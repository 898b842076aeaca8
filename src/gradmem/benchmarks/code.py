"""A hash of the code that a run is made with, as far as it is not gradmem's or a library's.

With it, runs are told apart whose settings have the same names: after a change in a file, with
another lambda, with the same loss of other class weights.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gradmem.benchmarks.benchmark import Benchmark

__all__ = ["code_of", "is_same_part"]

#: Packages whose code is known by their version.
LIBRARIES = {"gradmem", "torch", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"}


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
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__module__ == other.__module__ and _code_text(one) == _code_text(other)
    return one is other


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
    if value is None or isinstance(value, str | int | float | Tensor):
        return
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _value_texts(one)
    elif isinstance(value, partial):
        yield from _value_texts([value.func, *value.args, value.keywords])
    elif isinstance(value, type | FunctionType):
        yield from _part_texts(value)
        if "<" in value.__qualname__:  # a lambda, or defined in a function
            yield _code_text(value)
    elif vars_of := getattr(value, "__dict__", None):
        yield from _part_texts(type(value))
        public = {name: one for name, one in vars_of.items() if not name.startswith("_")}
        yield type(value).__qualname__ + _text(public)
        if isinstance(value, nn.Module):
            yield _text(value.state_dict())
            for child in value.children():
                yield from _value_texts(child)


def _module_texts(name: str) -> Iterator[str]:
    file = getattr(sys.modules.get(name), "__file__", None)
    if not _is_library(name) and file and os.path.isfile(file):
        yield _file_text(file, os.stat(file).st_mtime_ns)


def _is_library(module: str) -> bool:
    return not module or module.partition(".")[0] in LIBRARIES


@cache
def _file_text(file: str, written: int) -> str:
    return ast.dump(ast.parse(Path(file).read_text("utf-8")))


def _code_text(part: Any) -> str:
    """The code of a function or a class, with the values that it was made with."""
    if isinstance(part, type):
        return _text({name: one for name, one in vars(part).items() if not name.startswith("__d")})
    part = getattr(part, "__func__", part)
    if not isinstance(part, FunctionType):
        return _text(part)
    cells = [cell.cell_contents for cell in part.__closure__ or ()]
    return _text([part.__code__, part.__defaults__, part.__kwdefaults__, cells])


def _text(value: Any) -> str:
    """A text that differs where values do; without addresses in memory."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, CodeType):
        return _text([value.co_code.hex(), value.co_names, value.co_consts])
    if isinstance(value, FunctionType | staticmethod | classmethod):
        return _code_text(value)
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(numbers.tobytes()).hexdigest()}"
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
