"""plait: write the training job for one device, split it any way, prove it is the same training.

The public names are loaded on first use, so that ``plait --help`` never imports torch.
"""

import importlib
from typing import TYPE_CHECKING

from plait.config.version import __version__ as __version__

if TYPE_CHECKING:
    from plait.api import plan, sketch, train, verify
    from plait.config.errors import PlaitError
    from plait.config.job import EMA, Evaluate, Job, TokenBudget
    from plait.config.phases import Phase
    from plait.config.plan import Plan
    from plait.data import orders
    from plait.data.packing import document_mask, packed
    from plait.engine.callbacks import BestCheckpoint, Callback, EarlyStopping, Profile
    from plait.engine.engine import Engine
    from plait.engine.generate import Generate
    from plait.engine.step import Step
    from plait.engine.step_log import log
    from plait.integrations.adapters.keras import from_keras
    from plait.integrations.adapters.lightning import from_lightning
    from plait.integrations.adapters.loop import from_loop
    from plait.integrations.adapters.trainer import from_trainer
    from plait.integrations.export_weights import ExportWeights
    from plait.losses.global_batch import global_batch, global_mean
    from plait.losses.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
    from plait.model.fake_model import sketch_of
    from plait.model.optimizers import CombinedOptimizer
    from plait.model.parameter_groups import layerwise_rates, named, parameter_groups
    from plait.model.pretrained import new_modules, pretrained
    from plait.model.schedule import schedule_of
    from plait.proof.verdict import Verdict
    from plait.report.run import Run

__all__ = [
    "EMA",
    "BestCheckpoint",
    "Callback",
    "CombinedOptimizer",
    "EarlyStopping",
    "Engine",
    "Evaluate",
    "ExportWeights",
    "Generate",
    "Job",
    "LinearCrossEntropy",
    "Phase",
    "PlaitError",
    "Plan",
    "Profile",
    "Run",
    "Step",
    "TokenBudget",
    "Verdict",
    "document_mask",
    "from_keras",
    "from_lightning",
    "from_loop",
    "from_trainer",
    "global_batch",
    "global_mean",
    "layerwise_rates",
    "linear_cross_entropy",
    "log",
    "named",
    "new_modules",
    "orders",
    "packed",
    "parameter_groups",
    "plan",
    "pretrained",
    "schedule_of",
    "sketch",
    "sketch_of",
    "train",
    "verify",
]

_HOME = {
    "BestCheckpoint": "plait.engine.callbacks",
    "Callback": "plait.engine.callbacks",
    "CombinedOptimizer": "plait.model.optimizers",
    "EMA": "plait.config.job",
    "EarlyStopping": "plait.engine.callbacks",
    "Engine": "plait.engine.engine",
    "Evaluate": "plait.config.job",
    "ExportWeights": "plait.integrations.export_weights",
    "Generate": "plait.engine.generate",
    "Job": "plait.config.job",
    "LinearCrossEntropy": "plait.losses.linear_cross_entropy",
    "Phase": "plait.config.phases",
    "PlaitError": "plait.config.errors",
    "Plan": "plait.config.plan",
    "Profile": "plait.engine.callbacks",
    "Run": "plait.report.run",
    "Step": "plait.engine.engine",
    "TokenBudget": "plait.config.job",
    "Verdict": "plait.proof.verdict",
    "document_mask": "plait.data.packing",
    "from_keras": "plait.integrations.adapters.keras",
    "from_lightning": "plait.integrations.adapters.lightning",
    "from_loop": "plait.integrations.adapters.loop",
    "from_trainer": "plait.integrations.adapters.trainer",
    "global_batch": "plait.losses.global_batch",
    "global_mean": "plait.losses.global_batch",
    "layerwise_rates": "plait.model.parameter_groups",
    "linear_cross_entropy": "plait.losses.linear_cross_entropy",
    "log": "plait.engine.step_log",
    "named": "plait.model.parameter_groups",
    "new_modules": "plait.model.pretrained",
    "packed": "plait.data.packing",
    "parameter_groups": "plait.model.parameter_groups",
    "plan": "plait.api",
    "pretrained": "plait.model.pretrained",
    "schedule_of": "plait.model.schedule",
    "sketch": "plait.api",
    "sketch_of": "plait.model.fake_model",
    "train": "plait.api",
    "verify": "plait.api",
}


_MODULES = {"orders": "plait.data.orders"}


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
