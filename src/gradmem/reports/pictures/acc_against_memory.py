"""ACC against the number of examples remembered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradmem.reports.pictures.figure import (
    add_legend,
    line_look,
    new_figure,
    or_zero,
    save,
    short,
    slug,
    variant_of,
)
from gradmem.reports.styles import Style
from gradmem.reports.summary import MemoryLine

__all__ = ["draw_acc_against_memory"]


def draw_acc_against_memory(
    benchmark: str, lines: Sequence[MemoryLine], look: dict[str, Style], folder: Path
) -> list[Path]:
    """ACC against examples remembered."""
    figure, axes = new_figure(width=7, height=3.6)
    for line in lines:
        estimates = [row.estimate("acc") for row in line.rows]
        axes.errorbar(
            [row.memory for row in line.rows],
            [estimate.mean for estimate in estimates],
            yerr=[or_zero(estimate.half_width) for estimate in estimates],
            markersize=5,
            **line_look(look[line.learner], variant_of(line, lines)),
            capsize=3,
            label=short(line.name),
        )
    axes.set_xscale("log", base=10)
    sizes = sorted({row.memory or 0 for line in lines for row in line.rows})
    if len(sizes) <= 8:
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
    axes.set_title(f"ACC against memory on {short(benchmark)}", wrap=True)
    axes.set_xlabel("examples remembered in all")
    score = lines[0].rows[0].score
    axes.set_ylabel("ACC" if score == "accuracy" else f"ACC ({short(score, 40)})")
    axes.grid(alpha=0.3)
    add_legend(figure, axes)
    return save(figure, folder, f"acc-memory-{slug(benchmark)}")
