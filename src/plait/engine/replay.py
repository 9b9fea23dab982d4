"""Recompute a past step of a run: one rank's part of `plait replay`.

The rank trains from a checkpoint up to the step. Then it runs the step's forward and backward without an update: first for the batch,
whose loss and norm must match the logged ones, then for each sample as a batch of one. The samples run from the same weights and
buffers, with the random numbers of their place in the batch. All ranks take part in every sample, so this works under any plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import fingerprint
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.safetensors_file import DamagedFileError
from plait.config.errors import PlaitError, Problem, stopped_problem
from plait.data.batch import Batch, MicroBatch, collate, find_sample_rows, weigh_micro_batch
from plait.data.batch_rows import SampleRows
from plait.data.padding import unpack_samples
from plait.engine.engine import Engine
from plait.engine.nonfinite import NonFiniteSearch
from plait.engine.rank_start import RankOptions, RunNotes, make_engine
from plait.engine.run_directory import RunDirectory
from plait.launch.place import Place
from plait.tensors.torch_private import FakeTensor, is_in_backward, tree_leaves, tree_map_only

INPUTS, TARGETS, LOSS = "the inputs", "the targets", "the loss"
"""Measured values of a sample other than the outputs of modules."""


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """The step to recompute, and the options. The same on all ranks."""

    step: int
    options: RankOptions
    """Options of the run's job under the plan of the replay."""
    start: RunDirectory
    """The run whose checkpoints to start from; without one the rank starts from the job's seed."""
    checkpoint: Path | None
    """A checkpoint that records the job as of this step."""
    bisect: bool = False
    """Measure the outputs of each module."""


def replay(replayed: ReplayedStep, place: Place) -> dict[str, Any]:
    """Recompute a step. All ranks call it. Returns JSON values: the step's loss and norm, and the measurements of each sample.

    R011 if the job differs from the run's, unless that is allowed; K010 if the checkpoint is incompatible with it.
    """
    engine = make_engine(replayed.options, replayed.start, place)
    try:
        return _replay(replayed, engine, RunNotes(place))
    finally:
        engine.close()


def _replay(replayed: ReplayedStep, engine: Engine, notes: RunNotes) -> dict[str, Any]:
    allow = replayed.options.allow_changes
    started = _load_checkpoint(engine, allow)
    if started is None and engine.job.weights is not None:
        engine.load_weights(engine.job.weights)
    changed = _list_changes(engine, replayed.checkpoint) if replayed.checkpoint is not None and engine.place.rank == 0 else []
    if changed and not allow:
        fix = ("restore the job of the run", "--allow-changes    replays the step with the current job")
        what = f"the job is not the one that made step {replayed.step}"
        raise PlaitError(Problem("R011", what, why="\n".join(changed), where=str(replayed.checkpoint), fix=fix))
    result: dict[str, Any] = {"from": engine.position.step, "started": started and started.name, "changed": changed}
    result["refused"] = [problem.what for problem in engine.checkpoints.damaged_found]
    before = OutputSizes(engine)
    for batch in engine.batches():
        notes.report_status({"step": batch.next_position.step, "first": result["from"], "last": replayed.step})
        if batch.next_position.step == replayed.step:
            break
        with before if replayed.bisect and batch.next_position.step == replayed.step - 1 else nullcontext():
            engine.step(batch)
    engine.settle()
    if engine.stopping:
        made, needed = (last - result["from"] for last in (engine.position.step, replayed.step - 1))
        raise PlaitError(stopped_problem("replay", f"after {made} of {needed} steps before step {replayed.step}"))
    if engine.position.step != replayed.step - 1:
        what = f"the job ends at step {engine.position.step}, before step {replayed.step}"
        raise PlaitError(Problem("R010", what, why="the run made this step with different data or options"))
    result["before"] = dict(before.compute_means())
    result |= _replay_phases(engine, batch) if engine.job.phases else _replay_batch(engine, batch, replayed.bisect, notes)
    return result | {"size": batch.size, "lr": _get_learning_rate(engine), "inexact": engine.inexact}


def _load_checkpoint(engine: Engine, allow: bool) -> Path | None:
    """Load the newest readable checkpoint. None if there is none, also if all are damaged or were removed meanwhile."""
    try:
        return engine.resume(missing_ok=True, allow_changes=allow)
    except PlaitError:
        if not engine.checkpoints.damaged_found or engine.position.step:
            raise
    return None


def _list_changes(engine: Engine, checkpoint: Path) -> list[str]:
    """List the differences between the job and the one recorded in a checkpoint; empty if that was removed meanwhile."""
    try:
        manifest, now = read_manifest(checkpoint), engine.fingerprint
    except DamagedFileError:
        return []
    found = fingerprint.compare_job(manifest, engine, now)
    lines = [*found.accepted, *(problem.what for problem in found.rejected), *fingerprint.merge_hyperparameters(manifest, now)[1]]
    base = manifest.base
    if base is not None and engine.base is not None and base.digest != engine.base.digest:
        lines.append(f"weights: {engine.base.path} differs from the weights that the run started from")
    return [line for line in dict.fromkeys(lines) if not line.startswith("steps ")]


def _get_learning_rate(engine: Engine) -> float:
    """Return the learning rate of the first group in the next step."""
    group, schedule = engine.optimizer.param_groups[0], engine.job.schedule
    return float(group["lr"] if schedule is None else group["initial_lr"] * schedule(engine.position.samples))


def _replay_phases(engine: Engine, batch: Batch) -> dict[str, Any]:
    """Replay a step with phases. Each phase starts from the update of the previous one, so samples are not measured individually."""
    step = engine.step(batch)
    unranked = "samples are not ranked: each phase of the job starts from the update of the previous one"
    return {"loss": step.loss, "norm": step.norm, "phases": step.phases, "samples": [], "places": [], "notes": [unranked]}


def _replay_batch(engine: Engine, batch: Batch, bisect: bool, notes: RunNotes) -> dict[str, Any]:
    """Return loss and norm of the batch, and of each of its samples."""
    made = _run_passes(engine, batch)
    result: dict[str, Any] = {"loss": made.loss, "norm": made.norm, "samples": [], "places": [], "notes": []}
    sizes, gradients = dict[str, dict[int, float]](), dict[int, str]()
    with _use_running_stats(engine) as norms:
        if norms:
            told = "batch statistics make samples depend on each other, so the replay uses running statistics in " + ", ".join(norms[:3])
            result["notes"].append(told + ", …" * (len(norms) > 3))
        for place in range(batch.size):
            notes.report_status({"sample": place + 1, "samples": batch.size})
            sample = _isolate_sample(engine, batch, place)
            (micro,) = sample.micro_batches
            outputs, search = OutputSizes(engine), NonFiniteSearch(engine.rank_model, engine.passes)
            with outputs if bisect and micro.count else nullcontext(), search if bisect else nullcontext():
                made = _run_passes(engine, sample)
            result["samples"].append([made.loss, made.norm])
            if not micro.count:
                continue
            result["places"].append([place, micro.ids[0], weigh_micro_batch(engine.job.weight, micro)])
            around = {INPUTS: compute_rms(micro.inputs), TARGETS: compute_rms(micro.targets)} if bisect else {}
            for name, size in {**around, **outputs.compute_means(), **({LOSS: made.loss} if bisect else {})}.items():
                sizes.setdefault(name, {})[place] = size
            for _, name in search.gradients[:1]:
                gradients[place] = name
    return result | {"sizes": sizes, "gradients": gradients}


@dataclass(frozen=True)
class BatchResult:
    """The result of the forward and backward passes of a batch."""

    loss: float
    norm: float
    """Norm of its gradients, before clipping."""


def _run_passes(engine: Engine, batch: Batch) -> BatchResult:
    """Run the passes of a batch, then restore the engine's state."""
    engine.rank_model.setup.device_copies.start_copies((micro.inputs, micro.targets) for micro in batch.micro_batches)
    norm, stats = engine.norm(engine.backward(batch))
    scale = engine.rank_model.techniques.loss_scale
    for parameter in engine.rank_model.params.values():
        parameter.grad = None
    engine.undo_step()
    return BatchResult(float(stats.loss), norm / (1.0 if scale is None else scale.value))


@contextmanager
def _use_running_stats(engine: Engine) -> Iterator[list[str]]:
    """Make batch norms use their running statistics, since one sample has no batch statistics. Yields their names."""
    names = [*engine.rank_model.global_sketch.batch_norms]
    modules = [module for name, module in engine.model.named_modules() if name in names and module.training]
    for module in modules:
        module.training = False
    try:
        yield names
    finally:
        for module in modules:
            module.training = True


def _isolate_sample(engine: Engine, batch: Batch, place: int) -> Batch:
    """Make a batch of one sample, by its place in the global batch.

    Ranks without the sample have a micro-batch of count 0: they run one of their own, with weight zero.
    """
    mine = next((m for m in batch.micro_batches if m.first <= place < m.first + m.count), None)
    micro = mine or batch.micro_batches[0]
    index = place - micro.first if mine else 0
    data, samples, pair = engine.data, unpack_samples(micro.samples), (micro.inputs, micro.targets)
    if samples:
        own = collate(data, [samples[index]])
        rows = find_sample_rows(data, samples[index])
        inside = rows.take_one(pair, index, micro.count or 1)
        inputs, targets = inside if rows.contains(inside, own) else own
    else:
        once = tree_map_only(Tensor, lambda t: t[:1], pair)  # torch's own collate stacks samples along the first dim
        twice = tree_map_only(Tensor, lambda t: torch.cat([t[:1], t[:1]]), pair)
        inputs, targets = SampleRows(once, twice).take_one(pair, index, micro.count or 1)
    ids = micro.ids[index : index + 1] if mine else ()
    alone = MicroBatch(place if mine else micro.first, int(mine is not None), inputs, targets, ids)
    return replace(batch, size=1, micro_batches=(alone,), max_share=1, digests=(), idle_micro_batches=(), all_samples=())


def compute_rms(tree: object) -> float:
    """Return the root mean square of the floating-point values in a tree; 0 without any. NaN and infinity propagate; minus infinity
    counts as 0, since masks use it."""
    total, count = 0.0, 0
    for leaf in tree_leaves(tree):
        leaf = getattr(leaf, "local", leaf)
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.is_floating_point() and not leaf.is_meta:
            with torch.no_grad():
                values = leaf.detach().double()
                total += float(values.where(~values.isneginf(), 0.0).square().sum())
            count += leaf.numel()
    return (total / count) ** 0.5 if count else 0.0


class OutputSizes:
    """A context that measures the outputs of every module, in the order in which modules return."""

    def __init__(self, engine: Engine):
        absent = engine.rank_model.shard_plan.list_absent(engine.rank_model.mesh.coordinates)
        modules = engine.model.named_modules()
        self.modules = {n: m for n, m in modules if n and n not in absent and not isinstance(m, torch.jit.ScriptModule)}
        self.sizes = dict[str, list[float]]()
        self.handles = list[Any]()

    def __enter__(self) -> None:
        self.handles = [m.register_forward_hook(partial(self._record_output, name)) for name, m in self.modules.items()]

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _record_output(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not is_in_backward():
            self.sizes.setdefault(name, []).append(compute_rms(output))

    def compute_means(self) -> dict[str, float]:
        """Return the root mean square over the calls of each module that returned."""
        return {name: (sum(size**2 for size in sizes) / len(sizes)) ** 0.5 for name, sizes in self.sizes.items()}
