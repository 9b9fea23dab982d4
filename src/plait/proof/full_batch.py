"""Batches of the job's own size, with chosen samples: the second part of `verify`, after the small batches of the hardened job.

Small batches cannot reach code that depends on the number of samples (a capacity, a hardest-k, a branch on the batch size). Few samples
cannot reach code that depends on a rare value. So the same processes then train:

    own steps    batches of the job's own size and lengths, with the job's own clipping. The first one has the samples with the
                 largest and smallest values and lengths among the probed samples
    a far step   a small batch with all weights times 4, so that losses and outputs leave their initial range, and with the loss
                 times 1,000, so that gradient-limiting hooks and clipping inside an optimizer take effect

A step takes as long as a step of the job on one device in float64. There are two steps if time allows, else one. If a step takes too long
or too much memory, the largest possible batch is used, and the verdict reports it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from plait.config.errors import PlaitError, stopped_problem
from plait.config.job import Evaluate, Job
from plait.data.batch import Data, MapStyle, is_map, open_data
from plait.data.sampling import size_by_first_step
from plait.engine.engine import Engine
from plait.proof import reference
from plait.proof.activation_recorder import ChosenSamples, FirstSamples, take_first
from plait.proof.probes import (
    TOLERANCE,
    Probe,
    Trace,
    compare_replicas,
    compare_rows,
    compare_tensors,
    compute_floor,
    explain_replicas,
    measure_movement,
    relative_diff,
)
from plait.randomness.keyed import make_permutation, preserve_host_state
from plait.tensors.torch_private import tree_leaves

STEPS = 2
WEIGHT_FACTOR, GRADIENT_FACTOR = 4.0, 1000.0
"""Factors on the weights and on the gradients of the far step."""
EPS = 1e-6
"""Lower bound of Adam's eps, as a fraction of the gradient norm."""
DEFAULT_SECONDS = 0.5
"""Time limit on one device, without `--full`."""
PROBE_SAMPLES = 256
"""Number of samples that are probed for extreme values."""
PROBE_SECONDS = 0.3
"""Time limit of that probing."""
MEMORY_SHARE = 0.5
"""Fraction of free memory for the activations of one device."""


@dataclasses.dataclass(frozen=True)
class FullBatchCase:
    """The batches to train. Its values are sent between processes."""

    batch: int
    steps: int
    """Steps before the far step."""
    wanted: int
    """The job's own batch."""
    ids: tuple[int, ...] = ()
    """Ids of the samples in the job's data, in the order of their numbers here. Empty for an iterable, whose first samples are read."""
    short: str = ""
    """Reason for a batch smaller than the job's."""
    far: int = 1
    """Samples of the far step, the short last batch of the epoch."""

    @property
    def samples(self) -> int:
        """Number of samples read."""
        return self.steps * self.batch + self.far

    @property
    def description(self) -> str:
        far = f"one of {self.far} with weights × {WEIGHT_FACTOR:g} and gradients × {GRADIENT_FACTOR:g}"
        if not self.steps:
            return f"then {far}; the job's own batch of {self.wanted} was not tried: {self.short}"
        small = f" of the job's {self.wanted} ({self.short})" if self.batch < self.wanted else ""
        return f"then {self.steps} of {self.batch}{small}, clipped as the job does; then {far}"


def plan_batches(job: Job, one: reference.OneDevice, seconds: float) -> FullBatchCase:
    """Choose the batches, given the time per sample in the steps so far. `job`: as the user wrote it."""
    each, small = min(one.seconds[1:] or one.seconds), one.job.batch
    data, job = open_data(job.data), size_by_first_step(job)
    length = len(data) if is_map(data) else math.inf
    affordable = math.inf if seconds == math.inf else int(seconds / max(each, 1e-9)) - small
    fits = int(MEMORY_SHARE * psutil.virtual_memory().available / max(one.saved_bytes, 1.0))
    batch = int(min(job.batch, affordable, fits, length))
    steps = int(min(STEPS, affordable / batch, length / batch)) if batch == job.batch else int(batch > small)
    if fits < min(affordable, length):
        short = "not enough memory"
    elif length < affordable:
        short = f"the data has {length} samples"
    else:
        short = f"a step takes {each * job.batch:.1f} s; use --full"
    own = FullBatchCase(batch if steps else small, steps, job.batch, (), short, int(min(small, length)))
    return dataclasses.replace(own, ids=_choose_samples(data, job, own))


def _choose_samples(data: Data, job: Job, own: FullBatchCase) -> tuple[int, ...]:
    """Choose sample ids, numbered so that the epoch and the far step's batch begin with extreme samples. Empty for an iterable."""
    if not is_map(data):
        return ()
    length, count = len(data), max(own.steps * own.batch, own.far)
    rows = measure_samples(data, job)
    looked = list(rows)
    extreme: list[int] = []
    for column in zip(*rows.values()):
        extreme += [looked[max(range(len(looked)), key=column.__getitem__)]]
        extreme += [looked[min(range(len(looked)), key=column.__getitem__)]]
    first = list(dict.fromkeys(extreme))[: count // 4]
    spread = (i * length // count for i in range(count))
    wanted = list(dict.fromkeys([*first, *spread, *range(length)]))[:count]
    wanted = [*wanted[: own.steps * own.batch], *wanted[: own.far]]
    found = dict(zip(make_permutation(job.seed, 0, own.samples).tolist(), wanted))
    return tuple(found[i] for i in range(own.samples))


def measure_samples(data: MapStyle, job: Job, seconds: float = PROBE_SECONDS) -> dict[int, list[float]]:
    """Measure sizes of samples, as many as can be read in `seconds`. Empty if samples have different structures."""
    length, rows, began = len(data), dict[int, list[float]](), time.perf_counter()
    with preserve_host_state():
        for i in sorted({i * length // PROBE_SAMPLES for i in range(PROBE_SAMPLES)}):
            rows[i] = _measure_sample(reference.load_seeded(job, 0, i, lambda i=i: data[i]))
            if time.perf_counter() - began > seconds:
                break
    return rows if len({len(row) for row in rows.values()}) == 1 else {}


def _measure_sample(sample: object) -> list[float]:
    """For each tensor of a sample, targets first: nonzero count, sum, length, largest and smallest element."""
    found: list[float] = []
    for leaf in reversed(tree_leaves(sample)):
        leaf = torch.tensor(leaf) if isinstance(leaf, (int, float)) else leaf
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and leaf.layout is torch.strided:
            found += [float(leaf.count_nonzero()), float(leaf.double().nansum())]
            found += [float(leaf.numel()), float(leaf.max()), float(leaf.min())]
    return [float(len(tree_leaves(sample))), *found]


def limit_evaluation(wanted: Evaluate | None, length: int) -> Evaluate | None:
    """Limit the job's evaluation to the first samples of its held-out data."""
    if wanted is None:
        return None

    return dataclasses.replace(wanted, data=lambda: take_first(open_data(wanted.data, "Evaluate(data=…)"), length))


def make_full_batch_job(job: Job, hard: Job, own: FullBatchCase) -> Job:
    """The hardened job with batches of the job's own size, chosen samples in plain order, and the job's own clipping."""

    def data() -> ChosenSamples | FirstSamples:
        samples = open_data(job.data)
        return ChosenSamples(samples, own.ids) if is_map(samples) else FirstSamples(samples, own.samples)

    return dataclasses.replace(hard, batch=own.batch, clip=job.clip, data=data, order=None, token_budget=None)


def run_full_batches(job: Job, one: reference.OneDevice, seconds: float) -> dict[str, Any]:
    """Compute held-out metrics, then train the full batches; the result is added to that of `train`."""
    out: dict[str, Any] = {"metrics": reference.evaluate_metrics(one), "own": None, "own_gradients": {}, "own_weights": {}}
    if not seconds:
        return out
    own = plan_batches(job, one, seconds)
    out["own"] = dataclasses.asdict(own)
    one.job = make_full_batch_job(job, one.job, own)
    data, rows, ids = one.job.data(), list[dict[str, Any]](), list[list[int]]()
    stream = reference.iterate_samples(one.job, data)
    for step in range(own.steps + 1):
        read, far = next(stream), step == own.steps
        if far:
            _enlarge_weights(one.parameters)
            one.job = enlarge_loss(one.job)
        _, _, loss = one.run_passes(data, read)
        if step == 0:
            out["own_gradients"] = reference.copy_gradients(one.model)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters if p.grad is not None]))
        if far and not (math.isfinite(norm) and math.isfinite(float(loss))):
            break
        limit = math.inf if far or job.clip is None else job.clip
        raise_eps(one.optimizer, EPS * norm)
        rows.append(one.update(read, loss, limit) | {"norm": norm})
        ids.append(read[1])
    out["own_weights"] = {n: p.detach().clone() for n, p in one.model.named_parameters()}
    return out | {"own_rows": rows, "own_ids": ids}


def _enlarge_weights(parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(WEIGHT_FACTOR)


class EnlargedLoss:
    """A job's loss times `GRADIENT_FACTOR`. All gradients grow by this factor, so that gradient-limiting hooks take effect."""

    def __init__(self, loss: Callable[..., Tensor]):
        self.loss = loss

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["loss"], name)

    def __call__(self, *args: Any) -> Tensor:
        return self.loss(*args) * GRADIENT_FACTOR


def enlarge_loss(job: Job) -> Job:
    return dataclasses.replace(job, loss=EnlargedLoss(job.loss))


def raise_eps(optimizer: torch.optim.Optimizer, least: float) -> None:
    """Raise eps to at least `least`. An optimizer divides by a gradient's size plus eps, so a gradient that is truly zero would otherwise
    cause a step of rounding / eps. Of Adafactor's pair, the first is raised; the second is compared with weights."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float):
            group["eps"] = max(eps, least)
        elif isinstance(eps, tuple):
            group["eps"] = (max(eps[0] or 0.0, least), *eps[1:])


class FullBatchSteps:
    """The same steps on a rank of the split run."""

    def __init__(self, engine: Engine, job: Job, facts: dict[str, Any]):
        self.engine, self.facts = engine, facts
        self.case = FullBatchCase(**facts["own"]) if facts["own"] else None
        if self.case is not None:
            engine.job = make_full_batch_job(job, engine.job, self.case)
            engine.data = engine.job.data()
            engine.position = dataclasses.replace(engine.position, epoch=0, start=0, state=None)

    def steps(self) -> Iterator[tuple[Any, bool]]:
        """Yield the batches, each with a flag for the far step."""
        if self.case is None:
            return
        source, count = self.engine.batches(), len(self.facts["own_rows"])
        for step in range(count):
            batch = next(source, None)
            if batch is None:
                raise PlaitError(stopped_problem("proof", "in the steps of the job's own size"))
            far = step == self.case.steps
            if far:
                self.engine.job = dataclasses.replace(self.engine.job, clip=None)
                self.engine.passes.loss = EnlargedLoss(self.engine.passes.loss)
                frozen = {name for name, p in self.engine.model.named_parameters() if not p.requires_grad}
                _enlarge_weights([p for name, p in self.engine.rank_model.params.items() if name not in frozen and p.requires_grad])
                self.engine.rank_model.refresh()
            yield batch, far

    def prepare_update(self, step: int) -> None:
        """Before the optimizer step: raise its eps to a fraction of the gradient norm."""
        raise_eps(self.engine.optimizer, EPS * self.facts["own_rows"][step]["norm"])


def compare_full_batches(expected: Trace, actual: Trace, ranks: list[dict[str, Any]]) -> tuple[Probe, ...]:
    """Compare the evaluation and the full batches."""
    found = [_compare_metrics(expected.facts["metrics"], r["metrics"]) for r in ranks]
    probes = [max(found, key=lambda p: p.worst)] if expected.facts["metrics"] else []
    if not expected.own_weights:
        return tuple(probes)
    names, own = actual.facts["names"], FullBatchCase(**expected.facts["own"])
    title = "own batch" if own.steps else "far step"
    for step, ids in enumerate(expected.facts["own_ids"]):
        given = [i for r in ranks if r["reads"] for i in r["own_ids"][step]]
        if given != ids:
            detail = f"{len(given)} samples instead of {len(ids)}"
            probes.append(Probe("D2", f"samples, {title}", 1, 0, f"step {step + 1}", detail))
    before, after = expected.own_gradients, expected.own_weights
    floor = measure_movement(expected.weights, after)
    return (
        *probes,
        compare_tensors("G2", f"gradients, {title}", before, actual.own_gradients, names, compute_floor(before)),
        _compare_step_rows(expected.facts["own_rows"], ranks[0]["own_rows"], own.steps),
        compare_tensors("W2", f"weights, {title}", after, actual.own_weights, names, floor),
        compare_replicas("R2", f"replicas, {title}", [r["own_held"] for r in ranks]),
    )


def _compare_metrics(expected: dict[str, float], actual: dict[str, float]) -> Probe:
    worst, name, detail = 0.0, "", ""
    for key in expected.keys() | actual.keys():
        a, b = expected.get(key, math.nan), actual.get(key, math.nan)
        difference = 0.0 if a == b or (a != a and b != b) else relative_diff(a, b)
        if difference >= worst:
            worst, name = difference, key
            detail = f"{b:.6g} instead of {a:.6g}" if difference > TOLERANCE else ""
    return Probe("E", "evaluation", worst, name=name, detail=detail)


def _compare_step_rows(expected: list[dict[str, float]], actual: list[dict[str, float]], steps: int) -> Probe:
    """Compare loss and norm of each step; the step after `steps` is the far step."""
    probe = compare_rows("U3", f"loss and norm, {'own batch' if steps else 'far step'}", expected, actual, ("loss", "norm"))
    if probe.equal:
        return dataclasses.replace(probe, name=probe.name.partition(",")[0] or "norm")
    return dataclasses.replace(probe, name=probe.name.replace(f"step {steps + 1}", "the far step"))


def explain_full_batches(probes: tuple[Probe, ...], expected: Trace, plan: str) -> tuple[str, str]:
    """(code, sentence) if the small batches agree and the full batches do not."""
    wrong, own = {p.code: p for p in probes if not p.equal}, expected.facts["own"]
    if "E" in wrong:
        return "V020", f"the metric {wrong['E'].name} on held-out data is {wrong['E'].detail}"
    if "D2" in wrong:
        return "V006", f"the samples differ: {wrong['D2'].detail}"
    if "R2" in wrong:
        return explain_replicas(wrong["R2"], expected.buffers)
    batch = own["batch"] if own and own["steps"] else 0
    if "G2" in wrong and batch:
        why = f"the model or loss depends on the number of samples or on a rare value, and {plan} gives fewer samples to each pass"
        return "V021", f"small batches agree, but a batch of {batch} does not: {why}"
    if "G2" in wrong or ("U3" in wrong and "far" in wrong["U3"].name):
        until = f"until weights are multiplied by {WEIGHT_FACTOR:g}"
        return "V021", f"the steps agree {until}: the model or loss takes another branch, or a hook limits gradients"
    if "U3" in wrong:
        why = "the optimizer or state kept between steps differs"
        return "V022", f"the first batches agree, but later ones do not ({wrong['U3'].name}): {why}"
    huge = f"when gradients are multiplied by {GRADIENT_FACTOR:g}"
    return "V022", f"gradients agree, but weights do not {huge}: the optimizer depends on the size of gradients"
