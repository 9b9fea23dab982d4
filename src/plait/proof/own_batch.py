"""Batches of the job's own size, of chosen samples: the second part of `verify`, after the small, hard batches.

What depends on how many samples come together (a capacity, a hardest-k, a branch on the batch's size) is not met by
small batches, and what depends on a rare value not by any few samples. So the run goes on, in the same processes, with

    own steps    batches of the job's own size and lengths, the job's own clipping; the first of them has the samples
                 with the largest and the smallest numbers and lengths of those that were looked at
    a far step   a small batch again, all weights made 4 times as large, so that losses and outputs leave the range they began
                 in, and the loss 1,000 times as large, so that hooks that limit gradients do so, and an optimizer that clips inside

A step costs what a step of the job costs on one device in float64. There are two where time allows, else one. Where even
one takes too long or does not fit, its batch is the largest that does, and the verdict says so.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from plait.config.errors import PlaitError, stopped
from plait.config.job import Evaluate, Job
from plait.data.batch import Data, MapStyle, is_map, opened
from plait.data.sampling import as_first_step
from plait.engine.engine import Engine
from plait.proof import reference
from plait.proof.notes import ChosenSamples, FirstSamples, first_of
from plait.proof.probes import TOLERANCE, Probe, Trace, floor_of, moved, off, replicas, rows, tensors, unlike_replicas
from plait.randomness.keyed import host_kept, permutation
from plait.tensors.torch_private import tree_leaves

STEPS = 2
FAR, HUGE = 4.0, 1000.0
"""Factors on the weights and on the gradients of the last step."""
EPS = 1e-6
"""Adam's eps is at least this share of the gradients' norm."""
SECONDS = 0.5
"""What all of it may take on one device, unless `--full`."""
LOOKED_AT = 256
"""So many samples are looked at for extreme ones."""
LOOKING = 0.3
"""Or so many seconds long."""
SHARE = 0.5
"""Of the free memory, for what one device keeps for backward."""


@dataclasses.dataclass(frozen=True)
class Own:
    """Which batches are tried: numbers that travel between processes."""

    batch: int
    steps: int
    """Before the far one."""
    wanted: int
    """The job's own batch."""
    ids: tuple[int, ...] = ()
    """Of the samples in the job's data, in the order in which they are numbered here; none of an iterable, of which the
    first are read."""
    short: str = ""
    """Why the batch is smaller than the job's."""
    far: int = 1
    """Samples of the far step, the epoch's last and short batch."""

    @property
    def samples(self) -> int:
        """So many are read."""
        return self.steps * self.batch + self.far

    @property
    def told(self) -> str:
        far = f"one of {self.far} with weights × {FAR:g} and gradients × {HUGE:g}"
        if not self.steps:
            return f"then {far}; the job's own batch of {self.wanted} was not tried: {self.short}"
        small = f" of the job's {self.wanted} ({self.short})" if self.batch < self.wanted else ""
        return f"then {self.steps} of {self.batch}{small}, clipped as the job does; then {far}"


def planned(job: Job, one: reference.OneDevice, seconds: float) -> Own:
    """The batches to try, by what a sample took in the steps that were made. `job`: as the user wrote it."""
    each, small = min(one.seconds[1:] or one.seconds), one.job.batch
    data, job = opened(job.data), as_first_step(job)
    length = len(data) if is_map(data) else math.inf
    affordable = math.inf if seconds == math.inf else int(seconds / max(each, 1e-9)) - small
    fits = int(SHARE * psutil.virtual_memory().available / max(one.kept, 1.0))
    batch = int(min(job.batch, affordable, fits, length))
    steps = int(min(STEPS, affordable / batch, length / batch)) if batch == job.batch else int(batch > small)
    if fits < min(affordable, length):
        short = "of memory"
    elif length < affordable:
        short = f"there are {length} samples"
    else:
        short = f"a step of it takes {each * job.batch:.1f} s (--full)"
    own = Own(batch if steps else small, steps, job.batch, (), short, int(min(small, length)))
    return dataclasses.replace(own, ids=_chosen(data, job, own))


def _chosen(data: Data, job: Job, own: Own) -> tuple[int, ...]:
    """Samples of the data, numbered so that the order of an epoch, and the far step's batch, begin with the extreme ones;
    of an iterable none."""
    if not is_map(data):
        return ()
    length, count = len(data), max(own.steps * own.batch, own.far)
    rows = looked_at(data, job)
    looked = list(rows)
    extreme: list[int] = []
    for column in zip(*rows.values()):
        extreme += [looked[max(range(len(looked)), key=column.__getitem__)]]
        extreme += [looked[min(range(len(looked)), key=column.__getitem__)]]
    first = list(dict.fromkeys(extreme))[: count // 4]
    spread = (i * length // count for i in range(count))
    wanted = list(dict.fromkeys([*first, *spread, *range(length)]))[:count]
    wanted = [*wanted[: own.steps * own.batch], *wanted[: own.far]]
    found = dict(zip(permutation(job.seed, 0, own.samples).tolist(), wanted))
    return tuple(found[i] for i in range(own.samples))


def looked_at(data: MapStyle, job: Job, seconds: float = LOOKING) -> dict[int, list[float]]:
    """Sizes of samples by their number, of as many as can be read in some seconds; nothing where samples are unlike each other."""
    length, rows, began = len(data), dict[int, list[float]](), time.perf_counter()
    with host_kept():
        for i in sorted({i * length // LOOKED_AT for i in range(LOOKED_AT)}):
            rows[i] = _sizes(reference.seeded(job, 0, i, lambda i=i: data[i]))
            if time.perf_counter() - began > seconds:
                break
    return rows if len({len(row) for row in rows.values()}) == 1 else {}


def _sizes(sample: object) -> list[float]:
    """Of each tensor of a sample: what it counts (elements that are not zero, their sum), its length, largest and smallest element.
    Targets first."""
    found: list[float] = []
    for leaf in reversed(tree_leaves(sample)):
        leaf = torch.tensor(leaf) if isinstance(leaf, (int, float)) else leaf
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and leaf.layout is torch.strided:
            found += [float(leaf.count_nonzero()), float(leaf.double().nansum())]
            found += [float(leaf.numel()), float(leaf.max()), float(leaf.min())]
    return [float(len(tree_leaves(sample))), *found]


def held_out(wanted: Evaluate | None, length: int) -> Evaluate | None:
    """The first samples of the job's held-out data."""
    if wanted is None:
        return None

    return dataclasses.replace(wanted, data=lambda: first_of(opened(wanted.data, "Evaluate(data=…)"), length))


def of_own_size(job: Job, hard: Job, own: Own) -> Job:
    """The hard job with batches of the job's own size, of chosen samples in no order of the job's, and its own clipping."""

    def data() -> ChosenSamples | FirstSamples:
        samples = opened(job.data)
        return ChosenSamples(samples, own.ids) if is_map(samples) else FirstSamples(samples, own.samples)

    return dataclasses.replace(hard, batch=own.batch, clip=job.clip, data=data, order=None, token_budget=None)


def on_one_device(job: Job, one: reference.OneDevice, seconds: float) -> dict[str, Any]:
    """The held-out metrics, then the steps of the job's own size: what `train` adds to what it did."""
    out: dict[str, Any] = {"metrics": reference.evaluate(one), "own": None, "own_gradients": {}, "own_weights": {}}
    if not seconds:
        return out
    own = planned(job, one, seconds)
    out["own"] = dataclasses.asdict(own)
    one.job = of_own_size(job, one.job, own)
    data, rows, ids = one.job.data(), list[dict[str, Any]](), list[list[int]]()
    stream = reference.samples(one.job, data)
    for step in range(own.steps + 1):
        read, far = next(stream), step == own.steps
        if far:
            _far(one.parameters)
            one.job = enlarged(one.job)
        _, _, loss = one.passes(data, read)
        if step == 0:
            out["own_gradients"] = reference.gradients(one.model)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters if p.grad is not None]))
        if far and not (math.isfinite(norm) and math.isfinite(float(loss))):
            break
        limit = math.inf if far or job.clip is None else job.clip
        raise_eps(one.optimizer, EPS * norm)
        rows.append(one.update(read, loss, limit) | {"norm": norm})
        ids.append(read[1])
    out["own_weights"] = {n: p.detach().clone() for n, p in one.model.named_parameters()}
    return out | {"own_rows": rows, "own_ids": ids}


def _far(parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(FAR)


class EnlargedLoss:
    """A job's loss times `HUGE`: every gradient of the backward pass is so much larger, so that hooks which limit gradients do so."""

    def __init__(self, loss: Callable[..., Tensor]):
        self.loss = loss

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["loss"], name)

    def __call__(self, *args: Any) -> Tensor:
        return self.loss(*args) * HUGE


def enlarged(job: Job) -> Job:
    return dataclasses.replace(job, loss=EnlargedLoss(job.loss))


def raise_eps(optimizer: torch.optim.Optimizer, least: float) -> None:
    """Make eps at least `least`: an optimizer divides by a gradient's size plus eps, so a gradient that is truly zero would
    be a step of rounding / eps. Of Adafactor's pair it is the first; the second is compared with weights."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float):
            group["eps"] = max(eps, least)
        elif isinstance(eps, tuple):
            group["eps"] = (max(eps[0] or 0.0, least), *eps[1:])


class OwnBatchSteps:
    """The same steps on a rank of the split run."""

    def __init__(self, engine: Engine, job: Job, facts: dict[str, Any]):
        self.engine, self.facts = engine, facts
        self.own = Own(**facts["own"]) if facts["own"] else None
        if self.own is not None:
            engine.job = of_own_size(job, engine.job, self.own)
            engine.data = engine.job.data()
            engine.position = dataclasses.replace(engine.position, epoch=0, start=0, state=None)

    def steps(self) -> Iterator[tuple[Any, bool]]:
        """The batches, and whether each is that of the far step."""
        if self.own is None:
            return
        source, count = self.engine.batches(), len(self.facts["own_rows"])
        for step in range(count):
            batch = next(source, None)
            if batch is None:
                raise PlaitError(stopped("proof", "in the steps of the job's own size"))
            far = step == self.own.steps
            if far:
                self.engine.job = dataclasses.replace(self.engine.job, clip=None)
                self.engine.passes.loss = EnlargedLoss(self.engine.passes.loss)
                frozen = {name for name, p in self.engine.model.named_parameters() if not p.requires_grad}
                _far([p for name, p in self.engine.rank_model.params.items() if name not in frozen and p.requires_grad])
                self.engine.rank_model.refresh()
            yield batch, far

    def prepare(self, step: int) -> None:
        """Before the optimizer's step: its eps is at least a share of the gradients' norm."""
        raise_eps(self.engine.optimizer, EPS * self.facts["own_rows"][step]["norm"])


def judged(expected: Trace, actual: Trace, ranks: list[dict[str, Any]]) -> tuple[Probe, ...]:
    """What of the evaluation and of the steps of the job's own size differs."""
    found = [_metrics(expected.facts["metrics"], r["metrics"]) for r in ranks]
    probes = [max(found, key=lambda p: p.worst)] if expected.facts["metrics"] else []
    if not expected.own_weights:
        return tuple(probes)
    names, own = actual.facts["names"], Own(**expected.facts["own"])
    title = "own batch" if own.steps else "far step"
    for step, ids in enumerate(expected.facts["own_ids"]):
        given = [i for r in ranks if r["reads"] for i in r["own_ids"][step]]
        if given != ids:
            detail = f"{len(given)} samples instead of {len(ids)}"
            probes.append(Probe("D2", f"samples, {title}", 1, 0, f"step {step + 1}", detail))
    before, after = expected.own_gradients, expected.own_weights
    floor = moved(expected.weights, after)
    return (
        *probes,
        tensors("G2", f"gradients, {title}", before, actual.own_gradients, names, floor_of(before)),
        _rows(expected.facts["own_rows"], ranks[0]["own_rows"], own.steps),
        tensors("W2", f"weights, {title}", after, actual.own_weights, names, floor),
        replicas("R2", f"replicas, {title}", [r["own_held"] for r in ranks]),
    )


def _metrics(expected: dict[str, float], actual: dict[str, float]) -> Probe:
    worst, name, detail = 0.0, "", ""
    for key in expected.keys() | actual.keys():
        a, b = expected.get(key, math.nan), actual.get(key, math.nan)
        difference = 0.0 if a == b or (a != a and b != b) else off(a, b)
        if difference >= worst:
            worst, name = difference, key
            detail = f"{b:.6g} instead of {a:.6g}" if difference > TOLERANCE else ""
    return Probe("E", "evaluation", worst, name=name, detail=detail)


def _rows(expected: list[dict[str, float]], actual: list[dict[str, float]], steps: int) -> Probe:
    """Loss and norm of each step; so many are not the far one."""
    probe = rows("U3", f"loss and norm, {'own batch' if steps else 'far step'}", expected, actual, ("loss", "norm"))
    if probe.equal:
        return dataclasses.replace(probe, name=probe.name.partition(",")[0] or "norm")
    return dataclasses.replace(probe, name=probe.name.replace(f"step {steps + 1}", "the far step"))


def cause(probes: tuple[Probe, ...], expected: Trace, plan: str) -> tuple[str, str]:
    """(code, sentence) when the small batches agree and these do not."""
    wrong, own = {p.code: p for p in probes if not p.equal}, expected.facts["own"]
    if "E" in wrong:
        return "V020", f"the metric {wrong['E'].name} of the held-out data is {wrong['E'].detail}"
    if "D2" in wrong:
        return "V006", f"the samples differ: {wrong['D2'].detail}"
    if "R2" in wrong:
        return unlike_replicas(wrong["R2"], expected.buffers)
    batch = own["batch"] if own and own["steps"] else 0
    if "G2" in wrong and batch:
        why = f"model or loss depends on how many samples come together, or on a rare value, and {plan} gives each pass fewer"
        return "V021", f"small batches agree and one of {batch} does not: {why}"
    if "G2" in wrong or ("U3" in wrong and "far" in wrong["U3"].name):
        until = f"until the weights are {FAR:g} times as large"
        return "V021", f"the steps agree {until}: model or loss takes another branch, or a hook limits gradients"
    if "U3" in wrong:
        why = "the optimizer, or what is kept between steps"
        return "V022", f"the batches agree at first and not later ({wrong['U3'].name}): {why}"
    huge = f"when gradients are {HUGE:g} times as large"
    return "V022", f"gradients agree and weights do not {huge}: the optimizer looks at their size"
