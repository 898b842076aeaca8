"""Checks of what a caller passed; their errors name the value and what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

__all__ = [
    "class_ids",
    "close_to",
    "descriptor",
    "non_negative",
    "non_negative_int",
    "one_of",
    "positive",
    "positive_int",
]


def positive_int(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    return _whole(name, value, least=1)


def non_negative_int(name: str, value: Any) -> int:
    """`value` as an int of at least 0."""
    return _whole(name, value, least=0)


def non_negative(name: str, value: Any) -> float:
    """`value` as a finite float of at least 0."""
    number = _number(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {value!r:.100}")
    return number


def positive(name: str, value: Any) -> float:
    """`value` as a finite float above 0."""
    number = _number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {value!r:.100}")
    return number


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value`, which must be one of `choices`."""
    choices = list(choices)
    if value not in choices:
        known, meant = ", ".join(choices), close_to(value, choices)
        raise ValueError(f"{name} must be one of {known}; got {value!r:.100}{meant}")
    return str(value)


def close_to(value: Any, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name: the choice that it resembles, if one does.

    Examples
    --------
    >>> close_to("gemm", ["single", "gem"]), close_to("sgd", ["single", "gem"])
    (': did you mean gem?', '')
    """
    found = difflib.get_close_matches(str(value)[:100], choices, n=1)
    return f": did you mean {found[0]}?" if found else ""


def class_ids(name: str, values: Any) -> tuple[int, ...]:
    """`values` as different ints of at least 0, one or more, sorted."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of class ids, got {values!r:.100}")
    ids = sorted(non_negative_int(name, value) for value in values)
    if not ids:
        raise ValueError(f"{name} must be at least one, got none")
    if len(set(ids)) < len(ids):
        twice = next(one for one, other in pairwise(ids) if one == other)
        raise ValueError(f"{name} must be different, got {twice} twice")
    return tuple(ids)


def descriptor(t: Any) -> Hashable:
    """`t` as a task descriptor: any hashable value that equals itself.

    Tensors and arrays are refused although tensors are hashable: they hash by identity, so every
    batch would look like a new task.
    """
    if t is None:
        raise TypeError("t must be a task descriptor, got None")
    if isinstance(t, torch.Tensor | np.ndarray):
        raise TypeError(f"t must be a plain hashable value, got {t!r}; use t.item() or a tuple")
    try:
        hash(t)
    except TypeError:
        raise TypeError(f"t must be hashable (int, str, tuple, …), got {t!r}") from None
    if t != t:
        raise ValueError(f"t must equal itself to be found again, got {t!r}")
    return t  # type: ignore[no-any-return]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {value!r:.100}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r:.100}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r:.100}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r:.100}")
    return number
