"""A step in the plan's own number formats, compared with one device in the same formats: the third part of `verify`.

Float64 proves the logic and replaces every format, so it cannot see a sum made in bf16, state kept in bf16, or a message
rounded on its way. Here the job trains one step as it will train. Two things are compared:

    numbers    with one device in the same formats. How far apart two right runs may be is measured, not chosen: one device
               trains again with weights and inputs moved by one rounding, and the largest movement of a tensor is its unit
    formats    those of gradients, weights and optimizer state are those of one device, and every message is as many bytes
               as in a dry run of the plan in these formats

Under `dp`, `fsdp` and `pp` every part of the batch is computed as one device computes that part, so the reference trains
on the same parts. Where the losses of all parts are the same bits, only the order of sums differs, and the unit is one
rounding of fp32. Under `tp`, `cp` and `ep` the products themselves are cut: one rounding is that of the forward pass. So it is
where two stages gather a weight that they share in 16 bits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import BatchShare, Micro, beside, collate, is_map, weigh
from plait.launch.place import threads
from plait.model.parameter_groups import optimizer_of
from plait.parallel import fp8
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.fsdp.runtime import divides
from plait.parallel.precision import autocast, multiplying, plan_format
from plait.proof import reference
from plait.proof.probes import Probe, Trace, collectives
from plait.randomness.keyed import Randomness
from plait.tensors.torch_private import tree_map_only

DRAWS = 2
"""Runs with moved weights."""
APART = 20.0
"""A right run is at most so many units from one device; measured: clean runs up to 3, faults from 60 on."""
SCALE = 256.0
"""Of an fp16 loss."""
ROUNDING = {None: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
TF32 = 2.0**-12
"""A rounding of what a GPU multiplies in TF32."""
GROUPS = ("gradient", "weight", "state")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ENOUGH, MOSTLY = 32, 0.98
"""Numbers that are needed to tell a format, and the share that must be in it."""
PARTLY = 0.8
"""The share in a 16-bit format from which a tensor of one device tells nothing of another run's: both are sums of few such numbers."""


@dataclasses.dataclass
class StepResult:
    """What a run has before the step and after it: by kind, name -> tensor; state is `name|key`."""

    start: dict[str, Tensor]
    gradient: dict[str, Tensor]
    weight: dict[str, Tensor]
    state: dict[str, Tensor]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of each part, by its first sample."""

    def of(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind; of weights how far they moved."""
        if kind == "weight":
            return {n: t - self.start[n] for n, t in self.weight.items() if n in self.start}
        return getattr(self, kind)


def small(plan: Plan, model: torch.nn.Module) -> int:
    """Samples of the step: one for each part of the batch, two where batch statistics want them, and one more."""
    normed = any(hasattr(module, "running_mean") for module in model.modules())
    return plan.shares * plan.microbatches * (1 + normed) + 1


class Reference:
    """One device in the formats of a plan. `one`: the same job in float64, which knows what the model draws."""

    def __init__(self, job: Job, plan: Plan, one: reference.OneDevice, clip: float):
        self.plan, self.one, self.clip = plan, one, clip
        self.job = dataclasses.replace(job, batch=small(plan, one.model))
        self.data = job.data()
        self.read = next(reference.samples(self.job, self.data))
        self.format = plan_format(plan)
        tf32 = plan.precision == "tf32" and torch.device(one.device).type != "cpu"
        self.rounding = TF32 if tf32 else ROUNDING[self.format]
        self.cut = plan.waits_in_forward or plan.compile or self._summed_elsewhere()

    def _summed_elsewhere(self) -> bool:
        """Whether a weight that two units share is gathered in 16 bits by two stages: one device adds its two gradients up
        in 16 bits, stages in 32."""
        names = list(self.one.model.named_parameters(remove_duplicate=False))
        tied = len(names) > len(list(self.one.model.parameters()))
        return tied and self.format is not None and self.plan.pp > 1 and fsdp.wanted(self.plan)

    def parts(self) -> list[tuple[int, int]]:
        """(first, count) of the parts of the batch."""
        n, plan = len(self.read[1]), self.plan
        shares = (BatchShare.of(plan, rank).parts(n) for rank in range(plan.ranks))
        return [part for share in shares for part in share if part[1]]

    def trained(self) -> tuple[StepResult, dict[tuple[str, str], float]]:
        """The step, and the unit of each of its tensors."""
        torch.set_num_threads(threads(self.plan.world))  # products are summed in the order of the ranks' own
        whole = [(0, len(self.read[1]))]
        eps, base, parts = self.rounding, self.step(whole), whole
        if eps > ROUNDING[None] and not self.cut and (apart := self._apart(base)) is not None:
            base, parts, eps = apart, self.parts(), ROUNDING[None]
        if not all(bool(t.isfinite().all()) for kind in GROUPS for t in getattr(base, kind).values()):
            raise ValueError("a gradient is not finite in this format")
        return base, self.spread(base, parts, eps)

    def _apart(self, base: StepResult) -> StepResult | None:
        """The step on parts, where it is that on the whole: not where batch statistics or a loss couple samples."""
        try:
            apart = self.step(self.parts())
        except (RuntimeError, ValueError):  # a batch norm wants two samples
            return None
        spread = self.spread(base, [(0, len(self.read[1]))], self.rounding)
        near = (off <= APART * spread.get(key, 0.0) for key, off in distances(base, apart).items())
        return apart if all(near) else None

    def spread(self, base: StepResult, parts: list[tuple[int, int]], eps: float) -> dict[tuple[str, str], float]:
        """The largest distance of each tensor over runs with moved weights, at least one rounding."""
        found: dict[tuple[str, str], float] = {}
        for draw in range(DRAWS):
            for key, off in distances(base, self.step(parts, (eps, draw))).items():
                found[key] = max(found.get(key, eps), off)
        return found

    def step(self, parts: list[tuple[int, int]], moved: tuple[float, int] | None = None) -> StepResult:
        """A step of a new model, its loss and gradients summed over parts of the batch."""
        with multiplying(self.plan):
            return self._step(parts, moved)

    def _step(self, parts: list[tuple[int, int]], moved: tuple[float, int] | None) -> StepResult:
        job, device = self.job, self.one.device
        model = reference.make_model(job, None, device)
        if self.plan.precision == "fp8":
            fp8.convert(
                model, fp8.chosen(model, self.plan.tp), self.plan.fp8_recipe, torch.device(device).type == "cpu"
            )
        generator = torch.Generator().manual_seed(0 if moved is None else moved[1] + 1)
        shift = lambda t: _shifted(t, 0.0 if moved is None else moved[0], generator)  # noqa: E731
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(shift(parameter))
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        keyed = Randomness(model, job.seed, self.one.keyed.places, self.one.keyed.needed)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer_of(job, dict(model.named_parameters()))
        scale = SCALE if self.format is torch.float16 else 1.0
        pairs = [self._pair(first, n, shift) for first, n in parts]
        micros = (Micro(*part, None, targets, ()) for (_, targets), part in zip(pairs, parts))
        weights = [weigh(job.weight, micro) for micro in micros]
        losses = dict[str, float]()
        for (inputs, targets), weight, (first, n) in zip(pairs, weights, parts):
            if not weight:
                continue
            with autocast(device, self.format), keyed.at(0, first, n):
                loss = job.loss(self._called(model, inputs), targets)
            losses[str(first)] = float(loss.detach())
            with keyed.replay():
                (loss * (weight / sum(weights) * scale)).backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        held = reference.gradients(model)
        torch.nn.utils.clip_grad_norm_(trained, self.clip)
        for group in optimizer.param_groups:
            group["lr"] *= job.schedule(0) if job.schedule else 1.0
        optimizer.step()
        state = states(optimizer, {id(p): n for n, p in model.named_parameters()})
        return StepResult(start, held, {n: p.detach() for n, p in model.named_parameters()}, state, losses)

    def _called(self, model: nn.Module, inputs: object) -> Any:
        """The model's outputs; where weights are gathered in 16 bits it computes with those."""
        if self.format is None or not fsdp.wanted(self.plan):
            return reference.call(model, inputs)
        half = {n: p.to(self.format) for n, p in model.named_parameters() if divides(p.shape) and p.is_floating_point()}
        if isinstance(inputs, dict):
            return functional_call(model, half, (), inputs)
        return functional_call(model, half, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))

    def _pair(self, first: int, n: int, shift: Callable[[Tensor], Tensor]) -> Any:
        some, last = self.read[2][first : first + n], self.read[1][first + n - 1]
        again = (lambda: self.data[last]) if is_map(self.data) else lambda: None
        reference.seeded(self.job, self.read[0], last, again)  # what is drawn while samples are put together comes next
        rest = [*self.read[2][:first], *self.read[2][first + n :]]
        pair = beside(self.data, some, rest) if hasattr(self.data, "collate") and rest else collate(self.data, some)
        inputs, targets = tree_map_only(Tensor, lambda t: t.to(self.one.device), tuple(pair))
        return tree_map_only(Tensor, shift, inputs), targets


def _shifted(t: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    if not eps or not t.is_floating_point():
        return t
    noise = torch.rand(t.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(t.device)
    if t.dtype == torch.float32:
        return t * (1.0 + eps * 2 * noise).float()
    return (t.double() * (1.0 + eps * noise)).to(t.dtype)


def distances(base: StepResult, other: StepResult) -> dict[tuple[str, str], float]:
    """How far each tensor of another run is, relative to its size or to its neighbours'; of weights how far they moved.
    Sizes are root mean squares."""
    found = {}
    for kind in GROUPS:
        sizes = {name: _size(t) for name, t in getattr(base, kind).items()}
        largest: dict[str, float] = {}
        for name, size in sizes.items():
            alike = name.partition("|")[2]
            largest[alike] = max(largest.get(alike, 0.0), size)
        mine, others = base.of(kind), other.of(kind)
        for name in (name for name in others if name in mine):
            off = _size(mine[name].double() - others[name]) if mine[name].shape == others[name].shape else math.inf
            off /= max(sizes[name], 1e-2 * largest[name.partition("|")[2]], 1e-300)
            found[kind, name] = off if off == off else math.inf
    return found


def _size(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64)) / max(t.numel(), 1) ** 0.5


def short(t: Tensor, share: float = MOSTLY) -> str:
    """A 16-bit format that has this share of an fp32 tensor's numbers, if one does; too few numbers tell nothing."""
    if t.dtype != torch.float32:
        return ""
    some = t[t != 0]
    if some.numel() < ENOUGH:
        return ""
    return next((n for n, d in HALF.items() if float((some.to(d).float() == some).double().mean()) > share), "")


def facts(one: Reference) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """(JSON values, tensors by group) of one device: what `judged` compares with."""
    base, units = one.trained()
    tensors = {f"formats_{kind}": getattr(base, kind) for kind in ("start", *GROUPS)}
    told = {"units": {f"{kind} {name}": unit for (kind, name), unit in units.items()}, "batch": one.job.batch}
    told |= {"losses": {} if one.cut else base.losses, "dtypes": dtypes(base.gradient, base.weight, base.state)}
    return told, tensors


def states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """What an optimizer keeps for each number of a parameter: `name|key` -> tensor. `names`: by the parameter's id."""
    return {
        f"{names[id(p)]}|{key}": value
        for p, kept in optimizer.state.items()
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.shape == p.shape
    }


def dtypes(*kinds: Mapping[str, Tensor]) -> dict[str, str]:
    """The format of each tensor, `kind name`."""
    return {f"{kind} {name}": str(t.dtype) for kind, ts in zip(GROUPS, kinds) for name, t in ts.items()}


def judged(
    expected: Trace, actual: Trace, ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str | None
) -> tuple[Probe, ...]:
    """The numbers, then the formats, then the messages."""
    told = expected.facts.get("formats")
    if not told:
        return ()
    base, other = (StepResult(*(getattr(t, f"formats_{k}") for k in ("start", *GROUPS))) for t in (expected, actual))
    other.start = base.start
    losses = {key: loss for r in ranks for key, loss in r["formats"]["losses"].items()}
    units = told["units"]
    if (
        losses and losses == told["losses"]
    ):  # ranks computed the same parts to the last bit: only the order of sums differs
        units = {}
    apart = {f"{kind} {name}": off for (kind, name), off in distances(base, other).items()}
    ratios = {key: off / units.get(key, ROUNDING[None]) for key, off in apart.items()}
    worst = max(ratios, key=lambda key: ratios[key], default="")
    numbers = Probe("F", "own formats, in roundings", ratios.get(worst, 0.0), APART, worst)
    return numbers, _formats(told, base, other, ranks), *([messages(ranks, dry)] if dry is not None else [])


def _formats(told: dict[str, Any], base: StepResult, other: StepResult, ranks: list[dict[str, Any]]) -> Probe:
    """What is kept in another format, or has been through one."""
    wrong: dict[str, str] = {}
    for rank, r in enumerate(ranks):
        for key, dtype in r["formats"]["dtypes"].items():
            if told["dtypes"].get(key, dtype) != dtype:
                wrong.setdefault(key, f"{dtype} on rank {rank}, {told['dtypes'][key]} on one device")
    for kind in GROUPS:
        for name, tensor in getattr(other, kind).items():
            found, usual = short(tensor), getattr(base, kind).get(name)
            if found and usual is not None and not short(usual, PARTLY) and usual.dtype == tensor.dtype:
                wrong.setdefault(f"{kind} {name}", f"its numbers are those of {found}, in {tensor.dtype}")
    key, detail = next(iter(wrong.items()), ("", ""))
    return Probe("F2", "formats", len(wrong), 0, key, detail)


def messages(ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str) -> Probe:
    """Whether every rank's messages in these formats are those of a dry run."""
    asked = [r | {k: r["formats"][k] for k in ("alike", "sizes", "collectives", "sent")} for r in ranks]
    found = collectives(asked, dry)
    return dataclasses.replace(found, code="F3", title="messages, own formats")


def cause(probes: tuple[Probe, ...]) -> tuple[str, str]:
    """(code, sentence) when float64 agrees and the plan's own formats do not."""
    wrong = {p.code: p for p in probes if not p.equal}
    if "F2" in wrong:
        return "V023", f"{wrong['F2'].name}: {wrong['F2'].detail}"
    if "F3" in wrong:
        return "V024", f"messages are not those of the plan's formats: {wrong['F3'].name}, {wrong['F3'].detail}"
    far = f"{wrong['F'].worst:.0f} roundings from one device in the same formats (right runs: up to {APART:g})"
    return "V025", f"{wrong['F'].name} is {far}: something is rounded through a narrower format on the way"
