"""The terminal that all commands write to."""

from __future__ import annotations

from rich.console import Console

from gradmem.runs.read_folder import printable

__all__ = ["console", "say", "shown"]

console = Console()


def say(line: str) -> None:
    """Print a line, or several, as it is but for control characters: paths may look like markup."""
    console.print(shown(line), highlight=False, markup=False, emoji=False, soft_wrap=True)


def shown(text: str) -> str:
    """Text, of one line or several, without characters that could steer a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))
