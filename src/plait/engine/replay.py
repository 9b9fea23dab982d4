"""A past step of a run, computed once more: what one rank does for `plait replay`.

The rank trains from a checkpoint up to the step. Then it makes the step's forward and backward without an update: first of the batch, whose
loss and norm are those that the run logged, then of each sample as a batch of its own, from the same weights and buffers, with the random
numbers of the sample's place in the batch. All ranks take part in every sample, whichever of them has it, so any plan can do it.
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
from plait.checkpoint.safetensors_file import Damaged
from plait.config.errors import PlaitError, Problem, stopped
from plait.data.batch import Batch, Micro, collate, rows_of, weigh
from plait.data.batch_rows import SampleRows
from plait.data.padding import unpacked
from plait.engine.engine import Engine
from plait.engine.nonfinite import Search
from plait.engine.rank_start import RankOptions, RunNotes, make_engine
from plait.engine.run_directory import RunDirectory
from plait.launch.place import Place
from plait.tensors.torch_private import FakeTensor, in_backward, tree_leaves, tree_map_only

INPUTS, TARGETS, LOSS = "the inputs", "the targets", "the loss"
"""What is measured of a sample besides the outputs of modules."""


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """Which step to compute again, and how. Ranks have the same."""

    step: int
    options: RankOptions
    """Of the run's job under the plan of the replay."""
    start: RunDirectory
    """Has the checkpoints to start from; without one the rank starts from the job's seed."""
    described: Path | None
    """A checkpoint that states what the job was in this step."""
    bisect: bool = False
    """Measure what each module returns."""


def replay(replayed: ReplayedStep, place: Place) -> dict[str, Any]:
    """Compute a step again. All ranks call it. Returns JSON values: the step's loss and norm, and what is known of each sample.

    R011 if the job is another than in the run, unless that is allowed; K010 if the checkpoint cannot be continued with it.
    """
    engine = make_engine(replayed.options, replayed.start, place)
    try:
        return _replay(replayed, engine, RunNotes(place))
    finally:
        engine.close()


def _replay(replayed: ReplayedStep, engine: Engine, notes: RunNotes) -> dict[str, Any]:
    allow = replayed.options.allow_changes
    started = _resumed(engine, allow)
    if started is None and engine.job.weights is not None:
        engine.load_weights(engine.job.weights)
    changed = _changes(engine, replayed.described) if replayed.described is not None and engine.place.rank == 0 else []
    if changed and not allow:
        fix = ("restore the job as it was", "--allow-changes    replays the step with the job as it is now")
        what = f"the job is not the one that made step {replayed.step}"
        raise PlaitError(Problem("R011", what, why="\n".join(changed), where=str(replayed.described), fix=fix))
    result: dict[str, Any] = {"from": engine.position.step, "started": started and started.name, "changed": changed}
    result["refused"] = [problem.what for problem in engine.checkpoints.refused]
    before = OutputSizes(engine)
    for batch in engine.batches():
        notes.status({"step": batch.after.step, "first": result["from"], "last": replayed.step})
        if batch.after.step == replayed.step:
            break
        with before if replayed.bisect and batch.after.step == replayed.step - 1 else nullcontext():
            engine.step(batch)
    engine.settle()
    if engine.stopping:
        made, needed = (last - result["from"] for last in (engine.position.step, replayed.step - 1))
        raise PlaitError(stopped("replay", f"after {made} of {needed} steps before step {replayed.step}"))
    if engine.position.step != replayed.step - 1:
        what = f"the job ends at step {engine.position.step}, before step {replayed.step}"
        raise PlaitError(Problem("R010", what, why="the run made this step with other data or options"))
    result["before"] = dict(before.means())
    result |= _phases(engine, batch) if engine.job.phases else _of_batch(engine, batch, replayed.bisect, notes)
    return result | {"size": batch.size, "lr": _rate(engine), "inexact": engine.inexact}


def _resumed(engine: Engine, allow: bool) -> Path | None:
    """The newest checkpoint that can be read, which is loaded; None without any, also where all are damaged or were removed meanwhile."""
    try:
        return engine.resume(missing_ok=True, allow_changes=allow)
    except PlaitError:
        if not engine.checkpoints.refused or engine.position.step:
            raise
    return None


def _changes(engine: Engine, checkpoint: Path) -> list[str]:
    """What differs between the job and the one that a checkpoint states, a line each; nothing of one that was removed meanwhile."""
    try:
        manifest, now = read_manifest(checkpoint), engine.fingerprint
    except Damaged:
        return []
    found = fingerprint.changes(manifest, engine, now)
    lines = [*found.told, *(problem.what for problem in found.refused), *fingerprint.hyperparameters(manifest, now)[1]]
    base = manifest.base
    if base is not None and engine.base is not None and base.digest != engine.base.digest:
        lines.append(f"weights: what is in {engine.base.path} is not what the run started from")
    return [line for line in dict.fromkeys(lines) if not line.startswith("steps ")]


def _rate(engine: Engine) -> float:
    """The learning rate of the first group in the step that follows."""
    group, schedule = engine.optimizer.param_groups[0], engine.job.schedule
    return float(group["lr"] if schedule is None else group["initial_lr"] * schedule(engine.position.samples))


def _phases(engine: Engine, batch: Batch) -> dict[str, Any]:
    """The step of a job with phases: each phase's passes begin from the update of the one before, so no sample is measured by itself."""
    step = engine.step(batch)
    unranked = "samples are not ranked: each phase of the job begins from the update of the one before"
    return {"loss": step.loss, "norm": step.norm, "phases": step.phases, "samples": [], "places": [], "notes": [unranked]}


def _of_batch(engine: Engine, batch: Batch, bisect: bool, notes: RunNotes) -> dict[str, Any]:
    """Loss and norm of the batch, and of each of its samples."""
    made = _passes(engine, batch)
    result: dict[str, Any] = {"loss": made.loss, "norm": made.norm, "samples": [], "places": [], "notes": []}
    sizes, gradients = dict[str, dict[int, float]](), dict[int, str]()
    with _running_statistics(engine) as norms:
        if norms:
            told = "batch statistics make samples depend on each other: they are the running ones here, in " + ", ".join(norms[:3])
            result["notes"].append(told + ", …" * (len(norms) > 3))
        for place in range(batch.size):
            notes.status({"sample": place + 1, "samples": batch.size})
            sample = _alone(engine, batch, place)
            (micro,) = sample.micro
            outputs, search = OutputSizes(engine), Search(engine.rank_model, engine.passes)
            with outputs if bisect and micro.count else nullcontext(), search if bisect else nullcontext():
                made = _passes(engine, sample)
            result["samples"].append([made.loss, made.norm])
            if not micro.count:
                continue
            result["places"].append([place, micro.ids[0], weigh(engine.job.weight, micro)])
            around = {INPUTS: size_of(micro.inputs), TARGETS: size_of(micro.targets)} if bisect else {}
            for name, size in {**around, **outputs.means(), **({LOSS: made.loss} if bisect else {})}.items():
                sizes.setdefault(name, {})[place] = size
            for _, name in search.gradients[:1]:
                gradients[place] = name
    return result | {"sizes": sizes, "gradients": gradients}


@dataclass(frozen=True)
class PassesMade:
    """What the forward and backward passes of a batch gave."""

    loss: float
    norm: float
    """Of its gradients, before clipping."""


def _passes(engine: Engine, batch: Batch) -> PassesMade:
    """Make the passes of a batch; afterwards the engine is as it was before."""
    engine.rank_model.setup.inputs.begin((micro.inputs, micro.targets) for micro in batch.micro)
    norm, stats = engine.norm(engine.backward(batch))
    scale = engine.rank_model.techniques.loss_scale
    for parameter in engine.rank_model.params.values():
        parameter.grad = None
    engine.put_back()
    return PassesMade(float(stats.loss), norm / (1.0 if scale is None else scale.value))


@contextmanager
def _running_statistics(engine: Engine) -> Iterator[list[str]]:
    """Batch norms, whose names it gives, use their running statistics inside: a sample has no statistics by itself."""
    names = [*engine.rank_model.whole_sketch.batch_norms]
    modules = [module for name, module in engine.model.named_modules() if name in names and module.training]
    for module in modules:
        module.training = False
    try:
        yield names
    finally:
        for module in modules:
            module.training = True


def _alone(engine: Engine, batch: Batch, place: int) -> Batch:
    """The batch of one sample, by its place in the global batch. Its only micro-batch counts 0 on ranks that do not have the sample: they run
    one of their own along, with weight zero."""
    mine = next((m for m in batch.micro if m.first <= place < m.first + m.count), None)
    micro = mine or batch.micro[0]
    index = place - micro.first if mine else 0
    data, samples, pair = engine.data, unpacked(micro.samples), (micro.inputs, micro.targets)
    if samples:
        own = collate(data, [samples[index]])
        rows = rows_of(data, samples[index])
        inside = rows.one(pair, index, micro.count or 1)
        inputs, targets = inside if rows.holds(inside, own) else own
    else:
        once = tree_map_only(Tensor, lambda t: t[:1], pair)  # torch's own collate stacks samples along the first dim
        twice = tree_map_only(Tensor, lambda t: torch.cat([t[:1], t[:1]]), pair)
        inputs, targets = SampleRows(once, twice).one(pair, index, micro.count or 1)
    ids = micro.ids[index : index + 1] if mine else ()
    alone = Micro(place if mine else micro.first, int(mine is not None), inputs, targets, ids)
    return replace(batch, size=1, micro=(alone,), most=1, seen=(), idle=(), around=())


def size_of(tree: object) -> float:
    """The root mean square of the floating-point values in a tree; 0 without any. NaN and infinity stay; minus infinity is a mask's."""
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
    """Inside of it, how large the outputs of every module are, in the order in which modules return."""

    def __init__(self, engine: Engine):
        absent = engine.rank_model.table.absent(engine.rank_model.mesh.at)
        modules = engine.model.named_modules()
        self.modules = {n: m for n, m in modules if n and n not in absent and not isinstance(m, torch.jit.ScriptModule)}
        self.found = dict[str, list[float]]()
        self.handles = list[Any]()

    def __enter__(self) -> None:
        self.handles = [m.register_forward_hook(partial(self._returned, name)) for name, m in self.modules.items()]

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not in_backward():
            self.found.setdefault(name, []).append(size_of(output))

    def means(self) -> dict[str, float]:
        """Of each module that returned, the root mean square over its calls."""
        return {name: (sum(size**2 for size in sizes) / len(sizes)) ** 0.5 for name, sizes in self.found.items()}
