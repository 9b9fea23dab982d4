"""Optimizers that look at whole tensors (Muon, Adafactor, LAMB, Shampoo), where ranks hold parts of them: each tensor has an owner.

Muon orthogonalises a matrix, Adafactor shares statistics between rows and columns, LAMB scales by a tensor's norm. A rank
that holds a part of a tensor cannot do that alone. So each tensor that `fsdp` or `tp` cuts is updated whole, by one of the
ranks that hold its parts, its owner: parts of gradients go to the owners in one all-to-all, the job's own optimizer makes
its step on whole tensors there, and parts of the new weights come back in another.

    rank 0   parts of a, b, c  ─┐         ┌─ a whole: step ─┐         ┌─  parts of a, b, c
                                all-to-all                  all-to-all
    rank 1   parts of a, b, c  ─┘         └─ b, c whole: step ┘       └─  parts of a, b, c

Memory: an owner keeps the whole tensor and its optimizer state, so each rank has 1/N of the state as before, and 1/N of the
weights a second time. Traffic: two times the parts a rank holds, in each step. Every tensor is computed on by one rank, so
a model with one large tensor makes the others wait. An optimizer that looks at several tensors at once, such as one that
clips by the norm of all gradients itself, cannot be had so, and is refused (P022).

After Liu et al. 2025, Muon is Scalable for LLM Training, section 2.3, for any optimizer of this kind; owners as in ZeRO
(Rajbhandari et al. 2020).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import ShardPlan, sizes
from plait.tensors.collectives import host_or
from plait.tensors.rows import Part, everything


def apply(split: SplitModel) -> SplitModel:
    """Let the owners of tensors that are cut update them, on all ranks; after all strategies."""
    split.mesh.connect(*split.plan.part_axes)
    group = split.mesh.group_or_none(*split.plan.part_axes)
    whole = None if group is None else WholeTensors(split, group)
    if whole is None or not whole.names:
        return split
    split.hooks.state_loaded.append(whole.reload)
    split.hooks.masters_written.append(whole.scatter_weights)
    split.hooks.before_update.append(whole.gather_gradients)
    split.hooks.after_update.append(whole.scatter_weights)
    return split.using(masters={**split.params, **whole.placeholders, **whole.owned})


def specs(table: ShardPlan) -> ShardPlan:
    """The owner of each tensor that ranks have parts of: of each stage the largest first, to the rank that has least to update."""
    plan, found = table.plan, dict(table.specs)
    places = [dict(zip(plan.part_axes, at)) for at in product(*(range(table.axis_sizes[axis]) for axis in plan.part_axes))]
    for stage in range(plan.pp):
        here = [s for s in found.values() if s.trainable and s.is_here({"pp": stage})]
        parted, load = [s for s in here if any(s.ranges(at) != everything(s.shape) for at in places)], [0] * len(places)
        for spec in sorted(parted, key=lambda s: (-prod(s.shape), s.name)):
            owner = load.index(min(load))
            load[owner] += prod(spec.shape)
            found[spec.name] = replace(found[spec.name], owners=(*found[spec.name].owners, (stage, owner)))
    return replace(table, specs=found)


class WholeTensors:
    """The tensors of which this rank and the others of `group` hold parts; `owned`: those that it updates, whole."""

    def __init__(self, split: SplitModel, group: ProcessGroup):
        self.group, self.own = group, split.params
        wanted = {n for n, p in split.params.items() if p.requires_grad}
        self.layouts = [{n: part for n, part in row.items() if n in wanted} for row in layouts(split)]
        shape = {n: part.shape for n, part in self.layouts[0].items()}
        self.names = sorted(n for n in shape if not all(row[n].whole for row in self.layouts))
        self.owner = {n: dict(split.table.specs[n].owners)[split.mesh.at["pp"]] for n in self.names}
        self.rank, self.ranks = dist.get_rank(group), range(len(self.layouts))
        dressed = lambda n, t: split.setup.attributes[n].parameter(t, True)  # noqa: E731
        empty = lambda n, device: dressed(n, torch.empty(shape[n], dtype=self.own[n].dtype, device=device))  # noqa: E731
        self.owned = {n: empty(n, split.device) for n in self.names if self.owner[n] == self.rank}
        self.placeholders = {n: empty(n, "meta") for n in self.names if n not in self.owned}
        """They have the shape of the whole, by which a job may choose parameters, and never get a gradient."""
        self.reload()

    def reload(self) -> None:
        """The owners' tensors become those whose parts the ranks hold."""
        with torch.no_grad():
            for name, whole in self._gathered({n: self.own[n].detach() for n in self.names}).items():
                self.owned[name].copy_(whole)

    def gather_gradients(self) -> None:
        """Whole gradients, on the owners; none where no rank has one."""
        where = host_or(next(iter(self.own.values())).device, self.group)
        there = torch.tensor([self.own[n].grad is not None for n in self.names], dtype=torch.float64, device=where)
        dist.all_reduce(there, group=self.group)
        used = {n for n, count in zip(self.names, there.tolist()) if count}
        gradients = {n: self.own[n].grad for n in self.names if n in used}
        parts = {n: torch.zeros_like(self.own[n]) if g is None else g for n, g in gradients.items()}
        for name, whole in self._gathered(parts).items():
            self.owned[name].grad = whole

    def scatter_weights(self) -> None:
        """Every rank's parts of the owners' new weights."""
        dtypes = dict.fromkeys(self.own[n].dtype for n in self.names)
        for dtype in dtypes:
            names = [n for n in self.names if self.own[n].dtype is dtype]
            mine = [n for n in names if n in self.owned]
            send = [[self._cut(self.owned[n].detach(), n, rank) for n in mine] for rank in self.ranks]
            theirs = [[n for n in names if self.owner[n] == rank] for rank in self.ranks]
            received = self._exchanged(send, [[self.own[n].numel() for n in some] for some in theirs], dtype)
            with torch.no_grad():
                for name, part in zip(chain(*theirs), chain(*received)):
                    self.own[name].copy_(part.view_as(self.own[name]))
        for parameter in self.owned.values():
            parameter.grad = None

    def _gathered(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of the owned ones, from every rank's parts of all."""
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts.values()):
            names = [n for n in self.names if n in parts and parts[n].dtype is dtype]
            send = [[parts[n].reshape(-1) for n in names if self.owner[n] == rank] for rank in self.ranks]
            mine = [n for n in names if n in self.owned]
            sizes = [[self._numel(n, rank) for n in mine] for rank in self.ranks]
            for rank, received in enumerate(self._exchanged(send, sizes, dtype)):
                for name, flat in zip(mine, received):
                    whole = found.setdefault(name, torch.zeros_like(self.owned[name]).detach())
                    for piece in self._pieces(flat, name, rank):
                        piece.inside(whole).copy_(piece.tensor)
        return found

    def _exchanged(self, send: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype) -> list[list[Tensor]]:
        """What every rank sends to this one, cut to `sizes`; `send`: to every rank. All-to-all."""
        device = next(iter(self.own.values())).device
        flat = [torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype, device=device) for tensors in send]
        counts = [sum(some) for some in sizes]
        into = torch.empty(sum(counts), dtype=dtype, device=device)
        dist.all_to_all_single(into, torch.cat(flat), counts, [t.numel() for t in flat], group=self.group)
        return [list(part.split(some)) for part, some in zip(into.split(counts), sizes)]

    def _cut(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """A rank's part of a whole, flat."""
        flat = whole.new_empty(self._numel(name, rank))
        for piece in self._pieces(flat, name, rank):
            piece.tensor.copy_(piece.inside(whole))
        return flat

    def _pieces(self, flat: Tensor, name: str, rank: int) -> Iterator[Part]:
        """The rectangles of a rank's part, which is `flat`."""
        layout = self.layouts[rank][name]
        return Part(flat.view(sizes(layout.ranges)), layout.shape, layout.ranges).pieces()

    def _numel(self, name: str, rank: int) -> int:
        return torch.Size(sizes(self.layouts[rank][name].ranges)).numel()


def layouts(split: SplitModel) -> list[dict[str, Part]]:
    """Which part of each of its parameters every rank of a group has, without its numbers: `tp` cuts first, then `fsdp`."""
    empty, mesh = torch.empty(0), split.mesh
    here = {n: spec for n, spec in split.table.here(mesh.at).items() if not spec.buffer}
    places = [mesh.place(rank) for rank in mesh.ranks(*split.plan.part_axes)]
    return [{n: Part(empty, spec.shape, spec.ranges(at)) for n, spec in here.items()} for at in places]
