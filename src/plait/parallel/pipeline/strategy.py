"""Pipeline parallelism (pp): each process holds some of the model's units, micro-batches flow through them.

What it does
    The sequence of unit calls is cut into stages, for balanced time and few bytes across. Every stage runs the model's
    own forward; units of other stages give what was received, or an unknown (`parallel/pipeline/stage.py`), so no model is rewritten,
    traced or required to be a chain. A table says in which order a rank runs the forwards and backwards of its
    micro-batches (`parallel/pipeline/schedules.py`); activations travel to the next stage, their gradients back.

Picture
    1f1b     rank 0   F0 F1 F2 B0 F3 B1    B2    B3
             rank 1      F0 F1 . B0 F2 B1 F3 B2 B3

Costs
    Time: ranks wait while the pipeline fills and drains, the bubble: (p − 1) / (m + p − 1) of the step for p stages and
    m micro-batches; `interleaved` and zero-bubble schedules wait less. Memory: parameters, gradients and optimizer state
    of a stage only, activations of the micro-batches under way. Traffic: the activations between stages, the least of
    all ways to split.

Choose when
    The model does not fit on one node's devices, or the links between nodes are slow.

Avoid when
    There are few micro-batches: the bubble eats what is gained. Or few unit calls, which no cut balances.

How it stays exact
    The loss of a micro-batch enters with its weight over the global batch's, gradients add up in place. A parameter that
    several stages use (tied, or used by the code between units) lives on each of them, and its gradients are summed over
    those. Random numbers are keyed by place and sample, which a cut does not change. The norm that clips is that of all
    stages.

Paper
    Huang et al. 2019, GPipe (NeurIPS); Narayanan et al. 2019, PipeDream (SOSP); 2021, Megatron-LM (SC), interleaved;
    Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.keys import SPLIT
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.context import strategy as context
from plait.parallel.pipeline.partition import ForwardPaths, StageLayout, check, table_of
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.pipeline.schedules import problems
from plait.parallel.pipeline.stage import PipelineStages
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import Reduce, ShardPlan, Specs
from plait.randomness.keyed import RepeatableForward
from plait.tensors.torch_private import recompute_once

AXIS = "pp"
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.pp > 1


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares > batch:
        why = f"{batch} samples for {plan.shares} pipelines of pp={plan.pp} stages"
        yield Problem(
            "P012",
            f"global batch {batch} does not split over {plan.shares} pipelines",
            why=why,
            fix=(f"--batch {plan.shares}",),
        )
    for what in problems(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_rank):
        yield Problem("P028", what, fix=("schedule=1f1b stages_per_rank=1", "schedule=interleaved stages_per_rank=2"))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Each stage has the parameters of its units. What several stages use, they all have, and each has a share of its gradient."""
    plan, found = table.plan, Specs()
    layout = StageLayout.of(plan, context.sketch_of(plan, sketch, 0), job.stages)
    for name, spec in table.specs.items():
        homes = layout.homes[name]
        tied = Reduce(("pp",), "sum", "several stages use it, and each has its share", (homes,))
        spec = replace(spec, homes=(*spec.homes, ("pp", homes)))
        found[name] = spec.reduced(tied) if len(homes) > 1 else spec
    units = [layout.units(index) for index in range(plan.pp)]
    homes = {unit.name: ("pp", tuple(i for i in range(plan.pp) if unit.name in units[i])) for unit in sketch.units}
    return replace(table, specs=found, homes=table.homes | homes)


def apply(split: SplitModel) -> SplitModel:
    plan, sketch = split.plan, context.sketch_of(split.plan, split.sketch, split.mesh.rank)
    layout = StageLayout.of(plan, sketch, split.job.stages)
    check(sketch, layout.cut, plan.stages_per_rank > 1, plan.waits_in_forward)
    index, homes = split.mesh.at["pp"], layout.homes
    if plan.schedule in SPLIT:
        recompute_once()
    paths = ForwardPaths(split.module, sketch, layout.cut, split.setup.call, lambda n: split.setup.samples(n)[0], split.device)
    paths.seed, paths.fixed = split.job.seed, context.wanted(plan)
    if paths.fixed and paths.random:
        why = "its forward pass decides by random numbers what to run, and of a sequence that ranks hold in stretches (cp) no other course is found"
        raise PlaitError(Problem("P024", "the model cannot be cut into stages", why=why, fix=("cp=1", "pp=1")))
    stages = PipelineStages(split.module, paths, split.device)
    stages.whole = split.sketch
    stages.drop({n for n, ranks in homes.items() if index not in ranks})
    pipe = PipelineRuntime(stages, split.mesh.group("pp"), lru_cache(partial(table_of, plan)))
    pipe.randomness, pipe.peers = split.randomness, split.batch_peers

    def finish(_: object) -> None:
        stages.skip = _passed(split, sketch)
        stages.install()

    split.hooks.optimizer_created.append(finish)
    here = {n: p for n, p in split.params.items() if index in homes[n]}
    return replace(split, params=here, sketch=layout.part(index)).using(pipeline=pipe)


def _passed(split: SplitModel, sketch: Sketch) -> Callable[[str], None]:
    """Tells the random numbers how often modules inside a unit of another stage were called by one call of it."""
    times = Counter(call.unit for call in sketch.calls)
    most: dict[str, int] = {}
    for place in sketch.places:
        module, number, _ = place.split("#")
        most[module] = max(most.get(module, 0), int(number or 0))
    again = {
        u for u in times if isinstance(vars(split.module.get_submodule(u)).get("forward"), RepeatableForward)
    }  # notes itself inside
    inside = {
        u: {m: n // times[u] for m, n in most.items() if m.startswith(u + ".") or (m == u and u in again)}
        for u in times
        if times[u] > 1
    }

    def passed(unit: str) -> None:
        split.randomness.passed(inside.get(unit, {}))

    return passed
