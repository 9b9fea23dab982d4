"""`plait check`: the job check alone, without training."""

from plait.cli.plan_and_job import both
from plait.cli.result import print_result
from plait.config.command_options import CheckOptions
from plait.config.errors import PlaitError, shown
from plait.proof.job import check


def run(options: CheckOptions) -> int:
    """Check the job under the plan; raises what was found."""
    plan, job = both(options)
    found = check.check(job, plan, "full" if options.full else "quick", name=options.job, arguments=options.arguments)
    print_result(options, found.to_dict(), shown(table(found, options.job, str(plan))))
    if found.problems:
        raise PlaitError(found.problems)
    return 0


def table(found: check.Checked, job: str, plan: str) -> str:
    """What was compared, what was not, and the outcome, as text."""
    lines = [f"job         {job}", f"plan        {plan}"]
    lines += [f"compared    {line}" for line in found.compared]
    lines += [f"not         {line}" for line in found.unchecked]
    if found.failed:
        told = f"NOT CHECKED  nothing was compared: {found.failed}"
    elif found.problems:
        told = "DIFFERENT  cut by the plan, the job is another training"
    elif found.compared:
        told = "nothing found: losses and gradients of the parts are those of the batch · plait verify proves the whole run"
    else:
        told = "nothing was compared: the plan splits nothing"
    return "\n".join([*lines, told])
