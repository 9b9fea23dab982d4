"""Prediction of a run's plan on this machine, as `plait plan` would have computed it before the run.

It uses the cached sketch of the job and the measurements of earlier runs in the folder. It takes seconds, so it is stored in the run
directory as `prediction.json`.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.cli.measured_runs import describe_env_mismatch
from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.version import __version__
from plait.engine.run_directory import describe_environment
from plait.planner.alternatives import Alternative, find_alternatives
from plait.report.figures import Prediction
from plait.report.run_files import RunFiles


def load_prediction(run: RunFiles, batch: int, say: Callable[[str], None] = lambda text: None) -> Prediction:
    """Predict a run with steps of `batch` samples. Reads `prediction.json` if it has the same plan, job and software.

    `say` receives the progress.
    """
    key = [__version__, str(run.plan), run.job, run.arguments, batch]
    file = run.path / "prediction.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept.pop("of") == json.loads(json.dumps(key)):
            return Prediction(**kept | {"others": tuple(Alternative(**each) for each in kept["others"])})
    found = _make_prediction(run, batch, say)
    with suppress(OSError):  # the run may belong to another user
        file.write_text(json.dumps({"of": key, **asdict(found)}, indent=1) + "\n", encoding="utf-8")
    return found


def _make_prediction(run: RunFiles, batch: int, say: Callable[[str], None]) -> Prediction:
    path = Path(run.job.partition(":")[0])
    if path.suffix != ".py":
        return Prediction(note=f"No prediction: the job {run.job} was given as a Python object.")
    if not path.is_file():
        return Prediction(note=f"No prediction: the job file {path} does not exist.")
    if other := describe_env_mismatch(run.environment, describe_environment()):
        return Prediction(note=f"No prediction: the run used a different {other}.")
    if run.plan.server_count or run.plan.processes == "one":
        return Prediction(note=f"No prediction for the plan {run.plan}.")
    try:
        return _ask_planner(run, batch, say)
    except PlaitError as error:
        return Prediction(note=f"No prediction: {error.problems[0].what}.")
    except Exception as error:  # the job's own code
        return Prediction(note=f"No prediction: loading the job raised {type(error).__name__}: {error}.")


def _ask_planner(run: RunFiles, batch: int, say: Callable[[str], None]) -> Prediction:
    from plait.cli import cached_sketch
    from plait.cli.learning import learn_corrections
    from plait.data.loaders import override_batch
    from plait.launch.detect import read_machine
    from plait.planner.dryrun.memory_table import make_memory_table
    from plait.planner.search import price_plan
    from plait.planner.search_space import count_branch_samples

    plan, notes = run.plan, list[str]()
    options = PlanOptions(job=run.job, arguments=run.arguments, batch=batch)
    found: dict[str, Any] = {}
    try:
        machine = read_machine("here").resize(plan.devices)
        asked = cached_sketch.build_plan_request(options, machine, split=plan.devices > 1, tp=True, say=say)
        asked = learn_corrections(asked, options, str(run.path.parent), before=run.path)
        question = asked.make_space({}, None, plan.devices)
        got = asked.learned.correct_estimate(price_plan(asked.pace, plan, question, count_branch_samples(plan, question)))
        found = {"seconds": got.seconds, "parts": dict(got.parts)}
        found["others"] = tuple(find_alternatives(asked, question, plan))
    except (PlaitError, ValueError, ArithmeticError, LookupError) as error:
        notes.append(f"No predicted time: {error.problems[0].what if isinstance(error, PlaitError) else error}.")
    try:
        say("computing the memory of the plan")
        found["memory"] = dict(make_memory_table(override_batch(load_job(run.job, run.arguments), batch), plan).categories)
    except PlaitError as error:
        notes.append(f"No predicted memory: {error.problems[0].what}.")
    return Prediction(**found, note=" ".join(notes))
