"""Reading a pickle without running it.

Python's own reader imports and calls whatever a pickle names. Here, a subclass of it knows only the
instructions that make dictionaries, lists, tuples, strings, whole numbers and arrays of bytes. It
imports nothing and calls nothing: what a pickle names is looked up in a short list of names, and
stays a name.

The subclass is of `pickle._Unpickler`, which is written in Python. `pickle.Unpickler`, in C, has
instructions that cannot be taken away, and keeps its memo in an array, so that a pickle of 7 bytes
makes it take 2 GiB.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gradmem.data.errors import DataError

__all__ = ["read_pickle"]

#: Limits, well above the 155,249,918 bytes and 450,408 reads of CIFAR-100's training set, that keep
#: a small hostile file from filling the memory. What is read and what is made of it, by copying,
#: may each have so many bytes.
MOST_BYTES = 1 << 28
MOST_READS = 2_000_000
#: Strings above this size are taken for the content of an array, and read this much at a time.
CHUNK = 1 << 16
#: What a pickle may name. Python 2's and Python 3's numpy have different names for one thing.
NAMES = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.numeric._frombuffer",
    "numpy._core.numeric._frombuffer",
    "_codecs.encode",  # how Python 3 writes bytes for Python 2
}
#: The instructions of Python's reader that are kept as they are.
KEPT = """
    PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING
    SHORT_BINBYTES BINBYTES SHORT_BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST
    APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL
    STACK_GLOBAL
"""


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
        str, bytes (bytearray above `CHUNK`), uint8 arrays, and lists, tuples and dictionaries of
        such.

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
    gradmem.data.errors.DataError: bad cannot be read: it asks for '...system', ...
    """
    try:
        found = _Unpickler(_Limited(stream), encoding="bytes").load()
        if stream.read(1):
            raise ValueError("it goes on after its end")
        if type(found) is not _Dict:
            raise ValueError(f"it has {type(found).__name__} where dict is expected")
    except IndexError:
        raise DataError(f"{name} cannot be read: an instruction lacks what it works on") from None
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, BufferError) as error:
        raise DataError(f"{name} cannot be read: {error}") from error
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: (
            value.values if isinstance(value, _Array) else value
        )
        for key, value in found.items()
    }


class _Limited:
    """A stream that is read whole, up to the limits; as bytearrays where much is asked for."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.bytes_left, self.reads_left = MOST_BYTES, MOST_READS

    def read(self, n: int) -> Any:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise ValueError(f"it has more than {MOST_READS:,} values and instructions")
        self.bytes_left -= n
        if self.bytes_left < 0:
            raise ValueError(f"it says that it has more than {MOST_BYTES:,} bytes")
        data = self.stream.read(n) if n <= CHUNK else self.pieces(n)
        if len(data) < n:
            raise ValueError("it is truncated")
        return data

    def pieces(self, n: int) -> bytearray:
        """Memory that grows with what there is, not with what a pickle says there is."""
        data = bytearray()
        while piece := self.stream.read(min(CHUNK, n - len(data))):
            data += piece
        return data

    def readline(self) -> bytes:
        line = self.stream.readline(1000)
        if not line.endswith(b"\n"):
            raise ValueError("it is truncated")
        return line


class _Dict(dict[str | bytes, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes):  # hashing a tuple of tuples can take for ever
            raise ValueError(f"it has a key that is no string but {type(key).__name__}")
        super().__setitem__(key, value)


class _Name(str):
    """The name of a class or function in a pickle: it is compared, never called."""


class _Array:
    """An array, which a pickle first makes and later fills."""

    def __init__(self, values: NDArray[np.uint8] | None = None) -> None:
        self.values = values


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> NoReturn:
        known = {ord(op.code): f"the instruction {op.name}" for op in pickletools.opcodes}
        what = known.get(code, f"0x{code:02x} for an instruction")
        raise ValueError(f"it has {what}, which data like this does not need")


class _Unpickler(pickle._Unpickler):
    # Those of Python's reader that are used here.
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes | bytearray]

    bytes_to_copy = MOST_BYTES

    def find_class(self, module: str, name: str) -> _Name:
        full = f"{module}.{name}"
        if full not in NAMES:
            raise ValueError(
                f"it asks for {full[:100]!a}, and nothing is built but lists, strings, whole "
                "numbers and arrays of bytes; nothing was run"
            )
        return _Name(name)

    def load_frame(self) -> None:
        self.read(8)  # a frame's length, which is not needed

    def load_empty_dict(self) -> None:
        self.append(_Dict())

    def load_bytearray(self) -> None:
        self.append(self.read(*struct.unpack("<Q", self.read(8))))

    def load_text(self) -> None:
        data = self.read(*struct.unpack("<I", self.read(4)))
        # A single character beyond Latin-1 makes all the others take two or four bytes each.
        if len(data) > CHUNK and re.search(rb"[\xc4-\xff]", data):
            raise ValueError("it has a long text that is not Latin-1")
        self.append(str(data, "utf-8"))

    def load_reduce(self) -> None:
        """Append what a call would return; only the calls in real files are known."""
        arguments, name = self.stack.pop(), self.stack.pop()
        made: Any
        match name, arguments:
            case "_reconstruct", ("ndarray", (0,), b"b" | "b"):
                made = _Array()
            case "_frombuffer", (content, "uint8", shape, "C"):
                made = _Array(self.filled(content, shape))
            case "dtype", (b"u1" | "u1", 0, 1):
                made = _Name("uint8")
            case "dtype", (bytes() | str() as other, *_):
                raise ValueError(
                    f"it has an array of type {other[:100]!r}; only 'u1' (bytes) is read"
                )
            case "encode", (str() as text, "latin1"):
                made = self.encoded(text)
            case _:
                raise ValueError(f"it has an unknown call of {_called(name)}")
        self.append(made)

    def load_build(self) -> None:
        """Do what `__setstate__` would do with the states that real files give."""
        state = self.stack.pop()
        match self.stack[-1], state:
            case _Array() as array, (1, shape, "uint8", False, content):
                array.values = self.filled(content, shape)
            case "uint8", (3, b"|" | "|", None, None, None, -1, -1, 0):
                pass
            case other, _:
                raise ValueError(f"it gives an unknown state to {_called(other)}")

    def filled(self, content: Any, shape: Any) -> NDArray[np.uint8]:
        if isinstance(content, bytes):
            self.copy(len(content))
            content = bytearray(content)  # writable, as an array is
        if not isinstance(content, bytearray):
            raise ValueError(f"it fills an array with {type(content).__name__}, not with bytes")
        if not isinstance(shape, tuple) or not 1 <= len(shape) <= 4:
            raise ValueError("it has an array that has not 1 to 4 dimensions")
        # Python's integers: the sizes may be more than 64 bits can count.
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(content):
            raise ValueError(f"it has an array whose shape does not fit its {len(content)} bytes")
        return np.frombuffer(content, np.uint8).reshape(shape)

    def encoded(self, text: str) -> bytes | bytearray:
        self.copy(len(text))
        encoded = text.encode("latin-1")
        return encoded if len(encoded) <= CHUNK else bytearray(encoded)

    def copy(self, n: int) -> None:
        self.bytes_to_copy -= n
        if self.bytes_to_copy < 0:
            raise ValueError(f"it makes more than {MOST_BYTES:,} bytes of what it has")

    dispatch = _Instructions(
        {op: pickle._Unpickler.dispatch[op] for (op,) in (getattr(pickle, n) for n in KEPT.split())}
        | {
            ord(pickle.FRAME): load_frame,
            ord(pickle.EMPTY_DICT): load_empty_dict,
            ord(pickle.BYTEARRAY8): load_bytearray,
            ord(pickle.BINUNICODE): load_text,
            ord(pickle.REDUCE): load_reduce,
            ord(pickle.BUILD): load_build,
        }
    )


def _called(value: Any) -> str:
    # Never a repr: of lists that hold each other it can be endless.
    return value if isinstance(value, _Name) else type(value).__name__
