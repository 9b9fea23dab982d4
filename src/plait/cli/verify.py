"""`plait verify`: prove that the split run is the same training as on one device."""

import math
from dataclasses import replace

from plait.cli.plan_and_job import both
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import VerifyOptions
from plait.config.errors import Problem, shown
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.devices import kind_of
from plait.launch.place import joining
from plait.planner.refusals import foresee
from plait.proof.candidate import PARTS
from plait.proof.probes import Probe
from plait.proof.verdict import Verdict, end, head, row
from plait.proof.verify import Show, verify

COMPARING = "parts compared"
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
    if options.json:
        verdict = proved(options, plan, job)
        print_result(options, verdict.to_dict())
    else:
        with ProgressLine("verify") as line:
            shown_so_far = PrintedTable(options.job, line)
            verdict = proved(options, plan, job, shown_so_far.print)
            shown_so_far.end(verdict)
    if not (asked or options.json):
        others = (f'plait verify {options.job} --plan "{text}"' for text in OTHERS)
        print(shown("other plans  " + "\n             ".join(others)))
    return verdict.exit_code


def too_few(options: VerifyOptions, name: str) -> list[Problem]:
    """U002 where there are fewer steps than a comparison needs; `name`: how the caller writes the option before its value."""
    fix = (f"{name}4",)
    return [Problem("U002", f"{name}{options.steps}: at least 3 steps are compared", fix=fix)] if options.steps < 3 else []


class PrintedTable:
    """The table of a verdict, of which each row is printed once it is known."""

    def __init__(self, job: str, line: ProgressLine):
        self.job, self.line, self.parts = job, line, 0
        self.printed = tuple[Probe, ...]()
        line.show(COMPARING, 0, len(PARTS))

    def print(self, verdict: Verdict) -> None:
        """Print what is new in a verdict. One that begins anew, with larger batches, gets a table of its own."""
        count = len(self.printed)
        anew = not count or verdict.probes[:count] != self.printed
        lines = [*head(verdict, self.job), *map(row, verdict.probes)] if anew else [*map(row, verdict.probes[count:])]
        self.printed = verdict.probes
        if lines:
            self.line.print("\n".join(lines))
        self.parts = 1 if anew else self.parts + 1
        self.line.show(COMPARING, min(self.parts, len(PARTS)), len(PARTS))

    def end(self, verdict: Verdict) -> None:
        """Print the rest."""
        self.print(verdict)
        self.line.print("\n".join(end(verdict, self.job)))


def proved(options: VerifyOptions, plan: Plan, job: Job, show: Show = lambda verdict: None) -> Verdict:
    """The verdict on the job under the plan. `show` gets it as far as it is known."""
    sketch = foresee(job, plan, kind_of(options.device))
    seconds = math.inf if options.full else None
    return verify(job, plan, options.steps, options.device, seconds=seconds, sketch=sketch, show=show)
