"""`plait check`: run the job check without training."""

from plait.cli.plan_and_job import load_plan_and_job
from plait.cli.result import print_result
from plait.config.command_options import CheckOptions
from plait.config.errors import PlaitError, escape_controls
from plait.proof.job import check


def run(options: CheckOptions) -> int:
    """Check the job under the plan. Raises the problems that the check finds."""
    plan, job = load_plan_and_job(options)
    found = check.check_job(job, plan, "full" if options.full else "quick", name=options.job, arguments=options.arguments)
    print_result(options, found.to_dict(), escape_controls(format_check(found, options.job, str(plan))))
    if found.problems:
        raise PlaitError(found.problems)
    return 0


def format_check(found: check.CheckResult, job: str, plan: str) -> str:
    """Format the compared and unchecked items and the outcome."""
    lines = [f"job         {job}", f"plan        {plan}"]
    lines += [f"compared    {line}" for line in found.compared]
    lines += [f"not         {line}" for line in found.unchecked]
    if found.failed:
        told = f"NOT CHECKED  nothing was compared: {found.failed}"
    elif found.problems:
        told = "DIFFERENT  the plan changes the job's loss or gradients"
    elif found.compared:
        told = "no difference found: losses and gradients of the parts match the batch · plait verify checks the complete run"
    else:
        told = "nothing was compared: the plan splits nothing"
    return "\n".join([*lines, told])
