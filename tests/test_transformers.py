"""GEM in Hugging Face's Trainer, with small models made from configs."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import gradmem as gm

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from gradmem.gradients.flat import flat, parameters
from gradmem.integrations.hugging_face import HEADS, head_of, lengthened, objective_of
from gradmem.integrations.transformers import GEMCallback, GEMTrainer

from .hugging_face import (
    ENDS,
    SIZES,
    VOCABULARY,
    classifier,
    gpt2,
    llama,
    padded,
    sequences,
    t5,
    tagger,
    with_lora,
)

SHIFTS = {"plus one": 1, "minus one": -1, "plus seven": 7}
TASKS = {name: sequences(48, shift) for name, shift in SHIFTS.items()}
TESTS = {name: sequences(16, shift, seed=1) for name, shift in SHIFTS.items()}


def arguments(folder, **settings):
    usual = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "num_train_epochs": 1, "seed": 0, "use_cpu": True,
        "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**{**usual, **settings})


def make(folder, model=None, tests=None, callbacks=None, gem=None, tasks=TASKS, **settings):
    torch.manual_seed(0)
    model = gpt2() if model is None else model
    own = {"memories": 8, "gradients": "loop", **(gem or {})}
    return GEMTrainer(
        model, arguments(folder, **settings), padded, tasks, tests, callbacks=callbacks, **own
    )


class Watch(TrainerCallback):
    """Notes g at the memories and what a step makes of it, seen from inside the Trainer."""

    def __init__(self, gem):
        self.gem, self.grads, self.steps = gem, [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        memory = self.gem.memory
        others = [t for t in memory.memory if t != self.gem.task]
        self.G = memory.gradients(others) if others else None
        self.before = flat([w.detach() for w in parameters(model)], parameters(model)).clone()
        grads = flat([w.grad for w in parameters(model)], parameters(model))
        self.grads.append((self.G, grads.clone()))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        after = flat([w.detach() for w in parameters(model)], parameters(model))
        self.steps.append((self.G, self.before - after))


def against(pairs):
    """The smallest cosine of steps with the gradients at the memories, and how many were seen."""
    cosines = [float((G @ g / (G.norm(dim=1) * g.norm())).min()) for G, g in pairs if G is not None]
    return min(cosines), len(cosines)


MODELS = {
    "gpt2": (gpt2, "next token"),
    "llama": (llama, "next token"),
    "lora on gpt2": (lambda: with_lora(gpt2(), ["c_attn"]), "next token"),
    "lora on llama": (lambda: with_lora(llama(), ["q_proj", "v_proj"]), "next token"),
    "classes": (lambda: classifier(num_labels=3), "class"),
    "tags": (tagger, "class"),
    "number": (lambda: classifier(num_labels=1), "number"),
    "t5": (t5, None),
}


def examples_for(name, n=6):
    batch = padded(sequences(n, 3))
    if name == "classes":
        batch["labels"] = torch.arange(n) % 3
    elif name == "number":
        batch["labels"] = torch.linspace(-1, 1, n)
    elif name == "tags":
        batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], batch["labels"] % 4)
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_at_the_memories_is_that_of_the_models_own_loss(name):
    torch.manual_seed(0)
    build, expected = MODELS[name]
    model = build()
    batch = examples_for(name)
    labels = {"labels": batch.pop("labels")}
    head = head_of(model, batch, labels)
    assert (None if head is None else head.name) == expected
    objective = objective_of(model, head)
    y = labels if head is None else head.targets(labels["labels"])
    memory = gm.GradientMemory(objective.network, objective=objective)
    memory.add(batch, "a", y)
    loss = model(**batch, **labels).loss
    g = torch.autograd.grad(loss, parameters(model), allow_unused=True)
    (row,) = memory.gradients()
    torch.testing.assert_close(row, flat(g, parameters(model)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_layers_have_rules_so_that_all_tasks_take_one_pass(precision):
    torch.manual_seed(0)
    model = with_lora(llama(), ["q_proj", "v_proj", "down_proj"])
    found = {}
    for way in ("loop", "batched"):
        objective = objective_of(model, HEADS["next token"])
        memory = gm.GradientMemory(
            objective.network, objective=objective, gradients=way, precision=precision
        )
        for t, shift in enumerate(SHIFTS.values()):
            batch = lengthened(padded(sequences(5 + t, shift)), 12)
            y = HEADS["next token"].targets(batch.pop("labels"))
            memory.add(batch, t, y)
        found[way] = memory.gradients()
    error = (found["batched"] - found["loop"]).norm() / found["loop"].norm()
    assert error < (1e-5 if precision == "fp32" else 3e-2)


def test_activation_checkpointing(tmp_path):
    trainers = [make(tmp_path, llama(), gradient_checkpointing=on) for on in (False, True)]
    weights = []
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.model.load_state_dict(llama().state_dict())
        trainer.train()
        weights.append(
            flat([w.detach() for w in parameters(trainer.model)], parameters(trainer.model))
        )
    torch.testing.assert_close(*weights)


def test_a_model_with_a_loss_of_another_kind_is_asked_for_it():
    model = gpt2()
    batch = padded(sequences(4, 1))
    labels = {"labels": batch.pop("labels")}
    model.loss_function = lambda logits, labels, **_: 2 * F.cross_entropy(logits.mT, labels)
    assert head_of(model, batch, labels) is None


def test_padding_to_a_length_changes_no_loss():
    torch.manual_seed(0)
    model = llama().eval()
    batch = padded(sequences(4, 1))
    longer = lengthened(batch, 14)
    assert longer["input_ids"].shape == (4, 14)
    torch.testing.assert_close(model(**longer).loss, model(**batch).loss)
    assert lengthened(batch, 9).keys() == batch.keys()
    without = {name: value for name, value in batch.items() if name != "attention_mask"}
    assert lengthened(without, 14)["attention_mask"].sum() == batch["input_ids"].numel()
    with pytest.raises(ValueError, match="max_length must be at least 9"):
        lengthened(batch, 8)


@pytest.mark.parametrize("model", [gpt2, lambda: with_lora(llama(), ["q_proj"])], ids=["", "lora"])
def test_a_step_along_the_projected_gradient_goes_against_no_memory(tmp_path, model):
    torch.manual_seed(0)
    trainer = make(
        tmp_path, model(), gem={"margin": 0.0}, optim="sgd", gradient_accumulation_steps=2,
        max_grad_norm=0.05, learning_rate=0.1,
    )  # fmt: skip
    watch = Watch(trainer.gem)
    trainer.add_callback(watch)
    trainer.train()
    worst, seen = against(watch.steps)
    assert seen == 6
    assert worst > -1e-4
    assert trainer.gem.memory.violations > 0
    assert all(g.norm() < 0.0501 for _, g in watch.grads)  # projected, then clipped
    assert trainer.gem.memory.steps == 9


def test_without_gem_steps_go_against_the_memories(tmp_path):
    """The test above could fail."""
    trainer = make(tmp_path, gem={"constrain": None}, optim="sgd", learning_rate=0.1)
    watch = Watch(trainer.gem)
    trainer.add_callback(watch)
    trainer.train()
    assert against(watch.steps)[0] < -0.1
    assert trainer.gem.memory.steps == 0


def test_under_adamw_the_update_is_what_holds(tmp_path):
    found = {}
    for constrain in ("gradient", "update"):
        trainer = make(tmp_path, gem={"margin": 0.0, "constrain": constrain}, num_train_epochs=2)
        watch = Watch(trainer.gem)
        trainer.add_callback(watch)
        trainer.train()
        found[constrain], _ = against(watch.steps)
    assert found["update"] > -1e-4 > found["gradient"]


@pytest.mark.parametrize("constrain", ["gradient", "update"])
def test_a_callback_does_the_same_in_a_trainer_of_ones_own(tmp_path, constrain):
    torch.manual_seed(0)
    gem = GEMCallback(memories=8, margin=0.0, constrain=constrain)
    watch = Watch(gem)
    model = gpt2()
    args = arguments(tmp_path, optim="sgd", learning_rate=0.1, max_grad_norm=0.05)
    for gem.task, dataset in TASKS.items():
        trainer = Trainer(model, args, padded, dataset, callbacks=[gem, watch])
        trainer.train()
    worst, seen = against(watch.steps)
    assert seen == 12
    assert worst > -1e-4
    assert gem.memory.violations > 0
    # clipped, then projected onto a cone, which makes nothing longer
    assert all(g.norm() < 0.0501 for _, g in watch.grads)
    assert [*gem.memory.memory] == [*TASKS]
    with pytest.raises(ValueError, match="another model"):
        Trainer(gpt2(), args, padded, TASKS["plus one"], callbacks=[gem]).train()


def test_a_callback_must_know_the_task(tmp_path):
    trainer = Trainer(
        gpt2(), arguments(tmp_path), padded, TASKS["plus one"], callbacks=[GEMCallback()]
    )
    with pytest.raises(ValueError, match=r"set callback\.task"):
        trainer.train()


def test_every_example_is_offered_once_however_many_epochs(tmp_path):
    trainer = make(tmp_path, num_train_epochs=3, gem={"memories": 100})
    trainer.train()
    memory = trainer.gem.memory.memory
    assert [memory.count(name) for name in TASKS] == [48, 48, 48]
    kept = {tuple(ids[mask.bool()].tolist()) for ids, mask in zip(
        *(memory["plus seven"][0][name] for name in ("input_ids", "attention_mask")), strict=True
    )}  # fmt: skip
    assert kept == {tuple(one["input_ids"]) for one in TASKS["plus seven"]}


def test_memories_of_all_tasks_have_one_length(tmp_path):
    tasks = {
        "short": sequences(16, 1, longest=6),
        "long": sequences(16, 1, shortest=10, longest=12),
    }
    trainer = make(tmp_path, tasks=tasks)
    trainer.train()
    assert len(trainer.gem.memory.memory.kinds) == 1
    x, _ = trainer.gem.memory.memory["short"]
    assert x["input_ids"].shape == (8, 12)


def test_memories_are_padded_with_the_models_token(tmp_path):
    """A classifier of GPT-2 finds the end of a sequence by it."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    config = GPT2Config(**sizes, **calm, pad_token_id=1, num_labels=2)
    model = GPT2ForSequenceClassification(config)
    tasks = {
        name: [{"input_ids": torch.randint(2, VOCABULARY, (n,)).tolist(), "labels": i % 2}
               for i in range(16)]
        for name, n in (("short", 6), ("long", 12))
    }  # fmt: skip
    gem = {"memories": 16, "keep": "first"}
    trainer = GEMTrainer(
        model, arguments(tmp_path), default_data_collator, tasks, gradients="loop", **gem
    )
    trainer.train()
    batch = default_data_collator(tasks["short"])
    own = torch.autograd.grad(model(**batch).loss, [*model.parameters()])
    expected = torch.cat([g.flatten() for g in own])
    (found,) = trainer.gem.memory.gradients(["short"])
    assert torch.allclose(found, expected, atol=1e-5)


class StopError(Exception):
    """An interruption."""


class Interrupt(TrainerCallback):
    def __init__(self, gem, task, step):
        self.gem, self.task, self.step = gem, task, step

    def on_step_end(self, args, state, control, **kwargs):
        if (self.gem.task, state.global_step) == (self.task, self.step):
            raise StopError


@pytest.mark.parametrize("constrain", ["gradient", "update"])
@pytest.mark.parametrize(
    ("settings", "step"),
    [({"num_train_epochs": 2, "save_steps": 4}, 7), ({"max_steps": 8, "save_steps": 4}, 8),
     ({"num_train_epochs": 1, "save_steps": 3}, 1)],
    ids=["in the midst of a task", "at its last step", "at the next task's begin"],
)  # fmt: skip
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, constrain, settings, step):
    settings = {"save_strategy": "steps", "lr_scheduler_type": "linear", **settings}
    gem = {"constrain": constrain, "keep": "reservoir"}
    drops = {"resid_pdrop": 0.1}

    def build(folder):
        torch.manual_seed(0)
        return make(tmp_path / folder, gpt2(**drops), TESTS, gem=gem, **settings)

    undisturbed = build("a")
    undisturbed.train()
    first = build("b")
    first.add_callback(Interrupt(first.gem, "minus one", step))
    with pytest.raises(StopError):
        first.train()
    second = build("b")
    second.train(resume_from_checkpoint=True)
    for one, other in zip(second.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert second.result.R.tolist() == undisturbed.result.R.tolist()
    assert second.gem.memory.steps == undisturbed.gem.memory.steps


def test_going_on_is_with_the_run_that_was_begun_last(tmp_path):
    """Also where an older one left checkpoints of later tasks in the same folder."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    make(tmp_path / "a", tests=TESTS, learning_rate=0.001, **settings).train()
    interrupted = make(tmp_path / "a", tests=TESTS, **settings)
    interrupted.add_callback(Interrupt(interrupted.gem, "plus one", 5))
    with pytest.raises(StopError):
        interrupted.train()
    resumed = make(tmp_path / "a", tests=TESTS, **settings)
    resumed.train(resume_from_checkpoint=True)
    undisturbed = make(tmp_path / "b", tests=TESTS, **settings)
    undisturbed.train()
    assert resumed.result.R.tolist() == undisturbed.result.R.tolist()


def test_a_callback_resumes_from_its_checkpoint(tmp_path):
    def run(folder, stop=None, resume=None):
        torch.manual_seed(0)
        model, gem = gpt2(), GEMCallback(memories=8, gradients="loop")
        for gem.task in ("plus one", "minus one"):
            args = arguments(tmp_path / folder / gem.task, save_strategy="steps", save_steps=2)
            trainer = Trainer(model, args, padded, TASKS[gem.task], callbacks=[gem])
            if resume is not None and gem.task == "plus one":
                continue
            if stop is not None:
                trainer.add_callback(Interrupt(gem, *stop))
            trainer.train(resume_from_checkpoint=resume)
        return model

    whole = run("a")
    with pytest.raises(StopError):
        run("b", stop=("minus one", 5))
    resumed = run("b", resume=True)
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_a_memory_is_refused(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint of a GEMTrainer"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is no checkpoint of a GEMTrainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_checkpoints_hold_nothing_of_frozen_parameters(tmp_path):
    model = with_lora(gpt2(n_embd=64), ["c_attn"])
    trainer = make(tmp_path, model, save_strategy="steps", save_steps=6, gem={"constraints": 2})
    trainer.train()
    learning = sum(w.numel() for w in model.parameters() if w.requires_grad)
    every = sum(w.numel() for w in model.parameters())
    file = tmp_path / "task-2/checkpoint-6/gradient_memory"
    assert 20 * learning < every
    assert file.stat().st_size < 4 * every / 3
    assert trainer.gem.memory.gradients().shape == (3, learning)


def test_r_is_measured_and_reported(tmp_path):
    trainer = make(tmp_path, tests=TESTS, num_train_epochs=3)
    trainer.train()
    result = trainer.result
    assert result.R.shape == (3, 3)
    assert result.baseline.shape == (3,)
    assert result.score == "accuracy"
    assert result.R[0, 0] > result.baseline[0] + 0.1
    assert result.curve_examples == [0, 144, 288, 432]
    # the accuracy of the model's next tokens, over those that are not padding
    batch = padded(TESTS["minus one"])
    logits = trainer.model.eval()(**batch).logits[:, :-1].argmax(-1)
    labels = batch["labels"][:, 1:]
    right = (logits == labels)[labels >= 0].float().mean().item()
    assert result.R[2, 1] == pytest.approx(right)
    assert gm.report(result, tmp_path / "report").exists()
    assert result.save(tmp_path / "saved").exists()


def test_other_scores(tmp_path):
    def exact(logits, labels):
        return ((logits.argmax(-1) == labels) | (labels < 0)).all(1)

    trainer = make(tmp_path, tests=TESTS)
    trainer.train()
    trainer.score = "loss"
    batch = padded(TESTS["plus one"])
    expected = trainer.model.eval()(**batch).loss.item()
    assert trainer._score_on(TESTS["plus one"], "plus one") == pytest.approx(-expected, rel=1e-5)
    assert trainer._score_name == "minus loss"
    trainer.score = exact
    assert 0 <= trainer._score_on(TESTS["plus one"], "plus one") <= 1
    trainer.score = "something"
    with pytest.raises(ValueError, match="score must be one of"):
        trainer._score_on(TESTS["plus one"], "plus one")
    trainer.compute_metrics = lambda prediction: {"something": 0.25}
    assert trainer._score_on(TESTS["plus one"], "plus one") == 0.25


def test_classes_of_whole_sequences_are_learned(tmp_path):
    tasks, tests = (
        {
            name: [
                {**one, "labels": int(one["input_ids"][0] < (VOCABULARY + 2) // 2) ^ flip}
                | {"input_ids": [2 + flip, *one["input_ids"]]}
                for one in sequences(n, 1, seed)
            ]
            for name, flip in (("a", 0), ("b", 1))
        }
        for n, seed in ((128, 0), (64, 1))
    )
    torch.manual_seed(0)
    model = classifier(num_labels=2)
    gem = {"memories": 32, "constrain": "update"}
    trainer = make(
        tmp_path, model, tests, tasks=tasks, gem=gem, num_train_epochs=3, learning_rate=3e-3
    )
    trainer.train()
    assert trainer.gem.head is HEADS["class"]
    assert trainer.result.metrics.learning_accuracy[0] > 0.8


def test_bf16(tmp_path):
    trainer = make(tmp_path, bf16=True, gem={"margin": 0.0}, optim="sgd", learning_rate=0.1)
    watch = Watch(trainer.gem)
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.gem.memory.engine.precision == "bf16"
    worst, seen = against(watch.steps)
    assert seen == 12
    assert worst > -1e-3


def test_gradients_of_a_loss_that_is_scaled_are_projected_as_if_it_were_not(tmp_path):
    """As under fp16, which needs a GPU."""
    made = []
    for scale in (1.0, 1024.0):
        trainer = make(tmp_path, gem={"margin": 0.5})
        trainer.train()

        class Scaler:
            def get_scale(self, scale=scale):
                return scale

        trainer.accelerator.scaler = Scaler()
        batch = padded(sequences(8, -1, seed=5))
        trainer.model.zero_grad()
        (scale * trainer.model(**batch).loss).backward()
        trainer.gem.task = "another"
        with trainer._unscaled():
            trainer.gem.enter(trainer.optimizer)
        grads = [w.grad for w in parameters(trainer.model)]
        made.append(flat(grads, parameters(trainer.model)) / scale)
    assert trainer.gem.memory.last.violated
    torch.testing.assert_close(made[0], made[1])


def test_a_loss_of_ones_own(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], label_smoothing=0.2)

    trainer = make(tmp_path, gem={"compute_loss_func": loss})
    trainer.train()
    (row, *_) = trainer.gem.memory.gradients(["plus one"])
    x, y = trainer.gem.memory.memory["plus one"]
    own = loss(trainer.model(**x), y["labels"])
    g = torch.autograd.grad(own, parameters(trainer.model))
    torch.testing.assert_close(row, flat(g, parameters(trainer.model)))


def test_label_smoothing_acts_at_the_memories_too(tmp_path):
    trainer = make(tmp_path, label_smoothing_factor=0.2)
    trainer.train()
    memory = trainer.gem.memory
    x, y = memory.memory["plus one"]
    logits = trainer.model(**x).logits
    own = F.cross_entropy(logits.mT, y, label_smoothing=0.2)
    g = torch.autograd.grad(own, parameters(trainer.model))
    (row,) = memory.gradients(["plus one"])
    torch.testing.assert_close(row, flat(g, parameters(trainer.model)), rtol=1e-4, atol=1e-6)


def test_label_smoothing_replaces_a_models_loss_of_another_kind(tmp_path):
    """As in the Trainer, which then takes the logits alone."""
    config = MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
        router_aux_loss_coef=0.5, **ENDS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    trainer = make(tmp_path, model, label_smoothing_factor=0.5, gem={"memories": 48})
    trainer.train()
    batch = padded(TASKS["plus one"])
    own = torch.autograd.grad(trainer.compute_loss(model, dict(batch)), [*model.parameters()])
    expected = torch.cat([g.flatten() for g in own])
    (found,) = trainer.gem.memory.gradients(["plus one"])
    assert torch.allclose(found, expected, atol=1e-5)


def test_torch_datasets_and_lists_are_tasks_too(tmp_path):
    class Sequences(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return TASKS["plus one"][i]

    trainer = make(tmp_path, tasks=[Sequences(), TASKS["minus one"]])
    trainer.train()
    assert [*trainer.gem.memory.memory] == ["task0", "task1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_datasets_are_tasks_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    tasks = {
        name: datasets.Dataset.from_list([{**one, "source": name} for one in rows])
        for name, rows in TASKS.items()
    }
    trainer = make(tmp_path, tests=tasks, tasks=datasets.DatasetDict(tasks))
    trainer.train()
    other = make(tmp_path, tests=TASKS)
    other.train()
    assert trainer.result.R.tolist() == other.result.R.tolist()


def test_what_is_no_task_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a dict or a list of datasets"):
        make(tmp_path, tasks=TASKS["plus one"])
    with pytest.raises(ValueError, match="at least one task"):
        make(tmp_path, tasks={})
    with pytest.raises(ValueError, match="must have the tasks of train_dataset"):
        make(tmp_path, tests={"plus one": TESTS["plus one"]})
    with pytest.raises(ValueError, match="needs a model"):
        GEMTrainer(args=arguments(tmp_path), train_dataset=TASKS)
    with pytest.raises(TypeError, match="no argument 'memoryes'"):
        GEMCallback(memoryes=3)


def test_a_gem_trainer_with_one_task_is_a_trainer(tmp_path):
    torch.manual_seed(0)
    model = gpt2()
    other = copy.deepcopy(model)
    tasks = {"plus one": TASKS["plus one"]}
    make(tmp_path, model, tasks=tasks, gradient_accumulation_steps=2).train()
    args = arguments(tmp_path, gradient_accumulation_steps=2)
    Trainer(other, args, padded, TASKS["plus one"]).train()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_two_processes_take_the_same_steps(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"""
import json, os, pathlib
from tests.test_transformers import Watch, against, make
folder = pathlib.Path({str(tmp_path)!r})
trainer = make(folder, gem={{"margin": 0.0}}, optim="sgd", learning_rate=0.1, ddp_backend="gloo")
watch = Watch(trainer.gem)
trainer.add_callback(watch)
trainer.train()
weights = sum(w.double().sum().item() for w in trainer.model.parameters())
found = [trainer.args.world_size, weights, *against(watch.steps)]
(folder / os.environ["RANK"]).write_text(json.dumps(found))
""")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first == second
    world, _, worst, seen = first
    assert (world, seen) == (2, 6)
    assert worst > -1e-4


def test_without_transformers_the_extra_is_named():
    code = """
import sys
sys.modules["transformers"] = None
try:
    import gradmem.integrations.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "gradmem[transformers]"' in done.stdout
