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
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradmem.benchmarks.benchmark import Benchmark

__all__ = ["code_of", "is_same_part"]

#: Packages whose code is known by their version.
LIBRARIES = {"gradmem", "torch", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"}

#: Values of which their text says it all.
SCALARS = (str, int, float, complex, bytes)
TOLD = (*SCALARS, range, torch.dtype, torch.device, Tensor, np.ndarray, os.PathLike)

Array = np.ndarray[Any, Any]

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
    """Whether two parts are one, or were made by the same code with the same values."""
    if one is other or type(one) is not type(other):
        return one is other
    if getattr(one, "__module__", None) != getattr(other, "__module__", None):
        return False
    return _Text().of(one) == _Text().of(other)


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
            yield _Text().of(one)


def _value_texts(value: Any) -> Iterator[str]:
    """What the name or the text of a setting's value does not say."""
    if value is None or isinstance(value, TOLD):
        return
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _value_texts(one)
    elif isinstance(value, partial):
        yield from _value_texts([value.func, *value.args, value.keywords])
    elif not _is_known_by_name(value):
        kind = value if isinstance(value, type | FunctionType) else type(value)
        yield from _part_texts(kind)
        yield _Text().of(value)


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


class _Text:
    """Texts that differ where values do, and are the same in every process."""

    def __init__(self) -> None:
        #: What was met before, with its number: it may refer to itself.
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        if value is None or isinstance(value, SCALARS):
            return repr(value)
        if isinstance(value, tuple):
            return "(" + ",".join(map(self.of, value)) + ")"
        if isinstance(value, frozenset):
            return "{" + ",".join(sorted(map(self.of, value))) + "}"
        if isinstance(value, CodeType):
            return self.of((value.co_code.hex(), value.co_names, value.co_consts))
        if id(value) in self._met:
            return f"#{self._met[id(value)][0]}"
        self._met[id(value)] = len(self._met), value
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self.of(k)}:{self.of(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self.of, value)) + "]"
        if isinstance(value, set):
            return "{" + ",".join(sorted(map(self.of, value))) + "}"
        if isinstance(value, Tensor | np.ndarray):
            return _numbers(value)
        return self._of_object(value)

    def _of_object(self, value: Any) -> str:
        if isinstance(value, partial):
            return self.of((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self.of((value.__func__, value.__self__))
        if isinstance(value, staticmethod | classmethod):
            return self.of(value.__func__)
        if isinstance(value, ModuleType):
            return value.__name__
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if isinstance(value, BuiltinFunctionType) or _is_known_by_name(value):
            return name
        if isinstance(value, type):
            own = {key: one for key, one in vars(value).items() if key not in NOT_CODE}
            return name + self.of((value.__bases__, own))
        if isinstance(value, FunctionType):
            around = tuple(map(_content, value.__closure__ or ()))
            return self.of((value.__code__, around, value.__defaults__, value.__kwdefaults__))
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return kind + (self.of(own) if (own := _attributes(value)) else _without_address(value))


def _attributes(value: Any) -> dict[str, Any]:
    """What says what an object does: of gradmem's, options alone, and not what they hold by now."""
    package = type(value).__module__.partition(".")[0]
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if package in sys.stdlib_module_names:
        return {}
    if isinstance(value, nn.Module):  # hooks have numbers that differ between processes
        parts = ("_parameters", "_buffers", "_modules")
        return {name: one for name, one in own.items() if name[0] != "_" or name in parts}
    if package == "gradmem":
        return {name: one for name, one in own.items() if name[0] != "_"}
    return own


def _content(cell: CellType) -> Any:
    """The value of a variable around a function; nothing where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _numbers(value: Tensor | Array) -> str:
    about = f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided:
            return f"{about}{value.layout}"
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return about + hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _without_address(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
