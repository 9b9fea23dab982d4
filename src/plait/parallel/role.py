"""One rank of a plan, without a process: which stages it has, which of the model's units, and how many samples.

Pure arithmetic on a sketch and a plan. The strategies wire a rank by it, and price one that does not run.
"""

from dataclasses import dataclass, replace

from plait.config.plan import Plan
from plait.data.batch import Share
from plait.model.sketch import Sketch
from plait.parallel.pipeline.partition import Course, Cut, cut, homes
from plait.parallel.pipeline.schedules import table
from plait.parallel.pipeline.table import Table
from plait.tensors.output_form import Slot


@dataclass(frozen=True)
class Layout:
    """How a model lies on the ranks of a pipeline. Ranks here are indices on the axis `pp`."""

    sketch: Sketch
    """Of the whole model."""
    cut: Cut
    owner: tuple[int, ...]
    """The rank of each stage."""
    homes: dict[str, tuple[int, ...]]
    """The ranks that hold each parameter."""

    @staticmethod
    def of(plan: Plan, sketch: Sketch, first: tuple[str, ...] | None = None) -> "Layout":
        """By the plan; `first`: the first unit of each stage but stage 0, when the user chose. P023 as `cut` has it."""
        made = cut(sketch, plan.pp * plan.stages_per_rank, first)
        owner = table_of(plan, plan.microbatches).owner
        return Layout(sketch, made, owner, _homes(sketch, made, owner, plan.pp))

    def stages(self, index: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, rank in enumerate(self.owner) if rank == index]

    def units(self, index: int) -> set[str]:
        """Names of the units of a rank."""
        return {unit for stage in self.stages(index) for unit in self.cut.units(self.sketch, stage)}

    def shared(self, index: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a rank that others hold too, and who does, in the order of their names."""
        return {n: ranks for n, ranks in sorted(self.homes.items()) if index in ranks and len(ranks) > 1}

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


@dataclass(frozen=True)
class Role:
    """Which rank of a plan is priced, and what a step gives it to do. By default any of a plan whose ranks are alike."""

    rank: int = 0
    samples: tuple[int, ...] = (1,)
    """Of each micro-batch that it runs in the step."""
    weighted: bool = False
    """The job has a `weight`, so the weight of the global batch must be asked for."""
    layout: Layout | None = None
    """How the model lies on the ranks of the pipeline; None: every rank has all of it."""
    idle: frozenset[str] = frozenset()
    """Units that no gradient comes to (one ends before them). The sketch cannot tell: seen in a run, else unknown."""
    courses: tuple[Course, ...] = ()
    """Of each micro-batch, when they were seen in a run: not all need be the sketch's."""
    direct: bool = True
    """Parts are exchanged by sends and receives, as on CPU processes (`scattering.directly`)."""

    @staticmethod
    def of(plan: Plan, batch: int, rank: int = 0, weighted: bool = False, layout: Layout | None = None) -> "Role":
        """A rank's role in a step of a whole batch, in which every micro-batch counts."""
        parts = Share(plan.share(rank), plan.ranks, plan.microbatches).parts(batch)
        return Role(rank, tuple(n for _, n in parts if n), weighted, layout)

    def index(self, plan: Plan) -> int:
        """Its place on the axis `pp`."""
        return plan.at(self.rank)["pp"]

    def crossing(self, stage: int) -> list[tuple[list[Slot], int]]:
        """For each micro-batch the tensors that cross into a stage, and the number of samples."""
        assert self.layout is not None  # a rank without stages is never asked
        usual = (Course(self.layout.sketch.calls, self.layout.cut),) * len(self.samples)
        return [(course.slots(stage), n) for course, n in zip(self.courses or usual, self.samples)]

    def row(self, plan: Plan) -> list[tuple[str, int]]:
        """(kind, stage) of what its row of the pipeline's table has it do, in order."""
        actions = table_of(plan, len(self.samples)).rows[self.index(plan)] if self.samples else ()
        return [(action.kind, action.stage) for action in actions]


def table_of(plan: Plan, microbatches: int) -> Table:
    """The order of a pipeline's forwards and backwards, for so many micro-batches."""
    return table(plan.schedule, plan.pp, microbatches, plan.stages_per_rank)


def _homes(sketch: Sketch, made: Cut, owner: tuple[int, ...], ranks: int) -> dict[str, tuple[int, ...]]:
    """The ranks of a pipeline that hold each parameter: those with a unit that has it; all, when code between units may."""
    found: dict[str, set[int]] = {name: set() for name, _, _ in (*sketch.parameters, *sketch.frozen)}
    stages = homes(sketch, made)
    for unit in sketch.units:
        for name in unit.parameters:
            found[name] |= {owner[stage] for stage in stages[unit.name]} if unit.closed else set(range(ranks))
    return {name: tuple(sorted(r or range(ranks))) for name, r in found.items()}
