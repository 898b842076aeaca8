"""Finding CIFAR-100 in folders, archives and the cache, and reading its files."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gradmem.data import Cifar100, DataError, Images, cifar, load_cifar100
from gradmem.data.fetch import Archive, File
from tests.cifar import FOLDER, batch, contents, meta, python2_pickle, tar, write_cifar
from tests.memory import growth, measured
from tests.web import Web


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    monkeypatch.delenv("GRADMEM_DATA", raising=False)
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("gradmem.data.cifar.SOURCES", ())


def assert_whole(found: Images) -> None:
    assert isinstance(found, Cifar100)
    for part, n, seed in (("train", 200, 0), ("test", 100, 1)):
        x, y, coarse = (getattr(found, f"{part}_{name}") for name in ("x", "y", "coarse"))
        assert x.shape == (n, 3, 32, 32)
        assert x.dtype == torch.uint8
        assert np.array_equal(x.flatten(1).numpy(), batch(n, seed)[b"data"])
        assert y.dtype == coarse.dtype == torch.int64
        assert y.tolist() == [i % 100 for i in range(n)]
        assert coarse.tolist() == [i % 20 for i in range(n)]
    assert found.fine_names[99] == "class_99"
    assert found.coarse_names[19] == "super_class_19"


def spoilt(name: str, **changed) -> dict[str, bytes]:
    """The files, one of them with another content."""
    values = meta() if name == "meta" else batch(200 if name == "train" else 100)
    values |= {key.encode(): value for key, value in changed.items()}
    return contents(**{name: python2_pickle({k: v for k, v in values.items() if v is not None})})


# Folders


@pytest.mark.parametrize("place", ["", FOLDER, "cifar-100", f"cifar100/{FOLDER}"])
def test_files_are_found_in_the_usual_layouts(tmp_path, place):
    write_cifar(tmp_path / "here" / place)
    for data in (tmp_path / "here", str(tmp_path / "here")):
        assert_whole(load_cifar100(data))


def test_a_row_of_a_file_is_red_then_green_then_blue_row_by_row(tmp_path):
    data = np.zeros((200, 3072), np.uint8)
    data[7, 0], data[7, 1], data[7, 32], data[7, 1024] = 1, 2, 3, 4
    image = load_cifar100(write_cifar(tmp_path, spoilt("train", data=data))).train_x[7]
    assert image[0, 0, 0] == 1
    assert image[0, 0, 1] == 2
    assert image[0, 1, 0] == 3
    assert image[1, 0, 0] == 4


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_files_may_have_been_written_by_python_3(tmp_path, protocol):
    values = {"train": batch(200), "test": batch(100, seed=1), "meta": meta()}
    files = {name: pickle.dumps(value, protocol) for name, value in values.items()}
    assert_whole(load_cifar100(write_cifar(tmp_path, files)))


def test_a_folder_without_some_files_is_an_error_that_names_them(tmp_path):
    write_cifar(tmp_path / FOLDER, {"train": contents()["train"]})
    with pytest.raises(DataError) as caught:
        load_cifar100(tmp_path)
    assert f"{tmp_path} has no test, meta of CIFAR-100 and no archive. " in str(caught.value)
    assert "GRADMEM_DATA=FOLDER" in str(caught.value)


@pytest.mark.parametrize("data", ["sample", "", Path("no") / "such", "~/no/such/folder"])
def test_no_such_folder(data):
    with pytest.raises(DataError, match="data must be a folder, an archive or None; ") as caught:
        load_cifar100(data)
    assert repr(str(data)) in str(caught.value)
    assert "no bundled sample" in str(caught.value)


@pytest.mark.parametrize("data", [3, True, b"folder", ["folder"], torch.zeros(2)])
def test_other_types_are_refused(data):
    with pytest.raises(TypeError, match="data must be a folder, an archive, Images or None, got"):
        load_cifar100(data)


def test_images_are_returned_as_they_are():
    x, y = torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.arange(3)
    given = Images(x, y, x, y)
    assert load_cifar100(given) is given


# Archives


@pytest.mark.parametrize("compression", ["gz", "xz", ""])
@pytest.mark.parametrize("parts", [1, 3, 12])
def test_archives_are_read_where_they_lie(tmp_path, compression, parts):
    content = tar({"readme": b"hello"} | contents(), compression=compression)
    name = f"{FOLDER}.tar{compression and '.'}{compression}"
    if parts == 1:
        (tmp_path / name).write_bytes(content)
        assert_whole(load_cifar100(tmp_path / name))
    else:
        size = -(-len(content) // parts)
        for i in range(parts):
            (tmp_path / f"{name}.part{i}").write_bytes(content[i * size : (i + 1) * size])
    before = sorted(tmp_path.rglob("*"))
    assert_whole(load_cifar100(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked to disk


def test_an_archive_may_have_another_name_and_order_if_it_is_named(tmp_path):
    files = contents()
    path = tmp_path / "my.tgz"
    path.write_bytes(tar({name: files[name] for name in ("meta", "test", "train")}, f"./{FOLDER}"))
    assert_whole(load_cifar100(path))


def test_unpacked_files_come_before_an_archive(tmp_path):
    (tmp_path / f"{FOLDER}.tar.gz").write_bytes(b"not looked at")
    write_cifar(tmp_path / FOLDER)
    assert_whole(load_cifar100(tmp_path))


GZ, XZ = tar(contents()), tar(contents(), compression="xz")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>Log in to this network</html>" * 50,
        GZ[: len(GZ) // 2],
        GZ[:-4] + b"oops",
        GZ[:1000] + b"\xff" * 40 + GZ[1040:],
        XZ[: len(XZ) // 2],
        XZ[:-20],
        XZ[:1000] + b"\xff" * 40 + XZ[1040:],
        tar(contents(), compression="")[:700_000],
    ],
    ids=["empty", "page", "cut gz", "checksum", "gz", "cut xz", "cut end", "xz", "cut tar"],
)
def test_a_damaged_archive_is_refused(tmp_path, content):
    path = tmp_path / f"{FOLDER}.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_cifar100(tmp_path)
    assert str(path) in str(caught.value)


def test_a_missing_part_is_noticed(tmp_path):
    for i in (0, 2):
        third = len(GZ) // 3
        part = GZ[i * third : (i + 1) * third] if i == 0 else GZ[i * third :]
        (tmp_path / f"{FOLDER}.tar.gz.part{i}").write_bytes(part)
    with pytest.raises(DataError, match="cannot be read"):
        load_cifar100(tmp_path)


def test_an_archive_without_a_file_is_refused(tmp_path):
    path = tmp_path / f"{FOLDER}.tar.gz"
    files = contents()
    path.write_bytes(tar({name: files[name] for name in ("train", "test")}))
    with pytest.raises(DataError, match=f"has no {FOLDER}/meta"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_links_in_an_archive_are_not_followed(tmp_path, kind):
    (tmp_path / "meta").write_bytes(contents()["meta"])
    link = tarfile.TarInfo(f"{FOLDER}/meta")
    link.type, link.linkname = kind, str(tmp_path / "meta")
    path = tmp_path / "odd.tar.gz"
    path.write_bytes(tar(contents() | {"meta": link}))
    with pytest.raises(DataError, match=f"has no {FOLDER}/meta"):
        load_cifar100(path)


def header(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
def test_an_archive_that_says_it_is_huge_is_refused(tmp_path, kind):
    path = tmp_path / "odd.tar.gz"
    path.write_bytes(gzip.compress(header(kind, 3 << 30) + bytes(5000)))
    with pytest.raises(DataError, match=r"cannot be read: it unpacks to more than 268,435,456"):
        load_cifar100(path)


@measured
def test_a_small_archive_cannot_fill_the_memory(tmp_path):
    zeros = bytes(1 << 26)
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE,
                 tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.REGTYPE):  # fmt: skip
        content = header(kind, len(zeros)) + zeros
        (tmp_path / f"{kind.hex()}.tar.gz").write_bytes(gzip.compress(content, 1))
    (tmp_path / "headers.tar.gz").write_bytes(gzip.compress(header(tarfile.XHDTYPE, 0) * 99_999, 1))
    (tmp_path / "sparse.tar.gz").write_bytes(gzip.compress(header(tarfile.GNUTYPE_SPARSE, 0), 1))
    (tmp_path / "end.tar.gz").write_bytes(gzip.compress(zeros, 1))
    code = f"""
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        load_cifar100(path)
    except DataError:
        continue
    raise AssertionError(f"{{path}} was read")
"""
    assert growth("from gradmem.data import DataError, load_cifar100", code) < 1 << 24


# What is in the files


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("train", {"data": None}, "data must be an array, got NoneType"),
        ("train", {"data": [1, 2]}, "data must be an array, got list"),
        ("train", {"data": np.zeros((200, 3071), np.uint8)}, r"N x 3072 values, got \(200, 3071\)"),
        ("train", {"data": np.zeros(3072, np.uint8)}, r"N x 3072 values, got \(3072,\)"),
        ("test", {"data": np.zeros((0, 3072), np.uint8)}, r"N x 3072 values, got \(0, 3072\)"),
        ("test", {"data": np.zeros((100, 3072), np.int8)}, "array of type b'i1'"),
        ("test", {"fine_labels": [0] * 99}, "fine_labels must be a list of 100, .* got 99"),
        ("test", {"fine_labels": [100] * 100}, "fine_labels must be .* from 0 to 99, got 100"),
        ("test", {"fine_labels": [-1] * 100}, "fine_labels must be .* from 0 to 99, got -1"),
        ("test", {"fine_labels": [b"a"] * 100}, "fine_labels must be .* got bytes"),
        ("train", {"fine_labels": b"a" * 200}, "fine_labels must be a list of 200, .* got bytes"),
        ("train", {"coarse_labels": [20] * 200}, "coarse_labels must be .* from 0 to 19, got 20"),
        ("train", {"coarse_labels": None}, "coarse_labels must be a list of 200, .* got NoneType"),
        ("meta", {"fine_label_names": None}, "fine_label_names must be a list of names"),
        ("meta", {"coarse_label_names": [1] * 20}, "coarse_label_names must be a list of names"),
        ("meta", {"fine_label_names": [b"a"] * 10}, "fine_label_names must be 100 names, got 10"),
        ("meta", {"fine_label_names": [b"a\x1b"] * 100}, r"printable names, got 'a.x1b'"),
    ],
)
def test_files_with_anything_else_are_refused(tmp_path, name, changed, says):
    with pytest.raises(DataError, match=says) as caught:
        load_cifar100(write_cifar(tmp_path, spoilt(name, **changed)))
    assert str(tmp_path) in str(caught.value)


def test_a_file_cut_short_is_refused(tmp_path):
    files = contents()
    path = write_cifar(tmp_path, files | {"test": files["test"][:-1000]}) / "test"
    with pytest.raises(DataError, match="cannot be read: it is truncated") as caught:
        load_cifar100(tmp_path)
    assert str(path) in str(caught.value)


class Hostile:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("name", ["train", "test", "meta"])
@pytest.mark.parametrize("archive", [False, True])
def test_a_hostile_file_is_refused_and_not_run(tmp_path, name, archive):
    trace = tmp_path / "trace"
    values = meta() if name == "meta" else batch(200)
    content = pickle.dumps(values | {b"data": Hostile(f'echo > "{trace}"')}, protocol=2)
    write_cifar(tmp_path / "here", contents(**{name: content}))
    (tmp_path / "archive.tar.gz").write_bytes(tar(contents(**{name: content})))
    with pytest.raises(DataError, match=r"asks for '\w+\.system', .*nothing was run") as caught:
        load_cifar100(tmp_path / ("archive.tar.gz" if archive else "here"))
    assert str(tmp_path) in str(caught.value)
    assert f"{name} cannot be read" in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"train_x": torch.zeros(2, 3, 8, 8).byte()}, "one shape"),
        ({"train_coarse": torch.zeros(3).long()}, r"train_coarse must be \(2,\).* got \(3,\)"),
        ({"test_y": torch.tensor([3, 100])}, "test_y must be from 0 to 99, got 3 to 100"),
        ({"test_coarse": torch.tensor([-1, 2])}, "test_coarse must be from 0 to 19, got -1 to 2"),
        ({"coarse_names": ["a"]}, "coarse_names must be 20, got 1"),
    ],
)
def test_images_with_labels_that_do_not_fit_are_refused(changed, says):
    x, y = torch.zeros(2, 3, 32, 32).byte(), torch.tensor([3, 4])
    given = {"train_x": x, "train_y": y, "test_x": x, "test_y": y}
    given |= {"train_coarse": y, "test_coarse": y}
    given |= {"fine_names": ["a"] * 100, "coarse_names": ["b"] * 20}
    assert repr(Cifar100(**given)) == "Cifar100(2 to train on, 2 to test on, of 3 x 32 x 32)"
    with pytest.raises(ValueError, match=says):
        Cifar100(**given | changed)


# The environment, the cache and the network


@pytest.mark.parametrize("place", ["", FOLDER])
def test_the_environment_names_a_folder(tmp_path, monkeypatch, place):
    write_cifar(tmp_path / "here" / place)
    monkeypatch.setenv("GRADMEM_DATA", str(tmp_path / "here"))
    assert_whole(load_cifar100())


def test_a_damaged_file_in_the_environments_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_DATA", str(write_cifar(tmp_path / "here", contents(meta=b""))))
    with pytest.raises(DataError, match="meta cannot be read: it is truncated"):
        load_cifar100()


def test_without_cifar_the_environments_folder_is_passed_over_and_mentioned(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"could not be fetched[\s\S]*GRADMEM_DATA is "):
        load_cifar100()


@pytest.fixture
def web():
    made = Web()
    yield made
    made.close()


def test_the_archive_is_fetched_once_and_its_files_are_kept(tmp_path, monkeypatch, web):
    files = contents()
    known = {name: File(name, hashlib.sha256(files[name]).hexdigest()) for name in files}
    url = web.mirror("a", {f"{FOLDER}.tar": GZ}).url  # which takes the name without .gz
    source = Archive(f"{url}{FOLDER}.tar.gz", hashlib.sha256(GZ).hexdigest(), FOLDER)
    monkeypatch.setattr(cifar, "FILES", known)
    monkeypatch.setattr(cifar, "SOURCES", (source,))
    assert_whole(load_cifar100())
    monkeypatch.setattr(cifar, "SOURCES", ())
    assert_whole(load_cifar100())
    assert set(web.asked.values()) == {1}
    kept = {path.name for path in (tmp_path / "cache" / "cifar-100").iterdir()}
    assert kept == {"train", "test", "meta"}
