"""Which rank of a pipeline has which stages, units and parameters: pure arithmetic on a sketch and a plan."""

from dataclasses import dataclass, replace

from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.pipeline.partition import StagePartition, cut, homes
from plait.parallel.pipeline.schedule_search import table
from plait.parallel.pipeline.schedules import Table


@dataclass(frozen=True)
class StageLayout:
    """How a model lies on the ranks of a pipeline. Ranks here are indices on the axis `pp`."""

    sketch: Sketch
    """Of the whole model."""
    cut: StagePartition
    owner: tuple[int, ...]
    """The rank of each stage."""
    homes: dict[str, tuple[int, ...]]
    """The ranks that hold each parameter."""

    @staticmethod
    def of(plan: Plan, sketch: Sketch, first: tuple[str, ...] | None = None) -> "StageLayout":
        """By the plan; `first`: the first unit of each stage but stage 0, when the user chose. P023 as `cut` has it."""
        made = cut(sketch, plan.pp * plan.stages_per_rank, first)
        owner = table_of(plan, plan.microbatches).owner
        return StageLayout(sketch, made, owner, _homes(sketch, made, owner, plan.pp))

    @property
    def handed_on(self) -> set[str]:
        """Units whose output goes to another stage."""
        return {self.sketch.calls[call].unit for calls in self.cut.crossing for call in calls}

    def stages(self, index: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, rank in enumerate(self.owner) if rank == index]

    def units(self, index: int) -> set[str]:
        """Names of the units of a rank."""
        return {unit for stage in self.stages(index) for unit in self.cut.units(self.sketch, stage)}

    def part(self, index: int) -> Sketch:
        """The sketch of a rank's stages. Of what its calls need, what comes from another stage is left out."""
        sketch, units = self.sketch, self.units(index)
        names = {n for n, ranks in self.homes.items() if index in ranks}
        stage, mine = self.cut.owner, [i for i, c in enumerate(self.sketch.calls) if c.unit in units]
        number = {i: k for k, i in enumerate(mine)}
        out = {i for j, c in enumerate(sketch.calls) for i in c.needs if stage[i] != stage[j]} | set(sketch.needs)
        near = lambda i: tuple(number[j] for j in sketch.calls[i].needs if j in number and stage[j] == stage[i])  # noqa: E731
        inside = lambda module: any(f"{module}.".startswith(f"{u}.") for u in units)  # noqa: E731
        return replace(
            sketch,
            parameters=tuple(row for row in sketch.parameters if row[0] in names),
            frozen=tuple(row for row in sketch.frozen if row[0] in names),
            batch_norms=tuple(n for n in sketch.batch_norms if inside(n)),
            units=tuple(u for u in sketch.units if u.name in units),
            calls=tuple(replace(sketch.calls[i], needs=near(i)) for i in mine),
            needs=tuple(number[i] for i in mine if i in out),
            rest=tuple(n for n in sketch.rest if n in names),
        )


def table_of(plan: Plan, microbatches: int) -> Table:
    """The order of a pipeline's forwards and backwards, for so many micro-batches."""
    return table(plan.schedule, plan.pp, microbatches, plan.stages_per_rank)


def _homes(sketch: Sketch, made: StagePartition, owner: tuple[int, ...], ranks: int) -> dict[str, tuple[int, ...]]:
    """The ranks of a pipeline that hold each parameter: those with a unit that has it; all, when code between units may."""
    found: dict[str, set[int]] = {name: set() for name, _, _ in (*sketch.parameters, *sketch.frozen)}
    stages = homes(sketch, made)
    for unit in sketch.units:
        for name in unit.parameters:
            found[name] |= {owner[stage] for stage in stages[unit.name]} if unit.closed else set(range(ranks))
    return {name: tuple(sorted(r or range(ranks))) for name, r in found.items()}
