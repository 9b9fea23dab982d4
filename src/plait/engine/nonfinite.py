"""Handle a step whose loss or gradient norm is not finite: all ranks of the replica group detect it, and nothing is updated.

The loss and the norm are reduced over the ranks anyway, so all ranks decide alike without an extra message. A CPU host reads them
before the update. A GPU skips the update itself, and the hosts read them one step later (`stats_reader.py`). Only then does a search
start: the passes of the step run once more, from the same weights, buffers and random numbers, with hooks on units and parameters.
All ranks exchange their findings. Weights, buffers and optimizer state are those before the step, so the step can be skipped, or the
run stops.
"""

import json
import math
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.carried_state import Training
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.keys import INNER_AXES
from plait.data.batch import Batch, MicroBatch
from plait.engine.passes import Passes
from plait.parallel.loss_scale import MIN_SCALE
from plait.parallel.rank_model import RankModel
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.norm import FiniteRule, is_finite, shorten_names
from plait.tensors.torch_private import copy_, own_buffers, tree_leaves

CHOICES = ("stop", "skip", "ignore")
MAX_SKIPPED_STEPS = 10
"""Consecutive skipped steps that end the run."""
MAX_SAMPLES_SHOWN = 64
"""Maximum sample numbers of a micro-batch in a message."""
GENTLER_FIX = "a lower learning rate, or  clip=1.0  in the job"
MAX_PLACES = 4
"""Maximum micro-batches in a message."""


class RepeatableTraining(Training, Protocol):
    """A training whose last passes can be repeated."""

    passes: Passes

    def repeat_passes(self, batch: Batch) -> None:
        """Repeat the passes of a step from the same weights, buffers and random numbers."""
        ...


class NonFiniteGuard:
    """The policy of an engine for non-finite steps. `choice`: stop, skip (the step changes nothing), or ignore."""

    def __init__(self, rank_model: RankModel, choice: str):
        if choice not in CHOICES:
            raise PlaitError(Problem("U002", f"on_nan={choice!r} is none of {', '.join(CHOICES)}"))
        self.choice = choice
        trained = (f"model/{name}" for name, p in rank_model.params.items() if p.requires_grad)
        self.rule = FiniteRule.from_names(trained, [(f"model/{name}", part.tensor) for name, part in rank_model.get_parts().items()])
        self.last_backup, self.earlier_backup = BufferBackup(rank_model), BufferBackup(rank_model)
        """Buffers before the passes of the last step; and before those of the previous step, if the host reads late."""
        self.skipped_steps = 0
        """Steps skipped since the last completed one."""

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a non-finite step changes nothing."""
        return self.choice != "ignore"

    def describe_nonfinite(self, loss: float, norm: float, scale: float | None) -> str:
        """Describe the non-finite value; "" if there is none, or if the loss scale of fp16 can still be lowered.

        At a loss scale of 1 the gradients themselves overflow.
        """
        if self.choice == "ignore":
            return ""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if math.isfinite(norm) or (scale is not None and scale > MIN_SCALE):
            return ""
        smallest = "" if scale is None else f" and the loss scale is {scale:g}, the smallest there is"
        return f"the gradient norm is {norm} (the loss is {loss:.6g}){smallest}"

    def keep(self, keeps_last: bool) -> None:
        """Back up buffers before the passes of a step. `keeps_last`: the backup of the last step is still needed."""
        if keeps_last:
            self.last_backup, self.earlier_backup = self.earlier_backup, self.last_backup
        self.last_backup.keep()

    def undo(self) -> None:
        """Restore the state before the passes of the last step; the backup of the step before it becomes current."""
        self.last_backup.restore()
        self.last_backup, self.earlier_backup = self.earlier_backup, self.last_backup

    def handle(self, engine: RepeatableTraining, batch: Batch, what: str) -> Problem:
        """Restore the state, locate the source, and return the problem to report for a skipped step.

        Raises N001 to stop, N002 after ten consecutive skipped steps, N003 if the weights were not finite before the step.
        """
        self._restore(engine)
        step = batch.position.step + 1
        poisoned = self.find_bad_weights(engine, step - 1, f"in step {step} {what}")
        if poisoned is not None:
            raise PlaitError(poisoned, FAILED)
        places = self._locate(engine, batch)
        self.skipped_steps += 1
        why = "\n".join(places) or "the values of every rank are finite: their sum overflows the number format"
        fix = ("check the job's data for these samples", GENTLER_FIX)
        if self.choice == "stop":
            fix = ("--resume --on-nan skip    continues and skips such steps", *fix)
        problem = Problem("N001", f"step {step}: {what}", why=why, fix=fix)
        if self.choice == "stop":
            raise PlaitError(problem, FAILED)
        if self.skipped_steps == MAX_SKIPPED_STEPS:
            again = Problem("N002", f"{MAX_SKIPPED_STEPS} steps in a row were not finite, up to step {step}",
                            why="skipping steps does not help: every batch gives non-finite values",
                            fix=(GENTLER_FIX,))  # fmt: skip
            raise PlaitError([again, problem], FAILED)
        return problem

    def find_bad_weights(self, engine: RepeatableTraining, step: int, why: str) -> Problem | None:
        """Return N003 if weights are not finite after `step` on any rank. All ranks call it."""
        own = [(f"model/{name}", p) for name, p in engine.rank_model.params.items() if p.requires_grad]
        names = [name.removeprefix("model/") for name in self.rule.find_broken(own)]
        names_by_rank = _exchange(engine, names)
        ranks = [rank for rank, broken in names_by_rank.items() if broken]
        if not ranks:
            return None
        names = list(dict.fromkeys(name for broken in names_by_rank.values() for name in broken))
        made = f"the update of step {step} made them non-finite" if step else "they were non-finite at the start"
        rate = f", with lr={engine.optimizer.param_groups[0]['lr']:g}" if step else ""
        what = f"weights are not finite after step {step}: {shorten_names(names)}"
        fix = (GENTLER_FIX, "--resume    restarts from the newest finite checkpoint")
        return Problem("N003", what, why=f"{why}\n{made}{rate}; on {_format_ranks(ranks)}", fix=fix)

    def _restore(self, engine: RepeatableTraining) -> None:
        for parameter in engine.rank_model.params.values():
            parameter.grad = None
        self.last_backup.restore()

    def _locate(self, engine: RepeatableTraining, batch: Batch) -> list[str]:
        """Describe the micro-batches in which it began, one per line. The same on all ranks."""
        losses = [(n, float(loss)) for n, loss in engine.passes.losses]
        search = NonFiniteSearch(engine.rank_model, engine.passes)
        with search:
            engine.repeat_passes(batch)
        self._restore(engine)
        wrong = [(n, loss) for n, loss in losses if not math.isfinite(loss)]
        seen = {"loss": wrong, "unit": search.units, "gradient": search.gradients}
        numbers = sorted({n for rows in seen.values() for n, _ in rows})
        micro = [[n, list(batch.micro_batches[n].ids), *_find_bad_samples(batch.micro_batches[n])] for n in numbers]
        return _format_findings(_exchange(engine, {**seen, "micro": micro}), engine.plan.microbatches)


class BufferBackup:
    """A backup of the model state that forward passes write: statistics, counters, weights that follow others."""

    def __init__(self, rank_model: RankModel):
        sketch, model = rank_model.global_sketch, rank_model.module
        names = [tuple(name.rpartition(".")[::2]) for name in sketch.changed_buffers]
        names += [(norm, key) for norm in sketch.batch_norms for key in own_buffers(model.get_submodule(norm))]
        owners = [(own_buffers(model.get_submodule(owner)), key) for owner, key in dict.fromkeys(names)]
        self.buffers = [(held, key) for held, key in owners if (t := held.get(key)) is not None and not t.is_meta]
        self.weights = [p for name, p in rank_model.params.items() if name in sketch.rewritten]
        self.saved_buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self.copies: list[Tensor] = []

    def keep(self) -> None:
        self.saved_buffers = [(buffers, key, t) for buffers, key in self.buffers if (t := buffers[key]) is not None]
        now = [t.detach() for t in (*(t for *_, t in self.saved_buffers), *self.weights)]
        if [(t.shape, t.dtype, t.device) for t in now] != [(t.shape, t.dtype, t.device) for t in self.copies]:
            self.copies = [t.clone() for t in now]
        elif now:
            copy_(self.copies, now)

    def restore(self) -> None:
        """Restore the state before the step."""
        for buffers, key, tensor in self.saved_buffers:
            buffers[key] = tensor
        with torch.no_grad():
            for tensor, copy in zip((*(t for *_, t in self.saved_buffers), *self.weights), self.copies):
                tensor.data.copy_(copy)


class NonFiniteSearch:
    """Watches the repeated passes of a step for the first non-finite values of a micro-batch."""

    def __init__(self, rank_model: RankModel, passes: Passes):
        self.rank_model, self.passes = rank_model, passes
        self.units: list[tuple[int, str]] = []
        """(micro-batch, unit) of the first unit with finite inputs and non-finite outputs."""
        self.gradients: list[tuple[int, str]] = []
        """(micro-batch, parameter) of the first parameter, in backward order, whose gradient is not finite."""
        self.handles: list[Any] = []
        self.hooked: set[int] = set()

    def __enter__(self) -> "NonFiniteSearch":
        rank_model, shards = self.rank_model, self.rank_model.techniques.shards
        models = [rank_model.module] if rank_model.techniques.replicas is None else rank_model.techniques.replicas.models
        sharded = {} if shards is None else shards.sharded
        absent = rank_model.shard_plan.list_absent(rank_model.mesh.coordinates)
        for model in models:
            for name in (unit.name for unit in rank_model.sketch.units if unit.name not in absent):
                hook = partial(self._check_unit, name)
                self.handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        for name, parameter in rank_model.params.items():
            if name not in sharded:
                self._watch_gradient(name, parameter)
        for model in models[1:]:
            for name, parameter in model.named_parameters():
                self._watch_gradient(name, parameter)
        for module in () if shards is None else shards.modules:
            self.handles.append(module.register_forward_pre_hook(self._watch_gathered))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self.hooked:
            self.hooked.add(id(parameter))
            self.handles.append(parameter.register_hook(partial(self._check_gradient, name)))

    def _watch_gathered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Watch the gathered parameters of a sharded module, which exist only temporarily."""
        names = {id(p): n for n, p in self.rank_model.module.named_parameters() if not hasattr(p, "placements")}
        for parameter in module.parameters() if torch.is_grad_enabled() else ():
            if id(parameter) in names:
                self._watch_gradient(names[id(parameter)], parameter)

    def _check_unit(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if all(n != self.passes.current_micro_batch for n, _ in self.units) and not _is_sound(output) and _is_sound((args, kwargs)):
            self.units.append((self.passes.current_micro_batch, name))

    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        if all(n != self.passes.current_micro_batch for n, _ in self.gradients) and not is_finite(gradient):
            self.gradients.append((self.passes.current_micro_batch, name))


def _is_sound(tree: object) -> bool:
    """Return whether no tensor has NaN or plus infinity; minus infinity is allowed, since masks use it."""
    tensors = (t for t in tree_leaves(tree) if type(t) in (Tensor, nn.Parameter) and not t.is_meta)
    with torch.no_grad():
        return not any(bool((t.isnan() | t.isposinf()).any()) for t in tensors if t.is_floating_point())


def _find_bad_samples(micro: MicroBatch) -> tuple[list[int], str]:
    """Return (samples with non-finite inputs or targets, names of those trees)."""
    ids = micro.ids
    bad, where = dict[int, None](), list[str]()
    for name, tree in (("inputs", micro.inputs), ("targets", micro.targets)):
        for t in tree_leaves(tree):
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim() and len(t) == len(ids):
                rows = (~t.flatten(1).isfinite()).any(1) if t.dim() > 1 else ~t.isfinite()
                found = [i for i, wrong in zip(ids, rows.tolist()) if wrong]
                bad |= dict.fromkeys(found)
                where += [name] * bool(found)
    return list(bad), " and ".join(dict.fromkeys(where))


def _format_findings(words: dict[int, dict[str, Any]], microbatches: int) -> list[str]:
    """Format the findings of all ranks as lines, the closest to the source first."""
    lost = any(word["loss"] for word in words.values())
    rows: dict[tuple[bool, bool, int, str, str], list[int]] = {}
    for rank, word in reversed(words.items()):  # the last stage has the first non-finite gradient
        micro = {n: rest for n, *rest in word["micro"]}
        seen: dict[int, list[str]] = {}
        for n, unit in word["unit"]:
            seen.setdefault(n, []).append(f"unit {unit} is the first to return NaN or infinity")
        for n, loss in word["loss"]:
            seen.setdefault(n, []).append(f"the loss is {loss}")
        for n, name in word["gradient"] if not lost else ():
            seen.setdefault(n, []).append(f"the gradient of {name} is the first that is not finite")
        began = {n for n, _ in word["unit"]}
        for n, facts in seen.items():
            ids, bad, where = micro[n]
            unsound = f", of which {_format_ids(bad)} have non-finite values themselves ({where})" if bad else ""
            row = not bad, n not in began, n, _format_ids(ids) + unsound, "; ".join(facts)
            rows.setdefault(row, []).append(rank)
    lines = []
    for (*_, n, samples, facts), ranks in sorted(rows.items(), key=lambda row: row[0][:2]):
        lines.append(f"{_format_ranks(ranks)}, micro-batch {n} of {microbatches}: {facts}; samples {samples}")
    return lines[:MAX_PLACES] + [f"and {len(lines) - MAX_PLACES} more micro-batches"] * (len(lines) > MAX_PLACES)


def _format_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _format_ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:MAX_SAMPLES_SHOWN])) + (f" and {len(ids) - MAX_SAMPLES_SHOWN} more" if len(ids) > MAX_SAMPLES_SHOWN else "")


def _exchange(engine: RepeatableTraining, value: object) -> dict[int, Any]:
    """Exchange JSON values between the ranks of a replica group. Returns the value of each rank."""
    mesh, device = engine.rank_model.mesh, engine.rank_model.device
    texts = all_gather_bytes(json.dumps(value).encode(), mesh.group_or_none(*INNER_AXES), device)
    return dict(zip(mesh.ranks(*INNER_AXES), map(json.loads, texts), strict=True))
