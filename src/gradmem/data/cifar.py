"""CIFAR-100: in a folder, in an archive, in the cache, or from the network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gradmem.data.archive import read_members
from gradmem.data.errors import DataError, damage_named
from gradmem.data.fetch import Archive, File, Source, fetch, folder_in_environment
from gradmem.data.images import Images
from gradmem.data.pickles import read_pickle

__all__ = ["Cifar100", "load_cifar100"]

#: What is in each file, with the hash of the original.
FILES = {
    "train": File("train", "735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b"),
    "test": File("test", "4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864"),
    "meta": File("meta", "a5d4786345c961390f865e93b434dbd5c6904ce880667e0cb888c97d449f28b9"),
}
#: The files' folder, in archives and where torchvision unpacks them.
FOLDER = "cifar-100-python"
SOURCES: tuple[Source, ...] = (
    Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder=FOLDER,
    ),
)
#: Where they may be in a folder.
PLACES = ("", FOLDER, "cifar-100", "cifar100", f"cifar-100/{FOLDER}", f"cifar100/{FOLDER}")
ARCHIVES = (f"{FOLDER}.tar.gz", f"{FOLDER}.tar.xz", f"{FOLDER}.tar")
ADVICE = (
    f"Put the folder {FOLDER} (with train, test and meta) or the archive {FOLDER}.tar.gz in a "
    "folder and pass data=FOLDER or set GRADMEM_DATA=FOLDER. There is no bundled sample."
)

FINE, COARSE = 100, 20
SHAPE = (3, 32, 32)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cifar100(Images):
    """CIFAR-100's images with both of their labels.

    Parameters
    ----------
    train_x, test_x
        (N, 3, 32, 32) uint8.
    train_y, test_y
        (N,) the fine labels: 100 classes.
    train_coarse, test_coarse
        (N,) the superclasses: 20.
    fine_names, coarse_names
        A name for each class and superclass.
    """

    train_coarse: Tensor
    test_coarse: Tensor
    fine_names: Sequence[str]
    coarse_names: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_x.shape[1:] != SHAPE:
            raise ValueError(f"images must be 3 x 32 x 32, got {tuple(self.train_x.shape[1:])}")
        for name, n in (("train_coarse", len(self.train_y)), ("test_coarse", len(self.test_y))):
            if getattr(self, name).shape != (n,):
                got = tuple(getattr(self, name).shape)
                raise ValueError(f"{name} must be ({n},), one for each image, got {got}")
        for name, classes in (("y", FINE), ("coarse", COARSE)):
            for part in ("train", "test"):
                lowest, highest = getattr(self, f"{part}_{name}").aminmax()
                if lowest < 0 or highest >= classes:
                    raise ValueError(
                        f"{part}_{name} must be from 0 to {classes - 1}, "
                        f"got {int(lowest)} to {int(highest)}"
                    )
        for name, classes in (("fine_names", FINE), ("coarse_names", COARSE)):
            names = tuple(getattr(self, name))
            if len(names) != classes:
                raise ValueError(f"{name} must be {classes}, got {len(names)}")
            object.__setattr__(self, name, names)


def load_cifar100(data: Images | str | os.PathLike[str] | None = None) -> Images:
    """CIFAR-100's small photographs, 100 classes in 20 superclasses.

    Parameters
    ----------
    data
        None: the folder in the environment variable GRADMEM_DATA if it holds CIFAR-100, else the
        cache (the folder in GRADMEM_CACHE, or this platform's own), into which CIFAR-100 is fetched
        once.
        A folder: the official files train, test and meta, directly or in `cifar-100-python` as
        torchvision keeps them, or the official archive `cifar-100-python.tar.gz` (or .tar.xz, also
        in parts: `.part0`, `.part1`, …).
        A file: an archive.
        `Images`: returned as they are.

    Returns
    -------
    Cifar100
        train_x (50000, 3, 32, 32), train_y (50000,), test_x (10000, 3, 32, 32), test_y (10000,),
        with superclasses and names. (`Images` if that is what was given.)

    Raises
    ------
    DataError
        If there is no such folder or archive, or files are missing, damaged or cannot be fetched.
        The official files are pickles; one that asks for more than data is refused, and not run.
    """
    if isinstance(data, Images):
        return data
    if data is None:
        # The folder in GRADMEM_DATA may hold other data sets only.
        folder = folder_in_environment()
        found = _from_folder(folder) if folder else None
        return found or _read_folder(fetch("cifar-100", list(FILES.values()), SOURCES, ADVICE))
    if not isinstance(data, str | os.PathLike):
        raise TypeError(f"data must be a folder, an archive, Images or None, got {data!r}")
    path = Path(os.path.expanduser(data))
    if data and os.path.isfile(path):  # also False if the name is too long
        return _read_archive([path])
    if not data or not os.path.isdir(path):
        raise DataError(
            f"data must be a folder, an archive or None; {str(data)!r:.200} is neither. {ADVICE}"
        )
    if found := _from_folder(path):
        return found
    missing = min(([n for n in FILES if not (path / p / n).is_file()] for p in PLACES), key=len)
    raise DataError(f"{path} has no {', '.join(missing)} of CIFAR-100 and no archive. {ADVICE}")


def _from_folder(folder: Path) -> Cifar100 | None:
    """CIFAR-100 in a folder, if it is there: unpacked files before an archive, which is slower."""
    places = [folder / place for place in PLACES]
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return _read_folder(place)
    for place in places:
        for archive in ARCHIVES:
            if (place / archive).is_file():
                return _read_archive([place / archive])
            if parts := sorted(place.glob(f"{archive}.part*"), key=_part_number):
                return _read_archive(parts)
    return None


def _part_number(path: Path) -> tuple[int, str]:
    """For order: part2 comes before part10, and partab after partaa."""
    number = re.search(r"\d+$", path.name)
    return (int(number[0]) if number else 0, path.name)


def _read_folder(folder: Path) -> Cifar100:
    parts = {}
    for name in FILES:
        with damage_named(folder / name), open(folder / name, "rb") as stream:
            parts[name] = _content(stream, folder / name)
    return _images(parts, folder)


def _read_archive(paths: Sequence[Path]) -> Cifar100:
    parts = {}
    with damage_named(paths[0]):
        for member, stream in read_members(paths, [f"{FOLDER}/{name}" for name in FILES]):
            where = paths[0] / member
            parts[where.name] = _content(stream, where)
    return _images(parts, paths[0])


def _content(stream: IO[bytes], path: Path) -> tuple[Any, ...]:
    """The parts of one file that are used: images and labels, or names."""
    values = read_pickle(stream, str(path))
    try:
        if path.name == "meta":
            fine_names = _names(values, "fine_label_names", FINE)
            return fine_names, _names(values, "coarse_label_names", COARSE)
        x = _pixels(values)
        fine = _labels(values, "fine_labels", len(x), FINE)
        return x, fine, _labels(values, "coarse_labels", len(x), COARSE)
    except ValueError as error:
        raise DataError(f"{path} is no file of CIFAR-100: {error}") from error


def _pixels(values: Mapping[str, Any]) -> Tensor:
    data = values.get("data")
    if not isinstance(data, np.ndarray):
        raise ValueError(f"data must be an array, got {type(data).__name__}")
    if data.ndim != 2 or data.shape[1] != 3072 or len(data) == 0:
        raise ValueError(f"data must be N x 3072 values, got {data.shape}")
    return torch.from_numpy(data).view(-1, *SHAPE)


def _labels(values: Mapping[str, Any], key: str, n: int, classes: int) -> Tensor:
    labels = values.get(key)
    if not isinstance(labels, list) or len(labels) != n:
        got = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"{key} must be a list of {n}, one for each image, got {got}")
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            got = label if type(label) is int else type(label).__name__
            raise ValueError(f"{key} must be whole numbers from 0 to {classes - 1}, got {got}")
    return torch.tensor(labels)


def _names(values: Mapping[str, Any], key: str, n: int) -> list[str]:
    names = values.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise ValueError(f"{key} must be a list of names")
    if len(names) != n:
        raise ValueError(f"{key} must be {n} names, got {len(names)}")
    names = [name.decode("latin-1") if isinstance(name, bytes) else name for name in names]
    if odd := [name for name in names if not name.isprintable()]:
        raise ValueError(f"{key} must be printable names, got {odd[0][:100]!a}")
    return names


def _images(parts: Mapping[str, tuple[Any, ...]], path: Path) -> Cifar100:
    train_x, train_y, train_coarse = parts["train"]
    test_x, test_y, test_coarse = parts["test"]
    fine_names, coarse_names = parts["meta"]
    try:
        return Cifar100(
            *(train_x, train_y, test_x, test_y, str(path)),
            train_coarse=train_coarse,
            test_coarse=test_coarse,
            fine_names=fine_names,
            coarse_names=coarse_names,
        )
    except ValueError as error:
        raise DataError(f"{path} does not fit together: {error}") from error
