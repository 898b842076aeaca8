"""The wheel, installed beside nothing of the checkout: it runs, and its types are a user's."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling")

#: What a user may write; mypy looks at it with the installed package's own types.
USER = """
import torch
from torch.nn import functional as F

import gradmem as gm

network = gm.mlp([20, 8, 3])
learner = gm.GEM(network, lr=0.1, memories=10, budget=None, keep="last")
x, y = torch.randn(30, 20), torch.randint(3, (30,))
loss = learner.observe(x, "monday", y)
continuum = gm.Continuum.from_arrays(x, y, [0] * 15 + [1] * 15, test=0.2, batch_size=5)
result = gm.run(learner, continuum)
acc: float = result.acc
memory = gm.GradientMemory(network, loss=F.cross_entropy, memories=10)
memory.add(x, "monday", y)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
memory.step(optimizer, "tuesday")
g_tilde: torch.Tensor = gm.project(torch.randn(4), torch.randn(2, 4), margin=0.5)
found: bool = gm.report([result], "report").exists()
"""
WRONG = """
import gradmem as gm

learner = gm.GEM(gm.mlp(), memories="many")
page: int = gm.run(learner, gm.mnist_rotations(data="sample")).acc
"""


def environment(**more):
    """Without what would find the checkout."""
    return {name: v for name, v in os.environ.items() if name != "PYTHONPATH"} | more


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (found,) = folder.glob("gradmem-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A Python with the wheel; what gradmem depends on is borrowed from this one."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(packages), str(wheel)]
    subprocess.run(command, check=True)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return Path(sysconfig.get_path("scripts", "venv", {"base": str(folder)})) / "python"


def test_a_wheel_has_all_that_is_needed_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gradmem", f"{wheel.stem[:13]}.dist-info"}
    for needed in ("py.typed", "data/sample/mnist.npz", "reports/web/page.html"):
        assert f"gradmem/{needed}" in names


def test_the_command_runs_without_the_checkout(installed, tmp_path):
    run = [installed, "-m", "gradmem", "compare", "--benchmark", "mnist-rotations", "--data"]
    run += ["sample", "--learners", "single,gem", "--tasks", "2", "--examples", "20"]
    done = subprocess.run(
        [*map(str, run), "--out", "out"], cwd=tmp_path, env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "out" / "report.html").exists()
    where = "import gradmem; print(gradmem.__file__)"
    said = subprocess.run(
        [installed, "-c", where], cwd=tmp_path, env=environment(), capture_output=True, text=True
    ).stdout
    assert Path(said).is_relative_to(installed.parents[1])


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_types_are_complete_for_a_user(installed, tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed)]
    done = subprocess.run(
        [*command, "user.py", "wrong.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[:2] for line in lines] == [["wrong.py", "4"], ["wrong.py", "5"]], lines
    env = environment(PYTHONWARNINGS="error")
    subprocess.run([installed, "user.py"], cwd=tmp_path, env=env, check=True)
