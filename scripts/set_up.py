"""Make a virtual environment with gradmem and the versions in constraints.txt.

    python3 scripts/set_up.py [--dev] [--docs] [FOLDER]

Only the standard library is used. Running it again completes or updates what is there; if nothing
is missing, it needs no network.

Which torch is installed:

1. pip's default build, if it brings no GPU packages;
2. otherwise, on a machine without an NVIDIA GPU, the CPU build from PyTorch's own package index;
3. otherwise (there is a GPU, or that index does not answer or has no such version) pip's default
   build, after saying how much is downloaded.

GRADMEM_TORCH=gpu always takes pip's default build. GRADMEM_TORCH=cpu takes the CPU build on a
machine with a GPU too, and stops if it cannot be had. GRADMEM_TORCH_INDEX is the address of the
package index with CPU builds, if it is not PyTorch's. A torch that is installed already is kept.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_PACKAGES = ("nvidia-", "cuda-", "triton", "pytorch-triton")
GPU_DEVICE = Path("/dev/nvidia0")
PATIENCE = 5.0  # seconds to wait for a server's answer


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is there
        sys.exit(
            "gradmem needs Python 3.11 or later, this is {}.{}; `make PYTHON=python3.12 …` uses "
            "another one".format(*sys.version_info)
        )
    parser = argparse.ArgumentParser(description="Make a virtual environment with gradmem.")
    parser.add_argument("folder", nargs="?", default=ROOT / ".venv", type=Path)
    parser.add_argument("--dev", action="store_true", help="also what tests and linting need")
    parser.add_argument("--docs", action="store_true", help="also what makes the site")
    arguments = parser.parse_args()

    python = make_environment(arguments.folder)
    # Older versions of pip download whole packages to find out what they would install.
    install(python, pinned("pip"))
    install_torch(python, pinned("torch"))
    print("Installing the rest of constraints.txt", flush=True)
    require(python, "hatchling", "editables")
    extras = [name for name in ("dev", "docs") if getattr(arguments, name)]
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    require(python, "--no-build-isolation", "--editable", target)


def make_environment(folder: Path) -> Path:
    """Make the virtual environment or repair an interrupted one; return its Python."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists() or pip(python, "--version").returncode:
        print(f"Making {folder}", flush=True)
        try:
            venv.create(folder, with_pip=True, clear=(folder / "pyvenv.cfg").exists())
        except subprocess.CalledProcessError:
            sys.exit(f"{sys.executable} has no ensurepip; on Debian, `apt install python3-venv`")
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    for info in Path(packages).glob("*.dist-info"):
        if not (info / "RECORD").exists():  # written last: pip would take the package for complete
            shutil.rmtree(info)
    return python


def install_torch(python: Path, torch: str) -> None:
    """Install the build of torch that suits the machine (see the top of this file)."""
    choice = os.environ.get("GRADMEM_TORCH") or "auto"
    if choice not in ("auto", "cpu", "gpu"):
        sys.exit(f"GRADMEM_TORCH is {choice!r}; it can be cpu, gpu or unset")
    urls = would_download(python, torch)
    if any(name.startswith(GPU_PACKAGES) for name in urls):
        cpu = choice == "cpu" or (choice == "auto" and not has_nvidia_gpu())
        if not (cpu and install_cpu_build(python, torch)):
            if choice == "cpu":
                sys.exit("GRADMEM_TORCH is cpu, but the CPU build cannot be had")
            size = download_size(list(urls.values()))
            print(f"Installing {torch} with its GPU packages: {size}", flush=True)
    require(python, torch)


def would_download(python: Path, requirement: str) -> "dict[str, str]":
    """Return the packages that pip would install for a requirement, and their addresses."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        # fast-deps: read what a package requires without downloading it
        look = ("install", "--dry-run", "--use-feature", "fast-deps", "--report", str(report))
        if pip(python, *look, "--constraint", str(CONSTRAINTS), requirement).returncode:
            return {}  # installing it says why
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"].lower(): item["download_info"]["url"] for item in items}


def has_nvidia_gpu() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    if GPU_DEVICE.exists() or nvidia_smi is None:
        return GPU_DEVICE.exists()
    listed = subprocess.run([nvidia_smi, "--list-gpus"], stdout=subprocess.PIPE)
    return listed.stdout.startswith(b"GPU")


def install_cpu_build(python: Path, torch: str) -> bool:
    """Install torch without its dependencies from the index of CPU builds; say if that fails."""
    index = os.environ.get("GRADMEM_TORCH_INDEX") or CPU_INDEX
    name, version = f"{torch}+cpu".split("==")
    look = ("--index-url", index, "--timeout", str(PATIENCE), "--retries", "0", name)
    try:
        found = pip(python, "index", "versions", *look, timeout=3 * PATIENCE).stdout
    except subprocess.TimeoutExpired:
        found = ""
    if version in found.partition("versions: ")[2].partition("\n")[0].split(", "):
        print(f"Installing {torch}+cpu from {index}", flush=True)
        if install(python, "--no-deps", "--index-url", index, f"{torch}+cpu"):
            return True
    print(f"No {torch}+cpu for this Python from {index}", flush=True)
    return False


def download_size(urls: "list[str]") -> str:
    """Say how much the files at some addresses are, as far as their servers tell."""
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(content_length, urls))
    if not any(sizes):
        return "how much is downloaded cannot be found out, perhaps several GB"
    return f"{'about' if all(sizes) else 'at least'} {sum(sizes) / 1e9:.1f} GB to download"


def content_length(url: str) -> int:
    """Return the size of a file on a server in bytes, 0 if the server does not tell."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=PATIENCE) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except (OSError, HTTPException, ValueError):
        return 0


def pinned(name: str) -> str:
    """Return a package's line in constraints.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(name + "=="))


def require(python: Path, *arguments: str) -> None:
    if not install(python, *arguments):
        sys.exit(f"Could not install {' '.join(arguments)}: pip says why")


def install(python: Path, *arguments: str) -> bool:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return not subprocess.run([*command, "--constraint", str(CONSTRAINTS), *arguments]).returncode


def pip(
    python: Path, *arguments: str, timeout: "float | None" = None
) -> "subprocess.CompletedProcess[str]":
    """Run pip and keep what it prints."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


if __name__ == "__main__":
    main()
