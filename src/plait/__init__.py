"""plait: write the training job for one device, split it any way, prove it is the same training.

The public names are loaded on first use, so that ``plait --help`` never imports torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.blueprint import sketch_of
    from plait.engine import Engine, Step
    from plait.errors import PlaitError
    from plait.job import Evaluate, Job
    from plait.losses import LinearCrossEntropy, linear_cross_entropy
    from plait.plan import Plan
    from plait.wholebatch import global_batch, global_mean

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Evaluate",
    "Job",
    "LinearCrossEntropy",
    "PlaitError",
    "Plan",
    "Step",
    "global_batch",
    "global_mean",
    "linear_cross_entropy",
    "sketch_of",
]

_HOME = {
    "Engine": "plait.engine",
    "Evaluate": "plait.job",
    "Job": "plait.job",
    "LinearCrossEntropy": "plait.losses",
    "Plan": "plait.plan",
    "PlaitError": "plait.errors",
    "Step": "plait.engine",
    "global_batch": "plait.wholebatch",
    "global_mean": "plait.wholebatch",
    "linear_cross_entropy": "plait.losses",
    "sketch_of": "plait.blueprint",
}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
