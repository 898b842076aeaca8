"""GEM as Hugging Face's Trainer: tasks one after another, and R over them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradmem.checkpoint import load_state
from gradmem.evaluation import Result
from gradmem.evaluation.scores import name_of
from gradmem.files import write_whole
from gradmem.gradients import evaluating
from gradmem.gradients.precision import computing_in
from gradmem.integrations.hugging_face import IGNORED
from gradmem.integrations.trainer_callback import FILE, MEMORY_SETTINGS, GEMCallback, some_of
from gradmem.trees import size

try:
    from transformers import Trainer, set_seed
    from transformers.trainer_utils import SaveStrategy, TrainOutput
except ImportError as error:
    raise ImportError(
        'GEMTrainer needs transformers and accelerate: pip install "gradmem[transformers]"'
    ) from error

__all__ = ["GEMCallback", "GEMTrainer"]

#: A file in `output_dir` that says when the last run began; its checkpoints say the same.
STARTED = "gradient_memory_started"

#: logits (n, …, classes), labels (n, …) → one value per label, or per example.
Score = Callable[[Tensor, Tensor], Tensor]


class GEMTrainer(Trainer):
    """Hugging Face's `Trainer` for tasks that come one after another.

    `train` trains task after task with all arguments as they are given: epochs, steps and the
    schedule of the learning rate are each task's, and its optimizer is a new one unless
    `optimizers` brings one. The gradient is projected before it is clipped, which keeps it within
    the constraints; see `GEMCallback` for the loss at the memories.

    Parameters
    ----------
    train_dataset
        {name: dataset} or a list of datasets, in the order of training; each a
        `datasets.Dataset`, a torch dataset, or a list of dicts.
    eval_dataset
        The same for the rows of R, with the same names; or nothing, and R is not measured.
    score
        What R holds: "accuracy" (of the labels that count), "loss" (with a minus, so that higher is
        better), the name of something that `compute_metrics` gives, or `score(logits, labels)` with
        a value per example, or per label, of which those at labels of −100 do not count.
        Labels are those that a position predicts: a causal model's are already shifted.
    candidates, max_length
        See `GEMCallback`; `max_length` is the longest sequence of all candidates if None.
    model, args, data_collator, **others
        `Trainer`'s arguments, and `GradientMemory`'s: memories, budget, keep, margin, constrain
        (also None, for plain fine-tuning to compare with), gradients, memory_limit, …

    Notes
    -----
    Checkpoints of the i-th task are in `output_dir/task-i/checkpoint-N` and hold the memories.
    `train(resume_from_checkpoint=True)` goes on from the last of them, in the midst of its task,
    and ends with the weights of a run that was not interrupted.

    Attributes
    ----------
    gem
        The `GEMCallback`; `gem.memory` is the `GradientMemory`.

    Examples
    --------
    ::

        trainer = GEMTrainer(model, args, train_dataset={"a": a, "b": b}, memories=64)
        trainer.train()
        gm.report(trainer.result, "report")
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        score: str | Score = "accuracy",
        candidates: int = 4096,
        max_length: int | None = None,
        **others: Any,
    ) -> None:
        if model is None:
            raise ValueError("GEMTrainer needs a model: model_init would start each task afresh")
        self.tasks = _tasks("train_dataset", train_dataset)
        self.tests = {} if eval_dataset is None else _tasks("eval_dataset", eval_dataset)
        if self.tests and {*self.tests} != {*self.tasks}:
            raise ValueError(
                f"eval_dataset must have the tasks of train_dataset, {[*self.tasks]}, got "
                f"{[*self.tests]}"
            )
        self.score = score
        own = {name: others.pop(name) for name in MEMORY_SETTINGS if name in others}
        self.gem = GEMCallback(
            candidates=candidates,
            max_length=max_length,
            compute_loss_func=others.get("compute_loss_func"),
            **own,
        )
        first = next(iter(self.tasks.values()))
        tests = {str(task): dataset for task, dataset in self.tests.items()}
        super().__init__(model, args, data_collator, first, tests or None, **others)
        self.add_callback(self.gem)
        given: tuple[Any, Any] = others.get("optimizers", (None, None))
        self._makes_optimizer = given == (None, None)
        self._start_again()

    def _start_again(self) -> None:
        self._rows: list[list[float]] = []  # the baseline, then R
        self._examples: list[int] = [0]  # that were trained on before each row
        self._seconds = [0.0, 0.0]  # of training, of evaluation

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> TrainOutput:
        """Train task after task, or go on from a checkpoint.

        Parameters
        ----------
        resume_from_checkpoint
            A checkpoint's folder, or True for the last one in `output_dir`.
        **others
            As for `Trainer.train`.

        Returns
        -------
        TrainOutput
            The last task's.
        """
        checkpoint = self._checkpoint(resume_from_checkpoint)
        self._start_again()
        self.train_dataset = next(iter(self.tasks.values()))
        self.gem.start(self.args, self.model, self.get_train_dataloader())
        self._find_length()
        begin, started = 0, str(time.time_ns())
        if checkpoint is not None:
            notes = _notes(checkpoint)
            if notes["tasks"] != [*self.tasks]:
                raise ValueError(
                    f"{checkpoint} is of a run on {notes['tasks']}, got {[*self.tasks]}"
                )
            begin, self._rows = notes["begin"], notes["rows"]
            started = notes.get("started", "")
            self._examples, self._seconds = notes["examples"], notes["seconds"]
            self.gem.load(checkpoint)
        else:
            self._measure()
        if self.args.should_save:
            self._note_start(started)
        for i, (task, dataset) in enumerate(self.tasks.items()):
            if i < begin:
                continue
            self.gem.task, self.train_dataset = task, dataset
            self.gem.notes = {
                "tasks": [*self.tasks],
                "started": started,
                "begin": i,
                "rows": self._rows,
                "examples": self._examples,
                "seconds": self._seconds,
            }
            if self._makes_optimizer:
                self.optimizer: Any = None
                self.lr_scheduler: Any = None
            begun = time.perf_counter()
            set_seed(self.args.seed + i)  # a task begins as it does after an interruption
            with self._folder_of(i):
                resumed = None if checkpoint is None else str(checkpoint)
                output = super().train(resume_from_checkpoint=resumed, **others)
            checkpoint = None
            # new objects: what the notes refer to is not changed
            seconds, evaluation = self._seconds
            self._seconds = [seconds + time.perf_counter() - begun, evaluation]
            self._examples = [*self._examples, self._examples[-1] + self._seen(dataset)]
            self._measure()
        return output

    def _note_start(self, started: str) -> None:
        """Say in `output_dir` which run its checkpoints are of, if there will be any."""
        begun = Path(self.args.output_dir) / STARTED
        if self.args.save_strategy == SaveStrategy.NO:
            begun.unlink(missing_ok=True)
            return
        begun.parent.mkdir(parents=True, exist_ok=True)
        write_whole(begun, started)

    def _seen(self, dataset: Any) -> int:
        """How many examples a task was trained on, those of several epochs each time."""
        if isinstance(dataset, Sized) and self.state.epoch is not None:
            return round(float(self.state.epoch) * len(dataset))
        return int(self.state.global_step * self.get_total_train_batch_size(self.args))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """`Trainer`'s; the gradient of a whole step is projected, before it is clipped."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            with self._unscaled():
                self.gem.enter(self.optimizer)
        return loss

    @property
    def result(self) -> Result:
        """R and the baseline, as `gm.run` gives them, for `gm.report` and `Result.save`."""
        if len(self._rows) < 2:
            raise RuntimeError("there is no R: give GEMTrainer an eval_dataset, and train")
        baseline, *R = self._rows
        memory = self.gem.memory
        assert memory is not None
        plain = (str, int, float, bool, type(None))
        settings = {n: v for n, v in self.gem.settings.items() if isinstance(v, plain)}
        if self.gem.constrain is None:
            settings = {}
        elif self.gem.constrain != "gradient":
            settings["constrain"] = self.gem.constrain
        return Result(
            R=np.array(R),
            baseline=np.array(baseline),
            curve_examples=self._examples,
            curves=np.array(self._rows),
            learned=[*range(len(R))],
            labels=[str(task) for task in self.tasks],
            seconds_training=self._seconds[0],
            seconds_evaluation=self._seconds[1],
            statistics={"steps": memory.steps, "violations": memory.violations},
            score=self._score_name,
            config={
                "benchmark": "fine-tuning",
                "learner": "single" if self.gem.constrain is None else "gem",
                "settings": {**settings, "lr": self.args.learning_rate, "optim": self.args.optim},
                "seeds": {"learner": self.args.seed},
                "n_tasks": len(self.tasks),
                "batch_size": self.get_total_train_batch_size(self.args),
                "epochs": self.args.num_train_epochs,
                "device": str(self.args.device),
            },
        )

    @property
    def _score_name(self) -> str:
        if isinstance(self.score, str):
            return "minus loss" if self.score == "loss" else self.score
        return name_of(self.score)

    def _measure(self) -> None:
        """Add the scores on all tasks' tests, the next row of R."""
        if not self.tests:
            return
        started = time.perf_counter()
        row = {task: self._score_on(self.tests[task], task) for task in self.tasks}
        self.log({f"eval_{task}_{self._score_name}": value for task, value in row.items()})
        self._rows = [*self._rows, [*row.values()]]
        training, seconds = self._seconds
        self._seconds = [training, seconds + time.perf_counter() - started]

    def _score_on(self, dataset: Any, task: Any) -> float:
        if isinstance(self.score, str) and self.score not in ("accuracy", "loss"):
            metrics = self.evaluate(dataset, metric_key_prefix="eval")
            if f"eval_{self.score}" not in metrics:
                raise ValueError(f"score must be one of {[*metrics]}, got {self.score!r}")
            return float(metrics[f"eval_{self.score}"])
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        precision = "bf16" if self.args.bf16 else "fp32"
        with torch.no_grad(), evaluating(self.model), computing_in(precision, self.args.device):
            for batch in self.get_eval_dataloader(dataset):
                values = self._values(batch)
                totals += torch.stack([values.double().sum(), values.new_tensor(values.numel())])
        total, n = self.accelerator.reduce(totals, reduction="sum").tolist()
        return float(total / n)

    def _values(self, batch: Mapping[str, Any]) -> Tensor:
        """The score of each label that counts, or of each example: (n,)."""
        memory, head = self.gem.memory, self.gem.head
        assert memory is not None
        objective = memory.engine.objective
        x, y = self.gem.split(batch, self.args)
        if self.score == "loss":
            loss = -objective.loss(x, None, y)
            of_classes = head is not None and head.predicts_classes
            return loss.expand(int((y != IGNORED).sum()) if of_classes else size(y))
        if head is None:
            raise ValueError(
                "accuracies are for models whose loss is that of their logits: take "
                'score="loss", or the name of what compute_metrics gives'
            )
        logits = objective.outputs(x).movedim(1, -1)
        values = accuracy(logits, y) if isinstance(self.score, str) else self.score(logits, y)
        if values.shape == y.shape and head.predicts_classes:
            return values[y != IGNORED].float()
        if values.shape != (len(y),):
            raise ValueError(
                f"score must give one value per label {tuple(y.shape)} or per example, got "
                f"{tuple(values.shape)}"
            )
        return values.float()

    def _find_length(self) -> None:
        """Pad all memories to the longest candidate, so that they are computed together."""
        if self.gem.max_length is not None:
            return
        longest = 0
        for dataset in self.tasks.values():
            self.train_dataset = dataset
            loader = self.get_train_dataloader()
            some = some_of(loader.dataset, self.gem.candidates, self.args)
            if not isinstance(some[0], Mapping) or "input_ids" not in some[0]:
                return
            # the collator decides: it may cut, or pad to a multiple of something
            longest_one = max(some, key=lambda one: len(one["input_ids"]))
            ids = loader.collate_fn([longest_one])["input_ids"]
            longest = max(longest, ids.shape[1])
        self.gem.max_length = longest

    def _checkpoint(self, asked: str | bool | None) -> Path | None:
        """The folder to go on from; True for the last one that is whole, of the run begun last."""
        if not asked:
            return None
        if asked is not True:
            if not (Path(asked) / FILE).exists():
                raise ValueError(f"{asked} is no checkpoint of a GEMTrainer: it has no {FILE}")
            return Path(asked)
        folder = Path(self.args.output_dir)
        begun = folder / STARTED
        started = begun.read_text("utf-8") if begun.exists() else None
        for i in reversed(range(len(self.tasks))):
            found = folder.glob(f"task-{i}/checkpoint-*/{FILE}")
            steps = sorted(found, key=lambda file: int(file.parent.name.split("-")[-1]))
            for file in reversed(steps):
                if started is None or _notes(file.parent).get("started", "") == started:
                    return file.parent
        raise ValueError(f"no checkpoint of a GEMTrainer's last run in {self.args.output_dir}")

    @contextmanager
    def _folder_of(self, i: int) -> Iterator[None]:
        """Checkpoints go into the task's folder."""
        whole = self.args.output_dir
        self.args.output_dir = os.path.join(whole, f"task-{i}")
        try:
            yield
        finally:
            self.args.output_dir = whole

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        """Gradients without the loss scale of fp16, a power of two; then with it again."""
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is None:
            yield
            return
        scale = scaler.get_scale()
        _multiply(self.model, 1 / scale)
        yield
        _multiply(self.model, scale)


def _notes(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's file says of the tasks before."""
    notes: dict[str, Any] = load_state(checkpoint / FILE, "GradientMemory")["others"]["notes"]
    return notes


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """1 where the most probable class is the label, 0 elsewhere: the labels' shape."""
    return logits.argmax(-1) == labels


@torch.no_grad()
def _multiply(model: nn.Module, factor: float) -> None:
    gradients = [w.grad for w in model.parameters() if w.grad is not None]
    torch._foreach_mul_(gradients, factor)


def _tasks(name: str, datasets: Any) -> dict[Any, Any]:
    """Datasets by name, in the order of training."""
    if isinstance(datasets, Mapping):
        found = dict(datasets)
    elif isinstance(datasets, list | tuple) and not isinstance(next(iter(datasets), {}), Mapping):
        found = {f"task{i}": dataset for i, dataset in enumerate(datasets)}
    else:
        raise TypeError(
            f"{name} must be a dict or a list of datasets, one for each task, got "
            f"{type(datasets).__name__}"
        )
    if not found:
        raise ValueError(f"{name} must have at least one task, got none")
    return found
