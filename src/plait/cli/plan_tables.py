"""The tables of `plait plan --show tensor`, `--show parameters` and `--dry-run`.

[Note: Tensor]
What `plait plan --show tensor` prints: which layers `tp` cuts, how, and what stays whole and why.

Layers of the same form in sister blocks are one line with a count. Found as for a run, in one process, on a model of
any size: see `parallel/tensor/find/finder.py`.

[Note: Parameters]
What `plait plan --show parameters` prints: which rank has what of each parameter, and how its gradient is summed and why.

Parameters of the same form in sister blocks that a plan treats alike are one line with a count. The table is that of a run
(`parallel/spec.py`); no process is started for it.
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
from plait.data.loaders import with_batch
from plait.engine.build import check_plan
from plait.model.fake_model import sketched
from plait.model.make import call
from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, Slices
from plait.model.table import aligned, form_of, label, short, size, span_of
from plait.parallel.mesh import Mesh
from plait.parallel.order import shard_plan
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.spec import At, ParamSpec, Reduce, ShardPlan, sizes
from plait.parallel.tensor import choose, wiring
from plait.planner.dryrun.dry_run import DryRun, dry_run, known
from plait.tensors.rows import Rows

SHOWN = 12
"""Kinds of ranks that the table of a dry run has lines for, the fullest first."""


@dataclass(frozen=True)
class PairRow:
    """Columns and their row, in every block of the same form. Names but the first are those inside `block`."""

    block: str
    kind: str
    """The class of the module in whose call they lie."""
    count: int
    columns: tuple[str, ...]
    row: str
    how: tuple[str, ...]
    changed: tuple[str, ...]
    """Numbers that the code has fixed, and what they become."""
    summed: tuple[str, ...]
    """Parameters that every process holds whole and has a share of the gradient of."""
    parameters: int
    """Of all these blocks, that are cut."""


@dataclass(frozen=True)
class VocabularyTable:
    """An embedding or a head, cut by rows of the vocabulary."""

    name: str
    rows: tuple[int, ...]
    """Of each process."""
    parameters: int


@dataclass(frozen=True)
class WholeLayers:
    """Layers that stay whole for one reason."""

    name: str
    count: int
    share: float
    """Of all weights."""
    reason: str


@dataclass(frozen=True)
class TensorShown:
    """All of it. `held`: parameters that the fullest process holds."""

    tp: int
    parameters: int
    held: int
    pairs: tuple[PairRow, ...]
    vocabulary: tuple[VocabularyTable, ...]
    whole: tuple[WholeLayers, ...]
    small: float
    """The share of weights in what is no matrix and stays whole: norms, biases."""
    stretched: tuple[str, ...] = ()
    """Units that run on stretches of the sequence between their slices."""
    unstretched: tuple[WholeLayers, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def print_tensor(options: PlanOptions) -> int:
    """`plait plan JOB --plan P --show tensor`."""
    plan = Plan.read(options.plan or "dp=1").fill(None)
    if plan.tp == 1:
        what = "--show tensor needs a plan with tp > 1"
        raise PlaitError(Problem("U002", what, why=f"the plan is {plan}: tp=1", fix=('--plan "tp=2"',)))
    found = tensor_shown(with_batch(load_job(options.job, options.arguments), options.batch), plan)
    print_result(options, found.to_dict(), tensor_text(found, options.job))
    return 0


def tensor_shown(job: Job, plan: Plan) -> TensorShown:
    """What a plan with `tp` cuts of a job's model. Nothing of it is trained, and no process is started."""
    check_plan(job, plan)
    model, sketch = sketched(job)
    example = sampling.example(job, sampling.data_of(job))
    inputs = lambda n: data.first_samples(example, n)[0]  # noqa: E731
    handed_on = StageLayout.of(plan, sketch, job.stages).handed_on if plan.pp > 1 else frozenset()
    found = choose.slices_of(sketch, model, inputs, call, job, plan, handed_on=handed_on)
    return summary(model, found, plan.tp)


def summary(model: nn.Module, found: Slices, ranks: int) -> TensorShown:
    """The slices of a model as a few lines."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    cuts = {cut.parameter: cut for cut in wiring.vocabulary_cuts(model, found, ranks)}
    total = sum(sizes.values())
    parts = [{n: prod(cut.shape(shapes[n], rank)) for n, cut in cuts.items()} for rank in range(ranks)]
    held = max(sum((sizes | own).values()) for own in parts)
    names = {id(p): n for n, p in model.named_parameters()}
    tables = []
    for name in found.vocabulary:
        module = model.get_submodule(name)
        own = [names[id(p)] for p in module.parameters(recurse=False)]
        tables.append(VocabularyTable(name, Rows(cuts[own[0]].ranges).sizes, sum(sizes[n] for n in own)))
    small = total - sum(sizes[n] for n in cuts) - round(sum(share for _, share, _ in found.whole) * total)
    pairs, rows = _pairs(model, found.groups, sizes), [(unit, 0.0, why) for unit, why in found.unstretched]
    on = tuple(label(list(names)) for _, names in groupby((s.unit for s in found.stretches), form_of))
    return TensorShown(ranks, total, held, pairs, tuple(tables), _whole(found.whole), max(0, small) / total, on, _whole(rows))


def _pairs(model: nn.Module, groups: Iterable[ColumnRowPair], sizes: dict[str, int]) -> tuple[PairRow, ...]:
    alike: dict[PairRow, list[PairRow]] = {}
    for group in groups:
        pair = _pair(model, group, sizes)
        alike.setdefault(replace(pair, block=form_of(pair.block)), []).append(pair)
    return tuple(
        replace(form, block=label([p.block for p in same]), count=len(same), parameters=form.parameters * len(same))
        for form, same in alike.items()
    )


def _pair(model: nn.Module, group: ColumnRowPair, sizes: dict[str, int]) -> PairRow:
    inner = partial(_inside, group.container)
    row = model.get_submodule(group.row)
    bias = [f"{group.row}.bias"] if row._parameters.get("bias") is not None else []
    return PairRow(
        group.container,
        type(model.get_submodule(group.container)).__name__,
        1,
        tuple(inner(c) for c in group.columns),
        inner(group.row),
        _how(group, inner),
        tuple(_changed(model, i, inner) for i in group.integers if not _own_size(model, group, i)),
        tuple(inner(n) for n in (*group.partial, *bias)),
        sum(sizes[c.parameter] for c in group.cuts),
    )


def _own_size(model: nn.Module, group: ColumnRowPair, integer: DividedNumber) -> bool:
    """Whether it is the size of a layer that is cut, which says nothing new."""
    layer = integer.module in (*group.columns, group.row)
    return layer and not isinstance(model.get_submodule(integer.module), nn.MultiheadAttention)


def _inside(container: str, name: str) -> str:
    """A module's or parameter's name inside its container."""
    if name == container:
        return "itself"
    return name.removeprefix(f"{container}.") if container else name


def _how(group: ColumnRowPair, inner: Callable[[str], str]) -> tuple[str, ...]:
    """How columns are cut, those that are cut alike in one sentence."""
    ways: dict[str, list[str]] = {}
    for name in group.columns:
        cut = max(
            (c for c in group.cuts if c.parameter.startswith(f"{name}.")), key=lambda c: len(c.ranges[0]), default=None
        )
        if cut is not None:
            ways.setdefault(way(cut), []).append(inner(name))
    parts = [f"{', '.join(names)} {said}" if len(ways) > 1 else said for said, names in ways.items()]
    parts += ["sizes in its code resized"] if group.resize else []
    entering = [str(a.key) for a in group.arguments]
    return (*parts, *([f"argument {', '.join(entering)} cut or summed too"] if entering else []))


def way(cut: ParameterSlice) -> str:
    """How one parameter is cut.

    >>> way(ParameterSlice("w", 0, (((0, 4),), ((4, 4),)))), way(ParameterSlice("w", 0, (((0, 2), (4, 2)), ((2, 2), (6, 2)))))
    ('contiguous', 'inside 2 parts')
    """
    sharers = max(Counter(cut.ranges).values())
    parts = max(len(ranges) for ranges in cut.ranges)
    said = "contiguous" if parts == 1 else f"inside {parts} parts"
    return said if sharers == 1 else f"{said}, heads shared by {sharers} ranks"


def _changed(model: nn.Module, integer: DividedNumber, inner: Callable[[str], str]) -> str:
    value = attrgetter(integer.path)(model.get_submodule(integer.module))
    owner = inner(integer.module)
    return f"{'' if owner == 'itself' else owner + '.'}{integer.path} {value} → {value // integer.divisor}"


def _whole(layers: Iterable[tuple[str, float, str]]) -> tuple[WholeLayers, ...]:
    """One row for the layers (name, share, reason) of one form that stay whole for reasons of one form."""
    alike: dict[tuple[str, str], list[tuple[str, float, str]]] = {}
    for name, share, reason in layers:
        alike.setdefault((form_of(name.rpartition(".")[0]), form_of(reason)), []).append((name, share, reason))
    rows = []
    for (_, form), members in alike.items():
        names, shares, reasons = zip(*members)
        reason = reasons[0] if len(set(reasons)) == 1 else form
        rows.append(WholeLayers(_sisters(list(names)), len(members), sum(shares), reason))
    return tuple(sorted(rows, key=lambda row: -row.share))


def _sisters(names: list[str]) -> str:
    """One name for layers in the same or in alike modules: `layers.0-3.q, k, v`."""
    if len(names) == 1:
        return names[0] or "the model"
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    inner = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if all(name.isdigit() for name in inner) and len(inner) > 1:
        inner = [span_of(sorted(map(int, inner))) or ", ".join(inner)]
    return (f"{label(parents)}." if parents != [""] else "") + ", ".join(inner)


def tensor_text(found: TensorShown, job: str) -> str:
    """As a table for a terminal."""
    held = f"{short(found.held)} of {short(found.parameters)} parameters"
    lines = [f"job     {job}, tp={found.tp}: each process holds {held}"]
    head = ("cut", "", "blocks", "columns → row", "parameters", "how", "changed in its code", "gradients summed")
    rows: list[tuple[str, ...]] = [head]
    for p in found.pairs:
        rows.append((p.block, p.kind, str(p.count), f"{', '.join(p.columns)} → {p.row}", short(p.parameters), "; ".join(p.how),
                     ", ".join(p.changed) or "–", ", ".join(p.summed) or "–"))  # fmt: skip
    for t in found.vocabulary:
        each = str(t.rows[0]) if len(set(t.rows)) == 1 else f"{max(t.rows)} to {min(t.rows)}"
        rows.append((t.name, "", "1", "rows of the vocabulary", short(t.parameters), f"{each} rows each", "–", "–"))
    if len(rows) > 1:
        lines += ["", *aligned(rows, right=(2, 4))]
    else:
        lines += ["", "nothing can be cut: every process would hold and compute all of it"]
    rows = [("whole", "layers", "weights", "why")]
    rows += [(w.name or "the model", str(w.count), f"{w.share:.1%}", w.reason) for w in found.whole]
    if found.small:
        why = "norms, and biases of rows: small, and every process needs all of it"
        rows.append(("norms, biases", "", f"{found.small:.1%}", why))
    lines += ["", *aligned(rows, right=(1, 2))] if len(rows) > 1 else []
    on = ", ".join(found.stretched)
    lines += ["", f"on stretches of the sequence between slices: {on}"] if on else []
    lines += [f"on the whole sequence: {w.name} ({w.count}): {w.reason}" for w in found.unstretched]
    return "\n".join(lines)


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


def print_parameters(options: PlanOptions) -> int:
    """`plait plan JOB --plan P --show parameters`."""
    plan = Plan.read(options.plan or "dp=1").fill(None)
    found = parameters_shown(with_batch(load_job(options.job, options.arguments), options.batch), plan)
    print_result(options, asdict(found), parameter_text(found, options.job))
    return 0


def parameters_shown(job: Job, plan: Plan) -> ParametersShown:
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


def parameter_text(found: ParametersShown, job: str) -> str:
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


def print_dry_run(options: PlanOptions, room: float | None) -> int:
    """`plait plan JOB --plan P --dry-run`; 1 when a rank needs more than `room`, what a device's memory leaves to a plan."""
    found = dry_run(with_batch(load_job(options.job, options.arguments), options.batch), Plan.read(options.plan or "dp=1").fill(None))
    need = found.fullest.peak.total
    fits = room is None or need <= room
    facts, text = found.to_dict(), _dry_table(found)
    if room is not None:
        facts |= {"fits": fits, "room": round(room)}
        left = f"{size(abs(room - need))} {'to spare' if fits else 'too much'}"
        told = f"of {options.machine}'s memory a plan may take {size(max(0.0, room))} on each device"
        text += f"\n{'fits' if fits else 'does not fit'}: {told}, {left}"
    print_result(options, facts, text)
    return 0 if fits else 1


def _dry_table(found: DryRun) -> str:
    most, kinds = found.fullest, sorted(found.kinds, key=lambda k: -k.peak.total)
    lines = [f"dry run  {found.plan}: one rank of each of {len(kinds)} kinds, of {found.world} ranks, {found.seconds:.0f} s",
             f"memory   {size(most.peak.total)} on rank {most.rank}, the fullest, after {most.peak.moment}"]  # fmt: skip
    lines += _categories(most.peak.categories)
    if found.host:
        lines += [f"host     {size(sum(found.host.values()))} beside it", *_categories(found.host)]
    lines.append("    rank  ranks like it    memory  sends in a step")
    for kind in kinds[:SHOWN]:
        sent = "  ".join(f"{axes} {n}× {size(sent)}" for axes, (n, sent) in kind.traffic.items()) or "nothing"
        lines.append(f"{kind.rank:>8}{kind.ranks:>15}{size(kind.peak.total):>10}  {sent}")
    if len(kinds) > SHOWN:
        lines.append(f"and {len(kinds) - SHOWN} more kinds")
    return "\n".join([*lines, "every rank sends what the others of its groups wait for, in the same order"])


def _categories(held: dict[str, int]) -> list[str]:
    return [f"  {c:<12}{size(b):>10}" for c, b in sorted(held.items(), key=lambda cb: -cb[1])]
