"""The command `gradmem`."""

from gradmem.cli.app import main

__all__ = ["main"]
