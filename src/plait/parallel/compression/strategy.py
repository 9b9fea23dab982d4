"""Gradient compression (grad_compression): replicas send fewer bytes, and add the unsent part of a gradient to the next one.

What it does
    Each rank adds its residual e to its gradient g, and sends a compressed C(g + e). It keeps the new residual e = g +
    e − C(g + e). Clipping and the optimizer see the sum of the compressed messages. `bf16` rounds to 16 bits. `int8` rounds
    to integers from −127 to 127, with one scale for each parameter and rank. `powersgd` sends two thin matrices of
    `compression_rank` columns instead of a matrix. It sends tensors of one dim uncompressed, and also matrices that
    would not become smaller. With `replica_groups`, the messages between the groups are compressed.

Picture
    rank 0   g + e ──► C(g + e) ──┐                      ┌─► sum ─► clip ─► step
               ▲          │       ├─► gathered, added ───┤
               └── e ◄────┘       │   up by every rank   │
    rank 1   g + e ──► C(g + e) ──┘                      └─► sum ─► clip ─► step

Costs
    Traffic: an all-reduce in fp32 sends 8 n (N − 1) / N bytes per rank and step, for n values on N ranks. `bf16` sends
    2 n (N − 1) bytes, and `int8` n (N − 1). Rounded values cannot be summed in transfer, so they are gathered: from N =
    4 (`bf16`) and N = 8 (`int8`) on, they save nothing. `powersgd` sends 8 r (rows + columns) (N − 1) / N bytes for
    each matrix, where r is `compression_rank` (`parallel/compression/compressor.py`). Memory: a residual as large as
    the gradients, and as much again from the sum to the step. A message of every rank needs 8 MiB or the size of the
    largest tensor. Time: the sums start only after backward has ended.

Choose when
    The link between replicas is slow for the size of the model, such as a few nodes over Ethernet. Try `int8` first,
    which hardly changes the loss. Choose `powersgd` if matrices are large and the link is very slow.

Avoid when
    The links are fast, N is large (`bf16`, `int8`), or the training result must be that of one device.

How it stays exact
    Compression changes the training result, and the changed result is the same on every layout. `plait verify` compares
    the run with the same algorithm in one process, and prints the difference from one device. The rounding of a value
    depends on this value or on the scale of its full parameter. Sums are computed in the order of the ranks, in the
    wider format. The first factors of `powersgd` are keyed by seed and parameter. plait rejects plans under which the
    result would depend on the layout. Checkpoints contain residuals and factors.

Paper
    Seide et al. 2014, 1-Bit Stochastic Gradient Descent; Karimireddy et al. 2019, Error Feedback Fixes SignSGD; Vogels
    et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.keys import SAME_SLICES
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.compression.compressor import Compressor
from plait.parallel.rank_model import SplitModel

AXIS = None
EXACT = False


def is_enabled(plan: Plan) -> bool:
    return plan.grad_compression != "none"


def is_between_replicas(plan: Plan) -> bool:
    """Whether the gradients between replicas are compressed, and not the messages between replica groups."""
    return is_enabled(plan) and plan.replica_groups == 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if not is_between_replicas(plan):
        return
    if plan.along(SAME_SLICES) == 1 and plan.processes != "one":
        what = f"grad_compression={plan.grad_compression} has no effect: the plan has no replicas"
        fix = ("dp=2", "replica_groups=2", "leave out grad_compression")
        yield Problem("P030", what, why="dp=1 and replica_groups=1", fix=fix)


def describe_compression(plan: Plan) -> str:
    """Describe the compression in a few words. Residuals can be reused between plans with equal descriptions."""
    if not is_enabled(plan):
        return ""
    rank = f" of rank {plan.compression_rank}" if plan.grad_compression == "powersgd" else ""
    between = f"{plan.dp} copies" if is_between_replicas(plan) else f"{plan.replica_groups} replica groups"
    return f"{plan.grad_compression}{rank} between {between}"


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    if is_between_replicas(plan):
        yield f"gradients are summed as {describe_compression(plan)}, with error feedback: this changes the training result"


def apply(split: SplitModel) -> SplitModel:
    if not is_between_replicas(split.plan):
        return split
    trained = {name: parameter for name, parameter in split.params.items() if parameter.requires_grad}
    made = Compressor(split.plan.grad_compression, trained, split.job.seed, split.plan.compression_rank)
    split.hooks.after_update.append(made.commit)
    return split.with_techniques(compressor=made)
