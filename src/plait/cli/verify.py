"""`plait verify`: prove that the split run is the same training as on one device."""

import json
import math
from dataclasses import replace

from plait.cli.plan_and_job import both
from plait.config.command_options import VerifyOptions
from plait.config.errors import Problem, shown
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.devices import kind_of
from plait.launch.place import joining
from plait.planner.refusals import foresee
from plait.proof.verdict import Verdict, table
from plait.proof.verify import verify

FIRST = "dp=2"
"""What is tried when no plan is given: one process alone would prove nothing."""
OTHERS = ("dp=2 microbatches=2", "fsdp=2", "pp=2 microbatches=2", "tp=2")
"""What is named then."""


def run(options: VerifyOptions) -> int:
    """The command."""
    asked = options.plan is not None or options.nproc is not None or joining()
    plan, job = both(options if asked else replace(options, plan=FIRST), too_few(options, "--steps "))
    if not (asked or options.json):
        told = f"{FIRST} is tried, two copies of the model with half of each batch"
        print(shown(f"plan        none was given: {told}"), flush=True)
    verdict = proved(options, plan, job)
    print(json.dumps(verdict.to_dict()) if options.json else table(verdict, options.job))
    if not (asked or options.json):
        others = (f'plait verify {options.job} --plan "{text}"' for text in OTHERS)
        print(shown("other plans  " + "\n             ".join(others)))
    return verdict.exit_code


def too_few(options: VerifyOptions, name: str) -> list[Problem]:
    """U002 where there are fewer steps than a comparison needs; `name`: how the caller writes the option before its value."""
    fix = (f"{name}4",)
    return [Problem("U002", f"{name}{options.steps}: at least 3 are compared", fix=fix)] if options.steps < 3 else []


def proved(options: VerifyOptions, plan: Plan, job: Job) -> Verdict:
    """The verdict on the job under the plan."""
    sketch = foresee(job, plan, kind_of(options.device))
    seconds = math.inf if options.full else None
    return verify(job, plan, options.steps, options.device, seconds=seconds, sketch=sketch)
