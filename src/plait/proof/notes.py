"""What each unit was given and returned, and what came back for it, noted while a proof runs: where a difference begins.

Whole tensors would take as much memory as the model itself. A row of numbers is kept instead: of each vector of a unit's
values its products with two fixed vectors, of each gradient, weight and state 16 sums over fixed parts of it. Both are
linear, so rows of parts add up to the row of a whole; and what differs by more than rounding has another row. `proof/locate.py`
compares the rows of both sides, in the order of a training step.

The first or some chosen samples of a data set, as a data set that notes a digest of whatever is read of it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.data.batch import Data, MapStyle, is_map
from plait.data.iterables import naming_samples
from plait.engine.engine import Engine
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.gradient_reducer import late_sums
from plait.parallel.rank_model import RankModel
from plait.parallel.spec import shard_of, sizes
from plait.parallel.tensor.sequence.runtime import LazyGather, PartialSum
from plait.tensors import opaque_code
from plait.tensors.rows import Part, Ranges, everything, whole
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import FakeTensor, in_backward, tree_leaves

PRODUCTS, SUMS, PERIOD = 2, 16, 4093
"""Numbers kept of a vector; of a gradient or weight; rows of the table of weights of its elements."""


@dataclass
class UnitNotes:
    """Rows of numbers, by `step|what|name|call|leaf|micro-batch`, and what is to be known of each (see `about`)."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, list[Any]] = field(default_factory=dict)
    """[first sample, samples, shape of the whole, dim that is cut or −1, the rank's ranges of it]."""

    def save(self, path: Path) -> None:
        """Write the rows into a file."""
        rows = {k: t.contiguous().clone() for k, t in self.rows.items()} or {"": torch.zeros(1)}
        save_file(rows, path, {"about": json.dumps(self.about), "order": json.dumps(list(rows))})

    @staticmethod
    def load(path: Path) -> "UnitNotes":
        """The rows of a file that `save` wrote."""
        with safe_open(path, "pt") as file:
            told = file.metadata()
            return UnitNotes({k: file.get_tensor(k) for k in json.loads(told["order"])}, json.loads(told["about"]))


def key(step: int, what: str, name: str, call: int = 0, leaf: int = 0, micro: int = 0) -> str:
    return f"{step}|{what}|{name}|{call}|{leaf}|{micro}"


@lru_cache(maxsize=64)
def _vectors(length: int) -> Tensor:
    """Two fixed vectors: [length, PRODUCTS], of numbers between 0.5 and 1.5 without a pattern, every other sign changed."""
    at = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    speed = torch.tensor([0.6180339887498949, 0.7548776662466927], dtype=torch.float64)
    return (0.5 + (at * speed).frac()) * (1 - 2 * ((at * speed * 3.7).frac() > 0.5).double())


@lru_cache(maxsize=1)
def _table() -> Tensor:
    at = torch.arange(1, PERIOD * SUMS + 1, dtype=torch.float64)
    return (0.5 + (at * 0.6180339887498949).frac()).view(PERIOD, SUMS)


def products(t: Tensor, ranges: Ranges | None = None) -> Tensor:
    """Of each vector along the last dim [..., n] its products: [..., PRODUCTS]. `ranges`: which places of the whole it has."""
    t = t.detach().to("cpu", torch.float64)
    t = t.reshape(1, 1) if t.dim() == 0 else t.unsqueeze(-1) if t.dim() == 1 else t
    if ranges is None:
        return t @ _vectors(t.shape[-1])
    vectors = _vectors(max(first + length for first, length in ranges))
    return t @ torch.cat([vectors[first : first + length] for first, length in ranges])


def sums(t: Tensor, shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> Tensor:
    """[SUMS] weighted sums over a part of a tensor of `shape`; those of parts add up to those of the whole."""
    if t.is_complex():
        t = t.real + 0.75 * t.imag  # linear, as all that is kept of a tensor
    flat, places = t.detach().to("cpu", torch.float64).reshape(-1), PERIOD * SUMS
    rest = prod(shape[1:])
    if ranges[1:] == everything(shape[1:]) and (not shape or len(ranges[0]) == 1):
        start = ranges[0][0][0] * rest if shape else 0
        before = start % SUMS
        if before or (before + flat.numel()) % SUMS:
            flat = torch.nn.functional.pad(flat, (before, -(before + flat.numel()) % SUMS))
        rows, row = flat.view(-1, SUMS), start // SUMS % PERIOD
        head = rows[: PERIOD - row]
        total = (head * _table()[row : row + len(head)]).sum(0)
        blocks, rows = len(rows[len(head) :]) // PERIOD, rows[len(head) :]
        if blocks:
            total += (rows[: blocks * PERIOD].view(-1, PERIOD, SUMS).sum(0) * _table()).sum(0)
        rows = rows[blocks * PERIOD :]
        return total + (rows * _table()[: len(rows)]).sum(0)
    at = torch.zeros(1, dtype=torch.int64)
    for dim, held in enumerate(ranges):
        index = torch.cat([torch.arange(first, first + length) for first, length in held])
        at = (at[:, None] + index * prod(shape[dim + 1 :])).reshape(-1)
    return torch.zeros(SUMS, dtype=torch.float64).index_add_(0, at % SUMS, flat * _table().view(-1)[at % places])


SHARE = -2
"""Stands for the dim that is cut of a tensor of which each rank has a share of a sum."""
HOLLOW = (SequenceShard, ShardedTensor, LazyGather, PartialSum)
"""What stands for a whole of which a rank has a part."""


def _held(leaf: Tensor) -> tuple[Tensor, int, Ranges | None]:
    """(this rank's numbers, the dim along which they are part of a whole or −1, its places along it)."""
    if isinstance(leaf, PartialSum):
        return leaf.local, SHARE, None
    if isinstance(leaf, LazyGather):
        return leaf.local, leaf.cut, leaf.rows.ranks[leaf.by.group.rank()]
    if isinstance(leaf, (SequenceShard, ShardedTensor)):
        return leaf.local, leaf.cut, leaf.rows.ranks[leaf.rank]
    return leaf, -1, None


def _tensors(tree: object) -> Iterator[tuple[int, Tensor]]:
    """The numbered tensors of a tree that have numbers."""
    for i, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, HOLLOW):
            yield i, leaf
        elif isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and type(leaf) in (Tensor, nn.Parameter):
            yield from ((i, leaf),) if leaf.numel() and not leaf.is_complex() else ()


class CallTensor(NamedTuple):
    """Which tensor of which call of a unit, by number, and in which micro-batch."""

    call: int
    tensor: int
    micro: int


class Notes(UnitNotes):
    """Notes what a model does on one side. `units`: names of the modules that are looked at; `micro`: the micro-batch that runs.

    Without `units` (None) it looks at no module, and so at nothing but samples, gradients and weights.
    """

    def __init__(self, model: nn.Module, units: Iterable[str] | None, micro: Callable[[], int] = lambda: 0):
        super().__init__()
        self.model, self.micro, self.step = model, micro, 0
        self.units = {name: model.get_submodule(name) for name in units or ()}
        self.samples: dict[int, tuple[int, int]] = {}
        """Micro-batch -> its first sample in the batch, and how many."""
        self.received: Callable[[], bool] = lambda: False
        """Whether the unit that ran last is another stage's, and its value came by a message."""
        self.kept: Callable[[Any], Any] = lambda output: output
        """What gradients come back for, where the model's code gets a copy of what a unit returned."""
        self.layout: Callable[[str, Tensor], PartLayout] = lambda name, t: PartLayout.whole(t)
        self.gathers = False
        """Units' weights are put together from parts for each pass."""
        self._calls: dict[str, int] = {}
        self._met: set[int] = set()
        self._inside: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self.closed = False
        # Hooks run between graphs if the job compiles its model: the recorder is no part of the model.
        if units is not None and not opaque_code.is_scripted(model):  # it takes no hooks, and is no unit either
            self._hooks.append(model.register_forward_pre_hook(torch.compiler.disable(self._begin), prepend=True))
            self._hooks.append(model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._listen(""))))
        for name, module in self.units.items():
            self._hooks += [
                module.register_forward_pre_hook(torch.compiler.disable(partial(self._enter, name)), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(torch.compiler.disable(lambda *_, name=name: self._use(name))),
                module.register_forward_hook(torch.compiler.disable(partial(self._leave, name))),
            ]

    def batch(self, step: int, micros: list[tuple[int, int, Any]]) -> None:
        """A step begins, with these micro-batches: (first sample, samples, inputs and targets) of each."""
        if self.closed:
            return
        self.step, self.samples = step, {i: (first, count) for i, (first, count, _) in enumerate(micros) if count}
        for micro in self.samples:
            for i, leaf in _tensors(micros[micro][2]):
                self._put("data", "", CallTensor(0, i, micro), leaf, _held(leaf)[0].nan_to_num(0.125, 1024.0, -1024.0))

    def compare_again(self) -> None:
        """Note where what runs twice, forward and again in backward, computes something else: for recomputation."""
        for unit, module in self.units.items():
            for path, inner in opaque_code.plain(module):
                if path and not any(True for _ in inner.children()):
                    self._hooks.append(inner.register_forward_hook(torch.compiler.disable(partial(self._again, unit))))

    def close(self) -> None:
        """Note nothing more, whatever is told."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.samples, self.closed = [], {}, True

    # — hooks —

    def _begin(self, *_: Any) -> None:
        if not in_backward():
            self._calls, self._inside = {}, {}

    def _off(self) -> bool:
        return in_backward() or not torch.is_grad_enabled() or self.micro() not in self.samples

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._off():
            for i, leaf in _tensors((args, kwargs)):
                self._put("in", name, CallTensor(self._calls.get(name, 0), i, self.micro()), leaf)

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._off():
            return
        call, micro, received = self._calls.get(name, 0), self.micro(), self.received()
        self._calls[name] = call + 1
        for i, leaf in _tensors(output if received else self.kept(output)):
            at = CallTensor(call, i, micro)
            self._put("got" if received else "out", name, at, leaf)
            local = _held(leaf)[0]
            if local.requires_grad and local.is_floating_point():
                what = "got back" if received else "back"
                local.register_hook(partial(self._back, what=what, name=name, at=at, step=self.step, leaf=leaf))

    def _back(
        self, gradient: Tensor, *, what: str, name: str, at: CallTensor, step: int, leaf: Tensor
    ) -> None:
        if self.step == step and key(step, what, name, *at) not in self.rows:
            self._put(what, name, at, leaf, gradient)
            self._use(name, "used back")

    def _put(self, what: str, name: str, at: CallTensor, leaf: Tensor, value: Tensor | None = None) -> None:
        """Note a tensor of a unit, or its gradient."""
        local, cut, ranges = _held(leaf)
        value = local if value is None else value
        if not value.numel():
            return
        last = cut >= 0 and cut == value.dim() - 1
        known = key(self.step, what, name, *at)
        self.rows[known] = products(value, ranges if last else None)
        self.about[known] = [*self.samples.get(at.micro, (0, 0)), list(leaf.shape), cut, ranges]

    def _again(self, unit: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        found = [products(_held(leaf)[0]) for _, leaf in _tensors(output) if leaf.is_floating_point()]
        if not isinstance(output, Tensor) or not found:
            return
        known = f"{self.micro()} {id(module)}"
        if not in_backward():
            self._inside[known] = found[0]
        elif known in self._inside and not torch.equal(self._inside[known], found[0]):
            self.rows.setdefault(key(self.step, "again", unit, 0, 0, self.micro()), torch.ones(1))

    # — parameters —

    def _named(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p in module.parameters():
            if not hasattr(p, "placements") and not isinstance(p, FakeTensor) and id(p) in names:
                yield names[id(p)], p

    def _use(self, name: str, what: str = "used") -> None:
        """Note the weights as a unit uses them, where they were gathered."""
        if what == "used" and self._off():
            return
        self._listen(name)
        if self.gathers and name:
            for found, p in self._named(self.units[name]):
                layout = self.layout(found, p)
                if tuple(p.shape) == layout.local:
                    row = sums(p, layout.shape, layout.ranges)
                    self.rows[key(self.step, what, found, 0, 0, self.micro())] = row

    def _listen(self, name: str) -> None:
        """From now on note the gradients that come to the parameters a module has now."""
        module = self.units.get(name, self.model)
        if id(module) in self._met or in_backward():
            return
        self._met.add(id(module))
        for found, p in self._named(module):
            if p.requires_grad and id(p) not in self._met:
                self._met.add(id(p))
                self._hooks.append(p.register_hook(partial(self._gave, found)))

    def _gave(self, name: str, gradient: Tensor) -> None:
        layout, known = self.layout(name, gradient), key(self.step, "gave", name, 0, 0, self.micro())
        if tuple(gradient.shape) == layout.local and type(gradient) is Tensor:
            rows = layout.parted(gradient)
            self.rows[known] = self.rows[known] + rows if known in self.rows else rows

    def tensors(self, what: str, found: dict[str, Tensor], parts: dict[str, Part] | None = None) -> None:
        """Note gradients, weights or states (`name (optimizer key)`), by the parameter's name; of which parts, if not wholes."""
        if self.closed:
            return
        for name, t in found.items():
            plain, _, state = name.partition(" (")
            part = whole(found.get(plain, t)) if parts is None else parts.get(plain)
            if part is None or not t.is_floating_point():
                continue
            if state and tuple(t.shape) == part.shape:  # also of a rank that has a part and updates the whole
                part = whole(t)
            held = tuple(t.shape) == sizes(part.ranges)
            row = sums(t, part.shape, part.ranges) if held else t.detach().double().reshape(-1)[:1]
            self.rows[key(self.step, f"state {state[:-1]}" if state else what, plain)] = row.cpu()

    def gradients(self) -> None:
        """Note the gradients of a whole model."""
        self.tensors("sum", {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the weights of a whole model after an update, and the optimizer's state."""
        named = dict(self.model.named_parameters())
        found: dict[str, Tensor] = {**named}
        for name, p in named.items():
            state = optimizer.state.get(p, {})
            found |= {f"{name} (optimizer {k})": v for k, v in state.items() if isinstance(v, Tensor)}
        self.tensors("weight", found)

    def told(self, rank_model: RankModel, path: Path) -> dict[str, Any]:
        """Write the rows into a file, note nothing more, and tell what puts those of several ranks together.

        `given`: which part of a gradient this rank finds; `shard`: which part of the sum over the ranks it keeps; `partial`:
        parameters whose gradient is a share of a sum, and the ranks that have the others.
        """
        self.save(path)
        self.close()
        layouts = {name: self.layout(name, p) for name, p in rank_model.params.items()}
        shards = {name: layout.mine for name, layout in layouts.items() if layout.parts > 1}
        given = {name: str(layout.ranges) for name, layout in layouts.items()}
        late = late_sums(rank_model.table, rank_model.mesh, rank_model.params)
        partial = [[list(one.names), dist.get_process_group_ranks(one.group)] for one in late]
        return {"given": given, "shard": shards, "partial": partial}


@dataclass(frozen=True)
class PartLayout:
    """What a rank's gradient of a parameter is before it is summed: a part of a whole, and how the sum is cut again."""

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    dim: int = 0
    parts: int = 1
    mine: int = 0
    """Which of the parts this rank keeps."""

    @staticmethod
    def whole(t: Tensor) -> "PartLayout":
        """All of a tensor."""
        return PartLayout(tuple(t.shape), everything(tuple(t.shape)))

    @staticmethod
    def of(rank_model: RankModel, name: str) -> "PartLayout":
        """As a rank's plan has it."""
        at, spec = rank_model.mesh.at, rank_model.table.specs[name]
        shard, ranges = spec.shard(at), spec.ranges(at, at_rest=False)
        if shard is None:
            return PartLayout(spec.shape, ranges)
        split, dim = shard
        return PartLayout(spec.shape, ranges, dim, split.ranks, split.index(at))

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what the rank has."""
        return sizes(self.ranges)

    def parted(self, t: Tensor) -> Tensor:
        """Rows of the parts that the sum is cut into: [parts, SUMS]."""
        if self.parts == 1:
            return sums(t, self.shape, self.ranges)[None]
        shards = [shard_of(self.ranges, self.dim, self.parts, k) for k in range(self.parts)]
        pieces = t.split([sizes(shard)[self.dim] for shard in shards], self.dim)
        return torch.stack([sums(piece, self.shape, shard) for piece, shard in zip(pieces, shards)])


def of_rank(engine: Engine) -> Notes:
    """Notes of a rank of a split run. Units of modules that are compiled, or run in threads, are not looked at."""
    rank_model, plan = engine.rank_model, engine.plan
    hidden = plan.compile or plan.processes == "one"
    notes = Notes(rank_model.module, None if hidden else [unit.name for unit in rank_model.whole_sketch.units], lambda: engine.passes.at)
    notes.layout = lambda name, t: PartLayout.of(rank_model, name)
    notes.gathers = plan.shards > 1
    if plan.activation_checkpointing != "none":
        notes.compare_again()
    if rank_model.techniques.pipeline is not None:
        stages = rank_model.techniques.pipeline.stages

        def received() -> bool:
            run = stages.current
            return run is not None and run.number > 0 and run.path.cut.owner[run.number - 1] != run.stage

        def kept(output: object) -> Any:
            run = stages.current
            return output if run is None else run.kept.get(run.number - 1, output)

        notes.received, notes.kept = received, kept
    return notes


Digest = Callable[[object], Any] | None


class ChosenSamples:
    """Samples of a data set that is read by index: those of `ids`, numbered from 0."""

    sketched_beside: Callable[[], list[Any]]
    """What a sketch's samples are put together with, where that is given."""

    def __init__(self, data: MapStyle, ids: Sequence[int], digest: Digest = None):
        self.data, self.ids, self.digest, self.seen = data, ids, digest, dict[int, Any]()
        if hasattr(data, "collate"):
            self.collate = data.collate

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> object:
        with naming_samples([self.ids[i]], "of the data"):
            sample = self.data[self.ids[i]]
        if self.digest is not None:
            self.seen[i] = self.digest(sample)
        return sample


class FirstSamples:
    """The first samples of an iterable (None: all). It has no shares for ranks, even where the iterable has."""

    sketched_beside: Callable[[], list[Any]]

    def __init__(self, data: Data, length: int | None, digest: Digest = None):
        self.data, self.length, self.digest, self.seen = data, length, digest, dict[int, Any]()
        for name in ("collate", "set_epoch"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def __iter__(self) -> Iterator[object]:
        for i, sample in enumerate(islice(iter(self.data), self.length)):
            if self.digest is not None:
                self.seen[i] = self.digest(sample)
            yield sample


def first_of(data: Data, length: int | None = None, digest: Digest = None) -> ChosenSamples | FirstSamples:
    """The first `length` samples of a data set of either kind, or all of them; `seen` has the digests of what was read."""
    if is_map(data):
        return ChosenSamples(data, range(len(data) if length is None else min(length, len(data))), digest)
    return FirstSamples(data, length, digest)


def sample_digest(sample: object) -> float:
    """A number that changes when a sample does."""
    total = 0.0
    for k, leaf in enumerate(tree_leaves(sample)):
        flat = _values(leaf).nan_to_num(0.125, 1024.0, -1024.0)  # what is missing or masked equals itself
        total += float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64).sin()).sum()) * (k + 1)
    return total


def _values(leaf: object) -> Tensor:
    """A leaf's values in one row: text as its bytes, an object as what its attributes hold. None, and what has no values, has none."""
    if isinstance(leaf, (str, bytes)):
        leaf = [*(leaf.encode() if isinstance(leaf, str) else leaf)]
    try:
        tensor = torch.as_tensor(leaf if isinstance(leaf, Tensor) else np.asarray(leaf))
    except (TypeError, ValueError):  # no array of numbers
        inner = [_values(value) for value in tree_leaves(getattr(leaf, "__dict__", {})) if value is not leaf]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *inner])
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def seen_in(data: object) -> dict[int, Any]:
    """Digests of the samples that were read of such data, by number."""
    assert isinstance(data, (ChosenSamples, FirstSamples))
    return data.seen
