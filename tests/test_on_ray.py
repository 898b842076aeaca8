"""Sweeps on a real Ray cluster, on one machine: nodes come and go, results are those of here."""

import os
import re
import signal
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from gradmem.reproduction.plan import Conditions, settings_of
from gradmem.reproduction.runs import make_runs
from gradmem.sweeps import Died, Elsewhere, InTurn, Store, run_sweep
from gradmem.sweeps.on_ray import _require_answer

from .sweeps import assert_nothing_finished_twice, command, events, results, said_by, tiny

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own files and processes
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Cluster(initialize_head=True, head_node_args=NODE)
        for _ in range(2):
            made.add_node(**NODE)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def on_ray(cluster):
    from gradmem.sweeps.on_ray import OnRay

    with OnRay(cluster.address) as executor:
        yield executor


class Noting:
    """Tells where a function was called; one call kills its worker, one never returns.

    Once there is another node in its place, all wait for a call there.
    """

    def __init__(self, function, marks, doomed):
        self.function, self.marks, self.doomed = function, marks, doomed
        self.calls = 0

    def __call__(self, item):
        node = ray.get_runtime_context().get_node_id()
        self.calls += 1
        if self.calls == 3 and node != self.doomed and self._first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and node == self.doomed and self._first("stuck"):
            time.sleep(3600)
        added, used = self.marks / "added", self.marks / "used"
        if added.exists():
            if added.read_text() == node:
                used.touch()
            deadline = time.monotonic() + 120
            while not used.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return node, self.function(item)

    def _first(self, name):
        try:
            (self.marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Noted(Elsewhere):
    """An executor that notes on which node each run was made, and which workers were lost."""

    def __init__(self, executor, marks, doomed):
        self.executor, self.marks, self.doomed = executor, marks, doomed
        self.nodes, self.lost = {}, []

    def __call__(self, function, items):
        for item, answer in self.executor(Noting(function, self.marks, self.doomed), items):
            if isinstance(answer, Died):
                self.lost.append((item.key, answer))
                yield item, answer
            else:
                assert item.key not in self.nodes, "made twice"
                self.nodes[item.key], found = answer
                yield item, found


def test_a_sweep_of_sixty_runs_outlives_a_worker_and_a_node(tmp_path, cluster, on_ray):
    grids = {
        "mnist-rotations": {
            "single": {"lr": [0.003, 0.01, 0.03, 0.1, 0.3]},
            "gem": {"lr": [0.003, 0.01, 0.03, 0.1, 0.3]},
        }
    }
    sweep = tiny(grids=grids, seeds=(0, 1, 2, 3, 4))
    doomed = next(iter(cluster.worker_nodes))
    executor = Noted(on_ray, tmp_path, doomed.node_id)
    removed_after, seen = [], []

    def on_event(event):
        seen.append((event.phase, event.done, event.total))
        if not removed_after and event.done >= 25 and (tmp_path / "stuck").exists():
            cluster.remove_node(doomed, allow_graceful=False)
            removed_after.append(len(executor.nodes))
            (tmp_path / "added").write_text(cluster.add_node(**NODE).node_id)

    done = run_sweep(tmp_path / "ray", sweep, executor, on_event=on_event)
    here = run_sweep(tmp_path / "here", sweep, InTurn())
    assert removed_after, "no run was stuck on the node"
    assert results(tmp_path / "ray") == results(tmp_path / "here")  # to the last bit
    assert (done.choices, done.failed) == (here.choices, [])
    assert len(executor.nodes) == 60
    assert assert_nothing_finished_twice(tmp_path / "ray") == set(executor.nodes)
    # Two runs were not finished, and only those were begun again.
    assert len(executor.lost) == len({key for key, _ in executor.lost}) == 2
    assert {str(died) for _, died in executor.lost} >= {"the worker's node was lost"}
    assert events(tmp_path / "ray") == {"started": 62, "finished": 60}
    used = list(executor.nodes.values())
    assert doomed.node_id in used[: removed_after[0]]
    assert doomed.node_id not in used[removed_after[0] :]
    assert (tmp_path / "added").read_text() in used
    assert len(set(used)) == 4
    # The one bar of each phase goes from its beginning to its end.
    assert [n for phase, n, _ in seen if phase == "selection"] == list(range(51))
    assert {total for phase, _, total in seen if phase == "selection"} == {50}


def test_a_run_that_kills_its_workers_fails_and_the_rest_goes_on(tmp_path, on_ray):
    class Executor(Elsewhere):
        def __call__(self, function, items):
            yield from on_ray(Deadly(function, 0.01), items)

    done = run_sweep(tmp_path, tiny(select="test-as-published"), Executor())
    ((failed, error),) = done.failed
    assert failed.settings == {"lr": 0.01}
    assert error.startswith("LostWorkerError: the worker was lost")
    assert done.choices[0].settings == {"lr": 0.1}


class Deadly:
    def __init__(self, function, lr):
        self.function, self.lr = function, lr

    def __call__(self, experiment):
        if experiment.settings["lr"] == self.lr:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(experiment)


def test_the_papers_runs_are_made_on_the_cluster_the_timed_ones_alone(tmp_path, on_ray):
    conditions = Conditions(data="sample", n_tasks=2, examples_per_task=40)
    settings = settings_of(["table-1", "table-3"], ["mnist-rotations"], ["single", "gem"])
    runs, failed = make_runs(tmp_path / "ray", settings, [0], conditions, on_ray)
    again, _ = make_runs(tmp_path / "here", settings, [0], conditions, InTurn())
    assert failed == []
    assert set(runs) == set(again) == set(settings)
    assert {alone for ((_, alone),) in runs.values()} == {True, False}
    for setting in settings:
        ((run, _),), ((other, _),) = runs[setting], again[setting]
        assert run.result["R"] == other.result["R"]


def test_two_sweeps_one_of_them_on_ray_share_a_folder(tmp_path, on_ray):
    """What another process has claimed is not made; it is waited for."""
    Store(tmp_path).open(tiny(seeds=tuple(range(6))))
    other = command(tmp_path, "--workers", 1)
    run_sweep(tmp_path, None, on_ray)
    said_by(other)
    runs = 2 * 6 + 6
    assert events(tmp_path) == {"started": runs, "finished": runs}
    assert len(assert_nothing_finished_twice(tmp_path)) == runs


def test_errors_of_a_run_come_back_with_their_traceback(tmp_path, on_ray):
    sweep = tiny(grids={"mnist-rotations": {"single": {"lr": [1e30, 0.1]}}})
    done = run_sweep(tmp_path, sweep, on_ray)
    ((failed, error),) = done.failed
    assert "FloatingPointError: the loss is not finite" in error
    assert any("_diverge" in line for line in Store(tmp_path).failure(failed.key)["traceback"])
    assert events(tmp_path) == {"started": 3, "finished": 2, "failed": 1}


def test_workers_get_runs_that_are_quicker_after_their_last():
    from gradmem.sweeps.on_ray import _Waiting

    class Worker:
        group = "b"

    waiting = _Waiting(["a1", "b1", "b2", "c1"], lambda item: item[0])
    assert waiting.any(2)
    assert waiting.take("b", [Worker]) == ("b1", "b")  # its own group first
    assert waiting.take(None, [Worker]) == ("a1", "a")  # a new worker: one that nobody has
    assert waiting.take("a", [Worker]) == ("c1", "c")
    assert waiting.take("c", [Worker]) == ("b2", "b")  # nothing else is left
    assert not waiting.any(2)


def test_room_is_counted_in_whole_gpus_and_parts():
    from gradmem.sweeps.on_ray import OnRay

    node = {"CPU": 16.0, "GPU": 2.0}
    assert OnRay(cpus=3)._fitting(node) == 5
    assert OnRay(gpus=1)._fitting(node) == 2
    assert OnRay(gpus=0.25)._fitting(node) == 8
    assert OnRay(gpus=0.4)._fitting(node) == 4  # two on each
    assert OnRay(gpus=0.1)._fitting(node) == 16  # one core each
    assert OnRay(gpus=2)._fitting(node) == 1
    assert OnRay(gpus=1)._fitting({"CPU": 4.0}) == 0
    with pytest.raises(ValueError, match=r"gpus must be at most 1 or a whole number, got 1\.5"):
        OnRay(gpus=1.5)


def test_an_address_where_no_ray_is_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(OSError, match=f"no Ray answers at {address}"):
            _require_answer(address)


def processes_of_ray(driver):
    """The processes of the Ray that a process started: its id is in their session's name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            text = file.read_text(errors="replace")
            if re.search(rf"session_[\d_-]+_{driver}\b", text):
                found.append(file.parent.name)
    return found


def test_the_command_starts_a_ray_of_its_own_and_stops_it(tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"single": {"lr": [0.01, 0.1]}}')
    options = ["--benchmark", "mnist-rotations", "--grid", grid, "--data", "sample", "--seeds", 1]
    size = ["--tasks", 2, "--examples", 40, "--out", tmp_path / "sweep"]
    process = command(*options, *size, "--on", "ray", "--workers", 1)
    said = said_by(process)
    if Path("/proc").exists():
        assert processes_of_ray(os.getpid())  # the cluster of these tests
        assert not processes_of_ray(process.pid)
    assert "selection: 2 of 2 runs" in said
    assert "final: 1 of 1 runs" in said
    assert events(tmp_path / "sweep") == {"started": 3, "finished": 3}
    run_sweep(tmp_path / "here", Store(tmp_path / "sweep").sweep(), InTurn())
    assert results(tmp_path / "sweep") == results(tmp_path / "here")
