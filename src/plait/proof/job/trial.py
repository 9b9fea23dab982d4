"""Measurements of the job check: the same batches on one device and split as in the plan, in float64.

Both sides use the engine. Everything that plait makes exact (statistics of batch normalization, `plait.global_mean`, ragged weights, random
numbers) is exact here too, so remaining differences are caused by the job. A gradient is compared by one number per tensor, its product
with random values. The product is linear, and differs if any element does.
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
from plait.model.build_model import BuiltModel, run_model
from plait.model.sketch import Sketch
from plait.parallel.precision import make_forward_context
from plait.proof.activation_recorder import ChosenSamples, get_seen_digests
from plait.randomness.keyed import make_permutation, make_philox_key
from plait.tensors.torch_private import dataclass_leaves, tree_leaves, tree_map_only
from plait.tensors.transfers import move_tree

WIDE = torch.float64
BLOCK = 4096


@dataclass(frozen=True)
class Point:
    """A batch to compare: `size` samples of epoch 0 from `start` on, at step `step`, optionally with perturbed weights. `ids`: these samples
    of the data instead, in this order."""

    step: int
    start: int
    size: int
    is_perturbed: bool = False
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AnalyzedModel:
    """The job's model in float64, and its sketch."""

    made: BuiltModel
    sketch: Sketch


def make_float64_engine(job: Job, plan: Plan, place: Place, known: AnalyzedModel) -> Engine:
    """An engine in float64 with an already built and analyzed model."""
    return Engine(job, plan, place=place, device="cpu", cast=WIDE, on_nan="ignore", made=known.made, sketch=known.sketch)


def digest_leaves(sample: object) -> list[int]:
    """One digest per leaf of a sample."""
    return [_digest_leaf(leaf) for leaf in tree_leaves(sample)]


def _digest_leaf(leaf: object) -> int:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous()
        return crc32(leaf.flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
    return crc32(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())


def read_points(engine: Engine, points: list[Point]) -> Iterator[Batch]:
    """This rank's local batch of each point, read as in training."""
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
            yield _read_chosen(engine, point)
        else:
            yield next(engine.batches())


def _read_chosen(engine: Engine, point: Point) -> Batch:
    """This rank's local batch of chosen samples. The reads are not recorded: augmentation has other sample numbers here."""
    before = engine.data
    order = make_permutation(engine.job.seed, 0, point.size).tolist()
    numbered = dict(zip(order, point.ids))
    inner = before.data if isinstance(before, ChosenSamples) else before
    assert is_map(inner)
    engine.job = replace(engine.job, order=None, token_budget=None)
    engine.data = ChosenSamples(inner, [numbered[i] for i in range(point.size)])
    try:
        return next(engine.batches())
    finally:
        engine.data = before


def measure_rank(job: Job, cut: Plan, known: AnalyzedModel, points: list[Point], place: Place) -> dict[str, Any]:
    """Losses and gradients of the points on this rank of `cut`, and digests of its samples. JSON values only."""
    return _measure_points(make_float64_engine(job, cut, place, known), points)


def measure_one_device(
    job: Job, known: AnalyzedModel, points: list[Point], place: Place, *, cut: Plan, size: int, seconds: float
) -> dict[str, Any]:
    """The same on one device; and whether the loss is separable under `cut` for a batch of `size`, within `seconds`."""
    engine = make_float64_engine(job, Plan(), place, known)
    kept, began = list[Any](), time.perf_counter()

    def run(model: nn.Module, inputs: object) -> Any:
        kept.append(run_model(model, inputs))
        return kept[-1]

    engine.passes.call = run
    found = _measure_points(engine, points)
    took = (time.perf_counter() - began) / max(1, sum(p.size for p in points))
    if engine.rank_model.batch_peers.used:
        return found | {"coupled": None, "scales": 0, "untried": "the job uses the global batch"}
    size = max(size if took * size < seconds else 0, points[0].size)
    batch = next(read_points(engine, [replace(points[0], size=size)]))
    inside = lambda: make_forward_context(cut, WIDE, "cpu")  # noqa: E731
    pair = tile_outputs(kept[0], points[0].size, batch.size), move_tree(batch.micro_batches[0].targets, torch.device("cpu"), WIDE)
    told, scales, untried = separable.find_coupling(job, *pair, list_parts(cut, batch.size), seconds, inside)
    return found | {"coupled": told.to_report() if told else None, "scales": scales, "untried": untried, "size": batch.size}


def list_parts(cut: Plan, size: int) -> list[tuple[int, int]]:
    """(first, count) of each part of a batch of `size`, in order."""
    shares = [replace(BatchShare.from_plan(cut, rank), ranks=cut.shares) for rank in range(cut.shares)]
    return [part for share in shares for part in share.locate_micro_batches(size) if part[1]]


def tile_outputs(outputs: object, size: int, wanted: int) -> Any:
    """Outputs of `wanted` samples, repeated from those of `size` samples, with noise."""
    if wanted == size:
        return outputs
    generator, rows = _make_generator("outputs"), torch.arange(wanted) % size

    def tile_rows(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != size:
            return t
        taken = t.detach()[rows]
        if not t.is_floating_point():
            return taken
        return taken + 0.1 * t.detach().std() * torch.randn(taken.shape, generator=generator, dtype=t.dtype)

    dataclass_leaves(outputs)
    return tree_map_only(Tensor, tile_rows, outputs)


def _measure_points(engine: Engine, points: list[Point]) -> dict[str, Any]:
    place = engine.place
    rows = []
    get_seen_digests(engine.data).clear()  # the build read an example with unseeded random numbers
    for point, batch in zip(points, read_points(engine, points)):
        began = time.process_time()
        if point.is_perturbed:
            move_weights(engine)
        loss, norm, gradients = 0.0, 0.0, dict[str, tuple[float, float]]()
        for _ in engine.active_phase.iterate_phases(0):
            step_row = engine.backward(batch)
            of_turn, totals = engine.norm(step_row)
            norm, loss = math.hypot(norm, of_turn), loss + float(totals.loss)
            gradients |= {n: project_tensor(n, p.grad) for n, p in engine.rank_model.params.items() if p.grad is not None}
            for parameter in engine.rank_model.params.values():
                parameter.grad = None
        took = time.process_time() - began
        rows.append({"loss": loss, "norm": norm, "gradients": {} if place.rank else gradients, "seconds": took})
    return {"rows": rows, "seen": dict(get_seen_digests(engine.data)), "asks": engine.rank_model.batch_peers.used}


def move_weights(engine: Engine) -> None:
    """Move every weight by a tenth of its tensor's size, equally on all ranks."""
    with torch.no_grad():
        for name, parameter in engine.rank_model.params.items():
            noise = torch.randn(parameter.shape, generator=_make_generator(name), dtype=parameter.dtype)
            parameter.add_(noise * (0.1 * parameter.square().mean().sqrt() + 1e-3))


def project_tensor(name: str, tensor: Tensor) -> tuple[float, float]:
    """(a random product of a tensor, its norm)."""
    flat, generator = tensor.detach().double().flatten(), _make_generator(name)
    rows = -(-flat.numel() // BLOCK)
    padded = torch.nn.functional.pad(flat, (0, rows * BLOCK - flat.numel())).view(rows, BLOCK)
    inner = torch.randn(BLOCK, generator=generator, dtype=WIDE)
    outer = torch.randn(rows, generator=generator, dtype=WIDE)
    return float((padded @ inner) @ outer), float(flat.norm())


def _make_generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(make_philox_key("job check", name) & 0x7FFFFFFFFFFFFFFF)
