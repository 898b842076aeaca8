"""Attack every reader of files with mutated ones, for recorded figures.

python -m tests.attack_files all 100000   # so many mutated files for each reader
python -m tests.attack_files runs 100000  # for one reader

A mutated file may be read or refused. It is refused by an error that gradmem raises itself, of a
documented type, in printable text that names the file. No reader takes more than a gigabyte, opens
another file, or starts or imports anything. A short attack is in test_untrusted_files.py;
checkpoints have an attack of their own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import json
import lzma
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np

import gradmem
from gradmem.benchmarks import lookup
from gradmem.cli import sweep as sweep_cli
from gradmem.data import DataError, load_cifar100, load_mnist, mnist
from gradmem.reports import markdown_table, summarize
from gradmem.reports.summary import failed_lines
from gradmem.reproduction.kept import load
from gradmem.reproduction.page import page_text
from gradmem.reproduction.search import load_searches
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Failure, find_failures, find_runs
from gradmem.runs.write_folder import RunFolder
from gradmem.sweeps import Store, Sweep, check_settings
from gradmem.sweeps.selection import select
from gradmem.sweeps.store import Failed
from tests import cifar
from tests.synthetic import write_run
from tests.test_data import TINY as IDX

#: Bytes that a reader may take beyond what the process has when the attack begins.
MOST_MEMORY = 1 << 30
#: The longest message.
MOST_TEXT = 2000
KEPT = Path(__file__).parents[1] / "results" / "paper"
#: What numbers, texts and lists are swapped for.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**18, 10**400, 0.5, 1e300, -1e-300),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "1",
        "\x1b[2J\x07",
        "a\nb",
        "\0",
        "|`<b>",
    ),
    *("\ud800", "\u202e", "../../trap", "/etc/passwd", "trap.py:Trap", "trap:Trap", "os:system"),
    *("timeit:timeit", "é" * 300, "sample", "cuda:99", "gem", [], [[]], {}, [1, [2]], {"a": {}}),
    *([0] * 50, [None], [float("nan")], {"lr": [0.1]}, {"": []}, "9" * 5000),
)


#: Makes other bytes of a file's.
Mutation = Callable[[bytes, random.Random], bytes]


class Trap:
    """Reading it as a pickle would start a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo a pickle was run",)


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are changed, put in, taken out, repeated, or cut off."""
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        place, n = rng.randrange(len(made) + 1), rng.randrange(1, 9)
        kind = rng.randrange(6)
        if kind == 0:
            made[place : place + 1] = rng.randbytes(1)
        elif kind == 1 and place < len(made):
            made[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            made[place:place] = rng.choice([rng.randbytes(n), bytes(n), b"\xff" * n])
        elif kind == 3:
            del made[place : place + n]
        elif kind == 4:
            start = rng.randrange(len(made) + 1)
            made[place:place] = made[start : start + rng.choice([n, 100])]
        else:
            made[place : place + 4] = rng.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)])
    return bytes(made[: rng.randrange(len(made) + 1)] if rng.random() < 0.2 else made)


def mutated_tree(value: Any, rng: random.Random) -> Any:
    """Values that are swapped, left out, repeated, moved, renamed or wrapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        places = list(_places(value))
        if not places:
            return rng.choice(HOSTILE)
        parent, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            del parent[key]
        elif kind == 1:
            for _ in range(rng.choice([1, 19, 100])):
                parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
        elif kind == 2:
            other, place = rng.choice(places)
            with contextlib.suppress(LookupError):
                parent[key] = copy.deepcopy(other[place])
        elif kind == 3 and isinstance(parent, dict):
            parent[str(rng.choice(HOSTILE))] = parent.pop(key)
        elif kind == 4 and isinstance(parent[key], list):
            parent[key] = parent[key] * rng.choice([0, 2, 100])
        else:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list) and value[key]:
            yield from _places(value[key])


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    """A mutated tree as JSON, or as a lax writer of JSON has it."""
    try:
        text = json.dumps(mutated_tree(json.loads(content), rng), ensure_ascii=rng.random() < 0.5)
    except RecursionError:
        text = '{"a":' * 10_000 + "1" + "}" * 10_000
    if rng.random() < 0.1:
        text = text.replace("Infinity", "1e999").replace("NaN", "-1e999")
    return text.encode("utf-8", "surrogatepass")


def mutated_pickle(content: bytes, rng: random.Random) -> bytes:
    """A mutated dictionary as a pickle of some protocol, of Python 2 or 3."""
    try:
        tree = mutated_tree(pickle.loads(content, encoding="bytes"), rng)
        if isinstance(tree, dict) and rng.random() < 0.2:
            arrays = [Trap(), np.zeros((2, 3072)), np.zeros((0, 3072), np.uint8), np.array([None])]
            tree[rng.choice([b"data", b"fine_labels", b"x"])] = rng.choice(arrays)
        if rng.random() < 0.3:
            return cifar.python2_pickle(tree)
        return pickle.dumps(tree, rng.randrange(6))
    except (RecursionError, ValueError, UnicodeError, OverflowError):
        return pickle.dumps(Trap())


def mutated_tar(content: bytes, rng: random.Random) -> bytes:
    """A header with another size, type or name, with a checksum that fits; or other bytes."""
    made = bytearray(content)
    start = 512 * rng.randrange(len(made) // 512)
    kind = rng.randrange(4)
    if kind == 0:
        size = rng.choice([b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, bytes(12)])
        made[start + 124 : start + 136] = size
    elif kind == 1:
        made[start + 156] = rng.choice(b"0125xgLKS\0")
    elif kind == 2:
        made[start : start + 100] = rng.choice([b"../../trap", b"/etc/passwd", b"\xff"]).ljust(100)
    else:
        return mutated_bytes(content, rng)
    total = sum(made[start : start + 148]) + 256 + sum(made[start + 156 : start + 512])
    made[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(made)


def packed(content: bytes, rng: random.Random) -> bytes:
    """An archive as it is, or compressed, perhaps with damage done to that."""
    made = rng.choice(
        [lambda b: b, lambda b: gzip.compress(b, 1), lambda b: lzma.compress(b, preset=0)]
    )(content)
    return mutated_bytes(made, rng) if rng.random() < 0.2 else made


class Reader:
    """What is attacked: good files in a folder, and a function that reads them all."""

    #: How the files of a kind are mutated beside their bytes.
    kinds: ClassVar[dict[str, Mutation]] = {".json": mutated_json}

    #: Whether an error must name the folder.
    named = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write()
        self.good = {path: path.read_bytes() for path in sorted(self.targets())}

    def write(self) -> None:
        raise NotImplementedError

    def targets(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def read(self) -> None:
        raise NotImplementedError

    def mutated(self, path: Path, rng: random.Random) -> bytes:
        by_kind = self.kinds.get(path.suffix)
        if by_kind is None or rng.random() < 0.3:
            return mutated_bytes(self.good[path], rng)
        return by_kind(self.good[path], rng)


class IdxFiles(Reader):
    """MNIST's four files."""

    def write(self) -> None:
        for name, content in IDX.items():
            (self.folder / name).write_bytes(content)

    def read(self) -> None:
        load_mnist(self.folder)


class IdxGzFiles(IdxFiles):
    """The same, compressed."""

    kinds: ClassVar = {
        ".gz": lambda content, rng: gzip.compress(mutated_bytes(gzip.decompress(content), rng), 1)
    }

    def write(self) -> None:
        for name, content in IDX.items():
            (self.folder / f"{name}.gz").write_bytes(gzip.compress(content))


class Sample(Reader):
    """The digits that come with gradmem."""

    def write(self) -> None:
        (self.folder / "sample").mkdir()
        content = mnist.resources("gradmem.data").joinpath("sample", "mnist.npz").read_bytes()
        (self.folder / "sample" / "mnist.npz").write_bytes(content)

    def read(self) -> None:
        with mock.patch.object(mnist, "resources", return_value=self.folder):
            load_mnist("sample")


class CifarFiles(Reader):
    """CIFAR-100's three pickles."""

    kinds: ClassVar = {"": mutated_pickle}

    def write(self) -> None:
        cifar.write_cifar(self.folder, cifar.contents(2, 1))

    def read(self) -> None:
        load_cifar100(self.folder)


class CifarArchive(Reader):
    """The three pickles in an archive: plain, gzipped or xz-compressed."""

    def write(self) -> None:
        content = cifar.tar(cifar.contents(2, 1), compression="")
        (self.folder / "cifar-100-python.tar").write_bytes(content)

    def read(self) -> None:
        load_cifar100(self.folder)

    def mutated(self, path: Path, rng: random.Random) -> bytes:
        return packed(mutated_tar(self.good[path], rng), rng)


class Runs(Reader):
    """The folders of a run and of a failed one, and the table of a report about them."""

    def write(self) -> None:
        write_run(self.folder / "run", n_tasks=2)
        write_run(self.folder / "failed", n_tasks=2)
        (self.folder / "failed" / "result.json").unlink()
        failure = {"type": "Error", "message": "it diverged", "traceback": ["line"], "time": 0.0}
        (self.folder / "failed" / "failure.json").write_text(json.dumps(failure))
        self.own = RunFolder(self.folder / "run", Experiment("mnist-rotations", "gem", n_tasks=2))

    def read(self) -> None:
        failures = failed_lines(find_failures([self.folder]))
        text = markdown_table(summarize(find_runs([self.folder])), failures)
        assert all(line.isprintable() for line in text.split("\n")), text
        self.own.check()


class Sweeps(Reader):
    """A sweep's folder: the sweep, a finished run and a failed one, and the log."""

    def write(self) -> None:
        grids = {"mnist-rotations": {"single": {"lr": [0.1, 0.2]}}}
        sweep = Sweep(grids, seeds=(0,), common={"data": "sample", "n_tasks": 2})
        self.store = Store(self.folder)
        self.store.open(sweep)
        finished, failed = self.planned = sweep.experiments()
        write_run(self.store.folder(finished.key), "single", n_tasks=2)
        self.store.fail(failed, Failed.of(FloatingPointError("the loss is nan")))

    def targets(self) -> list[Path]:
        return [path for path in super().targets() if path.suffix in (".json", ".jsonl")]

    def read(self) -> None:
        self.named = True
        self.store.log()
        for experiment in self.planned:
            outcome = self.store.outcome(experiment)
            text = outcome.error if isinstance(outcome, Failure) else outcome.name
            assert all(line.isprintable() for line in text.split("\n")), text
        for experiment in self.store.sweep().experiments():
            assert "/" not in experiment.config()["learner"]
        self.named = False  # errors may be about the data that the sweep names
        select(self.folder)


class Searches(Reader):
    """The settings that a search has tried so far, in a sweep's folder."""

    def write(self) -> None:
        grids = {"mnist-rotations": {"gem": {"lr": [0.1, 0.2], "margin_rule": ["shift", "floor"]}}}
        common = {"data": "sample", "n_tasks": 2}
        self.sweep = Sweep(grids, seeds=(0,), common=common, search="optuna", trials=2)
        self.store = Store(self.folder)
        self.store.open(self.sweep)
        tried = [{"lr": 0.12, "margin_rule": "shift"}, {"lr": 0.2, "margin_rule": "floor"}]
        self.store.add_trials("mnist-rotations", "gem", 0, tried)

    def targets(self) -> list[Path]:
        return [self.folder / "trials.json"]

    def read(self) -> None:
        for experiment in self.sweep.experiments(self.store.trials()):
            assert set(experiment.settings) >= {"lr", "margin_rule"}
            assert "/" not in experiment.key


class Kept(Reader):
    """Kept results of the paper's runs, a kept search, and the page that is made of them."""

    def write(self) -> None:
        kept = json.loads((KEPT / "mnist-rotations-gem.json").read_text())
        del kept["runs"][2:]
        for run in kept["runs"]:
            run |= {"R": [row[:2] for row in run["R"][:2]], "baseline": run["baseline"][:2]}
        kept |= {"n_tasks": 2, "examples": kept["examples"][:3]}
        search = json.loads((KEPT / "grid-mnist-rotations.json").read_text())
        del search["choices"][2:]
        (self.folder / "mnist-rotations-gem.json").write_text(json.dumps(kept))
        (self.folder / "grid-mnist-rotations.json").write_text(json.dumps(search))
        self.turn = 0

    def read(self) -> None:
        load(self.folder)
        load_searches(self.folder)
        self.turn += 1
        if self.turn % 50 == 1:  # it takes longer
            text = page_text(self.folder)
            assert all(line.isprintable() for line in text.split("\n")), text


class Grids(Reader):
    """The grid that is given to `gradmem sweep`."""

    def write(self) -> None:
        grid = {"gem": {"lr": [0.1, 0.2], "memories": [5]}, "single": {"lr": [0.1]}}
        (self.folder / "grid.json").write_text(json.dumps(grid))
        self.turn = 0

    def read(self) -> None:
        self.named = True
        grid, _ = sweep_cli._grid("mnist-rotations", str(self.folder / "grid.json"), None, [])
        self.named = False  # from here on, errors are about settings and how many they are
        grids = {"mnist-rotations": grid}
        planned = Sweep(grids, (0,), common={"data": "sample", "n_tasks": 2}).experiments()
        self.turn += 1
        if self.turn % 100 == 1 and len(planned) < 100:  # it takes longer
            check_settings(planned)


READERS: dict[str, type[Reader]] = {
    "idx": IdxFiles,
    "idx-gz": IdxGzFiles,
    "sample": Sample,
    "cifar": CifarFiles,
    "cifar-archive": CifarArchive,
    "runs": Runs,
    "sweeps": Sweeps,
    "searches": Searches,
    "kept": Kept,
    "grids": Grids,
}

#: What no reader may do; see the table of audit events in Python's documentation.
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.")
_seen: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    is_path = event in ("open", "import") and isinstance(arguments[0], str)
    if event.startswith(FORBIDDEN) or (
        is_path and ("trap" in arguments[0] or "passwd" in arguments[0])
    ):
        _seen.append(f"{event} {arguments!r:.200}")


def attack(name: str, n: int, seed: int = 0) -> Counter[str]:
    """Read `n` mutated files; how many were read, were refused, and ended otherwise."""
    seen: Counter[str] = Counter(read=0, refused=0)
    rng = random.Random(f"{name} {seed}")
    with tempfile.TemporaryDirectory(dir=_quick_folder()) as made:
        reader = READERS[name](Path(made))
        reader.read()  # the good files are good
        paths = list(reader.good)
        for _ in range(n):
            path = rng.choice(paths)
            path.write_bytes(reader.mutated(path, rng))
            seen[_ended(reader)] += 1
            path.write_bytes(reader.good[path])
        reader.read()  # and nothing has happened to them
    return seen


def _ended(reader: Reader) -> str:
    _seen.clear()
    try:
        reader.read()
    except Exception as error:
        ended = _judged(error, reader)
    else:
        ended = "read"
    return f"other: {_seen[0]}" if _seen else ended


def _judged(error: Exception, reader: Reader) -> str:
    """Whether an error is one that gradmem may raise for a bad file."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(gradmem.__file__).parent in Path(frames[-1].filename).parents
    text = str(error)
    where = f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}"
    if not ours or type(error) not in (ValueError, TypeError, DataError):
        return f"other: {where}, {text[:200]!a}"
    if not text.isprintable() or len(text) > MOST_TEXT:
        return f"other: odd text of {where}, {text[:200]!a}"
    if reader.named and str(reader.folder) not in text:
        return f"other: no name in {where}, {text[:200]!a}"
    return "refused"


def _quick_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main(name: str, n: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, resource.RLIM_INFINITY))
    sys.addaudithook(_watch)
    warnings.simplefilter("error")
    lookup.setting_parameters = functools.cache(lookup.setting_parameters)  # which takes long
    failed = False
    for one in READERS if name == "all" else [name]:
        begin = time.perf_counter()
        seen = attack(one, n)
        other = {what: count for what, count in seen.items() if what.startswith("other")}
        failed |= bool(other)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{one}: {n:,} mutated, {seen['refused']:,} refused, {seen['read']:,} read, "
            f"{sum(other.values())} other errors; {time.perf_counter() - begin:.0f} s, "
            f"peak of the process so far {peak:.0f} MB",
            flush=True,
        )
        for what, count in sorted(other.items(), key=lambda item: -item[1])[:30]:
            print(f"  {count} × {what}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
