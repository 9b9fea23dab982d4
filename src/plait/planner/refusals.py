"""Refusals before a run starts: those of the plan alone, and those that take a look at the model.

Whether a model can be cut into stages, where it has its sequence and whether its units may run on a stretch of it, how its
experts are shared out: every rank finds this out for itself, and all refuse alike. Here one forked process does so first and
does nothing else, so that what cannot work is said before there are ranks or a run directory.
"""

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.reachable import check_unshared
from plait.engine.build import check_plan
from plait.launch import fork
from plait.launch.place import Place
from plait.model.fake_model import sketch_of as sketch_of_job
from plait.parallel import unmeasured
from plait.parallel.context.strategy import sketch_of
from plait.parallel.pipeline.partition import StageLayout, check
from plait.planner.dryrun.dry_run import known


def foresee(job: Job, plan: Plan, device: str) -> None:
    """Raise what the plan, and as far as it can be told without ranks the model, is refused for."""
    check_plan(job, plan, device)
    check_unshared(job)
    if max(plan.pp, plan.cp, plan.ep, plan.tp) == 1 and plan.recompute == "none":
        return
    try:
        fork.run(lambda place: _look(job, plan, place), 1)
    except PlaitError as error:
        if all(code[0] == "P" for code in error.codes):  # whatever else is wrong, ranks say where
            raise


def _look(job: Job, plan: Plan, place: Place) -> None:
    """What every rank does before it builds its part. A model that is too large to be looked at here is left to the ranks."""
    place.beat(-1, "build")
    if max(plan.pp, plan.cp, plan.ep) == 1:  # where tp shards layers the ranks find out
        if problem := unmeasured.refused(plan, sketch_of_job(job)):
            raise PlaitError(problem)
        return
    sketch, _ = known(job, plan)
    if plan.pp > 1:
        layout = StageLayout.of(plan, sketch_of(plan, sketch, 0), job.stages)
        check(sketch, layout.cut, plan.stages_per_rank > 1, plan.waits_in_forward)
