"""The protocol (Algorithm 1), and the metrics of the matrix R that it measures."""

from gradmem.evaluation.callback import Callback, Progress
from gradmem.evaluation.metrics import TransferMetrics, transfer_metrics
from gradmem.evaluation.protocol import run
from gradmem.evaluation.result import Result
from gradmem.evaluation.scores import accuracy

__all__ = [
    "Callback",
    "Progress",
    "Result",
    "TransferMetrics",
    "accuracy",
    "run",
    "transfer_metrics",
]
