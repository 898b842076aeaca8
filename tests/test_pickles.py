"""Pickles are read, and never run."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from gradmem.data import DataError
from gradmem.data.pickles import CHUNK, MOST_BYTES, MOST_READS, read_pickle
from tests.cifar import python2_pickle
from tests.memory import growth, measured

ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)
BATCH = {
    b"data": ARRAY,
    b"fine_labels": [3, 300, -1],
    b"batch_label": b"x" * 300,
    b"filenames": [b"a.png", b"b.png"],
}


def read(content: bytes):
    return read_pickle(io.BytesIO(content), "file")


def refused(content: bytes) -> str:
    with pytest.raises(DataError, match="file cannot be read: ") as caught:
        read(content)
    return str(caught.value)


# What is read


PYTHON_3 = [partial(pickle.dumps, protocol=protocol) for protocol in (2, 3, 4, 5)]
every_writer = pytest.mark.parametrize("write", [python2_pickle, *PYTHON_3])


@every_writer
def test_files_of_python_2_and_3_are_read(write):
    found = read(write(BATCH))
    assert found.pop("data").tolist() == ARRAY.tolist()
    assert found == {key.decode(): value for key, value in BATCH.items() if key != b"data"}


@pytest.mark.parametrize("write", PYTHON_3)
def test_plain_values_are_what_python_s_own_reader_makes_of_them(write):
    shared = ["twice"]
    values = {"a": [None, True, False, 7, 70_000, -2, "text é", (), (1,), (1, 2), (1, 2, 3)]}
    values |= {"b": {"c": (1, 2, 3, 4)}, "d": [shared, shared], "e": [[i] for i in range(2000)]}
    found = read(write(values))
    assert found == values
    assert found["d"][0] is found["d"][1]


@every_writer
def test_a_large_array_is_read_in_pieces_and_is_writable(write):
    large = np.arange(3 * CHUNK + 5, dtype=np.uint32).astype(np.uint8)
    found = read(write({b"data": large}))["data"]
    assert np.array_equal(found, large)
    found += 1


# What is refused


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def trap(tmp_path):
    """A command that leaves a trace; fails the test if it has run."""
    trace = tmp_path / "trace"
    yield f'echo run > "{trace}"'
    assert not trace.exists()


@pytest.mark.parametrize("write", PYTHON_3)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda call: call,
        lambda call: {b"data": call},
        lambda call: {b"data": ARRAY, b"fine_labels": [[1, (2, {"x": [call]})]]},
        lambda call: {"data": Call(np.dtype, call)},
    ],
    ids=["itself", "in a dictionary", "deep inside", "as an argument"],
)
def test_a_call_is_refused_by_name_and_not_made(trap, write, wrap):
    for call in (Call(os.system, trap), Call(eval, f"__import__('os').system({trap!r})")):
        message = refused(write(wrap(call)))
        assert re.search(r"asks for '(posix|nt|__builtin__|builtins)\.(system|eval)', ", message)
        assert "nothing was run" in message


def test_the_trap_works(tmp_path):
    """Python's own reader does run such files, so the tests above could fail."""
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps([Call(os.system, f'echo run > "{trace}"')]))
    assert trace.exists()


@pytest.mark.parametrize(
    "name",
    ["antigravity.fly", "numpy.load", "numpy.core.multiarray.scalar", "numpy.ndarray.tofile",
     "numpy.core.multiarray.ndarray", "_codecs.decode", "builtins.getattr", "\ud800.a"],
)  # fmt: skip
def test_no_other_name_is_looked_up_or_imported(name):
    module, _, function = name.rpartition(".")
    texts = [part.encode("utf-8", "surrogatepass") for part in (module, function)]
    stacked = b"".join(b"\x8c" + bytes([len(text)]) + text for text in texts)
    assert f"asks for {name!a}" in refused(b"\x80\x04" + stacked + b"\x93.")
    if name.isascii():
        assert f"asks for {name!a}" in refused(b"\x80\x02c%s\n%s\n." % tuple(texts))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "name",
    ["INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "POP",
     "NEXT_BUFFER", "READONLY_BUFFER", "LONG4", "DUP", "PUT", "BINUNICODE8", "BINBYTES8"],
)  # fmt: skip
def test_instructions_that_data_does_not_need_are_refused(name):
    assert f"the instruction {name}, " in refused(b"\x80\x04" + getattr(pickle, name) + b"...")


@pytest.mark.parametrize("write", PYTHON_3)
@pytest.mark.parametrize(
    "array",
    [
        np.array([Call(os.system, "true")], dtype=object),
        np.zeros(3, np.int8),
        np.zeros(3, np.uint16),
        np.zeros(3, "S1"),
        np.zeros(3, [("a", np.uint8)]),
        np.ma.masked_array(np.zeros(3, np.uint8)),
        np.uint8(3),
    ],
)
def test_only_plain_arrays_of_bytes_are_built(write, array):
    refused(write({"data": array}))


def array_pickle(
    reconstruct=b"cnumpy\nndarray\nK\0\x85U\x01b\x87R",
    version=b"K\x01",
    shape=b"K\x03\x85",
    dtype=b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R",
    state=b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb",
    fortran=b"\x89",
    content=b"U\x03abc",
) -> bytes:
    """A dictionary with one array, whose pieces can be spoilt."""
    made = b"cnumpy.core.multiarray\n_reconstruct\n" + reconstruct
    filled = b"(" + version + shape + dtype + state + fortran + content + b"tb"
    return b"\x80\x02}U\x04data" + made + filled + b"s."


def test_the_array_that_is_spoilt_below_is_good():
    assert read(array_pickle())["data"].tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"shape": b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"}, "does not fit its 3 bytes"),
        ({"shape": b"J\xff\xff\xff\xffJ\xfd\xff\xff\xff\x86"}, "does not fit its 3 bytes"),
        ({"shape": b"\x88K\x03\x86"}, "does not fit its 3 bytes"),
        ({"shape": b"]"}, "1 to 4 dimensions"),
        ({"shape": b")"}, "1 to 4 dimensions"),
        ({"shape": b"K\x03"}, "1 to 4 dimensions"),
        ({"content": b"]"}, "fills an array with list"),
        ({"content": b"X\x03\0\0\0abc"}, "fills an array with str"),
        ({"fortran": b"\x88"}, "unknown state"),
        ({"version": b"K\x02"}, "unknown state"),
        ({"dtype": b"cnumpy\ndtype\nU\x02O8K\0K\x01\x87R"}, "type b'O8'"),
        ({"dtype": b"cnumpy\ndtype\n]\x85R"}, "unknown call of dtype"),
        ({"dtype": b"cnumpy\ndtype\ncnumpy\nndarray\n\x85R"}, "type 'ndarray'"),
        ({"dtype": b"N", "state": b""}, "unknown state"),
        ({"state": b"]b"}, "unknown state to uint8"),
        ({"state": b"(K\x03U\x01|U\x01aNNJ\xff\xff\xff\xffK\0tb"}, "unknown state"),
        ({"reconstruct": b"cnumpy\ndtype\nK\0\x85U\x01b\x87R"}, "unknown call of _reconstruct"),
        ({"reconstruct": b"cnumpy\nndarray\nK\x09\x85U\x01b\x87R"}, "unknown call of _reconstruct"),
        ({"reconstruct": b"cnumpy\nndarray\nK\0\x85U\x01O\x87R"}, "unknown call of _reconstruct"),
    ],
)  # fmt: skip
def test_arrays_that_are_not_as_numpy_writes_them_are_refused(spoilt, says):
    assert says in refused(array_pickle(**spoilt))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"}cnumpy\nndarray\n)Rs.", "unknown call of ndarray"),
        (b"}K\x01)R.", "unknown call of int"),
        (b"c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.", "unknown call of encode"),
        (b"cnumpy\nndarray\n}b.", "unknown state to ndarray"),
        (b"]}b.", "unknown state to list"),
        (b"U\x01acnumpy.core.multiarray\n_reconstruct\n\x85b.", "unknown state to bytes"),
        (b"].", "it has list where dict is expected"),
        (b"}]K\x01s.", "a key that is no string but list"),
        (b"}(U\x01au.", "lacks what it works on"),
        (b"}K\x01a.", "no attribute 'append'"),
        (b"]U\x01aK\x01s.", "indices must be integers"),
        (b"}K\x01\x85K\x01s.", "a key that is no string but tuple"),
        (b"cnumpy\ndtype\nU\x04nameR.", "unknown call of dtype"),
        (b"K\x01K\x02\x93.", "requires str"),
    ],
)  # fmt: skip
def test_calls_and_states_that_no_file_needs_are_refused(content, says):
    assert says in refused(b"\x80\x02" + content)


# Damage


@every_writer
def test_a_pickle_cut_short_anywhere_is_refused(write):
    content = write(BATCH)
    for length in range(len(content)):
        refused(content[:length])
    assert "truncated" in refused(write({b"data": bytes(3 * CHUNK)})[: 2 * CHUNK])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"<html>Log in</html>", "0x3c for an instruction"),
        (b"\x80\x06}.", "protocol: 6"),
        (b"\x80\x02}.more", "goes on after its end"),
        (b".", "lacks what it works on"),
        (b"u.", "lacks what it works on"),
        (b"q\x01.", "lacks what it works on"),
        (b"}\x87.", "lacks what it works on"),
        (b"h\x07.", "not found at index 7"),
        (b"X\x02\0\0\0\xff\xff.", "can't decode"),
        (b"X" + struct.pack("<I", CHUNK + 4) + b"a" * CHUNK + "🐘".encode(), "not Latin-1"),
    ],
)
def test_what_is_no_pickle_is_refused(content, says):
    assert says in refused(content)


def test_garbage_is_refused_whatever_it_is():
    rng = np.random.default_rng(0)
    good = python2_pickle(BATCH)
    for _ in range(2000):
        spoilt = bytearray(good)
        for place in rng.integers(0, len(good), 3):
            spoilt[place] = rng.integers(256)
        with suppress(DataError):  # and no other error; some damage is only to values
            read(bytes(spoilt))


def test_a_large_array_written_for_python_2_is_copied_once():
    """The real training set, so written, is more than half of what may be copied."""
    values = np.zeros(MOST_BYTES * 3 // 5, np.uint8)
    assert len(read(pickle.dumps({"data": values}, 2))["data"]) == len(values)


BOMBS = {
    "string": b"T" + struct.pack("<i", 2**31 - 1),
    "negative": b"T" + struct.pack("<i", -1),
    "bytes": b"B" + struct.pack("<I", 2**32 - 1),
    "bytearray": b"\x96" + struct.pack("<Q", 2**63),
    "short bytearray": b"\x96" + struct.pack("<Q", MOST_BYTES - 9) + b"short",
    "short text": b"X" + struct.pack("<I", MOST_BYTES - 9) + b"short",
    "memo": b"}r" + struct.pack("<I", 2**32 - 1),
    "array": array_pickle(shape=b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
    "copies": b"\x80\x02c_codecs\nencode\nq\x00X"
    + struct.pack("<I", 1 << 20)
    + b"a" * (1 << 20)
    + b"X\x06\0\0\0latin1\x86q\x02("
    + b"h\x00h\x02R" * 5000
    + b"t.",
    "lists": b"]" * (MOST_READS + 1),
    "marks": b"(" * (MOST_READS + 1),
}


@measured
def test_a_small_file_cannot_fill_the_memory(tmp_path):
    for name, content in BOMBS.items():
        (tmp_path / name).write_bytes(content)
    code = f"""
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        with open(path, "rb") as stream:
            read_pickle(stream, path.name)
    except DataError:
        continue
    raise AssertionError(f"{{path.name}} was read")
"""
    imports = "from gradmem.data import DataError\nfrom gradmem.data.pickles import read_pickle"
    grown = growth(imports, code)
    assert grown < 4e8, f"{grown / 1e6:.0f} MB"


def test_lists_that_hold_each_other_are_refused_at_once():
    """Each holds the last one twice: printing or comparing the last would take for ever."""
    content = b"\x80\x02]q\0" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(100)
    )
    assert "list where dict" in refused(content + b".")
    assert "unknown state" in refused(content + b"h\x01b.")
    assert "unknown call" in refused(content + b"cnumpy\ndtype\nh\x64\x85R.")
