"""Several processes that train one model: real ones, with gloo on the CPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from gradmem.checkpoint import load_state
from tests import processes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What became of each check in each process: they are started once for all checks."""
    folder = tmp_path_factory.mktemp("processes")
    context = torch.multiprocessing.spawn(
        processes.work, (str(folder),), processes.MOST, join=False
    )
    try:
        while not context.join(timeout=5):
            pass
    except Exception as error:
        (folder / "spawn.error").write_text(repr(error))
    return folder


@pytest.mark.parametrize("name", processes.CHECKS)
def test_in_four_processes(name, outcome):
    failed = [path.read_text() for path in sorted(outcome.glob("*.failed"))]
    failed += [path.read_text() for path in outcome.glob("spawn.error")]
    passed = {path.name for path in outcome.glob(f"{name}-*.passed")}
    expected = {f"{name}-{rank}.passed" for rank in range(processes.MOST)}
    assert passed == expected, failed[:1]


def started(folder, *options):
    """The example, started by torchrun as from a shell, in a session of its own."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else new processes may look for the lost ones
    }
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*run, *options, str(ROOT / "examples/distributed.py")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process):
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *children(process.pid)]:  # these have sessions of their own
            os.kill(pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-3000:]
    return output


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_killed_process_is_started_again_and_the_end_is_the_same(tmp_path):
    undisturbed = started(tmp_path / "undisturbed")
    output, first = finished(undisturbed), tmp_path / "undisturbed/checkpoint"
    assert "accuracy" in output
    disturbed = started(tmp_path / "disturbed", "--max-restarts", "1")
    file = tmp_path / "disturbed/checkpoint"
    end = time.monotonic() + 200
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    before = load_state(file, "GEM")["steps"]
    os.kill(children(disturbed.pid)[1], signal.SIGKILL)
    again = finished(disturbed)
    assert "failed (exitcode" in again  # of the killed process, or of the one that misses it
    assert "accuracy" in again
    one, other = (load_state(path, "GEM") for path in (first, file))
    assert before < one["steps"] == other["steps"]
    for name, weight in one["network"].items():
        assert torch.equal(weight, other["network"][name])
