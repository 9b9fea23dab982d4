"""plait: write the training job for one device, split it any way, prove it is the same training.

The public names are loaded on first use, so that ``plait --help`` never imports torch.
"""

import importlib
from typing import TYPE_CHECKING

from plait.config.version import __version__ as __version__

if TYPE_CHECKING:
    from plait.config.errors import PlaitError
    from plait.config.job import Evaluate, Job
    from plait.config.plan import Plan
    from plait.engine.engine import Engine, Step
    from plait.losses.global_batch import global_batch, global_mean
    from plait.losses.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
    from plait.model.fake_model import sketch_of

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
    "Engine": "plait.engine.engine",
    "Evaluate": "plait.config.job",
    "Job": "plait.config.job",
    "LinearCrossEntropy": "plait.losses.linear_cross_entropy",
    "Plan": "plait.config.plan",
    "PlaitError": "plait.config.errors",
    "Step": "plait.engine.engine",
    "global_batch": "plait.losses.global_batch",
    "global_mean": "plait.losses.global_batch",
    "linear_cross_entropy": "plait.losses.linear_cross_entropy",
    "sketch_of": "plait.model.fake_model",
}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
