"""Locate a difference between one device and the split job: the first module with different outputs, and the parts' losses.

Runs in its own process after the check has found a difference; it need not be fast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import MapStyle, MicroBatch, is_map, open_data, weigh_micro_batch
from plait.data.sampling import epoch_order
from plait.engine.engine import Engine
from plait.launch.place import Place, set_rank_variables
from plait.model.build_model import run_model
from plait.parallel.precision import make_forward_context
from plait.proof.activation_recorder import ChosenSamples
from plait.proof.job import call_counts
from plait.proof.job.trial import (
    WIDE,
    AnalyzedModel,
    Point,
    digest_leaves,
    make_float64_engine,
    move_weights,
    read_points,
)
from plait.proof.probes import TOLERANCE
from plait.randomness.keyed import seed_host
from plait.tensors import opaque_code
from plait.tensors.module_state import restore_module_state
from plait.tensors.torch_private import dataclass_leaves, tree_flatten, tree_leaves, tree_map_only
from plait.tensors.transfers import move_tree

ModuleOutputs = dict[tuple[str, int], list[Tensor]]


@dataclass(frozen=True)
class PartRows:
    """Rows of a full batch that a part of it has: samples `first` to `first + count`, of `size`."""

    first: int
    count: int
    size: int

    @staticmethod
    def from_micro(part: MicroBatch, whole: MicroBatch) -> "PartRows":
        """Rows of a part of a batch."""
        return PartRows(part.first, part.count, whole.count)

    def worst_row(self, a: Tensor, b: Tensor) -> tuple[int, float] | None:
        """(row, relative difference) where `b` differs most from its rows of `a`; None if it differs nowhere."""
        dims = [d for d in range(a.dim()) if a.shape[d] * self.count == b.shape[d] * self.size and a.shape[d] % self.size == 0]
        if self.size > 1 and not dims:
            return None
        dim = dims[0] if dims else 0
        each = a.shape[dim] // self.size if dims else 1
        a = a.narrow(dim, self.first * each, self.count * each) if dims else a
        for d in range(a.dim()):  # compare padded tensors up to the shorter one
            most = min(a.shape[d], b.shape[d])
            a, b = a.narrow(d, 0, most), b.narrow(d, 0, most)
        if not a.numel():
            return None
        scale = max(float(a.abs().max()), 1e-12)
        rows = (a - b).abs()
        worst = float(rows.max()) / scale
        if not worst > TOLERANCE:
            return None
        at = int(rows.movedim(dim, 0).reshape(rows.shape[dim], -1).amax(1).argmax()) if rows.dim() else 0
        return at // each, worst


ALL_ROWS = PartRows(0, 1, 1)
"""All rows of any batch."""


def locate_mismatch(job: Job, cut: Plan, known: AnalyzedModel, point: Point, place: Place) -> dict[str, Any]:
    """Locate the first difference between one device and the parts of a point's batch. JSON values only."""
    engine, whole, parts = split_into_micros(job, cut, known, point, place)
    rank_model = engine.rank_model
    if point.is_perturbed:
        move_weights(engine)
    run = lambda micro: _run_recorded(engine, micro, point.step)  # noqa: E731
    before = call_counts.collect_kept_values(rank_model.module)
    first, after = run(whole), call_counts.collect_kept_values(rank_model.module)
    second = run(whole)
    found: dict[str, Any] = {"host": rank_model.global_sketch.host_random, "padding": False}
    again = _find_first_unlike(first[1], second[1], ALL_ROWS)
    if again is not None:
        found["again"] = [again[0], _get_module_type(rank_model.module, again[0])]
        changed = call_counts.ChangedValues.from_values(before, after)
        restored = _is_repeatable(rank_model.module, lambda: run(whole))
        return found | {"kept": list(changed.values), "drawn": list(changed.generators), "restored": restored}
    found["collate"] = _find_collate_change(whole, parts)
    ran = [run(part) for part in parts]
    for part, (_, seen) in zip(parts, ran):
        unlike = _find_first_unlike(first[1], seen, PartRows.from_micro(part, whole))
        if unlike is not None:
            name, row, apart = unlike
            found["outputs"] = [name, _get_module_type(rank_model.module, name), whole.ids[part.first + row], apart, part.count]
            found["padding"] = _is_padding_cause(run, whole, part, first[1])
            return found
    return found | _compute_losses(job, whole, parts, [outputs for outputs, _ in (first, *ran)])


def find_late_counts(job: Job, cut: Plan, known: AnalyzedModel, point: Point, place: Place) -> dict[str, Any]:
    """{"late": [dependence of outputs on the number of calls]}. JSON values only."""
    engine, _, parts = split_into_micros(job, cut, known, point, place)
    tensors = lambda outputs: [t.detach().clone() for t in dataclass_leaves(outputs) if isinstance(t, Tensor)]  # noqa: E731
    run = lambda: tensors(run_micro_forward(engine, parts[0], point.step, nullcontext()))  # noqa: E731
    late = call_counts.find_late_difference(engine.model, run, cut.microbatches, job.steps)
    return {"late": [asdict(late)] if late else []}


def _is_repeatable(model: nn.Module, run: Callable[[], tuple[Any, ModuleOutputs]]) -> bool:
    """True if a forward pass is reproducible after the attributes of all modules are restored."""
    seen = list[ModuleOutputs]()
    for _ in range(2):
        with restore_module_state(model.modules()):
            seen.append(run()[1])
    return _find_first_unlike(seen[0], seen[1], ALL_ROWS) is None


def split_into_micros(job: Job, cut: Plan, known: AnalyzedModel, point: Point, place: Place) -> tuple[Engine, MicroBatch, list[MicroBatch]]:
    """One device, a point's batch, and its parts under the plan, as micro-batches of one process."""
    engine = make_float64_engine(job, Plan(), place, known)
    for name in engine.rank_model.global_sketch.batch_norms:  # ranks synchronize these
        engine.model.get_submodule(name).training = False
    (whole,) = next(read_points(engine, [point])).micro_batches
    engine.plan = Plan(microbatches=cut.shares * cut.microbatches)
    (batch,) = read_points(engine, [point])
    engine.plan = Plan()
    return engine, whole, [micro for micro in batch.micro_batches if micro.count]


def run_micro_forward(engine: Engine, micro: MicroBatch, step: int, around: AbstractContextManager[object]) -> Any:
    """Outputs of a forward pass in float64, without gradients; `around` is entered last."""
    inputs = move_tree(micro.inputs, engine.rank_model.device, WIDE)
    keyed = engine.rank_model.randomness.forward_pass(step, micro.first, micro.count)
    with torch.no_grad(), make_forward_context(Plan(), WIDE, "cpu"), opaque_code.hide_higher_order(), keyed, around:
        return run_model(engine.model, inputs)


def _run_recorded(engine: Engine, micro: MicroBatch, step: int) -> tuple[Any, ModuleOutputs]:
    """(outputs, outputs of each module by name and call, in order)."""
    seen, calls = ModuleOutputs(), dict[str, int]()

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            calls[name] = calls.get(name, 0) + 1
            seen[name, calls[name]] = [t.detach().clone() for t in dataclass_leaves(output) if isinstance(t, Tensor)]

        return torch.compiler.disable(hook)

    handles = [module.register_forward_hook(make_hook(name)) for name, module in engine.model.named_modules()]
    outputs = run_micro_forward(engine, micro, step, nullcontext())
    for handle in handles:
        handle.remove()
    return outputs, seen


def _find_first_unlike(whole: ModuleOutputs, part: ModuleOutputs, rows: PartRows) -> tuple[str, int, float] | None:
    """(module, row, relative difference) of the first output in `part` that differs from its `rows` of `whole`."""
    for key, tensors in whole.items():
        for a, b in zip(tensors, part.get(key, ())):
            if a.is_floating_point() and a.dim() == b.dim() and (found := rows.worst_row(a, b)) is not None:
                return key[0], *found
    return None


def _get_module_type(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


def _find_collate_change(whole: MicroBatch, parts: list[MicroBatch]) -> list[int] | None:
    """[sample, samples in its part] of the first sample whose collated inputs or targets differ from those in the full batch, in equal shape."""
    flat = tree_flatten((whole.inputs, whole.targets))[0]
    for part in parts:
        for a, b in zip(flat, tree_flatten((part.inputs, part.targets))[0]):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and a.shape[0] == whole.count):
                continue
            if a.shape[1:] == b.shape[1:] and b.shape[0] == part.count:
                mine = a[part.first : part.first + part.count]
                unlike = ((mine != b) & ~((mine != mine) & (b != b))).reshape(part.count, -1).any(1)
                if bool(unlike.any()):
                    return [whole.ids[part.first + int(unlike.int().argmax())], part.count]
    return None


def _is_padding_cause(run: Callable[[MicroBatch], tuple[Any, ModuleOutputs]], whole: MicroBatch, part: MicroBatch, expected: ModuleOutputs) -> bool:
    """True if the outputs agree once the part has the padding of the full batch."""
    shapes = [[t.shape[1:] for t in tree_leaves(m.inputs) if isinstance(t, Tensor)] for m in (whole, part)]
    if shapes[0] == shapes[1]:
        return False
    cut = lambda t: t[part.first : part.first + part.count] if t.dim() and t.shape[0] == whole.count else t  # noqa: E731
    same = MicroBatch(part.first, part.count, tree_map_only(Tensor, cut, whole.inputs), part.targets, part.ids)
    return _find_first_unlike(expected, run(same)[1], PartRows.from_micro(part, whole)) is None


def _compute_losses(job: Job, whole: MicroBatch, parts: list[MicroBatch], outputs: list[Any]) -> dict[str, Any]:
    """Losses of the full batch and of the parts, the parts' weights, and a hint about the reduction. `outputs`: of the full batch, then of
    each part."""
    with torch.no_grad(), make_forward_context(Plan(), WIDE, "cpu"):
        at = lambda micro, out: float(job.loss(out, move_tree(micro.targets, torch.device("cpu"), WIDE)))  # noqa: E731
        total, *losses = [at(micro, out) for micro, out in zip((whole, *parts), outputs)]
    told = {"whole": total, "losses": losses, "weights": [weigh_micro_batch(job.weight, micro) for micro in parts]}
    return told | {"hint": _guess_reduction(job, total, losses, parts)}


def _guess_reduction(job: Job, whole: float, losses: list[float], parts: list[MicroBatch]) -> str:
    close = lambda value: abs(value - whole) <= 1e-7 * max(abs(whole), 1e-12)  # noqa: E731
    counts = np.array([micro.count for micro in parts], dtype=np.float64)
    values = np.array(losses)
    if len(losses) < 2 or not np.isfinite(values).all():
        return ""
    if close(values.sum()):
        return "sum"
    for text, count in _list_counts(job):
        try:
            weights = np.array([count(micro.targets) for micro in parts], dtype=np.float64)
        except Exception:  # not applicable to these targets
            continue
        if weights.sum() > 0 and np.ptp(weights / counts) > 0 and close((weights * values).sum() / weights.sum()):
            return text
    return "root" if close(np.sqrt((counts * values**2).sum() / counts.sum())) else ""


def _list_counts(job: Job) -> list[tuple[str, Callable[[Any], float]]]:
    """Possible divisors of a mean loss, as code and as a function of the targets."""
    found: list[tuple[str, Callable[[Any], float]]] = []
    for text, of in (("targets", lambda t: t), *((f"targets[{k}]", lambda t, k=k: t[k]) for k in range(3))):
        for value in (-100, 0, -1, 255, 1):
            found.append((f"({text} != {value}).sum()", lambda t, of=of, v=value: float((of(t) != v).sum())))
        found.append((f"{text}.sum()", lambda t, of=of: float(of(t).sum())))
        found.append((f"({text} > 0).sum()", lambda t, of=of: float((of(t) > 0).sum())))
        found.append((f"{text}.isfinite().sum()", lambda t, of=of: float(of(t).isfinite().sum())))
        table = getattr(job.loss, "weight", None)
        if isinstance(table, Tensor):
            words = f"class_weights[{text}].sum()    class_weights: those of the loss"
            found.append((words, lambda t, of=of, table=table: float(table[of(t)].sum())))
    return [(f"lambda targets: {words}", count) for words, count in found]


def read_as_rank(job: Job, count: int, place: Place) -> dict[str, Any]:
    """Digests of the first `count` samples (read twice), of their targets, and of the samples in a loader process of rank 0. Runs on a rank
    with its number set in the environment."""
    set_rank_variables(place.rank, place.world)
    group = place.connect(torch.device("cpu"))
    given, rows = open_data(job.data), []
    data = ChosenSamples(given, range(len(given)))
    order = epoch_order(job.order, job.seed, 0, len(data))[:count].tolist()
    for i in order:
        samples: list[Any] = [(seed_host(job.seed, "sample", 0, i), data[i])[1] for _ in range(2)]
        rows.append([i, *map(digest_leaves, samples), digest_leaves(samples[0][1])])
    loader = DataLoader(_DigestDataset(job, data), sampler=order, batch_size=None, num_workers=1) if place.rank == 0 else ()
    loaded = list(loader)
    dist.barrier(group=group)  # a rank must not end while the other still connects
    return {"read": rows, "loaded": loaded}


class _DigestDataset(Dataset):
    """Digests of a data set's samples."""

    def __init__(self, job: Job, data: MapStyle):
        self.job, self.data = job, data

    def __getitem__(self, index: int) -> list[int]:
        seed_host(self.job.seed, "sample", 0, index)
        return digest_leaves(self.data[index])


def read_twice(job: Job, i: int) -> dict[str, Any]:
    """Whether a sample differs between two reads in a row, and the likely reason in the data set."""
    data = open_data(job.data)
    data = data.data if isinstance(data, ChosenSamples) else data
    if not is_map(data):
        return {"again": False, "source": ""}
    rows, before = list[list[int]](), _get_plain_values(data)
    for _ in range(2):
        seed_host(job.seed, "sample", 0, i)
        rows.append(digest_leaves(data[i]))
    own = (torch.Generator, np.random.Generator, np.random.RandomState, Random)
    held = [name for name, value in vars(data).items() if isinstance(value, own)] if hasattr(data, "__dict__") else []
    counted = [name for name, value in _get_plain_values(data).items() if before.get(name) != value]
    source = f"reading a sample changes its attribute {counted[0]}" if counted else ""
    if held:
        source = f"the data set has its own generator {held[0]}"
    return {"again": rows[0] != rows[1], "source": source}


def _get_plain_values(data: object) -> dict[str, Any]:
    return {n: v for n, v in getattr(data, "__dict__", {}).items() if isinstance(v, (int, float, str))}
