"""A small language model that learns five formal languages, one after another.

    python -m benchmarks.languages [--device cuda] [--workers 6] [--out FOLDER]

A word of a language is a name, 8 random letters of 8, "=", and what follows from them: the same
letters (copy), the letters from the last to the first (reverse), in their order (sort), their sums
modulo 8 (sums), or, in words whose letters are four kinds of brackets, those that close what is
open, and an end (brackets). All is made here, with the same letters in all languages. What follows
is predicted token by token, each from all before it; R holds the share of these tokens that are
right, in words that were not learned. The tokens before "=" are random, and are not predicted.

The model is a decoder of two layers, written below, trained from its first weights by AdamW in one
pass. Compared are fine-tuning, replay, A-GEM, and GEM that constrains gradients or updates, with
equal memories. The rate of each, and GEM's margin, are those with the highest ACC on a fifth of the
training examples that was not learned, with another seed than the results. Writes languages.json
and languages.md. One thread per process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradmem as gm
from benchmarks.measure import machine
from gradmem.reports.summary import Estimate

LETTERS, LENGTH = 8, 8
EQUALS, END = LETTERS, LETTERS + 1
#: What is not predicted; cross-entropy leaves it out.
IGNORED = -100
TEST = 1000
BATCH_SIZE = 32
#: Seed of the data on which settings are chosen; the results have others.
SEARCH_SEED = 1000
RATES = (0.0003, 0.001, 0.003)
MARGINS = (0.0, 0.5)


def brackets(letters: Tensor) -> Tensor:
    """What closes the open brackets, and an end: (n, 8). 0 to 3 open, and 4 to 7 close them.

    Letters (n, 8) are changed in place so that each opens a bracket or closes the innermost one.
    """
    rows = []
    for word in letters.tolist():
        opened: list[int] = []
        for i, letter in enumerate(word):
            if letter >= LETTERS // 2 and opened:
                word[i] = opened.pop() + LETTERS // 2
            else:
                word[i] = letter % (LETTERS // 2)
                opened.append(word[i])
        closing = [one + LETTERS // 2 for one in reversed(opened)]
        rows.append(word + (closing + [END] + [IGNORED] * LENGTH)[:LENGTH])
    made = torch.tensor(rows)
    letters.copy_(made[:, :LENGTH])
    return made[:, LENGTH:]


#: Name → what follows from letters (n, 8): (n, 8). In the order in which they are learned.
LANGUAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": torch.clone,
    "reverse": lambda letters: letters.flip(1),
    "sort": lambda letters: letters.sort(1).values,
    "sums": lambda letters: letters.cumsum(1) % LETTERS,
    "brackets": brackets,
}
VOCABULARY = END + 1 + len(LANGUAGES)


def words(name: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens x: (n, 17), and after each the next one, y: (n, 17), where it is determined."""
    letters = torch.randint(LETTERS, (n, LENGTH), generator=generator)
    answer = LANGUAGES[name](letters)
    first = torch.full((n, 1), END + 1 + list(LANGUAGES).index(name))
    x = torch.cat([first, letters, torch.full_like(first, EQUALS), answer[:, :-1]], 1)
    y = torch.cat([torch.full((n, LENGTH + 1), IGNORED), answer], 1)
    return x.where(x != IGNORED, END), y


def languages(examples: int, seed: int) -> gm.Continuum:
    """The five tasks; words of test sets are in no training set."""
    tasks = []
    for k, name in enumerate(LANGUAGES):
        generator = torch.Generator().manual_seed(1000 * seed + k)
        x, y = words(name, TEST + examples, generator)
        test, known = (x[:TEST], y[:TEST]), {tuple(row) for row in x[:TEST].tolist()}
        new = torch.tensor([tuple(row) not in known for row in x.tolist()])
        tasks.append(gm.Task(name, (x[new], y[new]), test, label=name))
    return gm.Continuum(tasks, batch_size=BATCH_SIZE, seed=seed)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a hidden layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.hidden = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.hidden(x)


class Decoder(nn.Module):
    """Tokens (n, s) → logits of the next ones: (n, vocabulary, s)."""

    def __init__(self, seed: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(2 * LENGTH + 1, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
            self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
            for embedding in (self.tokens, self.places):
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        h = self.blocks(self.tokens(x) + self.places(places))
        return self.logits(self.norm(h)).mT


class Replay(gm.Learner):
    """Learns from each mini-batch together with all that is remembered of other tasks.

    The batch and each task's memories weigh the same.
    """

    def __init__(self, network: nn.Module, *, memories: int, **common: Any) -> None:
        super().__init__(network, **common)
        self.memory = gm.EpisodicMemory(memories)

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> Tensor | None:
        past = [self.memory[k] for k in self.memory if k != t]

        def step(x: Tensor, y: Tensor, *remembered: Tensor) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            pairs = zip(remembered[::2], remembered[1::2], strict=True)
            losses = [self.loss(x, t, y), *(self.loss(x_k, t, y_k) for x_k, y_k in pairs)]
            loss = torch.stack(losses).mean()
            loss.backward()
            self.descend(loss, self.optimizer)
            return (losses[0].detach(),)

        loss = self.take(len(past), t, step, x, y, *chain.from_iterable(past))
        self.memory.put(x, t, y)
        return loss


Make = Callable[..., gm.Learner]
#: Name → the learner, and whether it has a margin.
LEARNERS: dict[str, tuple[Make, bool]] = {
    "fine-tuning": (lambda network, memories, **common: gm.Single(network, **common), False),
    "replay": (Replay, False),
    "A-GEM": (partial(gm.AGEM, sample=None), False),
    "GEM, gradient": (partial(gm.GEM, constrain="gradient"), True),
    "GEM, update": (partial(gm.GEM, constrain="update"), True),
}


def decided(outputs: Tensor) -> Tensor:
    return outputs.argmax(1)


def right(prediction: Tensor, y: Tensor) -> Tensor:
    """The share of each word's determined tokens that are predicted: (n,)."""
    counts = y != IGNORED
    return ((prediction == y) & counts).sum(1) / counts.sum(1)


@dataclass(frozen=True)
class Job:
    """One run."""

    learner: str
    seed: int
    settings: Mapping[str, float]
    examples: int
    memories: int
    device: str


def run(job: Job, validate: bool = False) -> dict[str, Any]:
    """What a run measured; `validate`: on a fifth of the training examples."""
    torch.set_num_threads(1)
    continuum = languages(job.examples, job.seed)
    if validate:
        continuum = continuum.held_out(0.2)
    settings = {**job.settings}
    rate = settings.pop("lr")
    learner = LEARNERS[job.learner][0](
        Decoder(job.seed).to(job.device),
        memories=job.memories,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.01),
        loss=nn.CrossEntropyLoss(ignore_index=IGNORED),
        decide=decided,
        seed=job.seed,
        **settings,
    )
    try:
        result = gm.run(learner, continuum.to(job.device), score=right)
    except FloatingPointError:  # too high a rate
        return {"acc": 0.0}
    return {
        "R": result.R.round(4).tolist(),
        "acc": result.acc,
        "bwt": result.bwt,
        "learning accuracy": float(np.diag(result.R).mean()),
        "seconds": round(result.seconds_training, 1),
        "gradients": getattr(learner, "gradients", None),
    }


def measured(
    sizes: Mapping[str, Any], learners: Sequence[str], seeds: int, pool: ProcessPoolExecutor
) -> list[dict[str, Any]]:
    """A row for each learner: what was tried and chosen, and what each seed's run measured."""
    tried = [
        Job(name, SEARCH_SEED, settings, **sizes)
        for name in learners
        for lr in RATES
        for settings in (
            [{"lr": lr, "margin": m} for m in MARGINS] if LEARNERS[name][1] else [{"lr": lr}]
        )
    ]
    accs = [one["acc"] for one in pool.map(run, tried, [True] * len(tried))]
    rows = []
    for name in learners:
        own = [(acc, job.settings) for acc, job in zip(accs, tried, strict=True)
               if job.learner == name]  # fmt: skip
        chosen = max(own, key=lambda pair: pair[0])[1]
        searched = [{**settings, "acc": acc} for acc, settings in own]
        rows.append({"learner": name, "settings": dict(chosen), "searched": searched})
    jobs = [Job(row["learner"], s, row["settings"], **sizes) for row in rows for s in range(seeds)]
    found = list(pool.map(run, jobs))
    return [{**row, "runs": found[i * seeds : (i + 1) * seeds]} for i, row in enumerate(rows)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a row per learner: means over seeds ± 95% intervals."""
    heads = ["learner", "rate", "margin", "ACC", "BWT", "learning accuracy"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["learner"], *(f"{row['settings'].get(key, '–')}" for key in ("lr", "margin"))]
        for name, spec in (("acc", ".3f"), ("bwt", "+.3f"), ("learning accuracy", ".3f")):
            cells.append(Estimate.of([one[name] for one in row["runs"]]).format(spec))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def matrices(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: R of each learner, the mean over seeds."""
    heads = " | ".join(LANGUAGES)
    lines = [f"| learner | after | {heads} |", "|---" * (2 + len(LANGUAGES)) + "|"]
    for row in rows:
        R = np.mean([one["R"] for one in row["runs"]], 0)
        for i, (name, scores) in enumerate(zip(LANGUAGES, R, strict=True)):
            cells = [f"{score:.3f}" for score in scores]
            lines.append(f"| {'' if i else row['learner']} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--learners", nargs="+", default=list(LEARNERS), choices=LEARNERS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=20_000, help="of each language")
    parser.add_argument("--memories", type=int, default=64, help="words of each language")
    parser.add_argument("--out", type=Path, default=Path("results/languages"))
    given = parser.parse_args()
    sizes = {name: getattr(given, name) for name in ("examples", "memories", "device")}
    # Not forked: a process that has used a GPU cannot be.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        rows = measured(sizes, given.learners, given.seeds, pool)
    given.out.mkdir(parents=True, exist_ok=True)
    about = {**sizes, "seeds": given.seeds, "machine": machine(given.device)}
    text = json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    (given.out / "languages.json").write_text(text, "utf-8")
    page = f"{table(rows)}\n{matrices(rows)}"
    (given.out / "languages.md").write_text(f"{page}\n{about['machine']}\n", "utf-8")
    print(page)


if __name__ == "__main__":
    main()
