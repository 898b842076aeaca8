"""A user's own benchmark and learner, in one small file, wherever gradmem's own can be used."""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradmem as gm
from gradmem.benchmarks.lookup import (
    BENCHMARKS,
    benchmark_reference,
    find_benchmark,
    find_learner,
    learner_reference,
    setting_parameters,
)
from gradmem.learners import LEARNERS
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import find_runs
from gradmem.sweeps import Store
from gradmem.sweeps.perform import Compute

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_benchmark.py"
TINY = {"n_tasks": 2, "examples_per_task": 30}
SIZE = ["--tasks", 2, "--examples", 30]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The example as a module that can be imported from the current folder."""
    (tmp_path / "own_benchmark.py").write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_benchmark", None)
    import own_benchmark

    yield own_benchmark
    sys.modules.pop("own_benchmark", None)


def gradmem(*arguments, code=0):
    process = subprocess.run(
        [sys.executable, "-m", "gradmem", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout + process.stderr


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 40


# From Python ---------------------------------------------------------------------------------


def test_it_is_compared_over_seeds(own, tmp_path):
    learners = ["single", own.Boxed]
    settings = {"Boxed": {"box": 0.3}}
    results = gm.compare(own.digits, learners, 2, tmp_path / "out", settings, **TINY)
    assert {name: len(found) for name, found in results.items()} == {"single": 2, "Boxed": 2}
    config = json.loads((tmp_path / "out" / "Boxed-seed1" / "config.json").read_text())
    assert config["benchmark"] == "own_benchmark:digits"
    assert config["learner"] == "own_benchmark:Boxed"
    assert config["settings"] == {"memories": 50, "box": 0.3}
    assert {run.benchmark for run in find_runs([tmp_path / "out"])} == {"digits"}
    assert {run.name for run in find_runs([tmp_path / "out"])} == {"single", "Boxed"}
    files = {p: p.stat().st_mtime_ns for p in tmp_path.glob("out/*/result.json")}
    again = gm.compare(own.digits, learners, 3, tmp_path / "out", settings, **TINY)
    assert all(p.stat().st_mtime_ns == written for p, written in files.items())
    assert [result.acc for result in again["Boxed"][:2]] == [r.acc for r in results["Boxed"]]
    assert gm.report(tmp_path / "out", tmp_path / "page").name == "report.html"
    table = (tmp_path / "page" / "table.md").read_text()
    assert "| Boxed |" in table
    nothing_written = gm.compare(own.digits, learners, 1, settings=settings, **TINY)
    assert nothing_written["Boxed"][0].acc == results["Boxed"][0].acc
    assert nothing_written["Boxed"][0].config == results["Boxed"][0].config


def test_it_is_swept_in_other_processes_and_the_choice_is_honest(own, tmp_path):
    done = gm.sweep(own.digits, [own.Boxed], seeds=2, out=tmp_path / "s", workers=2, **TINY)
    (choice,) = done.choices
    assert (choice.learner, choice.considered) == ("own_benchmark:Boxed", 2)
    assert [run.config["seed"] for run in done.runs] == [1000, 1001]
    assert not any("held_out" in run.config for run in done.runs)
    log = Store(tmp_path / "s").log()
    assert os.getpid() not in {entry["pid"] for entry in log}
    assert Counter(entry["event"] for entry in log) == {"started": 6, "finished": 6}
    again = gm.sweep(own.digits, [own.Boxed], seeds=2, out=tmp_path / "s", workers=1, **TINY)
    assert again.choices == done.choices
    assert len(Store(tmp_path / "s").log()) == len(log)


def test_a_run_with_other_code_is_another_run(own, tmp_path):
    def key():
        return Experiment("own_benchmark:digits", "own_benchmark:Boxed", **TINY).key

    before = key()
    source = tmp_path / "own_benchmark.py"
    source.write_text(source.read_text() + "\n# a remark\n")
    assert key() == before
    source.write_text(source.read_text().replace("clamp_(-self.box", "clamp_(-2 * self.box"))
    assert key() != before
    assert Experiment("mnist-rotations", "gem", data="sample").code is None


def test_two_learners_of_one_name_are_two():
    def make(rate):
        class Mine(gm.Single):
            def __init__(self, network, **settings):
                super().__init__(network, lr=rate, **settings)

        return Mine

    small, large = make(0.001), make(0.3)
    runs = [Experiment("mnist-rotations", one, data="sample", **TINY) for one in (small, large)]
    assert [run.new_learner().lr for run in runs] == [0.001, 0.3]
    assert runs[0].key != runs[1].key
    again = Experiment("mnist-rotations", small, data="sample", **TINY)
    assert again.key == runs[0].key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x, lambda x: x * 0),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.5)),
        (nn.CrossEntropyLoss(torch.ones(10)), nn.CrossEntropyLoss(torch.arange(10.0))),
        (gm.memory.policies.KCentre(), gm.memory.policies.KCentre("gradients")),
    ],
    ids=["function", "attribute", "tensor", "policy"],
)
def test_settings_that_have_one_name_are_told_apart(one, other):
    name = {"CrossEntropyLoss": "loss", "KCentre": "keep"}.get(type(one).__name__, "transform")
    keys = [
        Experiment("mnist-rotations", "gem", {name: value}, data="sample", **TINY).key
        for value in (one, copy.deepcopy(one), other)
    ]
    assert keys[0] == keys[1] != keys[2]


def _closing(value):
    return lambda x: (x, value)[0]


class Hidden:
    """Has all that counts in private attributes."""

    def __init__(self, value):
        self._value = value

    def __call__(self, x):
        return x * self._value

    def method(self, x):
        return x * self._value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_closing(torch.optim.SGD), _closing(torch.optim.Adam)),
        (_closing(np.zeros(3)), _closing(np.ones(3))),
        (_closing(partial(min, 1)), _closing(partial(min, 2))),
        (_closing(torch.relu), _closing(torch.tanh)),
        (_closing({"a", "b", "c"}), _closing({"a", "b", "d"})),
        (Hidden(1), Hidden(2)),
        (Hidden(1).method, Hidden(2).method),
    ],
    ids=["class", "array", "partial", "built-in", "set", "object", "method"],
)
def test_what_a_function_was_made_with_is_part_of_the_key(one, other):
    keys = [
        Experiment("mnist-rotations", "gem", {"transform": value}, data="sample", **TINY).key
        for value in (one, other)
    ]
    assert keys[0] != keys[1]
    learners = [lambda network, v=v: gm.Single(network, transform=v) for v in (one, other)]
    assert len({learner_reference(learner) for learner in learners}) == 2


def test_what_a_memory_holds_is_no_part_of_the_key():
    memory = gm.EpisodicMemory(5)
    keys = []
    for _ in range(2):
        settings = {"transform": Hidden(memory)}
        keys.append(Experiment("mnist-rotations", "gem", settings, data="sample", **TINY).key)
        memory.add(torch.zeros(2, 3), "a", torch.zeros(2))
    assert keys[0] == keys[1]


def test_parts_made_again_by_the_same_code_are_the_same():
    def make(rates):
        class Again(gm.Single):
            def __init__(self, network, **settings):
                super().__init__(network, lr=rates[0], **settings)

        return Again

    names = [learner_reference(make([rate])) for rate in (0.1, 0.1, 0.2)]
    assert names[0] == names[1] != names[2]


def test_objects_that_refer_to_each_other_are_written_once():
    knot = []
    for _ in range(40):
        knot = [knot, knot]
    knot[0].append(knot)
    one = Experiment("mnist-rotations", "gem", {"transform": _closing(knot)}, data="sample")
    assert one.code is not None


def test_a_key_is_the_same_in_every_process():
    """Whatever the order of a set is there."""
    script = """
from gradmem.runs.experiment import Experiment
def make(): return lambda x: x if "a" in {"a", "b", "c", "dd", "eee"} else 0
print(Experiment("mnist-rotations", "gem", {"transform": make()}, data="sample").key)
"""
    found = {
        subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True,
                       env=os.environ | {"PYTHONHASHSEED": seed}).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(found) == 1


def test_code_that_is_in_no_file_is_part_of_the_key(tmp_path):
    script = """
import gradmem as gm
from gradmem.runs.experiment import Experiment
class Mine(gm.Single):
    rate = RATE
print(Experiment("mnist-rotations", Mine, data="sample").key)
"""
    found = [
        subprocess.run([sys.executable, "-"], input=script.replace("RATE", rate), text=True,
                       capture_output=True, check=True, cwd=tmp_path).stdout
        for rate in ("1", "1", "2")
    ]  # fmt: skip
    assert found[0] == found[1] != found[2]


def test_seeds_of_a_users_network_have_each_their_own(tmp_path):
    """Also in what is no part of its state."""

    def network(seed):
        net = gm.mlp(seed=seed)
        noise = torch.randn(1, 784, generator=torch.Generator().manual_seed(seed))
        net.register_buffer("noise", noise, persistent=False)
        net.register_forward_pre_hook(lambda net, x: (x[0] + net.noise,))
        return net

    rotations = BENCHMARKS["mnist-rotations"]
    mine = replace(rotations, name="noisy", network=network)
    first, second = (
        Experiment(mine, "single", {"lr": 0.1}, data="sample", seed=seed, **TINY) for seed in (1, 2)
    )
    compute = Compute()
    compute(first)
    assert compute(second)["R"] == second.run().R.tolist()


def test_a_learner_that_is_used_again_has_the_settings_of_its_run():
    """A checkpoint of the run is then one that another process can go on from."""
    first, second = (
        Experiment("mnist-rotations", "single", {"lr": 0.1}, data="sample", seed=seed, **TINY)
        for seed in (1, 2)
    )
    compute = Compute()
    learner = compute._fresh(first)
    assert compute._fresh(second) is learner
    assert learner.settings == second.new_learner().settings


def test_what_other_processes_cannot_import_runs_in_this_one(tmp_path):
    class Local(gm.Single):
        pass

    benchmark = gm.Benchmark("here", lambda seed: numbers(seed), lambda seed: gm.mlp([2, 4, 2]))
    grid = {Local: {"lr": [0.1, 0.2]}}
    with pytest.warns(UserWarning, match="here, Local cannot be imported by other processes"):
        done = gm.sweep(benchmark, grid, seeds=1, out=tmp_path, workers=2)
    assert done.choices[0].considered == 2
    assert {entry["pid"] for entry in Store(tmp_path).log()} == {os.getpid()}
    assert {run.name for run in done.runs} == {"Local"}


def numbers(seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 2, generator=generator), torch.arange(40) % 2
    return gm.Continuum([gm.Task(t, (x, y), (x, y)) for t in "ab"], seed=seed)


class Duck:
    """No Learner, but it observes and predicts; what it counts is in no state_dict."""

    def __init__(self, network, lr=0.1):
        self.network, self.lr, self.n = network, lr, 0

    def observe(self, x, t, y):
        self.n += len(x)

    def predict(self, x, t):
        return self.network(x).argmax(1) * 0 + self.n


def distance(prediction, y):
    return -(prediction - y).abs().double()


def test_a_learner_is_whatever_observes_and_predicts_and_a_score_is_the_benchmarks(tmp_path):
    kind = gm.Benchmark("far", numbers, lambda seed: gm.mlp([2, 4, 2]), score=distance)
    done = gm.sweep(kind, {Duck: {"lr": [0.1]}}, 2, out=tmp_path, workers=1)
    assert done.failed == []
    assert done.choices[0].acc < -30  # 0 or 1 is far from what it counted: 36, then 72
    assert {run.score for run in done.runs} == {"distance"}
    assert len({tuple(run.result["learned"]) for run in done.runs}) == 1
    assert done.runs[0].result["acc"] == done.runs[1].result["acc"]  # each begins at zero


REGRESSION = """
import torch
import gradmem as gm

def line(seed, examples_per_task=30):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(examples_per_task, 1, generator=generator)
    tasks = [gm.Task(t, (x, slope * x), (x, slope * x)) for t, slope in enumerate((1.0, -1.0))]
    return gm.Continuum(tasks, seed=seed)

def closeness(prediction, y):
    return -(prediction - y).abs()[:, 0]

lines = gm.Benchmark(
    "lines", line, lambda seed: gm.mlp([1, 8, 1], seed=seed), score=closeness,
    settings={"gem": {"loss": lambda output, y: ((output - y) ** 2).mean(1), "lr": 0.1}},
)
"""


def test_a_regression_with_a_loss_of_its_own_is_swept_by_workers(tmp_path, monkeypatch):
    (tmp_path / "own_lines.py").write_text(REGRESSION)
    monkeypatch.syspath_prepend(tmp_path)
    done = gm.sweep("own_lines:lines", {"gem": {"lr": [0.01, 0.1]}}, 1, out=tmp_path, workers=2)
    assert done.failed == []
    assert done.runs[0].config["settings"]["loss"] == "<lambda>"
    assert done.runs[0].score == "closeness"
    assert -1 < done.runs[0].result["acc"] < 0
    with pytest.raises(ValueError, match="gem's loss must have values that JSON can hold"):
        gm.sweep("own_lines:lines", {"gem": {"loss": [len]}}, out=tmp_path / "no")


# Records -------------------------------------------------------------------------------------


def test_only_what_the_continuum_takes_can_be_asked_for(own):
    with pytest.raises(ValueError, match=r"digits takes no epochs .* it takes n_tasks, examples"):
        Experiment(own.digits, "gem", epochs=2)
    with pytest.raises(ValueError, match=r"Boxed has no setting samples .* it has box, .*lr"):
        Experiment(own.digits, own.Boxed, {"samples": 3})
    needy = gm.Benchmark("needy", lambda seed, data: None, lambda seed: gm.mlp())
    with pytest.raises(ValueError, match="needy needs data: it has no default"):
        Experiment(needy, "gem")


@pytest.mark.parametrize("name", ["a/b", "", "<b>", "a b", "../up", "a\n"])
def test_a_benchmarks_name_is_safe_in_files_and_pages(name):
    with pytest.raises(ValueError, match="name must be letters, digits"):
        gm.Benchmark(name, lambda seed: None, lambda seed: gm.mlp())


def test_functions_without_a_seed_are_refused():
    with pytest.raises(TypeError, match="network must be a function of seed"):
        gm.Benchmark("a", lambda seed: None, gm.mlp())


def test_a_network_is_told_what_it_asks_for():
    told = {}

    def network(seed, learner, n_tasks, device):
        told.update(seed=seed, learner=learner, n_tasks=n_tasks, device=device)
        return gm.mlp([2, 4, 2])

    benchmark = gm.Benchmark("told", numbers, network)
    Experiment(benchmark, gm.EWC, seed=3).new_learner()
    assert told == {"seed": 3, "learner": gm.EWC, "n_tasks": 2, "device": "cpu"}


def test_parts_are_found_by_name_again(own, tmp_path):
    assert benchmark_reference(own.digits) == "own_benchmark:digits"
    assert find_benchmark("own_benchmark:digits") is own.digits
    assert find_learner(learner_reference(own.Boxed)) is own.Boxed
    by_file = benchmark_reference("own_benchmark.py:digits")
    assert by_file == f"{tmp_path / 'own_benchmark.py'}:digits"
    assert find_benchmark(by_file).name == "digits"
    assert [learner_reference(kind) for kind in LEARNERS.values()] == list(LEARNERS)
    for name, benchmark in BENCHMARKS.items():
        assert benchmark_reference(benchmark) == benchmark.name == name


def test_a_benchmark_is_found_wherever_it_is_kept(own):
    own.fewer = replace(own.digits, name="fewer")  # made by another module's function
    assert benchmark_reference(own.fewer) == "own_benchmark:fewer"
    assert find_benchmark("own_benchmark:fewer") is own.fewer


def test_the_benchmarks_settings_are_the_learners():
    for name, benchmark in BENCHMARKS.items():
        for learner, settings in benchmark.settings.items():
            assert settings["lr"] > 0
            assert Experiment(name, learner, data="sample").settings == settings
        assert set(benchmark.grid) <= set(benchmark.settings)
    of_papers = {"single", "independent", "multimodal", "ewc", "icarl", "gem", "agem", "mega"}
    assert {name for b in BENCHMARKS.values() for name in b.settings} == of_papers


def test_a_learner_that_passes_settings_on_has_its_parents_too(own):
    names = list(setting_parameters(own.Boxed))
    assert names[0] == "box"
    assert set(names[1:]) == set(setting_parameters(gm.GEM))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digits", "benchmark must be one of mnist-rotations, .*, module:name; got 'digits'"),
        ("nowhere:digits", "there is no module nowhere in"),
        ("nowhere.py:digits", "there is no file .*nowhere.py"),
        ("own_benchmark:letters", "own_benchmark has no letters; it has digits"),
    ],
)
def test_what_is_not_there_is_named(own, text, message):
    with pytest.raises(ValueError, match=message):
        Experiment(text, "gem")


def test_an_error_inside_a_module_is_its_own(own, tmp_path):
    (tmp_path / "broken_module.py").write_text("import no_such_thing\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        Experiment("broken_module:digits", "gem")


# From the command line -----------------------------------------------------------------------


def test_the_commands_take_them(own, tmp_path):
    parts = ["--benchmark", "own_benchmark:digits", "--learner", "own_benchmark:Boxed"]
    said = gradmem("run", *parts, *SIZE, "--box", 2, "--set", "lr=0.05", "--out", "run")
    assert "Boxed" in said
    config = json.loads(Path("run", "config.json").read_text())
    assert config["settings"] == {"memories": 50, "box": 2.0, "lr": 0.05}
    here = gm.compare(own.digits, [own.Boxed], settings={"Boxed": {"box": 2, "lr": 0.05}}, **TINY)
    assert json.loads(Path("run", "result.json").read_text())["acc"] == here["Boxed"][0].acc

    compared = ["compare", "--benchmark", "own_benchmark:digits", *SIZE, "--out", "compared"]
    said = gradmem(*compared, "--set", "gem.margin=0", "--lr", 0.05)
    assert Path("compared", "report.html").exists()
    assert sorted(p.parent.name for p in Path("compared").glob("*/result.json")) == [
        "Boxed-seed0",
        "gem-seed0",
        "single-seed0",
    ]
    configs = {p: json.loads(p.read_text()) for p in Path("compared").glob("*/config.json")}
    settings = {config["learner"]: config["settings"] for config in configs.values()}
    assert settings["gem"] == {"memories": 50, "margin": 0.0, "lr": 0.05}
    assert {found["lr"] for found in settings.values()} == {0.05}


def test_the_sweep_command_takes_them_and_makes_a_page(own):
    sweep = ["sweep", "--benchmark", "own_benchmark:digits", *SIZE, "--seeds", 1, "--workers", 1]
    said = gradmem(*sweep, "--set", "memories=20", "--out", "swept")
    assert "final: 2 of 2 runs" in said
    assert Path("swept", "report.html").exists()
    chosen = json.loads(Path("swept", "chosen.json").read_text())["choices"]
    assert {choice["learner"] for choice in chosen} == {"single", "own_benchmark:Boxed"}
    tried = json.loads(Path("swept", "sweep.json").read_text())["grids"]["own_benchmark:digits"]
    assert tried["own_benchmark:Boxed"] == {"lr": [0.1], "box": [0.2, 0.3], "memories": [20]}
    assert "final: 2 of 2 runs" in gradmem(*sweep, "--set", "memories=20", "--out", "swept")
    said = gradmem("sweep", "swept", code=2)  # a file does not make code run
    assert "sweep.json cannot be read: it names 'own_benchmark:digits', which is not" in said


def test_settings_are_listed_and_wrong_ones_are_named(own):
    said = gradmem("learners", "own_benchmark:Boxed", "gem")
    assert "--box 0.2" in said
    assert "--memories 256" in said
    assert "--tasks 3" in gradmem("benchmarks", "own_benchmark:digits")
    run = ["run", "--benchmark", "own_benchmark:digits", "--learner", "own_benchmark:Boxed"]
    assert "Boxed has no setting sixe (got 2)" in gradmem(*run, "--sixe", 2, code=2)
    assert "--set takes NAME=VALUE" in gradmem(*run, "--set", "lr", code=2)
    said = gradmem("--debug", *run, "--lr", -1, code=1)
    assert "Traceback" in said
    assert "lr must be above 0" in said
