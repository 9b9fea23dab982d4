"""What the job check says when one device and the cut job differ: of the data, the loss, the model, or of chance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.library import is_library
from plait.config.plan import Plan
from plait.data.batch import is_map, opened
from plait.engine.evaluate import line_of
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervise import Listener
from plait.proof.job import branches, counters
from plait.proof.job.look import look, look_later, read_again, read_as
from plait.proof.job.trial import KnownModel, Point
from plait.proof.probes import FLOOR, TOLERANCE

UNLOCATED = "the job cut by the plan is another training than on one device"
"""What is said of a difference that shows neither in outputs nor in losses of parts: anything may be its cause."""
SECONDS = 0.3
"""Of processor time to look for a branch that parts take otherwise."""
Sides = list[dict[str, Any]]
Found = dict[str, Any]


def problems_of(
    job: Job, cut: Plan, known: KnownModel, points: list[Point], sides: Sides, named: tuple[str, ...], *, changes: bool = False
) -> tuple[list[Problem], list[str]]:  # fmt: skip
    """(what makes the cut job another training, what could not be told). `named` is told as inexact already. `changes`: a call
    changes values of the model that are no parameters and no buffers."""
    told, alone = list[str](), sides[-1]
    if alone["untried"]:
        told.append(f"the loss was compared at {len(points)} points only: {alone['untried']}")
    sample = unlike_sample(sides)
    if sample is not None and not is_map(opened(job.data)):
        why = "processes read different samples of the iterable, as they will say"
        return [], [*told, f"gradients were not compared: {why}"]
    if sample is not None:
        return [_of_sample(job, sample[0], f"differs between one device and share {sample[1]} of the plan")], told
    if alone["asks"] and cut.microbatches > 1:
        named = ("what the job asks of the global batch is of one micro-batch",)
    if named:
        told.append(f"gradients were not compared, which differ anyway: {named[0]}")
    mismatch = None if named else first_mismatch(points, sides)
    if mismatch is None and alone["coupled"] is None:
        if changes and cut.microbatches > 1 and (late := _of_counts(job, cut, known, points[0], told)):
            return late, told
        if known.sketch.by_values and not named and not alone["asks"]:
            return _of_branches(job, cut, known, points[0]), told
        return [], told
    point = points[0] if mismatch is None else mismatch.point
    try:
        (seen,) = _aside(lambda place: look(job, cut, known, point, place))
    except PlaitError as error:
        seen = {"failed": error.problems[0].what}
    found = [] if named else _of_model(cut, seen, point)
    if alone["coupled"] is not None:
        found.append(_of_loss(job, cut, alone["coupled"], seen, alone["size"]))
    elif mismatch is not None and not found and seen.get("losses") and _unlike(seen):
        found.append(_of_loss(job, cut, seen | {"scale": 1.0, "apart": mismatch.relative_difference}, seen, point.size))
    elif mismatch is not None and not found:
        found.append(_of_gradient(job, cut, mismatch))
    return found, told


def _aside(work: Callable[[Place], Found], ranks: int = 1) -> list[Found]:
    """What processes of their own found, which say nothing of themselves."""
    return fork.run(work, ranks, Listener(note=lambda text: None))


def unlike_sample(sides: Sides) -> tuple[int, int] | None:
    """(sample, rank) that a rank read otherwise than one device."""
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


def first_mismatch(points: list[Point], sides: Sides) -> GradientMismatch | None:
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


def _where(job: Job) -> str:
    """The line of the loss, where it is the user's own."""
    line = line_of(job.loss)
    return line if line and not is_library(line) else "Job(loss=…)"


def _how(cut: Plan) -> str:
    """The cut in words of the plan."""
    keys = [f"dp={cut.dp}"] * (cut.dp > 1) + [f"microbatches={cut.microbatches}"] * (cut.microbatches > 1)
    return " ".join(keys) or "another process"


def unlike_readers(job: Job, count: int, staged: bool) -> tuple[list[Problem], list[str]]:
    """(J032, what could not be told) when one of the first `count` samples differs between two ranks, read twice in a row by one, or
    read by a loader process.

    `staged`: the ranks are stages, of which only the first needs the inputs and the last the targets.
    """
    try:
        rows = _aside(lambda place: read_as(job, count, place), 2)
    except PlaitError as error:
        return [], [f"samples were not read by two ranks: {error.problems[0].what}"]
    for first, second in zip(rows[0]["read"], rows[1]["read"]):
        if first[3] != second[3] or (first[1] != second[1] and not staged):
            return [_of_sample(job, first[0], "differs between ranks 0 and 1 of the plan")], []
        if first[1] != first[2]:
            return [_of_sample(job, first[0], "is another when it is read again")], []
    for first, loaded in zip(rows[0]["read"], rows[0]["loaded"]):
        if first[1] != loaded:
            return [_of_sample(job, first[0], "is another in a loader process (--workers)")], []
    return [], []


def _of_sample(job: Job, i: int, told: str) -> Problem:
    try:
        (seen,) = _aside(lambda place: read_again(job, i))
    except PlaitError:
        seen = {"again": False, "source": ""}
    what = f"sample {i} of the data is not the same in every process"
    source = seen["source"] or "a generator of its own, a counter or the clock"
    why = f"it {told}; read twice in a row by one process it " + (
        f"differs too: {source}" if seen["again"] else "is the same: it goes by the rank, or by what the process is"
    )
    fix = (
        "draw with Python's random, numpy.random or torch's own generator: plait seeds them by (seed, epoch, sample)",
        "or make a generator from the sample's number in __getitem__: torch.Generator().manual_seed(i)",
    )
    if not seen["again"]:  # no generator differs between processes alone
        opens = "open files, databases and connections once in each process, at its first sample: compare os.getpid()"
        fix = ("read nothing of the rank, the process or the machine in __getitem__", opens)
    return Problem("J032", what, why=why, where="Job(data=…)", fix=fix)


def _of_model(cut: Plan, seen: Found, point: Point) -> list[Problem]:
    if seen.get("again"):
        return [_of_repeated(cut, seen)]
    if seen.get("collate"):
        sample, part = seen["collate"]
        what = "the data's `collate` makes a sample depend on the samples beside it"
        among = f"among {point.size} samples than among {part}"
        why = f"sample {sample} is another {among}, of the same shape ({_how(cut)})"
        first = "mix samples in __getitem__, where random numbers go by the sample"
        fix = (first, "or in the model, over plait.global_batch")
        return [Problem("J034", what, why=why, where="Job(data=…)", fix=fix)]
    if seen.get("outputs"):
        return [_of_outputs(cut, seen, point)]
    return []


def _of_repeated(cut: Plan, seen: Found) -> Problem:
    """J035 if outputs depend on values that the model keeps from call to call, J033 if it draws or reads them elsewhere."""
    module, kind = seen["again"]
    if seen["restored"] and seen["kept"]:
        what = "the model carries values from call to call, and its outputs depend on them"
        why = f"each call changes {_listed(seen['kept'])}, and the same samples then give another output of {_module(module, kind)}; "
        why += f"with these values put back they give the same. {_calls(cut)}"
        return Problem("J035", what, why=why, where="Job(model=…)", fix=FIX_CARRIED)
    what = "the model computes something else when it is run again on the same samples"
    why = f"first in {_module(module, kind)}, with Python's, numpy's and torch's generators seeded alike for both"
    own = "no generators of your own, clocks or counters in forward"
    if seen["drawn"]:
        why += f"; the model draws from a generator of its own, {_listed(seen['drawn'])}"
        own = f"no generator of your own: {seen['drawn'][0]}"
    fix = ("draw with torch's functions (torch.randn_like, nn.Dropout), which plait keys by sample", own)
    return Problem("J033", what, why=why, where="Job(model=…)", fix=fix)


FIX_CARRIED = (
    "compute forward from its inputs, parameters and buffers alone",
    "use a plan that calls the model once a step: no microbatches, no pp",
)


def _calls(cut: Plan) -> str:
    if cut.microbatches > 1:
        return f"This plan calls the model {cut.microbatches} times a step, one device calls it once"
    return "Each rank calls it on its own samples only"


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def late_problem(found: counters.LateDifference) -> Problem:
    """J035 of a model whose outputs depend on how often it was called."""
    what = "the model counts its calls, and its outputs depend on the count"
    return Problem("J035", what, why=found.why, where="Job(model=…)", fix=FIX_CARRIED)


def _of_branches(job: Job, cut: Plan, known: KnownModel, point: Point) -> list[Problem]:
    try:
        (seen,) = _aside(lambda place: branches.look(job, cut, known, point, place, seconds=SECONDS))
    except PlaitError:
        return []
    if seen["found"] is None:
        return []
    scale, sample, apart, part = seen["found"]
    what = "what the model computes for a sample depends on the samples beside it"
    why = f"sample {sample} among {point.size} samples and among {part} ({_how(cut)}): its output differs by {apart:.1e} of its size"
    why += f"; this was seen with weights {scale:.3g} times as large as at the start: the forward pass decides by a number of the batch"
    fix = ("decide for each sample: torch.where", "or by a mean over all ranks: plait.global_mean(x)")
    return [Problem("J031", what, why=why, where="Job(model=…)", fix=fix)]


def _of_counts(job: Job, cut: Plan, known: KnownModel, point: Point, told: list[str]) -> list[Problem]:
    try:
        (seen,) = _aside(lambda place: look_later(job, cut, known, point, place))
    except PlaitError as error:
        told.append(f"whether outputs depend on the number of calls could not be tried: {error.problems[0].what}")
        return []
    return [late_problem(counters.LateDifference(**found)) for found in seen["late"]]


def _of_outputs(cut: Plan, seen: Found, point: Point) -> Problem:
    module, kind, sample, apart, part = seen["outputs"]
    what = "what the model computes for a sample depends on the samples beside it"
    why = f"sample {sample} among {point.size} samples and among {part} ({_how(cut)}): {_module(module, kind)} differs by {apart:.1e} of its size"
    fix: tuple[str, ...] = (
        "compute it of each sample alone; a mean over the batch: plait.global_mean; all of the batch: plait.global_batch",
    )
    if seen["padding"]:
        why += "; with the same padding it does not: the samples are padded to the longest of those that come together"
        first = "leave padded places out: by a mask, or by lengths (pack_padded_sequence)"
        fix = (first, "or pad all samples to one length")
    elif seen["host"]:
        why += "; its forward pass draws from Python's or numpy's generator, which know nothing of samples"
        fix = ("draw for each sample with torch's functions: torch.randn_like(x), torch.rand(len(x), 1)",)
    return Problem("J031", what, why=why, where="Job(model=…)", fix=fix)


def _module(name: str, kind: str) -> str:
    return f"{name} ({kind})" if name else f"the model's own output ({kind})"


def _of_loss(job: Job, cut: Plan, coupled: Found, seen: Found, size: int) -> Problem:
    scale, whole, losses, weights = (coupled[name] for name in ("scale", "whole", "losses", "weights"))
    mean = sum(w * x for w, x in zip(weights, losses)) / sum(weights)
    what = "the loss of a batch is not the mean of its parts' losses, so parts of it train something else"
    told = ", ".join(f"{x:.6g}" for x in losses[:4]) + (", …" if len(losses) > 4 else "")
    by = "Job.weight" if job.weight else "samples"
    why = f"of {size} samples it is {whole:.6g}; of their {len(losses)} parts ({_how(cut)}) {told}, whose mean by {by} is {mean:.6g}"
    if abs(mean - whole) <= 1e-6 * abs(whole):
        why += f", but gradients differ by {coupled['apart']:.1e} of their size"
    if scale != 1.0:
        outputs = f"{scale:.3g} times as large as at the start" if scale else "as training will have them"
        why += f"; this was seen with outputs {outputs}"
    return Problem("J030", what, why=why, where=_where(job), fix=_fix(seen if scale == 1.0 else {}))


def _unlike(seen: Found) -> bool:
    """Whether the loss of the whole is not the mean of the parts' losses."""
    total = sum(seen["weights"])
    mean = sum(w * x for w, x in zip(seen["weights"], seen["losses"])) / total if total else math.nan
    return not abs(mean - seen["whole"]) <= 1e-7 * max(abs(seen["whole"]), 1e-12)


def _fix(seen: Found) -> tuple[str, ...]:
    """What to write, by what the numbers look like."""
    if seen.get("hint") == "sum":
        return ('the loss is a sum: return the mean over the samples (reduction="mean", .mean())',)
    if seen.get("hint") == "root":
        return ("the loss is a root of a mean: plait.global_mean(squares).sqrt() takes the mean over the global batch",)
    if seen.get("hint"):
        return (f"say what the mean is over: Job(weight={seen['hint']})",)
    return (
        "a mean over what a mask or a class counts: Job(weight=lambda targets: what it counts)",
        "a mean that is divided by, multiplied or rooted: plait.global_mean(x) is that of the global batch",
        "samples that are compared with each other (contrastive, hardest): plait.global_batch(x) has all of them",
    )


def _of_gradient(job: Job, cut: Plan, mismatch: GradientMismatch) -> Problem:
    point, name = mismatch.point, mismatch.name
    what = UNLOCATED
    why = f"step {point.step + 1}, {point.size} samples ({_how(cut)}): "
    gradient = f"the gradient of {name} differs by {mismatch.relative_difference:.1e} of its size"
    why += f"the loss is {mismatch.cut_loss:.9g} instead of {mismatch.loss:.9g}" if name == "loss" else gradient
    kept = "something is kept from call to call"
    why += "; outputs and loss of each part, computed one after the other, do not show it: "
    why += kept if name == "loss" else f"a backward pass makes something of all samples that it is given, or {kept}"
    fix = ["keep nothing between calls of the loss or the model that decides what they compute"]
    if name != "loss":
        fix.append("no embedding with scale_grad_by_freq; no backward function or hook that counts or normalizes the batch")
    return Problem("J035", what, why=why, where=_where(job), fix=tuple(fix))
