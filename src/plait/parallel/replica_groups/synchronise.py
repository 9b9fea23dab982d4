"""What a rank sends its like in other replica groups, when, and what it makes of what comes back (see `strategy.py`).

A rank and its like hold the same part of the model at the same place inside their groups. A message is a mean over them:
of the weights (`outer_sync=local`), or of how far each has moved from the global weights, G − θ (`outer_sync=diloco`), on which an outer
optimizer steps: G ← SGD(G, mean(G − θ)), then θ ← α θ + (1 − α) G. The optimizer state of a group is its own, always.

The model is synchronised in one fragment, all of it, or in several, one after the other (streaming DiLoCo). Blocks are dealt out one by
one, so that each fragment has some from every depth of the model; what is not in a block (embeddings, the head, norms between blocks) is a
fragment of its own, the last. Fragments are due at equal distances:

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


def fragments_of(plan: Plan, sketch: Sketch) -> list[set[str]]:
    """The parameters of each fragment, by name. P064 when the model has too few units for so many fragments."""
    names = {name for name, _, _ in sketch.parameters}
    if plan.num_fragments == 1:
        return [names]
    dealt = plan.num_fragments - 1
    units = [unit for unit in sketch.units if unit.repeated]
    if len(units) < dealt:
        units = [unit for unit in sketch.units if unit.parameters]
    if len(units) < dealt:
        what = f"the model cannot be synchronised in {plan.num_fragments} fragments"
        why = f"it has {len(units)} units, and one fragment is for what is outside of blocks"
        raise PlaitError(Problem("P064", what, why=why, fix=(f"num_fragments={len(units) + 1}",)))
    found = [{n for unit in units[p::dealt] for n in unit.parameters} & names for p in range(dealt)]
    taken = set[str]()
    for fragment in found:  # a parameter that two blocks share belongs to the first
        fragment -= taken
        taken |= fragment
    return [*found, names - taken]


def due(plan: Plan, step: int) -> Iterable[int]:
    """Fragments that are sent after this step (counted from 1)."""
    since = step - plan.warmup_sync_steps
    if since <= 0:
        return []
    return [
        p for p in range(plan.num_fragments) if since % plan.sync_every == (p + 1) * plan.sync_every // plan.num_fragments % plan.sync_every
    ]


STATE = "groups/"
"""How the names of what checkpoints hold of replica groups begin."""


@dataclass
class GroupMessage:
    """A mean over the groups, on its way."""

    fragment: int
    sent: int
    """After which step."""
    names: list[str]
    flats: list[Tensor]
    """The numbers to add up, a row for each number format; then the numbers of the step."""
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Until the sums are there."""
        for work in self.works:
            work.wait()
        self.works = []


class RareSynchroniser:
    """This rank's part of the synchronisation of replica groups."""

    def __init__(
        self, setup: RankSetup, mesh: Mesh, whole: Sketch, params: Mapping[str, nn.Parameter], parts: dict[str, Part], refresh: Callable[[], None]
    ):
        """`whole`: the sketch of the whole model. `parts`: of every parameter and buffer. `refresh`: is called when they were written."""
        self.plan, self.device, self.params, self.refresh = setup.plan, setup.device, params, refresh
        self.group, self.count = mesh.group("replica_groups"), setup.plan.replica_groups
        self.outer = setup.plan.outer_sync == "diloco"
        trained = {n for n, p in params.items() if p.requires_grad}
        self.own = {n: part for n, part in parts.items() if n in trained}
        """This rank's parts of the trained parameters."""
        self.changing = {n: part for n, part in parts.items() if n not in trained and _changes(whole, n, part)}
        """Its parts of what forward passes change: statistics and moving averages, of which groups take the mean."""
        order = list(self.own)
        self.fragments = [[n for n in order if n in names] for names in fragments_of(setup.plan, whole)]
        self.base: dict[str, Tensor] = {}
        """The global weights, where they are not the mean of the groups'."""
        self.sgd: torch.optim.SGD | None = None
        self.compressor: Compressor | None = None
        if setup.plan.grad_compression != "none":
            plan, like = setup.plan, {n: params[n] for n in self.own}
            self.compressor = Compressor(plan.grad_compression, like, setup.job.seed, plan.compression_rank)
        self.pending: list[GroupMessage] = []
        self.met = set[str]()
        """Parameters that had a gradient in some step."""
        self._writing = self._read = False
        """Weights are being written from here; the global ones are read from a checkpoint themselves."""

    def sums(self, step: int) -> bool:
        """Whether gradients of this step (counted from 1) are summed over all groups, as copies do."""
        return step <= self.plan.warmup_sync_steps

    def total(self, weight: Tensor) -> None:
        """Add up a number over the groups, in place."""
        dist.all_reduce(weight, group=self.group)

    def given(self, samples: bool) -> None:
        """Gradients of a step are there; `samples`: the group had any. If not, they are zeros for what it used before."""
        own = self.params
        if samples:
            self.met.update(n for n, p in own.items() if p.grad is not None)
            return
        for name in self.met & own.keys():
            own[name].grad = torch.zeros_like(own[name])

    def begin(self) -> None:
        """Before the first update: the weights are the global ones."""
        if self.base or not (self.outer or self.compressor):
            return
        self.base = {n: part.tensor.clone() for n, part in self.own.items()}
        if not self.outer:
            return
        momentum = self.plan.outer_momentum
        self.sgd = torch.optim.SGD(self.base.values(), self.plan.outer_lr, momentum, nesterov=momentum > 0)
        for tensor in self.base.values() if momentum else ():
            self.sgd.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)

    def after(self, step: int, word: list[float]) -> list[tuple[int, list[float]]]:
        """After the update of a step: send and apply what is due. `word`: numbers to add up over the groups, which come back
        with the step that they were sent in."""
        if self.sums(step):
            row = torch.tensor(word, dtype=torch.float64, device=self.device)
            dist.all_reduce(row, group=self.group)
            if step == self.plan.warmup_sync_steps:
                self._rebase()
            return [(step, row.tolist())]
        for fragment in due(self.plan, step):
            message = self._message(fragment, step, word)
            rows = message.flats if self.compressor is None else self._compressed(message)
            message.works = [w for f in rows if (w := dist.all_reduce(f, group=self.group, async_op=True))]
            self.pending.append(message)
        heard = [self._take_over(m) for m in self.pending if step - m.sent >= self.plan.fragment_delay]
        self.pending = [m for m in self.pending if step - m.sent < self.plan.fragment_delay]
        return heard

    def _message(self, fragment: int, step: int, word: list[float]) -> GroupMessage:
        names = [*self.fragments[fragment], *(self.changing if fragment == self.plan.num_fragments - 1 else ())]
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for name in names:
            tensor = self._part(name).tensor.detach()
            moved = self.base[name] - tensor if name in self.base else tensor
            by_format.setdefault(tensor.dtype, []).append(moved.reshape(-1))
        flats = [torch.cat(rows) for rows in by_format.values()]
        flats.append(torch.tensor(word, dtype=torch.float64, device=self.device))
        return GroupMessage(fragment, step, names, flats)

    def _take_over(self, message: GroupMessage) -> tuple[int, list[float]]:
        """Take over a mean. Returns the step in which it was sent, and the sums of its numbers."""
        message.wait()
        with torch.no_grad():
            for name, total in self._rows(message):
                here, mean = self._part(name).tensor, total / self.count
                if name not in self.base:
                    self._mixed(here, mean)
                elif self.sgd is None:
                    here.copy_(self.base[name].sub_(mean))
                else:
                    self.base[name].grad = mean
            if self.sgd is not None:
                self.sgd.step()
                self.sgd.zero_grad(set_to_none=True)
                for name in message.names:
                    if name in self.base:
                        self._mixed(self._part(name).tensor, self.base[name])
        self._written()
        return message.sent, message.flats[-1].tolist()

    def _mixed(self, here: Tensor, there: Tensor) -> None:
        """Take over what came back, mixed with what a group has by now."""
        alpha = self.plan.fragment_alpha
        here.copy_(there if alpha == 0 else alpha * here + (1 - alpha) * there)

    def _compressed(self, message: GroupMessage) -> list[Tensor]:
        """Sum what can be compressed, at once. Returns what is left to add up: the numbers of the step."""
        assert self.compressor is not None
        rows = dict(self._rows(message))
        given = {n: row for n, row in rows.items() if n in self.base}
        for name, total in self.compressor.sum(given, self.group).items():
            rows[name].copy_(total)
        self.compressor.commit()
        for name in rows.keys() - given.keys():
            dist.all_reduce(rows[name], group=self.group)
        return message.flats[-1:]

    def _rows(self, message: GroupMessage) -> Iterator[tuple[str, Tensor]]:
        """(name, sum over the groups) of what a message brought: views."""
        at: dict[torch.dtype, int] = {}
        flats = {flat.dtype: flat for flat in message.flats[-2::-1]}
        for name in message.names:
            like = self._part(name).tensor
            first = at.get(like.dtype, 0)
            at[like.dtype] = first + like.numel()
            yield name, flats[like.dtype][first : first + like.numel()].view(like.shape)

    def _part(self, name: str) -> Part:
        return self.own[name] if name in self.own else self.changing[name]

    def _written(self) -> None:
        """Weights were written: whatever holds copies of them takes the new ones."""
        self._writing = True
        self.refresh()
        self._writing = False

    def reloaded(self) -> None:
        """Weights were written from outside, as those of a checkpoint: they are the global ones."""
        if not self._writing and not self._read:
            self._rebase()
        self._read = False

    def _rebase(self) -> None:
        for name, tensor in self.base.items():
            tensor.copy_(self.own[name].tensor)

    def global_parts(self) -> dict[str, Part]:
        """This rank's part of the global weights, and of what else groups take the mean of. All ranks call it."""
        found = self.base_parts()
        for name, part in (*self.own.items(), *self.changing.items()):
            if name not in found:
                mean = part.tensor.detach().clone()
                dist.all_reduce(mean, group=self.group)
                found[name] = replace(part, tensor=mean.div_(self.count))
        return found

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """The weights of all groups together in the place of this group's own."""
        own = {name: self._part(name).tensor.clone() for name in (*self.own, *self.changing)}
        self._take({name: part.tensor for name, part in self.global_parts().items()}.items())
        try:
            yield
        finally:
            self._take(own.items())

    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self._part(name).tensor.copy_(tensor)
        self._written()

    def base_parts(self) -> dict[str, Part]:
        """This rank's part of the global weights where they are kept."""
        return {n: replace(self.own[n], tensor=tensor) for n, tensor in self.base.items()}

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds of the outer optimizer, and of what is on its way."""
        found = {f"outer/{name}": replace(self.own[name], tensor=momentum) for name, momentum in self._momenta()}
        for message in self.pending:
            message.wait()
            for name, row in self._rows(message):
                found[f"sent/{message.fragment}/{name}"] = replace(self._part(name), tensor=row)
        return found

    def _momenta(self) -> Iterator[tuple[str, Tensor]]:
        """Of the outer optimizer, if it has any."""
        state = self.sgd.state if self.sgd is not None else {}
        yield from ((name, state[t]["momentum_buffer"]) for name, t in self.base.items() if t in state)

    def held(self) -> list[Tensor]:
        """What a rank has beside its weights and its optimizer's state."""
        return [*self.base.values(), *(m for _, m in self._momenta()), *(f for m in self.pending for f in m.flats)]

    def values(self) -> dict[str, Any]:
        """The same of what is not a tensor: fragments on their way, the step in which each was sent, the sums of its numbers."""
        return {"sent": [[m.fragment, m.sent, m.flats[-1].tolist()] for m in self.pending]}

    def own_values(self) -> dict[str, Any]:
        """What this rank knows of its group alone."""
        return {"met": sorted(self.met)}

    def expect(self, sent: list[tuple[int, int, list[float]]]) -> None:
        """Make room for what a checkpoint holds of the outer optimizer and of messages, so that it is read in place."""
        self.begin()
        self._read = True
        self.pending = [self._message(fragment, step, word) for fragment, step, word in sent]

    def resume(self, met: list[str]) -> None:
        """Go on as the group that a checkpoint tells of."""
        self.met = set(met)

    def end(self) -> None:
        """No step follows: wait for what is on its way."""
        for message in self.pending:
            message.wait()


def _changes(whole: Sketch, name: str, part: Part) -> bool:
    """Whether forward passes change a tensor, and groups take the mean of it: not of counters."""
    module = name.rpartition(".")[0]
    changing = module in whole.batch_norms or name in whole.counting or name in whole.rewritten
    return changing and part.tensor.is_floating_point()
