"""`plait verify`: prove that the split run trains the same as one device."""

import math
from dataclasses import replace

from plait.cli.plan_and_job import load_plan_and_job
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import VerifyOptions
from plait.config.errors import Problem, escape_controls
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.devices import resolve_kind
from plait.launch.place import is_launched_rank
from plait.planner.refusals import validate_plan
from plait.proof.candidate import PARTS
from plait.proof.probes import Probe
from plait.proof.verdict import Verdict, format_conclusion, format_header, format_probe
from plait.proof.verify import ShowVerdict, verify

PROGRESS_TEXT = "parts compared"
DEFAULT_PLAN = "dp=2"
"""Default plan of verify: a single process would prove nothing."""
SUGGESTED_PLANS = ("dp=2 microbatches=2", "fsdp=2", "pp=2 microbatches=2", "tp=2")
"""Plans that the output suggests after the default plan."""


def run(options: VerifyOptions) -> int:
    """Run the command."""
    asked = options.plan is not None or options.nproc is not None or is_launched_rank()
    plan, job = load_plan_and_job(options if asked else replace(options, plan=DEFAULT_PLAN), check_step_count(options, "--steps "))
    if not (asked or options.json):
        told = f"trying {DEFAULT_PLAN}, two replicas with half of each batch"
        print(escape_controls(f"plan        none given: {told}"), flush=True)
    if options.json:
        verdict = verify_plan(options, plan, job)
        print_result(options, verdict.to_dict())
    else:
        with ProgressLine("verify") as line:
            shown_so_far = PrintedTable(options.job, line)
            verdict = verify_plan(options, plan, job, shown_so_far.print)
            shown_so_far.end(verdict)
    if not (asked or options.json):
        others = (f'plait verify {options.job} --plan "{text}"' for text in SUGGESTED_PLANS)
        print(escape_controls("other plans  " + "\n             ".join(others)))
    return verdict.exit_code


def check_step_count(options: VerifyOptions, name: str) -> list[Problem]:
    """U002 if there are fewer than 3 steps. `name` is the option as the caller writes it, up to its value."""
    fix = (f"{name}4",)
    return [Problem("U002", f"{name}{options.steps}: at least 3 steps are compared", fix=fix)] if options.steps < 3 else []


class PrintedTable:
    """The table of a verdict, printed row by row as results arrive."""

    def __init__(self, job: str, line: ProgressLine):
        self.job, self.line, self.parts = job, line, 0
        self.printed_probes = tuple[Probe, ...]()
        line.show(PROGRESS_TEXT, 0, len(PARTS))

    def print(self, verdict: Verdict) -> None:
        """Print the new rows of a verdict. A verdict that restarts with larger batches gets a new table."""
        count = len(self.printed_probes)
        anew = not count or verdict.probes[:count] != self.printed_probes
        lines = [*format_header(verdict, self.job), *map(format_probe, verdict.probes)] if anew else [*map(format_probe, verdict.probes[count:])]
        self.printed_probes = verdict.probes
        if lines:
            self.line.print("\n".join(lines))
        self.parts = 1 if anew else self.parts + 1
        self.line.show(PROGRESS_TEXT, min(self.parts, len(PARTS)), len(PARTS))

    def end(self, verdict: Verdict) -> None:
        """Print the remaining rows and the result."""
        self.print(verdict)
        self.line.print("\n".join(format_conclusion(verdict, self.job)))


def verify_plan(options: VerifyOptions, plan: Plan, job: Job, show: ShowVerdict = lambda verdict: None) -> Verdict:
    """Verify the job under the plan. `show` receives intermediate verdicts."""
    sketch = validate_plan(job, plan, resolve_kind(options.device))
    seconds = math.inf if options.full else None
    return verify(job, plan, options.steps, options.device, seconds=seconds, sketch=sketch, show=show)
