"""One step in the plan's own number formats, compared with one device in the same formats: the third part of `verify`.

Float64 proves the logic but replaces every format. It cannot detect a sum in bf16, state in bf16, or a message that is rounded in transfer.
Here the job trains one step in its real formats. Two things are compared:

    tensors    with those of one device in the same formats. The limit of each is its largest distance between runs of one device
               with randomly rounded weights and inputs (`proof/rounding.py`)
    formats    gradients, weights and optimizer state have the formats of one device, and every message has the size that a dry run
               of the plan predicts in these formats

The reference sums gradients of the same parts of the batch (local batches and micro-batches), unless batch statistics or a loss couple
samples. (An fp8 scale couples the samples of one part, in any job.) In a plan without `pp`, `tp`, `cp` and `ep`, ranks compute each part
exactly as one device does. If products are in 16 bits or fp8, the losses of all parts are compared bit by bit. If they are equal, only the
order of sums over parts differs: the limits then come from runs with each part's gradient perturbed by a rounding of its own format.
Otherwise only the operands of these products may differ, and weights and inputs are perturbed by a rounding of fp32. Other plans sum
products in another order or share another fp8 scale. There, weights and inputs are perturbed by a rounding of the plan's format, or of
their own format if that is wider.
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
from plait.data.batch import BatchShare, MicroBatch, collate, collate_with_others, is_map, weigh_micro_batch
from plait.launch.place import count_threads
from plait.model import optimizers
from plait.model.parameter_groups import build_optimizer
from plait.parallel import fp8
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.precision import find_autocast_dtype, make_autocast, use_matmul_precision
from plait.parallel.spec import is_shardable
from plait.proof import reference
from plait.proof.probes import Probe, Trace, compare_collectives
from plait.proof.rounding import (
    DRAWS,
    GROUPS,
    MAX_ROUNDINGS,
    Key,
    Noise,
    StepResult,
    compute_limits,
    compute_unit_roundoff,
    measure_distances,
    perturb_tensor,
    widen_limits,
)  # fmt: skip
from plait.randomness.keyed import Randomness
from plait.tensors.module_state import restore_loss_state, restore_module_state
from plait.tensors.norm import clip_gradients
from plait.tensors.parameters import make_parameter_like
from plait.tensors.torch_private import tree_map_only

LOSS_SCALE = 256.0
"""Loss scale in fp16."""
ROUNDING = {None: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding the operands of a plan's products."""
FP8, FP8_MAX_ROUNDINGS = 2.0**-4, 4.0
"""Rounding error of `e4m3`, and its `MAX_ROUNDINGS`: 32 fp8 roundings would move a value by twice its size."""
TF32 = 2.0**-11
"""Rounding error of the operands that a GPU multiplies in TF32."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLIND_LIMIT = 0.5
"""Limit, relative to a tensor's size, from which on no fault can be detected in it."""
MIN_VALUES, MIN_SHARE = 32, 0.98
"""Values needed to recognize a format, and the fraction of them that must be in it."""
MAX_REFERENCE_SHARE = 0.8
"""Fraction of a reference tensor's values in a 16-bit format above which the format of the split run is not judged. Both are then sums of few
16-bit values."""


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
    """The same sums with each part's gradient perturbed by rounding, one for each draw."""


@dataclasses.dataclass
class MeasuredStep:
    """The step of one device and the largest allowed distance from it."""

    base: StepResult
    limits: dict[Key, float]
    """For any correct run."""
    sum_limits: dict[Key, float] = dataclasses.field(default_factory=dict)
    """For a run whose part losses equal those of one device bit for bit. Empty if no run can have them."""
    one_product: frozenset[str] = frozenset()
    """Gradients that ranks compute as one 16-bit product over the batch, but the reference as sums over parts. Under `ep`, an expert has rows
    of several ranks."""


def shrink_batch(job: Job, plan: Plan, model: torch.nn.Module) -> Job:
    """Return the job with the smallest usable batch: one sample per part, or two with batch statistics, plus one."""
    normed = any(hasattr(module, "running_mean") for module in model.modules())
    return dataclasses.replace(job, batch=plan.shares * plan.microbatches * (1 + normed) + 1)


class FormatReference:
    """One device in the number formats of a plan. `one`: the same job in float64, with the places where the model draws random numbers."""

    def __init__(self, job: Job, plan: Plan, one: reference.OneDevice, clip: float):
        self.job, self.plan, self.one, self.clip = job, plan, one, clip
        self.data = job.data()
        self.read = next(reference.iterate_samples(self.job, self.data))
        self.format = find_autocast_dtype(plan)
        """Format of the plan's products."""
        self.in_16_bits = bool(self.format) or any(p.dtype in HALF.values() for p in self._make_model().parameters())
        """True if the products of some or all units are in 16 bits. Their rounding would hide the rounding of sums."""
        tf32 = plan.precision == "tf32" and torch.device(one.device).type != "cpu"
        self.rounding = TF32 if tf32 else FP8 if plan.precision == "fp8" else ROUNDING[self.format]
        self.times = FP8_MAX_ROUNDINGS if plan.precision == "fp8" else MAX_ROUNDINGS
        self.same_products = not (plan.waits_in_forward or plan.compile or plan.pp > 1)
        """True if ranks compute a part as one device does. Pipeline stages do so in forward, but sum gradients of shared values in another order."""

    def split_batch(self) -> list[list[SampleRange]]:
        """(first, count) of the parts of the batch, for each rank that has any."""
        n, plan = len(self.read[1]), self.plan
        shares = (BatchShare.from_plan(plan, rank).locate_micro_batches(n) for rank in range(plan.ranks))
        return [parts for share in shares if (parts := [part for part in share if part[1]])]

    def measure(self) -> MeasuredStep:
        """Measure the step and the limits of each tensor."""
        torch.set_num_threads(count_threads(self.plan.world))  # products are summed in the same order as on the ranks
        whole = self._get_full_batch()
        (base,) = self.run_steps(whole)
        if not all(bool(t.isfinite().all()) for kind in GROUPS for t in getattr(base, kind).values()):
            raise ValueError("a gradient is not finite in this format")
        found = MeasuredStep(base, self._measure_limits(base, whole, self.rounding, self.times))
        noise = {n: found.limits["gradient", n] * scale for n, scale in base.scales["gradient"].items()}
        narrow = (name for name, t in base.gradient.items() if self.plan.ep > 1 and find_narrow_format(t, noise=noise[name]))
        return dataclasses.replace(self._measure_parts(found) or found, one_product=frozenset(narrow))

    def _measure_parts(self, found: MeasuredStep) -> MeasuredStep | None:
        """Measure the step on the plan's parts of the batch. None if batch statistics or a loss couple samples across parts."""
        shares = self.split_batch()
        try:
            base, *runs = self.run_steps(shares, sums=2 * DRAWS)
        except (RuntimeError, ValueError):  # batch normalization needs two samples
            return None
        of_sums = compute_limits(base, runs)
        found.limits = widen_limits(found.limits, of_sums)
        if self._is_coupled(found, base):
            return None
        if not (self.same_products and self.in_16_bits):
            return MeasuredStep(base, found.limits)
        if self.format is None:
            return MeasuredStep(base, found.limits, of_sums)
        narrow = self._measure_limits(base, shares, ROUNDING[None], MAX_ROUNDINGS, own=False)
        return MeasuredStep(base, widen_limits(narrow, of_sums), of_sums)

    def _is_coupled(self, whole: MeasuredStep, parts: StepResult) -> bool:
        """True if batch statistics or a loss couple samples of different parts. For fp8, a bf16 run decides: an fp8 scale always couples samples."""
        if self.plan.precision == "fp8":
            other = FormatReference(self.job, dataclasses.replace(self.plan, precision="bf16"), self.one, self.clip)
            (base,), (parts,) = other.run_steps(self._get_full_batch()), other.run_steps(self.split_batch())
            whole = MeasuredStep(base, other._measure_limits(base, self._get_full_batch(), other.rounding, other.times))
        return any(off > whole.limits[key] for key, off in measure_distances(whole.base, parts).items())

    def _get_full_batch(self) -> list[list[SampleRange]]:
        """The full batch as one local batch with one part."""
        return [[(0, len(self.read[1]))]]

    def _measure_limits(
        self, base: StepResult, shares: list[list[SampleRange]], operands: float, times: float, own: bool = True
    ) -> dict[Key, float]:
        """Measure limits on these parts of the batch, in runs with weights and inputs perturbed by one rounding and by `times` roundings."""
        moved = lambda by: (  # noqa: E731
            run for draw in range(DRAWS) for run in self.run_steps(shares, Noise(draw, by, operands, own))
        )
        return widen_limits(compute_limits(base, moved(1.0), times), compute_limits(base, moved(times)))

    def run_steps(self, shares: list[list[SampleRange]], noise: Noise | None = None, sums: int = 0) -> list[StepResult]:
        """Run a step of a new model; loss and gradients are summed over the parts of the batch. As on the ranks, each local batch starts from
        the model's initial state. Then run `sums` more steps, with the gradient of each part perturbed by rounding before it is added."""
        with use_matmul_precision(self.plan), restore_loss_state(self.job.loss, self.one.model):
            passes = self._run_passes(shares, noise, sums)
            before = [p.detach().clone() for p in passes.model.parameters()] if sums else []
            found = [self._update_weights(passes, passes.gradients)]
            for gradients in passes.moved:
                with torch.no_grad():
                    for parameter, value in zip(passes.model.parameters(), before):
                        parameter.copy_(value)
                found.append(self._update_weights(passes, gradients))
        return found

    def _run_passes(self, shares: list[list[SampleRange]], noise: Noise | None, sums: int) -> _Passes:
        job, device = self.job, self.one.device
        model = self._make_model()
        generator = torch.Generator().manual_seed(0 if noise is None else noise.draw + 1)
        shift = lambda t: t if noise is None else noise.perturb(t, generator)  # noqa: E731
        split = lambda t: torch.where(t == t.round(), t, shift(t)) if t.is_floating_point() else shift(t)  # noqa: E731
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(shift(parameter))
        found = _Passes(model, reference.copy_tensors(model.named_parameters()), moved=[{} for _ in range(sums)])
        build_optimizer(job, dict(model.named_parameters()))  # it may register hooks, which backward runs
        keyed = Randomness(job.seed, self.one.keyed.places, self.one.keyed.is_needed).install(model)
        scale = self._get_loss_scale()
        pairs = {part: self._load_part(*part, split) for share in shares for part in share}
        weights = {part: weigh_micro_batch(job.weight, MicroBatch(*part, None, targets, ())) for part, (_, targets) in pairs.items()}
        factor = lambda part: weights[part] / sum(weights.values()) * scale * float(shift(torch.ones(())))  # noqa: E731
        for share in shares:
            with nullcontext() if share is shares[-1] else _restore_state(found):
                for first, n in (part for part in share if weights[part]):
                    inputs, targets = pairs[first, n]
                    with make_autocast(device, self.format), keyed.forward_pass(0, first, n):
                        loss = job.loss(self._call_model(model, inputs), targets)
                    found.losses[str(first)] = float(loss.detach())
                    with keyed.replay():
                        (loss * factor((first, n))).backward()
                    _add_gradients(found, generator)
        return found

    def _make_model(self) -> nn.Module:
        model = reference.make_reference_model(self.job, None, self.one.device)
        if self.plan.precision == "fp8":
            on_host = torch.device(self.one.device).type == "cpu"
            fp8.convert_layers(model, fp8.choose_layers(model, self.plan.tp), self.plan.fp8_recipe, on_host)
        return model

    def _get_loss_scale(self) -> float:
        return LOSS_SCALE if self.format is torch.float16 else 1.0

    def _update_weights(self, passes: _Passes, summed: dict[nn.Parameter, Tensor]) -> StepResult:
        """Run the optimizer step with these gradients, with the same optimizer kernel as on the ranks: other kernels may round betas differently."""
        job, model = self.job, passes.model
        for parameter in model.parameters():
            parameter.grad = summed[parameter].div_(self._get_loss_scale()) if parameter in summed else None
        gradient = reference.copy_gradients(model)
        clip_gradients((p for p in model.parameters() if p.requires_grad), self.clip)
        trained = {n: self._offload_parameter(p) for n, p in model.named_parameters()}
        optimizer = build_optimizer(job, trained)
        optimizers.fuse_update(optimizer, torch.device(self.one.device))
        for group in optimizer.param_groups:
            group["lr"] *= job.schedule(0) if job.schedule else 1.0
        optimizer.step()
        state = collect_optimizer_state(optimizer, {id(p): n for n, p in trained.items()})
        start = {n: t.to(trained[n].device) for n, t in passes.start.items()}
        return StepResult(start, gradient, reference.copy_tensors(trained.items()), state, passes.losses)

    def _offload_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Copy of a parameter on the device where the plan updates it (see `offload`)."""
        if self.plan.offload == "none" or parameter.device.type == "cpu":
            return parameter
        kept = make_parameter_like(parameter, parameter.detach().cpu())
        kept.grad = None if parameter.grad is None else parameter.grad.cpu()
        return kept

    def _call_model(self, model: nn.Module, inputs: object) -> Any:
        """Outputs of the model, computed with 16-bit weights if the plan gathers weights in 16 bits."""
        if self.format is None or not fsdp.is_enabled(self.plan):
            return reference.call_model(model, inputs)
        half = {n: p.to(self.format) for n, p in model.named_parameters() if is_shardable(p.shape) and p.is_floating_point()}
        if isinstance(inputs, dict):
            return functional_call(model, half, (), inputs)
        return functional_call(model, half, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))

    def _load_part(self, first: int, n: int, shift: Callable[[Tensor], Tensor]) -> Any:
        some, last = self.read[2][first : first + n], self.read[1][first + n - 1]
        again = (lambda: self.data[last]) if is_map(self.data) else lambda: None
        reference.load_seeded(self.job, self.read[0], last, again)  # seed the random numbers drawn while samples are collated
        rest = [*self.read[2][:first], *self.read[2][first + n :]]
        pair = collate_with_others(self.data, some, rest) if hasattr(self.data, "collate") and rest else collate(self.data, some)
        inputs, targets = tree_map_only(Tensor, lambda t: t.to(self.one.device), tuple(pair))
        return tree_map_only(Tensor, shift, inputs), targets


@contextmanager
def _restore_state(passes: _Passes) -> Iterator[None]:
    """Restore the model's state and weights after the forward passes inside this context."""
    with restore_module_state(passes.model.modules()):
        yield
    with torch.no_grad():
        for name, parameter in passes.model.named_parameters():
            parameter.copy_(passes.start[name])


def _add_gradients(passes: _Passes, generator: torch.Generator) -> None:
    """Add a part's gradients to the sums, as backward does, and reset them."""
    for parameter in passes.model.parameters():
        if (gradient := parameter.grad) is None:
            continue
        one = compute_unit_roundoff(gradient.dtype)
        terms = [gradient.detach(), *(perturb_tensor(gradient, MAX_ROUNDINGS * one, generator) for _ in passes.moved)]
        for sums, term in zip((passes.gradients, *passes.moved), terms):
            sums[parameter] = sums[parameter] + term if parameter in sums else term
        parameter.grad = None


def find_narrow_format(t: Tensor, share: float = MIN_SHARE, noise: float = 0.0) -> str:
    """Return a 16-bit format that has more than `share` of an fp32 tensor's values, or "". Values up to `noise` are ignored: the residue of a
    sum that is truly zero has few bits in any format. Too few values give ""."""
    if t.dtype != torch.float32:
        return ""
    some = t[t.abs() > noise]
    if some.numel() < MIN_VALUES:
        return ""
    return next((n for n, d in HALF.items() if float((some.to(d).float() == some).double().mean()) > share), "")


def collect_facts(one: FormatReference) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """(JSON values, tensors by group) of one device, as input of `compare_formats`."""
    measured = one.measure()
    base = measured.base
    tensors = {f"formats_{kind}": getattr(base, kind) for kind in ("start", *GROUPS)}
    known: dict[str, Any] = {"limits": _flatten_keys(measured.limits), "of_sums": _flatten_keys(measured.sum_limits)}
    known["one product"] = sorted(measured.one_product)
    known |= {"losses": base.losses, "dtypes": collect_dtypes(base.gradient, base.weight, base.state), "batch": one.job.batch}
    return known, tensors


def _flatten_keys(limits: Mapping[Key, float]) -> dict[str, float]:
    return {f"{kind} {name}": limit for (kind, name), limit in limits.items()}


def collect_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Elementwise optimizer state: `name|key` -> tensor. `names`: by the parameter's id."""
    return {
        f"{names[id(p)]}|{key}": value
        for p, kept in optimizer.state.items()
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.shape == p.shape
    }


def collect_dtypes(*kinds: Mapping[str, Tensor]) -> dict[str, str]:
    """Format of each tensor, by `kind name`."""
    return {f"{kind} {name}": str(t.dtype) for kind, ts in zip(GROUPS, kinds) for name, t in ts.items()}


def compare_formats(
    expected: Trace, actual: Trace, ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str | None
) -> tuple[Probe, ...]:
    """Compare values, formats and messages of the step."""
    known = expected.facts.get("formats")
    if not known:
        return ()
    base, other = (StepResult(*(getattr(t, f"formats_{k}") for k in ("start", *GROUPS))) for t in (expected, actual))
    other.start = base.start
    losses = {key: loss for r in ranks for key, loss in r["formats"]["losses"].items()}
    same = bool(known["of_sums"]) and losses == known["losses"]  # only the order of sums over parts differs
    allowed = known["of_sums"] if same else known["limits"]
    off = _flatten_keys(measure_distances(base, other))
    shares = {key: off[key] / allowed[key] for key in off if off[key]}
    worst = max(shares, key=lambda key: shares[key], default=next(iter(off), ""))
    values = Probe("F", "own formats, of their limit", shares.get(worst, 0.0), 1.0, worst)
    return values, _compare_dtypes(known, base, other, ranks), *([compare_messages(ranks, dry)] if dry is not None else [])


def describe_blind_spots(known: dict[str, Any]) -> list[str]:
    """List (in one line) tensors in which the step in the plan's formats cannot detect faults."""
    loose = [key for key, limit in known["limits"].items() if limit >= BLIND_LIMIT]
    if not loose or known["of_sums"]:
        return []
    many = f"{len(loose)} of {len(known['limits'])} tensors"
    alone = f"in the plan's own formats, rounding alone changes {many} by half of their size or more"
    return [f"{alone}: a fault there would not be detected (first: {loose[0]})"]


def _compare_dtypes(known: dict[str, Any], base: StepResult, other: StepResult, ranks: list[dict[str, Any]]) -> Probe:
    """Compare the dtypes of tensors, and find values that were rounded to a narrower format."""
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
            if usual is None or not usual.dtype == tensor.dtype == torch.float32 or int((usual.abs() > noise).sum()) < MIN_VALUES:
                continue
            alike = kind == "gradient" and name in known.get("one product", ())
            if (found := find_narrow_format(tensor, noise=noise)) and not find_narrow_format(usual, MAX_REFERENCE_SHARE, noise) and not alike:
                wrong.setdefault(f"{kind} {name}", f"all its values fit into {found}, although it has {tensor.dtype}")
    key, detail = next(iter(wrong.items()), ("", ""))
    return Probe("F2", "formats", len(wrong), 0, key, detail)


def compare_messages(ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str) -> Probe:
    """Compare the messages of every rank in these formats with a dry run."""
    asked = [r | {k: r["formats"][k] for k in ("alike", "sizes", "collectives", "sent")} for r in ranks]
    found = compare_collectives(asked, dry)
    return dataclasses.replace(found, code="F3", title="messages, own formats")


def explain_formats(probes: tuple[Probe, ...]) -> tuple[str, str]:
    """(code, sentence) if float64 agrees and the plan's own formats do not."""
    wrong = {p.code: p for p in probes if not p.equal}
    if "F2" in wrong:
        return "V023", f"{wrong['F2'].name}: {wrong['F2'].detail}"
    if "F3" in wrong:
        return "V024", f"messages do not have the sizes of the plan's formats: {wrong['F3'].name}, {wrong['F3'].detail}"
    far = f"{wrong['F'].worst:.3g} times as far from one device as randomly rounded runs of one device"
    return "V025", f"{wrong['F'].name} is {far}: a value is rounded to a narrower format on the way"
