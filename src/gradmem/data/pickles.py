"""Reading a pickle without running it.

A pickle is a program for a small stack machine, and Python's own machine can be told to import and
call anything. This one has only the instructions that make dictionaries, lists, tuples, strings,
whole numbers and arrays of bytes. It imports nothing and calls nothing: what a pickle names is
looked up in a short list of names, and stays a name.

A large string of bytes is read straight into the memory of the array it becomes.
"""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gradmem.data.idx import DataError

__all__ = ["read_pickle"]

Bytes = NDArray[np.uint8]

#: Limits, well above the 155,249,918 bytes and 200,362 instructions of CIFAR-100's training set,
#: that keep a small hostile file from filling the memory. What is read and what is made of it, by
#: copying, may each have so many bytes.
MOST_BYTES = 1 << 28
MOST_STEPS = 1_000_000
#: Strings above this size are taken for the content of an array, and read this much at a time.
CHUNK = 1 << 16


class _Name(Enum):
    """What a pickle may name."""

    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "_reconstruct"
    FROMBUFFER = "_frombuffer"
    ENCODE = "_codecs.encode"
    UINT8 = "numpy.dtype('uint8')"  # has no name of its own: it is made from DTYPE


#: Python 2's and Python 3's numpy each have their own names for one thing.
NAMES = {
    "numpy.ndarray": _Name.NDARRAY,
    "numpy.dtype": _Name.DTYPE,
    "numpy.core.multiarray._reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": _Name.RECONSTRUCT,
    "numpy.core.numeric._frombuffer": _Name.FROMBUFFER,
    "numpy._core.numeric._frombuffer": _Name.FROMBUFFER,
    "_codecs.encode": _Name.ENCODE,  # how Python 3 writes bytes for Python 2
}

# Instructions with a number or a length after them, and how it is written.
NUMBERS = {pickle.BININT: "<i", pickle.BININT1: "<B", pickle.BININT2: "<H"}
STRINGS = {
    pickle.SHORT_BINSTRING: "<B",  # Python 2's str
    pickle.BINSTRING: "<i",
    pickle.SHORT_BINBYTES: "<B",
    pickle.BINBYTES: "<I",
    pickle.BINBYTES8: "<Q",
    pickle.BYTEARRAY8: "<Q",
}
TEXTS = {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I", pickle.BINUNICODE8: "<Q"}
PUTS = {pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
GETS = {pickle.BINGET: "<B", pickle.LONG_BINGET: "<I"}
TUPLES = {pickle.EMPTY_TUPLE: 0, pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
CONSTANTS = {pickle.NONE: None, pickle.NEWFALSE: False, pickle.NEWTRUE: True}


def read_pickle(stream: IO[bytes], name: str) -> dict[str, Any]:
    """The dictionary in a pickle.

    Parameters
    ----------
    stream
        The pickle, of protocol 2 to 5, and nothing after it.
    name
        What to call it in an error.

    Returns
    -------
    dict
        By name, also where the pickle has Python 2's strings. The values are None, bools, ints,
        str, bytes, uint8 arrays, and lists, tuples and dictionaries of such.

    Raises
    ------
    DataError
        If it is damaged, or asks for anything else. Nothing has been run.

    Examples
    --------
    >>> import io, os, pickle
    >>> read_pickle(io.BytesIO(pickle.dumps({b"data": np.arange(3, dtype=np.uint8)})), "good")
    {'data': array([0, 1, 2], dtype=uint8)}
    >>> read_pickle(io.BytesIO(pickle.dumps({b"data": os.system})), "bad")
    Traceback (most recent call last):
    gradmem.data.idx.DataError: bad cannot be read: it asks for ...system, ...
    """
    machine = _Machine(stream)
    try:
        return _plain(machine.run())
    except IndexError:
        raise DataError(f"{name} cannot be read: an instruction lacks what it works on") from None
    except ValueError as error:
        raise DataError(f"{name} cannot be read: {error}") from error


@dataclass(eq=False)
class _Content:
    """A large string: the content of an array to come."""

    values: Bytes


@dataclass(eq=False)
class _Array:
    """An array, which a pickle first makes and later fills."""

    values: Bytes | None = None


class _Machine:
    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}  # by number, so that no number makes it large
        self.to_read = self.to_copy = MOST_BYTES

    def run(self) -> Any:
        """What is on top of the stack at the end."""
        for _ in range(MOST_STEPS):
            instruction = self.take(1)
            if instruction == pickle.STOP:
                if self.stream.read(1):
                    raise ValueError("it goes on after its end")
                return self.stack.pop()
            self.step(instruction)
        raise ValueError(f"it has more than {MOST_STEPS:,} instructions")

    def step(self, op: bytes) -> None:
        stack = self.stack
        if op in PUTS:
            self.memo[self.number(PUTS[op])] = stack[-1]
        elif op in STRINGS:
            stack.append(self.string(self.number(STRINGS[op])))
        elif op in NUMBERS:
            stack.append(self.number(NUMBERS[op]))
        elif op in GETS:
            stack.append(self.remembered(self.number(GETS[op])))
        elif op in TEXTS:
            stack.append(self.take(self.number(TEXTS[op])).decode())
        elif op in CONSTANTS:
            stack.append(CONSTANTS[op])
        elif op in TUPLES:
            n = TUPLES[op]
            stack.append(tuple(reversed([stack.pop() for _ in range(n)])))
        elif op == pickle.MEMOIZE:
            self.memo[len(self.memo)] = stack[-1]
        elif op == pickle.MARK:
            self.below.append(stack)
            self.stack = []
        elif op == pickle.TUPLE:
            marked = tuple(self.since_mark())
            self.stack.append(marked)
        elif op == pickle.EMPTY_LIST:
            stack.append([])
        elif op in (pickle.APPEND, pickle.APPENDS):
            values = [stack.pop()] if op == pickle.APPEND else self.since_mark()
            _expect(self.stack[-1], list).extend(values)
        elif op == pickle.EMPTY_DICT:
            stack.append({})
        elif op in (pickle.SETITEM, pickle.SETITEMS):
            pair = op == pickle.SETITEM
            values = [stack.pop(), stack.pop()][::-1] if pair else self.since_mark()
            self.set_items(values)
        elif op == pickle.GLOBAL:
            stack.append(_name(self.line(), self.line()))
        elif op == pickle.STACK_GLOBAL:
            last = stack.pop()
            stack.append(_name(_expect(stack.pop(), str), _expect(last, str)))
        elif op == pickle.REDUCE:
            arguments = stack.pop()
            stack.append(self.made(stack.pop(), arguments))
        elif op == pickle.BUILD:
            state = stack.pop()
            self.complete(stack[-1], state)
        elif op == pickle.PROTO:
            if (protocol := self.number("<B")) > 5:
                raise ValueError(f"it is of protocol {protocol}; 2 to 5 are known")
        elif op == pickle.FRAME:
            self.take(8)  # how long a stretch is: a help for readers that read ahead
        else:
            raise ValueError(f"it has {_instruction(op)}, which data like this does not need")

    def take(self, n: int) -> bytes:
        self.account_for(n)
        data = self.stream.read(n)
        if len(data) < n:
            raise ValueError("it is truncated")
        return data

    def string(self, n: int) -> bytes | _Content:
        if n <= CHUNK:
            return self.take(n)
        self.account_for(n)
        # Memory that is only reserved until there is something to put there.
        values = np.empty(n, np.uint8)
        for start in range(0, n, CHUNK):
            piece = self.stream.read(min(CHUNK, n - start))
            if len(piece) < min(CHUNK, n - start):
                raise ValueError("it is truncated")
            values[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        return _Content(values)

    def account_for(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"it has a string of length {n}")
        self.to_read -= n
        if self.to_read < 0:
            raise ValueError(f"it says that it has more than {MOST_BYTES:,} bytes")

    def account_for_copy(self, n: int) -> None:
        self.to_copy -= n
        if self.to_copy < 0:
            raise ValueError(f"it makes more than {MOST_BYTES:,} bytes of what it has")

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def line(self) -> str:
        line = self.stream.readline(1000)
        if not line.endswith(b"\n"):
            raise ValueError("it is truncated")
        return line[:-1].decode()

    def remembered(self, number: int) -> Any:
        if number not in self.memo:
            raise ValueError(f"it refers to its value {number}, which it does not have")
        return self.memo[number]

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def set_items(self, values: list[Any]) -> None:
        items = _expect(self.stack[-1], dict)
        if len(values) % 2:
            raise ValueError("it has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes):
                raise ValueError(f"it has a key that is no string but {type(key).__name__}")
            items[key] = value

    def made(self, name: Any, arguments: Any) -> Any:
        """What a call would give: calls that real files make are known, and no other is."""
        match name, arguments:
            case _Name.RECONSTRUCT, (_Name.NDARRAY, (0,), b"b" | "b"):
                return _Array()
            case _Name.FROMBUFFER, (content, _Name.UINT8, shape, "C"):
                return _Array(self.filled(content, shape))
            case _Name.DTYPE, (b"u1" | "u1", 0, 1):
                return _Name.UINT8
            case _Name.DTYPE, (bytes() | str() as other, *_):
                raise ValueError(
                    f"it has an array of type {other[:100]!r}; only 'u1' (bytes) is read"
                )
            case _Name.ENCODE, (str() as text, "latin1"):
                return self.encoded(text)
        raise ValueError(f"it has an unknown call of {_called(name)}")

    def complete(self, value: Any, state: Any) -> None:
        """What `value.__setstate__(state)` would do, for the states that real files give."""
        match value, state:
            case _Array(), (1, shape, _Name.UINT8, False, content):
                value.values = self.filled(content, shape)
            case _Name.UINT8, (3, b"|" | "|", None, None, None, -1, -1, 0):
                pass
            case _:
                raise ValueError(f"it gives an unknown state to {_called(value)}")

    def encoded(self, text: str) -> bytes | _Content:
        self.account_for_copy(len(text))
        encoded = text.encode("latin-1")
        if len(encoded) <= CHUNK:
            return encoded
        return _Content(np.frombuffer(bytearray(encoded), np.uint8))

    def filled(self, content: Any, shape: Any) -> Bytes:
        if isinstance(content, bytes):
            self.account_for_copy(len(content))
            values = np.frombuffer(bytearray(content), np.uint8)  # writable, as an array is
        elif isinstance(content, _Content):
            values = content.values
        else:
            raise ValueError(f"it fills an array with {type(content).__name__}, not with bytes")
        if not isinstance(shape, tuple) or not 1 <= len(shape) <= 4:
            raise ValueError("it has an array that has not 1 to 4 dimensions")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("it has an array with a size that is no whole number")
        # Python's integers: the sizes may be more than 64 bits can count.
        if math.prod(shape) != len(values):
            raise ValueError(f"it has an array of shape {shape} with {len(values)} bytes")
        return values.reshape(shape)


def _name(module: str, name: str) -> _Name:
    full = f"{module}.{name}"
    if full not in NAMES:
        raise ValueError(
            f"it asks for {full[:100]}, and nothing is built but lists, strings, whole numbers and "
            "arrays of bytes; nothing was run"
        )
    return NAMES[full]


def _plain(value: Any) -> dict[str, Any]:
    """The dictionary that was read, with names for keys and arrays for arrays."""
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: _whole(item)
        for key, item in _expect(value, dict).items()
    }


def _whole(value: Any) -> Any:
    if not isinstance(value, _Array):
        return value
    if value.values is None:
        raise ValueError("it has an array without content")
    return value.values


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} where {kind.__name__} is expected")
    return value


def _called(value: Any) -> str:
    # Never a repr: of lists that hold each other it can be endless.
    return value.value if isinstance(value, _Name) else type(value).__name__


def _instruction(op: bytes) -> str:
    import pickletools

    names = {known.code: known.name for known in pickletools.opcodes}
    name = names.get(op.decode("latin-1"))
    return f"the instruction {name}" if name else f"0x{op.hex()} for an instruction"
