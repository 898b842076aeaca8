"""What was published, by the paper and by others on its streams, as numbers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["appendix_b", "board", "grids", "settings", "tables"]


@cache
def appendix_b() -> dict[str, dict[str, dict[str, Any]]]:
    """Appendix B: benchmark → learner → its `baseline`, `R`, and the metrics `printed` below them.

    The printed BWT and FWT divide by T where equations 3 and 4 divide by T − 1.

    Examples
    --------
    >>> published = appendix_b()["mnist-rotations"]["gem"]
    >>> len(published["R"]), published["printed"]["acc"]
    (20, 0.8607)
    """
    return _read("appendix_b.json")  # type: ignore[no-any-return]


@cache
def board() -> list[dict[str, Any]]:
    """ACC of the learners on the board, where it was published for a column of it.

    Each has `benchmark`, `memories` (None for learners whose memory does not depend on the column),
    `entry`, `acc` with so many `digits`, `source`, what `differs` from the runs made here, and
    whether it is `compared` in spite of that.

    Examples
    --------
    >>> [found["acc"] for found in board() if found["entry"] == "mer" and found["memories"] == 5120]
    [0.896, 0.855]
    """
    return _read("board.json")  # type: ignore[no-any-return]


@cache
def grids() -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Appendix A: benchmark → learner → setting → the values that were tried.

    What is not named there (how many memories, say) is as in the best values.
    "finetune" is called `start` here, GEM's γ `margin`, iCaRL's regularization `distillation` and
    its memory size `budget`.

    Examples
    --------
    >>> grids()["mnist-rotations"]["independent"]["start"]
    ['copy', 'random']
    """
    return _read("grids.json")  # type: ignore[no-any-return]


@cache
def settings() -> dict[str, dict[str, Any]]:
    """The experiments behind Appendix B: benchmark → its sizes, and `learners` → best settings.

    Examples
    --------
    >>> settings()["mnist-rotations"]["examples_per_task"]
    1000
    >>> settings()["mnist-rotations"]["learners"]["gem"]
    {'lr': 0.1, 'memories': 256, 'margin': 0.5, 'margin_rule': 'shift'}
    """
    return _read("settings.json")  # type: ignore[no-any-return]


@cache
def tables() -> dict[str, Any]:
    """Tables 1 to 3, as printed.

    "table-1": benchmark → learner → seconds. "table-2": learner → examples remembered in all → ACC.
    "table-3": learner, or "single, shuffled data" → epochs → metric → value.

    Examples
    --------
    >>> tables()["table-3"]["gem"]["5"]
    {'acc': 0.89, 'bwt': -0.02}
    """
    return _read("tables.json")  # type: ignore[no-any-return]


def _read(name: str) -> Any:
    return json.loads(files("gradmem.published").joinpath(name).read_text("utf-8"))
