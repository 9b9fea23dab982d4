"""The bill: what a plan costs before it runs. Here: the bytes of one rank at the fullest moment of a step, by category.

A micro-batch is rehearsed on fake tensors (`planner/dryrun/rehearsal.py`), the optimizer's step too. To what they allocate come the
charges of the strategies, each from one moment of the step to another, and what one device holds in the categories that
no strategy charges. The fullest moment is found by going through the step. Ranks that are not all alike (stages, slices,
stretches, experts) make that step in a dry run (`planner/dryrun/dry_run.py`).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import batch as data
from plait.data.batch import Share
from plait.engine.build import check_plan, with_open_head
from plait.engine.try_metrics import WHERE
from plait.model.fake_model import sketched
from plait.model.sketch import Sketch
from plait.model.table import aligned, size
from plait.parallel.fsdp.runtime import divides
from plait.parallel.offload import on_host
from plait.parallel.order import Charge, Role
from plait.parallel.order import charges as priced
from plait.parallel.strategy import Moment, held
from plait.planner.dryrun.allocations import Change, Tape
from plait.planner.dryrun.dry_run import DryRun, dry_run
from plait.planner.dryrun.optimizer_step import kept_by, stepped
from plait.planner.dryrun.rehearsal import Rehearsal, rehearse
from plait.tensors.torch_private import tree_leaves

CATEGORIES = (
    "parameters", "gradients", "optimizer", "host copies", "buffers", "batch", "activations", "gathered", "exchange",
    "temporary",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """So many bytes of a category at the fullest moment, and why."""

    category: str
    bytes: int
    reason: str
    host: bool = False
    """In the host's memory, at its own fullest moment."""


@dataclass(frozen=True)
class Bill:
    """What one rank (the first, whose share is the largest; of unlike ranks the fullest) holds at the fullest moment of a step."""

    plan: str
    samples: int
    """Of its largest micro-batch."""
    total: int
    moment: str
    """The named moment that came last."""
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    """What the plan does to memory that is not in the bill."""
    hosted: int = 0
    """Bytes that the host holds for the rank at its own fullest moment; `total` is of the device."""
    together: int = 0
    """Both at once, where device and host are one memory: that of processes."""

    @property
    def categories(self) -> dict[str, int]:
        """Bytes of the device by category, in a fixed order; what is not there is left out."""
        return self.held(False)

    def held(self, host: bool) -> dict[str, int]:
        """Bytes of the device or of its host by category."""
        sums = {c: sum(i.bytes for i in self.items if (i.category, i.host) == (c, host)) for c in CATEGORIES}
        return {c: found for c, found in sums.items() if found}

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"categories": self.categories, "host_categories": self.held(True)}


@dataclass
class Costing:
    """What bills of one job have in common: its sketch, and rehearsals that several plans share."""

    job: Job
    model: nn.Module
    sketch: Sketch
    samples: Any
    done: dict[Any, Rehearsal] = field(default_factory=dict)

    @staticmethod
    def of(job: Job, found: tuple[nn.Module, Sketch] | None = None) -> "Costing":
        """Sketch the job, unless `blueprint.sketched` did so already."""
        model, sketch = found or sketched(job)
        samples = data.example(job.data, data.opened(job.data))
        return Costing(job, model, with_open_head(sketch, job), samples)

    def batch(self, count: int) -> tuple[Any, Any]:
        """A micro-batch of so many samples."""
        return data.first_samples(self.samples, count)

    def evaluation(self, plan: Plan, charges: list[Charge]) -> "Bill":
        """The bill of an evaluation's largest forward pass, beside what a rank holds between steps."""
        assert self.job.evaluate is not None
        wanted, count = self.job.evaluate.data, data.largest(self.job.batch, plan.shares, plan.microbatches)
        held_out = data.example(wanted, data.opened(wanted, WHERE), WHERE)
        batch = data.first_samples(held_out, count)
        key = ("evaluation", count, plan.precision, plan.recompute, plan.fsdp > 1)
        if key not in self.done:
            self.done[key] = rehearse(sketched(self.job)[0], self.sketch, self.job, plan, batch, evaluates=True)
        size = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor))
        charges = [c for c in charges if not c.since[0].startswith(("gradient", "backward"))]
        charges.append(held("batch", size, f"samples that are evaluated: {count}"))
        found = _fullest(plan, count, _joined(self.done[key].tape, None), charges)
        told = {"activations": "the outputs of an evaluation", "temporary": "inside an evaluation"}
        items = tuple(replace(i, reason=told.get(i.category, i.reason)) for i in found.items)
        return replace(found, moment="evaluation", items=items)

    def rehearsed(self, plan: Plan, count: int) -> Rehearsal:
        """One micro-batch under the plan."""
        norms = plan.ranks if self.sketch.batch_norms and plan.processes != "one" else 1
        key = (count, plan.precision, plan.recompute, plan.fsdp > 1, norms)
        if key not in self.done:
            model = sketched(self.job)[0] if self.done else self.model
            self.done[key] = rehearse(model, self.sketch, self.job, plan, self.batch(count))
        return self.done[key]

    def bill(self, plan: Plan) -> Bill:
        """The bill of a plan. Raises its refusals."""
        if plan.across:
            return _of(dry_run(self.job, plan))
        check_plan(self.job, plan)
        counts = [n for _, n in Share(0, plan.ranks, plan.microbatches).parts(self.job.batch)]
        state, step = _optimizer(self.job, plan, self.sketch)
        role = Role(samples=tuple(counts), weighted=self.job.weight is not None)
        charges = [c for c in priced(plan, self.sketch, role) if c.kind == "memory"]
        taken = {c.op for c in charges}
        each = sum(t.nbytes for t in tree_leaves(self.batch(1)) if isinstance(t, Tensor))
        buffers = sum({id(b.untyped_storage()): b.untyped_storage().nbytes() for b in self.model.buffers()}.values())
        own = [*_one_device(self.sketch), held("buffers", buffers, "of the model")]
        own += [held("batch", each * sum(counts), f"samples: {sum(counts)}")]
        own += [held("optimizer", state, "what it keeps from step to step")]
        charges += [c for c in own if c.op not in taken]
        bills = []
        for (count, turns), last in _turns(counts).items():
            tape = _joined(self.rehearsed(plan, count).tape, step if last else None)
            bills.append(_fullest(plan, count, tape, [c for c in charges if c.turns <= turns]))
        if self.job.evaluate is not None:
            alone = frozenset({"first", "last"})
            bills.append(self.evaluation(plan, [c for c in charges if c.turns <= alone]))
        most, host = max(bills, key=lambda b: b.total), max(bills, key=lambda b: b.hosted)
        items = (*(i for i in most.items if not i.host), *(i for i in host.items if i.host))
        return replace(most, items=items, hosted=host.hosted, together=max(b.together for b in bills))


def _of(found: DryRun) -> Bill:
    """The bill of a plan whose ranks are unlike, from a dry run: of the fullest."""
    most = found.fullest
    why = WHY | {"parameters": f"the parts that rank {most.rank} has", "batch": f"samples: {most.samples} at a time"}
    host = max((kind.peak.host for kind in found.kinds), key=lambda held: sum(held.values()))
    items = [Item(category, n, why[category]) for category, n in most.peak.categories.items()]
    there = why | {"temporary": "gradients that the optimizer reads, and what its step makes"}
    items += [Item(category, n, there[category], True) for category, n in host.items()]
    hosted = sum(host.values())
    return Bill(
        found.plan, most.samples, most.peak.total, most.peak.moment, tuple(sorted(items, key=lambda i: -i.bytes)),
        hosted=hosted, together=most.peak.total + hosted,
    )  # fmt: skip


WHY = MappingProxyType({
    "gradients": "of its parameters", "optimizer": "what it keeps from step to step", "host copies": "what the optimizer updates",
    "buffers": "of the model", "activations": "kept for backward", "gathered": "parameters that are whole at the moment",
    "exchange": "what is sent or received", "temporary": "inside forward and backward",
})  # fmt: skip


def _turns(counts: list[int]) -> dict[tuple[int, frozenset[str]], bool]:
    """The kinds of micro-batches of a step, as (samples, the turns they are), and whether one is the last."""
    last = len(counts) - 1
    words = [frozenset({"later" if i else "first", "early" if i < last else "last"}) for i in range(len(counts))]
    return {(n, turns): "last" in turns for n, turns in zip(counts, words)}


def table(found: Bill) -> str:
    """What `plait sketch --plan` prints: bytes by category, on the device and on its host, and what they are."""
    beside = f", and {size(found.hosted)} of its host's memory" if found.hosted else ""
    lines = [
        f"memory  {size(found.total)} per rank under {found.plan}{beside}, at most; micro-batches of {found.samples}",
        f"        fullest after: {MOMENTS.get(found.moment.strip(), found.moment)}",
    ]
    device, host = found.held(False), found.held(True)
    rows: list[tuple[str, ...]] = [("", "device", "host", "")] if host else []
    for category in (c for c in CATEGORIES if c in device or c in host):
        items = sorted((i for i in found.items if i.category == category), key=lambda i: -i.bytes)
        why = "; ".join(f"{i.reason} {size(i.bytes)}" if len(items) > 1 else i.reason for i in items[:SHOWN])
        more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
        sizes = [size(side[category]) if category in side else "" for side in (device, host)]
        rows.append((f"  {category}", sizes[0], *sizes[1 : 1 + bool(host)], why + more))
    lines += aligned(rows, right=(1, 2) if host else (1,))
    lines += [f"not in it: {note}" for note in found.notes]
    return "\n".join(lines)


SHOWN = 3
MOMENTS = MappingProxyType(
    {
        "backward": "the loss",
        "end": "the end of backward",
        "forward": "start",
        "evaluation": "a forward pass of an evaluation",
    }
)
"""The model as a whole has no name of its own."""


def bill(job: Job, plan: Plan) -> Bill:
    """The memory that one rank of `job` needs under `plan`, before anything runs."""
    return Costing.of(job).bill(plan)


def _one_device(sketch: Sketch) -> Iterable[Charge]:
    for name, shape, dtype in sketch.parameters:
        bytes_ = prod(shape) * dtype.itemsize
        yield held("parameters", bytes_, "all of them")
        yield held("gradients", bytes_, "all of them", (f"gradient {name}", 0), turns="first")
        yield held("gradients", bytes_, "all of them", turns="later")
    yield held(
        "parameters", sum(prod(shape) * dtype.itemsize for _, shape, dtype in sketch.frozen), "those not trained"
    )


def _optimizer(job: Job, plan: Plan, sketch: Sketch) -> tuple[int, Tape]:
    """(bytes the optimizer keeps, the tape of its step)."""
    optimizer, tape = stepped(job, {n: (_part(plan, shape), dtype) for n, shape, dtype in sketch.parameters})
    return sum(map(kept_by, optimizer.state.values())), tape


def _part(plan: Plan, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (-(-shape[0] // plan.fsdp), *shape[1:]) if plan.fsdp > 1 and divides(shape) else shape


def _joined(micro: Tape, step: Tape | None) -> Tape:
    """The tape of a micro-batch, then that of the optimizer's step, if it follows."""
    joined, offset = Tape(list(micro.changes)), 1 + max((c.storage for c in micro.changes), default=0)
    joined.changes.append(Change(0, moment="optimizer"))
    changes = step.changes if step is not None else ()
    joined.changes += [Change(c.bytes, c.storage + offset, c.moment) for c in changes]
    joined.changes.append(Change(0, moment="over"))
    joined.categories |= dict.fromkeys(_kept(micro), "activations")
    return joined


def _kept(micro: Tape) -> set[int]:
    """Storages that are there when forward is over: what is kept for backward."""
    there: dict[int, int] = {}
    for change in micro.changes:
        if change.moment == "loss":
            break
        there[change.storage] = there.get(change.storage, 0) + change.bytes
    return {storage for storage, held_ in there.items() if held_}


def _fullest(plan: Plan, count: int, tape: Tape, charges: list[Charge]) -> Bill:
    """Go through the step: the tape's changes, and charges that begin and end at its named moments."""
    places: dict[str, int] = {}
    for i, change in enumerate(tape.changes):
        if change.moment and (change.moment not in places or change.moment.startswith("backward end")):
            places[change.moment] = i
    reasons = {"activations": f"kept for backward, samples: {count}", "temporary": "inside forward and backward"}
    late, steps = tape.updating(), list[Step]()
    for i, change in enumerate(tape.changes):
        if change.bytes:
            category, updating = tape.categories.get(change.storage, "temporary"), change.storage in late
            why = "inside the optimizer's step" if updating and category == "temporary" else reasons[category]
            steps.append((i, 0, change.bytes, (category, why, on_host(plan, category, updating))))
    for charge in charges:
        since, until = _place(charge.since, places), _place(charge.until, places)
        if since is not None and until is not None and charge.bytes:
            what = (charge.op, charge.reason, on_host(plan, charge.op, False))
            steps += [(*since, charge.bytes, what), (*until, -charge.bytes, what)]
    steps.sort(key=lambda s: (s[0], s[1], s[2]))
    total, at, held = _most([s for s in steps if not s[3][2]])
    hosted, _, beside = _most([s for s in steps if s[3][2]])
    items = sorted((Item(*what[:1], n, *what[1:]) for what, n in [*held, *beside]), key=lambda i: -i.bytes)
    last = max((place, name) for name, place in places.items() if place <= at)[1]
    return Bill(str(plan), count, total, last, tuple(items), tuple(_notes(plan)), hosted, _most(steps)[0])


Step = tuple[int, int, int, tuple[str, str, bool]]
"""A place in the tape, the order there, bytes more or fewer, and of what: category, reason, whether the host has them."""


def _most(steps: list[Step]) -> tuple[int, int, list[tuple[tuple[str, str, bool], int]]]:
    """(bytes at the fullest moment, its place in the tape, what they are)."""
    now = most = at = 0
    for k, (_, _, number, _) in enumerate(steps, 1):
        now += number
        if now > most:
            most, at = now, k
    sums: dict[tuple[str, str, bool], int] = {}
    for _, _, number, what in steps[:at]:
        sums[what] = sums.get(what, 0) + number
    return most, steps[at - 1][0] if at else 0, [(what, number) for what, number in sums.items() if number]


def _notes(plan: Plan) -> Iterable[str]:
    if plan.compile:
        yield "what compile=true saves by fusing operators"
    if plan.processes == "one":
        yield f"the {plan.dp - 1} other copies of the model that threads of this process compute with"


def _place(moment: Moment, places: dict[str, int]) -> tuple[int, int] | None:
    """Where in the tape; None when it never comes."""
    name, order = moment
    if name.startswith("gradient"):
        return (places[name], order) if name in places else None
    return places.get(name, places["start" if name.startswith("forward") else "end"]), order
