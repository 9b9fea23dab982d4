"""Updates of sharded parameters by optimizers that need full tensors (Muon, Adafactor, LAMB, Shampoo). Each tensor has
an owner.

Muon orthogonalizes a matrix, Adafactor has statistics of rows and columns, and LAMB scales by a tensor's norm. A rank
with a part of a tensor cannot compute these. So each tensor that `fsdp` or `tp` shards has an owner among the ranks
with its parts. The owners receive the parts of gradients in one all-to-all. There the job's own optimizer updates full
tensors. A second all-to-all returns the parts of the new weights.

    rank 0   parts of a, b, c  ─┐         ┌─ full a: step ──┐         ┌─  parts of a, b, c
                                all-to-all                  all-to-all
    rank 1   parts of a, b, c  ─┘         └─ full b, c: step ─┘       └─  parts of a, b, c

Memory: an owner stores the full tensor and its optimizer state. So each rank has 1/N of the state as before, and 1/N of
the weights a second time. Traffic: twice the bytes of a rank's parts in each step. One rank computes the update of a
tensor, so in a model with one large tensor the others wait. Optimizers that combine several tensors, such as one that
clips by the norm of all gradients, are rejected (P022).

The method follows Liu et al. 2025, Muon is Scalable for LLM Training, section 2.3, generalized to any such optimizer.
Owners are as in ZeRO (Rajbhandari et al. 2020).
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
from plait.parallel.spec import ShardPlan, compute_shape
from plait.tensors.collectives import choose_exchange_device
from plait.tensors.rows import Part, full_ranges


def install_owners(split: SplitModel) -> SplitModel:
    """Let owners update the sharded tensors. All ranks call it, after all strategies."""
    split.mesh.connect(*split.plan.part_axes)
    group = split.mesh.group_or_none(*split.plan.part_axes)
    whole = None if group is None else TensorOwners(split, group)
    if whole is None or not whole.names:
        return split
    split.hooks.state_loaded.append(whole.reload_owned)
    split.hooks.masters_written.append(whole.scatter_weights)
    split.hooks.before_update.append(whole.gather_gradients)
    split.hooks.after_update.append(whole.scatter_weights)
    return split.with_techniques(masters={**split.params, **whole.placeholders, **whole.owned})


def shard_specs(table: ShardPlan) -> ShardPlan:
    """Assign owners to sharded tensors. On each stage, the largest tensor comes first and goes to the rank with the
    fewest elements."""
    plan, found = table.plan, dict(table.specs)
    places = [dict(zip(plan.part_axes, at)) for at in product(*(range(table.axis_sizes[axis]) for axis in plan.part_axes))]
    for stage in range(plan.pp):
        here = [s for s in found.values() if s.trainable and s.is_here({"pp": stage})]
        parted, load = [s for s in here if any(s.ranges(at) != full_ranges(s.shape) for at in places)], [0] * len(places)
        for spec in sorted(parted, key=lambda s: (-prod(s.shape), s.name)):
            owner = load.index(min(load))
            load[owner] += prod(spec.shape)
            found[spec.name] = replace(found[spec.name], owners=(*found[spec.name].owners, (stage, owner)))
    return replace(table, specs=found)


class TensorOwners:
    """The tensors of which the ranks of `group` have parts. `owned`: full tensors that this rank updates."""

    def __init__(self, split: SplitModel, group: ProcessGroup):
        self.group, self.own = group, split.params
        wanted = {n for n, p in split.params.items() if p.requires_grad}
        self.layouts = [{n: part for n, part in row.items() if n in wanted} for row in list_layouts(split)]
        shape = {n: part.shape for n, part in self.layouts[0].items()}
        self.names = sorted(n for n in shape if not all(row[n].is_full for row in self.layouts))
        self.owner = {n: dict(split.shard_plan.specs[n].owners)[split.mesh.coordinates["pp"]] for n in self.names}
        self.rank, self.ranks = dist.get_rank(group), range(len(self.layouts))
        dressed = lambda n, t: split.setup.attributes[n].make_parameter(t, True)  # noqa: E731
        empty = lambda n, device: dressed(n, torch.empty(shape[n], dtype=self.own[n].dtype, device=device))  # noqa: E731
        self.owned = {n: empty(n, split.device) for n in self.names if self.owner[n] == self.rank}
        self.placeholders = {n: empty(n, "meta") for n in self.names if n not in self.owned}
        """Tensors on the meta device with the full shape, by which a job may select parameters. They never get a
        gradient."""
        self.reload_owned()

    def reload_owned(self) -> None:
        """Write the owners' full tensors from the parts of all ranks."""
        with torch.no_grad():
            for name, whole in self._gather_owned({n: self.own[n].detach() for n in self.names}).items():
                self.owned[name].copy_(whole)

    def gather_gradients(self) -> None:
        """Gather full gradients on the owners. A tensor without a gradient on every rank gets none."""
        where = choose_exchange_device(next(iter(self.own.values())).device, self.group)
        there = torch.tensor([self.own[n].grad is not None for n in self.names], dtype=torch.float64, device=where)
        dist.all_reduce(there, group=self.group)
        used = {n for n, count in zip(self.names, there.tolist()) if count}
        gradients = {n: self.own[n].grad for n in self.names if n in used}
        parts = {n: torch.zeros_like(self.own[n]) if g is None else g for n, g in gradients.items()}
        for name, whole in self._gather_owned(parts).items():
            self.owned[name].grad = whole

    def scatter_weights(self) -> None:
        """Write every rank's parts from the owners' new weights, and reset the gradients."""
        dtypes = dict.fromkeys(self.own[n].dtype for n in self.names)
        for dtype in dtypes:
            names = [n for n in self.names if self.own[n].dtype is dtype]
            mine = [n for n in names if n in self.owned]
            send = [[self._flatten_part(self.owned[n].detach(), n, rank) for n in mine] for rank in self.ranks]
            theirs = [[n for n in names if self.owner[n] == rank] for rank in self.ranks]
            received = self._exchange_tensors(send, [[self.own[n].numel() for n in some] for some in theirs], dtype)
            with torch.no_grad():
                for name, part in zip(chain(*theirs), chain(*received)):
                    self.own[name].copy_(part.view_as(self.own[name]))
        for parameter in self.owned.values():
            parameter.grad = None

    def _gather_owned(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the owned tensors in full from the parts of all ranks."""
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts.values()):
            names = [n for n in self.names if n in parts and parts[n].dtype is dtype]
            send = [[parts[n].reshape(-1) for n in names if self.owner[n] == rank] for rank in self.ranks]
            mine = [n for n in names if n in self.owned]
            sizes = [[self._count_elements(n, rank) for n in mine] for rank in self.ranks]
            for rank, received in enumerate(self._exchange_tensors(send, sizes, dtype)):
                for name, flat in zip(mine, received):
                    whole = found.setdefault(name, torch.zeros_like(self.owned[name]).detach())
                    for piece in self._iter_pieces(flat, name, rank):
                        piece.slice_tensor(whole).copy_(piece.tensor)
        return found

    def _exchange_tensors(self, send: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype) -> list[list[Tensor]]:
        """Exchange tensors by an all-to-all. `send`: tensors for each rank. Returns the received tensors, split by
        `sizes`."""
        device = next(iter(self.own.values())).device
        flat = [torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype, device=device) for tensors in send]
        counts = [sum(some) for some in sizes]
        into = torch.empty(sum(counts), dtype=dtype, device=device)
        dist.all_to_all_single(into, torch.cat(flat), counts, [t.numel() for t in flat], group=self.group)
        return [list(part.split(some)) for part, some in zip(into.split(counts), sizes)]

    def _flatten_part(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's part of a full tensor, flattened."""
        flat = whole.new_empty(self._count_elements(name, rank))
        for piece in self._iter_pieces(flat, name, rank):
            piece.tensor.copy_(piece.slice_tensor(whole))
        return flat

    def _iter_pieces(self, flat: Tensor, name: str, rank: int) -> Iterator[Part]:
        """Iterate over the rectangles of a rank's part, as views of `flat`."""
        layout = self.layouts[rank][name]
        return Part(flat.view(compute_shape(layout.ranges)), layout.shape, layout.ranges).iter_rects()

    def _count_elements(self, name: str, rank: int) -> int:
        return torch.Size(compute_shape(self.layouts[rank][name].ranges)).numel()


def list_layouts(split: SplitModel) -> list[dict[str, Part]]:
    """Return for every rank of a group its part of each parameter, without values."""
    empty, mesh = torch.empty(0), split.mesh
    here = {n: spec for n, spec in split.shard_plan.find_local_specs(mesh.coordinates).items() if not spec.buffer}
    places = [mesh.locate_rank(rank) for rank in mesh.ranks(*split.plan.part_axes)]
    return [{n: Part(empty, spec.shape, spec.ranges(at)) for n, spec in here.items()} for at in places]
