"""Why a script trains another model: each cause is shown by what would have been right, else it is unknown.

A cause is a code of `plait help`, a sentence with the script's own numbers, and what to change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from plait.scripts.numbers import Sides, StepDifference
from plait.scripts.recordings import Recording
from plait.scripts.rows import ONE_READER, Readers, coverage, same_order

AGREES = 1e-3
"""How far a number that explains a difference may be from it, relative."""
Fix = tuple[str, ...]


@dataclass(frozen=True)
class Cause:
    """Why a script trains another model."""

    code: str
    text: str
    fix: Fix


@dataclass(frozen=True)
class Case:
    """What both sides did, and what was found to differ."""

    sides: Sides
    readers: Readers
    first: StepDifference | None
    """The first step whose gradients, before clipping or as applied, are not the reference's."""

    @property
    def candidate(self) -> Recording:
        return self.sides.candidate[0]


def of_rows(case: Case, own: int) -> Iterator[Cause]:
    """What is wrong with the rows. `own`: the rows of the reference's own batch."""
    readers, reference = case.readers, case.sides.reference
    read, ranks = len(readers.hashes(0)), len(readers.all)
    if own and read != own:
        if len({each.start.world for each in readers.all}) == 1 and readers.all[0].start.world == 1 and ranks == 1:
            text = f"one process ran, and its step reads {read} rows where the reference's batch has {own}"
            yield Cause("S021", text, ("start as many processes as you mean to: torchrun --nproc-per-node 2, accelerate launch --multi_cpu --num_processes 2",
                                       f"or give both commands the same number of rows a step: {own}"))  # fmt: skip
        elif readers.alike:
            fix = ("DataLoader(..., sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch) in each epoch", "Accelerate: accelerator.prepare(loader)")
            yield Cause("S022", f"{ONE_READER.format(ranks)}: a step has {read} different rows, the reference's batch {own}", fix)
        else:
            fix = (f"choose batch sizes so that {len(readers.distinct)} × batch × accumulation = the reference's {own}",)
            yield Cause("S025", f"a step reads {read} rows, the reference's own batch has {own}", fix)
    if readers.unlike:
        text = f"rank {readers.unlike[0]} reads other rows than the ranks that share its layers by tensor parallelism"
        yield Cause("S036", text, ("seed samplers alike on these ranks: DistributedSampler(dataset, num_replicas=DP, rank=DP_RANK)",))
    if same_order(readers, reference):
        yield Cause("S023", "epoch 2 reads rows in the order of epoch 1, while the reference's order changes",
                    ("call sampler.set_epoch(epoch) at the start of each epoch",))  # fmt: skip
    twice, never, allowed = coverage(readers, reference)
    if max(twice, never) > allowed and not readers.alike:
        fix = ("DataLoader(..., sampler=DistributedSampler(dataset, shuffle=True)): all ranks shuffle with one seed and take different rows",)
        yield Cause("S024", f"in epoch 1 the ranks read {twice} rows twice and {never} never", fix)


def of_ranks(case: Case) -> Iterator[Cause]:
    """What differs between ranks at the start."""
    ranks = case.sides.candidate
    if len(ranks) > 1 and all(each.start.world == 1 for each in ranks):
        yield Cause("S021", f"{len(ranks)} processes trained, and none joined the others: each has a process group of its own",
                    ("call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel",))  # fmt: skip
    for each in ranks[1:]:
        names = [name for name, t in ranks[0].start.weights.items() if each.start.weights.get(name, t) != t and name in ranks[0].start.trainable]
        if names:
            text = f"{names[0]} and {len(names) - 1} more parameters begin with other values on rank {each.rank} than on rank 0"
            fix = ("call torch.manual_seed with the same seed on all ranks before the model is made", "or wrap it in DistributedDataParallel, which sends rank 0's")
            yield Cause("S026", text, fix)
            return


def of_settings(case: Case) -> Iterator[Cause]:
    """Learning rates, weight decay, and which parameters an optimizer has."""
    for each in case.sides.compared:
        mine, other, when = each.candidate, each.reference, f"in step {each.number}"
        if mine.kind != other.kind:
            yield Cause("S028", f"{when} the optimizer is {mine.kind}, the reference's {other.kind}", ("use the same optimizer",))
        elif len(mine.lr) != len(other.lr) or any(abs(a - b) > 1e-6 * abs(b) for a, b in zip(mine.lr, other.lr)):
            yield Cause("S027", f"{when} the learning rate is {mine.lr[0]:.6g}, the reference's {other.lr[0]:.6g}{_paces(case, each)}", _RATES)
        elif left := sorted(set(other.weights) - set(mine.weights)):
            yield Cause("S029", f"{left[0]} and {len(left) - 1} more parameters are not in the optimizer", ("make the optimizer after the model was wrapped, of all its parameters",))
        elif names := [name for name in other.decay if mine.decay.get(name) != other.decay[name]]:
            text = f"weight decay of {names[0]} is {mine.decay.get(names[0]):.6g}, the reference's {other.decay[names[0]]:.6g}"
            yield Cause("S028", text, ("give both optimizers the same parameter groups: names change where a model is wrapped",))
        elif left := sorted(set(mine.without) - set(other.without)):
            yield Cause("S029", f"{when} {left[0]} has no gradient, and has one in the reference", ("check which parameters are frozen or unused",))
        else:
            continue
        return


_RATES = (
    "step the scheduler once for each optimizer step, not once for each process or micro-batch",
    "Accelerate: a prepared scheduler steps once for each process. Either make its length from the loader before prepare(), times the number of"
    " processes, or leave it out of prepare(), or Accelerator(step_scheduler_with_optimizer=False) with one step() a step",
)


def _paces(case: Case, each: StepDifference) -> str:
    """How much faster the candidate's schedule goes, if it is the reference's at another step."""
    later = [other.reference.lr for other in case.sides.compared if other.reference.optimizer == each.reference.optimizer]
    place = each.number - 1
    if each.candidate.lr in later and (found := later.index(each.candidate.lr)) != place and place:
        return f": the one of its step {found + 1}; the scheduler is stepped {found / place:.3g} times a step"
    return ""


def of_gradients(case: Case) -> Iterator[Cause]:
    """Why gradients differ."""
    if case.first is None:
        return
    points = [point for point in ("after", "gradients", "applied") if case.first.wrong(point)]
    if not points:
        return
    if points[0] != "after" and case.first.points["after"].off:
        yield from _not_left_by_backward(case, case.first, points[0])
        return
    for why in (_tokens, _scaled, _not_summed, _statistics, _some_scaled):
        yield from why(case, case.first)


def _tokens(case: Case, step: StepDifference) -> Iterator[Cause]:
    """A mean of means: which weights of the losses give the reference's loss."""
    used = [each.used[step.number - 1] for each in case.readers.distinct if step.number <= len(each.used)]
    losses = [each.rounds[step.number - 1][0].losses for each in case.readers.distinct]
    right = sum(step.reference.losses)
    if not used or any(len(batches) != len(loss) for batches, loss in zip(used, losses)) or len({len(each) for each in losses}) > 1 or not right:
        return
    for shifted in (0, 1):
        counts = [[batch.labels[shifted] if batch.labels else 0 for batch in batches] for batches in used]
        total = sum(map(sum, counts))
        if not total or len({n for each in counts for n in each}) == 1:
            continue
        for name, weighted in _weightings(counts, losses).items():
            plain = sum(map(sum, losses)) / len(losses)
            for factor in {1.0, float(len(losses[0]))}:
                if abs(weighted / factor - right) < 2e-6 * abs(right) < abs(plain / factor - right):
                    text = f"a mean over unequal numbers of tokens {name}: {counts} labels count. Weighted by them the losses give {weighted / factor:.7g}, the reference's, and as they are {plain / factor:.7g}"
                    yield Cause("S030", text, _MEANS)
                    return


_MEANS = (
    "sum the loss over tokens, and divide by the number of tokens of all ranks and micro-batches of the step (all_reduce it first), times the number of ranks",
    "Trainer: let the model compute its loss (num_items_in_batch), with average_tokens_across_devices=True",
)


def _weightings(counts: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> dict[str, float]:
    ranks, micros, total = range(len(losses)), range(len(losses[0])), sum(map(sum, counts))
    by_micro = [(sum(counts[r][m] for r in ranks), sum(losses[r][m] for r in ranks) / len(losses)) for m in micros]
    return {
        "of each rank and micro-batch": sum(counts[r][m] * losses[r][m] for r in ranks for m in micros) / total * len(micros),
        "of each micro-batch": sum(count * loss for count, loss in by_micro) / total * len(micros),
        "of each rank": sum(sum(counts[r]) * sum(losses[r]) for r in ranks) / total,
    }


def ratios(case: Case, step: StepDifference, point: str) -> dict[str, float | None]:
    """By tensor, how many times as large it is; None where no single number says that."""
    mine, other = (case.sides.read(getattr(side, point)) for side in (step.candidate, step.reference))
    found = dict[str, float | None]()
    for name in other:
        if name in mine and mine[name].shape == other[name].shape:
            a, b = mine[name].double(), other[name].double()
            square = float(b.square().sum())
            ratio = float((a * b).sum()) / square if square else 0.0
            found[name] = ratio if ratio and float((a - ratio * b).norm()) <= AGREES * float(a.norm()) else None
    largest = max((float(other[name].double().norm()) for name in found), default=0.0)
    return {name: ratio for name, ratio in found.items() if float(other[name].double().norm()) > 1e-5 * largest}


def _one(found: Sequence[float | None]) -> float | None:
    numbers = [each for each in found if each is not None]
    return numbers[0] if len(numbers) == len(found) > 0 and max(numbers) - min(numbers) <= AGREES * abs(numbers[0]) else None


def _scaled(case: Case, step: StepDifference) -> Iterator[Cause]:
    """All gradients are one number times the reference's."""
    factor = _one([*ratios(case, step, "gradients").values()])
    if factor is None or abs(factor - 1) < AGREES:
        return
    ranks, micros = len(case.readers.distinct), len(step.candidate.losses)
    known = {
        float(ranks): (f"the number of ranks: summed where a mean belongs", ("divide by the number of ranks once: DistributedDataParallel and FSDP do that",)),
        1 / ranks: ("one over the number of ranks: divided twice", ("leave the division to DistributedDataParallel or FSDP",)),
        float(micros): ("the number of micro-batches: the loss is not divided by it", ("loss = loss / accumulation_steps before backward; Accelerate: gradient_accumulation_steps in Accelerator()",)),
        1 / micros: ("one over the number of micro-batches: divided twice", ("Accelerate and Trainer divide the loss: do not divide it again",)),
    }  # fmt: skip
    known = {number: told for number, told in known.items() if abs(number - 1) > AGREES}
    for number, (told, fix) in known.items():
        if abs(factor / number - 1) < AGREES:
            yield Cause("S031", f"every gradient is {factor:.5g} times the reference's, which is {told}", fix)
            return
    yield Cause("S031", f"every gradient is {factor:.5g} times the reference's", ("look for what multiplies or divides the loss",))


def _some_scaled(case: Case, step: StepDifference) -> Iterator[Cause]:
    """Some gradients are one number times the reference's, the others are right."""
    point = next(point for point in ("gradients", "applied") if step.wrong(point))
    wrong, found = set(step.wrong(point)), ratios(case, step, point)
    factor = _one([found[name] for name in found if name in wrong])
    if factor is not None and abs(factor - 1) > AGREES and any(name not in wrong for name in found):
        names = sorted(wrong & found.keys())
        text = f"{names[0]} and {len(names) - 1} more of {len(found)} gradients are {factor:.5g} times the reference's, the others are right"
        yield Cause("S032", text, ("these gradients are summed twice, or not at all: sum each one once",))


def _not_summed(case: Case, step: StepDifference) -> Iterator[Cause]:
    """Ranks' own gradients, whose mean is the reference's."""
    ranks = [each for each in case.sides.candidate if len(each.rounds) >= step.number]
    steps = [next((s for s in each.rounds[step.number - 1] if s.optimizer == step.candidate.optimizer), None) for each in ranks]
    known = [each.gradients for each in steps if each is not None]
    differing = [name for name in step.wrong("gradients") if len({each[name][0] for each in known if name in each}) > 1]
    if len(known) < 2 or not differing:
        return
    expected = case.sides.read(step.reference.gradients)
    for name in differing:
        parts = [case.sides.read(each)[name].double() for each in known if name in each]
        mean, right = torch.stack(parts).mean(0), expected[name].double()
        if float((mean - right).norm()) > AGREES * float(right.norm()):
            return
    of = len(step.reference.applied)
    which = "no gradient is" if len(differing) == of else f"{differing[0]} and {len(differing) - 1} more of {of} gradients are not"
    fix = ("DistributedDataParallel sums all gradients in backward, but not inside of no_sync()", "by hand: all_reduce every parameter's gradient, and divide")
    yield Cause("S034", f"{which} averaged over the ranks: each rank has its own, and their mean is the reference's", fix)


def _statistics(case: Case, step: StepDifference) -> Iterator[Cause]:
    """Batch statistics of each rank's own rows."""
    kinds = case.candidate.start.batch_norms
    if kinds and step.number == 1 and (step.wrong("buffers") or _unlike_buffers(case)):
        why = "each rank normalizes by its own rows" if len(case.readers.distinct) > 1 else "each micro-batch is normalized by its own rows"
        fix = ("torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, before DistributedDataParallel", "or a norm that does not couple rows (LayerNorm, GroupNorm)")
        yield Cause("S035", f"the statistics of {kinds[0]} are not synchronized: {why}", fix)


def _unlike_buffers(case: Case) -> list[str]:
    ranks = case.sides.candidate
    first = ranks[0].steps[0].buffers
    return [name for name, t in first.items() for each in ranks[1:] if each.steps[0].buffers.get(name, t) != t]


def of_buffers(case: Case) -> Iterator[Cause]:
    """Buffers that differ though gradients agree."""
    if names := _unlike_buffers(case):
        yield Cause("S035", f"buffer {names[0]} differs between ranks after step 1", ("keep buffers alike: DistributedDataParallel(broadcast_buffers=True)",))


def _not_left_by_backward(case: Case, step: StepDifference, point: str) -> Iterator[Cause]:
    """Gradients are right after backward, and wrong later."""
    found = ratios(case, step, point)
    wrong = set(step.wrong(point))
    factor = _one([*found.values()])
    if factor is not None and point == "applied" or (factor is not None and len(wrong) == len(found)):
        norms = [float(sum(t.double().square().sum() for t in case.sides.read(side.applied).values()) ** 0.5) for side in (step.candidate, step.reference)]
        text = f"gradients agree after backward, and as applied all are {factor:.5g} times the reference's (norm {norms[0]:.5g}, there {norms[1]:.5g}): they are clipped otherwise"
        yield Cause("S033", text, _CLIPS)
        return
    factor = _one([found[name] for name in found if name in wrong])
    if factor is not None and any(name not in wrong for name in found):
        yield from _some_scaled(case, step)
    elif not [*_not_summed(case, step)]:
        text = f"gradients agree after backward, and {len(wrong)} of {len(found)} differ as applied, by no single factor"
        yield Cause("S033", text, _CLIPS)


_CLIPS = (
    "clip by the norm of the whole gradient: torch.nn.utils.clip_grad_norm_(model.parameters(), ...) knows FSDP2's and DTensor's parts",
    "and with the same limit, after GradScaler.unscale_ and after the sum over ranks",
)


def cause_of(case: Case, own: int) -> Cause:
    """The cause of a difference: the first that can be shown."""
    for find in (lambda c: of_rows(c, own), of_ranks, of_settings, of_gradients, of_buffers):
        if (found := next(iter(find(case)), None)) is not None:
            return found
    return Cause("S020", "unknown: none of the known mistakes gives these numbers", ("--float64 shows whether it is rounding", "plait help S020"))


