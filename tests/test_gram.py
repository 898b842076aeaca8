"""Exact GEM without G: inner products and combinations of gradients that are never stored."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradmem as gm
from gradmem.gradients import Criterion, GramGradients, MemoryGradients, Objective, choice, gram
from gradmem.gradients.loop import loop_gradients
from gradmem.gradients.segments import Segments, cuts
from gradmem.memory import Stack
from tests.networks import NETWORKS, build, memories

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")

TOKENS = 13


@pytest.fixture
def side_by_side(monkeypatch):
    """Few tasks go side by side, too, as many do."""
    monkeypatch.setattr(MemoryGradients, "_goes_by_task", lambda self, k, rows: False)


@pytest.fixture(params=["task by task", "side by side"])
def either_way(request):
    if request.param == "side by side":
        request.getfixturevalue("side_by_side")


class Decoder(nn.Module):
    """A small language model: tied embeddings, dropout, a norm, blocks that may be checkpointed."""

    def __init__(self, blocks=3, width=16, dropout=0.0, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.1 * torch.randn(1, 9, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, TOKENS, bias=False)
        self.out.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, x):
        z = self.embed(x) + self.places[:, : x.shape[1]]
        for block in self.blocks:
            z = checkpoint(block, z, use_reentrant=False) if self.checkpointed else block(z)
        return self.out(self.norm(z)).mT


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.gru = nn.GRU(8, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, TOKENS)

    def forward(self, x):
        return self.out(self.gru(self.embed(x))[0]).mT


class Taking(nn.Linear):
    """A layer that takes its input from another one, whatever it is given."""

    def __init__(self, other):
        super().__init__(9, 9)
        self.other = [other]

    def forward(self, x):
        return super().forward(self.other[0].gave + 0 * x)


class Giving(nn.Linear):
    def forward(self, x):
        self.gave = super().forward(x)
        return self.gave


class Hidden(nn.Module):
    """Its layers hand a tensor on by an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Giving(6, 9), nn.Linear(9, 5)
        self.second = Taking(self.first)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.first(x))))


def sequences(k=4, m=6, length=9, padded=True):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(TOKENS, (k, m, length + 1), generator=generator)
    x, y = ids[..., :-1].clone(), ids[..., 1:].clone()
    if padded:
        for i in range(k):
            y[i, : i + 1, length - 2 - i :] = -100
    return Stack(x, y, (m,) * k)


def check(network, stack, tolerance=1e-5, limit=None):
    """GGᵀ, Gz and z + Gᵀv are those of the plain loop; the network stays as it was."""
    objective = Objective(network, Criterion(None))
    weights = [w for w in network.parameters() if w.requires_grad]
    rows = torch.empty(len(stack), sum(w.numel() for w in weights))
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    state = torch.get_rng_state()
    loop_gradients(objective, stack, rows)
    after = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.load_state_dict(buffers, strict=False)
    torch.set_rng_state(state)
    z = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(4))
    v = torch.rand(len(stack), generator=torch.Generator().manual_seed(5)).double()

    found = GramGradients(objective, Segments(network, limit), [stack])
    GGt, Gz = found.products(z)
    combined = found.combine(v)

    exact = rows.double()
    for one, other in (
        (GGt, exact @ exact.T),
        (Gz, exact @ z.double()),
        (combined.double(), z.double() + exact.T @ v),
    ):
        assert (one - other).norm() <= tolerance * other.norm()
    again = found.products(combined)[1]  # known from what was combined
    assert (again - exact @ combined.double()).norm() <= 1e-5 * again.norm()
    for name, buffer in network.named_buffers():
        torch.testing.assert_close(buffer, after[name])
    assert all("forward" not in vars(part) for part in network.modules())
    assert [w for w in network.parameters() if w.requires_grad] == weights or all(
        w is other for w, other in zip(network.parameters(), weights, strict=False)
    )
    return found


@pytest.mark.parametrize("limit", [None, 1, 2000])
@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_inner_products_are_those_of_the_loop(name, copies, limit, monkeypatch):
    monkeypatch.setattr(gram, "COPIES", copies)
    counts = (7, 7, 7, 7) if name in ("resnet", "no rule and batch norm") else (7, 3, 7, 5)
    check(build(name), memories(name, counts), limit=limit)


@pytest.mark.parametrize("limit", [None, 1, 20_000])
@pytest.mark.parametrize(
    "make",
    [
        Decoder,
        lambda: Decoder(dropout=0.2),
        lambda: Decoder(checkpointed=True),
        lambda: Decoder(dropout=0.2, checkpointed=True),
        Recurrent,
    ],
    ids=["decoder", "dropout", "checkpointed", "dropout, checkpointed", "GRU"],
)
def test_language_models_with_padding(make, limit, monkeypatch):
    monkeypatch.setattr(gram, "COPIES", 1)
    torch.manual_seed(0)
    check(make(), sequences(), limit=limit)


class NextToken(nn.Module):
    """A language model of transformers as a network of one input."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(**x, use_cache=False).logits.mT


def language_model(name):
    """A small model made from its configuration, nothing downloaded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name.startswith("GPT-2"):
        config = transformers.GPT2Config(
            vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=3, n_head=4
        )
        model = transformers.GPT2LMHeadModel(config)
        targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    else:
        config = transformers.LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaForCausalLM(config)
        targets = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    if "LoRA" in name:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, **targets))
        for w in model.parameters():
            if w.requires_grad:
                nn.init.normal_(w, std=0.1)
    if "checkpointed" in name:
        model.gradient_checkpointing_enable()
    return NextToken(model.train())


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize(
    "name",
    ["GPT-2", "Llama", "GPT-2, LoRA", "Llama, LoRA", "GPT-2, checkpointed", "Llama, checkpointed"],
)
def test_models_of_transformers_with_padding_and_tied_embeddings(name, limit, monkeypatch):
    monkeypatch.setattr(gram, "COPIES", 1)
    stack = sequences()
    mask = (stack.y != -100).long()
    padded = Stack({"input_ids": stack.x, "attention_mask": mask}, stack.y, stack.counts)
    network = language_model(name)
    check(network, padded, limit=limit)
    if "checkpointed" not in name:  # which takes passes of whole batches again
        by_rules = MemoryGradients(network.eval(), "batched")([padded])
        by_loop = MemoryGradients(network, "loop")([padded])
        assert (by_rules - by_loop).norm() <= 1e-5 * by_loop.norm()


@pytest.mark.usefixtures("side_by_side")
def test_a_network_that_hands_tensors_on_behind_its_modules_is_refused():
    memory = gm.GradientMemory(Hidden(), memories=4, gradients="gram")
    memory.add(torch.randn(4, 6), 0, torch.randint(5, (4,)))
    memory.model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(ValueError, match='"loop" takes any'):
        memory.project_(1)


def test_a_network_that_cannot_be_cut_goes_task_by_task_however_many_there_are():
    """With "auto" and no room for G: the same gradients as the loop, and a word about it, once."""
    torch.manual_seed(0)

    class Cleared(Hidden):
        def forward(self, x):
            out = super().forward(x)
            self.first.gave = None
            return out

    network = Cleared()
    p = sum(w.numel() for w in network.parameters())
    memory = gm.GradientMemory(network, memories=4, memory_limit=8 * p, margin=0.0)
    other = gm.GradientMemory(copy.deepcopy(network), memories=4, gradients="loop", margin=0.0)
    said = []
    for t in range(12):
        x, y = torch.randn(4, 6), torch.randint(5, (4,))
        for one in (memory, other):
            (-F.cross_entropy(one.model(x), y)).backward()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                one.project_(t)
            said += [str(warning.message) for warning in found]
            one.add(x, t, y)
        grads = [[w.grad.clone() for w in one.model.parameters()] for one in (memory, other)]
        for w, same in zip(*grads, strict=True):
            torch.testing.assert_close(w, same, rtol=1e-4, atol=1e-6)
        memory.model.zero_grad()
        other.model.zero_grad()
    assert memory.engine.method == "gram"
    assert len(said) == 1
    assert "tasks go one by one" in said[0]


def trained(network, gradients, stack, optimizer=None, **options):
    """A loop of one's own, over the tasks of a stack."""
    network = copy.deepcopy(network)
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(network.parameters())
    memory = gm.GradientMemory(network, memories=4, gradients=gradients, **options)
    for t in range(len(stack)):
        for some in (slice(0, 2), slice(2, 4), slice(4, 6)):
            x, y = stack.x[t, some], stack.y[t, some]
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            memory.step(optimizer, t)
            memory.add(x, t, y)
    return memory, torch.cat([w.detach().flatten() for w in network.parameters()])


@pytest.mark.parametrize("constrain", ["gradient", "update"])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.usefixtures("either_way")
def test_a_loop_of_ones_own_goes_the_same_way(constrain, adam):
    torch.manual_seed(0)
    network, stack = Decoder(), sequences(k=5)
    optimizer = (lambda p: torch.optim.AdamW(p, lr=0.05)) if adam else None
    options = {"constrain": constrain, "margin": 0.3, "optimizer": optimizer}
    memory, found = trained(network, "gram", stack, **options)
    other, expected = trained(network, "loop", stack, **options)
    assert memory.violations == other.violations > 0
    assert memory.engine._buffer is None or not len(memory.engine._buffer)
    torch.testing.assert_close(memory.last.cosines, other.last.cosines, rtol=1e-3, atol=1e-5)
    # AdamW makes steps of one size of the smallest gradients, and so of their rounding.
    assert (found - expected).norm() <= (1e-3 if adam else 1e-5) * expected.norm()


@pytest.mark.usefixtures("either_way")
def test_gem_takes_it_by_name_and_goes_the_same_way():
    def learned(gradients):
        learner = gm.GEM(gm.mlp([6, 9, 5], seed=0), memories=5, gradients=gradients)
        generator = torch.Generator().manual_seed(0)
        for t in (0, 1, 2, 0, 3, 1):
            x = torch.randn(4, 6, generator=generator)
            learner.observe(x, t, torch.randint(5, (4,), generator=generator))
        return learner

    found, expected = learned("gram"), learned("loop")
    assert found.gradients == found.statistics()["gradients"] == "gram"
    assert found.statistics()["violations"] == expected.statistics()["violations"]
    for w, other in zip(found.network.parameters(), expected.network.parameters(), strict=True):
        torch.testing.assert_close(w, other)


def test_it_is_chosen_when_G_does_not_fit():
    network = gm.mlp([6, 9, 5], seed=0)
    p = sum(w.numel() for w in network.parameters())

    def method(memory_limit):
        memory = gm.GradientMemory(network, memories=4, memory_limit=memory_limit)
        generator = torch.Generator().manual_seed(0)
        for t in range(5):
            memory.add(torch.randn(4, 6, generator=generator), t, torch.arange(4))
            network(torch.randn(4, 6)).sum().backward()
            memory.project_("now")
        return memory.engine.method

    assert method(4 * 4 * p) == "gram"  # five gradients of four bytes each are more
    assert method(5 * 4 * p) != "gram"
    assert method(4 * p - 1) != "gram"  # a limit for activations
    assert method(None) != "gram"


def test_large_passes_go_one_by_one(monkeypatch):
    """Where one task's pass fills the machine, several at once only take more memory."""
    name = "a module without a rule"

    def method():
        engine = MemoryGradients(build(name))
        engine([memories(name)])
        return engine.method

    assert method() == "func"
    work = choice.operations(Objective(build(name)), memories(name))
    monkeypatch.setitem(choice.ENOUGH, "cpu", (work, 1e10))
    assert method() == "loop"
    ids, features = torch.zeros(2, 3, 5, dtype=torch.long), torch.zeros(2, 3, 5, 7)
    image, vector = torch.zeros(2, 3, 1, 8, 8), torch.zeros(2, 3, 5)
    one = nn.Linear(1, 1, bias=False)
    for x, positions in ((ids, 15), (features, 15), (image, 3), (vector, 3)):
        stack = Stack(x, torch.zeros(2, 3), (3, 3))
        assert choice.operations(Objective(one), stack) == 6 * positions


def test_no_more_than_a_few_gradients_are_kept():
    torch.manual_seed(0)
    network, stack = Decoder(blocks=10), sequences(k=12, m=1, length=3, padded=False)
    found = check(network, stack)
    p = sum(w.numel() for w in network.parameters())
    shared = found.segments.shared | {found.segments.blocks[network.places]}
    kept = sum(rows.numel() for block, rows in found._rows.items() if block not in shared)
    assert 0 < kept <= gram.COPIES * p
    assert kept < 12 * p / 2


def test_segments_are_small_and_each_parameter_is_in_one():
    network = Decoder(blocks=10)
    found = cuts(network)
    assert set(network.blocks) <= set(found)
    total = sum(w.numel() for w in network.parameters())
    for module in found:
        size = sum(w.numel() for w in module.parameters())
        assert size <= total / 8 or not list(module.children())


@pytest.mark.parametrize("limit", [None, 1, 10_000])
@pytest.mark.usefixtures("side_by_side")
def test_nothing_is_held_after_a_step(limit, monkeypatch):
    """Graphs and activations go when the step is done, without a garbage collection."""
    monkeypatch.setattr(gram, "COPIES", 0)
    alive = []
    products = GramGradients._products

    def noted(self, z):
        result = products(self, z)
        for _, call in self._again:
            alive.extend(weakref.ref(tensor) for tensor in [*call.leaves, *call.outputs])
        return result

    monkeypatch.setattr(GramGradients, "_products", noted)
    network, stack = Decoder(), sequences()
    memory = gm.GradientMemory(network, memories=6, gradients="gram", memory_limit=limit)
    for t in range(4):
        memory.add(stack.x[t], t, stack.y[t])
    gc.collect()
    gc.disable()
    try:
        (-F.cross_entropy(network(stack.x[0]), stack.y[0])).backward()
        memory.project_("now")
        assert alive
        assert not [one for one in alive if one() is not None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("either_way")
def test_frozen_parameters_have_no_part():
    network = Decoder()
    network.embed.requires_grad_(False)
    network.blocks[0].requires_grad_(False)
    found = check(network, sequences())
    assert all(w.requires_grad for block in found._rows for w in block.weights)
    assert network.blocks[0] not in found.segments.modules


@pytest.mark.usefixtures("either_way")
def test_only_the_optimizers_parameters_are_projected():
    torch.manual_seed(0)
    stack = sequences(k=2)
    memories_of = {}
    for gradients in ("gram", "loop"):
        torch.manual_seed(0)
        network = Decoder()
        memory = gm.GradientMemory(network, memories=6, gradients=gradients, margin=0.0)
        memory.add(stack.x[0], 0, stack.y[0])
        head = torch.optim.SGD(network.blocks.parameters(), lr=0.1)
        (-F.cross_entropy(network(stack.x[0]), stack.y[0])).backward()
        memory.step(head, 1)
        memories_of[gradients] = [w.grad.clone() for w in network.parameters()]
    for one, other in zip(*memories_of.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("constrain", ["gradient", "update"])
@pytest.mark.usefixtures("either_way")
def test_gradients_that_are_not_finite(constrain):
    def prepared(not_finite):
        network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        memory = gm.GradientMemory(
            network, memories=2, gradients="gram", constrain=constrain, not_finite=not_finite
        )
        memory.add(torch.ones(2, 3), 0, torch.tensor([0, 1]))
        memory.gradients()
        memory.memory.stacks([0])[0].x[0, 0, 0] = float("inf")
        network(torch.ones(2, 3)).sum().backward()
        return network, memory, torch.optim.SGD(network.parameters(), lr=0.1)

    network, memory, optimizer = prepared("stop")
    before = copy.deepcopy(network.state_dict())
    memory.engine._segments = Segments(network)  # as after a first step
    with pytest.raises(FloatingPointError, match="not finite"):
        memory.step(optimizer, 1)
    torch.testing.assert_close(network.state_dict(), before)

    network, memory, optimizer = prepared("skip")
    before = copy.deepcopy(network.state_dict())
    memory.engine._segments = Segments(network)
    memory.step(optimizer, 1)
    assert memory.skipped == 1
    torch.testing.assert_close(network.state_dict(), before)


def test_what_a_step_will_take_is_known_before():
    network = Decoder(blocks=6)
    p = 4 * sum(w.numel() for w in network.parameters())
    stack = sequences(k=2)
    memory = gm.GradientMemory(network, memories=6, gradients="loop")
    with pytest.raises(ValueError, match="give x"):
        memory.bytes_needed(tasks=10)
    few, many = (memory.bytes_needed(tasks=k, x=stack.x[0]) for k in (10, 20))
    assert many - few == 10 * p  # a pass per task: its activations are counted once
    without = gm.GradientMemory(network, memories=6, gradients="gram", memory_limit=1)
    assert without.bytes_needed(tasks=1000, x=stack.x[0]) < 0.5 * 1000 * p
    memory.add(stack.x[0], 0, stack.y[0])
    assert memory.bytes_needed(tasks=10) == few


def test_a_saved_memory_goes_on_without_G(tmp_path):
    torch.manual_seed(0)
    network, stack = Decoder(), sequences()
    p = 4 * sum(w.numel() for w in network.parameters())
    memory = gm.GradientMemory(network, memories=6, memory_limit=2 * p)
    for t in range(4):
        memory.add(stack.x[t], t, stack.y[t])
    F.cross_entropy(network(stack.x[0]), stack.y[0]).backward()
    memory.project_("now")
    assert memory.engine.method == "gram"
    memory.save(tmp_path / "memory")
    other = gm.GradientMemory(network, memories=6, memory_limit=2 * p)
    other.load(tmp_path / "memory")
    assert other.engine.method == "gram"


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_where_nothing_is_violated_a_look_is_enough(constrain):
    """After steps that violate nothing the tasks are gone through one by one, exactly as before."""
    torch.manual_seed(0)
    network, stack = Decoder(), sequences()
    made = {}
    for gradients in ("gram", "loop"):
        own = copy.deepcopy(network)
        made[gradients] = (
            own,
            gm.GradientMemory(
                own, memories=6, gradients=gradients, constrain=constrain, memory_limit=1
            ),
        )
        for t in range(3):
            made[gradients][1].add(stack.x[t], t, stack.y[t])
    looks = []
    outlook = made["gram"][1].engine.outlook

    def step(turned):
        for name, (own, memory) in made.items():
            optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
            G = memory.gradients()
            own.zero_grad()
            parts = (-G if turned else G).sum(0).split([w.numel() for w in own.parameters()])
            for w, part in zip(own.parameters(), parts, strict=True):
                w.grad = part.view_as(w).clone()
            before = outlook.calm
            memory.step(optimizer, "now")
            assert len(memory.last.violated) == 3 * turned
            if name == "gram":
                looks.append(before >= gram.CALM)
        one, other = (memory.last for _, memory in made.values())
        torch.testing.assert_close(one.cosines, other.cosines, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.v, other.v, rtol=1e-3, atol=1e-6)
        for w, same in zip(*(own.parameters() for own, _ in made.values()), strict=True):
            torch.testing.assert_close(w, same, rtol=1e-5, atol=1e-7)

    for turned in (False, False, False, True, False, False, False):
        step(turned)
    assert looks == [False, False, True, True, False, False, True]


@pytest.mark.usefixtures("side_by_side")
def test_a_look_costs_nothing_where_all_activations_are_kept():
    network, stack = Decoder(), sequences()
    memory = gm.GradientMemory(network, memories=6, gradients="gram", margin=0.0)
    for t in range(3):
        memory.add(stack.x[t], t, stack.y[t])
    for _ in range(4):
        parts = memory.gradients().sum(0).split([w.numel() for w in network.parameters()])
        for w, part in zip(network.parameters(), parts, strict=True):
            w.grad = part.view_as(w).clone()
        memory.project_("now")
    assert memory.engine.outlook.calm == 0
