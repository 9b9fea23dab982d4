"""`plait replay`: a past step of a run, computed again on one process or under any plan, from the nearest checkpoint before it.

The run is only read, also while it trains. Its checkpoints are linked into a scratch folder, from which ranks load as `--resume` does: a
damaged one is passed over, and without any the ranks start from the job's seed.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from plait.checkpoint.checkpoints import marks
from plait.checkpoint.manifest import published, read_manifest
from plait.cli.main import parsed
from plait.cli.progress import ProgressLine
from plait.cli.request import scaled
from plait.cli.result import print_result
from plait.config.command_options import ReplayOptions, TrainOptions, check_range
from plait.config.errors import PlaitError, Problem, shown
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.engine.rank_start import RankOptions
from plait.engine.replay import ReplayedStep, replay
from plait.engine.run_directory import RunDirectory
from plait.launch import devices, fork
from plait.planner.refusals import foresee
from plait.report.run_files import json_object
from plait.report.summary import metrics, run_folder
from plait.tensors.norm import number

FAR = 10.0
"""An output is outlying if it is so many times as large as those of most samples, and as in the step before."""
SPREADS = 8.0
"""And farther from the median sample than so many times the median distance, both as logarithms."""
FEWEST = 4
"""Samples that say what is usual."""
Row = dict[str, Any]


def run(options: ReplayOptions) -> int:
    """Print what the step gives now beside what the run logged; the exit code."""
    check_range(options)
    folder = run_folder(Path(options.path), f"plait replay {{}} --step {options.step}")
    logged = _logged(folder, options.step)
    source = RunSource.read(folder, options)
    plan = _plan(folder, options)
    devices.check(devices.kind_of(options.device), plan.world)
    with tempfile.TemporaryDirectory(prefix="plait-replay-") as scratch:
        found = _replayed(source, plan, options, Path(scratch))
    found |= {"run": str(folder), "step": options.step, "plan": str(plan), "logged": logged, "notes": [*source.notes, *found["notes"]]}
    if options.bisect and found["samples"]:
        found["first_module"] = first_outlying(found)
    facts = _plain({name: found[name] for name in sorted(found.keys() - {"sizes", "gradients", "before", "places"})})
    print_result(options, facts, shown("\n".join(lines(found, options.top))))
    return 0


def _logged(folder: Path, step: int) -> Row | None:
    """The row that the run logged of a step; None of the step after its last, which a step that is not finite may have ended. R010."""
    rows = {row["step"]: row for row in metrics(folder / "metrics.jsonl") if "loss" in row}
    last = max(rows, default=0)
    if step > last + 1:
        what = f"{folder} does not have step {step}"
        why = f"the last step in its metrics.jsonl is {last}; step {last + 1} can also be replayed"
        raise PlaitError(Problem("R010", what, why=why, where=str(folder / "metrics.jsonl"), fix=(f"--step {last or 1}",)))
    return rows.get(step)


@dataclass(frozen=True)
class RunSource:
    """What a run trained, as its files state it."""

    name: str
    job: Job
    arguments: dict[str, str]
    described: Path | None
    """The checkpoint that states what the job was in the step: the first one after it, else the newest before it."""
    checkpoints: tuple[Path, ...]
    """Those to start from, newest first."""
    notes: tuple[str, ...]

    @staticmethod
    def read(folder: Path, options: ReplayOptions) -> "RunSource":
        """Of the run for a step of it. R012 where the files do not name a job."""
        told, env = json_object(folder / "job.json", []), json_object(folder / "env.json", [])
        if Path(str(told.get("job", "")).partition(":")[0]).suffix != ".py":
            what = f"{folder} does not name a job file"
            why = f"job.json has {told['job']!r}, a job given as a value in Python" if "job" in told else "job.json is missing or damaged"
            raise PlaitError(Problem("R012", what, why=why, fix=("train the job from a file:  plait train path/to/job.py",)))
        all_ = [path for path in published(folder / "checkpoints") if marks(path) is not None]
        after = [path for path in all_ if _step(path) >= options.step]
        before = [path for path in all_ if _step(path) < options.step]
        described = next(iter([*reversed(after), *before]), None)
        stated = read_manifest(described).job.get("arguments") if described is not None else None
        last = told.get("arguments")
        arguments = stated if isinstance(stated, dict) and after else last if isinstance(last, dict) else {}
        job, notes = load_job(told["job"], arguments), list[str]()
        if (version := env.get("plait", __version__)) != __version__:
            notes.append(f"the run was made by plait {version}, this is {__version__}: they may compute steps otherwise")
        given = _options_of(told.get("command"))
        if given is not None:
            instead = {name: value for name in ("steps", "weights") if (value := getattr(given, name))}
            job, _ = scaled(replace(job, **instead), given.batch, given.scale_lr)
            if given.callbacks:
                notes.append("the run had callbacks, which are not called: what they changed of a step is missing here")
        job = replace(job, steps=max(job.steps, options.step))
        earlier = [path for path in before if _step(path) < options.step - 1] if options.bisect else []
        return RunSource(told["job"], job, arguments, described, tuple(earlier or before), tuple(notes))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def _options_of(command: object) -> TrainOptions | None:
    """The options of the run's command line; None where another program started the run."""
    try:
        _, given = parsed([str(word) for word in command[1:]]) if isinstance(command, list) else (None, None)
    except (PlaitError, SystemExit):
        return None
    return given if isinstance(given, TrainOptions) else None


def _plan(folder: Path, options: ReplayOptions) -> Plan:
    """The plan to replay under: by default one process with the number format of the run. R012 for a run that is another training."""
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


def _replayed(source: RunSource, plan: Plan, options: ReplayOptions, scratch: Path) -> Row:
    """What the ranks found out, merged."""
    start = RunDirectory(scratch)
    start.checkpoints.mkdir()
    for path in source.checkpoints:
        (start.checkpoints / path.name).symlink_to(path.resolve())
    sketch = foresee(source.job, plan, devices.kind_of(options.device))
    ranks = RankOptions(
        name=source.name, job=source.job, plan=plan, arguments=source.arguments, device=options.device, on_nan="skip",
        allow_changes=options.allow_changes, sketch=sketch,
    )  # fmt: skip
    replayed = ReplayedStep(step=options.step, options=ranks, start=start, described=source.described, bisect=options.bisect)
    with ProgressLine("replay", options.json) as bar:

        def heard(rank: int, message: Row) -> None:
            value = message.get("value", {})
            if rank == 0 and "sample" in value:
                bar.show("samples", value["sample"], value["samples"])
            elif rank == 0 and "step" in value:
                bar.show("steps", value["step"] - value["first"], value["last"] - value["first"])

        results = fork.run(partial(replay, replayed), plan.world, fork.Listener(heard), alike=plan.pp == 1)
    return merged(results)


def merged(results: Sequence[Row]) -> Row:
    """What all ranks found out together. Ranks that have a part of a module's output each count by the largest."""
    found = {**results[0], "sizes": {}, "gradients": {}, "before": {}}
    places = {place: (sample, weight) for each in results for place, sample, weight in each["places"]}
    for each in results:
        found["gradients"] = dict(each.get("gradients", {})) | found["gradients"]
        for name, size in each.get("before", {}).items():
            found["before"][name] = _larger(size, found["before"].get(name, 0.0))
        for name, by_place in each.get("sizes", {}).items():
            known = found["sizes"].setdefault(name, {})
            known |= {int(place): _larger(size, known.get(int(place), 0.0)) for place, size in by_place.items()}
    found["samples"] = [
        {"sample": places[place][0], "place": place, "weight": places[place][1], "loss": loss, "norm": norm}
        for place, (loss, norm) in enumerate(results[0]["samples"])
    ]
    found["notes"] = [*found["notes"], *(f"not exact: {line}" for line in found.pop("inexact"))]
    found["notes"] += [f"passed over: {line}" for line in found.pop("refused")] + [f"changed: {line}" for line in found["changed"]]
    return found


def _larger(size: float, other: float) -> float:
    return size if math.isnan(size) or size > other else other


def first_outlying(found: Row) -> Row | None:
    """The first module, in the order of the forward pass, whose output is not finite or outlying, and in which samples; None without any.

    The inputs, the targets and the loss of a sample count as modules. A gradient that is not finite comes last: it is of a parameter.
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
        if far := [samples[place] for place in _far(sizes)]:
            return {"module": name, "what": f"{max(sizes.values()) / usual:.3g} × the median sample", "samples": far}
        before = found["before"].get(name, 0.0)
        if before and usual > FAR * before:
            return {"module": name, "what": f"{usual / before:.3g} × the step before", "samples": list(samples.values())}
    return None


def _far(sizes: dict[int, float]) -> list[int]:
    """The places whose sizes are far above the median."""
    known = {place: math.log(size) for place, size in sizes.items() if size > 0}
    if len(known) < FEWEST:
        return []
    middle = median(known.values())
    spread = median(abs(size - middle) for size in known.values())
    return [place for place, size in known.items() if size - middle > max(math.log(FAR), SPREADS * spread)]


def lines(found: Row, top: int) -> Iterator[str]:
    """What is printed."""
    logged, samples = found["logged"] or {}, found["samples"]
    yield f"{found['run']} · step {found['step']} under {found['plan']} · from {found['started'] or 'the seed'}, step {found['from']}"
    yield f"{'':10}{'loss':>24}{'norm':>24}"
    for name, row in (("logged", logged), ("replayed", found)):
        yield f"{name:10}{_cell(row.get('loss')):>24}{_cell(row.get('norm')):>24}" + ("  skipped in the run" if row.get("skipped") else "")
    if not logged:
        yield "the run's log has no such step: it ended in it, or did not write it"
    else:
        away = [relative_difference(logged.get(name), found[name]) for name in ("loss", "norm")]
        yield f"{'differs by':10}{away[0]:>24.1e}{away[1]:>24.1e}"
    for name, row in (found.get("phases") or {}).items():
        yield f"  phase {name}: loss {row['loss']:.6g}, norm {row['norm']:.6g}"
    if samples:
        yield f"{len(samples)} samples, each by itself; the largest" + (f" {top}" if len(samples) > top else "")
        yield f"{'by loss':>30}{'by gradient norm':>34}"
        ranked = [sorted(samples, key=lambda row: _rank(row[name]), reverse=True)[:top] for name in ("loss", "norm")]
        usual = [median(_rank(row[name]) for row in samples) for name in ("loss", "norm")]
        for one, other in zip(*ranked):
            yield "  ".join(_sample(row, name, middle) for row, name, middle in zip((one, other), ("loss", "norm"), usual))
    if "first_module" in found:
        first = found["first_module"]
        yield "no module's output is outlying" if first is None else _named(first, len(samples))
    yield from (f"note  {line}" for line in [*found["notes"], *coupled(found)])


def _named(first: Row, count: int) -> str:
    some = first["samples"]
    which = f"all {count} samples" if len(some) == count else "sample " + ", ".join(map(str, some[:8])) + ", …" * (len(some) > 8)
    return f"first outlying output: {first['module']}    {first['what']}, {which}"


def coupled(found: Row) -> list[str]:
    """What to say where the batch's loss is not the weighted mean of its samples' losses."""
    rows, loss = found["samples"], found["loss"]
    total = sum(row["weight"] for row in rows)
    if not total or not math.isfinite(loss):
        return []
    away = relative_difference(loss, sum(row["weight"] * row["loss"] for row in rows if row["weight"]) / total)
    told = f"the mean of the samples' losses differs from the batch's by {away:.1e}: model or loss look at several samples together"
    return [told] if away > 1e-3 else []


def relative_difference(one: object, other: float) -> float:
    """The relative difference of two numbers; 0 if neither is finite."""
    if not isinstance(one, (int, float)) or not math.isfinite(one):
        return math.inf if math.isfinite(other) else 0.0
    return abs(one - other) / max(abs(one), abs(other), 1e-300) if math.isfinite(other) else math.inf


def _rank(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _cell(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, (int, float)) else "—"


def _sample(row: Row, name: str, middle: float) -> str:
    times = f"{row[name] / middle:.3g} ×" if middle and math.isfinite(row[name] / middle) else ""
    return f"  sample {row['sample']:<10}{row[name]:>12.6g} {times:>11}"


def _plain(value: object) -> object:
    """A value as JSON has it: a number that is not finite is null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return number(value) if isinstance(value, float) else value
