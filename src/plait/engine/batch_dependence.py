"""Whether a model in eval mode computes for a sample something else when other samples come with it.

A batch norm without running statistics, a softmax over the samples, or a mean over them does that. Then an evaluation depends on how
many samples come at once, and so on the plan. It is found by a run on three samples: the third is changed, and what is returned for
the first must stay. Both runs have the same shapes, so a model whose samples do not meet rounds alike in both.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.data import batch as data
from plait.engine import try_metrics
from plait.model.make import BuiltModel
from plait.parallel.precision import forward_format
from plait.parallel.rank_setup import RankSetup
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors.torch_private import BatchNormBase, tree_leaves, tree_map_only

ROUNDINGS, MOST = 1000, 0.05
"""A difference counts from this many roundings of the largest value, or from this share of it."""
LARGEST = 256 << 20
"""Bytes of a model that is run. Of larger ones, layers tell that are known to use the batch."""


def reason(setup: RankSetup, made: BuiltModel) -> str:
    """What of the model uses the batch in eval mode: a phrase, or ""."""
    plan, evaluate, model = setup.plan, setup.job.evaluate, made.model
    if evaluate is None or plan.shares * plan.microbatches * plan.replica_groups == 1:
        return ""
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and module.running_mean is None:
            return f"the batch norm {name} has no running statistics"
    held = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in held) or made.fake is not model or sum(t.nbytes for t in held) > LARGEST:
        return ""
    try:
        with host_kept(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_host(setup.job.seed, "evaluate", 0)
            pair = data.example(evaluate.data, data.opened(evaluate.data, try_metrics.WHERE), try_metrics.WHERE)
            pairs = [setup.moved(data.first_samples(pair, n)) for n in (2, 3)]
            with forward_format(plan, setup.cast, setup.at.type):
                found = _depends(partial(_run, setup, made), pairs, evaluate.metrics)
    except Exception:  # it does not run so, and an evaluation will say why
        return ""
    return "the output for a sample changes with the other samples of its batch" if found else ""


def _run(setup: RankSetup, made: BuiltModel, inputs: object) -> Any:
    """The model's outputs in eval mode, with the same random numbers each time."""
    seed_host(setup.job.seed, "evaluate", 0)
    with try_metrics.unchanged(made.model):
        return setup.call(made.model, inputs)


def _depends(run: Callable[[object], Any], pairs: list[Any], metrics: Callable[[Any, Any], Any]) -> bool:
    """Whether what is returned for the first of three samples depends on the third."""
    (fewer, _), (three, targets) = pairs
    if not _per_sample(fewer, three):
        return False  # it is not known what of the inputs belongs to a sample
    inputs, changed = (tree_map_only(Tensor, partial(_unlike, last=last), three) for last in (False, True))
    few, outputs, again, other = run(fewer), run(inputs), run(inputs), run(changed)
    rows = _first_rows(few, outputs, other)
    if not rows or any(_first_rows(few, outputs, again)):
        return False  # it returns something else each time
    if all(rows) or not any(rows):
        return all(rows)
    values = [metrics(each, targets) for each in (outputs, other)]  # some of what is returned is of all samples by its nature
    return any(_differ(values[0][n][0], values[1][n][0]) for n in values[0] if torch.as_tensor(values[0][n]).dim())


def _per_sample(fewer: object, more: object) -> bool:
    """Whether all tensors have a row for each of two, and of three samples."""
    pairs = list(zip(*([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (fewer, more)), strict=True))
    return bool(pairs) and all(a.dim() and a.shape[0] == 2 and b.shape == (3, *a.shape[1:]) for a, b in pairs)


def _unlike(t: Tensor, last: bool) -> Tensor:
    """Of one sample three times: three samples. `last`: with another third one."""
    other = t.clone()
    if t.is_floating_point() or t.is_complex():
        other[1], other[2] = t[1] * 0.75 - 0.125, t[2] * -0.5 + 0.5 if last else t[2] * 1.5 + 0.25
    elif t.dtype is not torch.bool and t.dim() > 1:
        other[1], other[2] = t[1].roll(1, -1), t[2].flip(-1) if last else t[2]
    return other


def _first_rows(few: object, outputs: object, other: object) -> list[bool]:
    """Of each output that has a row per sample: whether the first row differs."""
    trees = [[t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (few, outputs, other)]
    rows = [t for t in zip(*trees, strict=True) if t[0].dim() and t[0].shape[0] == 2 and t[1].shape[0] == 3]
    return [_differ(a[0], b[0]) for _, a, b in rows if a.is_floating_point()]


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.numel():
        return False
    wide = a.double()
    most = min(ROUNDINGS * torch.finfo(a.dtype).eps, MOST) if a.is_floating_point() else 0.0
    largest = float(wide.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return not torch.allclose(wide, b.double(), 0.0, most * largest, equal_nan=True)
