"""How much memory the fullest rank of a plan needs, by category: closed forms over a workload, for searching.

What a plan really allocates is found by running it on fake tensors (`plait plan --dry-run`); this takes microseconds.

A search prices tens of thousands of plans, and what tp cuts is not found for each number of ranks, so there is no table (`parallel/spec.py`)
of each plan. Which axes split which parameter is the same for all of them: a workload has it from one table (`from_sketch.sharding`), and
`weights` and `sharded` divide by the numbers of ranks, here alone. The ranks of a plan's table have as much on average
(`tests/unit/test_planner_memory.py`), and where the ranks do not divide a tensor, some have a row more.
"""

from collections.abc import Sequence
from dataclasses import replace

from plait.config.plan import Plan
from plait.planner.from_sketch import Block
from plait.planner.time import Software, item, met

Stage = Sequence[tuple[Block, float]]
"""Blocks of a stage, and how many of each."""


def weights(block: Block, plan: Plan) -> float:
    """Elements of one block's weights on one rank, before fsdp."""
    return block.weights_cut / plan.tp + block.weights - block.weights_cut + block.experts / plan.ep


def sharded(block: Block, plan: Plan) -> float:
    """The same after it. Experts are shared between those ranks of `fsdp` only that `ep` leaves with the same ones."""
    experts = block.experts / plan.ep
    return (weights(block, plan) - experts) / plan.fsdp + experts / plan.expert_shards


def kept(block: Block, plan: Plan, samples: float, software: Software) -> tuple[float, float]:
    """Bytes that one block keeps of a micro-batch, and those that its recomputation needs for a moment."""
    spread = plan.tp if plan.stretched else 1
    scale = samples / plan.cp * item(plan)
    whole = (block.kept_cut / plan.tp + (block.kept - block.kept_cut) / spread) * scale
    whole += (met(plan) - 1) * sum(p.rows * p.inner * p.times for p in block.products if p.experts) * scale
    if plan.precision == "fp8" and not software.portable:
        whole *= EIGHT_BIT
    if plan.recompute == "full" and block.count > 1:
        return block.given / spread / plan.cp * samples * item(plan), whole
    if plan.recompute == "selective":
        whole -= block.kept_selective / plan.tp * scale
    return whole, 0.0


EIGHT_BIT = 0.85
"""Of what is kept, where inputs of 8-bit matmuls are kept in 8 bits. torch keeps them in 16."""


def depth(plan: Plan) -> int:
    """What is kept in parts: as `zero` says, where anything is."""
    return plan.zero if plan.fsdp > 1 or plan.offload == "all" else 0


def memory(
    ranks: Sequence[Sequence[Stage]], plan: Plan, samples: float, live: Sequence[int], software: Software, frozen: float
) -> dict[str, float]:
    """Bytes of the fullest rank by category. `ranks`: the stages of each; `live`: activations of
    stages that each holds at once.

    `frozen` is the share of the weights that is not trained.
    """
    trained = replace(software, gradients=software.gradients * (1 - frozen))
    unlike: dict[object, tuple[Sequence[Stage], int]] = {}
    for k, stages in enumerate(ranks):  # most of them have as many blocks of each kind, and hold as much at once
        alive = live[k % len(live)]
        unlike.setdefault((alive, *(tuple((id(b), n) for b, n in stage) for stage in stages)), (stages, alive))
    found = [_rank(stages, plan, samples, alive, trained) for stages, alive in unlike.values()]
    for categories in found:
        categories["optimizer"] *= 1 - frozen
    return max(found, key=lambda categories: sum(categories.values()))


def _rank(stages: Sequence[Stage], plan: Plan, samples: float, live: float, software: Software) -> dict[str, float]:
    own = sum(weights(b, plan) * n for stage in stages for b, n in stage)
    parts = sum(sharded(b, plan) * n for stage in stages for b, n in stage)
    apart = 0.0 if plan.expert_shards > 1 else 1 / plan.ep  # experts that nobody has a part of are not gathered
    largest = max((weights(b, plan) - b.experts * apart for stage in stages for b, _ in stage), default=0.0)
    pairs = [(kept(b, plan, samples, software), n) for stage in stages for b, n in stage]
    each = sum(now * n for (now, _), n in pairs) / len(stages)
    moment = max((once for (_, once), _ in pairs), default=0.0)
    away = plan.offload == "all"
    zero = depth(plan)
    found = {
        "parameters": ((0.0 if away else parts) if zero == 3 else own) * software.weights,
        "gradients": 0.0 if away else (parts if zero >= 2 else own) * software.gradients,
        "optimizer": 0.0 if plan.offload != "none" else (parts if zero else own) * software.state,
        "activations": each * live + moment,
    }
    if zero == 3:
        found["gathered"] = largest * (2 * item(plan) + software.gradients)
    return found
