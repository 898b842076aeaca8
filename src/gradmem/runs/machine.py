"""The machine that runs are made on."""

from gradmem.evaluation.machine import cores, processor

__all__ = ["cores", "processor"]
