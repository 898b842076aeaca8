"""The protocol (Algorithm 1), and the metrics of the matrix R that it measures."""

from gradmem.evaluation.metrics import TransferMetrics, transfer_metrics
from gradmem.evaluation.protocol import Progress, Result, run

__all__ = ["Progress", "Result", "TransferMetrics", "run", "transfer_metrics"]
