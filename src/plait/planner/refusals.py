"""Before a run starts: refusals of the plan alone, and one analysis of the model, by a process that is no rank.

Whether a model can be cut into stages, where it has its sequence, whether its units may run on a stretch of it, how its experts are
shared out: what cannot work is said before there are ranks or a run directory. Ranks that are forked
on this machine get the sketch. On a GPU each rank makes its own, since an operator may be another kernel there.
"""

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.reachable import check_unshared
from plait.engine.build import check_plan, sketch_without_ranks
from plait.launch import fork
from plait.launch.place import Place
from plait.model.fake_model import sketch_of as sketch_of_job
from plait.model.make import CPU
from plait.model.sketch import Sketch
from plait.parallel import mutations
from plait.parallel.context.strategy import sketch_of
from plait.parallel.pipeline.partition import StageLayout, check
from plait.planner.dryrun.dry_run import known


def foresee(job: Job, plan: Plan, device: str) -> Sketch | None:
    """Raise what the plan, and as far as it can be known without ranks the model, is refused for.

    Returns the sketch for the ranks (`engine/build.py`); None if each makes its own.
    """
    check_plan(job, plan, device)
    check_unshared(job)
    if max(plan.pp, plan.cp, plan.ep, plan.tp) == 1 and plan.activation_checkpointing == "none":
        return None
    try:
        return fork.computed(lambda place: _analysed(job, plan, device, place))
    except PlaitError as error:
        if all(code[0] == "P" for code in error.codes):  # whatever else is wrong, ranks say where
            raise
        return None


def _analysed(job: Job, plan: Plan, device: str, place: Place) -> Sketch | None:
    """The sketch, made as every rank would make it before it builds its part."""
    place.beat(-1, "build")
    on_cpu = device == "cpu"
    if not on_cpu and max(plan.pp, plan.cp, plan.ep) == 1:  # where tp shards layers the ranks find out
        if problem := mutations.refused_unmeasured(plan, sketch_of_job(job)):
            raise PlaitError(problem)
        return None
    sketch = sketch_without_ranks(job, plan, CPU) if on_cpu else known(job, plan)[0]
    if plan.pp > 1:
        layout = StageLayout.of(plan, sketch_of(plan, sketch, 0), job.stages)
        check(sketch, layout.cut, plan.stages_per_rank > 1, plan.waits_in_forward)
    return sketch if on_cpu else None
