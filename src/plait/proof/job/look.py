"""A closer look at a job whose cut run differs: in which module outputs part, and what the parts' losses are.

Runs in a process of its own, when the check has found a difference; it need not be fast.
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
from plait.data.batch import MapStyle, Micro, is_map, opened, weigh
from plait.data.sampling import epoch_order
from plait.engine.engine import Engine
from plait.launch.place import Place, pose
from plait.model.make import call
from plait.parallel.precision import forward_format
from plait.proof.job import counters
from plait.proof.job.trial import WIDE, KnownModel, Point, digests, in_float64, move_weights, read
from plait.proof.notes import ChosenSamples
from plait.proof.probes import TOLERANCE
from plait.randomness.keyed import seed_host
from plait.tensors import opaque_code
from plait.tensors.modules import state_kept
from plait.tensors.torch_private import leaves, tree_flatten, tree_leaves, tree_map_only
from plait.tensors.transfers import move

Seen = dict[tuple[str, int], list[Tensor]]


@dataclass(frozen=True)
class PartRows:
    """Samples `first` to `first + count`, of `size`: the rows of a whole batch that a part of it has."""

    first: int
    count: int
    size: int

    @staticmethod
    def of(part: Micro, whole: Micro) -> "PartRows":
        """Those of a part of a batch."""
        return PartRows(part.first, part.count, whole.count)

    def worst_row(self, a: Tensor, b: Tensor) -> tuple[int, float] | None:
        """(row, how far relative to the size) where `b` is furthest from its rows of `a`; None where it is nowhere far."""
        dims = [d for d in range(a.dim()) if a.shape[d] * self.count == b.shape[d] * self.size and a.shape[d] % self.size == 0]
        if self.size > 1 and not dims:
            return None
        dim = dims[0] if dims else 0
        each = a.shape[dim] // self.size if dims else 1
        a = a.narrow(dim, self.first * each, self.count * each) if dims else a
        for d in range(a.dim()):  # what is padded further is compared as far as both go
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


WHOLE = PartRows(0, 1, 1)
"""All rows of any batch."""


def look(job: Job, cut: Plan, known: KnownModel, point: Point, place: Place) -> dict[str, Any]:
    """Where one device and the parts of a point's batch part company. JSON values only."""
    engine, whole, parts = parted(job, cut, known, point, place)
    rank_model = engine.rank_model
    if point.moved:
        move_weights(engine)
    run = lambda micro: _forward(engine, micro, point.step)  # noqa: E731
    before = counters.values(rank_model.module)
    first, after = run(whole), counters.values(rank_model.module)
    second = run(whole)
    found: dict[str, Any] = {"host": rank_model.whole_sketch.host_random, "padding": False}
    again = _first_unlike(first[1], second[1], WHOLE)
    if again is not None:
        found["again"] = [again[0], _kind(rank_model.module, again[0])]
        changed = counters.Changed.of(before, after)
        restored = _repeats(rank_model.module, lambda: run(whole))
        return found | {"kept": list(changed.values), "drawn": list(changed.generators), "restored": restored}
    found["collate"] = _collated(whole, parts)
    ran = [run(part) for part in parts]
    for part, (_, seen) in zip(parts, ran):
        unlike = _first_unlike(first[1], seen, PartRows.of(part, whole))
        if unlike is not None:
            name, row, apart = unlike
            found["outputs"] = [name, _kind(rank_model.module, name), whole.ids[part.first + row], apart, part.count]
            found["padding"] = _by_padding(run, whole, part, first[1])
            return found
    return found | _losses(job, whole, parts, [outputs for outputs, _ in (first, *ran)])


def look_later(job: Job, cut: Plan, known: KnownModel, point: Point, place: Place) -> dict[str, Any]:
    """{"late": what depends on how often the model was called, in a list}. JSON values only."""
    engine, _, parts = parted(job, cut, known, point, place)
    tensors = lambda outputs: [t.detach().clone() for t in leaves(outputs) if isinstance(t, Tensor)]  # noqa: E731
    run = lambda: tensors(forward(engine, parts[0], point.step, nullcontext()))  # noqa: E731
    late = counters.late_difference(engine.model, run, cut.microbatches, job.steps)
    return {"late": [asdict(late)] if late else []}


def _repeats(model: nn.Module, run: Callable[[], tuple[Any, Seen]]) -> bool:
    """Whether a forward pass gives the same again once all attributes of the modules have their values back."""
    seen = list[Seen]()
    for _ in range(2):
        with state_kept(model.modules()):
            seen.append(run()[1])
    return _first_unlike(seen[0], seen[1], WHOLE) is None


def parted(job: Job, cut: Plan, known: KnownModel, point: Point, place: Place) -> tuple[Engine, Micro, list[Micro]]:
    """One device, a point's batch, and the parts that the plan cuts it in, as micro-batches of one process."""
    engine = in_float64(job, Plan(), place, known)
    for name in engine.rank_model.whole_sketch.batch_norms:  # between ranks these are synchronised
        engine.model.get_submodule(name).training = False
    (whole,) = next(read(engine, [point])).micro
    engine.plan = Plan(microbatches=cut.shares * cut.microbatches)
    (batch,) = read(engine, [point])
    engine.plan = Plan()
    return engine, whole, [micro for micro in batch.micro if micro.count]


def forward(engine: Engine, micro: Micro, step: int, around: AbstractContextManager[object]) -> Any:
    """The outputs of a forward pass in float64, without gradients; `around` is entered last."""
    inputs = move(micro.inputs, engine.rank_model.device, WIDE)
    keyed = engine.rank_model.randomness.at(step, micro.first, micro.count)
    with torch.no_grad(), forward_format(Plan(), WIDE, "cpu"), opaque_code.opaque(), keyed, around:
        return call(engine.model, inputs)


def _forward(engine: Engine, micro: Micro, step: int) -> tuple[Any, Seen]:
    """(outputs, those of each module by name and call, as they come)."""
    seen, calls = Seen(), dict[str, int]()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            calls[name] = calls.get(name, 0) + 1
            seen[name, calls[name]] = [t.detach().clone() for t in leaves(output) if isinstance(t, Tensor)]

        return torch.compiler.disable(hook)

    handles = [module.register_forward_hook(note(name)) for name, module in engine.model.named_modules()]
    outputs = forward(engine, micro, step, nullcontext())
    for handle in handles:
        handle.remove()
    return outputs, seen


def _first_unlike(whole: Seen, part: Seen, rows: PartRows) -> tuple[str, int, float] | None:
    """(module, row, how far) of the first output in `part` that is not its `rows` of the whole's."""
    for key, tensors in whole.items():
        for a, b in zip(tensors, part.get(key, ())):
            if a.is_floating_point() and a.dim() == b.dim() and (found := rows.worst_row(a, b)) is not None:
                return key[0], *found
    return None


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


def _collated(whole: Micro, parts: list[Micro]) -> list[int] | None:
    """[sample, samples it came with] of the first whose inputs or targets are others than among all, in the same shape."""
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


def _by_padding(run: Callable[[Micro], tuple[Any, Seen]], whole: Micro, part: Micro, expected: Seen) -> bool:
    """Whether the outputs are the whole's when the part has the whole's padding."""
    shapes = [[t.shape[1:] for t in tree_leaves(m.inputs) if isinstance(t, Tensor)] for m in (whole, part)]
    if shapes[0] == shapes[1]:
        return False
    cut = lambda t: t[part.first : part.first + part.count] if t.dim() and t.shape[0] == whole.count else t  # noqa: E731
    same = Micro(part.first, part.count, tree_map_only(Tensor, cut, whole.inputs), part.targets, part.ids)
    return _first_unlike(expected, run(same)[1], PartRows.of(part, whole)) is None


def _losses(job: Job, whole: Micro, parts: list[Micro], outputs: list[Any]) -> dict[str, Any]:
    """The loss of the whole and of the parts, and what the parts would have to weigh for it to be their mean. `outputs`: the whole's,
    then each part's."""
    with torch.no_grad(), forward_format(Plan(), WIDE, "cpu"):
        at = lambda micro, out: float(job.loss(out, move(micro.targets, torch.device("cpu"), WIDE)))  # noqa: E731
        total, *losses = [at(micro, out) for micro, out in zip((whole, *parts), outputs)]
    told = {"whole": total, "losses": losses, "weights": [weigh(job.weight, micro) for micro in parts]}
    return told | {"hint": _hint(job, total, losses, parts)}


def _hint(job: Job, whole: float, losses: list[float], parts: list[Micro]) -> str:
    close = lambda value: abs(value - whole) <= 1e-7 * max(abs(whole), 1e-12)  # noqa: E731
    counts = np.array([micro.count for micro in parts], dtype=np.float64)
    values = np.array(losses)
    if len(losses) < 2 or not np.isfinite(values).all():
        return ""
    if close(values.sum()):
        return "sum"
    for text, count in _counts(job):
        try:
            weights = np.array([count(micro.targets) for micro in parts], dtype=np.float64)
        except Exception:  # these targets have no such thing
            continue
        if weights.sum() > 0 and np.ptp(weights / counts) > 0 and close((weights * values).sum() / weights.sum()):
            return text
    return "root" if close(np.sqrt((counts * values**2).sum() / counts.sum())) else ""


def _counts(job: Job) -> list[tuple[str, Callable[[Any], float]]]:
    """What the mean of a loss may be over, in words and as a function of the targets."""
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


def read_as(job: Job, count: int, place: Place) -> dict[str, Any]:
    """Digests of the first `count` samples of the order, read twice each, of their targets, and of the samples as a loader
    process of rank 0 reads them; on a rank that knows who it is."""
    pose(place.rank, place.world)
    group = place.connect(torch.device("cpu"))
    given, rows = opened(job.data), []
    data = ChosenSamples(given, range(len(given)))
    order = epoch_order(job.order, job.seed, 0, len(data))[:count].tolist()
    for i in order:
        samples: list[Any] = [(seed_host(job.seed, "sample", 0, i), data[i])[1] for _ in range(2)]
        rows.append([i, *map(digests, samples), digests(samples[0][1])])
    loader = DataLoader(_Digests(job, data), sampler=order, batch_size=None, num_workers=1) if place.rank == 0 else ()
    loaded = list(loader)
    dist.barrier(group=group)  # one that ends while the other still connects would be missed
    return {"read": rows, "loaded": loaded}


class _Digests(Dataset):
    """The digests of a data set's samples."""

    def __init__(self, job: Job, data: MapStyle):
        self.job, self.data = job, data

    def __getitem__(self, index: int) -> list[int]:
        seed_host(self.job.seed, "sample", 0, index)
        return digests(self.data[index])


def read_again(job: Job, i: int) -> dict[str, Any]:
    """Whether a sample differs when it is read twice in a row, and what in the data set may be why."""
    data = opened(job.data)
    data = data.data if isinstance(data, ChosenSamples) else data
    if not is_map(data):
        return {"again": False, "source": ""}
    rows, before = list[list[int]](), _simple(data)
    for _ in range(2):
        seed_host(job.seed, "sample", 0, i)
        rows.append(digests(data[i]))
    own = (torch.Generator, np.random.Generator, np.random.RandomState, Random)
    held = [name for name, value in vars(data).items() if isinstance(value, own)] if hasattr(data, "__dict__") else []
    counted = [name for name, value in _simple(data).items() if before.get(name) != value]
    source = f"reading changes its {counted[0]}" if counted else ""
    if held:
        source = f"it has a generator of its own, {held[0]}"
    return {"again": rows[0] != rows[1], "source": source}


def _simple(data: object) -> dict[str, Any]:
    return {n: v for n, v in getattr(data, "__dict__", {}).items() if isinstance(v, (int, float, str))}
