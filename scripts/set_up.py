"""Make a virtual environment with gradmem and the versions in constraints.txt.

    python3 scripts/set_up.py [--dev] [FOLDER]

Only the standard library is used, so that any Python 3.11 or later can run it. Running it again
completes or updates what is there.

On Linux the torch that comes from PyPI brings several gigabytes of GPU packages. That never happens
by accident: what pip would install is looked at first, and GPU packages are refused unless
GRADMEM_TORCH=gpu is set. CPU builds of torch are in PyTorch's own package index; pip uses it when
its address (see the install page of pytorch.org, "CPU") is in the variable PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
GPU_PACKAGES = ("nvidia-", "cuda-", "triton", "pytorch-triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", default=ROOT / ".venv", type=Path)
    parser.add_argument("--dev", action="store_true", help="also what tests and linting need")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is there
        sys.exit(f"gradmem needs Python 3.11 or later, this is {sys.version.split()[0]}")

    python = arguments.folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        print(f"Making {arguments.folder}", flush=True)
        venv.create(arguments.folder, with_pip=True)
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch="))
    refuse_gpu_packages(python, torch)
    print(f"Installing {torch} and the rest of constraints.txt", flush=True)
    install(python, torch)
    install(python, "hatchling", "editables")
    target = f"{ROOT}[dev]" if arguments.dev else str(ROOT)
    install(python, "--no-build-isolation", "--editable", target)


def refuse_gpu_packages(python: Path, torch: str) -> None:
    """Stop if installing torch would bring GPU packages that nobody asked for."""
    if os.environ.get("GRADMEM_TORCH") == "gpu":
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        install(python, "--dry-run", "--report", str(report), torch)
        names = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    gpu = sorted(name for name in names if name.lower().startswith(GPU_PACKAGES))
    if gpu:
        sys.exit(
            f"pip would install {torch} with {len(gpu)} GPU packages, several gigabytes "
            f"({', '.join(gpu[:3])}, …).\nFor the CPU build, set PIP_EXTRA_INDEX_URL to PyTorch's "
            "package index for CPU (its address is on the install page of pytorch.org).\n"
            "For the GPU build, set GRADMEM_TORCH=gpu. Then run make again."
        )


def install(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(CONSTRAINTS), *arguments]
    if subprocess.run(command).returncode:
        sys.exit("Could not install: " + " ".join(arguments))


if __name__ == "__main__":
    main()
