"""What the processes of the job check do: the same batches on one device and cut as the plan cuts them, in float64.

Each side is the engine itself, so whatever plait makes exact (statistics of batch normalisation, `plait.global_mean`,
ragged weights, random numbers) is exact here too: what differs then is the job's. Gradients are told by one number a
tensor, the product with random signs and sizes, which is linear: it differs when any element does.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, Position, is_map
from plait.engine.engine import Engine
from plait.launch.place import Place
from plait.losses import separable
from plait.model.make import BuiltModel, call
from plait.model.sketch import Sketch
from plait.parallel.precision import forward_format
from plait.proof.notes import ChosenSamples, seen_in
from plait.randomness.keyed import key, permutation
from plait.tensors.torch_private import leaves, tree_leaves, tree_map_only
from plait.tensors.transfers import move

WIDE = torch.float64
BLOCK = 4096


@dataclass(frozen=True)
class Point:
    """A batch to compare: `size` samples from `start` on of epoch 0, at step `step`; with weights moved by noise or not. `ids`: these
    samples of the data instead, in the order in which they come."""

    step: int
    start: int
    size: int
    moved: bool = False
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class KnownModel:
    """The job's model in float64, and its sketch."""

    made: BuiltModel
    sketch: Sketch


def in_float64(job: Job, plan: Plan, place: Place, known: KnownModel) -> Engine:
    """An engine in float64 that is given its model, and what is known of it."""
    return Engine(job, plan, place=place, device="cpu", cast=WIDE, on_nan="ignore", made=known.made, sketch=known.sketch)


def digests(sample: object) -> list[int]:
    """A number for each leaf of a sample."""
    return [_digest(leaf) for leaf in tree_leaves(sample)]


def _digest(leaf: object) -> int:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous()
        return crc32(leaf.flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
    return crc32(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())


def read(engine: Engine, points: list[Point]) -> Iterator[Batch]:
    """This rank's share of each point's batch, as training reads it."""
    job, first = engine.job, points[0]
    if not is_map(engine.data):
        engine.job = replace(job, batch=first.size, steps=sys.maxsize)
        stream = engine.batches()
        yield from [next(stream) for _ in range(points[-1].step + 1)][first.step :]
        return
    for point in points:
        engine.job = replace(job, batch=point.size, steps=sys.maxsize)
        engine.position = Position(point.step, 0, point.start)
        if point.ids:
            yield _chosen(engine, point)
        else:
            yield next(engine.batches())


def _chosen(engine: Engine, point: Point) -> Batch:
    """This rank's share of a batch of chosen samples. What is read for it is not noted: augmentation goes by other numbers here."""
    before = engine.data
    order = permutation(engine.job.seed, 0, point.size).tolist()
    numbered = dict(zip(order, point.ids))
    inner = before.data if isinstance(before, ChosenSamples) else before
    assert is_map(inner)
    engine.job = replace(engine.job, order=None, token_budget=None)
    engine.data = ChosenSamples(inner, [numbered[i] for i in range(point.size)])
    try:
        return next(engine.batches())
    finally:
        engine.data = before


def measure(job: Job, cut: Plan, known: KnownModel, points: list[Point], place: Place) -> dict[str, Any]:
    """Losses and gradients of the points on this rank of `cut`, and digests of the samples it read. JSON values only."""
    return _measured(in_float64(job, cut, place, known), points)


def one_device(
    job: Job, known: KnownModel, points: list[Point], place: Place, *, cut: Plan, size: int, seconds: float
) -> dict[str, Any]:
    """The same of one device; and whether the loss is separable where `cut` cuts a batch of `size`, as far as `seconds` go."""
    engine = in_float64(job, Plan(), place, known)
    kept, began = list[Any](), time.perf_counter()

    def run(model: nn.Module, inputs: object) -> Any:
        kept.append(call(model, inputs))
        return kept[-1]

    engine.passes.call = run
    found = _measured(engine, points)
    took = (time.perf_counter() - began) / max(1, sum(p.size for p in points))
    if engine.rank_model.batch_peers.used:
        return found | {"coupled": None, "scales": 0, "untried": "it asks for the global batch"}
    size = max(size if took * size < seconds else 0, points[0].size)
    batch = next(read(engine, [replace(points[0], size=size)]))
    inside = lambda: forward_format(cut, WIDE, "cpu")  # noqa: E731
    pair = many(kept[0], points[0].size, batch.size), move(batch.micro[0].targets, torch.device("cpu"), WIDE)
    told, scales, untried = separable.coupled(job, *pair, parts_of(cut, batch.size), seconds, inside)
    return found | {"coupled": told.told() if told else None, "scales": scales, "untried": untried, "size": batch.size}


def parts_of(cut: Plan, size: int) -> list[tuple[int, int]]:
    """(first, count) of each part of a batch of `size`, in order."""
    shares = [replace(BatchShare.of(cut, rank), ranks=cut.shares) for rank in range(cut.shares)]
    return [part for share in shares for part in share.parts(size) if part[1]]


def many(outputs: object, size: int, wanted: int) -> Any:
    """Outputs of `wanted` samples, made of those of `size`: each again and again, with noise."""
    if wanted == size:
        return outputs
    generator, rows = _generator("outputs"), torch.arange(wanted) % size

    def more(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != size:
            return t
        taken = t.detach()[rows]
        if not t.is_floating_point():
            return taken
        return taken + 0.1 * t.detach().std() * torch.randn(taken.shape, generator=generator, dtype=t.dtype)

    leaves(outputs)
    return tree_map_only(Tensor, more, outputs)


def _measured(engine: Engine, points: list[Point]) -> dict[str, Any]:
    place = engine.place
    rows = []
    seen_in(engine.data).clear()  # building read an example, whose random numbers are keyed by nothing
    for point, batch in zip(points, read(engine, points)):
        began = time.process_time()
        if point.moved:
            move_weights(engine)
        loss, norm, gradients = 0.0, 0.0, dict[str, tuple[float, float]]()
        for _ in engine.turns.of(0):
            step_row = engine.backward(batch)
            of_turn, totals = engine.norm(step_row)
            norm, loss = math.hypot(norm, of_turn), loss + float(totals.loss)
            gradients |= {n: told_by(n, p.grad) for n, p in engine.rank_model.params.items() if p.grad is not None}
            for parameter in engine.rank_model.params.values():
                parameter.grad = None
        took = time.process_time() - began
        rows.append({"loss": loss, "norm": norm, "gradients": {} if place.rank else gradients, "seconds": took})
    return {"rows": rows, "seen": dict(seen_in(engine.data)), "asks": engine.rank_model.batch_peers.used}


def move_weights(engine: Engine) -> None:
    """Another point for the model: every weight moved by a tenth of its tensor's size, on all ranks alike."""
    with torch.no_grad():
        for name, parameter in engine.rank_model.params.items():
            noise = torch.randn(parameter.shape, generator=_generator(name), dtype=parameter.dtype)
            parameter.add_(noise * (0.1 * parameter.square().mean().sqrt() + 1e-3))


def told_by(name: str, tensor: Tensor) -> tuple[float, float]:
    """(a random product of a tensor, its norm)."""
    flat, generator = tensor.detach().double().flatten(), _generator(name)
    rows = -(-flat.numel() // BLOCK)
    padded = torch.nn.functional.pad(flat, (0, rows * BLOCK - flat.numel())).view(rows, BLOCK)
    inner = torch.randn(BLOCK, generator=generator, dtype=WIDE)
    outer = torch.randn(rows, generator=generator, dtype=WIDE)
    return float((padded @ inner) @ outer), float(flat.norm())


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(key("job check", name) & 0x7FFFFFFFFFFFFFFF)
