"""`gradmem doctor`: what is installed, found and missing, and how to get it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from gradmem.cli.console import say
from gradmem.data import DataError, load_cifar100, load_mnist
from gradmem.data.fetch import cache_folder, folder_in_environment
from gradmem.evaluation.machine import versions

__all__ = ["doctor_command"]

#: Extras that are for working on gradmem, not with it.
OURS = ("dev", "docs")
#: Data set → how it is read, its folder in the cache, and its name for `gradmem data --set`.
SETS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "MNIST": (load_mnist, "mnist", "mnist"),
    "CIFAR-100": (load_cifar100, "cifar-100", "cifar100"),
}

Line = tuple[str, str, str]  # what, what was found, what to do about it ("" if it is well)

#: What was found of a library that one may do without.
OPTIONAL = "optional, not installed"


def doctor_command() -> None:
    """Say what is installed, found and missing, and how to get it. Nothing is downloaded."""
    advice = []
    for heading, lines in {"Versions": _versions, "Machine": _machine, "Data": _data}.items():
        say(heading)
        for what, found, todo in lines():
            mark = "–" if found == OPTIONAL else "!" if todo else " "
            say(f"  {mark} {what:<14} {found}")
            if todo:
                advice.append(f"  {what}: {todo}")
    if advice:
        say("What is missing, if you need it:")
        for line in advice:
            say(line)
    else:
        say("Nothing is missing.")


def _versions() -> Iterator[Line]:
    known = versions()
    for name in ("gradmem", "python", "torch", "numpy"):
        yield name, known[name], ""
    for name, requirement in _optional().items():
        try:
            yield name, version(name), ""
        except PackageNotFoundError:
            yield name, OPTIONAL, f'pip install "{requirement}"'


def _optional() -> dict[str, str]:
    """Libraries that gradmem can work with, each as pip takes it: "optuna>=4.0"."""
    found: dict[str, str] = {}
    for line in requires("gradmem") or ():
        requirement, _, condition = line.partition(";")
        extra = re.search(r"""extra == ["']([\w-]+)["']""", condition)
        name = re.split(r"[^\w.-]", requirement)[0]
        if extra and extra[1] not in OURS and name != "gradmem":
            found[name] = requirement.strip()
    return found


def _machine() -> Iterator[Line]:
    known = versions()
    yield "system", known["system"], ""
    yield "processor", f"{known['processor']}, {known['cores']} cores", ""
    few = known["threads"] < known["cores"] and "OMP_NUM_THREADS" not in os.environ
    todo = f"OMP_NUM_THREADS={known['cores']} lets torch use all cores" if few else ""
    yield "threads", f"{known['threads']} of torch", todo
    if known["gpu"]:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield "GPU", f"{known['gpu']}, {memory:.0f} GiB: --device cuda", ""
    elif shutil.which("nvidia-smi"):
        yield "GPU", "there may be one, torch does not see it", "install a GPU build of torch"
    else:
        yield "GPU", "none; runs are made on the CPU", ""


def _data() -> Iterator[Line]:
    yield "digits", f"{load_mnist('sample')}, bundled: --data sample", ""
    named = os.environ.get("GRADMEM_DATA", "")
    try:
        cache: Path | None = cache_folder()
        size = sum(file.stat().st_size for file in _files(cache)) / 1e6
        yield "cache", f"{cache}, {size:.0f} MB", ""
    except DataError as error:
        cache = None
        yield "cache", "none", str(error)
    try:
        folder = folder_in_environment()
        yield "GRADMEM_DATA", named or "not set", ""
    except DataError as error:
        folder = None
        yield "GRADMEM_DATA", named, str(error)
    for name, (load, cached, typed) in SETS.items():
        places = [place for place in (folder, cache and cache / cached) if place]
        found, damaged = _first(load, places)
        if found:
            yield name, f"{found} in {found.source}", ""
        else:
            todo = f"gradmem data --set {typed} fetches it; or GRADMEM_DATA=FOLDER names its files"
            yield name, damaged or "not found", todo


def _files(folder: Path | None) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder else []


def _first(load: Callable[..., Any], places: list[Path]) -> tuple[Any, str]:
    """The data in the first place that has them, or what is wrong with the first that should."""
    wrong = ""
    for place in places:
        if place.is_dir():
            try:
                return load(place), ""
            except DataError as error:
                has_none = f"{place} has no " in str(error)
                wrong = wrong or ("" if has_none else str(error))
    return None, wrong
