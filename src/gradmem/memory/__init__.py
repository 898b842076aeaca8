"""What is remembered of each task, and several tasks' memories as one problem."""

from gradmem.memory.episodic import EpisodicMemory, Masks, memory_of
from gradmem.memory.policies import Policy
from gradmem.memory.stack import Stack

__all__ = ["EpisodicMemory", "Masks", "Policy", "Stack", "memory_of"]
