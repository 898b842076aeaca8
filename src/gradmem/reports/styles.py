"""The colour, mark and pattern of each learner, the same in all pictures and on the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle

from gradmem.learners import LEARNERS

__all__ = ["VARIANTS", "Style", "Variant", "paler", "styles"]


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


@dataclass(frozen=True)
class Variant:
    """What tells a learner's rows from each other: line, mark and bar, each without a colour.

    `line` is Matplotlib's name and `dash` Plotly's; `open` and `dotted` are the mark's; `shade` is
    how far the bar's colour is on its way to white, and `ruled` whether it has dark lines on it.
    """

    line: str
    dash: str
    open: bool
    dotted: bool
    shade: float
    ruled: bool


#: A learner's first row, its second and so on.
VARIANTS = (
    Variant("-", "solid", open=False, dotted=False, shade=0.0, ruled=False),
    Variant("--", "dash", open=True, dotted=False, shade=0.35, ruled=False),
    Variant(":", "dot", open=False, dotted=True, shade=0.6, ruled=False),
    Variant("-.", "dashdot", open=True, dotted=True, shade=0.8, ruled=False),
    Variant("-", "solid", open=True, dotted=False, shade=0.2, ruled=True),
    Variant("--", "dash", open=False, dotted=False, shade=0.45, ruled=True),
    Variant(":", "dot", open=True, dotted=True, shade=0.65, ruled=True),
    Variant("-.", "dashdot", open=False, dotted=True, shade=0.85, ruled=True),
)


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
    """A style for each name: by its place in `LEARNERS`; other names have what is left over.

    There are fewer styles than learners: of two that have the same place, the second has what is
    left over, too, and when nothing is, a known shape in another colour.

    Examples
    --------
    >>> styles(["gem"])["gem"].marker
    'o'
    """
    known, names = list(LEARNERS), set(learners)
    found: dict[str, Style] = {}
    for i, name in enumerate(known):
        style = _STYLES[i % len(_STYLES)]
        if name in names and style not in found.values():
            found[name] = style
    left = [style for style in reversed(_STYLES) if style not in found.values()]
    left += [
        replace(style, colour=_STYLES[(i + turn) % len(_STYLES)].colour)
        for turn in range(1, len(_STYLES))
        for i, style in enumerate(_STYLES)
    ]
    return found | dict(zip(sorted(names - set(found)), cycle(left), strict=False))
