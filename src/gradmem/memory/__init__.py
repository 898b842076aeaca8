"""What is remembered of each task, and several tasks' memories as one problem."""

from gradmem.memory.episodic import EpisodicMemory, FirstExamples
from gradmem.memory.stack import Stack

__all__ = ["EpisodicMemory", "FirstExamples", "Stack"]
