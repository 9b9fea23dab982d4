"""Why a script trains another model: each cause is shown by what would have been right, else it is unknown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from plait.scripts.numbers import BothSides, StepDifference
from plait.scripts.recordings import Recording, unlike
from plait.scripts.rows import Cause, Readers, faults

AGREES = 1e-3
"""How far a number that explains a difference may be from it, relative."""
FIXES = {
    "E020": ("--float64 shows whether it is rounding",),
    "E021": (
        "start several processes that join: torchrun --nproc-per-node 2, or accelerate launch --multi_cpu --num_processes 2",
        "and call torch.distributed.init_process_group(), or give both commands the same number of rows a step",
    ),
    "E022": (
        "DataLoader(..., sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch) in each epoch",
        "Accelerate: accelerator.prepare(loader)",
    ),
    "E023": ("call sampler.set_epoch(epoch) at the start of each epoch",),
    "E024": ("DataLoader(..., sampler=DistributedSampler(dataset)): ranks shuffle with one seed and take different rows",),
    "E025": ("choose batch sizes so that processes × batch × accumulation = the reference's batch",),
    "E026": (
        "call torch.manual_seed with the same seed on all ranks before the model is made",
        "or wrap the model in DistributedDataParallel, which sends rank 0's weights",
    ),
    "E027": (
        "step the scheduler once for each optimizer step, not once for each process or micro-batch",
        "Accelerate steps a prepared scheduler once for each process: leave it out of prepare(), or multiply its numbers of steps by the processes",
    ),
    "E028": ("use the same optimizer and parameter groups: names of parameters change where a model is wrapped",),
    "E029": ("make the optimizer of all parameters, after the model was wrapped, and freeze the same ones",),
    "E030": (
        "sum the loss over tokens, and divide by the tokens of all ranks and micro-batches of the step (all_reduce), times the number of ranks",
        "Trainer: let the model compute its loss (num_items_in_batch), with average_tokens_across_devices=True",
    ),
    "E031": (
        "divide once: DistributedDataParallel and FSDP divide by the number of ranks, Accelerate and Trainer by the accumulation steps",
        "by hand: (loss / accumulation_steps).backward()",
    ),
    "E032": ("these gradients are summed twice, or not at all: sum each one once",),
    "E033": (
        "clip by the norm of the whole gradient: torch.nn.utils.clip_grad_norm_(model.parameters(), ...) knows FSDP2's and DTensor's parts",
        "with the same limit, after GradScaler.unscale_ and after the sum over ranks",
    ),
    "E034": (
        "DistributedDataParallel sums all gradients in backward, but not inside of no_sync()",
        "by hand: all_reduce every parameter's gradient, and divide by the number of ranks",
    ),
    "E035": (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DistributedDataParallel (GPUs)",
        "or a norm that does not couple rows (LayerNorm, GroupNorm)",
    ),
    "E036": ("give the ranks of a tensor-parallel group the same rows: DistributedSampler(dataset, num_replicas=DP, rank=DP_RANK)",),
}
"""What to change, by the code of the cause."""


@dataclass(frozen=True)
class Case:
    """What both sides did. `first`: the first step whose gradients, before clipping or as applied, are not the reference's."""

    sides: BothSides
    readers: Readers
    first: StepDifference | None

    @property
    def candidate(self) -> Recording:
        return self.sides.candidate[0]


def cause_of(case: Case) -> Cause:
    """The cause of a difference: the first that can be shown."""
    for find in (_rows, _starts, _settings, _gradients, _differing_buffers):
        if (found := next(find(case), None)) is not None:
            return found
    return Cause("E020", "unknown: none of the known mistakes gives these numbers")


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rows(case: Case) -> Iterator[Cause]:
    return faults(case.readers, case.sides.reference)


def _starts(case: Case) -> Iterator[Cause]:
    ranks = case.sides.candidate
    if len(ranks) > 1 and all(each.start.world == 1 for each in ranks):
        yield Cause("E021", f"{len(ranks)} processes trained, and none joined the others")
    for each in ranks[1:]:
        if names := each.other_start(ranks[0]):
            yield Cause("E026", f"{_several(names)} of the parameters begin with other values on rank {each.rank} than on rank 0")


def _settings(case: Case) -> Iterator[Cause]:
    for each in case.sides.compared:
        mine, other, when = each.candidate, each.reference, f"in step {each.number}"
        if mine.kind != other.kind:
            yield Cause("E028", f"{when} the optimizer is {mine.kind}, the reference's {other.kind}")
        if len(mine.lr) != len(other.lr) or any(abs(a - b) > 1e-6 * abs(b) for a, b in zip(mine.lr, other.lr)):
            yield Cause("E027", f"{when} the learning rate is {mine.lr[0]:.6g}, the reference's {other.lr[0]:.6g}{_pace(case, each)}")
        if left := sorted(set(other.weights) - set(mine.weights)):
            yield Cause("E029", f"{_several(left)} of the parameters are not in the optimizer")
        if names := [name for name in other.decay if mine.decay.get(name) != other.decay[name]]:
            yield Cause("E028", f"weight decay of {names[0]} is {mine.decay.get(names[0]):.6g}, the reference's {other.decay[names[0]]:.6g}")
        if left := sorted(set(mine.without) - set(other.without)):
            yield Cause("E029", f"{when} {_several(left)} of the parameters have no gradient, as they have in the reference")


def _pace(case: Case, each: StepDifference) -> str:
    """How often a schedule is stepped, if its rate is the reference's of another step."""
    rates, place = [other.reference.lr for other in case.sides.compared if other.reference.optimizer == each.reference.optimizer], each.number - 1
    if not place or each.candidate.lr not in rates:
        return ""
    return f", which has this one in its step {rates.index(each.candidate.lr) + 1}"


def _gradients(case: Case) -> Iterator[Cause]:
    if case.first is None:
        return
    wrong = [point for point in ("after", "gradients", "applied") if case.first.wrong(point)]
    if wrong[0] == "after" or not case.first.points["after"].off:
        finds = (_tokens, _scaled, _not_averaged, _statistics, _some_scaled)
    else:  # right after backward
        finds = (_not_averaged, _some_scaled, _clipped)
    for find in finds:
        yield from find(case, case.first)


def _tokens(case: Case, step: StepDifference) -> Iterator[Cause]:
    """A mean of means: the weights of the losses that give the reference's loss say of what."""
    used = [each.used[step.number - 1] for each in case.readers.distinct if step.number <= len(each.used)]
    losses = [each.rounds[step.number - 1][0].losses for each in case.readers.distinct]
    right, plain, micros = sum(step.reference.losses), sum(map(sum, losses)) / len(losses), len(losses[0])
    if not used or any(len(batches) != micros or len(loss) != micros for batches, loss in zip(used, losses)):
        return
    for shifted in (0, 1):
        counts = [[batch.labels[shifted] if batch.labels else 0 for batch in batches] for batches in used]
        if not sum(map(sum, counts)) or len({n for each in counts for n in each}) == 1:
            continue
        for name, weighted in _weightings(counts, losses).items():
            for factor in {1.0, float(micros)}:
                if abs(weighted / factor - right) < 2e-6 * abs(right) < abs(plain / factor - right):
                    told = f"weighted by these labels the losses give the reference's {right:.7g}, as they are {plain / factor:.7g}: {counts}"
                    yield Cause("E030", f"a mean over unequal numbers of tokens {name}; {told}")


def _weightings(counts: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> dict[str, float]:
    ranks, micros, total = range(len(losses)), range(len(losses[0])), sum(map(sum, counts))
    by_micro = [(sum(counts[r][m] for r in ranks), sum(losses[r][m] for r in ranks) / len(losses)) for m in micros]
    return {
        "of each rank and micro-batch": sum(counts[r][m] * losses[r][m] for r in ranks for m in micros) / total * len(micros),
        "of each micro-batch": sum(count * loss for count, loss in by_micro) / total * len(micros),
        "of each rank": sum(sum(counts[r]) * sum(losses[r]) for r in ranks) / total,
    }


def _ratios(case: Case, step: StepDifference, point: str) -> dict[str, float | None]:
    """By tensor, how many times the reference's it is; None where no single number says that. Tensors of rounding alone are left out."""
    mine, other = (case.sides.read(getattr(side, point)) for side in (step.candidate, step.reference))
    sizes = {name: float(t.double().norm()) for name, t in other.items() if name in mine}
    found = dict[str, float | None]()
    for name in (name for name, size in sizes.items() if size > 1e-5 * max(sizes.values())):
        a, b = mine[name].double(), other[name].double()
        ratio = float((a * b).sum()) / sizes[name] ** 2
        found[name] = ratio if float((a - ratio * b).norm()) <= AGREES * float(a.norm()) else None
    return found


def _one(found: Sequence[float | None]) -> float | None:
    """The number that all are; None without one, and for 1."""
    numbers = [each for each in found if each is not None]
    is_one = len(numbers) == len(found) > 0 and max(numbers) - min(numbers) <= AGREES * abs(numbers[0])
    return numbers[0] if is_one and abs(numbers[0] - 1) > AGREES else None


def _scaled(case: Case, step: StepDifference) -> Iterator[Cause]:
    factor = _one([*_ratios(case, step, "gradients").values()])
    if factor is None:
        return
    ranks, micros = len(case.readers.distinct), len(step.candidate.losses)
    known = {
        ranks: ", the number of ranks: summed where a mean belongs", 1 / ranks: ", one over the number of ranks: divided twice",
        micros: ", the number of micro-batches: the loss is not divided by it", 1 / micros: ", one over the number of micro-batches: divided twice",
    }  # fmt: skip
    told = next((told for n, told in known.items() if abs(factor / n - 1) < AGREES), "")
    yield Cause("E031", f"every gradient is {factor:.5g} times the reference's{told}")


def _some_scaled(case: Case, step: StepDifference) -> Iterator[Cause]:
    point = next(point for point in ("gradients", "applied") if step.wrong(point))
    wrong, found = set(step.wrong(point)), _ratios(case, step, point)
    factor = _one([found[name] for name in found if name in wrong])
    if factor is not None and any(name not in wrong for name in found):
        names = sorted(wrong & found.keys())
        yield Cause("E032", f"{_several(names)} of {len(found)} gradients are {factor:.5g} times the reference's, the others are right")


def _not_averaged(case: Case, step: StepDifference) -> Iterator[Cause]:
    """Ranks' own gradients, of which the mean is the reference's."""
    steps = [s for each in case.sides.candidate for s in each.steps if (s.step, s.optimizer) == (step.number, step.candidate.optimizer)]
    known, expected = [case.sides.read(s.gradients) for s in steps], case.sides.read(step.reference.gradients)
    names = [name for name in step.wrong("gradients") if len({str(each.stored.get(name)) for each in known}) > 1]
    for name in names:
        mean = torch.stack([each[name].double() for each in known if name in each]).mean(0)
        if float((mean - expected[name].double()).norm()) > AGREES * float(expected[name].double().norm()):
            return
    if names:
        which = "no gradient is" if len(names) == len(expected) else f"{_several(names)} of {len(expected)} gradients are not"
        yield Cause("E034", f"{which} averaged over the ranks: each rank has its own, and their mean is the reference's")


def _statistics(case: Case, step: StepDifference) -> Iterator[Cause]:
    kinds = case.candidate.start.batch_norms
    if kinds and (step.wrong("buffers") or _unlike_buffers(case)):
        part = "rank" if len(case.readers.distinct) > 1 else "micro-batch"
        yield Cause("E035", f"the statistics of {kinds[0]} are not synchronized: each {part} is normalized by its own rows")


def _unlike_buffers(case: Case) -> list[str]:
    first, *others = case.sides.candidate
    return [name for each in others for name in unlike(first.steps[0].buffers, each.steps[0].buffers)]


def _differing_buffers(case: Case) -> Iterator[Cause]:
    if names := _unlike_buffers(case):
        yield Cause("E035", f"buffer {names[0]} differs between ranks after step 1")


def _clipped(case: Case, step: StepDifference) -> Iterator[Cause]:
    sides = (step.candidate, step.reference)
    norms = [sum(float(t.double().square().sum()) for t in case.sides.read(side.applied).values()) ** 0.5 for side in sides]
    factor = _one([*_ratios(case, step, "applied").values()])
    how = f"all by {factor:.5g}" if factor is not None else f"{len(step.wrong('applied'))} of {len(step.reference.applied)} by no single factor"
    yield Cause("E033", f"gradients agree after backward and differ as applied, {how}: their norm is {norms[0]:.5g}, the reference's {norms[1]:.5g}")
