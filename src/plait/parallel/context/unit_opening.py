"""Units in which positions interact by other code than torch's attention: only the needed rows are gathered.

Examples are attention that is written out, a convolution, a recurrence, or a norm over positions. The unit's own code computes
these, and on a rank's rows alone the result would be wrong. Modules that compute every position separately run on this rank's
rows. The code around them runs on a `SequenceShard`, a tensor with the shape of the full sequence. Position-wise functions
compute this rank's rows; other functions gather the rows that they need. For attention that is written out, these are keys and
values. So a rank computes only the scores of its own queries, under the masks and biases that the unit's code makes for the full
sequence. Some modules cannot take such a tensor (compiled by `torch.jit`, or a `torch.autograd.Function`). They run on the full
sequence on every rank.

This is checked before training, in float64 and on one device. The unit runs once with all rows as a `SequenceShard`, and the
gathered tensors are recorded. Then it runs on each rank's rows, with the recorded tensors as the results of gathers. It must
gather the same tensors, and return its rows of the output.

In such a unit, all modules get tensors of the full shape. A mixture of experts cannot, because its routing depends on values. If
a module without attention stops because it needs all rows, it gets plain rows instead (`row_modules`). Its output becomes a
`SequenceShard` again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.model.sketch import Sketch
from plait.parallel.context.attention import (
    AttentionBackend,
    AttentionCall,
    FullAttention,
    ShardedAttention,
    compute_attention,
    max_relative_diff,
)
from plait.parallel.context.row_run import (
    call_on_rows,
    clone_arguments,
    copy_float64,
    find_lengths,
    run_on_rows,
    shard_arguments,
    to_float64,
)
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import Arguments, At, SequenceLayout, SequencePlan, UnitPlan, make_sequence_error
from plait.tensors.module_state import bind_forward
from plait.tensors.rows import Rows, RowsPlusFull, make_dense
from plait.tensors.torch_private import BatchNormBase, dataclass_leaves, leaves_with_paths, tree_map, tree_map_only
from plait.tensors.trees import iter_backward_nodes


def use_plain_rows(module: nn.Module) -> None:
    """Let this module run on plain rows from now on."""
    module.forward = partial(_forward_on_rows, bind_forward(module))  # pyrefly: ignore[bad-assignment]


def _forward_on_rows(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = [leaf for leaf in dataclass_leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
    if not known:
        return forward(*args, **kwargs)
    x = max(known, key=lambda t: t.local.dim())

    def to_shard(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceShard):
            return leaf
        return x.with_local(leaf) if leaf.shape[: x.shard_dim + 1] == x.local.shape[: x.shard_dim + 1] else leaf

    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return tree_map(to_shard, forward(*args, **kwargs))


class RunningModules(ExitStack):
    """Context that records which modules of a unit are running."""

    def __init__(self, unit: nn.Module):
        super().__init__()
        self.unit, self.now = unit, list[str]()
        self.attending: set[str] = set()
        """Modules in which attention was called."""

    def __enter__(self) -> "RunningModules":
        self.now.clear()
        for name, module in self.unit.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.now.append(name))
            after = module.register_forward_hook(self._pop)
            self.callback(before.remove)
            self.callback(after.remove)
        return self

    def _pop(self, *_: Any) -> None:
        self.now.pop()

    def mark_attention(self) -> None:
        self.attending.update(self.now)

    def find_stop(self) -> str:
        """After an exception, return the outermost running module without attention; empty if there is none."""
        return next((name for name in self.now if name and name not in self.attending), "")


TOLERANCE = 1e-6
"""The largest allowed relative difference. A model may compute in float32 whatever its inputs."""
MAX_TRIES = 3
"""The largest number of arguments that are kept in full in a try. At most twice as many modules are tried on full sequences."""
MIN_SAVED_FRACTION = 0.01
"""The least fraction of a model's matrix products that `cp` must save a rank."""
Layout = Callable[[int, int], Rows]
"""(length, ranks) -> the rows of each rank."""


def use_full_sequences(module: nn.Module) -> None:
    """Let this module run on full sequences from now on; its output is sharded again."""
    module.forward = partial(_forward_on_full, bind_forward(module))  # pyrefly: ignore[bad-assignment]


def _forward_on_full(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = [leaf for leaf in dataclass_leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
    if not known:
        return forward(*args, **kwargs)
    x = max(known, key=lambda t: t.dim())
    args, kwargs = tree_map(lambda leaf: leaf.gather_full() if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return tree_map(x.shard_again, forward(*args, **kwargs))


@dataclass
class GatherLog:
    """The tensors that a unit gathers in a run with all rows, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    number: int = 0
    max_diff: float = 0.0
    """The largest difference between a rank's part of a gathered tensor and its rows of the recorded one."""


@dataclass(frozen=True)
class FullLayout(SequenceLayout):
    """All rows of a sequence; records the gathered tensors."""

    gathered: GatherLog

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.gathered.tensors.append(local.clone())
        return local


@dataclass(frozen=True)
class TrialLayout(SequenceLayout):
    """A rank's rows of a sequence; a gather returns the recorded tensor."""

    gathered: GatherLog

    def gather(self, local: Tensor, dim: int) -> Tensor:
        gathered, shape = self.gathered, list(local.shape)
        shape[dim] = self.rows.length
        if gathered.number < len(gathered.tensors):
            whole = gathered.tensors[gathered.number]
            gathered.number += 1
            if list(whole.shape) == shape:
                gathered.max_diff = max(gathered.max_diff, max_relative_diff(local, self.take(whole, dim)))
                return whole.clone()
            gathered.max_diff = torch.inf
        raise RuntimeError("on a shard, the unit's code gathers other tensors than on the full sequence")


def open_unit(module: nn.Module, made: UnitPlan, given: Arguments, layout: Layout, ranks: int) -> UnitPlan | None:
    """Open a unit: find modules that run on rows or on full sequences. None if this fails. `given`: the unit's arguments for one sample."""
    unit, given = copy_float64(module), tree_map_only(Tensor, to_float64, given)
    tensors = {path: leaf for path, leaf in leaves_with_paths(given)[0] if isinstance(leaf, Tensor)}
    masks = frozenset(
        path for path, (dim, _) in made.given.items() if path in tensors and dim == tensors[path].dim() - 1 > 0
    )
    with torch.no_grad():
        cuts = {n: layout(t, ranks) for n, t in find_lengths(made, given).items()}
        try:
            trial = _UnitTrial(unit, given, replace(made, left=masks, has_full_shape=True, opened=True), cuts)
        except Exception:  # it cannot run again on its recorded inputs
            return None
        trial.exclude_row_modules()
        for _ in range(2 * MAX_TRIES):
            with trial.running:
                stopped = trial.find_stop()
            if stopped is None:
                with trial.running:
                    stopped = trial.find_lost_gradient()
                if not stopped:
                    returned = trial.call.returned | trial.extra_outputs
                    return replace(trial.call, flops=trial.flops, part=trial.part, returned=returned)
            if not any(stopped):
                return None
            trial.call = replace(trial.call, full_modules=(*trial.call.full_modules, stopped[-1]))
            use_full_sequences(unit.get_submodule(stopped[-1]))
    return None


class _UnitTrial:
    """Runs of a unit on the full sequence and on the rows of each rank."""

    def __init__(self, unit: nn.Module, given: Arguments, call: UnitPlan, cuts: Mapping[int, Rows]):
        self.unit, self.given, self.call, self.cuts, self.running = unit, given, call, cuts, RunningModules(unit)
        self.ranks = len(next(iter(cuts.values())).ranks)
        self.whole, self.part = FullAttention([]), 1.0
        self.extra_outputs = dict[str, At]()
        """Outputs in rows that the forward pass did not show: weights of attention, which have the sequence in two dims."""
        inner = {name: m for name, m in unit.named_modules() if name}
        with _record_calls(inner) as self.inner, self._watch_attention(self._make_layouts(None), self._record_attention), count_flops() as counted:
            args, kwargs = clone_arguments(given)
            self.expected = leaves_with_paths(unit(*args, **kwargs))[0]
        self.flops = counted.get_total_flops()

    def _record_attention(self, asked: AttentionCall, *_: SequenceLayout) -> Tensor:
        self.whole.record(asked)
        return compute_attention(asked)

    def _make_layouts(self, rank: int | None, gathered: GatherLog | None = None) -> dict[int, SequenceLayout]:
        """Make the layouts of a rank; None: of all rows."""
        if rank is None:
            return {n: FullLayout(RowsPlusFull.append_full(c), len(c.ranks), gathered or GatherLog()) for n, c in self.cuts.items()}
        return {n: TrialLayout(c, rank, gathered or GatherLog()) for n, c in self.cuts.items()}

    def _watch_attention(self, held: Mapping[int, SequenceLayout], answer: AttentionBackend) -> ShardedAttention:
        return ShardedAttention(held, self.call.attends, answer)

    def exclude_row_modules(self) -> None:
        """Let the outermost modules that compute every position separately run on plain rows."""
        found = list[str]()
        for name, seen in self.inner.items():
            if not any(name.startswith(f"{other}.") for other in found):
                module = self.unit.get_submodule(name)
                if any(_is_rowwise(module, one, self.cuts) for one in seen[:1]) and len(seen) == 1:
                    found.append(name)
        self.inner.clear()
        for name in found:
            use_plain_rows(self.unit.get_submodule(name))
        norms = [name for name, module in self.unit.named_modules() if name and isinstance(module, BatchNormBase)]
        norms = [name for name in norms if not any(f"{name}.".startswith(f"{other}.") for other in found)]
        for name in norms:  # for separate samples, another function computes the statistics
            use_full_sequences(self.unit.get_submodule(name))
        self.call = replace(self.call, row_modules=tuple(found), full_modules=tuple(norms))

    def find_stop(self) -> list[str] | None:
        """Return None if the unit returns its rows of the output; else the modules in which its code stopped, if it did."""
        gathered, parts = GatherLog(), list[int]()
        try:
            self._run(self._make_layouts(None, gathered), gathered)
            for rank in range(self.ranks):
                parts.append(self._run(self._make_layouts(rank, gathered), gathered))
        except Exception:
            return self._list_stopped()
        self.part = sum(parts) / self.ranks / self.flops if self.flops else 1.0
        return None if gathered.max_diff <= TOLERANCE else []

    def find_lost_gradient(self) -> list[str]:
        """Return the innermost module that loses gradients: a torch.autograd.Function in it gets a `SequenceShard`."""
        found = list[str]()

        def hook(name: str, output: object) -> None:
            made = [t.local if isinstance(t, SequenceShard) else t for t in dataclass_leaves(output) if isinstance(t, Tensor)]
            behind = iter_backward_nodes(t.grad_fn for t in made)
            if not found and any(isinstance(getattr(node, "variable", None), SequenceShard) for node in behind):
                found.append(name)

        hooks = [
            module.register_forward_hook(lambda _, args, output, name=name: hook(name, output))
            for name, module in self.unit.named_modules()
            if name not in self.call.full_modules
        ]
        held, self.whole.call_count = self._make_layouts(None), 0
        args, kwargs = shard_arguments(clone_arguments(self.given), self.call, held)
        try:
            with torch.enable_grad(), self._watch_attention(held, self.whole.attend):
                args, kwargs = tree_map_only(Tensor, _require_grad, (args, kwargs))
                call_on_rows(self.unit, args, kwargs, self.call, held, {})
        except Exception:  # some reject such a tensor
            return self._list_stopped()
        finally:
            for handle in hooks:
                handle.remove()
        return found

    def _list_stopped(self) -> list[str]:
        """After an exception, list the running modules, innermost last, that can still run on full sequences."""
        return [name for name in self.running.now if name not in self.call.full_modules]

    def _run(self, held: Mapping[int, SequenceLayout], gathered: GatherLog) -> int:
        """Run the unit on some rows, compare its output with these rows of the full output, and return its floating-point operations."""
        gathered.number = 0
        with count_flops() as counted:
            output = run_on_rows(self.unit, self.given, self.call, held, self.whole)
        gathered.max_diff = max(gathered.max_diff, self.whole.max_diff, *output.compute_diffs(self.expected))
        numbers = {id(layout): number for number, layout in held.items()}
        self.extra_outputs = {path: (dim, numbers[id(layout)]) for path, (dim, layout) in output.extra_outputs.items()}
        return counted.get_total_flops()


def count_flops() -> Any:
    """Return torch's counter of the floating-point operations of matrix products, silent."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    return FlopCounterMode(display=False)


class RecordedModuleCall(NamedTuple):
    """The arguments and the output of a module's call."""

    given: Arguments
    output: object


RecordedModuleCalls = dict[str, list[RecordedModuleCall]]
"""The calls of modules, by name."""


@contextmanager
def _record_calls(modules: Mapping[str, nn.Module]) -> Iterator[RecordedModuleCalls]:
    """Record the arguments and outputs of modules inside the context, outer modules before inner ones."""
    found: RecordedModuleCalls = {name: [] for name in modules}

    def hook(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        found[name].append(RecordedModuleCall((args, kwargs), tree_map_only(Tensor, torch.clone, output)))

    hooks = [
        module.register_forward_hook(lambda _, args, kwargs, output, name=name: hook(name, args, kwargs, output), with_kwargs=True)
        for name, module in modules.items()
    ]  # fmt: skip
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def _is_rowwise(module: nn.Module, seen: RecordedModuleCall, cuts: Mapping[int, Rows]) -> bool:
    """Whether a module's output on some rows equals these rows of its output. The first dim of the sequence length is sharded."""
    given, output = seen.given, seen.output
    for cut in cuts.values():
        for rank in {0, len(cut.ranks) - 1}:
            args, kwargs = tree_map_only(Tensor, partial(_take_first, cut, rank), clone_arguments(given))
            mine = [leaf for leaf in dataclass_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            whole = [leaf for leaf in dataclass_leaves(given) if isinstance(leaf, Tensor)]
            if len(mine) != len(whole) or all(a.shape == b.shape for a, b in zip(mine, whole)):
                break
            try:
                found = dataclass_leaves(module(*args, **kwargs))
            except Exception:
                return False
            expected = dataclass_leaves(tree_map_only(Tensor, partial(_take_first, cut, rank), output))
            tensors = [(a, b) for a, b in zip(found, expected) if isinstance(b, Tensor)]
            if not tensors or any(not isinstance(a, Tensor) or max_relative_diff(a, b) > TOLERANCE for a, b in tensors):
                return False
        else:
            return True
    return False


def _require_grad(t: Tensor) -> Tensor:
    """Make a tensor like one from another unit: with a gradient, and not a leaf."""
    return t.requires_grad_().clone() if t.is_floating_point() else t


def _take_first(cut: Rows, rank: int, t: Tensor) -> Tensor:
    """Take a rank's rows of the first dim (except the last dim) that has the sequence length."""
    dim = next((d for d, n in enumerate(t.shape[:-1]) if n == cut.length), None)
    return t if dim is None else make_dense(cut.take_part(t, dim, rank))


def check_worth(sequence_plan: SequencePlan, sketch: Sketch) -> None:
    """Raise P040 if every rank would compute almost as much as one device."""
    flops = [call.flops.for_batch(1) for call in sketch.calls]
    spared = sum(n * (1 - made.part) for n, made in zip(flops, sequence_plan.calls) if made.is_split)
    if not any(made.is_split for made in sequence_plan.calls) or spared < MIN_SAVED_FRACTION * sum(flops):
        units = dict.fromkeys(made.unit for made in sequence_plan.calls if not made.is_split or made.opened)
        why = f"positions interact in all operations of {', '.join(units)[:200]}: every rank would compute all of them, on the full sequence"
        raise make_sequence_error("cp would save no rank any work", why)
