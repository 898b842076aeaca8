"""What the paper published, as numbers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["appendix_b", "grids"]


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
    text = files("gradmem.paper").joinpath("appendix_b.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


@cache
def grids() -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Appendix A: benchmark → learner → setting → the values that were tried.

    What is not named there (how many memories, say) is as in the best values, `gradmem.recipes`.
    "finetune" is called `start` here, GEM's γ `margin`, iCaRL's regularization `distillation` and
    its memory size `budget`.

    Examples
    --------
    >>> grids()["mnist-rotations"]["independent"]["start"]
    ['copy', 'random']
    """
    text = files("gradmem.paper").joinpath("grids.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]
