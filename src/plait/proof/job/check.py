"""The job check: check before the first step that splitting the job as planned does not change its training.

A plan splits a batch over ranks and micro-batches. This keeps the training result under three conditions: the loss of the batch is the
weighted mean of the parts' losses; the model's output for a sample does not depend on the other samples; and a sample and a forward pass
are the same in every process. So a few batches of the job's own samples are computed before training, in float64: on one device, and split
over as many processes as the plan has local batches. Losses and gradients must agree to 1e-9. If they do not, `proof/job/causes.py` finds
the reason.

The check compares the job, not plait's ways of splitting: `plait verify` proves those. The time is limited; comparisons that were skipped
are reported. The result is stored in the run directory and stays valid while the job's code, its arguments, the length of its data and the
plan are unchanged.
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

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job
from plait.config.library import is_library
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.data.batch import is_map, open_data
from plait.data.sampling import Sampling, size_by_first_step
from plait.engine.build import list_inexact_reasons
from plait.engine.model_analysis import analyze_model, make_rank_setup
from plait.launch import fork
from plait.launch.place import Place, count_cores, set_rank_variables
from plait.launch.supervisor import Listener
from plait.model.build_model import make_rank_model, run_model
from plait.parallel.precision import make_forward_context
from plait.proof import full_batch
from plait.proof.activation_recorder import take_first
from plait.proof.job.call_counts import ChangedValues, collect_kept_values
from plait.proof.job.causes import compare_readers, find_problems
from plait.proof.job.trial import WIDE, AnalyzedModel, Point, digest_leaves, measure_one_device, measure_rank
from plait.randomness.keyed import preserve_host_state
from plait.tensors import opaque_code
from plait.tensors.transfers import move_tree

CHECK_FILE = "check.json"
COMPARE_SECONDS = {"quick": 0.5, "full": 60.0}
"""Limits of the comparison on the available processors. A job with longer steps gets the time of two steps."""
TIMEOUT_S = {"quick": 60.0, "full": 1800.0}
"""Seconds after which the check is aborted."""
MAX_SHARES = {"quick": 4, "full": 16}
"""Largest number of local batches compared; further ones have the same sizes."""
SLOW_OPEN_SECONDS = 0.2
"""Processor time above which the data is opened only once for all processes of the check."""
PART_SAMPLES, PROBE_SECONDS = 4, 0.15
"""Samples per part in the batch of uneven parts, and the time limit for finding them."""
READER_SAMPLES = 4
"""Samples that two ranks read, if ranks have the same samples."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class CheckResult:
    """Result of a job check. `problems`: properties of the job with which splitting changes the training result; empty if there are none."""

    level: str
    key: str = ""
    problems: tuple[Problem, ...] = ()
    compared: tuple[str, ...] = ()
    """The comparisons made, in words."""
    unchecked: tuple[str, ...] = ()
    """The comparisons left out, with reasons."""
    failed: str = ""
    """Reason if the check could not run; then nothing was compared."""
    seconds: float = 0.0
    reused: bool = field(default=False, compare=False)

    @property
    def equal(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_failure(level: str, why: str, unchecked: tuple[str, ...] = ()) -> "CheckResult":
        """Result of a check that could not run: a warning, and the error J050 if a full check was requested."""
        what = f"the job check could not run: {why}"
        fix = ("--check quick    warns and trains without the check", "or remove the cause and start again")
        problem = Problem("J050", what, why="nothing was compared, and --check full requires the comparison", fix=fix)
        return CheckResult(level, problems=(problem,) * (level == "full"), unchecked=unchecked, failed=why)

    @property
    def inexact(self) -> list[str]:
        """The problems as lines of `inexact`, for a run that continues with them."""
        return [f"{problem.what} ({problem.code})" for problem in self.problems]

    @property
    def lines(self) -> list[str]:
        """Lines that a run prints: a warning if the check could not run, inexact properties, and comparisons left out."""
        why = "this plan may not train the same as one device"
        lines = [f"WARNING  the job check could not run, so {why}: {self.failed}"] if self.failed else []
        lines += [f"note  not exact: {line}" for line in self.inexact]
        return lines + [f"note  job check: {line}" for line in self.unchecked]


def is_check_needed(plan: Plan) -> bool:
    """True if the plan splits anything."""
    return plan.devices * plan.microbatches > 1


def check_job(
    job: Job, plan: Plan, level: str = "quick", *, name: str = "", arguments: dict[str, str] | None = None,
    before: tuple[Path, ...] = (), workers: int = 0,
) -> CheckResult:  # fmt: skip
    """Compare the job on one device with the job split as in `plan`, before training. Takes a second or two.

    `name` and `arguments`: how the job was loaded; with them, a stored result in one of the run directories `before` is reused. `workers`:
    loader processes of the training. Problems are not raised: see `CheckResult.problems`. A check that could not run has the reason in
    `CheckResult.failed`; a full one then has J050 among its problems.
    """
    if level == "none" or not is_check_needed(plan):
        return CheckResult(level)
    began = time.perf_counter()
    words = [name, arguments or {}, str(_make_split(plan, 10**9)), level, job.batch, job.steps, workers > 0]
    side = lambda place: _run_check(job, plan, place, words, before, level=level, loaders=workers > 0)  # noqa: E731
    try:
        (told,) = fork.run_ranks(side, 1, Listener(on_note=lambda text: None))
    except (PlaitError, OSError) as error:
        seconds = time.perf_counter() - began
        why = error.problems[0].what if isinstance(error, PlaitError) else summarize_error(error)
        if seconds >= TIMEOUT_S[level]:
            why = f"it took longer than {TIMEOUT_S[level]:.0f} s and was aborted"
        return replace(CheckResult.from_failure(level, why), seconds=seconds)
    found = convert(told, CheckResult)
    return found if found.reused else replace(found, seconds=round(time.perf_counter() - began, 3))


def read_result(folder: Path) -> CheckResult | None:
    """Read the result in a run directory; None if it is missing or unreadable."""
    try:
        return convert(json.loads((folder / CHECK_FILE).read_text(encoding="utf-8")), CheckResult)
    except (OSError, ValueError):
        return None


def write_result(folder: Path, result: CheckResult) -> None:
    """Write a result to a run directory."""
    (folder / CHECK_FILE).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")


def _run_check(
    job: Job, plan: Plan, place: Place, words: list[Any], before: tuple[Path, ...], *, level: str, loaders: bool
) -> dict[str, Any]:
    """Run the check in its own process, which ends by itself after the time limit. `loaders`: loader processes will read the data."""
    timer = threading.Timer(TIMEOUT_S[level], lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    torch.set_num_threads(1)  # thread pools do not survive a fork
    place.beat(-1, "build")
    length, here_, compared, once = _open_data(size_by_first_step(job))
    key = _compute_key([*words, length])
    for folder in before:
        found = read_result(folder)
        if found is not None and found.key == key:
            return replace(found, reused=True).to_dict()
    found = _compare_points(here_, compared, plan, place, level=level, loaders=loaders, length=length)
    told = ("the data is slow to open and was opened once: ranks' copies were not compared",)
    return replace(found, key=key, unchecked=found.unchecked + told * once).to_dict()


def _open_data(job: Job) -> tuple[int | None, Job, Job, bool]:
    """(samples of the first epoch, the job to read here, the job to compare, whether its data was opened once for all).

    Data that is slow to open is opened once: the comparing processes get it unread, and a copy is read here.
    """
    began = time.process_time()
    with preserve_host_state():
        data = open_data(job.data)
    if not is_map(data):
        return None, job, job, False
    length = len(Sampling.from_job(job, len(data)).epoch_indices(0))
    if time.process_time() - began > SLOW_OPEN_SECONDS:
        try:
            copied = copy.deepcopy(data)
        except Exception:  # for example an open file
            return length, job, job, False
        return length, replace(job, data=lambda: copied), replace(job, data=lambda: data), True
    return length, job, job, False


def _compute_key(words: list[Any]) -> str:
    """Digest of everything that the result depends on: the job's file, imported files of its folder, and `words`."""
    name, files = words[0], list[str]()
    if name:
        folder = str(Path(name.partition(":")[0]).resolve().parent) + os.sep
        loaded = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
        mine = {file for file in loaded if file.startswith(folder) and not is_library(file)}
        paths = filter(Path.is_file, map(Path, sorted(mine)))
        files = [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
    told = json.dumps([__version__, torch.__version__, files, *words], default=str, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest() if name else ""


def _make_split(plan: Plan, most: int) -> Plan:
    """The part of a plan that splits samples, with at most `most` local batches."""
    parts = plan.batch_split if 1 < plan.ranks <= most else Plan.batch_split
    return Plan(dp=min(plan.shares, most), microbatches=plan.microbatches, processes=plan.processes, batch_split=parts)


def _compare_points(
    looked_at: Job, job: Job, plan: Plan, place: Place, *, level: str, loaders: bool, length: int | None
) -> CheckResult:
    """Compare and return the result. `looked_at`: the job to read here; `job`: the same, to compare (see `_open_data`)."""
    cut, unchecked = _make_split(plan, MAX_SHARES[level]), list[str]()
    if cut.shares < plan.shares:
        unchecked.append(f"only {cut.shares} of {plan.shares} local batches of the same size are compared")
    known, named = _prepare_model(looked_at, cut, place)
    weights = sum(p.numel() for p in known.made.model.parameters()) * 8
    needed = weights * (2 + 4 * (cut.world + 1))
    if needed > psutil.virtual_memory().available // 2:
        what = f"the model in float64 on {cut.world + 1} processes takes {needed / 2**30:.1f} GiB, more than half of the free memory"
        return CheckResult.from_failure(level, what, tuple(unchecked))
    limit = job.batch * cut.shares // plan.shares
    afford = _measure_budget(looked_at, known, cut, level)
    samples, seconds = afford.samples, afford.seconds
    others = [f"{axis}={size}" for axis in ("tp", "cp", "pp", "ep") if (size := getattr(plan, axis)) > 1]
    if afford.changed.generators and others:
        what = f"the model draws from its own generator {afford.changed.generators[0]}, which plait does not seed"
        unchecked.append(f"{what}: under {' '.join(others)}, ranks may draw other numbers than one device; run plait verify")
    size = min(limit, max(samples // 2, 2 * cut.shares * cut.microbatches))
    points = _choose_points(job, cut, length, level, size=size, most=samples) + _choose_uneven(looked_at, cut, limit)
    noting = replace(job, data=lambda: take_first(open_data(job.data), digest=digest_leaves))
    try:
        sides = _measure_sides(noting, cut, known, points, size=limit, seconds=seconds)
    except PlaitError:  # the job may fail on parts smaller than those of its batch
        points = [Point(0, 0, limit if length is None else min(limit, length))]
        sides = _measure_sides(noting, cut, known, points, size=limit, seconds=seconds)
    if points[0].size < limit and (length is None or points[0].size < length):
        unchecked.append(f"only {points[0].size} of the {limit} samples of a batch are compared: all would take too long")
    problems, more = find_problems(job, cut, known, points, sides, named, changes=bool(afford.changed.values))
    if not problems and plan.world > 1 and length is not None and (cut.shares == 1 or level == "full" or loaders):
        count = READER_SAMPLES if level == "quick" else sum(point.size for point in points)
        problems, untold = compare_readers(job, count, plan.pp == plan.world)
        more += untold
    named_points = [(p, "chosen samples" if p.ids else f"step {p.step + 1}") for p in points]
    compared = tuple(f"{name}: {p.size} samples in {cut.shares * cut.microbatches} parts" for p, name in named_points)
    return CheckResult(level, problems=tuple(problems), compared=compared, unchecked=(*unchecked, *more))


def _prepare_model(job: Job, cut: Plan, place: Place) -> tuple[AnalyzedModel, tuple[str, ...]]:
    """The analyzed model in float64, and inexact properties of the split."""
    made = make_rank_model(job, CPU, WIDE, None, None)
    sketch = analyze_model(make_rank_setup(job, Plan(), place, CPU, WIDE, made=made), made)
    if sketch.batch_norms and (cut.microbatches > 1 or cut.processes == "one"):
        for name in sketch.batch_norms:  # they are listed as inexact: disable them to find other differences
            made.model.get_submodule(name).training = False
        sketch = replace(sketch, batch_norms=())
    return AnalyzedModel(made, sketch), tuple(list_inexact_reasons(cut, sketch, made.model, CPU))


@dataclass(frozen=True)
class CheckBudget:
    """Measured in two forward passes of two samples: the number of samples to compare, and state changed by a pass."""

    samples: int
    """Samples to compare in total."""
    seconds: float
    """Time for the loss alone."""
    changed: ChangedValues
    """Values outside parameters and buffers that a pass changed."""


def _measure_budget(job: Job, known: AnalyzedModel, cut: Plan, level: str) -> CheckBudget:
    model, pair = copy.deepcopy(known.made.model), 2
    data = open_data(job.data)
    from plait.data.batch import make_sketch_batch, open_first_sample

    with preserve_host_state():
        inputs = move_tree(make_sketch_batch(open_first_sample(job.data, data), pair)[0], CPU, WIDE)
        seconds, before = 0.0, collect_kept_values(model)
        with torch.no_grad(), make_forward_context(cut, WIDE, "cpu"), opaque_code.hide_higher_order():
            for _ in range(2):
                began = time.process_time()
                run_model(model, inputs)
                seconds = time.process_time() - began
    each = max(seconds / pair, 1e-7)
    allowed = max(COMPARE_SECONDS[level], 1.5 * each * job.batch / count_cores()) * min(count_cores(), cut.world + 1)
    return CheckBudget(int(0.8 * allowed / (6 * each)), 0.2 * allowed, ChangedValues.from_values(before, collect_kept_values(model)))


def _choose_points(job: Job, cut: Plan, length: int | None, level: str, *, size: int, most: int) -> list[Point]:
    """A batch of the first step with `size` samples; one with perturbed weights, from the rest of `most`; a short one if training has one."""
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


def _choose_uneven(job: Job, cut: Plan, limit: int) -> list[Point]:
    """A batch whose first part has the samples with the largest counts, sums and elements among the probed ones; the other parts have typical
    samples. The divisors in a loss then differ between parts, as in some step of training."""
    data = open_data(job.data)
    parts = cut.shares * cut.microbatches
    size = min(limit, PART_SAMPLES * parts)
    if not is_map(data) or len(data) < size or size < 2 * parts or job.order or job.token_budget:
        return []
    rows = full_batch.measure_samples(data, job, PROBE_SECONDS)
    extreme = [max(rows, key=lambda i, k=k: rows[i][k]) for k in range(len(next(iter(rows.values()), ())))]
    varied = [i for k, i in enumerate(extreme) if len({row[k] for row in rows.values()}) > 1]
    first = list(dict.fromkeys(varied))[: size // parts]
    usual = [i for i in sorted(rows, key=lambda i: rows[i]) if i not in first]
    rest = [usual[k * len(usual) // size] for k in range(size)] if len(usual) >= size else []
    ids = tuple(dict.fromkeys([*first, *rest]))[:size]
    return [Point(0, 0, size, ids=ids)] if first and len(ids) == size else []


def _measure_sides(
    job: Job, cut: Plan, known: AnalyzedModel, points: list[Point], *, size: int, seconds: float
) -> list[dict[str, Any]]:
    """Results of the ranks of the split, and last of one device. `size` and `seconds`: for the loss alone."""

    def side(place: Place) -> dict[str, Any]:
        set_rank_variables(None if place.rank == cut.world else place.rank, cut.world)
        if place.rank == cut.world:
            alone = replace(place, rank=0, world=1, store=None)
            return measure_one_device(job, known, points, alone, cut=cut, size=size, seconds=seconds)
        return measure_rank(job, cut, known, points, replace(place, world=cut.world))

    return fork.run_ranks(side, cut.world + 1, Listener(on_note=lambda text: None))
