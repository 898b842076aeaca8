"""The continuum of data: examples, tasks, and their order."""

from gradmem.streams.continuum import IID, Continuum, Examples, Task

__all__ = ["IID", "Continuum", "Examples", "Task"]
