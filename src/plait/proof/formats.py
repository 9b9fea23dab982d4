"""A step in the plan's own number formats, compared with one device in the same formats: the third part of `verify`.

Float64 proves the logic and replaces every format, so it cannot see a sum made in bf16, state kept in bf16, or a message
rounded on its way. Here the job trains one step as it will train. Two things are compared:

    tensors    with those of one device in the same formats. Each may be as far away as one device is from itself once its
               weights and inputs are moved by rounding (`proof/rounding.py`)
    formats    those of gradients, weights and optimizer state are those of one device, and every message is as many bytes
               as in a dry run of the plan in these formats

The reference sums the gradients of the same parts of the batch (shares and micro-batches), unless batch statistics or a loss couple
samples. (A scale of fp8 couples those of one part, in any job.) In a plan without `pp`, `tp`, `cp` and `ep`, ranks compute each part
as one device does. If its products are in 16 bits or fp8, the losses of all parts are compared bit by bit: where they are equal, only
the order of the sums over parts differs, and the limits are those of runs with each part's gradient moved by a rounding of its own
format. Otherwise only what these products are rounded from may differ, and weights and inputs are moved by a rounding of fp32. In the
other plans products are summed in another order, or share another scale of fp8, and weights and inputs are moved by a rounding of the
plan's format, or of their own where that is wider.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import BatchShare, Micro, beside, collate, is_map, weigh
from plait.launch.place import threads
from plait.model import optimizers
from plait.model.parameter_groups import optimizer_of
from plait.parallel import fp8
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.precision import autocast, multiplying, plan_format
from plait.parallel.spec import is_divisible
from plait.proof import reference
from plait.proof.probes import Probe, Trace, collectives
from plait.proof.rounding import (
    DRAWS,
    GROUPS,
    TIMES,
    Key,
    Noise,
    StepResult,
    distances,
    limits,
    moved,
    rounding,
    wider,
)  # fmt: skip
from plait.randomness.keyed import Randomness
from plait.tensors.modules import loss_kept, state_kept
from plait.tensors.norm import clip
from plait.tensors.parameters import like
from plait.tensors.torch_private import tree_map_only

SCALE = 256.0
"""Of an fp16 loss."""
ROUNDING = {None: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of rounding what a plan multiplies."""
FP8, FP8_TIMES = 2.0**-4, 4.0
"""Of `e4m3`, and as `TIMES`: 32 roundings of fp8 would move a number by twice its size."""
TF32 = 2.0**-11
"""A rounding of what a GPU multiplies in TF32."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HIDDEN = 0.5
"""A limit from which on a tensor shows no fault, over its size."""
ENOUGH, MOSTLY = 32, 0.98
"""Numbers that are needed to tell a format, and the share that must be in it."""
PARTLY = 0.8
"""The share in a 16-bit format from which a tensor of one device tells nothing of another run's: both are sums of few such numbers."""


SampleRange = tuple[int, int]
"""(first, count) of the samples of one forward pass."""


@dataclasses.dataclass
class _Passes:
    """A new model after forward and backward of all parts of a batch."""

    model: nn.Module
    start: dict[str, Tensor]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    gradients: dict[nn.Parameter, Tensor] = dataclasses.field(default_factory=dict)
    """Summed over the parts."""
    moved: list[dict[nn.Parameter, Tensor]] = dataclasses.field(default_factory=list)
    """The same sums with each part's gradient moved by rounding, one for each draw."""


@dataclasses.dataclass
class MeasuredStep:
    """One device's step and how far right runs may be from it."""

    base: StepResult
    limits: dict[Key, float]
    """Of any right run."""
    of_sums: dict[Key, float] = dataclasses.field(default_factory=dict)
    """Of a run whose losses of all parts are those of one device, bit for bit. Empty where no run is to have them."""
    one_product: frozenset[str] = frozenset()
    """Gradients that one product over the batch makes in 16 bits, which are sums over parts here: an expert has the rows of several ranks."""


def small(job: Job, plan: Plan, model: torch.nn.Module) -> Job:
    """The job with the smallest batch for the step: a sample for each part, two where batch statistics want them, and one more."""
    normed = any(hasattr(module, "running_mean") for module in model.modules())
    return dataclasses.replace(job, batch=plan.shares * plan.microbatches * (1 + normed) + 1)


class Reference:
    """One device in the formats of a plan. `one`: the same job in float64, which knows what the model draws."""

    def __init__(self, job: Job, plan: Plan, one: reference.OneDevice, clip: float):
        self.job, self.plan, self.one, self.clip = job, plan, one, clip
        self.data = job.data()
        self.read = next(reference.samples(self.job, self.data))
        self.format = plan_format(plan)
        """Of the plan's products."""
        self.in_16_bits = bool(self.format) or any(p.dtype in HALF.values() for p in self._model().parameters())
        """Whether products are, of all units or of some. Their rounding would hide that of sums."""
        tf32 = plan.precision == "tf32" and torch.device(one.device).type != "cpu"
        self.rounding = TF32 if tf32 else FP8 if plan.precision == "fp8" else ROUNDING[self.format]
        self.times = FP8_TIMES if plan.precision == "fp8" else TIMES
        self.same_products = not (plan.waits_in_forward or plan.compile or plan.pp > 1)
        """Whether ranks compute a part as one device does. Stages do forward, and sum the gradients of what several units read in another order."""

    def shares(self) -> list[list[SampleRange]]:
        """(first, count) of the parts of the batch, for each rank that has any."""
        n, plan = len(self.read[1]), self.plan
        shares = (BatchShare.of(plan, rank).parts(n) for rank in range(plan.ranks))
        return [parts for share in shares if (parts := [part for part in share if part[1]])]

    def measured(self) -> MeasuredStep:
        """The step, and the limits of each of its tensors."""
        torch.set_num_threads(threads(self.plan.world))  # products are summed in the order of the ranks' own
        whole = self._whole()
        (base,) = self.steps(whole)
        if not all(bool(t.isfinite().all()) for kind in GROUPS for t in getattr(base, kind).values()):
            raise ValueError("a gradient is not finite in this format")
        found = MeasuredStep(base, self._limits(base, whole, self.rounding, self.times))
        noise = {n: found.limits["gradient", n] * scale for n, scale in base.scales["gradient"].items()}
        narrow = (name for name, t in base.gradient.items() if self.plan.ep > 1 and short(t, noise=noise[name]))
        return dataclasses.replace(self._on_parts(found) or found, one_product=frozenset(narrow))

    def _on_parts(self, found: MeasuredStep) -> MeasuredStep | None:
        """The step on the plan's parts of the batch, if that is the step on the whole: not if batch statistics or a loss couple samples."""
        shares = self.shares()
        try:
            base, *runs = self.steps(shares, sums=2 * DRAWS)
        except (RuntimeError, ValueError):  # a batch norm wants two samples
            return None
        of_sums = limits(base, runs)
        found.limits = wider(found.limits, of_sums)
        if self._coupled(found, base):
            return None
        if not (self.same_products and self.in_16_bits):
            return MeasuredStep(base, found.limits)
        if self.format is None:
            return MeasuredStep(base, found.limits, of_sums)
        narrow = self._limits(base, shares, ROUNDING[None], TIMES, own=False)
        return MeasuredStep(base, wider(narrow, of_sums), of_sums)

    def _coupled(self, whole: MeasuredStep, parts: StepResult) -> bool:
        """Whether batch statistics or a loss couple samples of different parts. A scale of fp8 does so in any job: bf16 shows what else does."""
        if self.plan.precision == "fp8":
            other = Reference(self.job, dataclasses.replace(self.plan, precision="bf16"), self.one, self.clip)
            (base,), (parts,) = other.steps(self._whole()), other.steps(self.shares())
            whole = MeasuredStep(base, other._limits(base, self._whole(), other.rounding, other.times))
        return any(off > whole.limits[key] for key, off in distances(whole.base, parts).items())

    def _whole(self) -> list[list[SampleRange]]:
        """The batch as one share of one part."""
        return [[(0, len(self.read[1]))]]

    def _limits(
        self, base: StepResult, shares: list[list[SampleRange]], operands: float, times: float, own: bool = True
    ) -> dict[Key, float]:
        """The limits of a step on these shares of the batch, by runs with weights and inputs moved by one rounding and by `times`."""
        moved = lambda by: (  # noqa: E731
            run for draw in range(DRAWS) for run in self.steps(shares, Noise(draw, by, operands, own))
        )
        return wider(limits(base, moved(1.0), times), limits(base, moved(times)))

    def steps(self, shares: list[list[SampleRange]], noise: Noise | None = None, sums: int = 0) -> list[StepResult]:
        """A step of a new model, its loss and gradients summed over the parts of the batch. Each rank's share starts from the model's
        initial state, as on that rank. After it `sums` more steps, with the gradient of each part moved by rounding before it is added."""
        with multiplying(self.plan), loss_kept(self.job.loss, self.one.model):
            passes = self._passes(shares, noise, sums)
            before = [p.detach().clone() for p in passes.model.parameters()] if sums else []
            found = [self._updated(passes, passes.gradients)]
            for gradients in passes.moved:
                with torch.no_grad():
                    for parameter, value in zip(passes.model.parameters(), before):
                        parameter.copy_(value)
                found.append(self._updated(passes, gradients))
        return found

    def _passes(self, shares: list[list[SampleRange]], noise: Noise | None, sums: int) -> _Passes:
        job, device = self.job, self.one.device
        model = self._model()
        generator = torch.Generator().manual_seed(0 if noise is None else noise.draw + 1)
        shift = lambda t: t if noise is None else noise.operand(t, generator)  # noqa: E731
        split = lambda t: torch.where(t == t.round(), t, shift(t)) if t.is_floating_point() else shift(t)  # noqa: E731
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(shift(parameter))
        found = _Passes(model, reference.copied(model.named_parameters()), moved=[{} for _ in range(sums)])
        optimizer_of(job, dict(model.named_parameters()))  # it may register hooks, which backward runs
        keyed = Randomness(job.seed, self.one.keyed.places, self.one.keyed.needed).install(model)
        scale = self._scale()
        pairs = {part: self._pair(*part, split) for share in shares for part in share}
        weights = {part: weigh(job.weight, Micro(*part, None, targets, ())) for part, (_, targets) in pairs.items()}
        factor = lambda part: weights[part] / sum(weights.values()) * scale * float(shift(torch.ones(())))  # noqa: E731
        for share in shares:
            with nullcontext() if share is shares[-1] else _state_kept(found):
                for first, n in (part for part in share if weights[part]):
                    inputs, targets = pairs[first, n]
                    with autocast(device, self.format), keyed.at(0, first, n):
                        loss = job.loss(self._called(model, inputs), targets)
                    found.losses[str(first)] = float(loss.detach())
                    with keyed.replay():
                        (loss * factor((first, n))).backward()
                    _add(found, generator)
        return found

    def _model(self) -> nn.Module:
        model = reference.make_model(self.job, None, self.one.device)
        if self.plan.precision == "fp8":
            on_host = torch.device(self.one.device).type == "cpu"
            fp8.convert(model, fp8.chosen(model, self.plan.tp), self.plan.fp8_recipe, on_host)
        return model

    def _scale(self) -> float:
        return SCALE if self.format is torch.float16 else 1.0

    def _updated(self, passes: _Passes, summed: dict[nn.Parameter, Tensor]) -> StepResult:
        """The optimizer's step with these gradients, by the kernel that the plan's ranks take: of another, betas may be rounded."""
        job, model = self.job, passes.model
        for parameter in model.parameters():
            parameter.grad = summed[parameter].div_(self._scale()) if parameter in summed else None
        gradient = reference.gradients(model)
        clip((p for p in model.parameters() if p.requires_grad), self.clip)
        trained = {n: self._kept(p) for n, p in model.named_parameters()}
        optimizer = optimizer_of(job, trained)
        optimizers.choose(optimizer, torch.device(self.one.device))
        for group in optimizer.param_groups:
            group["lr"] *= job.schedule(0) if job.schedule else 1.0
        optimizer.step()
        state = states(optimizer, {id(p): n for n, p in trained.items()})
        start = {n: t.to(trained[n].device) for n, t in passes.start.items()}
        return StepResult(start, gradient, reference.copied(trained.items()), state, passes.losses)

    def _kept(self, parameter: nn.Parameter) -> nn.Parameter:
        """Where the plan keeps what the optimizer updates."""
        if self.plan.offload == "none" or parameter.device.type == "cpu":
            return parameter
        kept = like(parameter, parameter.detach().cpu())
        kept.grad = None if parameter.grad is None else parameter.grad.cpu()
        return kept

    def _called(self, model: nn.Module, inputs: object) -> Any:
        """The model's outputs; where weights are gathered in 16 bits it computes with those."""
        if self.format is None or not fsdp.wanted(self.plan):
            return reference.call(model, inputs)
        half = {n: p.to(self.format) for n, p in model.named_parameters() if is_divisible(p.shape) and p.is_floating_point()}
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


@contextmanager
def _state_kept(passes: _Passes) -> Iterator[None]:
    """What the model's forward passes inside write into its state is put back, weights included."""
    with state_kept(passes.model.modules()):
        yield
    with torch.no_grad():
        for name, parameter in passes.model.named_parameters():
            parameter.copy_(passes.start[name])


def _add(passes: _Passes, generator: torch.Generator) -> None:
    """Add a part's gradients to the sums, as backward does, and take them away."""
    for parameter in passes.model.parameters():
        if (gradient := parameter.grad) is None:
            continue
        one = rounding(gradient.dtype)
        terms = [gradient.detach(), *(moved(gradient, TIMES * one, generator) for _ in passes.moved)]
        for sums, term in zip((passes.gradients, *passes.moved), terms):
            sums[parameter] = sums[parameter] + term if parameter in sums else term
        parameter.grad = None


def short(t: Tensor, share: float = MOSTLY, noise: float = 0.0) -> str:
    """A 16-bit format that has this share of an fp32 tensor's values, if one does. Values up to `noise` do not count: what is left
    of a sum that is truly zero is a few units of the last place, and has few bits in any format. Too few values tell nothing."""
    if t.dtype != torch.float32:
        return ""
    some = t[t.abs() > noise]
    if some.numel() < ENOUGH:
        return ""
    return next((n for n, d in HALF.items() if float((some.to(d).float() == some).double().mean()) > share), "")


def facts(one: Reference) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """(JSON values, tensors by group) of one device: what `judged` compares with."""
    measured = one.measured()
    base = measured.base
    tensors = {f"formats_{kind}": getattr(base, kind) for kind in ("start", *GROUPS)}
    known: dict[str, Any] = {"limits": _named(measured.limits), "of_sums": _named(measured.of_sums)}
    known["one product"] = sorted(measured.one_product)
    known |= {"losses": base.losses, "dtypes": dtypes(base.gradient, base.weight, base.state), "batch": one.job.batch}
    return known, tensors


def _named(limits: Mapping[Key, float]) -> dict[str, float]:
    return {f"{kind} {name}": limit for (kind, name), limit in limits.items()}


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
    """The probe of the values, of the formats, and of the messages."""
    known = expected.facts.get("formats")
    if not known:
        return ()
    base, other = (StepResult(*(getattr(t, f"formats_{k}") for k in ("start", *GROUPS))) for t in (expected, actual))
    other.start = base.start
    losses = {key: loss for r in ranks for key, loss in r["formats"]["losses"].items()}
    same = bool(known["of_sums"]) and losses == known["losses"]  # only the order of sums over parts differs
    allowed = known["of_sums"] if same else known["limits"]
    off = _named(distances(base, other))
    shares = {key: off[key] / allowed[key] for key in off if off[key]}
    worst = max(shares, key=lambda key: shares[key], default=next(iter(off), ""))
    values = Probe("F", "own formats, of their limit", shares.get(worst, 0.0), 1.0, worst)
    return values, _formats(known, base, other, ranks), *([messages(ranks, dry)] if dry is not None else [])


def unseen(known: dict[str, Any]) -> list[str]:
    """A line about tensors in which the step in own formats shows nothing, if there are any."""
    loose = [key for key, limit in known["limits"].items() if limit >= HIDDEN]
    if not loose or known["of_sums"]:
        return []
    many = f"{len(loose)} of {len(known['limits'])} tensors"
    alone = f"in the plan's own formats rounding alone moves {many} by half of their size or more"
    return [f"{alone}: a fault there would not be seen (first: {loose[0]})"]


def _formats(known: dict[str, Any], base: StepResult, other: StepResult, ranks: list[dict[str, Any]]) -> Probe:
    """What is kept in another format, or has been through one."""
    wrong: dict[str, str] = {}
    for rank, r in enumerate(ranks):
        for key, dtype in r["formats"]["dtypes"].items():
            if known["dtypes"].get(key, dtype) != dtype:
                wrong.setdefault(key, f"{dtype} on rank {rank}, {known['dtypes'][key]} on one device")
    for kind in GROUPS:
        scale = base.scales[kind]
        for name, tensor in getattr(other, kind).items():
            usual = getattr(base, kind).get(name)
            noise = known["limits"].get(f"{kind} {name}", 0.0) * scale.get(name, 0.0)
            if usual is None or not usual.dtype == tensor.dtype == torch.float32 or int((usual.abs() > noise).sum()) < ENOUGH:
                continue
            alike = kind == "gradient" and name in known.get("one product", ())
            if (found := short(tensor, noise=noise)) and not short(usual, PARTLY, noise) and not alike:
                wrong.setdefault(f"{kind} {name}", f"all its values are values of {found}, in {tensor.dtype}")
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
    far = f"{wrong['F'].worst:.3g} times as far from one device as runs of one device that are moved by roundings"
    return "V025", f"{wrong['F'].name} is {far}: something is rounded through a narrower format on the way"
