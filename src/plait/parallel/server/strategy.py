"""A server and groups that do not wait for each other (outer_sync=async): gradients arrive at any time, within a bound on staleness.

What it does
    A server has the weights and the optimizer. Each group receives the weights and a *portion* of the next samples. It
    computes the gradient of that portion, sends it, and requests the next. A *clock* is the samples of one step,
    `Job.batch` of them. With `server_update=clock`, the server waits for the gradients of a clock. Then it takes one
    step of the job's own optimizer on their weighted sum, which is clipped once. With `server_update=nesterov`, it
    takes a step for every gradient, by delayed Nesterov with the momentum of the job's SGD. Each gradient is clipped
    separately. The weights of a gradient may be up to `staleness` versions old. If a group fails, it is left out or
    restarted, and its samples are assigned to other groups.

Picture
    server   v0 ───────────► v1 ────► v2 ──────────────► v3        a version per clock
    group 0  ▓▓▓ ▓▓▓ ▓▓▓     ▓▓▓ ▓▓▓ ▓▓▓ ▓▓▓                       fast: takes more portions
    group 1  ▓▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓▓▓                    slow: takes fewer, blocks no group within the bound

Costs
    Memory: each group has a model, its gradients and activations, and no optimizer state. `servers=P` processes have
    the weights and the optimizer state in host memory, a P-th each. Traffic: for each portion of every group, the
    server receives a gradient and sends the weights. With N groups, and so N portions per clock, the link carries 2 N
    times the parameters' bytes per clock, divided by P servers. Samples to a given loss: a stale gradient improves the
    loss less. With `staleness=0`, the training is that of one device (conditions below).

Choose when
    Devices have different speeds, or join and leave, and one slow or lost device must not block the others.

Avoid when
    All devices are equal: dp sends less, its devices hardly wait for each other, and no gradient is stale. On slow
    links, local steps (`outer_sync=local` or `diloco`) send far less.

How it stays exact
    Every used gradient has a row in the *ledger*: its samples, the version that it was computed at, and the version
    that used it. The training is a function of the job and its ledger, and one process can replay it (`plait verify`
    does). A group computes nothing that would exceed the bound. Portions come from one queue, in the order of one
    device, and dropout is keyed by a sample's place in its clock. So with `server_update=clock`, no quorum and
    `staleness=0`, the ledger *is* the training of one device. Batch normalization sees a portion. Its running
    statistics are the server's, and each portion's change of them counts by its weight. Evaluation and checkpoints use
    the server's weights.

Paper
    Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NeurIPS); Chen et
    al. 2016, Revisiting Distributed Synchronous SGD, for the quorum; Liu et al. 2024, Asynchronous Local-SGD Training
    for Language Modeling, for delayed Nesterov.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel

AXIS = None
EXACT = False


def is_enabled(plan: Plan) -> bool:
    return plan.server_count > 0


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.replica_groups > batch:
        why = f"{batch} samples for {plan.replica_groups} groups: {plan.replica_groups - batch} groups would never get a portion"
        fix = (f"replica_groups={batch}", f"--batch {plan.replica_groups}")
        yield Problem(
            "P060", f"global batch {batch} is smaller than replica_groups={plan.replica_groups}", why=why, fix=fix
        )
    portion = batch // max(1, plan.replica_groups)
    if plan.microbatches > max(1, portion):
        why = (
            f"{batch} samples in {plan.replica_groups} portions: {portion} samples each, for {plan.microbatches} micro-batches"
        )
        yield Problem(
            "P014",
            "a portion has fewer samples than micro-batches",
            why=why,
            fix=(f"microbatches={max(1, portion)}",),
        )
    yield from _check_server_keys(plan)


def _check_server_keys(plan: Plan) -> Iterable[Problem]:
    """Reject keys that have no effect with a server."""
    if plan.quorum > plan.replica_groups:
        why = f"a clock has {plan.replica_groups} portions, one for each group"
        yield Problem(
            "P060",
            f"quorum={plan.quorum} exceeds the number of gradients per clock",
            why=why,
            fix=(f"quorum={plan.replica_groups - 1}", "quorum=0    wait for all"),
        )
    if plan.quorum and plan.server_update == "nesterov":
        what = "quorum has no effect under server_update=nesterov, which updates at every gradient"
        yield Problem("P060", what, fix=("remove quorum", "server_update=clock"))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    if plan.staleness:
        yield f"gradients may be computed with weights that are up to {plan.staleness} versions old"
    if plan.quorum:
        yield f"the server updates after the first {plan.quorum} of a clock's {plan.replica_groups} gradients"
    if plan.server_update == "nesterov":
        yield "the server updates at every gradient, by delayed Nesterov"
    if plan.server_update == "clock" and plan.staleness == 0 and plan.quorum == 0:
        for name in (*sketch.batch_norms, *sketch.batch_coupled):
            yield f"batch statistics in {name} are those of a portion of the batch, because groups do not wait for each other"


def apply(split: SplitModel) -> SplitModel:
    """Return the model unchanged: a group trains like one device, and the server is a separate process
    (`engine/server/`)."""
    return split
