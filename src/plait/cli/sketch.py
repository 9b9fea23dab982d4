"""`plait sketch`: what a model costs, unit by unit, and the memory that ranks need under a plan."""

from typing import Any

from plait.cli.result import print_result
from plait.config.command_options import SketchOptions, check_range
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.model.fake_model import sketched
from plait.model.table import outline, table
from plait.planner.dryrun.memory_table import memory_table


def run(options: SketchOptions) -> int:
    """The command."""
    check_range(options)
    plan = Plan.read(options.plan).fill(None) if options.plan else None
    facts, text = shown(options, load_job(options.job, options.arguments), plan)
    print_result(options, facts, text)
    return 0


def shown(options: SketchOptions, job: Job, plan: Plan | None) -> tuple[dict[str, Any], str]:
    """The figures of the job's model, and with a plan of its ranks' memory, as JSON and as a table."""
    outlined = outline(sketched(job)[1], options.batch)
    facts, text = outlined.to_dict(), table(outlined, options.job)
    if plan is not None:
        memory = memory_table(job, plan)
        facts, text = facts | {"memory": memory.to_dict()}, f"{text}\n\n{memory}"
    return facts, text
