"""Reading IDX files and finding MNIST in a folder."""

from __future__ import annotations

import gzip
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from importlib.resources import files as resources
from pathlib import Path

import numpy as np
import pytest
import torch

from gradmem.data import DataError, Images, load_mnist, mnist
from gradmem.data.idx import read_idx
from gradmem.data.mnist import FILES
from tests.memory import growth, measured

REAL = os.environ.get("GRADMEM_DATA")
needs_real = pytest.mark.skipif(not REAL, reason="set GRADMEM_DATA to a folder that holds MNIST")


def idx(shape, values=None, magic=b"\0\0\x08"):
    """An IDX file's content: 0, 1, 2, … unless told."""
    if values is None:
        values = bytes(i % 256 for i in range(int(np.prod(shape))))
    return magic + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


TINY = {
    "train-images-idx3-ubyte": idx((6, 5, 4)),
    "train-labels-idx1-ubyte": idx((6,)),
    "t10k-images-idx3-ubyte": idx((3, 5, 4)),
    "t10k-labels-idx1-ubyte": idx((3,)),
}


def write(folder: Path, contents=TINY, gz=False, dots=False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        name = name.replace("-idx", ".idx") if dots else name
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def images(**changed) -> Images:
    parts = {
        "train_x": torch.zeros(3, 4, 4, dtype=torch.uint8),
        "train_y": torch.tensor([0, 1, 2]),
        "test_x": torch.zeros(2, 4, 4, dtype=torch.uint8),
        "test_y": torch.tensor([0, 1]),
    }
    return Images(**{**parts, **changed})


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    monkeypatch.delenv("GRADMEM_DATA", raising=False)
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("gradmem.data.mnist.SOURCES", ())


# Images


def test_images_may_have_channels_and_any_integer_labels():
    colour = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    made = images(train_x=colour, test_x=colour[:2], test_y=torch.tensor([0, 1], dtype=torch.int8))
    assert repr(made) == "Images(3 to train on, 2 to test on, of 3 x 4 x 4)"


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"train_x": np.zeros((3, 4, 4), np.uint8)}, TypeError, "train_x must be a tensor, got nd"),
        ({"test_y": [0, 1]}, TypeError, "test_y must be a tensor, got list"),
        ({"train_x": torch.zeros(3, 4, 4)}, TypeError, "train_x must be uint8, got torch.float32"),
        ({"test_y": torch.zeros(2)}, TypeError, "test_y must hold integers, got torch.float32"),
        ({"test_y": torch.zeros(2).bool()}, TypeError, "test_y must hold integers, got torch.bool"),
        ({"train_x": torch.zeros(3, 16).byte()}, ValueError, r"train_x must be .* got \(3, 16\)"),
        ({"train_y": torch.zeros(3, 1).long()}, ValueError, r"train_y must be .* got \(3, 1\)"),
        ({"train_y": torch.zeros(4).long()}, ValueError, "3 images and 4 labels"),
        (
            {"test_x": torch.zeros(2, 4, 5).byte()},
            ValueError,
            r"one shape, got \(4, 4\) and \(4, 5",
        ),
        (
            {"test_x": torch.zeros(0, 4, 4).byte(), "test_y": torch.zeros(0).long()},
            ValueError,
            "test_x must not be empty",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(changed, error, says):
    with pytest.raises(error, match=says):
        images(**changed)


# IDX


@pytest.mark.parametrize("gz", [False, True])
def test_idx_values_come_back_in_order(tmp_path, gz):
    path = tmp_path / ("array.gz" if gz else "array")
    path.write_bytes(gzip.compress(idx((2, 3))) if gz else idx((2, 3)))
    array = read_idx(path, ndim=2)
    assert array.dtype == torch.uint8
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    array += 1  # its own memory, writable


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short: 0 bytes"),
        (idx((2, 3))[:11], "too short: 11 bytes"),
        (idx((2, 3))[:-1], "is truncated: its header says 2 x 3 = 6 values, it has 5"),
        (idx((2, 3)) + b"!", "has trailing bytes: .* it has more"),
        (b"<html>" + idx((2, 3)), "not an IDX file: it starts with 0x3c68746d"),
        (idx((2, 3), magic=b"\0\1\x08"), "not an IDX file"),
        (idx((2, 3), magic=b"\0\0\x0d"), "type 0x0d"),
        (idx((2, 3, 1)), "has 3 dimensions; expected 2"),
        (idx((2**15, 2**15), b"x"), "is truncated: .* its size is 13 bytes"),
        (idx((2**15, 2**15 + 1), b"x"), "is too large: .* at most 1073741824 are read"),
        (idx((2**32 - 1, 2**32 - 1), b"x"), "is too large"),
    ],
)
def test_anything_but_a_whole_idx_file_is_refused(tmp_path, content, says):
    path = tmp_path / "array"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(path, ndim=2)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(idx((2, 300)))[:-12],
        gzip.compress(idx((2, 300)))[:-4] + b"oops",  # length
        gzip.compress(idx((2, 300)))[:10] + b"\xff" * 40,
        gzip.compress(idx((2, 300))) + b"more",
        idx((2, 300)),
        b"<html>",
    ],
    ids=["truncated", "wrong length", "garbled", "trailing bytes", "not zipped", "a web page"],
)
def test_a_damaged_gz_is_refused(tmp_path, content):
    path = tmp_path / "array.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"array\.gz cannot be read"):
        read_idx(path, ndim=2)


@measured
def test_no_more_of_a_gz_is_unpacked_than_its_header_calls_for(tmp_path):
    path = tmp_path / "array.gz"
    path.write_bytes(gzip.compress(idx((2, 3)) + bytes(1 << 26), 1))
    code = f"""
try:
    read_idx(Path({str(path)!r}), ndim=2)
except DataError as error:
    assert "has trailing bytes" in str(error)
else:
    raise AssertionError("it was read")
"""
    imports = "from gradmem.data import DataError\nfrom gradmem.data.idx import read_idx"
    assert growth(imports, code) < 1 << 24


# Folders


@pytest.mark.parametrize("place", ["", "mnist", "MNIST", "MNIST/raw", "raw"])
@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("dots", [False, True])
def test_files_are_found_in_the_usual_layouts(tmp_path, place, gz, dots):
    write(tmp_path / "here" / place, gz=gz, dots=dots)
    for data in (tmp_path / "here", str(tmp_path / "here")):
        found = load_mnist(data)
        assert found.train_x.shape == (6, 5, 4)
        assert found.test_y.tolist() == [0, 1, 2]
        assert found.train_y.dtype == found.test_y.dtype == torch.int64


def test_raw_and_gz_may_be_mixed(tmp_path):
    names = list(TINY)
    write(tmp_path, {name: TINY[name] for name in names[:2]}, gz=True)
    write(tmp_path, {name: TINY[name] for name in names[2:]})
    assert len(load_mnist(tmp_path).train_y) == 6


def test_a_place_with_all_files_comes_before_one_with_some(tmp_path):
    write(tmp_path, {"train-labels-idx1-ubyte": idx((9,))})
    write(tmp_path / "raw")
    assert len(load_mnist(tmp_path).train_y) == 6


def test_a_folder_without_some_files_is_an_error_that_names_them(tmp_path):
    write(tmp_path, {name: TINY[name] for name in TINY if "t10k" not in name})
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte" in message
    assert "train" not in message.removeprefix(str(tmp_path))
    assert 'data="sample"' in message


@pytest.mark.parametrize("data", ["smaple", "", Path("no") / "such", "~/no/such/folder"])
def test_no_such_folder(data):
    with pytest.raises(DataError, match='data must be "sample", a folder or None; ') as caught:
        load_mnist(data)
    assert repr(str(data)) in str(caught.value)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is no folder"):
        load_mnist(tmp_path / "file")


@pytest.mark.parametrize("data", [3, True, b"sample", ["sample"], torch.zeros(2), np.zeros(2)])
def test_other_types_are_refused(data):
    with pytest.raises(TypeError, match='data must be "sample", a folder, Images or None, got'):
        load_mnist(data)


def test_images_are_returned_as_they_are():
    given = images()
    assert load_mnist(given) is given


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train-labels-idx1-ubyte", idx((7,)), "6 images and 7 labels"),
        ("t10k-images-idx3-ubyte", idx((4, 5, 4)), "4 images and 3 labels"),
        ("t10k-images-idx3-ubyte", idx((3, 4, 5)), "one shape"),
        ("train-images-idx3-ubyte", idx((6,)), "too short|dimensions"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, name, content, says):
    write(tmp_path, TINY | {name: content})
    with pytest.raises(DataError, match=says) as caught:
        load_mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_environment_names_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_DATA", str(write(tmp_path / "here")))
    assert len(load_mnist().train_y) == 6


def test_a_damaged_file_in_the_environments_folder_is_an_error(tmp_path, monkeypatch):
    write(tmp_path / "here", TINY | {"train-labels-idx1-ubyte": b""})
    monkeypatch.setenv("GRADMEM_DATA", str(tmp_path / "here"))
    with pytest.raises(DataError, match="too short"):
        load_mnist()


def test_an_environment_that_names_no_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADMEM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="GRADMEM_DATA must name a folder"):
        load_mnist()


def test_without_mnist_the_environments_folder_is_passed_over_and_mentioned(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"could not be fetched[\s\S]*GRADMEM_DATA is "):
        load_mnist()


# The sample


def test_the_sample_is_small_balanced_and_shuffled():
    sample = load_mnist("sample")
    assert sample.train_x.shape == (4000, 28, 28)
    assert sample.test_x.shape == (1000, 28, 28)
    assert sample.train_y.dtype == torch.int64
    assert sample.train_y.bincount().tolist() == [400] * 10
    assert sample.test_y.bincount().tolist() == [100] * 10
    assert sample.train_y[:100].unique().tolist() == list(range(10))
    assert not torch.equal(sample.train_y, sample.train_y.sort().values)
    path = resources("gradmem.data").joinpath("sample", "mnist.npz")
    assert len(path.read_bytes()) < 1_500_000


def test_the_sample_holds_no_digit_twice():
    sample = load_mnist("sample")
    both = torch.cat([sample.train_x, sample.test_x]).flatten(1)
    assert len(both.unique(dim=0)) == 5000


@pytest.mark.parametrize("kept", [0, 5_000, 1_000_000, -60])
def test_a_damaged_sample_is_named(tmp_path, monkeypatch, kept):
    good = resources("gradmem.data").joinpath("sample", "mnist.npz").read_bytes()
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "mnist.npz").write_bytes(good[:kept] + bytes(9) + good[kept + 9 :])
    monkeypatch.setattr(mnist, "resources", lambda _: tmp_path)
    with pytest.raises(DataError, match=r"mnist\.npz cannot be read: wrong content"):
        load_mnist("sample")


def test_importing_leaves_heavy_packages_alone():
    code = (
        "import sys, gradmem, gradmem.data.mnist; gradmem.data.mnist.load_mnist('sample'); "
        "print([m for m in ('pooch', 'requests', 'filelock', 'PIL', 'matplotlib')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# The real thing


@needs_real
def test_real_mnist(monkeypatch):
    assert REAL
    monkeypatch.setenv("GRADMEM_DATA", REAL)
    mnist = load_mnist()
    assert mnist.train_x.shape == (60000, 28, 28)
    assert mnist.test_x.shape == (10000, 28, 28)
    assert mnist.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.test_y[:5].tolist() == [7, 2, 1, 0, 4]


@needs_real
def test_the_sample_can_be_made_again(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "make_sample.py"
    spec = importlib.util.spec_from_file_location("make_sample", script)
    assert REAL
    assert spec
    assert spec.loader
    make_sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_sample)
    for file in FILES.values():
        (source,) = list(Path(REAL).rglob(f"{file.name}*"))[:1]
        if source.suffix == ".gz":
            (tmp_path / file.name).write_bytes(gzip.decompress(source.read_bytes()))
        else:
            shutil.copy(source, tmp_path / file.name)
    made, sample = make_sample.sample(tmp_path), load_mnist("sample")
    for key in FILES:
        assert np.array_equal(made[key], getattr(sample, key).numpy())
