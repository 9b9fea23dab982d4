"""The bill: what a plan costs before it runs. Here: the bytes of one rank at the fullest moment of a step, by category.

A micro-batch is rehearsed on fake tensors (`rehearsal.py`), the optimizer's step too. To what they allocate come the
charges of the strategies, each from one moment of the step to another, and what one device holds in the categories that
no strategy charges. The fullest moment is found by going through the step. Ranks that are not all alike (stages, slices,
stretches, experts) make that step in a dry run (`dryrun.py`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from plait import data
from plait.allocations import Allocations, Change, Tape
from plait.blueprint import PartlyFake, sketched
from plait.build import check_plan
from plait.data import Share
from plait.dryrun import DryRun, dry_run
from plait.job import Job
from plait.making import make_optimizer
from plait.outline import short
from plait.plan import Plan
from plait.rehearsal import Rehearsal, rehearse
from plait.sharded import divides
from plait.sketch import Sketch
from plait.strategies import Charge, Role
from plait.strategies import charges as priced
from plait.strategies.strategy import Moment, held
from plait.torchseam import FakeTensorMode, tree_leaves

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

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category, in a fixed order; what is not there is left out."""
        sums = {c: sum(i.bytes for i in self.items if i.category == c) for c in CATEGORIES}
        return {c: size for c, size in sums.items() if size}

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"categories": self.categories}


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
        samples = data.checked(job.data(), "Job(data=…)")
        return Costing(job, model, sketch, samples)

    def batch(self, count: int) -> tuple[Any, Any]:
        """A micro-batch of so many samples."""
        return data.first_samples(self.samples, count)

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
        size = sum(t.nbytes for t in tree_leaves(self.batch(1)) if isinstance(t, Tensor))
        buffers = sum({id(b.untyped_storage()): b.untyped_storage().nbytes() for b in self.model.buffers()}.values())
        own = [*_one_device(self.sketch), held("buffers", buffers, "of the model")]
        own += [held("batch", size * sum(counts), f"samples: {sum(counts)}")]
        own += [held("optimizer", state, "what it keeps from step to step")]
        charges += [c for c in own if c.op not in taken]
        bills = []
        for (count, turns), last in _turns(counts).items():
            tape = _joined(self.rehearsed(plan, count).tape, step if last else None)
            bills.append(_fullest(plan, count, tape, [c for c in charges if c.turns <= turns]))
        return max(bills, key=lambda b: b.total)


def _of(found: DryRun) -> Bill:
    """The bill of a plan whose ranks are unlike, from a dry run: of the fullest."""
    most = found.fullest
    why = WHY | {"parameters": f"the parts that rank {most.rank} has", "batch": f"samples: {most.samples} at a time"}
    items = (Item(category, size, why[category]) for category, size in most.peak.categories.items())
    return Bill(
        found.plan, most.samples, most.peak.total, most.peak.moment, tuple(sorted(items, key=lambda i: -i.bytes))
    )


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
    """What `plait sketch --plan` prints: bytes by category, and what they are."""
    lines = [f"memory  {short(found.total)}B per rank under {found.plan}, at most; micro-batches of {found.samples}"]
    lines.append(f"        fullest after: {MOMENTS.get(found.moment.strip(), found.moment)}")
    for category, size in found.categories.items():
        items = [i for i in found.items if i.category == category]
        why = "; ".join(f"{i.reason} {short(i.bytes)}B" if len(items) > 1 else i.reason for i in items[:SHOWN])
        more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
        lines.append(f"  {category:<12}{short(size) + 'B':>8}  {why}{more}")
    lines += [f"not in it: {note}" for note in found.notes]
    return "\n".join(lines)


SHOWN = 3
MOMENTS = MappingProxyType({"backward": "the loss", "end": "the end of backward", "forward": "start"})
"""The model as a whole has no name of its own."""


def bill(job: Job, plan: Plan) -> Bill:
    """The memory that one rank of `job` needs under `plan`, before anything runs."""
    return Costing.of(job).bill(plan)


def _one_device(sketch: Sketch) -> Iterable[Charge]:
    for name, shape, dtype in sketch.parameters:
        size = prod(shape) * dtype.itemsize
        yield held("parameters", size, "all of them")
        yield held("gradients", size, "all of them", (f"gradient {name}", 0), turns="first")
        yield held("gradients", size, "all of them", turns="later")
    yield held(
        "parameters", sum(prod(shape) * dtype.itemsize for _, shape, dtype in sketch.frozen), "those not trained"
    )


def _optimizer(job: Job, plan: Plan, sketch: Sketch) -> tuple[int, Tape]:
    """(bytes the optimizer keeps, the tape of its step)."""
    optimizer, tape = _stepped(job, {n: (_part(plan, shape), dtype) for n, shape, dtype in sketch.parameters})
    return sum(map(_kept_by, optimizer.state.values())), tape


def _stepped(job: Job, parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[torch.optim.Optimizer, Tape]:
    """The job's optimizer after two steps on fake parts, and the tape of the second."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        own = {n: nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, (shape, dtype) in parts.items()}
        for parameter in own.values():
            parameter.grad = torch.zeros_like(parameter)
    optimizer, meter = make_optimizer(job, own)[0], Allocations()
    for _ in range(2):
        meter = Allocations()
        with PartlyFake(fakes), meter:
            meter.hold("", own.values(), free=True)
            meter.hold("", [p.grad for p in own.values()], free=True)
            meter.hold("", _state(optimizer), free=True)
            optimizer.step()
    return optimizer, meter.tape


def optimizer_state(job: Job, sketch: Sketch) -> int:
    """Bytes that a job's optimizer keeps from step to step, on one device: found for one parameter of each shape and
    format, since it keeps as much for the others."""
    alike = Counter((shape, dtype) for _, shape, dtype in sketch.parameters)
    first = {(shape, dtype): name for name, shape, dtype in reversed(sketch.parameters)}
    optimizer, _ = _stepped(job, {name: form for form, name in first.items()})
    return sum(alike[tuple(p.shape), p.dtype] * _kept_by(state) for p, state in optimizer.state.items())


def _kept_by(state: Any) -> int:
    """Bytes of one parameter's state."""
    found = (t.untyped_storage() for t in tree_leaves(state) if isinstance(t, Tensor))
    return sum({id(s): s.nbytes() for s in found}.values())


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for t in tree_leaves([list(s.values()) for s in optimizer.state.values()]) if isinstance(t, Tensor)]


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
    return {storage for storage, size in there.items() if size}


def _fullest(plan: Plan, count: int, tape: Tape, charges: list[Charge]) -> Bill:
    """Go through the step: the tape's changes, and charges that begin and end at its named moments."""
    places: dict[str, int] = {}
    for i, change in enumerate(tape.changes):
        if change.moment and (change.moment not in places or change.moment.startswith("backward end")):
            places[change.moment] = i
    reasons = {"activations": f"kept for backward, samples: {count}", "temporary": "inside forward and backward"}
    steps: list[tuple[int, int, int, tuple[str, str]]] = []
    for i, change in enumerate(tape.changes):
        if change.bytes:
            category = tape.categories.get(change.storage, "temporary")
            steps.append((i, 0, change.bytes, (category, reasons[category])))
    for charge in charges:
        since, until = _place(charge.since, places), _place(charge.until, places)
        if since is not None and until is not None and charge.bytes:
            what = (charge.op, charge.reason)
            steps += [(*since, charge.bytes, what), (*until, -charge.bytes, what)]
    steps.sort(key=lambda s: (s[0], s[1], s[2]))
    now = most = at = 0
    for k, (_, _, size, _) in enumerate(steps):
        now += size
        if now > most:
            most, at = now, k
    sums: dict[tuple[str, str], int] = {}
    for _, _, size, what in steps[: at + 1]:
        sums[what] = sums.get(what, 0) + size
    items = sorted((Item(*what[:1], size, what[1]) for what, size in sums.items() if size), key=lambda i: -i.bytes)
    last = max((place, name) for name, place in places.items() if place <= steps[at][0])[1]
    return Bill(str(plan), count, most, last, tuple(items), tuple(_notes(plan)))


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
