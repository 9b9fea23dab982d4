"""Pipeline parallelism (pp): each rank has some of the model's units, and micro-batches flow through them.

What it does
    The sequence of unit calls is split into stages, with balanced times and few bytes between them. Every stage runs
    the model's own forward. In it, units of other stages return the received activation or a placeholder
    (`parallel/pipeline/stage.py`). So the model is not rewritten or traced, and need not be a chain of modules. A table
    gives the order in which a rank runs the forwards and backwards of its micro-batches
    (`parallel/pipeline/schedules.py`). Activations are sent to the next stage, and their gradients back.

Picture
    1f1b     rank 0   F0 F1 F2 B0 F3 B1    B2    B3
             rank 1      F0 F1 . B0 F2 B1 F3 B2 B3

Costs
    Time: ranks wait while the pipeline fills and drains. This *bubble* is (p − 1) / (m + p − 1) of the step for p
    stages and m micro-batches; `interleaved` and zero-bubble schedules wait less. Memory: parameters, gradients and
    optimizer state of a rank's stages only, and activations of the micro-batches in the pipeline. Traffic: the
    activations between stages, which is the least of all ways to split.

Choose when
    The model does not fit on one node's devices, or the links between nodes are slow.

Avoid when
    The step has few micro-batches, so the bubble costs more than the split gains. Or the model has few unit calls, so
    no split is balanced.

How it stays exact
    The loss of a micro-batch counts with its weight over that of the global batch, and gradients are accumulated in
    place. Some parameters belong to several stages (tied ones, or those that code between units uses). Each of these
    stages has the parameter, and its gradients are summed over them. Random numbers are keyed by place and sample,
    which are the same in every stage. The norm that clips is that of all stages.

Paper
    Huang et al. 2019, GPipe (NeurIPS); Narayanan et al. 2019, PipeDream (SOSP); 2021, Megatron-LM (SC), interleaved; Qi
    et al. 2023, Zero Bubble Pipeline Parallelism.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.keys import SPLIT_SCHEDULES
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.context import strategy as context
from plait.parallel.pipeline.partition import ForwardPaths, StageLayout, check_partition, make_plan_table
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.pipeline.schedules import find_schedule_errors
from plait.parallel.pipeline.stage import PipelineStages
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import Reduce, ShardPlan, Specs
from plait.randomness.keyed import RepeatableForward
from plait.tensors.torch_private import recompute_once

AXIS = "pp"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.pp > 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares > batch:
        why = f"{batch} samples are too few for {plan.shares} pipelines of pp={plan.pp} stages"
        yield Problem(
            "P012",
            f"global batch {batch} is smaller than the number of pipelines ({plan.shares})",
            why=why,
            fix=(f"--batch {plan.shares}",),
        )
    for what in find_schedule_errors(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_rank):
        yield Problem("P028", what, fix=("schedule=1f1b stages_per_rank=1", "schedule=interleaved stages_per_rank=2"))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Place parameters on the stages of their units. A parameter of several stages is on all of them, and its gradients
    are summed."""
    plan, found = table.plan, Specs()
    layout = StageLayout.from_plan(plan, context.localize_for_rank(plan, sketch, 0), job.stages)
    for name, spec in table.specs.items():
        homes = layout.param_ranks[name]
        tied = Reduce(("pp",), "sum", "several stages use it, and each has a part of its gradient", (homes,))
        spec = replace(spec, placement=(*spec.placement, ("pp", homes)))
        found[name] = spec.with_reductions(tied) if len(homes) > 1 else spec
    units = [layout.list_units(index) for index in range(plan.pp)]
    homes = {unit.name: ("pp", tuple(i for i in range(plan.pp) if unit.name in units[i])) for unit in sketch.units}
    return replace(table, specs=found, placements=table.placements | homes)


def apply(split: SplitModel) -> SplitModel:
    plan, sketch = split.plan, context.localize_for_rank(split.plan, split.sketch, split.mesh.rank)
    layout = StageLayout.from_plan(plan, sketch, split.job.stages)
    check_partition(sketch, layout.partition, plan.stages_per_rank > 1, plan.waits_in_forward)
    index, homes = split.mesh.coordinates["pp"], layout.param_ranks
    if plan.schedule in SPLIT_SCHEDULES:
        recompute_once()
    paths = ForwardPaths(split.module, sketch, layout.partition, split.setup.call, lambda n: split.setup.make_samples(n)[0], split.device)
    paths.seed, paths.is_fixed = split.job.seed, context.is_enabled(plan)
    if paths.is_fixed and paths.is_random:
        why = "its forward pass chooses units at random, and under cp only the sketch's path is supported"
        raise PlaitError(Problem("P024", "the model cannot be split into stages", why=why, fix=("cp=1", "pp=1")))
    stages = PipelineStages(split.module, paths, split.device)
    stages.global_sketch = split.sketch
    stages.drop_parameters({n for n, ranks in homes.items() if index not in ranks})
    pipe = PipelineRuntime(stages, split.mesh.group("pp"), lru_cache(partial(make_plan_table, plan)))
    pipe.randomness, pipe.peers = split.randomness, split.batch_peers

    def install_stages(_: object) -> None:
        stages.report_skip = _make_skip_reporter(split, sketch)
        stages.install_units()

    split.hooks.optimizer_created.append(install_stages)
    here = {n: p for n, p in split.params.items() if index in homes[n]}
    return replace(split, params=here, sketch=layout.make_local_sketch(index)).with_techniques(pipeline=pipe)


def _make_skip_reporter(split: SplitModel, sketch: Sketch) -> Callable[[str], None]:
    """Return a function that counts the calls of modules inside a unit that another stage runs, for keyed random
    numbers."""
    times = Counter(call.unit for call in sketch.calls)
    most: dict[str, int] = {}
    for place in sketch.places:
        module, number, _ = place.split("#")
        most[module] = max(most.get(module, 0), int(number or 0))
    again = {
        u for u in times if isinstance(vars(split.module.get_submodule(u)).get("forward"), RepeatableForward)
    }  # counts its own calls
    inside = {
        u: {m: n // times[u] for m, n in most.items() if m.startswith(u + ".") or (m == u and u in again)}
        for u in times
        if times[u] > 1
    }

    def count_skipped(unit: str) -> None:
        split.randomness.count_calls(inside.get(unit, {}))

    return count_skipped
