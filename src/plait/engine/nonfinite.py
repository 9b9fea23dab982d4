"""A step whose loss or gradient norm is not finite: found on all ranks, and nothing is updated.

The loss and the norm are summed over the ranks anyway, so all of them decide alike and nothing is sent for it. On a CPU they
know it before the update; a GPU skips the update by itself, and the hosts know it one step later (`stats_reader.py`). Only then do
they look for the place: the passes of the step run once more, from the same weights, buffers and random numbers,
with hooks on units and parameters, and every rank tells the others what it saw. Weights, buffers and the optimizer's
state are those before the step; the step can be left out, or the run stops.
"""

import json
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.carried_state import Training
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.keys import WITHIN
from plait.data.batch import Batch, Micro
from plait.engine.passes import Passes
from plait.parallel.loss_scale import SMALLEST
from plait.parallel.rank_model import RankModel
from plait.tensors.collectives import exchange
from plait.tensors.norm import Rule, finite, several
from plait.tensors.torch_private import copy_, own_buffers, tree_leaves

CHOICES = ("stop", "skip", "ignore")
IN_A_ROW = 10
"""So many steps left out one after the other end the run."""
SHOWN = 64
"""Sample numbers of a micro-batch that a message has room for."""
GENTLER = "a lower learning rate, or  clip=1.0  in the job"
PLACES = 4
"""Micro-batches that a message has room for."""


class Repeatable(Training, Protocol):
    """A training whose last passes can be made once more."""

    passes: Passes

    def again(self, batch: Batch) -> None:
        """Make the passes of a step once more, from the same weights, buffers and random numbers."""
        ...


class Guard:
    """What an engine does about a step that is not finite. `choice`: stop, skip (leave it out), or ignore."""

    def __init__(self, rank_model: RankModel, choice: str):
        if choice not in CHOICES:
            raise PlaitError(Problem("U002", f"on_nan={choice!r} is none of {', '.join(CHOICES)}"))
        self.choice = choice
        trained = (f"model/{name}" for name, p in rank_model.params.items() if p.requires_grad)
        self.rule = Rule.of(trained, [(f"model/{name}", part.tensor) for name, part in rank_model.parts().items()])
        self.before, self.earlier = Before(rank_model), Before(rank_model)
        """What the passes of the last step write, as it was before them; and before those of the step before, where the host reads late."""
        self.skipped = 0
        """Steps left out since one was made."""

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step that is not finite changes nothing."""
        return self.choice != "ignore"

    def wrong(self, loss: float, norm: float, scale: float | None) -> str:
        """What is not finite, in words; nothing when all is well, or when fp16's loss scale, if there is one, can be lowered: at 1 the
        gradients themselves overflow."""
        if self.choice == "ignore":
            return ""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if math.isfinite(norm) or (scale is not None and scale > SMALLEST):
            return ""
        smallest = "" if scale is None else f" and the loss scale is {scale:g}, the smallest there is"
        return f"the gradient norm is {norm} (the loss is {loss:.6g}){smallest}"

    def keep(self, again: bool) -> None:
        """The passes of a step begin. `again`: what is kept of the last step is needed still."""
        if again:
            self.before, self.earlier = self.earlier, self.before
        self.before.keep()

    def undo(self) -> None:
        """As before the passes of the last step; what is kept is of the step before it."""
        self.before.put_back()
        self.before, self.earlier = self.earlier, self.before

    def handle(self, engine: Repeatable, batch: Batch, what: str) -> Problem:
        """Put everything back, find where it began, and return what to tell of a step that is left out.

        Raises N001 to stop, N002 after ten such steps in a row, N003 when the weights were wrong before the step.
        """
        self._put_back(engine)
        step = batch.position.step + 1
        poisoned = self.poisoned(engine, step - 1, f"in step {step} {what}")
        if poisoned is not None:
            raise PlaitError(poisoned, FAILED)
        places = self._where(engine, batch)
        self.skipped += 1
        why = "\n".join(places) or "every rank's own numbers are finite: their sum is too large for the number format"
        fix = ("look at what the job's data gives for these samples", GENTLER)
        if self.choice == "stop":
            fix = ("--resume --on-nan skip  goes on and leaves such steps out", *fix)
        problem = Problem("N001", f"step {step}: {what}", why=why, fix=fix)
        if self.choice == "stop":
            raise PlaitError(problem, FAILED)
        if self.skipped == IN_A_ROW:
            again = Problem("N002", f"{IN_A_ROW} steps in a row were not finite, up to step {step}",
                            why="leaving out steps does not help: every batch gives such numbers",
                            fix=(GENTLER,))  # fmt: skip
            raise PlaitError([again, problem], FAILED)
        return problem

    def poisoned(self, engine: Repeatable, step: int, why: str) -> Problem | None:
        """N003 when weights are not finite after `step` on any rank. All ranks call it."""
        own = [(f"model/{name}", p) for name, p in engine.rank_model.params.items() if p.requires_grad]
        names = [name.removeprefix("model/") for name in self.rule.broken(own)]
        told = [json.loads(text) for text in _exchange(engine, names)]
        ranks = [rank for rank, found in enumerate(told) if found]
        if not ranks:
            return None
        names = list(dict.fromkeys(name for found in told for name in found))
        made = f"the update of step {step} made them so" if step else "they were so at the start"
        rate = f", with lr={engine.optimizer.param_groups[0]['lr']:g}" if step else ""
        what = f"weights are not finite after step {step}: {several(names)}"
        fix = (GENTLER, "--resume goes on from the newest checkpoint that is finite")
        return Problem("N003", what, why=f"{why}\n{made}{rate}; on {_ranks(ranks)}", fix=fix)

    def _put_back(self, engine: Repeatable) -> None:
        for parameter in engine.rank_model.params.values():
            parameter.grad = None
        self.before.put_back()

    def _where(self, engine: Repeatable, batch: Batch) -> list[str]:
        """Lines that tell in which micro-batches it began. All ranks get the same."""
        losses = [(n, float(loss)) for n, loss in engine.passes.losses]
        search = Search(engine.rank_model, engine.passes)
        with search:
            engine.again(batch)
        self._put_back(engine)
        wrong = [(n, loss) for n, loss in losses if not math.isfinite(loss)]
        seen = {"loss": wrong, "unit": search.units, "gradient": search.gradients}
        numbers = sorted({n for rows in seen.values() for n, _ in rows})
        micro = [[n, list(batch.micro[n].ids), *_unsound(batch.micro[n])] for n in numbers]
        words = [json.loads(text) for text in _exchange(engine, {**seen, "micro": micro})]
        return _told(words, engine.plan.microbatches)


class Before:
    """What forward passes write of a rank's model, as it was before the step: statistics, counters, weights that follow."""

    def __init__(self, rank_model: RankModel):
        sketch, model = rank_model.whole_sketch, rank_model.module
        names = [tuple(name.rpartition(".")[::2]) for name in sketch.counting]
        names += [(norm, key) for norm in sketch.batch_norms for key in own_buffers(model.get_submodule(norm))]
        owners = [(own_buffers(model.get_submodule(owner)), key) for owner, key in dict.fromkeys(names)]
        self.buffers = [(held, key) for held, key in owners if (t := held.get(key)) is not None and not t.is_meta]
        self.weights = [p for name, p in rank_model.params.items() if name in sketch.rewritten]
        self.held: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self.copies: list[Tensor] = []

    def keep(self) -> None:
        self.held = [(buffers, key, t) for buffers, key in self.buffers if (t := buffers[key]) is not None]
        now = [t.detach() for t in (*(t for *_, t in self.held), *self.weights)]
        if [(t.shape, t.dtype, t.device) for t in now] != [(t.shape, t.dtype, t.device) for t in self.copies]:
            self.copies = [t.clone() for t in now]
        elif now:
            copy_(self.copies, now)

    def put_back(self) -> None:
        """As if the step had not begun."""
        for buffers, key, tensor in self.held:
            buffers[key] = tensor
        with torch.no_grad():
            for tensor, copy in zip((*(t for *_, t in self.held), *self.weights), self.copies):
                tensor.data.copy_(copy)


class Search:
    """Watches the passes of a step, run once more, for the first numbers of a micro-batch that are not finite."""

    def __init__(self, rank_model: RankModel, passes: Passes):
        self.rank_model, self.passes = rank_model, passes
        self.units: list[tuple[int, str]] = []
        """(micro-batch, unit) of the first unit that was given finite inputs and returned something else."""
        self.gradients: list[tuple[int, str]] = []
        """(micro-batch, parameter) of the first parameter, in backward's order, whose gradient is not finite."""
        self.handles: list[Any] = []
        self.hooked: set[int] = set()

    def __enter__(self) -> "Search":
        rank_model, shards = self.rank_model, self.rank_model.techniques.shards
        models = [rank_model.module] if rank_model.techniques.replicas is None else rank_model.techniques.replicas.models
        sharded = {} if shards is None else shards.sharded
        absent = rank_model.table.absent(rank_model.mesh.at)
        for model in models:
            for name in (unit.name for unit in rank_model.sketch.units if unit.name not in absent):
                hook = partial(self._unit, name)
                self.handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        for name, parameter in rank_model.params.items():
            if name not in sharded:
                self._watch(name, parameter)
        for model in models[1:]:
            for name, parameter in model.named_parameters():
                self._watch(name, parameter)
        for module in () if shards is None else shards.modules:
            self.handles.append(module.register_forward_pre_hook(self._gathered))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _watch(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self.hooked:
            self.hooked.add(id(parameter))
            self.handles.append(parameter.register_hook(partial(self._gradient, name)))

    def _gathered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module of shards has its whole parameters for a while."""
        names = {id(p): n for n, p in self.rank_model.module.named_parameters() if not hasattr(p, "placements")}
        for parameter in module.parameters() if torch.is_grad_enabled() else ():
            if id(parameter) in names:
                self._watch(names[id(parameter)], parameter)

    def _unit(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if all(n != self.passes.at for n, _ in self.units) and not _sound(output) and _sound((args, kwargs)):
            self.units.append((self.passes.at, name))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if all(n != self.passes.at for n, _ in self.gradients) and not finite(gradient):
            self.gradients.append((self.passes.at, name))


def _sound(tree: object) -> bool:
    """Whether no tensor in it holds NaN or plus infinity: minus infinity is what masks are made of."""
    tensors = (t for t in tree_leaves(tree) if type(t) in (Tensor, nn.Parameter) and not t.is_meta)
    with torch.no_grad():
        return not any(bool((t.isnan() | t.isposinf()).any()) for t in tensors if t.is_floating_point())


def _unsound(micro: Micro) -> tuple[list[int], str]:
    """(samples whose inputs or targets are themselves not finite, which of the two)."""
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


def _told(words: list[dict[str, Any]], microbatches: int) -> list[str]:
    """What the ranks saw, in lines, those first that are nearest to where it began."""
    lost = any(word["loss"] for word in words)
    rows: dict[tuple[bool, bool, int, str, str], list[int]] = {}
    for rank, word in reversed(list(enumerate(words))):  # a gradient is wrong in the last stage first
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
            unsound = f", of which {_some(bad)} are not finite themselves ({where})" if bad else ""
            row = not bad, n not in began, n, _some(ids) + unsound, "; ".join(facts)
            rows.setdefault(row, []).append(rank)
    lines = []
    for (*_, n, samples, facts), ranks in sorted(rows.items(), key=lambda row: row[0][:2]):
        lines.append(f"{_ranks(ranks)}, micro-batch {n} of {microbatches}: {facts}; samples {samples}")
    return lines[:PLACES] + [f"and {len(lines) - PLACES} more micro-batches"] * (len(lines) > PLACES)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:SHOWN])) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")


def _exchange(engine: Repeatable, value: object) -> Iterable[bytes]:
    return exchange(json.dumps(value).encode(), engine.rank_model.mesh.group_or_none(*WITHIN), engine.rank_model.device)
