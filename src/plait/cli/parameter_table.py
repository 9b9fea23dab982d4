"""What `plait plan --show parameters` prints: which rank has what of each parameter, and how its gradient is summed and why.

Parameters of the same form in sister blocks that a plan treats alike are one line with a count. The table is that of a run
(`parallel/spec.py`); no process is started for it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import prod

from plait.config.command_options import PlanOptions
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.data.loaders import with_batch
from plait.engine.build import check_plan
from plait.model.table import aligned, form_of, label, short, size
from plait.parallel.mesh import Mesh
from plait.parallel.order import shard_plan
from plait.parallel.spec import At, ParamSpec, Reduce, ShardPlan, sizes
from plait.planner.dryrun.dry_run import known


@dataclass(frozen=True)
class ParameterRow:
    """Parameters of one form. Shapes in the order of the dims; sums in the order in which they are made."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    on_ranks: tuple[tuple[int, ...], ...]
    """The shapes that ranks with some of it have between steps, each once, the largest first."""
    ranks: int
    """That have some of it."""
    split: tuple[str, ...]
    """The axes that split it, and those on which only some coordinates have it."""
    gradient: tuple[str, ...]
    updated_by: tuple[str, ...]
    """Who updates the whole tensor, where the optimizer looks at whole tensors."""


@dataclass(frozen=True)
class ParametersShown:
    """The table of a plan. `fullest` and `emptiest`: bytes of parameters on the rank that has most, and least, between steps."""

    plan: str
    rows: tuple[ParameterRow, ...]
    why: dict[str, str]
    """Of each kind of sum."""
    parameters: int
    fullest: int
    emptiest: int


def run(options: PlanOptions) -> int:
    """`plait plan JOB --plan P --show parameters`."""
    plan = Plan.read(options.plan or "dp=1").fill(None)
    found = shown(with_batch(load_job(options.job, options.arguments), options.batch), plan)
    print(json.dumps(asdict(found)) if options.json else text(found, options.job))
    return 0


def shown(job: Job, plan: Plan) -> ParametersShown:
    """The table of a job under a plan, of processes on CPUs."""
    check_plan(job, plan)
    table = shard_plan(job, plan, known(job, plan)[0])
    specs = [spec for spec in table.specs.values() if not spec.buffer]
    alike: dict[ParameterRow, list[str]] = {}
    everywhere = Mesh(plan, 0).places
    for spec in specs:
        alike.setdefault(_row(spec, table, everywhere), []).append(spec.name)
    rows = tuple(replace(row, name=label(names), count=len(names)) for row, names in alike.items())
    held = [table.bytes(at) for at in everywhere]
    why = {_told(one, table): one.why for spec in specs for one in spec.grad if _told(one, table)}
    parameters = sum(prod(spec.shape) for spec in specs)
    return ParametersShown(str(plan), rows, why, parameters, max(held), min(held))


def _row(spec: ParamSpec, table: ShardPlan, everywhere: Iterable[At]) -> ParameterRow:
    """The row of a parameter, under the name of all of its form."""
    plan = table.plan
    places = [at for at in everywhere if spec.is_here(at)]
    shapes = sorted({sizes(spec.ranges(at)) for at in places}, key=prod, reverse=True)
    ways = [(f"dim {split.dim} by" if split.dim is not None else "by", _among(split.axes, table)) for split in spec.splits]
    split = [f"{how} {axes}" for how, axes in ways if axes]
    split += [f"{axis} {', '.join(map(str, homes))}" for axis, homes in spec.homes if len(homes) < table.axis_sizes[axis]]
    sums = tuple(dict.fromkeys(told for one in spec.grad if (told := _told(one, table))))
    owners = tuple(f"rank {owner} of {_among(plan.part_axes, table)}" + (f" of stage {stage}" if plan.pp > 1 else "") for stage, owner in spec.owners)
    dtype = str(spec.dtype).removeprefix("torch.")
    return ParameterRow(form_of(spec.name), 1, spec.shape, dtype, spec.trainable, tuple(shapes), len(places), tuple(split), sums, owners)


def _told(one: Reduce, table: ShardPlan) -> str:
    """A sum in words; nothing where there is one rank."""
    axes = _among(one.axes, table)
    among = f" of {' and '.join('–'.join(map(str, ranks)) for ranks in one.sets)}" if one.sets else ""
    return f"{one.op} over {axes}{among}" if axes else ""


def _among(axes: Iterable[str], table: ShardPlan) -> str:
    """Those of the axes with more than one rank, as words; nothing where there is none."""
    return " × ".join(axis for axis in axes if table.axis_sizes[axis] > 1)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def text(found: ParametersShown, job: str) -> str:
    """As a table for a terminal."""
    held = size(found.fullest) if found.fullest == found.emptiest else f"{size(found.emptiest)} to {size(found.fullest)}"
    lines = [f"job     {job}, {found.plan}: {short(found.parameters)} parameters, {held} on each rank between steps", ""]
    head: tuple[str, ...] = ("parameter", "count", "shape", "on a rank", "ranks", "split", "gradient")
    whole = any(row.updated_by for row in found.rows)
    rows = [(*head, "updated by") if whole else head]
    for row in found.rows:
        kept = ", ".join(map(_shape, row.on_ranks)) if len(row.on_ranks) < 4 else f"{_shape(row.on_ranks[0])} to {_shape(row.on_ranks[-1])}"
        gradient = ", ".join(row.gradient) or "its own" if row.trainable else "frozen"
        cells = (row.name, str(row.count), _shape(row.shape), kept, str(row.ranks), ", ".join(row.split) or "–", gradient)
        rows.append((*cells, ", ".join(row.updated_by) or "each rank") if whole else cells)
    lines += aligned(rows, right=(1, 4))
    lines += ["", *(f"{told}: {why}" for told, why in found.why.items())] if found.why else []
    return "\n".join(lines)

