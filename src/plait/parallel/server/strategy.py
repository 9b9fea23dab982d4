"""A server and groups that do not wait for each other (outer_sync=async): gradients come when they come, and the bound says how late.

What it does
    A server holds the weights and the optimizer. Each group is dealt a portion of the next samples together with the weights,
    computes the gradient of that portion, sends it, and asks for more. `server_update=clock`: when the gradients of a clock, that is of
    `Job.batch` samples, are there, the server takes one step of the job's own optimizer on their weighted sum, clipped as a
    whole. `server_update=nesterov`: it steps at every gradient, by delayed Nesterov with the momentum of the job's SGD; each
    gradient is clipped by itself. A gradient may be computed at weights that are up to `staleness` versions old. A group that dies is
    left out or started again, and its samples are dealt to others.

Picture
    server   v0 ───────────► v1 ────► v2 ──────────────► v3        a version per clock
    group 0  ▓▓▓ ▓▓▓ ▓▓▓     ▓▓▓ ▓▓▓ ▓▓▓ ▓▓▓                       fast: takes more portions
    group 1  ▓▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓▓▓                    slow: takes fewer, holds up nobody within the bound

Costs
    Memory: each group a model, its gradients and activations, no optimizer state; the servers (`servers=P`, in host memory)
    the weights and the optimizer state, a P-th each. Traffic: each gradient out and the weights in, once per portion, for
    every group, at the server: 2 N times the parameters' bytes per clock on its link, over P servers.
    Samples to a loss: stale gradients teach less. One device's training is what staleness=0 gives.

Choose when
    Devices are of unlike speed, or come and go, and one that is slow or lost must not hold up the others.

Avoid when
    All are alike: dp sends less, its devices wait for each other hardly at all, and no gradient is stale. On slow links local
    steps (outer_sync=local or diloco) send far less.

How it stays exact
    Every gradient that is used has a row in the ledger: which samples, computed at which version, used in which. Training is
    a function of the job and its ledger, which one process can play again (`plait verify` does). The bound is
    kept before something is computed. Portions come from one queue in the order of one device, dropout is
    keyed by a sample's place in its clock, so with `server_update=clock`, no quorum and staleness=0 the ledger *is* one device's
    training. Batch normalisation sees a portion; its running statistics are the server's: each portion's change of them
    counts by its weight. Evaluation and checkpoints are of the server's weights.

Paper
    Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NeurIPS); Chen et al. 2016,
    Revisiting Distributed Synchronous SGD, for the quorum; Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling,
    for delayed Nesterov.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel

AXIS = None
EXACT = False


def wanted(plan: Plan) -> bool:
    return plan.server_count > 0


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.replica_groups > batch:
        why = f"{plan.replica_groups} groups, {batch} samples: a clock has no portion for {plan.replica_groups - batch} of them"
        fix = (f"replica_groups={batch}", f"--batch {plan.replica_groups}")
        yield Problem(
            "P060", f"global batch {batch} does not split over replica_groups={plan.replica_groups}", why=why, fix=fix
        )
    portion = batch // max(1, plan.replica_groups)
    if plan.microbatches > max(1, portion):
        why = (
            f"{batch} samples in {plan.replica_groups} portions: {portion} each, for {plan.microbatches} micro-batches"
        )
        yield Problem(
            "P014",
            "a portion does not split into that many micro-batches",
            why=why,
            fix=(f"microbatches={max(1, portion)}",),
        )
    yield from _keys(plan)


def _keys(plan: Plan) -> Iterable[Problem]:
    """Keys that have no meaning beside a server, or none yet."""
    if plan.quorum > plan.replica_groups:
        why = f"a clock has {plan.replica_groups} portions, one for each group"
        yield Problem(
            "P060",
            f"quorum={plan.quorum} gradients never come in one clock",
            why=why,
            fix=(f"quorum={plan.replica_groups - 1}", "quorum=0    all"),
        )
    if plan.quorum and plan.server_update == "nesterov":
        what = "quorum has no meaning under server_update=nesterov, which steps at every gradient"
        yield Problem("P060", what, fix=("leave out quorum", "server_update=clock"))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    if plan.staleness:
        yield f"gradients may be computed at weights that are up to {plan.staleness} versions old"
    if plan.quorum:
        yield f"the server steps on the first {plan.quorum} of a clock's {plan.replica_groups} gradients"
    if plan.server_update == "nesterov":
        yield "the server steps at every gradient, by delayed Nesterov"
    if plan.server_update == "clock" and plan.staleness == 0 and plan.quorum == 0:
        for name in (*sketch.batch_norms, *sketch.batch_coupled):
            yield f"batch statistics in {name} are those of a portion of the batch: groups do not wait for each other"


def apply(split: SplitModel) -> SplitModel:
    """Nothing is wired: a group trains like one device, and the server is a process of its own (`engine/server/`)."""
    return split
