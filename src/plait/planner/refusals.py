"""Validate a plan before a run starts: rejections of the plan itself, and one analysis of the model in a separate process.

The analysis finds whether the model can be split into stages, where its sequence dimension is, whether its units can run on sequence
shards, and how its experts are sharded. Invalid plans are rejected before ranks or a run directory exist. Ranks forked on this machine reuse
the sketch. On a GPU each rank makes its own, because an operator may have another kernel there.
"""

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.reachable_objects import check_unshared
from plait.engine.build import check_plan, sketch_without_ranks
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import CPU
from plait.model.fake_model import sketch_of as sketch_of_job
from plait.model.sketch import Sketch
from plait.parallel import mutations
from plait.parallel.context.strategy import localize_for_rank
from plait.parallel.pipeline.partition import StageLayout, check_partition
from plait.planner.dryrun.dry_run import sketch_weights


def validate_plan(job: Job, plan: Plan, device: str) -> Sketch | None:
    """Raise the problems of a plan, and those of the model that can be found without ranks.

    Returns the sketch for the ranks (`engine/build.py`); None if each rank makes its own.
    """
    check_plan(job, plan, device)
    check_unshared(job)
    if max(plan.pp, plan.cp, plan.ep, plan.tp) == 1 and plan.activation_checkpointing == "none":
        return None
    try:
        return fork.run_forked(lambda place: _sketch_as_rank(job, plan, device, place))
    except PlaitError as error:
        if all(code[0] == "P" for code in error.codes):  # ranks report all other errors with their location
            raise
        return None


def _sketch_as_rank(job: Job, plan: Plan, device: str, place: Place) -> Sketch | None:
    """Make the sketch as every rank would before it builds its part of the model."""
    place.beat(-1, "build")
    on_cpu = device == "cpu"
    if not on_cpu and max(plan.pp, plan.cp, plan.ep) == 1:  # with tp, the ranks find out
        if problem := mutations.find_unmeasured(plan, sketch_of_job(job)):
            raise PlaitError(problem)
        return None
    sketch = sketch_without_ranks(job, plan, CPU) if on_cpu else sketch_weights(job, plan)[0]
    if plan.pp > 1:
        layout = StageLayout.from_plan(plan, localize_for_rank(plan, sketch, 0), job.stages)
        check_partition(sketch, layout.partition, plan.stages_per_rank > 1, plan.waits_in_forward)
    return sketch if on_cpu else None
