"""What the planner predicts of a run's plan on this machine: kept in the run directory as `prediction.json`, since it takes seconds."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.version import __version__
from plait.engine.run_directory import environment
from plait.planner.alternatives import Alternative
from plait.report.measured_runs import SAME
from plait.report.run_files import RunFiles


@dataclass(frozen=True)
class Prediction:
    """Of one step: seconds, split by what they are spent on, and bytes by category of the fullest rank."""

    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    others: tuple[Alternative, ...] = ()
    note: str = ""
    """Why something is not predicted."""

    @staticmethod
    def of(run: RunFiles, batch: int) -> "Prediction":
        """That of a run with steps of `batch` samples. Reads `prediction.json` if it is of the same plan, job and software."""
        key = [__version__, str(run.plan), run.job, run.arguments, batch]
        file = run.path / "prediction.json"
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept.pop("of") == json.loads(json.dumps(key)):
                return Prediction(**kept | {"others": tuple(Alternative(**each) for each in kept["others"])})
        found = _predicted(run, batch)
        with suppress(OSError):  # a run that others may read and not write
            file.write_text(json.dumps({"of": key, **asdict(found)}, indent=1) + "\n", encoding="utf-8")
        return found


def _predicted(run: RunFiles, batch: int) -> Prediction:
    path = Path(run.job.partition(":")[0])
    if path.suffix != ".py":
        return Prediction(note=f"Nothing is predicted: the job {run.job} was given as a value, in Python.")
    if not path.is_file():
        return Prediction(note=f"Nothing is predicted: the job's file {path} is not there.")
    here = environment()
    if other := [name for name in SAME if run.environment.get(name) != here[name]]:
        return Prediction(note=f"Nothing is predicted: the run is of another {SAME[other[0]]} than this one ({other[0]}).")
    if run.plan.server_count or run.plan.processes == "one":
        return Prediction(note=f"Nothing is predicted of the plan {run.plan}.")
    try:
        return _of_planner(run, batch)
    except PlaitError as error:
        return Prediction(note=f"Nothing is predicted: {error.problems[0].what}.")
    except Exception as error:  # the job's own code
        return Prediction(note=f"Nothing is predicted: reading the job raised {type(error).__name__}: {error}.")


def _of_planner(run: RunFiles, batch: int) -> Prediction:
    from plait.data.loaders import with_batch
    from plait.launch.detect import read_machine
    from plait.planner.alternatives import alternatives
    from plait.planner.dryrun.memory_table import memory_table
    from plait.planner.question import PlanRequest, sized
    from plait.planner.search import branch_samples, price

    plan, notes = run.plan, list[str]()
    job = with_batch(load_job(run.job, run.arguments), batch)
    found: dict[str, Any] = {}
    try:
        asked = PlanRequest.of(job, run.job, sized(read_machine("here"), plan.devices), split=plan.devices > 1)
        question = asked.question({}, None, plan.devices)
        got = price(asked.pace, plan, question, branch_samples(plan, question))
        found = {"seconds": got.seconds, "parts": dict(got.parts)}
        found["others"] = tuple(alternatives(asked, question, plan))
    except (PlaitError, ValueError, ArithmeticError, LookupError) as error:
        notes.append(f"No time is predicted: {error.problems[0].what if isinstance(error, PlaitError) else error}.")
    try:
        found["memory"] = dict(memory_table(job, plan).categories)
    except PlaitError as error:
        notes.append(f"No memory is predicted: {error.problems[0].what}.")
    return Prediction(**found, note=" ".join(notes))
