"""Logging for TensorBoard: what is written, and what is said where it is not installed."""

import sys

import pytest
import torch

import gradmem as gm
from gradmem.runs import tensorboard
from gradmem.runs.tensorboard import TensorBoardLog


class Writer:
    """Stands in for SummaryWriter: keeps what it is given."""

    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, [], False

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


class Losing(gm.Single):
    """Its losses are 1, 2, 3, …"""

    def observe(self, x, t, y):
        super().observe(x, t, y)
        return torch.tensor(float(self.steps))


def run_with(log, every=None):
    continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=40, data="sample")
    return gm.run(Losing(gm.mlp(), lr=0.1), continuum, every=every, callbacks=[log])


def test_accuracies_and_speed_are_logged_over_examples(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard, "_summary_writer", lambda: Writer)
    log = TensorBoardLog(tmp_path)
    result = run_with(log, every=20)
    writer = log._writer
    assert (writer.folder, writer.closed) == (str(tmp_path), True)
    logged = {}
    for name, value, step in writer.scalars:
        logged.setdefault(name, {})[step] = value
    assert logged["ACC so far"] == {40: result.R[0, 0], 80: result.acc}
    for j, label in enumerate(result.labels):
        curve = dict(zip([0, 20, 40, 60, 80], result.curves[:, j], strict=True))
        assert logged[f"accuracy/task {j + 1} {label}"] == curve
    assert set(logged["examples per second"]) == {10, 20, 30, 40, 50, 60, 70, 80}
    assert logged["loss"] == {10 * step: step for step in range(1, 9)}
    assert len(writer.scalars) == 2 + 2 * 5 + 2 * 8  # nothing twice


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=r'pip install "gradmem\[tensorboard\]"') as caught:
        TensorBoardLog(tmp_path / "log")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "log").exists()


def test_the_command_asks_for_the_extra_before_it_makes_a_folder(monkeypatch, tmp_path, capsys):
    from gradmem.cli import main

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    command = ["gradmem", "run", "--benchmark", "mnist-rotations", "--learner", "single"]
    command += ["--data", "sample", "--tasks", "2", "--examples", "20"]
    command += ["--out", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "log")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "gradmem[tensorboard]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the installed tensorboard's own
def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLog(tmp_path) as log:
        result = run_with(log)
    events = EventAccumulator(str(tmp_path)).Reload()
    final = events.Scalars("ACC so far")[-1]
    assert (final.step, final.value) == (80, pytest.approx(result.acc))
    assert len([name for name in events.Tags()["scalars"] if name.startswith("accuracy/")]) == 2
