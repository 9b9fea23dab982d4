"""`plait sketch`: what a model costs, unit by unit, without running it."""

import argparse
import json

from plait.config.errors import PlaitError, too_small
from plait.config.job import load_job
from plait.config.plan import Plan
from plait.model.fake_model import sketched
from plait.model.table import outline, table


def run(options: argparse.Namespace) -> int:
    """Print the costs; and, with a plan, the memory of its ranks."""
    if options.batch < 1:
        raise PlaitError(too_small("--batch", options.batch))
    plan = Plan.read(options.plan).fill(None) if options.plan else None
    job = load_job(options.job, options.arguments)
    found = sketched(job)
    outlined = outline(found[1], options.batch)
    facts, text = outlined.to_dict(), table(outlined, options.job)
    if plan is not None:
        from plait.planner.dryrun.memory_table import memory_table

        memory = memory_table(job, plan)
        facts, text = facts | {"memory": memory.to_dict()}, f"{text}\n\n{memory}"
    print(json.dumps(facts) if options.json else text)
    return 0
