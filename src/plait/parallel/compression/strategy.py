"""Compressed sums (compress): copies send their gradients in fewer bytes, and keep what they could not send for the next step.

What it does
    Each rank adds its residual e to its gradient g, sends a compressed C(g + e), and keeps e = g + e − C(g + e). The
    optimizer, and the clipping before it, see the sum of what was sent. `bf16` rounds to 16 bits. `int8` rounds to whole
    numbers from −127 to 127 with one scale for each parameter and rank. `powersgd` sends two thin matrices of
    `compression_rank` columns instead of a matrix; tensors of one dim, and those that thin matrices would not make
    smaller, go as they are. Beside `replica_groups` it is what the groups send each other that is compressed.

Picture
    rank 0   g + e ──► C(g + e) ──┐                      ┌─► sum ─► clip ─► step
               ▲          │       ├─► gathered, added ───┤
               └── e ◄────┘       │   up by every rank   │
    rank 1   g + e ──► C(g + e) ──┘                      └─► sum ─► clip ─► step

Costs
    Bytes that a rank sends in a step, of n numbers among N ranks, beside 8 n (N − 1) / N of the sum in fp32: `bf16`
    2 n (N − 1) and `int8` n (N − 1), because rounded numbers are gathered and do not add up on the way: they are no
    fewer from N = 4 and N = 8 on. `powersgd` 8 r (rows + columns) (N − 1) / N for each matrix
    (`parallel/compression/compressor.py`). Memory: a residual as large as the gradients, once more from the sum to the
    step, and a message of every rank, of 8 MiB or the largest tensor. Sums begin when backward has ended.

Choose when
    The link between copies is slow beside the model: a few nodes over Ethernet. First `int8`, which costs next to no
    loss; `powersgd` where matrices are large and the link is very slow.

Avoid when
    The links are fast, N is large (`bf16`, `int8`), or the training must be that of one device.

How it stays exact
    Against itself: it is another training than one device's, and the same wherever it runs. `plait verify` holds it
    against the algorithm in one process, and says how far that is from one device. The rounding is of each number, or of a whole
    parameter's scale; sums are made in the order of the ranks, in the wide format. The first factors of `powersgd` are keyed by
    seed and parameter. What could make it depend on the layout is refused. Residuals and factors are in checkpoints.

Paper
    Seide et al. 2014, 1-Bit Stochastic Gradient Descent; Karimireddy et al. 2019, Error Feedback Fixes SignSGD;
    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
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


def wanted(plan: Plan) -> bool:
    return plan.grad_compression != "none"


def of_copies(plan: Plan) -> bool:
    """Whether it is the gradients of copies that are compressed, and not what replica groups send each other."""
    return wanted(plan) and plan.replica_groups == 1


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if not of_copies(plan):
        return
    if plan.along(SAME_SLICES) == 1 and plan.processes != "one":
        what = f"grad_compression={plan.grad_compression} has no effect: there are no copies in the plan"
        fix = ("dp=2", "replica_groups=2", "leave out grad_compression")
        yield Problem("P030", what, why="dp=1 and replica_groups=1", fix=fix)


def named(plan: Plan) -> str:
    """What is compressed and how, in a few words: of two plans with the same words the residuals mean the same."""
    if not wanted(plan):
        return ""
    rank = f" of rank {plan.compression_rank}" if plan.grad_compression == "powersgd" else ""
    between = f"{plan.dp} copies" if of_copies(plan) else f"{plan.replica_groups} replica groups"
    return f"{plan.grad_compression}{rank} between {between}"


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    if of_copies(plan):
        yield f"gradients are summed as {named(plan)}, with error feedback: another training than one device's"


def apply(split: SplitModel) -> SplitModel:
    if not of_copies(split.plan):
        return split
    trained = {name: parameter for name, parameter in split.params.items() if parameter.requires_grad}
    made = Compressor(split.plan.grad_compression, trained, split.job.seed, split.plan.compression_rank)
    split.hooks.after_update.append(made.commit)
    return split.using(compressor=made)
