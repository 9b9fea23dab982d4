"""What the planner predicts of a run's plan on this machine, as `plait plan` would have before the run: by the kept sketch of the job, and by
what earlier runs in the folder measured. Kept in the run directory as `prediction.json`, since it takes seconds."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.cli.measured_runs import other_kind
from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.version import __version__
from plait.engine.run_directory import environment
from plait.planner.alternatives import Alternative, alternatives
from plait.report.figures import Prediction
from plait.report.run_files import RunFiles


def predicted(run: RunFiles, batch: int, say: Callable[[str], None] = lambda text: None) -> Prediction:
    """The prediction of a run with steps of `batch` samples. Reads `prediction.json` if it is of the same plan, job and software. `say` gets
    what is done."""
    key = [__version__, str(run.plan), run.job, run.arguments, batch]
    file = run.path / "prediction.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept.pop("of") == json.loads(json.dumps(key)):
            return Prediction(**kept | {"others": tuple(Alternative(**each) for each in kept["others"])})
    found = _predicted(run, batch, say)
    with suppress(OSError):  # a run that others may read and not write
        file.write_text(json.dumps({"of": key, **asdict(found)}, indent=1) + "\n", encoding="utf-8")
    return found


def _predicted(run: RunFiles, batch: int, say: Callable[[str], None]) -> Prediction:
    path = Path(run.job.partition(":")[0])
    if path.suffix != ".py":
        return Prediction(note=f"Nothing is predicted: the job {run.job} was given as a value, in Python.")
    if not path.is_file():
        return Prediction(note=f"Nothing is predicted: the job's file {path} is not there.")
    if other := other_kind(run.environment, environment()):
        return Prediction(note=f"Nothing is predicted: the run is of another {other}.")
    if run.plan.server_count or run.plan.processes == "one":
        return Prediction(note=f"Nothing is predicted of the plan {run.plan}.")
    try:
        return _of_planner(run, batch, say)
    except PlaitError as error:
        return Prediction(note=f"Nothing is predicted: {error.problems[0].what}.")
    except Exception as error:  # the job's own code
        return Prediction(note=f"Nothing is predicted: reading the job raised {type(error).__name__}: {error}.")


def _of_planner(run: RunFiles, batch: int, say: Callable[[str], None]) -> Prediction:
    from plait.cli import kept_sketch
    from plait.cli.learning import learned
    from plait.data.loaders import with_batch
    from plait.launch.detect import read_machine
    from plait.planner.dryrun.memory_table import memory_table
    from plait.planner.search import price
    from plait.planner.search_space import branch_samples

    plan, notes = run.plan, list[str]()
    options = PlanOptions(job=run.job, arguments=run.arguments, batch=batch)
    found: dict[str, Any] = {}
    try:
        machine = read_machine("here").sized(plan.devices)
        asked = kept_sketch.request(options, machine, split=plan.devices > 1, tp=True, say=say)
        asked = learned(asked, options, str(run.path.parent), before=run.path)
        question = asked.question({}, None, plan.devices)
        got = asked.learned.applied(price(asked.pace, plan, question, branch_samples(plan, question)))
        found = {"seconds": got.seconds, "parts": dict(got.parts)}
        found["others"] = tuple(alternatives(asked, question, plan))
    except (PlaitError, ValueError, ArithmeticError, LookupError) as error:
        notes.append(f"No time is predicted: {error.problems[0].what if isinstance(error, PlaitError) else error}.")
    try:
        say("computing the memory of the plan")
        found["memory"] = dict(memory_table(with_batch(load_job(run.job, run.arguments), batch), plan).categories)
    except PlaitError as error:
        notes.append(f"No memory is predicted: {error.problems[0].what}.")
    return Prediction(**found, note=" ".join(notes))
