"""Explanations of the job check if one device and the split job differ: in the data, the loss, the model, or random numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.library import is_library
from plait.config.plan import Plan
from plait.data.batch import is_map, open_data
from plait.engine.evaluate import find_source_line
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervisor import Listener
from plait.proof.job import branches, call_counts
from plait.proof.job.mismatch import find_late_counts, locate_mismatch, read_as_rank, read_twice
from plait.proof.job.trial import AnalyzedModel, Point
from plait.proof.probes import FLOOR, TOLERANCE

UNLOCATED = "the plan changes the job's loss or gradients"
"""A difference that is visible neither in outputs nor in losses of parts: its cause is unknown."""
SECONDS = 0.3
"""Limit of processor time for finding a branch that parts take differently."""
SideFacts = list[dict[str, Any]]
Facts = dict[str, Any]


def find_problems(
    job: Job, cut: Plan, known: AnalyzedModel, points: list[Point], sides: SideFacts, named: tuple[str, ...], *, changes: bool = False
) -> tuple[list[Problem], list[str]]:  # fmt: skip
    """(problems that change the training result, notes on missing comparisons). `named`: known inexact properties. `changes`: a call changes
    values of the model outside parameters and buffers."""
    told, alone = list[str](), sides[-1]
    if alone["untried"]:
        told.append(f"the loss was compared at {len(points)} points only: {alone['untried']}")
    sample = find_unlike_sample(sides)
    if sample is not None and not is_map(open_data(job.data)):
        why = "processes read different samples of the iterable"
        return [], [*told, f"gradients were not compared: {why}"]
    if sample is not None:
        return [_explain_sample(job, sample[0], f"differs between one device and local batch {sample[1]} of the plan")], told
    if alone["asks"] and cut.microbatches > 1:
        named = ("values of the global batch cover one micro-batch only",)
    if named:
        told.append(f"gradients were not compared because they differ by design: {named[0]}")
    mismatch = None if named else find_first_mismatch(points, sides)
    if mismatch is None and alone["coupled"] is None:
        if changes and cut.microbatches > 1 and (late := _explain_counts(job, cut, known, points[0], told)):
            return late, told
        if known.sketch.needs_real_tensors and not named and not alone["asks"]:
            return _explain_branches(job, cut, known, points[0]), told
        return [], told
    point = points[0] if mismatch is None else mismatch.point
    try:
        (seen,) = _run_quietly(lambda place: locate_mismatch(job, cut, known, point, place))
    except PlaitError as error:
        seen = {"failed": error.problems[0].what}
    found = [] if named else _explain_model(cut, seen, point)
    if alone["coupled"] is not None:
        found.append(_explain_loss(job, cut, alone["coupled"], seen, alone["size"]))
    elif mismatch is not None and not found and seen.get("losses") and _is_loss_coupled(seen):
        found.append(_explain_loss(job, cut, seen | {"scale": 1.0, "apart": mismatch.relative_difference}, seen, point.size))
    elif mismatch is not None and not found:
        found.append(_explain_gradient(job, cut, mismatch))
    return found, told


def _run_quietly(work: Callable[[Place], Facts], ranks: int = 1) -> list[Facts]:
    """Run `work` in its own processes, without their notes."""
    return fork.run_ranks(work, ranks, Listener(on_note=lambda text: None))


def find_unlike_sample(sides: SideFacts) -> tuple[int, int] | None:
    """(sample, rank) of the first sample that a rank read differently from one device."""
    expected = sides[-1]["seen"]
    for rank, side in enumerate(sides[:-1]):
        for i, row in side["seen"].items():
            if i in expected and expected[i] != row:
                return int(i), rank
    return None


@dataclass(frozen=True)
class GradientMismatch:
    """A point at which the plan changes the loss or a gradient."""

    point: Point
    name: str
    """The parameter whose gradient differs, or "loss"."""
    relative_difference: float
    loss: float
    """On one device."""
    cut_loss: float
    """Under the plan."""


def find_first_mismatch(points: list[Point], sides: SideFacts) -> GradientMismatch | None:
    """The first point at which the plan changes the loss or a gradient; None if it changes neither."""
    for k, point in enumerate(points):
        alone, cut = sides[-1]["rows"][k], sides[0]["rows"][k]
        a, b = alone["loss"], cut["loss"]
        if not (math.isfinite(a) and math.isfinite(alone["norm"])):
            continue
        if not abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-12):
            return GradientMismatch(point, "loss", abs(a - b) / max(abs(a), 1e-300), a, b)
        largest = max((row[1] for row in alone["gradients"].values()), default=0.0)
        for name in dict.fromkeys([*alone["gradients"], *cut["gradients"]]):
            (p, size), (q, other) = (side["gradients"].get(name, (0.0, 0.0)) for side in (alone, cut))
            scale = max(size, other, FLOOR * largest, 1e-300)
            if not max(abs(p - q), abs(size - other)) <= 10 * TOLERANCE * scale:
                return GradientMismatch(point, name, abs(p - q) / scale, a, b)
    return None


def _locate_loss(job: Job) -> str:
    """Line of the loss in the user's code, else "Job(loss=…)"."""
    line = find_source_line(job.loss)
    return line if line and not is_library(line) else "Job(loss=…)"


def _describe_split(cut: Plan) -> str:
    """The split as plan keys."""
    keys = [f"dp={cut.dp}"] * (cut.dp > 1) + [f"microbatches={cut.microbatches}"] * (cut.microbatches > 1)
    return " ".join(keys) or "another process"


def compare_readers(job: Job, count: int, staged: bool) -> tuple[list[Problem], list[str]]:
    """(J032, notes) if one of the first `count` samples differs between two ranks, between two reads, or in a loader process.

    `staged`: the ranks are stages, of which only the first needs the inputs and the last the targets.
    """
    try:
        rows = _run_quietly(lambda place: read_as_rank(job, count, place), 2)
    except PlaitError as error:
        return [], [f"samples were not compared between two ranks: {error.problems[0].what}"]
    for first, second in zip(rows[0]["read"], rows[1]["read"]):
        if first[3] != second[3] or (first[1] != second[1] and not staged):
            return [_explain_sample(job, first[0], "differs between ranks 0 and 1 of the plan")], []
        if first[1] != first[2]:
            return [_explain_sample(job, first[0], "differs when it is read again")], []
    for first, loaded in zip(rows[0]["read"], rows[0]["loaded"]):
        if first[1] != loaded:
            return [_explain_sample(job, first[0], "differs in a loader process (--workers)")], []
    return [], []


def _explain_sample(job: Job, i: int, told: str) -> Problem:
    try:
        (seen,) = _run_quietly(lambda place: read_twice(job, i))
    except PlaitError:
        seen = {"again": False, "source": ""}
    what = f"sample {i} of the data is not the same in every process"
    source = seen["source"] or "likely its own generator, a counter or the clock"
    why = f"it {told}; read twice by one process, it " + (
        f"differs too: {source}" if seen["again"] else "is the same, so it depends on the rank or the process"
    )
    fix = (
        "draw with Python's random, numpy.random or torch's own generator: plait seeds them by (seed, epoch, sample)",
        "or seed a generator with the sample's number in __getitem__: torch.Generator().manual_seed(i)",
    )
    if not seen["again"]:  # a generator would differ between reads, too
        opens = "open files, databases and connections in each process at its first sample (compare os.getpid())"
        fix = ("do not use the rank, process or machine in __getitem__", opens)
    return Problem("J032", what, why=why, where="Job(data=…)", fix=fix)


def _explain_model(cut: Plan, seen: Facts, point: Point) -> list[Problem]:
    if seen.get("again"):
        return [_explain_repeat(cut, seen)]
    if seen.get("collate"):
        sample, part = seen["collate"]
        what = "the data's `collate` makes a sample depend on the other samples of its batch"
        among = f"between a batch of {point.size} samples and one of {part}"
        why = f"sample {sample} differs {among}, in the same shape ({_describe_split(cut)})"
        first = "mix samples in __getitem__, where random numbers are seeded per sample"
        fix = (first, "or mix them in the model, with plait.global_batch")
        return [Problem("J034", what, why=why, where="Job(data=…)", fix=fix)]
    if seen.get("outputs"):
        return [_explain_outputs(cut, seen, point)]
    return []


def _explain_repeat(cut: Plan, seen: Facts) -> Problem:
    """J035 if outputs depend on values that the model keeps between calls, J033 if it draws or reads them elsewhere."""
    module, kind = seen["again"]
    if seen["restored"] and seen["kept"]:
        what = "the model's outputs depend on values that it keeps between calls"
        why = f"each call changes {_list_names(seen['kept'])}, and then {_describe_module(module, kind)} differs on the same samples; "
        why += f"with these values restored it agrees. {_describe_calls(cut)}"
        return Problem("J035", what, why=why, where="Job(model=…)", fix=FIX_CARRIED)
    what = "the model's outputs differ when it runs again on the same samples"
    why = f"the first difference is in {_describe_module(module, kind)}, with Python's, numpy's and torch's generators seeded equally for both runs"
    own = "use no own generators, clocks or counters in forward"
    if seen["drawn"]:
        why += f"; the model draws from its own generator {_list_names(seen['drawn'])}"
        own = f"remove the generator {seen['drawn'][0]}"
    fix = ("draw random numbers with torch's functions (torch.randn_like, nn.Dropout), which plait seeds per sample", own)
    return Problem("J033", what, why=why, where="Job(model=…)", fix=fix)


FIX_CARRIED = (
    "compute forward from inputs, parameters and buffers only",
    "use a plan that calls the model once per step: no microbatches, no pp",
)


def _describe_calls(cut: Plan) -> str:
    if cut.microbatches > 1:
        return f"This plan calls the model {cut.microbatches} times per step, one device calls it once"
    return "Each rank calls it on its own samples only"


def _list_names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def make_count_problem(found: call_counts.LateDifference) -> Problem:
    """J035 of a model whose outputs depend on the number of calls."""
    what = "the model's outputs depend on the number of its calls"
    return Problem("J035", what, why=found.description, where="Job(model=…)", fix=FIX_CARRIED)


def _explain_branches(job: Job, cut: Plan, known: AnalyzedModel, point: Point) -> list[Problem]:
    try:
        (seen,) = _run_quietly(lambda place: branches.find_branch(job, cut, known, point, place, seconds=SECONDS))
    except PlaitError:
        return []
    if seen["found"] is None:
        return []
    scale, sample, apart, part = seen["found"]
    what = "the model's output for a sample depends on the other samples of its batch"
    why = f"sample {sample} among {point.size} samples and among {part} ({_describe_split(cut)}): its output differs by a relative {apart:.1e}"
    why += f"; this occurs with the initial weights times {scale:.3g}: the forward pass branches on a value of the batch"
    fix = ("branch per sample: torch.where", "or branch on a mean over all ranks: plait.global_mean(x)")
    return [Problem("J031", what, why=why, where="Job(model=…)", fix=fix)]


def _explain_counts(job: Job, cut: Plan, known: AnalyzedModel, point: Point, told: list[str]) -> list[Problem]:
    try:
        (seen,) = _run_quietly(lambda place: find_late_counts(job, cut, known, point, place))
    except PlaitError as error:
        told.append(f"dependence on the number of calls was not tested: {error.problems[0].what}")
        return []
    return [make_count_problem(call_counts.LateDifference(**found)) for found in seen["late"]]


def _explain_outputs(cut: Plan, seen: Facts, point: Point) -> Problem:
    module, kind, sample, apart, part = seen["outputs"]
    what = "the model's output for a sample depends on the other samples of its batch"
    where = _describe_module(module, kind)
    why = f"sample {sample} among {point.size} samples and among {part} ({_describe_split(cut)}): {where} differs by a relative {apart:.1e}"
    fix: tuple[str, ...] = (
        "compute it for each sample alone, or use plait.global_mean (a mean over the batch) or plait.global_batch (all samples)",
    )
    if seen["padding"]:
        why += "; with the same padding it does not: samples are padded to the longest of their batch"
        first = "exclude padding with a mask or with lengths (pack_padded_sequence)"
        fix = (first, "or pad all samples to one length")
    elif seen["host"]:
        why += "; its forward pass draws from Python's or numpy's generator, which are not seeded per sample"
        fix = ("draw random numbers per sample with torch's functions: torch.randn_like(x), torch.rand(len(x), 1)",)
    return Problem("J031", what, why=why, where="Job(model=…)", fix=fix)


def _describe_module(name: str, kind: str) -> str:
    return f"{name} ({kind})" if name else f"the model's own output ({kind})"


def _explain_loss(job: Job, cut: Plan, coupled: Facts, seen: Facts, size: int) -> Problem:
    scale, whole, losses, weights = (coupled[name] for name in ("scale", "whole", "losses", "weights"))
    mean = sum(w * x for w, x in zip(weights, losses)) / sum(weights)
    what = "the loss of a batch is not the mean of its parts' losses, so splitting changes the result"
    told = ", ".join(f"{x:.6g}" for x in losses[:4]) + (", …" if len(losses) > 4 else "")
    by = "Job.weight" if job.weight else "samples"
    why = f"the loss of {size} samples is {whole:.6g}; its {len(losses)} parts ({_describe_split(cut)}) have {told}, their mean by {by} is {mean:.6g}"
    if abs(mean - whole) <= 1e-6 * abs(whole):
        why += f", but gradients differ by a relative {coupled['apart']:.1e}"
    if scale != 1.0:
        outputs = f"{scale:.3g} times the initial ones" if scale else "as late in training"
        why += f"; this occurs with outputs {outputs}"
    return Problem("J030", what, why=why, where=_locate_loss(job), fix=_suggest_fix(seen if scale == 1.0 else {}))


def _is_loss_coupled(seen: Facts) -> bool:
    """True if the loss of the full batch is not the mean of the parts' losses."""
    total = sum(seen["weights"])
    mean = sum(w * x for w, x in zip(seen["weights"], seen["losses"])) / total if total else math.nan
    return not abs(mean - seen["whole"]) <= 1e-7 * max(abs(seen["whole"]), 1e-12)


def _suggest_fix(seen: Facts) -> tuple[str, ...]:
    """Suggest a fix, given the pattern of the losses."""
    if seen.get("hint") == "sum":
        return ('the loss is a sum: return the mean over the samples (reduction="mean", .mean())',)
    if seen.get("hint") == "root":
        return ("the loss is a root of a mean: use plait.global_mean(squares).sqrt(), a mean over the global batch",)
    if seen.get("hint"):
        return (f"set the divisor of the mean: Job(weight={seen['hint']})",)
    return (
        "for a mean over masked or selected elements: Job(weight=lambda targets: their count)",
        "for a function of means (ratio, product, root): plait.global_mean(x), the mean over the global batch",
        "for losses that compare samples (contrastive, hardest): plait.global_batch(x), all samples",
    )


def _explain_gradient(job: Job, cut: Plan, mismatch: GradientMismatch) -> Problem:
    point, name = mismatch.point, mismatch.name
    what = UNLOCATED
    why = f"step {point.step + 1}, {point.size} samples ({_describe_split(cut)}): "
    gradient = f"the gradient of {name} differs by a relative {mismatch.relative_difference:.1e}"
    why += f"the loss is {mismatch.cut_loss:.9g} instead of {mismatch.loss:.9g}" if name == "loss" else gradient
    kept = "some state is kept between calls"
    why += "; outputs and losses of single parts agree: "
    why += kept if name == "loss" else f"a backward pass combines all of its samples, or {kept}"
    fix = ["keep no state between calls of the loss or the model"]
    if name != "loss":
        fix.append("remove scale_grad_by_freq, and backward functions or hooks that count or normalize the batch")
    return Problem("J035", what, why=why, where=_locate_loss(job), fix=tuple(fix))
