"""Records of unit inputs, outputs and their gradients during a proof, for locating a difference.

Full tensors would need as much memory as the model itself. The records are small linear projections instead: for each vector of a unit's
values, its products with two fixed vectors; for each gradient, weight and state, 16 fixed weighted sums. As both are linear, rows of parts
add up to the row of the full tensor. Values that differ by more than rounding have different rows. `proof/locate.py` compares the rows of
both sides, in the order of a training step.

Also here: data sets with the first or chosen samples of another, which record a digest of every sample read.
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
from plait.data.iterables import name_failing_samples
from plait.engine.engine import Engine
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.gradient_reducer import list_late_sums
from plait.parallel.rank_model import RankModel
from plait.parallel.spec import compute_shape, compute_shard_ranges
from plait.parallel.tensor.sequence.runtime import LazyGather, PartialSum
from plait.tensors import opaque_code
from plait.tensors.rows import Part, Ranges, full_ranges, make_full_part
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import FakeTensor, is_in_backward, tree_leaves

PRODUCTS, SUMS, PERIOD = 2, 16, 4093
"""Products kept of a vector; sums kept of a gradient or weight; rows in the table of element weights."""


@dataclass
class RecordedRows:
    """Rows of values by `step|what|name|call|leaf|micro-batch`, and the layout of each row (see `about`)."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, list[Any]] = field(default_factory=dict)
    """[first sample, samples, shape of the full tensor, sharded dim or −1, the rank's ranges of it]."""

    def save(self, path: Path) -> None:
        """Write the rows to a file."""
        rows = {k: t.contiguous().clone() for k, t in self.rows.items()} or {"": torch.zeros(1)}
        save_file(rows, path, {"about": json.dumps(self.about), "order": json.dumps(list(rows))})

    @staticmethod
    def load(path: Path) -> "RecordedRows":
        """Read the rows from a file of `save`."""
        with safe_open(path, "pt") as file:
            told = file.metadata()
            return RecordedRows({k: file.get_tensor(k) for k in json.loads(told["order"])}, json.loads(told["about"]))


def make_row_key(step: int, what: str, name: str, call: int = 0, leaf: int = 0, micro: int = 0) -> str:
    return f"{step}|{what}|{name}|{call}|{leaf}|{micro}"


@lru_cache(maxsize=64)
def _make_vectors(length: int) -> Tensor:
    """Two fixed vectors [length, PRODUCTS], with pseudo-random entries of 0.5 to 1.5 in size and mixed sign."""
    at = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    speed = torch.tensor([0.6180339887498949, 0.7548776662466927], dtype=torch.float64)
    return (0.5 + (at * speed).frac()) * (1 - 2 * ((at * speed * 3.7).frac() > 0.5).double())


@lru_cache(maxsize=1)
def _make_table() -> Tensor:
    at = torch.arange(1, PERIOD * SUMS + 1, dtype=torch.float64)
    return (0.5 + (at * 0.6180339887498949).frac()).view(PERIOD, SUMS)


def compute_products(t: Tensor, ranges: Ranges | None = None) -> Tensor:
    """Products of each vector along the last dim: [..., n] -> [..., PRODUCTS]. `ranges`: the part of the full vectors that `t` has."""
    t = t.detach().to("cpu", torch.float64)
    t = t.reshape(1, 1) if t.dim() == 0 else t.unsqueeze(-1) if t.dim() == 1 else t
    if ranges is None:
        return t @ _make_vectors(t.shape[-1])
    vectors = _make_vectors(max(first + length for first, length in ranges))
    return t @ torch.cat([vectors[first : first + length] for first, length in ranges])


def compute_sums(t: Tensor, shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> Tensor:
    """[SUMS] weighted sums over a part of a tensor of `shape`. Sums of parts add up to the sums of the full tensor."""
    if t.is_complex():
        t = t.real + 0.75 * t.imag  # linear, like all records
    flat, places = t.detach().to("cpu", torch.float64).reshape(-1), PERIOD * SUMS
    rest = prod(shape[1:])
    if ranges[1:] == full_ranges(shape[1:]) and (not shape or len(ranges[0]) == 1):
        start = ranges[0][0][0] * rest if shape else 0
        before = start % SUMS
        if before or (before + flat.numel()) % SUMS:
            flat = torch.nn.functional.pad(flat, (before, -(before + flat.numel()) % SUMS))
        rows, row = flat.view(-1, SUMS), start // SUMS % PERIOD
        head = rows[: PERIOD - row]
        total = (head * _make_table()[row : row + len(head)]).sum(0)
        blocks, rows = len(rows[len(head) :]) // PERIOD, rows[len(head) :]
        if blocks:
            total += (rows[: blocks * PERIOD].view(-1, PERIOD, SUMS).sum(0) * _make_table()).sum(0)
        rows = rows[blocks * PERIOD :]
        return total + (rows * _make_table()[: len(rows)]).sum(0)
    at = torch.zeros(1, dtype=torch.int64)
    for dim, held in enumerate(ranges):
        index = torch.cat([torch.arange(first, first + length) for first, length in held])
        at = (at[:, None] + index * prod(shape[dim + 1 :])).reshape(-1)
    return torch.zeros(SUMS, dtype=torch.float64).index_add_(0, at % SUMS, flat * _make_table().view(-1)[at % places])


PARTIAL_SUM_DIM = -2
"""Marks, in place of the sharded dim, a tensor of which each rank has a partial sum."""
SHARDED_TYPES = (SequenceShard, ShardedTensor, LazyGather, PartialSum)
"""Types that stand for a full tensor of which a rank has a part."""


def _get_local_part(leaf: Tensor) -> tuple[Tensor, int, Ranges | None]:
    """(this rank's part, the sharded dim or −1, its ranges along that dim)."""
    if isinstance(leaf, PartialSum):
        return leaf.local, PARTIAL_SUM_DIM, None
    if isinstance(leaf, LazyGather):
        return leaf.local, leaf.shard_dim, leaf.rows.ranks[leaf.by.group.rank()]
    if isinstance(leaf, (SequenceShard, ShardedTensor)):
        return leaf.local, leaf.shard_dim, leaf.rows.ranks[leaf.rank]
    return leaf, -1, None


def _iterate_tensors(tree: object) -> Iterator[tuple[int, Tensor]]:
    """Yield (number, tensor) for the tensors of a tree that have values."""
    for i, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, SHARDED_TYPES):
            yield i, leaf
        elif isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and type(leaf) in (Tensor, nn.Parameter):
            yield from ((i, leaf),) if leaf.numel() and not leaf.is_complex() else ()


class CallTensor(NamedTuple):
    """One tensor of one call of a unit, in one micro-batch."""

    call: int
    tensor: int
    micro: int


class ActivationRecorder(RecordedRows):
    """Records the activations of a model on one side. `units`: names of the recorded modules; `micro`: number of the current micro-batch.

    If `units` is None, only samples, gradients and weights are recorded.
    """

    def __init__(self, model: nn.Module, units: Iterable[str] | None, micro: Callable[[], int] = lambda: 0):
        super().__init__()
        self.model, self.micro, self.step = model, micro, 0
        self.units = {name: model.get_submodule(name) for name in units or ()}
        self.samples: dict[int, tuple[int, int]] = {}
        """Micro-batch -> its first sample in the batch, and the number of samples."""
        self.is_received: Callable[[], bool] = lambda: False
        """True if the last unit belongs to another stage, and its value was received in a message."""
        self.get_output: Callable[[Any], Any] = lambda output: output
        """Returns the output through which gradients flow, if the model's code got a copy of it."""
        self.layout: Callable[[str, Tensor], PartLayout] = lambda name, t: PartLayout.from_full(t)
        self.gathers_weights = False
        """True if the weights of units are gathered for each pass."""
        self._calls: dict[str, int] = {}
        self._hooked: set[int] = set()
        self._inner_products: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self.closed = False
        # If the job compiles its model, hooks run between graphs: the recorder is not part of the model.
        if units is not None and not opaque_code.is_scripted(model):  # a scripted model takes no hooks and is no unit
            self._hooks.append(model.register_forward_pre_hook(torch.compiler.disable(self._reset_calls), prepend=True))
            self._hooks.append(model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._hook_parameters(""))))
        for name, module in self.units.items():
            self._hooks += [
                module.register_forward_pre_hook(torch.compiler.disable(partial(self._record_input, name)), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(torch.compiler.disable(lambda *_, name=name: self._record_weights(name))),
                module.register_forward_hook(torch.compiler.disable(partial(self._record_output, name))),
            ]

    def begin_batch(self, step: int, micros: list[tuple[int, int, Any]]) -> None:
        """Start a step with these micro-batches: (first sample, samples, inputs and targets) of each."""
        if self.closed:
            return
        self.step, self.samples = step, {i: (first, count) for i, (first, count, _) in enumerate(micros) if count}
        for micro in self.samples:
            for i, leaf in _iterate_tensors(micros[micro][2]):
                self._record("data", "", CallTensor(0, i, micro), leaf, _get_local_part(leaf)[0].nan_to_num(0.125, 1024.0, -1024.0))

    def watch_recompute(self) -> None:
        """Record whether recomputation in backward gives the same values as the first forward."""
        for unit, module in self.units.items():
            for path, inner in opaque_code.iter_unscripted(module):
                if path and not any(True for _ in inner.children()):
                    self._hooks.append(inner.register_forward_hook(torch.compiler.disable(partial(self._check_recompute, unit))))

    def close(self) -> None:
        """Stop recording, and ignore later calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.samples, self.closed = [], {}, True

    # — hooks —

    def _reset_calls(self, *_: Any) -> None:
        if not is_in_backward():
            self._calls, self._inner_products = {}, {}

    def _is_off(self) -> bool:
        return is_in_backward() or not torch.is_grad_enabled() or self.micro() not in self.samples

    def _record_input(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_off():
            for i, leaf in _iterate_tensors((args, kwargs)):
                self._record("in", name, CallTensor(self._calls.get(name, 0), i, self.micro()), leaf)

    def _record_output(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._is_off():
            return
        call, micro, received = self._calls.get(name, 0), self.micro(), self.is_received()
        self._calls[name] = call + 1
        for i, leaf in _iterate_tensors(output if received else self.get_output(output)):
            at = CallTensor(call, i, micro)
            self._record("got" if received else "out", name, at, leaf)
            local = _get_local_part(leaf)[0]
            if local.requires_grad and local.is_floating_point():
                what = "got back" if received else "back"
                local.register_hook(partial(self._record_gradient, what=what, name=name, at=at, step=self.step, leaf=leaf))

    def _record_gradient(
        self, gradient: Tensor, *, what: str, name: str, at: CallTensor, step: int, leaf: Tensor
    ) -> None:
        if self.step == step and make_row_key(step, what, name, *at) not in self.rows:
            self._record(what, name, at, leaf, gradient)
            self._record_weights(name, "used back")

    def _record(self, what: str, name: str, at: CallTensor, leaf: Tensor, value: Tensor | None = None) -> None:
        """Record a tensor of a unit, or its gradient."""
        local, cut, ranges = _get_local_part(leaf)
        value = local if value is None else value
        if not value.numel():
            return
        last = cut >= 0 and cut == value.dim() - 1
        known = make_row_key(self.step, what, name, *at)
        self.rows[known] = compute_products(value, ranges if last else None)
        self.about[known] = [*self.samples.get(at.micro, (0, 0)), list(leaf.shape), cut, ranges]

    def _check_recompute(self, unit: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        found = [compute_products(_get_local_part(leaf)[0]) for _, leaf in _iterate_tensors(output) if leaf.is_floating_point()]
        if not isinstance(output, Tensor) or not found:
            return
        known = f"{self.micro()} {id(module)}"
        if not is_in_backward():
            self._inner_products[known] = found[0]
        elif known in self._inner_products and not torch.equal(self._inner_products[known], found[0]):
            self.rows.setdefault(make_row_key(self.step, "again", unit, 0, 0, self.micro()), torch.ones(1))

    # — parameters —

    def _iterate_parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p in module.parameters():
            if not hasattr(p, "placements") and not isinstance(p, FakeTensor) and id(p) in names:
                yield names[id(p)], p

    def _record_weights(self, name: str, what: str = "used") -> None:
        """Record the gathered weights that a unit uses."""
        if what == "used" and self._is_off():
            return
        self._hook_parameters(name)
        if self.gathers_weights and name:
            for found, p in self._iterate_parameters(self.units[name]):
                layout = self.layout(found, p)
                if tuple(p.shape) == layout.local:
                    row = compute_sums(p, layout.shape, layout.ranges)
                    self.rows[make_row_key(self.step, what, found, 0, 0, self.micro())] = row

    def _hook_parameters(self, name: str) -> None:
        """Record gradients of the parameters that a module has now."""
        module = self.units.get(name, self.model)
        if id(module) in self._hooked or is_in_backward():
            return
        self._hooked.add(id(module))
        for found, p in self._iterate_parameters(module):
            if p.requires_grad and id(p) not in self._hooked:
                self._hooked.add(id(p))
                self._hooks.append(p.register_hook(partial(self._record_contribution, found)))

    def _record_contribution(self, name: str, gradient: Tensor) -> None:
        layout, known = self.layout(name, gradient), make_row_key(self.step, "gave", name, 0, 0, self.micro())
        if tuple(gradient.shape) == layout.local and type(gradient) is Tensor:
            rows = layout.project_parts(gradient)
            self.rows[known] = self.rows[known] + rows if known in self.rows else rows

    def record_tensors(self, what: str, found: dict[str, Tensor], parts: dict[str, Part] | None = None) -> None:
        """Record gradients, weights or states (`name (optimizer key)`), by parameter name. `parts`: this rank's parts; None for full tensors."""
        if self.closed:
            return
        for name, t in found.items():
            plain, _, state = name.partition(" (")
            part = make_full_part(found.get(plain, t)) if parts is None else parts.get(plain)
            if part is None or not t.is_floating_point():
                continue
            if state and tuple(t.shape) == part.shape:  # also on a rank that has a part and updates the full tensor
                part = make_full_part(t)
            held = tuple(t.shape) == compute_shape(part.ranges)
            row = compute_sums(t, part.shape, part.ranges) if held else t.detach().double().reshape(-1)[:1]
            self.rows[make_row_key(self.step, f"state {state[:-1]}" if state else what, plain)] = row.cpu()

    def record_gradients(self) -> None:
        """Record the gradients of an unsharded model."""
        self.record_tensors("sum", {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})

    def record_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the weights and optimizer state of an unsharded model after an update."""
        named = dict(self.model.named_parameters())
        found: dict[str, Tensor] = {**named}
        for name, p in named.items():
            state = optimizer.state.get(p, {})
            found |= {f"{name} (optimizer {k})": v for k, v in state.items() if isinstance(v, Tensor)}
        self.record_tensors("weight", found)

    def export(self, rank_model: RankModel, path: Path) -> dict[str, Any]:
        """Write the rows to a file, stop recording, and return the layout needed to merge rows of several ranks.

        `given`: the part of a gradient that this rank computes; `shard`: the part of the sum that it keeps; `partial`: parameters whose
        gradient is a partial sum, with the ranks that have the other parts.
        """
        self.save(path)
        self.close()
        layouts = {name: self.layout(name, p) for name, p in rank_model.params.items()}
        shards = {name: layout.kept_part for name, layout in layouts.items() if layout.parts > 1}
        given = {name: str(layout.ranges) for name, layout in layouts.items()}
        late = list_late_sums(rank_model.shard_plan, rank_model.mesh, rank_model.params)
        partial = [[list(one.names), dist.get_process_group_ranks(one.group)] for one in late]
        return {"given": given, "shard": shards, "partial": partial}


@dataclass(frozen=True)
class PartLayout:
    """Layout of a rank's gradient of a parameter before reduction, and how the sum is sharded."""

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    dim: int = 0
    parts: int = 1
    kept_part: int = 0
    """Number of the part that this rank keeps."""

    @staticmethod
    def from_full(t: Tensor) -> "PartLayout":
        """Layout of an unsharded tensor."""
        return PartLayout(tuple(t.shape), full_ranges(tuple(t.shape)))

    @staticmethod
    def from_rank_model(rank_model: RankModel, name: str) -> "PartLayout":
        """Layout under a rank's plan."""
        at, spec = rank_model.mesh.coordinates, rank_model.shard_plan.specs[name]
        shard, ranges = spec.find_scatter(at), spec.ranges(at, at_rest=False)
        if shard is None:
            return PartLayout(spec.shape, ranges)
        split, dim = shard
        return PartLayout(spec.shape, ranges, dim, split.ranks, split.index(at))

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        return compute_shape(self.ranges)

    def project_parts(self, t: Tensor) -> Tensor:
        """Rows of the parts into which the sum is sharded: [parts, SUMS]."""
        if self.parts == 1:
            return compute_sums(t, self.shape, self.ranges)[None]
        shards = [compute_shard_ranges(self.ranges, self.dim, self.parts, k) for k in range(self.parts)]
        pieces = t.split([compute_shape(shard)[self.dim] for shard in shards], self.dim)
        return torch.stack([compute_sums(piece, self.shape, shard) for piece, shard in zip(pieces, shards)])


def make_rank_recorder(engine: Engine) -> ActivationRecorder:
    """Make the recorder of a rank of a split run. Units that are compiled or run in threads are not recorded."""
    rank_model, plan = engine.rank_model, engine.plan
    hidden = plan.compile or plan.processes == "one"
    notes = ActivationRecorder(
        rank_model.module,
        None if hidden else [unit.name for unit in rank_model.global_sketch.units],
        lambda: engine.passes.current_micro_batch,
    )
    notes.layout = lambda name, t: PartLayout.from_rank_model(rank_model, name)
    notes.gathers_weights = plan.shards > 1
    if plan.activation_checkpointing != "none":
        notes.watch_recompute()
    if rank_model.techniques.pipeline is not None:
        stages = rank_model.techniques.pipeline.stages

        def is_received() -> bool:
            run = stages.current
            return run is not None and run.call_count > 0 and run.path.partition.owner[run.call_count - 1] != run.stage

        def get_output(output: object) -> Any:
            run = stages.current
            return output if run is None else run.kept.get(run.call_count - 1, output)

        notes.is_received, notes.get_output = is_received, get_output
    return notes


Digest = Callable[[object], Any] | None


class ChosenSamples:
    """Samples `ids` of an indexed data set, numbered from 0."""

    sketched_beside: Callable[[], list[Any]]
    """Optional: returns the samples with which the samples of a sketch are collated."""

    def __init__(self, data: MapStyle, ids: Sequence[int], digest: Digest = None):
        self.data, self.ids, self.digest, self.seen = data, ids, digest, dict[int, Any]()
        if hasattr(data, "collate"):
            self.collate = data.collate

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> object:
        with name_failing_samples([self.ids[i]], "of the data"):
            sample = self.data[self.ids[i]]
        if self.digest is not None:
            self.seen[i] = self.digest(sample)
        return sample


class FirstSamples:
    """The first samples of an iterable (None: all). It is not split by rank, even if the iterable is."""

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


def take_first(data: Data, length: int | None = None, digest: Digest = None) -> ChosenSamples | FirstSamples:
    """The first `length` samples of a data set of either kind, or all of them. `seen` has the digests of the samples read."""
    if is_map(data):
        return ChosenSamples(data, range(len(data) if length is None else min(length, len(data))), digest)
    return FirstSamples(data, length, digest)


def digest_sample(sample: object) -> float:
    """Number that changes if the sample changes."""
    total = 0.0
    for k, leaf in enumerate(tree_leaves(sample)):
        flat = _flatten_values(leaf).nan_to_num(0.125, 1024.0, -1024.0)  # a missing or masked value equals itself
        total += float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64).sin()).sum()) * (k + 1)
    return total


def _flatten_values(leaf: object) -> Tensor:
    """Values of a leaf as one vector: bytes of text, or the attributes of an object. Empty for None and for objects without values."""
    if isinstance(leaf, (str, bytes)):
        leaf = [*(leaf.encode() if isinstance(leaf, str) else leaf)]
    try:
        tensor = torch.as_tensor(leaf if isinstance(leaf, Tensor) else np.asarray(leaf))
    except (TypeError, ValueError):  # not an array
        inner = [_flatten_values(value) for value in tree_leaves(getattr(leaf, "__dict__", {})) if value is not leaf]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *inner])
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def get_seen_digests(data: object) -> dict[int, Any]:
    """Digests of the samples read so far, by sample number."""
    assert isinstance(data, (ChosenSamples, FirstSamples))
    return data.seen
