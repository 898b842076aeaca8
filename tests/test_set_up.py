"""Setting up never brings GPU packages that nobody asked for."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "scripts" / "set_up.py"


@pytest.fixture
def set_up(monkeypatch):
    spec = importlib.util.spec_from_file_location("set_up", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("GRADMEM_TORCH", raising=False)
    return module


def pip_would_install(*names):
    def install(python, *arguments):
        assert "--dry-run" in arguments
        report = Path(arguments[arguments.index("--report") + 1])
        report.write_text(json.dumps({"install": [{"metadata": {"name": n}} for n in names]}))

    return install


def test_a_torch_with_gpu_packages_is_refused(set_up, monkeypatch):
    monkeypatch.setattr(set_up, "install", pip_would_install("torch", "nvidia-cublas", "triton"))
    with pytest.raises(SystemExit, match=r"2 GPU packages.*\n.*PIP_EXTRA_INDEX_URL.*\n.*TORCH=gpu"):
        set_up.refuse_gpu_packages(Path("python"), "torch==2.13.0")
    monkeypatch.setenv("GRADMEM_TORCH", "gpu")
    set_up.refuse_gpu_packages(Path("python"), "torch==2.13.0")


def test_a_torch_without_them_is_not(set_up, monkeypatch):
    monkeypatch.setattr(set_up, "install", pip_would_install("torch", "filelock", "sympy"))
    set_up.refuse_gpu_packages(Path("python"), "torch==2.13.0")


def test_the_pinned_torch_is_the_tested_one():
    pins = (PATH.parent.parent / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
