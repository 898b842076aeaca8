"""Setting up chooses the torch that suits the machine, and never stops because of it."""

import ast
import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATH = ROOT / "scripts" / "set_up.py"

STAND_IN = f"""#!{sys.executable}
# A virtual environment's Python: "installs" by noting what pip is asked to install.
import json, pathlib, subprocess, sys
folder, arguments = pathlib.Path(__file__).parent.parent, sys.argv[3:]
if "versions" in arguments:
    sys.exit(subprocess.call([{sys.executable!r}, *sys.argv[1:]]))
if "--report" in arguments:
    report = pathlib.Path(arguments[arguments.index("--report") + 1])
    report.write_text((folder / "report.json").read_text())
elif "install" in arguments:
    print(*arguments[arguments.index("--constraint") + 2:], file=(folder / "asked").open("a"))
sys.exit("--index-url" in arguments and (folder / "no-files").exists())
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Index:
    """A package index: a folder of folders, whose listings are its pages."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "torch").mkdir(parents=True)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def add(self, name, size=0):
        """Add a file with nothing in it, and return its address."""
        with (self.folder / "torch" / name).open("wb") as file:
            file.truncate(size)
        return f"{self.address}/torch/{name}"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Machine:
    """A machine with a virtual environment whose pip is a stand-in."""

    def __init__(self, folder, script, monkeypatch, capsys):
        self.folder, self.script, self.monkeypatch = folder, script, monkeypatch
        self.capsys = capsys
        write_program(folder / "bin" / "python", STAND_IN)

    def default_torch_brings(self, **urls):
        items = [
            {"metadata": {"name": name.replace("_", "-")}, "download_info": {"url": url}}
            for name, url in urls.items()
        ]
        (self.folder / "report.json").write_text(json.dumps({"install": items}))

    def set_up(self, *arguments):
        """Run the script; return what it asked pip to install, and what it said."""
        self.monkeypatch.setattr(sys, "argv", ["set_up.py", str(self.folder), *arguments])
        self.script.main()
        asked = (self.folder / "asked").read_text().splitlines()
        return [line for line in asked if "torch==" in line], self.capsys.readouterr().out


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("set_up", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("GRADMEM_TORCH", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def machine(tmp_path, script, monkeypatch, capsys):
    return Machine(tmp_path / "venv", script, monkeypatch, capsys)


@pytest.fixture
def index(tmp_path, monkeypatch):
    index = Index(tmp_path / "index")
    monkeypatch.setenv("GRADMEM_TORCH_INDEX", index.address)
    yield index
    index.close()


@pytest.fixture
def gpu_build(machine, index):
    """Let pip's default torch be a GPU build of 1.5 GB; return how pip is asked for it."""
    machine.default_torch_brings(
        torch=index.add("torch-2.13.0-py3-none-any.whl", 500_000_000),
        nvidia_cublas=index.add("nvidia_cublas-1-py3-none-any.whl", 1_000_000_000),
    )
    return "torch==2.13.0"


@pytest.fixture
def cpu_build(index):
    """Let the index have the CPU build; return how pip is asked for it."""
    index.add("torch-2.13.0+cpu-py3-none-any.whl")
    return f"--no-deps --index-url {index.address} torch==2.13.0+cpu"


def test_a_default_torch_without_gpu_packages_is_taken(machine, cpu_build):
    machine.default_torch_brings(torch="file:///torch.whl", sympy="file:///sympy.whl")
    asked, said = machine.set_up()
    assert asked == ["torch==2.13.0"]
    assert "GB" not in said


def test_without_a_gpu_the_cpu_build_is_taken(machine, gpu_build, cpu_build):
    asked, said = machine.set_up()
    assert asked == [cpu_build, gpu_build]  # the second brings what the first one needs
    assert "torch==2.13.0+cpu from http" in said
    assert "GB" not in said


def test_with_a_gpu_the_default_torch_is_taken(machine, gpu_build, cpu_build, monkeypatch):
    monkeypatch.setattr(machine.script, "has_nvidia_gpu", lambda: True)
    asked, said = machine.set_up()
    assert asked == [gpu_build]
    assert "torch==2.13.0 with its GPU packages: about 1.5 GB to download" in said


def no_such_version(index):
    index.add("torch-2.12.0+cpu-py3-none-any.whl")
    index.add("torch-2.13.0+cpu-cp27-cp27m-any.whl")
    return index.address


def refused(index):
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("place", [no_such_version, refused])
def test_without_a_cpu_build_the_default_torch_is_taken(
    machine, index, gpu_build, monkeypatch, place
):
    address = place(index)
    monkeypatch.setenv("GRADMEM_TORCH_INDEX", address)
    asked, said = machine.set_up()
    assert asked == [gpu_build]
    assert f"No torch==2.13.0+cpu for this Python from {address}" in said
    assert "about 1.5 GB to download" in said


def test_an_index_that_does_not_answer_is_given_up(machine, gpu_build, monkeypatch):
    monkeypatch.setattr(machine.script, "PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("GRADMEM_TORCH_INDEX", address)
        asked, said = machine.set_up()
    assert asked == [gpu_build]
    assert f"No torch==2.13.0+cpu for this Python from {address}" in said


def test_a_cpu_build_that_cannot_be_downloaded_is_given_up(machine, gpu_build, cpu_build):
    (machine.folder / "no-files").touch()
    asked, said = machine.set_up()
    assert asked == [cpu_build, gpu_build]
    assert "about 1.5 GB to download" in said


def test_sizes_that_are_not_known_are_not_made_up(machine, index):
    known = index.add("torch-2.13.0-py3-none-any.whl", 500_000_000)
    machine.default_torch_brings(torch=known, triton=f"{index.address}/nowhere.whl")
    assert "at least 0.5 GB to download" in machine.set_up()[1]
    machine.default_torch_brings(torch="http://[", triton=f"{index.address}/nowhere.whl")
    assert "how much is downloaded cannot be found out" in machine.set_up()[1]


def test_the_build_can_be_chosen(machine, index, gpu_build, cpu_build, monkeypatch):
    monkeypatch.setenv("GRADMEM_TORCH", "gpu")
    assert machine.set_up()[0] == [gpu_build]
    monkeypatch.setattr(machine.script, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("GRADMEM_TORCH", "cpu")
    assert machine.set_up()[0] == [gpu_build, cpu_build, gpu_build]
    (index.folder / "torch" / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="GRADMEM_TORCH is cpu, but the CPU build"):
        machine.set_up()
    monkeypatch.setenv("GRADMEM_TORCH", "tpu")
    with pytest.raises(SystemExit, match="GRADMEM_TORCH is 'tpu'; it can be cpu, gpu or unset"):
        machine.set_up()


def test_pip_is_brought_up_to_date_first_and_gradmem_comes_last(machine):
    machine.default_torch_brings()
    machine.set_up("--dev")
    first, *_, last = (machine.folder / "asked").read_text().splitlines()
    assert first.startswith("pip==")
    assert last == f"--no-build-isolation --editable {ROOT}[dev]"


@pytest.mark.parametrize(("lists", "found"), [("GPU 0: some card", True), ("No devices", False)])
def test_a_gpu_is_what_nvidia_smi_lists(script, tmp_path, monkeypatch, lists, found):
    monkeypatch.undo()  # the fixture's answer
    monkeypatch.setattr(script, "GPU_DEVICE", tmp_path / "nvidia0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not script.has_nvidia_gpu()
    write_program(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{lists}'\n")
    assert script.has_nvidia_gpu() is found
    (tmp_path / "nvidia0").touch()
    assert script.has_nvidia_gpu()


def test_what_an_interrupted_run_left_is_made_whole(machine, script, monkeypatch):
    site = machine.folder.joinpath("lib", "python{}.{}".format(*sys.version_info), "site-packages")
    for name in ("whole", "half"):
        (site / f"{name}-1.dist-info").mkdir(parents=True)
        (site / f"{name}-1.dist-info" / "METADATA").touch()
    (site / "whole-1.dist-info" / "RECORD").touch()
    script.make_environment(machine.folder)
    assert [path.name for path in site.iterdir()] == ["whole-1.dist-info"]

    made = []
    monkeypatch.setattr(script.venv, "create", lambda folder, **kinds: made.append(kinds))
    write_program(machine.folder / "bin" / "python", "#!/bin/sh\nexit 1\n")  # has no pip
    (machine.folder / "pyvenv.cfg").touch()
    script.make_environment(machine.folder)
    assert made == [{"with_pip": True, "clear": True}]


def test_an_old_python_is_told_so_in_one_line(script, monkeypatch):
    ast.parse(PATH.read_text(), feature_version=(3, 7))
    assert "__future__" not in PATH.read_text()  # a SyntaxError before Python 3.7
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"^gradmem needs Python 3.11 or later, this is 3.9; .*$"):
        script.main()


@pytest.mark.parametrize("user", ["root", "sudo", "nobody"])
def test_ci_installs_chromium_where_it_can(tmp_path, user):
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    write_program(tmp_path / "id", f"#!/bin/sh\necho {0 if user == 'root' else 1000}\n")
    write_program(tmp_path / "make", "#!/bin/sh\necho make $@\n")
    as_root = "" if user == "root" else '[ "$AS_ROOT" ] || exit 100\n'
    write_program(tmp_path / "apt-get", f"#!/bin/sh\n{as_root}echo apt-get $1 >&2\n")
    if user == "sudo":
        write_program(tmp_path / "sudo", '#!/bin/sh\nshift\nAS_ROOT=yes "$@"\n')
    ran = subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(tmp_path)}, capture_output=True)
    asked = [line for line in ran.stderr.decode().splitlines() if line.startswith("apt-get")]
    assert asked == ([] if user == "nobody" else ["apt-get update", "apt-get install"])
    assert ("page are skipped" in ran.stdout.decode()) is (user == "nobody")
    assert ran.stdout.decode().endswith("make test\n")
    assert ran.returncode == 0


def test_ci_fails_where_tests_fail(tmp_path):
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    write_program(tmp_path / "make", "#!/bin/sh\nexit 2\n")
    assert subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(tmp_path)}).returncode == 2
