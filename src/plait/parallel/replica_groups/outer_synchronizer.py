"""Synchronization of replica groups by an outer optimizer or by averaging (see `strategy.py`).

Ranks of different groups that have the same part of the model are peers. A message is a mean over peers. Under
`outer_sync=local` it is the mean of the weights. Under `outer_sync=diloco` it is the mean of G − θ, the distance from
the global weights. An outer optimizer uses it as gradient: G ← SGD(G, mean(G − θ)), then θ ← α θ + (1 − α) G. Optimizer
states of groups are never synchronized.

The model is synchronized as one fragment, or as several in turn (streaming DiLoCo). Blocks are assigned to fragments
round-robin, so that each fragment has blocks of every depth. Parameters outside of blocks (embeddings, the head, norms
between blocks) are the last fragment. Fragments are due at equal distances:

    sync_every=6 num_fragments=3      step  1  2  3  4  5  6  7  8  9 10 11 12
                             fragment 0     1     2     0     1     2
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.compression.compressor import Compressor
from plait.parallel.mesh import Mesh
from plait.parallel.rank_setup import RankSetup
from plait.tensors.rows import Part


def assign_fragments(plan: Plan, sketch: Sketch) -> list[set[str]]:
    """Assign parameter names to fragments. Raises P064 if the model has fewer units than fragments."""
    names = {name for name, _, _ in sketch.parameters}
    if plan.num_fragments == 1:
        return [names]
    dealt = plan.num_fragments - 1
    units = [unit for unit in sketch.units if unit.repeated]
    if len(units) < dealt:
        units = [unit for unit in sketch.units if unit.parameters]
    if len(units) < dealt:
        what = f"the model cannot be synchronized in {plan.num_fragments} fragments"
        why = f"it has {len(units)} units, and the last fragment contains the parameters outside of blocks"
        raise PlaitError(Problem("P064", what, why=why, fix=(f"num_fragments={len(units) + 1}",)))
    found = [{n for unit in units[p::dealt] for n in unit.parameters} & names for p in range(dealt)]
    taken = set[str]()
    for fragment in found:  # a parameter of two blocks belongs to the first
        fragment -= taken
        taken |= fragment
    return [*found, names - taken]


def list_due_fragments(plan: Plan, step: int) -> Iterable[int]:
    """Return the fragments that are sent after this step (counted from 1)."""
    since = step - plan.warmup_sync_steps
    if since <= 0:
        return []
    return [
        p for p in range(plan.num_fragments) if since % plan.sync_every == (p + 1) * plan.sync_every // plan.num_fragments % plan.sync_every
    ]


STATE_PREFIX = "groups/"
"""Prefix of the names of replica-group state in checkpoints."""


@dataclass
class GroupMessage:
    """An all-reduce over the groups in transfer."""

    fragment: int
    sent_step: int
    """The step after which it was sent."""
    names: list[str]
    flats: list[Tensor]
    """The tensors to reduce, one per dtype, and last the numbers of the step."""
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        for work in self.works:
            work.wait()
        self.works = []


class OuterSynchronizer:
    """Synchronizes this rank's part of the model with its peers in other replica groups."""

    def __init__(
        self, setup: RankSetup, mesh: Mesh, whole: Sketch, params: Mapping[str, nn.Parameter], parts: dict[str, Part], refresh: Callable[[], None]
    ):
        """`whole`: sketch of the full model. `parts`: all parameters and buffers. `refresh`: called after they were
        written."""
        self.plan, self.device, self.params, self.refresh = setup.plan, setup.device, params, refresh
        self.group, self.count = mesh.group("replica_groups"), setup.plan.replica_groups
        self.has_outer_optimizer = setup.plan.outer_sync == "diloco"
        trained = {n for n, p in params.items() if p.requires_grad}
        self.trained_parts = {n: part for n, part in parts.items() if n in trained}
        """This rank's parts of the trained parameters."""
        self.buffer_parts = {n: part for n, part in parts.items() if n not in trained and _is_averaged(whole, n, part)}
        """This rank's parts of buffers that forward passes change, such as running statistics. Groups average them."""
        order = list(self.trained_parts)
        self.fragments = [[n for n in order if n in names] for names in assign_fragments(setup.plan, whole)]
        self.global_tensors: dict[str, Tensor] = {}
        """The global weights, if they are not simply the mean over groups."""
        self.outer_optimizer: torch.optim.SGD | None = None
        self.compressor: Compressor | None = None
        if setup.plan.grad_compression != "none":
            plan, like = setup.plan, {n: params[n] for n in self.trained_parts}
            self.compressor = Compressor(plan.grad_compression, like, setup.job.seed, plan.compression_rank)
        self.pending: list[GroupMessage] = []
        self.names_with_grads = set[str]()
        """Names of parameters that had a gradient in some step."""
        self._is_writing = self._is_restored = False
        """`_is_writing`: weights are being written by this object. `_is_restored`: the global weights come from a
        checkpoint."""

    def is_warmup_step(self, step: int) -> bool:
        """Return whether the gradients of this step (counted from 1) are summed over all groups, as under dp."""
        return step <= self.plan.warmup_sync_steps

    def sum_weight(self, weight: Tensor) -> None:
        """Sum a scalar over the groups, in place."""
        dist.all_reduce(weight, group=self.group)

    def record_gradients(self, samples: bool) -> None:
        """Record which parameters have gradients. `samples`: the group has samples in this step; if not, gradients
        become zero."""
        own = self.params
        if samples:
            self.names_with_grads.update(n for n, p in own.items() if p.grad is not None)
            return
        for name in self.names_with_grads & own.keys():
            own[name].grad = torch.zeros_like(own[name])

    def init_global_weights(self) -> None:
        """Copy the initial weights as global weights, and create the outer optimizer."""
        if self.global_tensors or not (self.has_outer_optimizer or self.compressor):
            return
        self.global_tensors = {n: part.tensor.clone() for n, part in self.trained_parts.items()}
        if not self.has_outer_optimizer:
            return
        momentum = self.plan.outer_momentum
        self.outer_optimizer = torch.optim.SGD(self.global_tensors.values(), self.plan.outer_lr, momentum, nesterov=momentum > 0)
        for tensor in self.global_tensors.values() if momentum else ():
            self.outer_optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)

    def finish_step(self, step: int, numbers: list[float]) -> list[tuple[int, list[float]]]:
        """Send and apply the messages that are due after the update of a step. `numbers` are summed over the groups.
        Returns (step, sums) of every message that was applied."""
        if self.is_warmup_step(step):
            row = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            dist.all_reduce(row, group=self.group)
            if step == self.plan.warmup_sync_steps:
                self._rebase()
            return [(step, row.tolist())]
        for fragment in list_due_fragments(self.plan, step):
            message = self._make_message(fragment, step, numbers)
            rows = message.flats if self.compressor is None else self._reduce_compressed(message)
            message.works = [w for f in rows if (w := dist.all_reduce(f, group=self.group, async_op=True))]
            self.pending.append(message)
        heard = [self._apply_message(m) for m in self.pending if step - m.sent_step >= self.plan.fragment_delay]
        self.pending = [m for m in self.pending if step - m.sent_step < self.plan.fragment_delay]
        return heard

    def _make_message(self, fragment: int, step: int, word: list[float]) -> GroupMessage:
        names = [*self.fragments[fragment], *(self.buffer_parts if fragment == self.plan.num_fragments - 1 else ())]
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for name in names:
            tensor = self._get_part(name).tensor.detach()
            moved = self.global_tensors[name] - tensor if name in self.global_tensors else tensor
            by_format.setdefault(tensor.dtype, []).append(moved.reshape(-1))
        flats = [torch.cat(rows) for rows in by_format.values()]
        flats.append(torch.tensor(word, dtype=torch.float64, device=self.device))
        return GroupMessage(fragment, step, names, flats)

    def _apply_message(self, message: GroupMessage) -> tuple[int, list[float]]:
        """Apply the mean of a message. Return the step in which it was sent, and the sums of its numbers."""
        message.wait()
        with torch.no_grad():
            for name, total in self._split_message(message):
                here, mean = self._get_part(name).tensor, total / self.count
                if name not in self.global_tensors:
                    self._mix_into(here, mean)
                elif self.outer_optimizer is None:
                    here.copy_(self.global_tensors[name].sub_(mean))
                else:
                    self.global_tensors[name].grad = mean
            if self.outer_optimizer is not None:
                self.outer_optimizer.step()
                self.outer_optimizer.zero_grad(set_to_none=True)
                for name in message.names:
                    if name in self.global_tensors:
                        self._mix_into(self._get_part(name).tensor, self.global_tensors[name])
        self._report_written()
        return message.sent_step, message.flats[-1].tolist()

    def _mix_into(self, here: Tensor, there: Tensor) -> None:
        """Mix a received tensor into the group's current one: `fragment_alpha` is the weight of the current one."""
        alpha = self.plan.fragment_alpha
        here.copy_(there if alpha == 0 else alpha * here + (1 - alpha) * there)

    def _reduce_compressed(self, message: GroupMessage) -> list[Tensor]:
        """Reduce the compressible tensors now. Return the tensors that remain to be reduced: the numbers of the step."""
        assert self.compressor is not None
        rows = dict(self._split_message(message))
        given = {n: row for n, row in rows.items() if n in self.global_tensors}
        for name, total in self.compressor.sum(given, self.group).items():
            rows[name].copy_(total)
        self.compressor.commit()
        for name in rows.keys() - given.keys():
            dist.all_reduce(rows[name], group=self.group)
        return message.flats[-1:]

    def _split_message(self, message: GroupMessage) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, sum over the groups) of a message, as views."""
        at: dict[torch.dtype, int] = {}
        flats = {flat.dtype: flat for flat in message.flats[-2::-1]}
        for name in message.names:
            like = self._get_part(name).tensor
            first = at.get(like.dtype, 0)
            at[like.dtype] = first + like.numel()
            yield name, flats[like.dtype][first : first + like.numel()].view(like.shape)

    def _get_part(self, name: str) -> Part:
        return self.trained_parts[name] if name in self.trained_parts else self.buffer_parts[name]

    def _report_written(self) -> None:
        """Report that weights were written, so that copies of them are updated."""
        self._is_writing = True
        self.refresh()
        self._is_writing = False

    def handle_state_loaded(self) -> None:
        """Use weights that were written from outside, such as those of a checkpoint, as the global weights."""
        if not self._is_writing and not self._is_restored:
            self._rebase()
        self._is_restored = False

    def _rebase(self) -> None:
        for name, tensor in self.global_tensors.items():
            tensor.copy_(self.trained_parts[name].tensor)

    def reduce_global_parts(self) -> dict[str, Part]:
        """Return this rank's part of the global weights and of averaged buffers. A collective: all ranks call it."""
        found = self.get_global_parts()
        for name, part in (*self.trained_parts.items(), *self.buffer_parts.items()):
            if name not in found:
                mean = part.tensor.detach().clone()
                dist.all_reduce(mean, group=self.group)
                found[name] = replace(part, tensor=mean.div_(self.count))
        return found

    @contextmanager
    def use_global_weights(self) -> Iterator[None]:
        """Replace this group's weights by the global weights inside this context. All ranks enter it."""
        own = {name: self._get_part(name).tensor.clone() for name in (*self.trained_parts, *self.buffer_parts)}
        self._write_weights({name: part.tensor for name, part in self.reduce_global_parts().items()}.items())
        try:
            yield
        finally:
            self._write_weights(own.items())

    def _write_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self._get_part(name).tensor.copy_(tensor)
        self._report_written()

    def get_global_parts(self) -> dict[str, Part]:
        """Return this rank's part of the stored global weights."""
        return {n: replace(self.trained_parts[n], tensor=tensor) for n, tensor in self.global_tensors.items()}

    def get_state_parts(self) -> dict[str, Part]:
        """Return the tensors for a checkpoint: momenta of the outer optimizer, and messages in transfer."""
        found = {f"outer/{name}": replace(self.trained_parts[name], tensor=momentum) for name, momentum in self._iter_momenta()}
        for message in self.pending:
            message.wait()
            for name, row in self._split_message(message):
                found[f"sent/{message.fragment}/{name}"] = replace(self._get_part(name), tensor=row)
        return found

    def _iter_momenta(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, momentum) of the outer optimizer, if it has momentum."""
        state = self.outer_optimizer.state if self.outer_optimizer is not None else {}
        yield from ((name, state[t]["momentum_buffer"]) for name, t in self.global_tensors.items() if t in state)

    def list_extra_tensors(self) -> list[Tensor]:
        """List the tensors that this rank stores in addition to weights and optimizer state."""
        return [*self.global_tensors.values(), *(m for _, m in self._iter_momenta()), *(f for m in self.pending for f in m.flats)]

    def get_state_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint: [fragment, step, sums of the numbers] of each message in transfer."""
        return {"sent": [[m.fragment, m.sent_step, m.flats[-1].tolist()] for m in self.pending]}

    def get_group_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint that differ between groups."""
        return {"met": sorted(self.names_with_grads)}

    def prepare_restore(self, sent: list[tuple[int, int, list[float]]]) -> None:
        """Allocate the outer optimizer's state and the messages of a checkpoint, so that tensors are read in place."""
        self.init_global_weights()
        self._is_restored = True
        self.pending = [self._make_message(fragment, step, word) for fragment, step, word in sent]

    def restore_group(self, met: list[str]) -> None:
        """Restore the values of a group from a checkpoint."""
        self.names_with_grads = set(met)

    def wait_pending(self) -> None:
        """Wait for messages in transfer after the last step."""
        for message in self.pending:
            message.wait()


def _is_averaged(whole: Sketch, name: str, part: Part) -> bool:
    """Return whether forward passes change a tensor and groups average it. Counters are not averaged."""
    module = name.rpartition(".")[0]
    changing = module in whole.batch_norms or name in whole.changed_buffers or name in whole.rewritten
    return changing and part.tensor.is_floating_point()
