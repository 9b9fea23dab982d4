"""Finding the slices of any model: propose what to cut, and check that it computes the same.

The model runs once (`trace.py`), and every linear map learns which others its input was computed from. Maps whose output
reaches nothing but one other map are columns, that one is their row. What each rank needs of the columns is read off
gradients (`propose.py`), what the code needs to run on a slice is tried, and nothing is accepted that was not seen to
give every rank its slice of the whole, in float64 (`check.py`). All of it happens in one process, on the model itself
with random numbers in the place of its weights, which are put back. No names of models, layers or attributes are known.

`nn.MultiheadAttention` calls no layers that could be followed: it is cut by its heads, as `tensors/multihead.py` computes it.
Embeddings and heads are cut by rows of the vocabulary, where the model uses them for nothing else.

What was found for one block is tried first for those that are alike: whose modules have the same classes, the same
numbers and words as attributes and parameters of the same shapes, and are given tensors of the same shapes. Only
numbers that count blocks may differ. It saves the search, not the proof: the check is made for each.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem, did_you_mean, in_a_line
from plait.model.alike import COUNTS, LARGE_MODEL
from plait.model.meter import tensors_in
from plait.model.mutations import OutsideWrites
from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, Ranges, Slices
from plait.model.table import size
from plait.model.trace import Call
from plait.parallel.tensor.find.check import ReplayedModule, adapted, check
from plait.parallel.tensor.find.linear_maps import find_maps, packed_attentions, random_weights, tries
from plait.parallel.tensor.find.propose import Refused, proposals
from plait.parallel.tensor.find.trace import DataflowTrace, MapCall, Still, TooLarge
from plait.parallel.tensor.sequence.check import stretched
from plait.randomness import keyed
from plait.randomness.keyed import host_kept
from plait.tensors.float64 import Wide
from plait.tensors.modules import format_in, state_kept
from plait.tensors.rows import Rows
from plait.tensors.torch_private import leaves, tree_map_only


def attention(name: str, module: nn.MultiheadAttention, follow: DataflowTrace, n: int) -> ColumnRowPair:
    """The group of one `nn.MultiheadAttention`: its own call is the column, its `out_proj` the row."""
    heads, width = module.num_heads, module.embed_dim
    calls = follow.made_by(name)
    if heads % n:
        raise Refused(f"{name} has {heads} heads, which {n} does not divide")
    if any(set(made.used) - {0} for made in calls):
        raise Refused(f"the weights that {name} returns are used: they are a mean over all heads")
    own = {follow.parameters[id(p)] for p in module.parameters()}
    if own & follow.stray:
        raise Refused(f"{min(own & follow.stray)} is used outside of {name}")
    step = width // n
    one = Rows.even(width, n).ranks
    three: tuple[Ranges, ...] = tuple(tuple((p * width + r * step, step) for p in range(3)) for r in range(n))
    fused = {"in_proj_weight": (0, three), "in_proj_bias": (0, three)}
    apart = {"q_proj_weight": (0, one), "k_proj_weight": (0, one), "v_proj_weight": (0, one)}
    places = fused | apart | {"bias_k": (2, one), "bias_v": (2, one)}
    cuts = [ParameterSlice(f"{name}.{k}", *place) for k, place in places.items() if getattr(module, k) is not None]
    cuts.append(ParameterSlice(f"{name}.out_proj.weight", 1, one))
    integers = (DividedNumber(name, "num_heads", n), DividedNumber(f"{name}.out_proj", "in_features", n))
    return ColumnRowPair(name, (name,), f"{name}.out_proj", tuple(cuts), integers)


def vocabulary(
    model: nn.Module, follow: DataflowTrace, wanted: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Embeddings and heads that can be cut by rows, and why others cannot: those with as many rows as the largest.

    A matrix that several modules hold is cut only if each of them can work on rows of it.
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
        reason = _unfit(name, module, follow)
        if not reason and wanted.get(name, "vocabulary") == "vocabulary":
            fitting[name] = module
        else:
            reasons[name] = reason or f"Job.tensor wants it {wanted[name]}"
    running = {frame.name for frame in follow.frames} | {made.name for made in follow.calls}
    for name, module in dict(fitting).items():
        for other, holder in modules.items():
            used = other in running or other not in tables
            if used and other not in fitting and any(p is module.weight for p in holder.parameters(recurse=False)):
                fitting.pop(name, None)
                why = f", and {reasons[other]}" if other in reasons else ""
                reasons[name] = f"{other or 'the model'} has the same weight{why}"
    return tuple(fitting), reasons


def _unfit(name: str, module: nn.Module, follow: DataflowTrace) -> str:
    """Why a module cannot work on rows of its weight, or nothing."""
    own = {follow.parameters[id(p)] for p in module.parameters(recurse=False)}
    if own & follow.stray:
        return f"{min(own & follow.stray)} is used outside of {name}"
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
        if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name} does more than look rows up"
        called = any(frame.name == name for frame in follow.frames)
        return "" if called else f"{name} is not called"
    if not isinstance(module, nn.Linear):
        return f"{name} is neither nn.Embedding nor nn.Linear"
    if readers := follow.readers(follow.sources_of(name)):
        return f"what {name} returns reaches {min(readers)}"
    calls = follow.made_by(name)
    if not calls or not all(made.returned for made in calls):
        return f"the model does not return what {name} returns as it is"
    return ""


def signature(containers: Iterable[ReplayedModule], names: Iterable[str]) -> tuple[object, ...]:
    """A value that alike containers have in common, for layers of these names in it."""
    first, *rest = containers
    modules = []
    for name, module in first.module.named_modules():
        plain = tuple(
            (k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str)) and not COUNTS.search(k)
        )
        shapes = tuple((k, tuple(p.shape), p.requires_grad) for k, p in module.named_parameters(recurse=False))
        modules.append((name, type(module), plain, shapes))
    arguments = leaves((first.frame.args, first.frame.kwargs))
    forms = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t) for t in arguments)
    inner = tuple(name[len(first.name) :] for name in names)
    return inner, tuple(modules), forms, tuple(first.frame.kwargs), len(rest)


def renamed(group: ColumnRowPair, container: str) -> ColumnRowPair:
    """The same group in another container."""

    def name(old: str) -> str:
        return container + old[len(group.container) :]

    return replace(
        group,
        container=container,
        columns=tuple(map(name, group.columns)),
        row=name(group.row),
        cuts=tuple(replace(cut, parameter=name(cut.parameter)) for cut in group.cuts),
        integers=tuple(replace(integer, module=name(integer.module)) for integer in group.integers),
        partial=tuple(map(name, group.partial)),
        arguments=tuple(replace(argument, module=name(argument.module)) for argument in group.arguments),
    )


SAMPLES = (5, 9)
"""In the batch that the model runs on: odd, so that the batch is not taken for something that ranks divide. The second, where
hidden states have as many positions as there are samples, so that nobody could tell which dim is which."""
FOLLOWED = float(1 << 30)
"""Bytes that looking for what tp can slice may always take, for what the layers of a few samples return."""
ROUNDS = 8
"""Runs of a model that decides at random what to run."""
Calls = tuple[tuple[str, int], ...]
"""(unit, number of tensors it is given) of the calls of units."""
ALONE = "it is no layer between two others that nothing else reads"


def find(
    model: nn.Module,
    inputs: Callable[[int], object],
    call: Call,
    n: int,
    tensor: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    *,
    given: Calls = (),
    most: float = math.inf,
) -> Slices:
    """The slices of a model over n ranks. `inputs(k)` makes a batch of k samples, `call(model, batch)` runs it.

    `tensor`: what `Job.tensor` says. J021 when it names no layer, or wants what does not pass the check. `units`: which
    of them run on stretches between their regions is found too; name -> why it cannot, or nothing. `given`: the calls of
    units in a run on whole rows; on the few words of a row that the model is followed on it must make the same ones. `most`:
    bytes that what its layers return may take; P034 where they take more, on every length of row that the model can run on.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # tensors are small: threads would wait for each other
        with host_kept(), state_kept(model.modules()), random_weights(model), OutsideWrites():
            for samples in SAMPLES:
                finder = _Finder(model, call, n, tensor or {}, inputs=inputs(samples), given=given, most=most)
                if not (units and _square(finder.follow, samples)):
                    break
            found = finder.find()
            return stretched(finder.follow, finder.maps, found, units, n, samples) if units else found
    finally:
        torch.set_num_threads(threads)


def _too_large(n: int, most: float) -> PlaitError:
    what = f"tp={n}: the model runs on whole rows alone, where following it takes more than {size(most)}"
    why = "what can be sliced is found by following a few samples through the model, on short rows where it runs on them"
    fix = ("let the forward take rows of any length: self.positions[:, : x.shape[1]], not all of self.positions", "leave out tp")
    return PlaitError(Problem("P034", what, why=why, fix=fix))


def _square(follow: DataflowTrace, samples: int) -> bool:
    """Whether a unit is given a tensor with as many rows in each sample as there are samples."""
    given = (t for frame in follow.frames for t in tensors_in((frame.args, frame.kwargs)))
    return any(t.is_floating_point() and t.dim() > 2 and t.shape[:2] == (samples, samples) for t in given)


def _units(follow: DataflowTrace, given: Calls) -> Calls:
    """The calls of units in what was followed, as `given` has them."""
    names = {name for name, _ in given}
    return tuple((f.name, len(list(tensors_in((f.args, f.kwargs))))) for f in follow.frames if f.name in names)


class _Finder:
    def __init__(
        self, model: nn.Module, call: Call, n: int, tensor: Mapping[str, str], *, inputs: object, given: Calls, most: float
    ):
        self.model, self.n, self.most = model, n, most
        self.packed = packed_attentions(model)
        inner = tuple(f"{name}." for name in self.packed)
        self.maps = {k: v for k, v in find_maps(model).items() if not inner or not k.startswith(inner)}
        opaque = {name: m.module for name, m in self.maps.items()} | dict[str, nn.Module](self.packed)
        self.wanted = _wanted(tensor, [*opaque, *(k for k, m in model.named_modules() if isinstance(m, nn.Embedding))])
        wide = lambda t: t.to("cpu", format_in(t, torch.float64))  # noqa: E731
        example = tree_map_only(Tensor, wide, inputs)
        self.follow = self._followed(opaque, example, call, given)
        self.named = dict(model.named_parameters())
        self.holders: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                self.holders.setdefault(id(p), []).append(name)
        self.large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL

    def _followed(self, opaque: Mapping[str, nn.Module], example: object, call: Call, given: Calls) -> DataflowTrace:
        """One run, or several of a model that decides at random; short if it can be, and without the maps' numbers.

        Longer where a few words take another course than whole rows do: a mask that only a long row needs.
        """
        first: DataflowTrace | None = None
        large = False
        given = tuple(pair for pair in given if pair[0] not in opaque)
        for inputs, numbers in tries(example):
            if first is not None and (numbers or inputs is example):
                break
            if numbers and large:  # with the maps' numbers it would take more still
                break
            follow = DataflowTrace(self.model, opaque, numbers, self.most)
            try:
                with state_kept(self.model.modules()), Wide(), Still():
                    for number in range(ROUNDS):
                        keyed.seed_host("slices", number)
                        before = keyed.first_draws()
                        keyed.seed_host("slices", number)
                        follow.run(lambda follow=follow, inputs=inputs: call(self.model, inputs))
                        if before[:2] == keyed.first_draws()[:2]:  # it takes the same way every time
                            break
            except Exception as error:
                large = large or isinstance(error, TooLarge)
                if numbers and not large:
                    raise
                continue
            if not given or _units(follow, given) == given:
                return follow
            first = first or follow
        if first is None:
            raise _too_large(self.n, self.most)
        return first

    def find(self) -> Slices:
        """Everything, in the order in which rows are called."""
        self.groups: list[ColumnRowPair] = []
        self.reasons: dict[str, str] = {}
        self.known: dict[tuple[object, ...], ColumnRowPair] = {}
        self.last: dict[tuple[object, ...], tuple[list[ReplayedModule], tuple[ColumnRowPair, ...]]] = {}
        tables, why = vocabulary(self.model, self.follow, self.wanted)
        packed = []
        for name in dict.fromkeys(made.name for made in self.follow.calls):
            columns: list[str] = []
            try:
                if name in self.packed:
                    self._whole_by_wish(name)
                    packed.append(attention(name, self.packed[name], self.follow, self.n))
                elif columns := self._columns(name):
                    self.groups.append(self._group(name, columns, set(tables)))
            except Refused as refused:
                for layer in (name, *columns):
                    self.reasons.setdefault(layer, str(refused))
        if self.large and any(check(*last) for last in self.last.values()):  # of blocks alike, the first and the last
            self.large = False  # they turned out to be different: each is checked
            return self.find()
        self.groups += packed
        self.reasons = why | self.reasons
        self._granted(tables)
        return Slices(tuple(self.groups), tables, self._whole(tables))

    def _columns(self, row: str) -> list[str]:
        """The maps whose output reaches this row and nothing else."""
        sources = [c for call in self.follow.made_by(row) for c in self.follow.maps_in(call.reads)]
        names = list(dict.fromkeys(c.name for c in sources))
        taken = {name for g in self.groups for name in (*g.columns, g.row)}
        if row in names or {*names, row} & taken or self.wanted.get(row) == "column":
            return []
        for name in names:
            returned = self.follow.sources_of(name)
            readers = self.follow.readers(returned) - {row}
            if returned & self.follow.output:
                reason = f"what {name} returns reaches what the model returns, not {row} alone"
            elif readers:
                reason = f"what {name} returns reaches {min(readers)} too, not {row} alone"
            elif name not in self.maps:
                reason = f"{name} is no linear map"
            elif self.wanted.get(name) == "row":
                reason = f"Job.tensor wants {name} as a row"
            else:
                continue
            self.reasons.setdefault(name, reason)
            raise Refused(reason)
        return names

    def _group(self, row: str, columns: list[str], tables: set[str]) -> ColumnRowPair:
        for name in (*columns, row):
            self._whole_by_wish(name)
            if name in tables:
                raise Refused(f"{name} is cut by rows of the vocabulary")
            for p in self.maps[name].module.parameters(recurse=False):
                if self.follow.parameters[id(p)] in self.follow.stray:
                    raise Refused(f"{self.follow.parameters[id(p)]} is used outside of {name}")
        containers = self._containers(self.follow.made_by(row))
        before = tuple(g for g in self.groups if _inside(g.container, containers[0].name))
        alike = signature(containers, (*columns, row))
        known = self.known.get(alike)
        if known is not None:
            again = renamed(known, containers[0].name)
            self._alone(again)
            self.last[alike] = (containers, (*before, again))
            if self.large or not check(*self.last[alike]):
                return again
        self.known[alike] = self._searched(containers, columns, row, before)
        return self.known[alike]

    def _searched(
        self, containers: list[ReplayedModule], columns: list[str], row: str, before: tuple[ColumnRowPair, ...]
    ) -> ColumnRowPair:
        try:
            for container in containers:
                container.run(container.values(0))
        except Exception as error:
            raise Refused(f"its code cannot be run alone ({type(error).__name__})") from error
        reasons = []
        proposed = _in_trial(proposals(containers[0], [self.maps[c] for c in columns], self.maps[row], self.n))
        for proposal in proposed:
            self._alone(proposal)
            group, wrong = adapted(containers[0], proposal, before)
            if group is not None:
                wrong = check(containers[1:], (*before, group))
                if not wrong:
                    return group
            reasons.append(wrong)
        raise Refused(reasons[0])

    def _alone(self, group: ColumnRowPair) -> None:
        """Refuse a group with a parameter that something else uses too."""
        layers = {*group.columns, group.row}
        for name in (*(cut.parameter for cut in group.cuts), *group.partial):
            holders = self.holders[id(self.named[name])] if name in self.named else [name, "another layer"]
            if len(holders) > 1:
                raise Refused(f"{' and '.join(holders)} have the same weight")
            bit = 1 << self.follow.bits[name] if name in self.follow.bits else 0
            readers = self.follow.readers(bit) - {group.row}
            if holders[0] not in layers and (readers or self.follow.output & bit):
                raise Refused(f"{name} is used between the layers and beside them")

    def _containers(self, calls: list[MapCall]) -> list[ReplayedModule]:
        """The innermost calls of modules in which the columns and the row are called."""
        numbers = []
        for call in calls:
            chains = [call.parents, *(c.parents for c in self.follow.maps_in(call.reads))]
            common = [f for f, *others in zip(*chains) if all(f == o for o in others)]
            if len(chains) > 1:
                numbers.append(common[-1])
        names = {self.follow.frames[i].name for i in numbers}
        if len(names) > 1:
            raise Refused(f"{calls[0].name} is called in {' and '.join(sorted(names))}")
        return [ReplayedModule(self.follow, i, self.maps) for i in dict.fromkeys(numbers)]

    # — what the job says —

    def _whole_by_wish(self, name: str) -> None:
        if self.wanted.get(name, "column") in ("whole", "vocabulary"):
            raise Refused(f"Job.tensor wants {name} {self.wanted[name]}")

    def _granted(self, tables: tuple[str, ...]) -> None:
        """J021 when a wish is not met."""
        have = {name: "column" for g in self.groups for name in g.columns} | {g.row: "row" for g in self.groups}
        have |= dict.fromkeys(tables, "vocabulary")
        problems = []
        for name, word in self.wanted.items():
            if have.get(name, "whole") != word:
                what = f'Job.tensor wants {name} as "{word}", which does not compute the same'
                fix = (f'tensor={{"{name}": "whole"}}',)
                problems.append(Problem("J021", what, why=self.reasons.get(name, ALONE), fix=fix))
        if problems:
            raise PlaitError(problems)

    def _whole(self, tables: tuple[str, ...]) -> tuple[tuple[str, float, str], ...]:
        """Modules with matrices that are not cut."""
        cut = {c.parameter for g in self.groups for c in g.cuts}
        cut |= {f"{name}.weight" for name in tables}
        total = sum(p.numel() for p in self.model.parameters())
        rows = []
        for name, module in self.model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
            size = sum(p.numel() for p in own if self.follow.parameters[id(p)] not in cut)
            if size and name not in tables:
                rows.append((name, size / total, self.reasons.get(name, ALONE)))
        return tuple(sorted(rows, key=lambda row: -row[1]))


def _wanted(tensor: Mapping[str, str], layers: list[str]) -> dict[str, str]:
    """What is wanted of each layer. J021 when a pattern names none."""
    problems = []
    for pattern in tensor:
        if not any(fnmatchcase(name, pattern) for name in layers):
            hint = did_you_mean(pattern, layers) if layers else "the model has no linear layer"
            problems.append(Problem("J021", f'Job.tensor: "{pattern}" names no layer        {hint}'))
    if problems:
        raise PlaitError(problems)
    return {name: word for pattern, word in tensor.items() for name in layers if fnmatchcase(name, pattern)}


def _in_trial(proposed: Iterable[ColumnRowPair]) -> Iterator[ColumnRowPair]:
    """The same. Refused where the job's own code fails while they are made, such as a hook that is given no gradient of an input."""
    try:
        yield from proposed
    except (Refused, PlaitError):
        raise
    except Exception as error:
        raise Refused(f"a trial of its code raised {in_a_line(error)[:120]}") from error


def _inside(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(f"{container}.")
