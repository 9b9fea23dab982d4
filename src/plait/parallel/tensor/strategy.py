"""Tensor parallelism (tp): every layer is cut into slices, and every process computes one slice of each.

What it does
    In a block, some linear maps (query, key, value; gate, up) feed another (output; down) and nothing else. The first
    are cut by their output features, the last by its input features: a process has its own attention heads, its own
    part of the hidden features, and at the end a share of a sum. One sum over the processes per such pair, forward and
    backward, is all that travels. Which maps go together is found by following tensors through the model's own code,
    proposed, and checked in float64 before it is believed (`parallel/tensor/find/finder.py`); what finds no slices stays whole and is named
    by `plait plan --show tensor`. Embeddings and heads are cut by rows of the vocabulary.
    What lies between the cuts (norms, dropout, residuals) would be computed alike on every process. With
    `sequence_parallel`, the default, each has its own stretch of the sequence there: it is gathered where a pair begins,
    and instead of the whole sum a process gets its rows of it. Which blocks work row by row between their pairs is
    checked in float64 too (`parallel/tensor/sequence/check.py`); others stay as they are, and are named with the reason. An embedding that such a
    block follows, though positions are added or values dropped in between, is summed to stretches too (`parallel/tensor/sequence/runtime.py`).
    With `async_tp`, a gather and the products of `nn.Linear` columns after it are one operator of torch's symmetric memory on
    GPUs, and so are a row's product and the sum: parts are multiplied while others travel (`parallel/tensor/sequence/async_tp.py`).

Picture
    rank 0   x ─┬─ q₀ k₀ v₀ ── attention of its heads ── o₀ ─┐       ┌─ gate₀ up₀ ── down₀ ─┐
                │                                            Σ ─ x ─┤                      Σ ─ x
    rank 1   x ─┴─ q₁ k₁ v₁ ── attention of its heads ── o₁ ─┘       └─ gate₁ up₁ ── down₁ ─┘

    and on stretches

    rank 0   x₀ ─ norm ─ all rows ─ q₀ k₀ v₀ ── o₀ ─┐ x₀ ─ norm ─ all rows ─ gate₀ up₀ ── down₀ ─┐ x₀
                                                    Σ                                           Σ      each gets its rows
    rank 1   x₁ ─ norm ─ all rows ─ q₁ k₁ v₁ ── o₁ ─┘ x₁ ─ norm ─ all rows ─ gate₁ up₁ ── down₁ ─┘ x₁

Costs
    Memory: parameters, gradients and optimizer state of what is cut / N, and so are the activations between the cuts;
    on stretches, those outside of them as well.
    Traffic: an all-reduce of batch × sequence × width per pair, in forward and in backward, that nothing hides but
    `async_tp`: it needs the fastest links there are. Stretches send the same: a gather and a scattered sum make one all-reduce.

Choose when
    A layer, or the activations of one sample, do not fit on a device; or the batch is too small for more copies.

Avoid when
    The links between the devices are slow, or the layers narrow: a slice of a small matrix is computed slowly.

How it stays exact
    The forward pass is right by algebra once the check holds. Gradients of what enters a pair are summed over the
    processes once; so are those of whole parameters used inside one (norms on heads). A row's bias is added by the
    first process alone. What all processes compute alike (norms between, the loss) is the same bit by bit on all, and
    counts once in the norm. Dropout inside a slice draws that slice of the whole mask, on a stretch that stretch. A
    parameter used on stretches has a share of its gradient on each process; they are added up once. An optimizer
    that looks at whole tensors (LAMB, LARS, Adafactor, Muon) is found by trying it; each tensor is updated by an owner then
    (`parallel/whole_tensors.py`).

Paper
    Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022, Reducing Activation Recomputation, for stretches between.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import Reduce, ShardPlan, Split
from plait.parallel.tensor import wiring
from plait.parallel.tensor.sequence.async_tp import check_peers
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits
from plait.parallel.tensor.wiring import SlicedDraws, wire

AXIS = "tp"
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.tp > 1


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Slices of layers. What no slice is of has the same gradient on all ranks; kernels of a GPU may add it up in another order on
    each, and replicas would drift apart unseen, so it is averaged there."""
    slices, found = {cut.parameter: cut for cut in sketch.cuts}, dict(table.specs)
    share = Reduce(("tp",), "sum", "used between slices, or on shards of the sequence: each has its share")
    mean = Reduce(("tp",), "mean", "the same on all, but kernels may round differently")
    for name, spec in found.items():
        if name in slices:
            split = Split(("tp",), (len(slices[name].ranges),), slices[name].dim, slices[name].ranges)
            spec, sets = spec.split(split), tuple(one for one in split.same() if len(one) > 1)
            same = Reduce(("tp",), "sum", "they have the same slice, and each uses it for its own heads", sets)
            found[name] = spec.reduced(same) if sets else spec
        elif name in sketch.shares:
            found[name] = spec.reduced(share)
        elif not table.same_kernels and not spec.expert:
            found[name] = spec.reduced(mean)
    return replace(table, specs=found)


def apply(split: SplitModel) -> SplitModel:
    rank = split.mesh.at["tp"]
    torch.backends.mha.set_fastpath_enabled(False)  # it reads weights past the modules that hold them
    model, units, slices = split.module, [unit.name for unit in split.sketch.units], split.sketch.slices
    stretches = tuple(one for one in slices.stretches if one.unit in units)
    slices = replace(slices, stretches=stretches, owed=tuple(name for name in slices.owed if name in units))
    heads = wiring.vocabulary_held(model, wiring.vocabulary_heads(model, slices), split.params)
    parallel_units = SequenceParallelUnits(model, slices, split.mesh.group("tp"))
    if split.plan.async_tp:
        check_peers(split.device, rank, split.plan.tp)
    regions, own = wire(model, split.sketch, split.params, split.mesh.group("tp"), parallel_units, split.plan.async_tp)
    parallel_units.wrap()
    split.randomness.rules.append(parallel_units)
    split.hooks.optimizer_created.append(lambda _: parallel_units.install(units, heads))
    split.randomness.rules.append(SlicedDraws(regions, rank, split.plan.tp))
    return replace(split, params={**split.params, **own}, sketch=split.sketch.local(rank))
