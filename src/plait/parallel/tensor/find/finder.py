"""Search for the slices of any model: proposals of what to shard, and checks that the result is equal.

The model runs once (`dataflow_trace.py`), which records for every linear layer the other linear layers that its input
was computed from. Layers whose output reaches only one other linear layer are columns, and that layer is their row.
Gradients show which features of the columns each rank needs (`propose.py`). Changes that the code needs on a slice are
found by trial. A group is accepted only if every rank computes its slice of the full result, in float64
(`replayed_module.py`). All this runs in one process on the model itself, whose weights are temporarily replaced by
random values. The search does not use names of models, layers or attributes.

The layers inside `nn.MultiheadAttention` cannot be traced. It is sharded by heads, as `tensors/multihead.py` computes
it. Embeddings and heads are sharded over the vocabulary, if the model uses their weights for nothing else.

The result for one block is tried first for similar blocks. These have modules of the same classes with the same
attributes and parameter shapes, and inputs of the same shapes. Only attributes that count blocks may differ. This skips
the search but not the check, which runs for each block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem, did_you_mean, summarize_error
from plait.model.equal_layers import COUNTER_NAMES, LARGE_MODEL
from plait.model.meter import iter_tensors
from plait.model.mutations import RestoredWrites
from plait.model.sketch_table import format_size
from plait.model.slices import ColumnRowPair, ParameterSlice, Ranges, ScaledAttribute, Slices
from plait.model.trace import RunModel
from plait.parallel.tensor.find.dataflow_trace import DataflowTrace, DisableDropout, MapCall, TraceTooLarge
from plait.parallel.tensor.find.linear_maps import find_attentions, find_maps, list_trace_inputs, use_random_weights
from plait.parallel.tensor.find.propose import GroupRejected, propose_groups
from plait.parallel.tensor.find.replayed_module import ReplayedModule, adapt_group, check_slices
from plait.parallel.tensor.sequence.replayed_unit import find_sharded_units
from plait.randomness import keyed
from plait.randomness.keyed import preserve_host_state
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import choose_dtype, restore_module_state
from plait.tensors.rows import Rows
from plait.tensors.torch_private import dataclass_leaves, tree_map_only


def slice_attention(name: str, module: nn.MultiheadAttention, follow: DataflowTrace, n: int) -> ColumnRowPair:
    """Return the group of an `nn.MultiheadAttention`: its own call is the column, its `out_proj` the row."""
    heads, width = module.num_heads, module.embed_dim
    calls = follow.find_calls(name)
    if heads % n:
        raise GroupRejected(f"{name} has {heads} heads, which {n} does not divide")
    if any(set(made.used_leaves) - {0} for made in calls):
        raise GroupRejected(f"the attention weights that {name} returns are used, and they are a mean over all heads")
    own = {follow.parameters[id(p)] for p in module.parameters()}
    if own & follow.stray_parameters:
        raise GroupRejected(f"{min(own & follow.stray_parameters)} is used outside of {name}")
    step = width // n
    one = Rows.make_even(width, n).ranks
    three: tuple[Ranges, ...] = tuple(tuple((p * width + r * step, step) for p in range(3)) for r in range(n))
    fused = {"in_proj_weight": (0, three), "in_proj_bias": (0, three)}
    apart = {"q_proj_weight": (0, one), "k_proj_weight": (0, one), "v_proj_weight": (0, one)}
    places = fused | apart | {"bias_k": (2, one), "bias_v": (2, one)}
    cuts = [ParameterSlice(f"{name}.{k}", *place) for k, place in places.items() if getattr(module, k) is not None]
    cuts.append(ParameterSlice(f"{name}.out_proj.weight", 1, one))
    integers = (ScaledAttribute(name, "num_heads", n), ScaledAttribute(f"{name}.out_proj", "in_features", n))
    return ColumnRowPair(name, (name,), f"{name}.out_proj", tuple(cuts), integers)


def find_vocabulary(
    model: nn.Module, follow: DataflowTrace, wanted: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the embeddings and heads that can be sharded over the vocabulary, and why others cannot. Candidates have
    as many rows as the largest embedding.

    A matrix of several modules is sharded only if each of them supports it.
    """
    tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    largest = max((m.weight.numel() for m in tables.values()), default=0)
    lengths = {m.num_embeddings for m in tables.values() if m.weight.numel() == largest}
    modules = dict(model.named_modules())
    named = {n: modules[n] for n, word in wanted.items() if word == "vocabulary"}
    lengths |= {int(m.weight.shape[0]) for m in named.values() if isinstance(m.weight, torch.Tensor)}
    heads = {n: m for n, m in follow.opaque.items() if isinstance(m, nn.Linear) and m.out_features in lengths}
    fitting, reasons = dict[str, nn.Module](), dict[str, str]()
    for name, module in ({n: m for n, m in tables.items() if m.num_embeddings in lengths} | heads | named).items():
        reason = _explain_unfit(name, module, follow)
        if not reason and wanted.get(name, "vocabulary") == "vocabulary":
            fitting[name] = module
        else:
            reasons[name] = reason or f"Job.tensor requests it as {wanted[name]}"
    running = {frame.name for frame in follow.module_calls} | {made.name for made in follow.map_calls}
    for name, module in dict(fitting).items():
        for other, holder in modules.items():
            used = other in running or other not in tables
            if used and other not in fitting and any(p is module.weight for p in holder.parameters(recurse=False)):
                fitting.pop(name, None)
                why = f", and {reasons[other]}" if other in reasons else ""
                reasons[name] = f"{other or 'the model'} has the same weight{why}"
    return tuple(fitting), reasons


def _explain_unfit(name: str, module: nn.Module, follow: DataflowTrace) -> str:
    """Return why a module cannot work on some rows of its weight, or ""."""
    own = {follow.parameters[id(p)] for p in module.parameters(recurse=False)}
    if own & follow.stray_parameters:
        return f"{min(own & follow.stray_parameters)} is used outside of {name}"
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
        if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name} does more than look up rows"
        called = any(frame.name == name for frame in follow.module_calls)
        return "" if called else f"{name} is not called"
    if not isinstance(module, nn.Linear):
        return f"{name} is neither nn.Embedding nor nn.Linear"
    if readers := follow.find_readers(follow.find_sources(name)):
        return f"the output of {name} reaches {min(readers)}"
    calls = follow.find_calls(name)
    if not calls or not all(made.is_returned for made in calls):
        return f"the model does not return the output of {name} unchanged"
    return ""


def describe_containers(containers: Iterable[ReplayedModule], names: Iterable[str]) -> tuple[object, ...]:
    """Return a hashable description that is equal for similar containers and these layer names."""
    first, *rest = containers
    modules = []
    for name, module in first.module.named_modules():
        plain = tuple(
            (k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str)) and not COUNTER_NAMES.search(k)
        )
        shapes = tuple((k, tuple(p.shape), p.requires_grad) for k, p in module.named_parameters(recurse=False))
        modules.append((name, type(module), plain, shapes))
    arguments = dataclass_leaves((first.call.args, first.call.kwargs))
    forms = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t) for t in arguments)
    inner = tuple(name[len(first.name) :] for name in names)
    return inner, tuple(modules), forms, tuple(first.call.kwargs), len(rest)


def move_group(group: ColumnRowPair, container: str) -> ColumnRowPair:
    """Return the same group in another container."""

    def rename(old: str) -> str:
        return container + old[len(group.container) :]

    return replace(
        group,
        container=container,
        columns=tuple(map(rename, group.columns)),
        row=rename(group.row),
        tp_shards=tuple(replace(cut, parameter=rename(cut.parameter)) for cut in group.tp_shards),
        scaled_attributes=tuple(replace(integer, module=rename(integer.module)) for integer in group.scaled_attributes),
        partial_gradients=tuple(map(rename, group.partial_gradients)),
        arguments=tuple(replace(argument, module=rename(argument.module)) for argument in group.arguments),
    )


TRACE_SAMPLES = (5, 9)
"""Batch sizes for the trace. They are odd, so that ranks do not divide the batch dim. The second is used if hidden
states have as many positions as the first has samples, because the two dims would be ambiguous."""
MIN_TRACE_BYTES = float(1 << 30)
"""Memory that a trace may always use for outputs of layers, in bytes."""
MAX_TRACE_RUNS = 8
"""Maximum number of traced runs of a model that chooses units at random."""
UnitCalls = tuple[tuple[str, int], ...]
"""(unit, number of input tensors) of each unit call."""
NOT_A_PAIR = "it is not between two linear layers without other uses of their outputs"


def find_slices(
    model: nn.Module,
    inputs: Callable[[int], object],
    call: RunModel,
    n: int,
    tensor: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    *,
    given: UnitCalls = (),
    most: float = math.inf,
) -> Slices:
    """Find the slices of a model over n ranks. `inputs(k)` makes a batch of k samples, `call(model, batch)` runs it.

    `tensor`: requests of `Job.tensor`; raises J021 if one matches no layer or fails the check. `units`: name -> "", or
    why the unit cannot run on sequence shards; the others are checked for that too. `given`: unit calls of a run on
    full sequences, which the trace on short sequences must repeat. `most`: memory limit for outputs of layers, in
    bytes; raises P034 if the trace exceeds it at every sequence length that works.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
        with preserve_host_state(), restore_module_state(model.modules()), use_random_weights(model), RestoredWrites():
            for samples in TRACE_SAMPLES:
                finder = _SliceFinder(model, call, n, tensor or {}, inputs=inputs(samples), given=given, most=most)
                if not (units and _has_square_input(finder.trace, samples)):
                    break
            found = finder.find_groups()
            return find_sharded_units(finder.trace, finder.maps, found, units, n, samples) if units else found
    finally:
        torch.set_num_threads(threads)


def _make_size_error(n: int, most: float) -> PlaitError:
    what = f"tp={n}: the model runs only on full sequences, and tracing it needs more than {format_size(most)}"
    why = "the search traces a few samples through the model, on short sequences if the model supports them"
    fix = ("let the forward accept any sequence length: self.positions[:, : x.shape[1]], not all of self.positions", "remove tp")
    return PlaitError(Problem("P034", what, why=why, fix=fix))


def _has_square_input(follow: DataflowTrace, samples: int) -> bool:
    """Return whether a unit has an input with as many positions as samples."""
    given = (t for frame in follow.module_calls for t in iter_tensors((frame.args, frame.kwargs)))
    return any(t.is_floating_point() and t.dim() > 2 and t.shape[:2] == (samples, samples) for t in given)


def _list_unit_calls(follow: DataflowTrace, given: UnitCalls) -> UnitCalls:
    """Return the unit calls of a trace, in the form of `given`."""
    names = {name for name, _ in given}
    return tuple((f.name, len(list(iter_tensors((f.args, f.kwargs))))) for f in follow.module_calls if f.name in names)


class _SliceFinder:
    def __init__(
        self, model: nn.Module, call: RunModel, n: int, tensor: Mapping[str, str], *, inputs: object, given: UnitCalls, most: float
    ):
        self.model, self.n, self.most = model, n, most
        self.attentions = find_attentions(model)
        inner = tuple(f"{name}." for name in self.attentions)
        self.maps = {k: v for k, v in find_maps(model).items() if not inner or not k.startswith(inner)}
        opaque = {name: m.module for name, m in self.maps.items()} | dict[str, nn.Module](self.attentions)
        self.requested = _match_requests(tensor, [*opaque, *(k for k, m in model.named_modules() if isinstance(m, nn.Embedding))])
        wide = lambda t: t.to("cpu", choose_dtype(t, torch.float64))  # noqa: E731
        example = tree_map_only(Tensor, wide, inputs)
        self.trace = self._trace_model(opaque, example, call, given)
        self.parameters = dict(model.named_parameters())
        self.holders: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                self.holders.setdefault(id(p), []).append(name)
        self.large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL

    def _trace_model(self, opaque: Mapping[str, nn.Module], example: object, call: RunModel, given: UnitCalls) -> DataflowTrace:
        """Trace the model: one run, or several if it chooses units at random, on the shortest sequences that work.
        Outputs of linear layers are random if possible.

        Longer sequences are used if short ones take a different path, for example through a mask that only long
        sequences need.
        """
        first: DataflowTrace | None = None
        large = False
        given = tuple(pair for pair in given if pair[0] not in opaque)
        for inputs, numbers in list_trace_inputs(example):
            if first is not None and (numbers or inputs is example):
                break
            if numbers and large:  # real outputs of linear layers would need more memory
                break
            follow = DataflowTrace(self.model, opaque, numbers, self.most)
            try:
                with restore_module_state(self.model.modules()), Float64Mode(), DisableDropout():
                    for number in range(MAX_TRACE_RUNS):
                        keyed.seed_host("slices", number)
                        before = keyed.draw_host_numbers()
                        keyed.seed_host("slices", number)
                        follow.run(lambda follow=follow, inputs=inputs: call(self.model, inputs))
                        if before[:2] == keyed.draw_host_numbers()[:2]:  # its path is not random
                            break
            except Exception as error:
                large = large or isinstance(error, TraceTooLarge)
                if numbers and not large:
                    raise
                continue
            if not given or _list_unit_calls(follow, given) == given:
                return follow
            first = first or follow
        if first is None:
            raise _make_size_error(self.n, self.most)
        return first

    def find_groups(self) -> Slices:
        """Find all groups, in the order in which row layers are called."""
        self.groups: list[ColumnRowPair] = []
        self.reasons: dict[str, str] = {}
        self.groups_by_form: dict[tuple[object, ...], ColumnRowPair] = {}
        self.last_checks: dict[tuple[object, ...], tuple[list[ReplayedModule], tuple[ColumnRowPair, ...]]] = {}
        tables, why = find_vocabulary(self.model, self.trace, self.requested)
        packed = []
        for name in dict.fromkeys(made.name for made in self.trace.map_calls):
            columns: list[str] = []
            try:
                if name in self.attentions:
                    self._reject_requested(name)
                    packed.append(slice_attention(name, self.attentions[name], self.trace, self.n))
                elif columns := self._find_columns(name):
                    self.groups.append(self._make_group(name, columns, set(tables)))
            except GroupRejected as refused:
                for layer in (name, *columns):
                    self.reasons.setdefault(layer, str(refused))
        if self.large and any(check_slices(*last) for last in self.last_checks.values()):  # of similar blocks, only the last result is checked
            self.large = False  # similar blocks differ after all, so each is checked
            return self.find_groups()
        self.groups += packed
        self.reasons = why | self.reasons
        self._check_requests(tables)
        return Slices(tuple(self.groups), tables, self._list_unsliced(tables))

    def _find_columns(self, row: str) -> list[str]:
        """Return the linear layers whose output reaches only this row layer."""
        sources = [c for call in self.trace.find_calls(row) for c in self.trace.find_map_calls(call.sources)]
        names = list(dict.fromkeys(c.name for c in sources))
        taken = {name for g in self.groups for name in (*g.columns, g.row)}
        if row in names or {*names, row} & taken or self.requested.get(row) == "column":
            return []
        for name in names:
            returned = self.trace.find_sources(name)
            readers = self.trace.find_readers(returned) - {row}
            if returned & self.trace.output_sources:
                reason = f"the output of {name} reaches the model's output, not only {row}"
            elif readers:
                reason = f"the output of {name} reaches {min(readers)} too, not only {row}"
            elif name not in self.maps:
                reason = f"{name} is not a linear layer"
            elif self.requested.get(name) == "row":
                reason = f"Job.tensor requests {name} as a row"
            else:
                continue
            self.reasons.setdefault(name, reason)
            raise GroupRejected(reason)
        return names

    def _make_group(self, row: str, columns: list[str], tables: set[str]) -> ColumnRowPair:
        for name in (*columns, row):
            self._reject_requested(name)
            if name in tables:
                raise GroupRejected(f"{name} is sharded over the vocabulary")
            for p in self.maps[name].module.parameters(recurse=False):
                if self.trace.parameters[id(p)] in self.trace.stray_parameters:
                    raise GroupRejected(f"{self.trace.parameters[id(p)]} is used outside of {name}")
        containers = self._find_containers(self.trace.find_calls(row))
        before = tuple(g for g in self.groups if _is_inside(g.container, containers[0].name))
        alike = describe_containers(containers, (*columns, row))
        known = self.groups_by_form.get(alike)
        if known is not None:
            again = move_group(known, containers[0].name)
            self._reject_shared(again)
            self.last_checks[alike] = (containers, (*before, again))
            if self.large or not check_slices(*self.last_checks[alike]):
                return again
        self.groups_by_form[alike] = self._search_group(containers, columns, row, before)
        return self.groups_by_form[alike]

    def _search_group(
        self, containers: list[ReplayedModule], columns: list[str], row: str, before: tuple[ColumnRowPair, ...]
    ) -> ColumnRowPair:
        try:
            for container in containers:
                container.run(container.draw_values(0))
        except Exception as error:
            raise GroupRejected(f"its code cannot run separately ({type(error).__name__})") from error
        reasons = []
        proposed = _convert_failures(propose_groups(containers[0], [self.maps[c] for c in columns], self.maps[row], self.n))
        for proposal in proposed:
            self._reject_shared(proposal)
            group, wrong = adapt_group(containers[0], proposal, before)
            if group is not None:
                wrong = check_slices(containers[1:], (*before, group))
                if not wrong:
                    return group
            reasons.append(wrong)
        raise GroupRejected(reasons[0])

    def _reject_shared(self, group: ColumnRowPair) -> None:
        """Reject a group with a parameter that is also used elsewhere."""
        layers = {*group.columns, group.row}
        for name in (*(cut.parameter for cut in group.tp_shards), *group.partial_gradients):
            holders = self.holders[id(self.parameters[name])] if name in self.parameters else [name, "another layer"]
            if len(holders) > 1:
                raise GroupRejected(f"{' and '.join(holders)} have the same weight")
            bit = 1 << self.trace.parameter_bits[name] if name in self.trace.parameter_bits else 0
            readers = self.trace.find_readers(bit) - {group.row}
            if holders[0] not in layers and (readers or self.trace.output_sources & bit):
                raise GroupRejected(f"{name} is used both between the layers and outside of them")

    def _find_containers(self, calls: list[MapCall]) -> list[ReplayedModule]:
        """Return the innermost module calls that contain all columns and the row."""
        numbers = []
        for call in calls:
            chains = [call.parents, *(c.parents for c in self.trace.find_map_calls(call.sources))]
            common = [f for f, *others in zip(*chains) if all(f == o for o in others)]
            if len(chains) > 1:
                numbers.append(common[-1])
        names = {self.trace.module_calls[i].name for i in numbers}
        if len(names) > 1:
            raise GroupRejected(f"{calls[0].name} is called in {' and '.join(sorted(names))}")
        return [ReplayedModule(self.trace, i, self.maps) for i in dict.fromkeys(numbers)]

    # — requests of the job —

    def _reject_requested(self, name: str) -> None:
        if self.requested.get(name, "column") in ("whole", "vocabulary"):
            raise GroupRejected(f"Job.tensor requests {name} as {self.requested[name]}")

    def _check_requests(self, tables: tuple[str, ...]) -> None:
        """Raise J021 if a request of `Job.tensor` is not fulfilled."""
        have = {name: "column" for g in self.groups for name in g.columns} | {g.row: "row" for g in self.groups}
        have |= dict.fromkeys(tables, "vocabulary")
        problems = []
        for name, word in self.requested.items():
            if have.get(name, "whole") != word:
                what = f'Job.tensor requests {name} as "{word}", which does not compute the same result'
                fix = (f'tensor={{"{name}": "whole"}}',)
                problems.append(Problem("J021", what, why=self.reasons.get(name, NOT_A_PAIR), fix=fix))
        if problems:
            raise PlaitError(problems)

    def _list_unsliced(self, tables: tuple[str, ...]) -> tuple[tuple[str, float, str], ...]:
        """List the modules with matrices that are not sharded: (name, fraction of the model, reason)."""
        cut = {c.parameter for g in self.groups for c in g.tp_shards}
        cut |= {f"{name}.weight" for name in tables}
        total = sum(p.numel() for p in self.model.parameters())
        rows = []
        for name, module in self.model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
            size = sum(p.numel() for p in own if self.trace.parameters[id(p)] not in cut)
            if size and name not in tables:
                rows.append((name, size / total, self.reasons.get(name, NOT_A_PAIR)))
        return tuple(sorted(rows, key=lambda row: -row[1]))


def _match_requests(tensor: Mapping[str, str], layers: list[str]) -> dict[str, str]:
    """Return the request of `Job.tensor` for each layer. Raises J021 if a pattern matches no layer."""
    problems = []
    for pattern in tensor:
        if not any(fnmatchcase(name, pattern) for name in layers):
            hint = did_you_mean(pattern, layers) if layers else "the model has no linear layer"
            problems.append(Problem("J021", f'Job.tensor: "{pattern}" matches no layer        {hint}'))
    if problems:
        raise PlaitError(problems)
    return {name: word for pattern, word in tensor.items() for name in layers if fnmatchcase(name, pattern)}


def _convert_failures(proposed: Iterable[ColumnRowPair]) -> Iterator[ColumnRowPair]:
    """Convert exceptions of the job's own code into `GroupRejected`, such as those of a hook whose input has no
    gradient."""
    try:
        yield from proposed
    except (GroupRejected, PlaitError):
        raise
    except Exception as error:
        raise GroupRejected(f"a trial of its code raised {summarize_error(error)[:120]}") from error


def _is_inside(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(f"{container}.")
