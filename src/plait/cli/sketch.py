"""`plait sketch`: show the costs of a model, unit by unit, and the memory of ranks under a plan."""

from typing import Any

from plait.cli.result import print_result
from plait.config.command_options import SketchOptions, check_range
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.model.fake_model import sketch_fake_model
from plait.model.sketch_table import format_sketch, outline_sketch
from plait.planner.dryrun.memory_table import make_memory_table


def run(options: SketchOptions) -> int:
    """Run the command."""
    check_range(options)
    plan = Plan.read(options.plan).fill(None) if options.plan else None
    facts, text = build_sketch(options, load_job(options.job, options.arguments), plan)
    print_result(options, facts, text)
    return 0


def build_sketch(options: SketchOptions, job: Job, plan: Plan | None) -> tuple[dict[str, Any], str]:
    """Sketch the job's model and, with a plan, the memory of its ranks. Returns JSON values and a table."""
    outlined = outline_sketch(sketch_fake_model(job)[1], options.batch)
    facts, text = outlined.to_dict(), format_sketch(outlined, options.job)
    if plan is not None:
        memory = make_memory_table(job, plan)
        facts, text = facts | {"memory": memory.to_dict()}, f"{text}\n\n{memory}"
    return facts, text
