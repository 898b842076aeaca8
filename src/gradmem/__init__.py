"""Continual learning with exact Gradient Episodic Memory.

>>> import gradmem as gm
>>> continuum = gm.mnist_rotations(n_tasks=3, examples_per_task=200, data="sample")
>>> result = gm.run(gm.GEM(gm.mlp(), lr=0.1, memories=50, margin=0.5), continuum)
>>> result.R.shape
(3, 3)
"""

from gradmem import networks
from gradmem.benchmarks import (
    Benchmark,
    cifar100_incremental,
    mnist_composed,
    mnist_permutations,
    mnist_rotations,
)
from gradmem.checkpoint import CheckpointError
from gradmem.data import DataError, Images
from gradmem.evaluation import (
    Callback,
    Progress,
    Result,
    TransferMetrics,
    accuracy,
    run,
    transfer_metrics,
)
from gradmem.gradient_memory import GradientMemory
from gradmem.learners import (
    AGEM,
    ER,
    EWC,
    GEM,
    MEGA,
    MER,
    DERpp,
    Every,
    ICaRL,
    Independent,
    LaMAML,
    Learner,
    Multimodal,
    RisingLoss,
    Single,
    SoftGEM,
    SteadyGEM,
)
from gradmem.memory import EpisodicMemory
from gradmem.networks import mlp, resnet18
from gradmem.projection import project, solve_dual
from gradmem.reports import report
from gradmem.runs.compare import compare
from gradmem.streams import Continuum, DatasetExamples, Examples, Task
from gradmem.sweeps import sweep
from gradmem.version import __version__

__all__ = [
    "AGEM",
    "ER",
    "EWC",
    "GEM",
    "MEGA",
    "MER",
    "Benchmark",
    "Callback",
    "CheckpointError",
    "Continuum",
    "DERpp",
    "DataError",
    "DatasetExamples",
    "EpisodicMemory",
    "Every",
    "Examples",
    "GradientMemory",
    "ICaRL",
    "Images",
    "Independent",
    "LaMAML",
    "Learner",
    "Multimodal",
    "Progress",
    "Result",
    "RisingLoss",
    "Single",
    "SoftGEM",
    "SteadyGEM",
    "Task",
    "TransferMetrics",
    "__version__",
    "accuracy",
    "cifar100_incremental",
    "compare",
    "mlp",
    "mnist_composed",
    "mnist_permutations",
    "mnist_rotations",
    "networks",
    "project",
    "report",
    "resnet18",
    "run",
    "solve_dual",
    "sweep",
    "transfer_metrics",
]
