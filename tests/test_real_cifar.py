"""The paper's own data, where it is at hand: `GRADMEM_DATA` names the folder."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch

import gradmem as gm
from gradmem.benchmarks.data_sets import kind_of_data
from gradmem.data import cifar, load_cifar100
from gradmem.data.archive import read_members
from tests.cifar import python2_pickle
from tests.memory import growth, measured

FOLDER = Path(os.environ.get("GRADMEM_DATA", "no such folder"))
ARCHIVE = sorted(FOLDER.glob(f"{cifar.FOLDER}.tar.*"))  # or its parts

pytestmark = pytest.mark.skipif(
    not any(FOLDER.glob(f"**/{cifar.FOLDER}*")),
    reason="set GRADMEM_DATA to a folder that holds CIFAR-100",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real files; unpacked once if they are in an archive, since that takes a while."""
    if not ARCHIVE:
        return FOLDER
    unpacked = tmp_path_factory.mktemp("real")
    for name, stream in read_members(ARCHIVE, [f"{cifar.FOLDER}/{name}" for name in cifar.FILES]):
        with open(unpacked / name.rpartition("/")[2], "wb") as copy:
            shutil.copyfileobj(stream, copy)
    return unpacked


@pytest.fixture(scope="module")
def images(folder):
    return load_cifar100(folder)


def test_real_cifar_is_what_it_is_known_to_be(images):
    assert images.train_x.shape == (50_000, 3, 32, 32)
    assert images.test_x.shape == (10_000, 3, 32, 32)
    assert images.train_x.dtype == images.test_x.dtype == torch.uint8
    assert images.train_y.bincount().tolist() == [500] * 100
    assert images.test_y.bincount().tolist() == [100] * 100
    assert images.train_coarse.bincount().tolist() == [2500] * 20
    assert images.fine_names[0] == "apple"
    assert images.fine_names[-1] == "worm"
    assert images.coarse_names[0] == "aquatic_mammals"
    assert images.fine_names[images.train_y[0]] == "cattle"
    assert images.coarse_names[images.train_coarse[0]] == "large_omnivores_and_herbivores"
    # the mean colour that everybody's normalisation uses
    mean = images.train_x.numpy().mean((0, 2, 3)) / 255
    assert mean == pytest.approx([0.5071, 0.4865, 0.4409], abs=1e-4)


def test_the_papers_data_are_known_by_their_test_set(folder):
    assert kind_of_data("cifar100-incremental", str(folder)) == "whole"


@pytest.mark.skipif(not ARCHIVE, reason="needs the archive")
def test_real_files_have_the_hashes_that_a_download_is_checked_by(folder):
    assert all(file.is_in(folder) for file in cifar.FILES.values())


def test_the_stand_ins_are_written_as_the_real_files_are(images):
    names = {
        b"fine_label_names": [name.encode() for name in images.fine_names],
        b"coarse_label_names": [name.encode() for name in images.coarse_names],
    }
    content = python2_pickle(names)
    assert hashlib.sha256(content).hexdigest() == cifar.FILES["meta"].sha256


def test_superclasses_have_five_classes_each(images):
    continuum = gm.cifar100_incremental(data=images, tasks="coarse")
    assert [len(classes) for classes in continuum.outputs.values()] == [5] * 20
    assert continuum.labels()[0] == "aquatic mammals"
    assert [images.fine_names[c] for c in continuum.outputs[0]] == [
        "beaver",
        "dolphin",
        "otter",
        "seal",
        "whale",
    ]
    assert [len(task.train) for task in continuum.tasks] == [2500] * 20


@measured
def test_the_whole_benchmark_fits_in_half_a_gigabyte_with_torch():
    """184 MB of pixels and what reads and unpacks them, beside torch's 230 MB."""
    code = """
continuum = gm.cifar100_incremental()
assert continuum.n_examples == 50_000 and len(continuum) == 5_000
assert [len(task.train) for task in continuum.tasks] == [2_500] * 20
assert [len(test) for test in continuum.tests.values()] == [500] * 20
for x, t, y in continuum[:3]:
    pass
"""
    grown = growth("import gradmem as gm", code)
    # Room for the decompressor's dictionary of 64 MiB, but not for a second copy of the pixels.
    assert 184e6 < grown < 290e6, f"{grown / 1e6:.0f} MB"
