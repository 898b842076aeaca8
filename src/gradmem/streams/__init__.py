"""The continuum of data: examples, tasks, and their order."""

from gradmem.streams.continuum import IID, Continuum
from gradmem.streams.datasets import DatasetExamples
from gradmem.streams.examples import Examples
from gradmem.streams.task import Task

__all__ = ["IID", "Continuum", "DatasetExamples", "Examples", "Task"]
