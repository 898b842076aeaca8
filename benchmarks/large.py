"""Fine-tuning a language model of GPT-2's size with GEM: time per step and peak memory.

    python -m benchmarks.large [--model gpt2|small] [--device cuda] [--precisions fp32 bf16]

The model is built from its configuration with random weights (transformers must be installed), in
full and with LoRA of rank 8 (peft must be installed). Tokens are random, too: what is measured is
time and memory. A step is one of SGD on a batch; before it, `--tasks` past tasks are remembered,
with `--memories` sequences each. Ways to take it: plain fine-tuning; replay (the batch and all
memories in one pass); A-GEM (one gradient at as many memories as one task has); GEM with G stored,
by a loop over tasks, by one batched pass and by passes of two tasks; and GEM without G ("gram").
Steps of GEM are measured twice: with no constraint
violated, where the gradient that is projected is set to the sum of those at the memories, and with
all of them violated, where it is turned around. Best of `--steps`, after `--warm` others. Memory is
the most that tensors took, with what recorded passes hold for themselves.

Writes large.json and large.md to the folder of `--out`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradmem as gm
from benchmarks.measure import machine

MODELS = {
    "gpt2": {},
    "small": {"vocab_size": 500, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4},
}


class NextToken(nn.Module):
    """Token ids (n, tokens) → scores of the next tokens (n, vocabulary, tokens)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, use_cache=False).logits.mT


def make_model(name: str, lora: int, device: str) -> NextToken:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fused = {"activation_function": "gelu_pytorch_tanh"}  # GPT-2's own, as one kernel
    model = GPT2LMHeadModel(GPT2Config(**MODELS[name], **none, **fused))
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ["c_attn", "c_proj", "c_fc"]
        model = get_peft_model(
            model, LoraConfig(r=lora, target_modules=names, fan_in_fan_out=True, lora_dropout=0.0)
        )
        for parameter in model.parameters():
            if parameter.requires_grad:  # B is zero at first, and so would A's gradient be
                nn.init.normal_(parameter, std=0.02)
    return NextToken(model).to(device)


class Steps:
    """One model, its batches and memories, and the ways to take a step."""

    def __init__(self, given: argparse.Namespace, lora: int, precision: str) -> None:
        self.given, self.precision = given, precision
        self.model = make_model(given.model, lora, given.device)
        vocabulary = self.model.model.config.vocab_size
        draw = torch.Generator().manual_seed(1)
        shape = (given.tasks + 1, given.memories, given.tokens + 1)
        ids = torch.randint(vocabulary, shape, generator=draw).to(given.device)
        self.x, self.y = ids[..., :-1], ids[..., 1:]
        self.weights = [w for w in self.model.parameters() if w.requires_grad]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def batch(self) -> None:
        """The gradient of a batch of the newest task."""
        self.optimizer.zero_grad()
        n = self.given.batch
        self.loss(self.x[-1, :n], self.y[-1, :n]).backward()

    def along(self) -> list[Tensor]:
        """The sum of the gradients at the memories, which goes against none of them."""
        total = [torch.zeros_like(w) for w in self.weights]
        for x, y in zip(self.x[:-1], self.y[:-1], strict=True):
            grads = torch.autograd.grad(self.loss(x, y), self.weights)
            for whole, part in zip(total, grads, strict=True):
                whole += part
        return total

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        kind = self.given.device.split(":")[0]
        bf16 = self.precision == "bf16"
        with torch.autocast(kind, torch.bfloat16) if bf16 else nullcontext():
            return F.cross_entropy(self.model(x).mT.flatten(0, 1), y.flatten())

    def plain(self) -> Callable[[bool], None]:
        def step(turned: bool) -> None:
            self.batch()
            self.optimizer.step()

        return step

    def replay(self) -> Callable[[bool], None]:
        x, y = (part[:-1].flatten(0, 1) for part in (self.x, self.y))

        def step(turned: bool) -> None:
            self.batch()
            self.loss(x, y).backward()
            self.optimizer.step()

        return step

    def agem(self) -> Callable[[bool], None]:
        def step(turned: bool) -> None:
            self.batch()
            reference = torch.autograd.grad(self.loss(self.x[0], self.y[0]), self.weights)
            pairs = [(w.grad, r) for w, r in zip(self.weights, reference, strict=True)]
            product = sum(torch.sum(g * r) for g, r in pairs)
            if product < 0:
                scale = product / sum(r.square().sum() for _, r in pairs)
                for g, r in pairs:
                    g.sub_(scale * r)
            self.optimizer.step()

        return step

    def gem(self, gradients: str, **options: Any) -> Callable[[bool], None]:
        memory = gm.GradientMemory(
            self.model,
            loss=F.cross_entropy,
            memories=self.given.memories,
            gradients=gradients,
            precision=self.precision,
            **options,
        )
        for t in range(self.given.tasks):
            memory.add(self.x[t], t, self.y[t])
        along = self.along()

        def step(turned: bool) -> None:
            self.batch()
            for w, g in zip(self.weights, along, strict=True):
                w.grad.copy_(-g if turned else g)
            memory.project_("now")
            assert memory.last is not None
            assert len(memory.last.violated) == turned * self.given.tasks, memory.last
            self.optimizer.step()

        return step

    def ways(self) -> Iterator[tuple[str, Callable[[], Callable[[bool], None]]]]:
        yield "fine-tuning", self.plain
        yield "replay of all memories", self.replay
        yield "A-GEM", self.agem
        for name in ("loop", "batched"):
            yield f"GEM, G stored, {name}", lambda name=name: self.gem(name)
        pairs = partial(self.gem, "batched", tasks_per_chunk=2)
        yield "GEM, G stored, batched, two tasks at a time", pairs
        yield "GEM, gram", lambda: self.gem("gram")


def measure(
    step: Callable[[bool], None], turned: bool, given: argparse.Namespace
) -> dict[str, Any]:
    cuda = given.device.startswith("cuda")
    for _ in range(given.warm):
        step(turned)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(given.steps):
        start = time.perf_counter()
        step(turned)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() + recorded()) / 1e9 if cuda else float("nan")
    return {"ms": 1e3 * min(times), "peak_GB": peak}


def recorded() -> int:
    """Bytes that CUDA graphs hold for themselves and that count as free outside of them."""
    segments = [part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in segments)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for lora in given.lora:
        for precision in given.precisions:
            steps = Steps(given, lora, precision)
            case = {"parameters": f"LoRA {lora}" if lora else "all", "precision": precision}
            for name, make in steps.ways():
                if given.ways and not any(part in name for part in given.ways):
                    continue
                row: dict[str, Any] = {**case, "way": name}
                try:
                    step = make()
                    row |= measure(step, False, given)
                    if name.startswith("GEM"):
                        row["violated"] = measure(step, True, given)
                except (ValueError, RuntimeError) as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:200]
                step = None  # type: ignore[assignment]
                gc.collect()
                if given.device.startswith("cuda"):
                    torch.cuda.empty_cache()
                print(json.dumps(row), flush=True)
                yield row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| parameters | precision | way | ms a step | of replay | peak, GB | ms, all violated "
        "| of replay | peak, GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    replay: dict[tuple[str, str], float] = {}
    for row in rows:
        case = (row["parameters"], row["precision"])
        if "failed" in row:
            lines.append(f"| {case[0]} | {case[1]} | {row['way']} | {row['failed']} |" + " |" * 5)
            continue
        if row["way"].startswith("replay"):
            replay[case] = row["ms"]
        of = [
            f"{one['ms']:.0f} | {one['ms'] / replay[case]:.2f} | {one['peak_GB']:.1f}"
            if case in replay
            else f"{one['ms']:.0f} | – | {one['peak_GB']:.1f}"
            for one in (row, row.get("violated"))
            if one is not None
        ]
        lines.append(
            f"| {case[0]} | {case[1]} | {row['way']} | {of[0]} | "
            f"{of[1] if len(of) > 1 else '– | – | –'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt2", choices=MODELS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 8], help="ranks; 0 for none")
    parser.add_argument("--ways", nargs="+", default=[], help="parts of their names; all if none")
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--memories", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/large"))
    given = parser.parse_args()
    rows = list(run(given))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "large.json").write_text(json.dumps(rows, indent=1))
    text = f"{table(rows)}\n\n{given.model}, {machine(given.device)}\n"
    (given.out / "large.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
