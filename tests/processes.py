"""What tests let several real processes do together: every check is called in all of them."""

import os
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradmem as gm
from gradmem.distributed import LostProcessError
from tests.networks import CLASSES, Residual, Transformer

#: Processes that are started; groups of fewer are the first ones of them.
MOST = 4
CHECKS = {}
GROUPS = {}
#: The check that a process does not survive.
LAST = "a_process_that_is_lost_ends_the_others_with_what_to_do"


def check(function):
    CHECKS[function.__name__] = function
    return function


def work(rank, folder, names=None):
    """One of `MOST` processes: all checks or some, one after the other, until one fails."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=MOST,
        timeout=timedelta(seconds=120),
    )
    for n in range(1, MOST + 1):
        GROUPS[n] = dist.new_group(range(n))
    for name in names or CHECKS:
        try:
            CHECKS[name](rank, Path(folder))
            if name != LAST:
                dist.barrier()
        except BaseException:
            Path(folder, f"{name}-{rank}.failed").write_text(traceback.format_exc())
            return
        Path(folder, f"{name}-{rank}.passed").touch()
    os._exit(0)  # there is nobody to say goodbye to


def convnet():
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, CLASSES))


MODELS = {"mlp": lambda: gm.mlp([6, 9, 8, CLASSES]), "convnet": convnet, "transformer": Transformer}
SHAPES = {"mlp": (6,), "convnet": (3, 6, 6), "transformer": None}


def examples(kind, n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    if SHAPES[kind] is None:
        return torch.randint(1, 11, (n, 4), generator=generator), y
    return torch.randn((n, *SHAPES[kind]), generator=generator), y


def made(kind, double=False):
    torch.manual_seed(3)
    model = MODELS[kind]()
    return model.double() if double else model


def sharded(model, n):
    mesh = DeviceMesh.from_group(GROUPS[n], "cpu")
    for part in model.children():
        if any(True for _ in part.parameters(recurse=False)):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


#: Task → how many examples of it each process adds: unequal, and "only" in one process.
PARTS = {"a": (5, 2, 7, 1), "only": (0, 4, 0, 0), "b": (3, 3, 3, 3), "c": (1, 6, 2, 2)}


def fill(memory, kind, rank, n):
    """Add a process's part; with one process, "only" is its as well."""
    for i, (t, counts) in enumerate(PARTS.items()):
        count = 4 if t == "only" and n == 1 else counts[rank]
        if count:
            memory.add(*_placed(examples(kind, count, 100 * i + rank), t))


def _placed(both, t):
    x, y = both
    return x, t, y


def everything(memory, n):
    """All processes' memories as those of one."""
    found = [None] * n
    own = {t: memory.memory[t] for t in memory.memory}
    dist.all_gather_object(found, own, group=GROUPS[n])
    joined = {}
    for t in dict.fromkeys(t for one in found for t in one):
        parts = [one[t] for one in found if t in one]
        joined[t] = [torch.cat(part) for part in zip(*parts, strict=True)]
    alone = gm.EpisodicMemory(memories=1000)
    for t, (x, y) in joined.items():
        alone.add(x, t, y)
    return alone


def whole(w, rank=0):
    """A parameter or gradient with all its shards."""
    return w.full_tensor() if hasattr(w, "full_tensor") else w.detach().clone()


def same_steps(model, module, memory, kind, rank, n, constrain, steps=3):
    """Steps of n processes are those of one process with all their memories, to 1e-6.

    From the second step on, tasks are copied to one process under DDP.
    """
    alone_model = made(kind)
    alone = gm.GradientMemory(
        alone_model, memory=everything(memory, n), margin=0.3, constrain=constrain
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    one = torch.optim.SGD(alone_model.parameters(), lr=0.05, momentum=0.9)
    for i in range(steps):
        x, y = examples(kind, 6, 999 + 10 * i + rank)
        optimizer.zero_grad()
        (-F.cross_entropy(model(x), y)).backward()  # goes against what is remembered
        for w, other in zip(module.parameters(), alone_model.parameters(), strict=True):
            other.grad = whole(w.grad)
        memory.step(optimizer, "new")
        alone.step(one, "new")
        for w, other in zip(module.parameters(), alone_model.parameters(), strict=True):
            torch.testing.assert_close(whole(w.grad), other.grad, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(whole(w), other.detach(), rtol=1e-6, atol=1e-6)
        assert set(memory.last.tasks) == set(PARTS)
        assert set(memory.last.violated) == set(alone.last.violated)
        assert memory.last.violated, "nothing was projected"
        assert agreed(memory.project.last.v, n)
        with torch.no_grad():  # what rounding did to the one does not grow
            for w, other in zip(module.parameters(), alone_model.parameters(), strict=True):
                other.copy_(whole(w))


def agreed(numbers, n):
    """Whether all processes have the same bits."""
    found = [None] * n
    dist.all_gather_object(found, numbers.tolist(), group=GROUPS[n])
    return all(one == found[0] for one in found)


def group_sizes(rank):
    """The numbers of processes, of those groups that this process is in."""
    return [n for n in range(1, MOST + 1) if rank < n]


def ddp(module, n):
    return DistributedDataParallel(module, process_group=GROUPS[n])


def vector(module):
    return torch.cat([whole(w).flatten() for w in module.parameters()])


@check
def ddp_takes_the_steps_of_one_process(rank, folder):
    for n in group_sizes(rank):
        for kind in MODELS:
            for constrain in ("gradient", "update"):
                module = made(kind)
                model = ddp(module, n)
                memory = gm.GradientMemory(model, memories=100, margin=0.3, constrain=constrain)
                fill(memory, kind, rank, n)
                same_steps(model, module, memory, kind, rank, n, constrain)
                assert agreed(vector(module), n)


@check
def fsdp_takes_the_steps_of_one_process(rank, folder):
    for n in group_sizes(rank):
        for kind in MODELS:
            for constrain in ("gradient", "update"):
                model = sharded(made(kind), n)
                memory = gm.GradientMemory(model, memories=100, margin=0.3, constrain=constrain)
                fill(memory, kind, rank, n)
                same_steps(model, model, memory, kind, rank, n, constrain, steps=2)


def stream(rank, n, steps=12):
    """Parts of batches of unequal size, one task after the other; all parts for rank None."""
    for i in range(steps):
        parts = [examples("mlp", 2 + (r + i) % 3, 50 * i + r) for r in range(n)]
        t = ("a", "b", "c")[i * 3 // steps]
        joined = [torch.cat(both) for both in zip(*parts, strict=True)]
        x, y = joined if rank is None else parts[rank]
        yield x, t, y


@check
def learners_learn_what_one_process_learns(rank, folder):
    for n in (2, 4):
        if rank >= n:
            continue
        for wrap in (ddp, sharded):
            for kind, settings in ((gm.GEM, {"memories": 100}), (gm.Single, {})):
                learner = kind(wrap(made("mlp"), n), lr=0.1, **settings)
                alone = kind(made("mlp"), lr=0.1, **settings)
                for part, every in zip(stream(rank, n), stream(None, n), strict=True):
                    loss, expected = learner.observe(*part), alone.observe(*every)
                    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
                ours, one = vector(learner.network), vector(alone.network)
                torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-5)
                x, _ = examples("mlp", 20, 7)
                assert learner.predict(x).tolist() == alone.predict(x).tolist()
                assert kind is gm.Single or learner.statistics()["violations"] > 0


@check
def processes_on_different_tasks_are_constraints_to_each_other(rank, folder):
    module = made("mlp")
    model = ddp(module, MOST)
    memory = gm.GradientMemory(model, memories=100, margin=0.0)
    fill(memory, "mlp", rank, MOST)
    x, y = examples("mlp", 6, 5 + rank)
    (-F.cross_entropy(model(x), y)).backward()
    memory.project_("a" if rank else "b")
    assert set(memory.last.tasks) == {"a", "only", "b", "c"}
    memory.project_("a")
    assert set(memory.last.tasks) == {"only", "b", "c"}


@check
def limits_are_those_of_all_processes_together(rank, folder):
    for n in group_sizes(rank):
        for limit in ({"memories": 10}, {"budget": 31}):
            memory = gm.GradientMemory(ddp(made("mlp"), n), **limit)
            for t in "abc":
                for i in range(9):
                    memory.add(*_placed(examples("mlp", 3, i), t))
            counts = torch.tensor([memory.memory.count(t) for t in "abc"])
            dist.all_reduce(counts, group=GROUPS[n])
            if "memories" in limit:
                assert counts.tolist() == [10, 10, 10]
            else:
                assert 31 - 3 * n < int(counts.sum()) <= 31


def loop(memory, model, module, rank, steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in steps:
        x, y = examples("mlp", 4, 1000 * i + rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        memory.step(optimizer, i // 3)
        memory.add(x, i // 3, y)


@check
def a_saved_state_goes_on_to_the_bit_and_in_other_numbers_of_processes(rank, folder):
    file = folder / "state"
    for wrap in (ddp, sharded):
        for n, others in ((2, 4), (4, 2), (3, 1)):
            if rank < n:
                model = wrap(made("mlp"), n)
                module = model.module if wrap is ddp else model
                memory = gm.GradientMemory(model, memories=9)
                loop(memory, model, module, rank, range(7))
                memory.save(file, module=module, step=7)
                remembered = everything(memory, n)
                loop(memory, model, module, rank, range(7, 12))
                other = wrap(gm.mlp([6, 9, 8, CLASSES]), n)
                copied = other.module if wrap is ddp else other
                again = gm.GradientMemory(other, memories=9)
                assert again.load(file, module=copied) == {"step": 7}
                loop(again, other, copied, rank, range(7, 12))
                if wrap is ddp and n > 2:  # DDP adds up in another order in its first step
                    torch.testing.assert_close(vector(copied), vector(module))
                else:
                    assert torch.equal(vector(copied), vector(module))
                if rank == 0:
                    torch.save(remembered.state_dict(), folder / "remembered")
            dist.barrier()
            if rank < others:
                model = wrap(made("mlp"), others)
                module = model.module if wrap is ddp else model
                memory = gm.GradientMemory(model, memories=9)
                memory.load(file, module=module)
                before = torch.load(folder / "remembered")["tasks"]
                now = everything(memory, others)
                assert list(now) == list(before)
                for t in now:
                    assert sorted(now[t][1].tolist()) == sorted(before[t][1].tolist())
                    assert abs(memory.memory.count(t) - len(now[t][1]) / others) < 1
                loop(memory, model, module, rank, range(7, 12))
            dist.barrier()
    for wrap in (ddp, sharded):
        learner, again = (gm.GEM(wrap(made("mlp"), MOST), lr=0.1, memories=20) for _ in range(2))
        first, second = list(stream(rank, MOST))[:7], list(stream(rank, MOST))[7:]
        for x, t, y in first:
            learner.observe(x, t, y)
        learner.save(folder / "learner")
        again.load(folder / "learner")
        for x, t, y in second:
            learner.observe(x, t, y)
            again.observe(x, t, y)
        assert torch.equal(vector(again.network), vector(learner.network))
        learner.save(folder / "learner")
    alone = gm.GEM(made("mlp"), lr=0.1, memories=20)  # one process goes on
    alone.load(folder / "learner")
    assert torch.equal(vector(alone.network), vector(learner.network))
    assert alone.memory.count("a") == 20
    alone.observe(*_placed(examples("mlp", 5, 1), "d"))


@check
def what_is_sent_is_counted(rank, folder):
    k, p = len(PARTS), sum(w.numel() for w in made("mlp").parameters())
    for n in (2, 4):
        if rank >= n:
            continue
        model = ddp(made("mlp"), n)
        memory = gm.GradientMemory(model, memories=100)
        fill(memory, "mlp", rank, n)
        traffic, sent = memory.processes.traffic, []
        x, y = examples("mlp", 6, 5 + rank)
        for _ in range(3):
            model.zero_grad()
            (-F.cross_entropy(model(x), y)).backward()
            traffic.clear()
            memory.project_("new")
            sent.append(dict(traffic.bytes))
        computed = sum(counts[rank] > 0 for counts in PARTS.values())
        width = -(-p // n)
        own = min(width, p - rank * width)
        assert sent[0]["rows of G"] == 4 * computed * (p - own)  # every process sends its part
        assert sent[0]["g̃"] == 4 * width * (n - 1)
        products = 8 * (k * (k + 1) // 2 + k)
        assert sent[0]["inner products"] == 2 * products * (n - 1) // n
        assert "copies of examples" not in sent[0] | sent[2]
        rows = torch.tensor([one["rows of G"] for one in sent])
        copied = torch.tensor(sent[1].get("copies of examples", 0))
        dist.all_reduce(rows, group=GROUPS[n])
        dist.all_reduce(copied, group=GROUPS[n])
        expected = 4 * (k * p - _kept(memory.processes.agreement.order, p, n))
        assert int(copied) > 0
        # With copies, each row is sent by one process, to all others.
        assert int(rows[1]) == int(rows[2]) == expected < int(rows[0])
        model = sharded(made("mlp"), n)
        memory = gm.GradientMemory(model, memories=100)
        fill(memory, "mlp", rank, n)
        memory.processes.traffic.clear()
        (-F.cross_entropy(model(x), y)).backward()
        memory.project_("new")
        assert set(memory.processes.traffic.bytes) == {"counts", "inner products"}


def _kept(order, p, n):
    """Numbers of rows that stay in the process that computes them."""
    width = -(-p // n)
    widths = [max(0, min(width, p - r * width)) for r in range(n)]
    owners = [1 if t == "only" else order.index(t) % n for t in PARTS]
    return sum(widths[owner] for owner in owners)


class AcrossProcesses(nn.SyncBatchNorm):
    """SyncBatchNorm for a CPU, where torch has none: statistics of all processes' examples."""

    def forward(self, x):
        import torch.distributed.nn.functional as collectives

        n = torch.tensor(float(len(x)))
        dist.all_reduce(n, group=GROUPS[2])
        mean = collectives.all_reduce(x.sum(0), group=GROUPS[2]) / n
        var = collectives.all_reduce((x - mean).square().sum(0), group=GROUPS[2]) / n
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def normed():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES))


def gradient_of(parts):
    """The gradient of the mean loss, with batch norm over each part by itself."""
    network = normed()
    losses = [F.cross_entropy(network(x), y, reduction="sum") for x, y in parts]
    loss = sum(losses) / sum(len(y) for _, y in parts)
    grads = torch.autograd.grad(loss, list(network.parameters()))
    return torch.cat([one.flatten() for one in grads])


@check
def batch_norm_is_of_a_process_s_examples_and_sync_batch_norm_of_all(rank, folder):
    n = 2
    if rank >= n:
        return
    for synchronised in (False, True):
        module = normed()
        model = ddp(module, n)
        if synchronised:  # DDP itself takes SyncBatchNorm on GPUs only
            module[1].__class__ = AcrossProcesses
        memory = gm.GradientMemory(model, memories=100)
        for i, t in enumerate("ab"):
            memory.add(*_placed(examples("mlp", (5, 3)[rank], 10 * i + rank), t))
        if rank == 1:
            memory.add(*_placed(examples("mlp", 6, 99), "only"))
        alone = everything(memory, n)
        together = torch.stack([gradient_of([alone[t]]) for t in alone])
        apart = together.clone()
        for i, t in enumerate("ab"):
            x, y = alone[t]
            apart[i] = gradient_of([(x[:5], y[:5]), (x[5:], y[5:])])
        assert not torch.allclose(apart, together, rtol=1e-2)
        close = {"rtol": 1e-5, "atol": 1e-6}
        first, second = memory.gradients(), memory.gradients()
        assert list(memory.processes.agreement.order) == list(alone)
        torch.testing.assert_close(first, together if synchronised else apart, **close)
        # Tasks "a" and "b", not added to since, are each whole in one process now.
        torch.testing.assert_close(second, together, **close)


@check
def predictions_agree_although_statistics_moved_apart(rank, folder):
    learner = gm.GEM(ddp(Residual(), MOST), lr=0.05, memories=20)
    for i in range(4):
        x, y = examples("convnet", 5, 10 * i + rank)
        learner.observe(x, i // 2, y)
    x, _ = examples("convnet", 30, 1)
    assert agreed(learner.forward(x).flatten(), MOST)


@check
def what_is_not_finite_in_one_process_stops_or_is_skipped_by_all(rank, folder):
    x, y = examples("mlp", 4, rank)
    bad = torch.full_like(x, float("nan")) if rank == 2 else x
    for wrap in (ddp, sharded):
        for not_finite in ("stop", "skip"):
            model = wrap(made("mlp"), MOST)
            memory = gm.GradientMemory(model, memories=20, not_finite=not_finite)
            memory.memory.add(bad, "a", y)
            F.cross_entropy(model(x), y).backward()
            try:
                memory.project_("b")
            except FloatingPointError:
                assert not_finite == "stop"
            else:
                assert not_finite == "skip"
                assert memory.skipped == 1
        learner = gm.GEM(wrap(made("mlp"), MOST), lr=0.1, memories=20, not_finite="skip")
        learner.observe(x, "a", y)
        before = vector(learner.network)
        assert learner.observe(bad, "b", y, check=False) is None
        assert learner.skipped == 1
        assert torch.equal(vector(learner.network), before)
        learner.observe(x, "b", y)
        assert not torch.equal(vector(learner.network), before)


@check
def what_one_process_alone_can_do_is_refused(rank, folder):
    wrapped = ddp(made("mlp"), MOST)
    x, y = examples("mlp", 4, rank)
    small = gm.GradientMemory(wrapped, budget=4)
    small.add(x, "a", y)
    refused = {
        "AGEM": lambda: gm.AGEM(wrapped),
        "grow": lambda: gm.GEM(wrapped, grow=True),
        "average": lambda: gm.GEM(wrapped, average=0.9),
        "rehearse": lambda: gm.GEM(wrapped, rehearse=5),
        "augmented": lambda: gm.GEM(wrapped, augmented="memories"),
        "sample": lambda: gm.GEM(wrapped, sample=5),
        "boundaries": lambda: gm.GEM(wrapped, boundaries=gm.Every(10)),
        "mixed": lambda: gm.GEM(wrapped).observe(x, [0, 0, 1, 1], y),
        "gram": lambda: gm.GradientMemory(wrapped, gradients="gram"),
        "constraints": lambda: gm.GradientMemory(wrapped, constraints=10),
        "groups": lambda: gm.GradientMemory(wrapped, memory=gm.EpisodicMemory(groups=2)),
        "memories": lambda: gm.GradientMemory(wrapped, memories=3),
        "budget": lambda: small.add(x, "b", y),
    }
    for word, call in refused.items():
        with pytest.raises(ValueError, match=word):
            call()


@check
def a_process_that_is_lost_ends_the_others_with_what_to_do(rank, folder):
    model = ddp(made("mlp"), MOST)
    memory = gm.GradientMemory(model, memories=20)
    x, y = examples("mlp", 4, rank)
    F.cross_entropy(model(x), y).backward()
    dist.barrier()
    if rank == MOST - 1:
        (folder / f"{LAST}-{rank}.passed").touch()
        os._exit(0)
    with pytest.raises(LostProcessError, match="last checkpoint"):
        memory.project_("a")
