"""The terminal that all commands write to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console", "say"]

console = Console()


def say(line: str) -> None:
    """Print a line as it is: paths may look like markup."""
    console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
