"""The job check: before the first step, whether the job's training survives being cut as the plan cuts it.

A plan shares a batch out over ranks and micro-batches. That is the same training when the loss of the batch is the
weighted mean of the parts' losses, when what the model computes for a sample does not depend on the samples beside it,
and when a sample and a forward pass are the same in every process. So a few batches of the job's own samples are
computed before anything starts, in float64: on one device, and cut by as many processes as the plan has shares. Losses
and gradients must agree to 1e-9. Where they do not, `proof/job/causes.py` finds out why.

What is compared is the job, not plait's ways to split it: `plait verify` proves those. The time is limited; what was
not compared for want of it is said. The result lies in the run directory and holds as long as the job's code, its
arguments, its data's length and the plan are the same.
"""

import copy
import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from msgspec import convert

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job
from plait.config.library import is_library
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.data.batch import is_map, opened
from plait.data.sampling import Sampling, as_first_step
from plait.engine.analyse import analyse, setup_of
from plait.engine.build import inexact
from plait.launch import fork
from plait.launch.place import Place, cores, pose
from plait.launch.supervise import Listener
from plait.model.make import call, make
from plait.parallel.precision import forward_format
from plait.proof import own_batch
from plait.proof.job.causes import problems_of, unlike_readers
from plait.proof.job.counters import Changed, values
from plait.proof.job.trial import WIDE, KnownModel, Point, digests, measure, one_device
from plait.proof.notes import first_of
from plait.randomness.keyed import host_kept
from plait.tensors import opaque_code
from plait.tensors.transfers import move

FILE = "check.json"
SECONDS = {"quick": 0.5, "full": 60.0}
"""Of comparing, on the processors there are; a job whose steps take longer gets as long as two of them."""
LIMIT = {"quick": 60.0, "full": 1800.0}
"""Seconds after which the check is given up."""
RANKS = {"quick": 4, "full": 16}
"""As many shares are compared at most; more of them are shares of the same sizes."""
DEAR = 0.2
"""Seconds of processor time beyond which data is opened once for all processes of the check."""
EACH, LOOKING = 4, 0.15
"""Samples of a part in the batch of uneven parts, and seconds to look for them."""
FEW = 4
"""Samples that two ranks read, where ranks share them."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checked:
    """What a job check found. `problems`: what makes the split run another training; empty when nothing does."""

    level: str
    key: str = ""
    problems: tuple[Problem, ...] = ()
    compared: tuple[str, ...] = ()
    """What was compared, in words."""
    unchecked: tuple[str, ...] = ()
    """What was not, and why."""
    failed: str = ""
    """Why the check could not run, if it could not: then nothing was compared."""
    seconds: float = 0.0
    reused: bool = field(default=False, compare=False)

    @property
    def equal(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def not_run(level: str, why: str, unchecked: tuple[str, ...] = ()) -> "Checked":
        """Of a check that could not run: a warning, and an error (J050) where a full check was asked for."""
        what = f"the job check could not run: {why}"
        fix = ("--check quick    trains without it, and warns", "remove the cause, and start again")
        problem = Problem("J050", what, why="nothing was compared, and --check full requires the comparison", fix=fix)
        return Checked(level, problems=(problem,) * (level == "full"), unchecked=unchecked, failed=why)

    @property
    def inexact(self) -> list[str]:
        """The findings in the words of what is not exact, for a run that goes on with them."""
        return [f"{problem.what} ({problem.code})" for problem in self.problems]

    @property
    def lines(self) -> list[str]:
        """What a run prints of it: a warning if the check could not run, what is not exact, and what was not compared."""
        why = "nothing shows that this plan trains what one device trains"
        lines = [f"WARNING  the job check could not run, so {why}: {self.failed}"] if self.failed else []
        lines += [f"note  not exact: {line}" for line in self.inexact]
        return lines + [f"note  job check: {line}" for line in self.unchecked]


def asked(plan: Plan) -> bool:
    """Whether the plan splits anything, so that there is something to check."""
    return plan.devices * plan.microbatches > 1


def check(
    job: Job, plan: Plan, level: str = "quick", *, name: str = "", arguments: dict[str, str] | None = None,
    before: tuple[Path, ...] = (), workers: int = 0,
) -> Checked:  # fmt: skip
    """Compare the job on one device with the job cut as `plan` cuts it, before training. Takes a second or two.

    `name` and `arguments`: how the job was loaded; with them a result that lies in one of the run directories `before`
    is taken again. `workers`: loader processes that the training will use. Finding something is no exception: see
    `Checked.problems`. A check that could not run says why in `Checked.failed`; a full one has J050 among its problems.
    """
    if level == "none" or not asked(plan):
        return Checked(level)
    began = time.perf_counter()
    words = [name, arguments or {}, str(_cut(plan, 10**9)), level, job.batch, job.steps, workers > 0]
    side = lambda place: _side(job, plan, place, words, before, level=level, loaders=workers > 0)  # noqa: E731
    try:
        (told,) = fork.run(side, 1, Listener(note=lambda text: None))
    except (PlaitError, OSError) as error:
        seconds = time.perf_counter() - began
        why = error.problems[0].what if isinstance(error, PlaitError) else in_a_line(error)
        if seconds >= LIMIT[level]:
            why = f"it took longer than {LIMIT[level]:.0f} s, and was ended"
        return replace(Checked.not_run(level, why), seconds=seconds)
    found = convert(told, Checked)
    return found if found.reused else replace(found, seconds=round(time.perf_counter() - began, 3))


def stored(folder: Path) -> Checked | None:
    """The result that lies in a run directory; None when there is none that can be read."""
    try:
        return convert(json.loads((folder / FILE).read_text(encoding="utf-8")), Checked)
    except (OSError, ValueError):
        return None


def store(folder: Path, checked: Checked) -> None:
    """Keep a result in a run directory."""
    (folder / FILE).write_text(json.dumps(checked.to_dict(), indent=1) + "\n", encoding="utf-8")


def _side(
    job: Job, plan: Plan, place: Place, words: list[Any], before: tuple[Path, ...], *, level: str, loaders: bool
) -> dict[str, Any]:
    """The check, in a process of its own, which ends by itself when it takes too long. `loaders`: loader processes will read."""
    timer = threading.Timer(LIMIT[level], lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    torch.set_num_threads(1)  # a forked copy of a pool of threads is dead
    place.beat(-1, "build")
    length, here_, compared, once = _opened(as_first_step(job))
    key = _key([*words, length])
    for folder in before:
        found = stored(folder)
        if found is not None and found.key == key:
            return replace(found, reused=True).to_dict()
    found = _compared(here_, compared, plan, place, level=level, loaders=loaders, length=length)
    told = ("opening the data takes long and was done once: that every rank's is the same was not looked at",)
    return replace(found, key=key, unchecked=found.unchecked + told * once).to_dict()


def _opened(job: Job) -> tuple[int | None, Job, Job, bool]:
    """(samples of the first epoch, the job to look at here, the job to compare, whether its data was opened for all of them).

    Data that takes long to open is opened once: those that compare get it unread, and here a copy is read.
    """
    began = time.process_time()
    with host_kept():
        data = opened(job.data)
    if not is_map(data):
        return None, job, job, False
    length = len(Sampling.of(job, len(data)).epoch(0))
    if time.process_time() - began > DEAR:
        try:
            copied = copy.deepcopy(data)
        except Exception:  # an open file, say
            return length, job, job, False
        return length, replace(job, data=lambda: copied), replace(job, data=lambda: data), True
    return length, job, job, False


def _key(words: list[Any]) -> str:
    """A digest of what the result depends on: the job's file and those of its folder that are imported, and `words`."""
    name, files = words[0], list[str]()
    if name:
        folder = str(Path(name.partition(":")[0]).resolve().parent) + os.sep
        loaded = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
        mine = {file for file in loaded if file.startswith(folder) and not is_library(file)}
        paths = filter(Path.is_file, map(Path, sorted(mine)))
        files = [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
    told = json.dumps([__version__, torch.__version__, files, *words], default=str, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest() if name else ""


def _cut(plan: Plan, most: int) -> Plan:
    """What of a plan shares out samples, with no more than `most` shares."""
    parts = plan.batch_split if 1 < plan.ranks <= most else Plan.batch_split
    return Plan(dp=min(plan.shares, most), microbatches=plan.microbatches, processes=plan.processes, batch_split=parts)


def _compared(
    looked_at: Job, job: Job, plan: Plan, place: Place, *, level: str, loaders: bool, length: int | None
) -> Checked:
    """What comparing finds. `looked_at`: the job to look at here; `job`: the same, to compare (see `_opened`)."""
    cut, unchecked = _cut(plan, RANKS[level]), list[str]()
    if cut.shares < plan.shares:
        unchecked.append(f"shares are compared as {cut.shares} of {plan.shares}, of the same size")
    known, named = _known(looked_at, cut, place)
    weights = sum(p.numel() for p in known.made.model.parameters()) * 8
    needed = weights * (2 + 4 * (cut.world + 1))
    if needed > psutil.virtual_memory().available // 2:
        what = f"the model in float64, on {cut.world + 1} processes, takes {needed / 2**30:.1f} GiB: more than half of the memory left"
        return Checked.not_run(level, what, tuple(unchecked))
    limit = job.batch * cut.shares // plan.shares
    afford = _affordable(looked_at, known, cut, level)
    samples, seconds = afford.samples, afford.seconds
    others = [f"{axis}={size}" for axis in ("tp", "cp", "pp", "ep") if (size := getattr(plan, axis)) > 1]
    if afford.changed.generators and others:
        what = f"the model draws from a generator of its own, {afford.changed.generators[0]}, which plait does not key"
        unchecked.append(f"{what}: under {' '.join(others)} ranks may draw other numbers than one device; plait verify compares them")
    size = min(limit, max(samples // 2, 2 * cut.shares * cut.microbatches))
    points = _points(job, cut, length, level, size=size, most=samples) + _uneven(looked_at, cut, limit)
    noting = replace(job, data=lambda: first_of(opened(job.data), digest=digests))
    try:
        sides = _sides(noting, cut, known, points, size=limit, seconds=seconds)
    except PlaitError:  # it may not bear parts that are smaller than those of a batch
        points = [Point(0, 0, limit if length is None else min(limit, length))]
        sides = _sides(noting, cut, known, points, size=limit, seconds=seconds)
    if points[0].size < limit and (length is None or points[0].size < length):
        unchecked.append(f"of the {limit} samples of a batch {points[0].size} are compared: all would take too long")
    problems, more = problems_of(job, cut, known, points, sides, named, changes=bool(afford.changed.values))
    if not problems and plan.world > 1 and length is not None and (cut.shares == 1 or level == "full" or loaders):
        count = FEW if level == "quick" else sum(point.size for point in points)
        problems, untold = unlike_readers(job, count, plan.pp == plan.world)
        more += untold
    named_points = [(p, "chosen samples" if p.ids else f"step {p.step + 1}") for p in points]
    compared = tuple(f"{name}: {p.size} samples in {cut.shares * cut.microbatches} parts" for p, name in named_points)
    return Checked(level, problems=tuple(problems), compared=compared, unchecked=(*unchecked, *more))


def _known(job: Job, cut: Plan, place: Place) -> tuple[KnownModel, tuple[str, ...]]:
    """The model in float64 and what is known of it, and what of the cut is named as inexact anyway."""
    made = make(job, CPU, WIDE, None, None)
    sketch = analyse(setup_of(job, Plan(), place, CPU, WIDE, made=made), made)
    if sketch.batch_norms and (cut.microbatches > 1 or cut.processes == "one"):
        for name in sketch.batch_norms:  # named as inexact: what else there is shows without them
            made.model.get_submodule(name).training = False
        sketch = replace(sketch, batch_norms=())
    return KnownModel(made, sketch), tuple(inexact(cut, sketch, made.model, CPU))


@dataclass(frozen=True)
class Affordable:
    """What two forward passes of two samples show: how much can be compared, and what a pass changes."""

    samples: int
    """To compare in all."""
    seconds: float
    """For the loss alone."""
    changed: Changed
    """What a pass changed of what the model keeps outside parameters and buffers."""


def _affordable(job: Job, known: KnownModel, cut: Plan, level: str) -> Affordable:
    model, pair = copy.deepcopy(known.made.model), 2
    data = opened(job.data)
    from plait.data.batch import example, first_samples

    with host_kept():
        inputs = move(first_samples(example(job.data, data), pair)[0], CPU, WIDE)
        seconds, before = 0.0, values(model)
        with torch.no_grad(), forward_format(cut, WIDE, "cpu"), opaque_code.opaque():
            for _ in range(2):
                began = time.process_time()
                call(model, inputs)
                seconds = time.process_time() - began
    each = max(seconds / pair, 1e-7)
    allowed = max(SECONDS[level], 1.5 * each * job.batch / cores()) * min(cores(), cut.world + 1)
    return Affordable(int(0.8 * allowed / (6 * each)), 0.2 * allowed, Changed.of(before, values(model)))


def _points(job: Job, cut: Plan, length: int | None, level: str, *, size: int, most: int) -> list[Point]:
    """A batch of the first step, of `size` samples; one with other weights, of what is left of `most`; a short one if there
    is one in training."""
    parts = cut.shares * cut.microbatches
    if length is None:
        return [Point(0, 0, size), Point(1, size, size, True)]
    size = min(size, length)
    small = min(size, max(2 * parts + max(1, parts // 2), most - size))
    start = job.batch % length
    points = [Point(0, 0, size), Point(1, start if length - start >= small else 0, small, True)]
    short = length % job.batch
    if short and job.steps * job.batch > length and short != size:
        points.append(Point(length // job.batch, length - min(short, size), min(short, size)))
    if level == "full":
        starts = range(0, min(length, job.batch * 8), job.batch)
        points += [Point(k, s, min(size, length - s)) for k, s in enumerate(starts) if k]
    return points


def _uneven(job: Job, cut: Plan, limit: int) -> list[Point]:
    """A batch whose first part has the samples with the largest counts, sums and elements of those that were looked at, and the other
    parts usual ones: what a loss divides by then differs between parts, as it will in some step of training."""
    data = opened(job.data)
    parts = cut.shares * cut.microbatches
    size = min(limit, EACH * parts)
    if not is_map(data) or len(data) < size or size < 2 * parts or job.order or job.token_budget:
        return []
    rows = own_batch.looked_at(data, job, LOOKING)
    extreme = [max(rows, key=lambda i, k=k: rows[i][k]) for k in range(len(next(iter(rows.values()), ())))]
    varied = [i for k, i in enumerate(extreme) if len({row[k] for row in rows.values()}) > 1]
    first = list(dict.fromkeys(varied))[: size // parts]
    usual = [i for i in sorted(rows, key=lambda i: rows[i]) if i not in first]
    rest = [usual[k * len(usual) // size] for k in range(size)] if len(usual) >= size else []
    ids = tuple(dict.fromkeys([*first, *rest]))[:size]
    return [Point(0, 0, size, ids=ids)] if first and len(ids) == size else []


def _sides(
    job: Job, cut: Plan, known: KnownModel, points: list[Point], *, size: int, seconds: float
) -> list[dict[str, Any]]:
    """What the ranks of the cut measured, and last one device. `size` and `seconds`: for the loss alone."""

    def side(place: Place) -> dict[str, Any]:
        pose(None if place.rank == cut.world else place.rank, cut.world)
        if place.rank == cut.world:
            alone = replace(place, rank=0, world=1, store=None)
            return one_device(job, known, points, alone, cut=cut, size=size, seconds=seconds)
        return measure(job, cut, known, points, replace(place, world=cut.world))

    return fork.run(side, cut.world + 1, Listener(note=lambda text: None))
