"""Tensor parallelism (tp): every layer is split into slices, and every rank computes one slice of each.

What it does
    In a block, some linear layers (query, key, value; gate, up) feed one other layer (output; down) and nothing else.
    The first are *column layers*, sharded by their output features. The last is a *row layer*, sharded by its input
    features. Each rank has its own attention heads or hidden features, and its output of the row layer is a partial
    sum. The code from the column layers to their row layer is a *region*. The only messages are one all-reduce per
    region in forward and one in backward. plait finds regions by following tensors through the model's own code, and
    checks each of them in float64 before it is used (`parallel/tensor/find/finder.py`). Layers without slices stay
    replicated, and `plait plan --show tensor` names them. Embeddings and heads are sharded by rows of the vocabulary.

    The code between regions (norms, dropout, residuals) would compute the same on every rank. With `sequence_parallel`,
    the default, each rank has a sequence shard there. An all-gather at the start of a region collects all rows, and a
    reduce-scatter at its end gives each rank the rows of its shard. plait also checks in float64 which blocks compute
    each row separately between their regions (`parallel/tensor/sequence/replayed_unit.py`). The other blocks keep full
    sequences, and plait names each of them with the reason. If an embedding precedes such a block, its partial sums are
    reduce-scattered to sequence shards too. Positions may be added or values dropped in between
    (`parallel/tensor/sequence/runtime.py`).

    With `async_tp` on GPUs, an all-gather and the products of the `nn.Linear` column layers after it are one operator
    of torch's symmetric memory. The product of a row layer and its reduce-scatter are one operator too. Each multiplies
    some parts while others are in transfer (`parallel/tensor/sequence/async_tp.py`).

Picture
    rank 0   x ─┬─ q₀ k₀ v₀ ── attention of its heads ── o₀ ─┐       ┌─ gate₀ up₀ ── down₀ ─┐
                │                                            Σ ─ x ─┤                      Σ ─ x
    rank 1   x ─┴─ q₁ k₁ v₁ ── attention of its heads ── o₁ ─┘       └─ gate₁ up₁ ── down₁ ─┘

    and on sequence shards

    rank 0   x₀ ─ norm ─ all rows ─ q₀ k₀ v₀ ── o₀ ─┐ x₀ ─ norm ─ all rows ─ gate₀ up₀ ── down₀ ─┐ x₀
                                                    Σ                                           Σ      each gets its rows
    rank 1   x₁ ─ norm ─ all rows ─ q₁ k₁ v₁ ── o₁ ─┘ x₁ ─ norm ─ all rows ─ gate₁ up₁ ── down₁ ─┘ x₁

Costs
    Memory: parameters, gradients and optimizer state of the sharded layers / N, and activations inside regions / N.
    With sequence shards, the activations between regions are / N as well. Traffic: an all-reduce of batch × sequence ×
    width per region, in forward and in backward. Only `async_tp` hides it, so `tp` needs the fastest links of the
    machine. Sequence shards send the same bytes: an all-gather and a reduce-scatter make one all-reduce.

Choose when
    A layer, or the activations of one sample, do not fit on a device. Or the batch is too small for more replicas.

Avoid when
    The links between the devices are slow, or the layers are narrow: a device computes a slice of a small matrix
    slowly.

How it stays exact
    If the check passes, forward is right by algebra. The gradients of a region's inputs are summed over the ranks once.
    So are those of replicated parameters that a region uses (norms on heads). Only the first rank adds the bias of a
    row layer. What all ranks compute alike (norms between regions, the loss) is equal on all of them, bit for bit. It
    counts once in the gradient norm. Dropout in a slice draws that slice of the full mask, and on a sequence shard the
    rows of that shard. On sequence shards, each rank has a part of a replicated parameter's gradient, and the parts are
    summed once. Some optimizers need full tensors (LAMB, LARS, Adafactor, Muon). plait finds them by a test, and then
    an owner updates each tensor (`parallel/tensor_owners.py`).

Paper
    Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022, Reducing Activation Recomputation, for the sequence
    shards.
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
from plait.parallel.tensor.sequence.async_tp import check_peer_access
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits
from plait.parallel.tensor.wiring import SlicedDraws, wire_slices

AXIS = "tp"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.tp > 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Shard layers into slices. Other gradients are equal on all ranks, but GPU kernels may round them differently on
    each. Replicas would then diverge unnoticed, so these gradients are averaged."""
    slices, found = {cut.parameter: cut for cut in sketch.tp_shards}, dict(table.specs)
    share = Reduce(("tp",), "sum", "used between slices, or on sequence shards: each rank has a part of its gradient")
    mean = Reduce(("tp",), "mean", "equal on all ranks, but kernels may round differently")
    for name, spec in found.items():
        if name in slices:
            split = Split(("tp",), (len(slices[name].ranges),), slices[name].dim, slices[name].ranges)
            spec, sets = spec.with_split(split), tuple(one for one in split.find_same_sets() if len(one) > 1)
            same = Reduce(("tp",), "sum", "these ranks have the same slice, and each uses it for its own heads", sets)
            found[name] = spec.with_reductions(same) if sets else spec
        elif name in sketch.partial_gradients:
            found[name] = spec.with_reductions(share)
        elif not table.same_kernels and not spec.expert:
            found[name] = spec.with_reductions(mean)
    return replace(table, specs=found)


def apply(split: SplitModel) -> SplitModel:
    rank = split.mesh.coordinates["tp"]
    torch.backends.mha.set_fastpath_enabled(False)  # it reads weights without calling the modules that have them
    model, units, slices = split.module, [unit.name for unit in split.sketch.units], split.sketch.slices
    stretches = tuple(one for one in slices.sequence_units if one.unit in units)
    slices = replace(slices, sequence_units=stretches, deferred_sums=tuple(name for name in slices.deferred_sums if name in units))
    heads = wiring.filter_local_modules(model, wiring.find_vocabulary_heads(model, slices), split.params)
    parallel_units = SequenceParallelUnits(model, slices, split.mesh.group("tp"))
    if split.plan.async_tp:
        check_peer_access(split.device, rank, split.plan.tp)
    regions, own = wire_slices(model, split.sketch, split.params, split.mesh.group("tp"), parallel_units, split.plan.async_tp)
    parallel_units.wrap_units()
    split.randomness.rules.append(parallel_units)
    split.hooks.optimizer_created.append(lambda _: parallel_units.install_hooks(units, heads))
    split.randomness.rules.append(SlicedDraws(regions, rank, split.plan.tp))
    return replace(split, params={**split.params, **own}, sketch=split.sketch.make_local(rank))
