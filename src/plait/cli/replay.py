"""`plait replay`: compute a past step of a run again, on one process or under any plan, from the nearest checkpoint before it.

The run is only read, and may still be training. Its checkpoints are linked into a scratch folder, from which ranks load as `--resume`
does. A damaged checkpoint is skipped. Without a checkpoint, ranks start from the job's seed.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from plait.checkpoint.checkpoints import read_nonfinite_names
from plait.checkpoint.manifest import list_checkpoints, read_manifest
from plait.cli.main import parse_command_line
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.cli.train_request import scale_batch
from plait.config.command_options import ReplayOptions, TrainOptions, check_range
from plait.config.errors import PlaitError, Problem, escape_controls
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.engine.rank_start import RankOptions
from plait.engine.replay import ReplayedStep, replay
from plait.engine.run_directory import RunDirectory
from plait.launch import devices, fork
from plait.planner.refusals import validate_plan
from plait.report.run_files import read_json_object
from plait.report.summary import find_run_folder, read_metric_rows
from plait.tensors.norm import finite_or_none

OUTLIER_RATIO = 10.0
"""Minimum ratio of an outlying output to the outputs of most samples, and to the step before."""
OUTLIER_SPREADS = 8.0
"""Minimum distance of an outlier from the median, as a multiple of the median distance, both as logarithms."""
MIN_SAMPLES = 4
"""Minimum number of samples for a median."""
Row = dict[str, Any]


def run(options: ReplayOptions) -> int:
    """Print the replayed step next to the logged one. Returns the exit code."""
    check_range(options)
    folder = find_run_folder(Path(options.path), f"plait replay {{}} --step {options.step}")
    logged = _read_logged_row(folder, options.step)
    source = RunSource.read(folder, options)
    plan = _choose_plan(folder, options)
    devices.check_devices(devices.resolve_kind(options.device), plan.world)
    with tempfile.TemporaryDirectory(prefix="plait-replay-") as scratch:
        found = _run_replay(source, plan, options, Path(scratch))
    found |= {"run": str(folder), "step": options.step, "plan": str(plan), "logged": logged, "notes": [*source.notes, *found["notes"]]}
    if options.bisect and found["samples"]:
        found["first_module"] = find_first_outlier(found)
    facts = _to_json({name: found[name] for name in sorted(found.keys() - {"sizes", "gradients", "before", "places"})})
    print_result(options, facts, escape_controls("\n".join(format_replay(found, options.top))))
    return 0


def _read_logged_row(folder: Path, step: int) -> Row | None:
    """Return the logged row of a step. Returns None for the step after the last, which may not be finite. Raises R010."""
    rows = {row["step"]: row for row in read_metric_rows(folder / "metrics.jsonl") if "loss" in row}
    last = max(rows, default=0)
    if step > last + 1:
        what = f"{folder} does not have step {step}"
        why = f"the last step in its metrics.jsonl is {last}; step {last + 1} can also be replayed"
        raise PlaitError(Problem("R010", what, why=why, where=str(folder / "metrics.jsonl"), fix=(f"--step {last or 1}",)))
    return rows.get(step)


@dataclass(frozen=True)
class RunSource:
    """The job and the checkpoints of a run, read from its files."""

    name: str
    job: Job
    arguments: dict[str, str]
    job_checkpoint: Path | None
    """The checkpoint that describes the job at this step: the first one after it, else the newest before it."""
    checkpoints: tuple[Path, ...]
    """Checkpoints to start from, newest first."""
    notes: tuple[str, ...]

    @staticmethod
    def read(folder: Path, options: ReplayOptions) -> "RunSource":
        """Read the source of a step of a run. Raises R012 if the files do not name a job."""
        told, env = read_json_object(folder / "job.json", []), read_json_object(folder / "env.json", [])
        if Path(str(told.get("job", "")).partition(":")[0]).suffix != ".py":
            what = f"{folder} does not name a job file"
            why = f"job.json has {told['job']!r}, a job given as a value in Python" if "job" in told else "job.json is missing or damaged"
            raise PlaitError(Problem("R012", what, why=why, fix=("train the job from a file:  plait train path/to/job.py",)))
        all_ = [path for path in list_checkpoints(folder / "checkpoints") if read_nonfinite_names(path) is not None]
        after = [path for path in all_ if _parse_step(path) >= options.step]
        before = [path for path in all_ if _parse_step(path) < options.step]
        described = next(iter([*reversed(after), *before]), None)
        stated = read_manifest(described).job.get("arguments") if described is not None else None
        last = told.get("arguments")
        arguments = stated if isinstance(stated, dict) and after else last if isinstance(last, dict) else {}
        job, notes = load_job(told["job"], arguments), list[str]()
        if (version := env.get("plait", __version__)) != __version__:
            notes.append(f"the run used plait {version}, and this version ({__version__}) may compute steps differently")
        given = _parse_run_options(told.get("command"))
        if given is not None:
            instead = {name: value for name in ("steps", "weights") if (value := getattr(given, name))}
            job, _ = scale_batch(replace(job, **instead), given.batch, given.scale_lr)
            if given.callbacks:
                notes.append("the run had callbacks, which are not called here, so their changes to a step are missing")
        job = replace(job, steps=max(job.steps, options.step))
        earlier = [path for path in before if _parse_step(path) < options.step - 1] if options.bisect else []
        return RunSource(told["job"], job, arguments, described, tuple(earlier or before), tuple(notes))


def _parse_step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def _parse_run_options(command: object) -> TrainOptions | None:
    """Parse the options of the run's command line. Returns None if another program started the run."""
    try:
        _, given = parse_command_line([str(word) for word in command[1:]]) if isinstance(command, list) else (None, None)
    except (PlaitError, SystemExit):
        return None
    return given if isinstance(given, TrainOptions) else None


def _choose_plan(folder: Path, options: ReplayOptions) -> Plan:
    """Choose the plan of the replay: by default one process with the number format of the run.

    Raises R012 if the run or the plan trains differently.
    """
    ran = Plan.stored(folder / "plan.toml")
    alone = Plan(precision=ran.precision, fp8_recipe=ran.fp8_recipe)
    plan = (alone if options.plan is None else Plan.read(options.plan)).fill(None)
    why, fix = "", f'--plan "{ran}"'
    if max(ran.replica_groups, plan.replica_groups) > 1:
        why = "replica groups have different weights between synchronizations"
        fix = "replay a run whose ranks synchronize in every step"
    elif plan != ran and {ran.grad_compression, plan.grad_compression} != {"none"}:
        why = f"with grad_compression={ran.grad_compression} a rank's gradients depend on its residuals"
    if why:
        raise PlaitError(Problem("R012", f"{folder} ran under {ran} and cannot be replayed under {plan}", why=why, fix=(fix,)))
    if options.bisect and (plan.compile or plan.processes == "one"):
        what, why = f"--bisect does not work under {plan}", "plait cannot measure modules in compiled units or in threads"
        raise PlaitError(Problem("U002", what, why=why, fix=("leave out --plan    replays on one process",)))
    return plan


def _run_replay(source: RunSource, plan: Plan, options: ReplayOptions, scratch: Path) -> Row:
    """Run the replay on all ranks, and merge their results."""
    start = RunDirectory(scratch)
    start.checkpoints.mkdir()
    for path in source.checkpoints:
        (start.checkpoints / path.name).symlink_to(path.resolve())
    sketch = validate_plan(source.job, plan, devices.resolve_kind(options.device))
    ranks = RankOptions(
        name=source.name, job=source.job, plan=plan, arguments=source.arguments, device=options.device, on_nan="skip",
        allow_changes=options.allow_changes, sketch=sketch,
    )  # fmt: skip
    replayed = ReplayedStep(step=options.step, options=ranks, start=start, checkpoint=source.job_checkpoint, bisect=options.bisect)
    with ProgressLine("replay", options.json) as bar:

        def show_progress(rank: int, message: Row) -> None:
            value = message.get("value", {})
            if rank == 0 and "sample" in value:
                bar.show("samples", value["sample"], value["samples"])
            elif rank == 0 and "step" in value:
                bar.show("steps", value["step"] - value["first"], value["last"] - value["first"])

        results = fork.run_ranks(partial(replay, replayed), plan.world, fork.Listener(show_progress), uniform=plan.pp == 1)
    return merge_results(results)


def merge_results(results: Sequence[Row]) -> Row:
    """Merge the results of all ranks. If ranks have parts of a module's output, the largest value counts."""
    found = {**results[0], "sizes": {}, "gradients": {}, "before": {}}
    places = {place: (sample, weight) for each in results for place, sample, weight in each["places"]}
    for each in results:
        found["gradients"] = dict(each.get("gradients", {})) | found["gradients"]
        for name, size in each.get("before", {}).items():
            found["before"][name] = _max_or_nan(size, found["before"].get(name, 0.0))
        for name, by_place in each.get("sizes", {}).items():
            known = found["sizes"].setdefault(name, {})
            known |= {int(place): _max_or_nan(size, known.get(int(place), 0.0)) for place, size in by_place.items()}
    found["samples"] = [
        {"sample": places[place][0], "place": place, "weight": places[place][1], "loss": loss, "norm": norm}
        for place, (loss, norm) in enumerate(results[0]["samples"])
    ]
    found["notes"] = [*found["notes"], *(f"not exact: {line}" for line in found.pop("inexact"))]
    found["notes"] += [f"skipped: {line}" for line in found.pop("refused")] + [f"changed: {line}" for line in found["changed"]]
    return found


def _max_or_nan(size: float, other: float) -> float:
    return size if math.isnan(size) or size > other else other


def find_first_outlier(found: Row) -> Row | None:
    """Find the first module, in forward order, whose output is not finite or outlying, with its samples. Returns None if there is none.

    The inputs, the targets and the loss of a sample count as modules. A gradient that is not finite comes last, named by its parameter.
    """
    samples = {row["place"]: row["sample"] for row in found["samples"]}
    every = dict[str, dict[int, float]](found["sizes"])
    for name in sorted(every, key=("the inputs", "the targets").__contains__, reverse=True):
        if broken := [samples[place] for place, size in every[name].items() if not math.isfinite(size)]:
            return {"module": name, "what": "NaN or infinity", "samples": broken}
    if places := [*found["gradients"]]:
        first = found["gradients"][places[0]]
        return {"module": first, "what": "a gradient with NaN or infinity", "samples": [samples[int(place)] for place in places]}
    for name, sizes in every.items():
        usual = median(sizes.values())  # all are finite
        if far := [samples[place] for place in _find_outliers(sizes)]:
            return {"module": name, "what": f"{max(sizes.values()) / usual:.3g} × the median sample", "samples": far}
        before = found["before"].get(name, 0.0)
        if before and usual > OUTLIER_RATIO * before:
            return {"module": name, "what": f"{usual / before:.3g} × the step before", "samples": list(samples.values())}
    return None


def _find_outliers(sizes: dict[int, float]) -> list[int]:
    """Return the places whose sizes are far above the median."""
    known = {place: math.log(size) for place, size in sizes.items() if size > 0}
    if len(known) < MIN_SAMPLES:
        return []
    middle = median(known.values())
    spread = median(abs(size - middle) for size in known.values())
    return [place for place, size in known.items() if size - middle > max(math.log(OUTLIER_RATIO), OUTLIER_SPREADS * spread)]


def format_replay(found: Row, top: int) -> Iterator[str]:
    """Format the result."""
    logged, samples = found["logged"] or {}, found["samples"]
    yield f"{found['run']} · step {found['step']} under {found['plan']} · from {found['started'] or 'the seed'}, step {found['from']}"
    yield f"{'':10}{'loss':>24}{'norm':>24}"
    for name, row in (("logged", logged), ("replayed", found)):
        yield f"{name:10}{_format_cell(row.get('loss')):>24}{_format_cell(row.get('norm')):>24}" + (
            "  skipped in the run" if row.get("skipped") else ""
        )
    if not logged:
        yield "the run's log does not have this step: the run ended in it, or did not log it"
    else:
        away = [relative_difference(logged.get(name), found[name]) for name in ("loss", "norm")]
        yield f"{'differs by':10}{away[0]:>24.1e}{away[1]:>24.1e}"
    for name, row in (found.get("phases") or {}).items():
        yield f"  phase {name}: loss {row['loss']:.6g}, norm {row['norm']:.6g}"
    if samples:
        yield f"{len(samples)} samples, computed separately; the largest" + (f" {top}" if len(samples) > top else "")
        yield f"{'by loss':>30}{'by gradient norm':>34}"
        ranked = [sorted(samples, key=lambda row: _sort_key(row[name]), reverse=True)[:top] for name in ("loss", "norm")]
        usual = [median(_sort_key(row[name]) for row in samples) for name in ("loss", "norm")]
        for one, other in zip(*ranked):
            yield "  ".join(_format_sample(row, name, middle) for row, name, middle in zip((one, other), ("loss", "norm"), usual))
    if "first_module" in found:
        first = found["first_module"]
        yield "no module has an outlying output" if first is None else _describe_outlier(first, len(samples))
    yield from (f"note  {line}" for line in [*found["notes"], *describe_coupling(found)])


def _describe_outlier(first: Row, count: int) -> str:
    some = first["samples"]
    which = f"all {count} samples" if len(some) == count else "sample " + ", ".join(map(str, some[:8])) + ", …" * (len(some) > 8)
    return f"first outlying output: {first['module']}    {first['what']}, {which}"


def describe_coupling(found: Row) -> list[str]:
    """Describe a batch loss that is not the weighted mean of the losses of its samples."""
    rows, loss = found["samples"], found["loss"]
    total = sum(row["weight"] for row in rows)
    if not total or not math.isfinite(loss):
        return []
    away = relative_difference(loss, sum(row["weight"] * row["loss"] for row in rows if row["weight"]) / total)
    told = f"the mean of the samples' losses differs from the batch loss by {away:.1e}: the model or the loss couples samples"
    return [told] if away > 1e-3 else []


def relative_difference(one: object, other: float) -> float:
    """Return the relative difference of two numbers; 0 if neither is finite."""
    if not isinstance(one, (int, float)) or not math.isfinite(one):
        return math.inf if math.isfinite(other) else 0.0
    return abs(one - other) / max(abs(one), abs(other), 1e-300) if math.isfinite(other) else math.inf


def _sort_key(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _format_cell(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, (int, float)) else "—"


def _format_sample(row: Row, name: str, middle: float) -> str:
    times = f"{row[name] / middle:.3g} ×" if middle and math.isfinite(row[name] / middle) else ""
    return f"  sample {row['sample']:<10}{row[name]:>12.6g} {times:>11}"


def _to_json(value: object) -> object:
    """Convert a value to JSON values. A number that is not finite becomes null."""
    if isinstance(value, dict):
        return {name: _to_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(one) for one in value]
    return finite_or_none(value) if isinstance(value, float) else value
