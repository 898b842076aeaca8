"""How a learner looks, in every picture and on the page: the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradmem.learners import LEARNERS

__all__ = ["DASHES", "SHADES", "Style", "paler", "styles"]


@dataclass(frozen=True)
class Style:
    """A colour, and a shape and a fill that tell learners apart without it.

    `marker` and `hatch` are Matplotlib's names, `symbol` and `pattern` Plotly's for the same;
    `glyph` is the shape as a character.
    """

    colour: str
    marker: str
    symbol: str
    hatch: str
    pattern: str
    glyph: str


# Colours after Okabe and Ito, which colour-blind people can tell apart; GEM, the sixth, is black.
_STYLES = (
    Style("#e69f00", "v", "triangle-down", "//", "/", "▼"),
    Style("#8c8c8c", "^", "triangle-up", "..", ".", "▲"),
    Style("#56b4e9", "s", "square", "xx", "x", "■"),
    Style("#d55e00", "D", "diamond", "--", "-", "◆"),
    Style("#009e73", "P", "cross", "++", "+", "✚"),
    Style("#1b1b3a", "o", "circle", "", "", "●"),
    Style("#cc79a7", "X", "x", "||", "|", "✖"),
    Style("#0072b2", "p", "pentagon", "\\\\", "\\", "⬟"),
)

#: A learner's first row, its second and so on: Matplotlib's and Plotly's names for the line.
DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))

#: The same for bars: how far a learner's colour is on its way to white.
SHADES = (0.0, 0.35, 0.6, 0.8)


def paler(colour: str, part: float) -> str:
    """The colour "#rrggbb", the given part of the way to white.

    Examples
    --------
    >>> paler("#0080ff", 0.5)
    '#80c0ff'
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * part):02x}" for value in parts)


def styles(learners: Iterable[str]) -> dict[str, Style]:
    """A style for each name: by its place in `LEARNERS`, then for other names in their order.

    Examples
    --------
    >>> styles(["gem"])["gem"].marker
    'o'
    """
    known = list(LEARNERS)
    others = sorted(set(learners) - set(known))
    return {name: _STYLES[i % len(_STYLES)] for i, name in enumerate([*known, *others])}
