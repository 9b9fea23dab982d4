"""The tables of `plait plan --show tensor`, `--show parameters` and `--dry-run`.

[Note: Tensor]
Output of `plait plan --show tensor`: the layers that `tp` shards, how it shards them, and why others stay unsharded.

Equal layers of equal blocks are one line with a count. The layers are found as for a run, in one process, for a model of any size: see
`parallel/tensor/find/finder.py`.

[Note: Parameters]
Output of `plait plan --show parameters`: the ranks that have each parameter or a shard of it, and how and why its gradient is reduced.

Equal parameters of equal blocks are one line with a count. The table is that of a run (`parallel/spec.py`), and no process is started.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any

from torch import nn

from plait.cli.result import print_result
from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.data import batch as data
from plait.data import sampling
from plait.data.loaders import override_batch
from plait.engine.build import check_plan
from plait.model.build_model import run_model
from plait.model.fake_model import sketch_fake_model
from plait.model.sketch_table import align_rows, format_count, format_size, format_span, generalize_name, label_names
from plait.model.slices import ColumnRowPair, ParameterSlice, ScaledAttribute, Slices
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.spec import Coordinates, ParamSpec, Reduce, ShardPlan, compute_shape
from plait.parallel.tensor import choose_slices, wiring
from plait.planner.dryrun.dry_run import DryRun, dry_run, sketch_weights
from plait.tensors.rows import Rows
from plait.tensors.torch_private import own_parameters

MAX_KINDS = 12
"""Maximum number of distinct ranks in the table of a dry run, fullest first."""


@dataclass(frozen=True)
class PairRow:
    """Column-parallel layers and their row-parallel layer, in all equal blocks. Names other than `block` are relative to it."""

    block: str
    kind: str
    """The class of the module whose call contains these layers."""
    count: int
    columns: tuple[str, ...]
    row: str
    how: tuple[str, ...]
    changed: tuple[str, ...]
    """Integer attributes of the code, and their value under the plan."""
    summed: tuple[str, ...]
    """Unsharded parameters with a partial gradient on each rank."""
    parameters: int
    """Number of sharded parameters in all these blocks."""


@dataclass(frozen=True)
class VocabularyTable:
    """An embedding or a head whose vocabulary rows are sharded."""

    name: str
    rows: tuple[int, ...]
    """Rows of each rank."""
    parameters: int


@dataclass(frozen=True)
class UnshardedLayers:
    """Layers that stay unsharded for one reason."""

    name: str
    count: int
    share: float
    """Fraction of all weights."""
    reason: str


@dataclass(frozen=True)
class TensorTable:
    """The complete table. `held` is the number of parameters on the fullest rank."""

    tp: int
    parameters: int
    held: int
    pairs: tuple[PairRow, ...]
    vocabulary: tuple[VocabularyTable, ...]
    whole: tuple[UnshardedLayers, ...]
    small: float
    """Fraction of weights in unsharded parameters that are no matrices: norms, biases."""
    stretched: tuple[str, ...] = ()
    """Units that run on sequence shards between their slices."""
    unstretched: tuple[UnshardedLayers, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def print_tensor(options: PlanOptions) -> int:
    """Run `plait plan JOB --plan P --show tensor`."""
    plan = Plan.read(options.plan or "dp=1").fill(None)
    if plan.tp == 1:
        what = "--show tensor needs a plan with tp > 1"
        raise PlaitError(Problem("U002", what, why=f"the plan is {plan}: tp=1", fix=('--plan "tp=2"',)))
    found = build_tensor_table(override_batch(load_job(options.job, options.arguments), options.batch), plan)
    print_result(options, found.to_dict(), format_tensor_table(found, options.job))
    return 0


def build_tensor_table(job: Job, plan: Plan) -> TensorTable:
    """Build the table of tp shards of a job's model, without training and without processes."""
    check_plan(job, plan)
    model, sketch = sketch_fake_model(job)
    example = sampling.open_sketch_data(job, sampling.open_job_data(job))
    inputs = lambda n: data.make_sketch_batch(example, n)[0]  # noqa: E731
    handed_on = StageLayout.from_plan(plan, sketch, job.stages).crossing_units if plan.pp > 1 else frozenset()
    found = choose_slices.find_plan_slices(sketch, model, inputs, run_model, job, plan, handed_on=handed_on)
    return build_slice_table(model, found, plan.tp)


def build_slice_table(model: nn.Module, found: Slices, ranks: int) -> TensorTable:
    """Summarize the slices of a model."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    cuts = {cut.parameter: cut for cut in wiring.list_parameter_slices(model, found, ranks)}
    total = sum(sizes.values())
    parts = [{n: prod(cut.shape(shapes[n], rank)) for n, cut in cuts.items()} for rank in range(ranks)]
    held = max(sum((sizes | own).values()) for own in parts)
    names = {id(p): n for n, p in model.named_parameters()}
    tables = []
    for name in found.vocabulary:
        module = model.get_submodule(name)
        own = [names[id(p)] for p in module.parameters(recurse=False)]
        tables.append(VocabularyTable(name, Rows(cuts[own[0]].ranges).sizes, sum(sizes[n] for n in own)))
    small = total - sum(sizes[n] for n in cuts) - round(sum(share for _, share, _ in found.unsliced) * total)
    pairs, rows = _group_pairs(model, found.groups, sizes), [(unit, 0.0, why) for unit, why in found.full_sequence_units]
    on = tuple(label_names(list(names)) for _, names in groupby((s.unit for s in found.sequence_units), generalize_name))
    return TensorTable(ranks, total, held, pairs, tuple(tables), _group_unsharded(found.unsliced), max(0, small) / total, on, _group_unsharded(rows))


def _group_pairs(model: nn.Module, groups: Iterable[ColumnRowPair], sizes: dict[str, int]) -> tuple[PairRow, ...]:
    alike: dict[PairRow, list[PairRow]] = {}
    for group in groups:
        pair = _build_pair(model, group, sizes)
        alike.setdefault(replace(pair, block=generalize_name(pair.block)), []).append(pair)
    return tuple(
        replace(form, block=label_names([p.block for p in same]), count=len(same), parameters=form.parameters * len(same))
        for form, same in alike.items()
    )


def _build_pair(model: nn.Module, group: ColumnRowPair, sizes: dict[str, int]) -> PairRow:
    inner = partial(_strip_container, group.container)
    row = model.get_submodule(group.row)
    bias = [f"{group.row}.bias"] if own_parameters(row).get("bias") is not None else []
    return PairRow(
        group.container,
        type(model.get_submodule(group.container)).__name__,
        1,
        tuple(inner(c) for c in group.columns),
        inner(group.row),
        _describe_columns(group, inner),
        tuple(_describe_change(model, i, inner) for i in group.scaled_attributes if not _is_layer_size(model, group, i)),
        tuple(inner(n) for n in (*group.partial_gradients, *bias)),
        sum(sizes[c.parameter] for c in group.tp_shards),
    )


def _is_layer_size(model: nn.Module, group: ColumnRowPair, integer: ScaledAttribute) -> bool:
    """Return True if the attribute is the size of a sharded layer, which the table already shows."""
    layer = integer.module in (*group.columns, group.row)
    return layer and not isinstance(model.get_submodule(integer.module), nn.MultiheadAttention)


def _strip_container(container: str, name: str) -> str:
    """Return the name of a module or parameter inside its container."""
    if name == container:
        return "itself"
    return name.removeprefix(f"{container}.") if container else name


def _describe_columns(group: ColumnRowPair, inner: Callable[[str], str]) -> tuple[str, ...]:
    """Describe how columns are sharded, with one text for equal shardings."""
    ways: dict[str, list[str]] = {}
    for name in group.columns:
        cut = max(
            (c for c in group.tp_shards if c.parameter.startswith(f"{name}.")), key=lambda c: len(c.ranges[0]), default=None
        )
        if cut is not None:
            ways.setdefault(describe_slice(cut), []).append(inner(name))
    parts = [f"{', '.join(names)} {said}" if len(ways) > 1 else said for said, names in ways.items()]
    parts += ["sizes in the code adapted"] if group.resize else []
    entering = [str(a.key) for a in group.arguments]
    return (*parts, *([f"argument {', '.join(entering)} sharded or reduced too"] if entering else []))


def describe_slice(cut: ParameterSlice) -> str:
    """Describe how one parameter is sharded.

    >>> describe_slice(ParameterSlice("w", 0, (((0, 4),), ((4, 4),))))
    'contiguous'
    >>> describe_slice(ParameterSlice("w", 0, (((0, 2), (4, 2)), ((2, 2), (6, 2)))))
    'inside 2 parts'
    """
    sharers = max(Counter(cut.ranges).values())
    parts = max(len(ranges) for ranges in cut.ranges)
    said = "contiguous" if parts == 1 else f"inside {parts} parts"
    return said if sharers == 1 else f"{said}, heads shared by {sharers} ranks"


def _describe_change(model: nn.Module, integer: ScaledAttribute, inner: Callable[[str], str]) -> str:
    value = attrgetter(integer.path)(model.get_submodule(integer.module))
    owner = inner(integer.module)
    return f"{'' if owner == 'itself' else owner + '.'}{integer.path} {value} → {value // integer.divisor}"


def _group_unsharded(layers: Iterable[tuple[str, float, str]]) -> tuple[UnshardedLayers, ...]:
    """Build one row for equal layers (name, fraction, reason) that stay unsharded for equal reasons."""
    alike: dict[tuple[str, str], list[tuple[str, float, str]]] = {}
    for name, share, reason in layers:
        alike.setdefault((generalize_name(name.rpartition(".")[0]), generalize_name(reason)), []).append((name, share, reason))
    rows = []
    for (_, form), members in alike.items():
        names, shares, reasons = zip(*members)
        reason = reasons[0] if len(set(reasons)) == 1 else form
        rows.append(UnshardedLayers(_join_names(list(names)), len(members), sum(shares), reason))
    return tuple(sorted(rows, key=lambda row: -row.share))


def _join_names(names: list[str]) -> str:
    """Join the names of layers in one module or in equal modules: `layers.0-3.q, k, v`."""
    if len(names) == 1:
        return names[0] or "the model"
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    inner = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if all(name.isdigit() for name in inner) and len(inner) > 1:
        inner = [format_span(sorted(map(int, inner))) or ", ".join(inner)]
    return (f"{label_names(parents)}." if parents != [""] else "") + ", ".join(inner)


def format_tensor_table(found: TensorTable, job: str) -> str:
    """Format the table for a terminal."""
    held = f"{format_count(found.held)} of {format_count(found.parameters)} parameters"
    lines = [f"job     {job}, tp={found.tp}: each rank has {held}"]
    head = ("sharded", "", "blocks", "columns → row", "parameters", "how", "changed in the code", "gradients reduced")
    rows: list[tuple[str, ...]] = [head]
    for p in found.pairs:
        rows.append((p.block, p.kind, str(p.count), f"{', '.join(p.columns)} → {p.row}", format_count(p.parameters), "; ".join(p.how),
                     ", ".join(p.changed) or "–", ", ".join(p.summed) or "–"))  # fmt: skip
    for t in found.vocabulary:
        each = str(t.rows[0]) if len(set(t.rows)) == 1 else f"{max(t.rows)} to {min(t.rows)}"
        rows.append((t.name, "", "1", "rows of the vocabulary", format_count(t.parameters), f"{each} rows each", "–", "–"))
    if len(rows) > 1:
        lines += ["", *align_rows(rows, right=(2, 4))]
    else:
        lines += ["", "no layer can be sharded: every rank would store and compute the full model"]
    rows = [("unsharded", "layers", "weights", "why")]
    rows += [(w.name or "the model", str(w.count), f"{w.share:.1%}", w.reason) for w in found.whole]
    if found.small:
        why = "norms, and biases of row-parallel layers: small, and complete on every rank"
        rows.append(("norms, biases", "", f"{found.small:.1%}", why))
    lines += ["", *align_rows(rows, right=(1, 2))] if len(rows) > 1 else []
    on = ", ".join(found.stretched)
    lines += ["", f"on sequence shards between slices: {on}"] if on else []
    lines += [f"on the full sequence: {w.name} ({w.count}): {w.reason}" for w in found.unstretched]
    return "\n".join(lines)


@dataclass(frozen=True)
class ParameterRow:
    """Equal parameters. Shapes are in the order of the dims, reductions in their order of execution."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    on_ranks: tuple[tuple[int, ...], ...]
    """Distinct shapes on the ranks that have a part of the parameter between steps, largest first."""
    ranks: int
    """Number of ranks that have a part."""
    split: tuple[str, ...]
    """Axes that shard the parameter, and axes on which only some coordinates have it."""
    gradient: tuple[str, ...]
    updated_by: tuple[str, ...]
    """Ranks that update the full tensor, if the optimizer needs full tensors."""


@dataclass(frozen=True)
class ParameterTable:
    """The table of a plan. `fullest` and `emptiest`: bytes of parameters between steps on the rank with most and least."""

    plan: str
    rows: tuple[ParameterRow, ...]
    why: dict[str, str]
    """The reason of each kind of reduction."""
    parameters: int
    fullest: int
    emptiest: int


def print_parameters(options: PlanOptions) -> int:
    """Run `plait plan JOB --plan P --show parameters`."""
    plan = Plan.read(options.plan or "dp=1").fill(None)
    found = build_parameter_table(override_batch(load_job(options.job, options.arguments), options.batch), plan)
    print_result(options, asdict(found), format_parameters(found, options.job))
    return 0


def build_parameter_table(job: Job, plan: Plan) -> ParameterTable:
    """Build the table of a job under a plan for CPU processes."""
    check_plan(job, plan)
    table = make_shard_plan(job, plan, sketch_weights(job, plan)[0])
    specs = [spec for spec in table.specs.values() if not spec.buffer]
    alike: dict[ParameterRow, list[str]] = {}
    everywhere = Mesh(plan, 0).all_coordinates
    for spec in specs:
        alike.setdefault(_build_row(spec, table, everywhere), []).append(spec.name)
    rows = tuple(replace(row, name=label_names(names), count=len(names)) for row, names in alike.items())
    held = [table.count_bytes(at) for at in everywhere]
    why = {_describe_reduction(one, table): one.why for spec in specs for one in spec.grad_reductions if _describe_reduction(one, table)}
    parameters = sum(prod(spec.shape) for spec in specs)
    return ParameterTable(str(plan), rows, why, parameters, max(held), min(held))


def _build_row(spec: ParamSpec, table: ShardPlan, everywhere: Iterable[Coordinates]) -> ParameterRow:
    """Build the row of a parameter, named after its form."""
    plan = table.plan
    places = [at for at in everywhere if spec.is_here(at)]
    shapes = sorted({compute_shape(spec.ranges(at)) for at in places}, key=prod, reverse=True)
    ways = [(f"dim {split.dim} by" if split.dim is not None else "by", _join_axes(split.axes, table)) for split in spec.splits]
    split = [f"{how} {axes}" for how, axes in ways if axes]
    split += [f"{axis} {', '.join(map(str, homes))}" for axis, homes in spec.placement if len(homes) < table.axis_sizes[axis]]
    sums = tuple(dict.fromkeys(told for one in spec.grad_reductions if (told := _describe_reduction(one, table))))
    owners = tuple(
        f"rank {owner} of {_join_axes(plan.part_axes, table)}" + (f" of stage {stage}" if plan.pp > 1 else "")
        for stage, owner in spec.owners
    )
    dtype = str(spec.dtype).removeprefix("torch.")
    return ParameterRow(generalize_name(spec.name), 1, spec.shape, dtype, spec.trainable, tuple(shapes), len(places), tuple(split), sums, owners)


def _describe_reduction(one: Reduce, table: ShardPlan) -> str:
    """Describe a reduction; empty for a single rank."""
    axes = _join_axes(one.axes, table)
    among = f" of {' and '.join('–'.join(map(str, ranks)) for ranks in one.sets)}" if one.sets else ""
    return f"{one.op} over {axes}{among}" if axes else ""


def _join_axes(axes: Iterable[str], table: ShardPlan) -> str:
    """Join the axes with more than one rank; empty if there are none."""
    return " × ".join(axis for axis in axes if table.axis_sizes[axis] > 1)


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def format_parameters(found: ParameterTable, job: str) -> str:
    """Format the table for a terminal."""
    held = format_size(found.fullest) if found.fullest == found.emptiest else f"{format_size(found.emptiest)} to {format_size(found.fullest)}"
    lines = [f"job     {job}, {found.plan}: {format_count(found.parameters)} parameters, {held} on each rank between steps", ""]
    head: tuple[str, ...] = ("parameter", "count", "shape", "on a rank", "ranks", "split", "gradient")
    whole = any(row.updated_by for row in found.rows)
    rows = [(*head, "updated by") if whole else head]
    for row in found.rows:
        kept = (
            ", ".join(map(_format_shape, row.on_ranks))
            if len(row.on_ranks) < 4
            else f"{_format_shape(row.on_ranks[0])} to {_format_shape(row.on_ranks[-1])}"
        )
        gradient = ", ".join(row.gradient) or "its own" if row.trainable else "frozen"
        cells = (row.name, str(row.count), _format_shape(row.shape), kept, str(row.ranks), ", ".join(row.split) or "–", gradient)
        rows.append((*cells, ", ".join(row.updated_by) or "each rank") if whole else cells)
    lines += align_rows(rows, right=(1, 4))
    lines += ["", *(f"{told}: {why}" for told, why in found.why.items())] if found.why else []
    return "\n".join(lines)


def print_dry_run(options: PlanOptions, room: float | None) -> int:
    """Run `plait plan JOB --plan P --dry-run`. Returns 1 if a rank needs more than `room`, the usable bytes of a device."""
    found = dry_run(override_batch(load_job(options.job, options.arguments), options.batch), Plan.read(options.plan or "dp=1").fill(None))
    need = found.fullest.peak.total
    fits = room is None or need <= room
    facts, text = found.to_dict(), _format_dry_run(found)
    if room is not None:
        facts |= {"fits": fits, "room": round(room)}
        left = f"{format_size(abs(room - need))} {'to spare' if fits else 'too much'}"
        told = f"a plan may use {format_size(max(0.0, room))} of each device's memory on {options.machine}"
        text += f"\n{'fits' if fits else 'does not fit'}: {told}, {left}"
    print_result(options, facts, text)
    return 0 if fits else 1


def _format_dry_run(found: DryRun) -> str:
    most, kinds = found.fullest, sorted(found.kinds, key=lambda k: -k.peak.total)
    lines = [f"dry run  {found.plan}: one rank of each of {len(kinds)} kinds, of {found.world} ranks, {found.seconds:.0f} s",
             f"memory   {format_size(most.peak.total)} on rank {most.rank}, the fullest, after {most.peak.moment}"]  # fmt: skip
    lines += _format_categories(most.peak.categories)
    if found.host:
        lines += [f"host     {format_size(sum(found.host.values()))} in host memory", *_format_categories(found.host)]
    lines.append("    rank    equal ranks    memory  sends in a step")
    for kind in kinds[:MAX_KINDS]:
        sent = "  ".join(f"{axes} {n}× {format_size(sent)}" for axes, (n, sent) in kind.traffic.items()) or "nothing"
        lines.append(f"{kind.rank:>8}{kind.ranks:>15}{format_size(kind.peak.total):>10}  {sent}")
    if len(kinds) > MAX_KINDS:
        lines.append(f"and {len(kinds) - MAX_KINDS} more kinds")
    return "\n".join([*lines, "the ranks of each group make the same collective calls, in the same order"])


def _format_categories(held: dict[str, int]) -> list[str]:
    return [f"  {c:<12}{format_size(b):>10}" for c, b in sorted(held.items(), key=lambda cb: -cb[1])]
