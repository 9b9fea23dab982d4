"""Layers whose experts are elsewhere: what runs instead of their own forward (see `parallel/expert/strategy.py`).

`StackedExperts`: a module that holds its experts in parameters [experts, …] and is told for each token which it goes to. The
rows of tokens travel; the owner runs the module's own forward with its share of the experts.

`ListedExperts`: a layer that holds a list of expert modules and calls them in code of its own, whatever that is. The code is
run twice. The first time each expert only notes what it is given and returns zeros; what was noted travels to the
experts and comes back; the second time each call returns the expert's result. This is the same function as long as what
an expert is given does not depend on what another returns, and rows do not depend on each other inside an expert; both
are checked before (`parallel/expert/find.py`).

Stacked experts to which all tokens of a group come, by an all-gather (`token_dispatcher=allgather`).

Every rank sees the tokens of all ranks of the group and what each has chosen. It runs its experts on every choice, of which those of other
ranks' experts count zero, and a reduce-scatter adds up the results of all ranks into each rank's own tokens. How large all of this is
follows from how many tokens the ranks have, which their hosts know. So no host waits for a device, whatever the router chose.

Each row has one choice with a weight of one, as on the way of `StackedExperts`, and the weights are applied after: a module that is given
several choices may write one over another where two of them are of the same expert.

[Note: Dispatch]
Rows that travel to the ranks that hold their experts, and back: all-to-all with uneven counts.

Every rank of a group knows for each expert of a layer which of its rows go there. The ranks tell each other how many,
exchange the rows, compute with the experts they hold, and send the results back in the order in which they came. The
backward pass is the same journey in the other direction, so an expert's gradient is the sum over the rows of all ranks
and nothing has to be summed or divided afterwards (see `parallel/expert/strategy.py`).

All of these are collectives: every rank must come to each of them, in the same order, also one that has no row for any
expert or gets none, also when the forward pass is computed again in backward. The pieces here see to that: what leaves
and what arrives can always be differentiated, and nothing that arrived is left out of the graph.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.losses.global_batch import BatchPeers
from plait.tensors.collectives import gathered, host_or, linear, rows_of_ranks, sum_part
from plait.tensors.modules import own_forward, state_kept
from plait.tensors.rows import Rows
from plait.tensors.torch_private import leaves, tree_leaves, tree_map_only
from plait.tensors.transfers import HostCopy, upload

Serve = Callable[[Tensor, list[int | None]], Tensor]
"""(rows sorted by expert, how many are for each of this rank's experts; None: nobody called it) -> a row for each."""


@dataclass(frozen=True)
class ExpertPlacement:
    """How the experts of one layer lie on the ranks of a group: rank after rank, sizes differ by at most one."""

    group: ProcessGroup
    experts: int

    @property
    def rows(self) -> Rows:
        """Which experts each rank has."""
        return Rows.even(self.experts, self.group.size())

    @property
    def mine(self) -> range:
        """The experts of this rank."""
        ((first, length),) = self.rows.ranks[self.group.rank()]
        return range(first, first + length)


def through(rows: Tensor, counts: list[int | None], way: ExpertPlacement, serve: Serve) -> Tensor:
    """A result for each row, from the rank that has the row's expert; in the order of the rows.

    rows [n, …], sorted by expert; `counts`: how many belong to each expert of the layer, None where there was no call.
    """
    mine = len(way.mine)
    asked = _counts(counts, way, rows.device)
    given = [sum(n or 0 for n in counts[first : first + length]) for ((first, length),) in way.rows.ranks]
    taken = [sum(max(n, 0) for n in row) for row in asked]
    arrived = travel(rows, given, taken, way.group)
    order = numbered([max(n, 0) for row in asked for n in row], rows.device).remainder(mine).argsort(stable=True)
    called = [[row[e] for row in asked if row[e] >= 0] for e in range(mine)]
    results = serve(arrived.index_select(0, order), [sum(c) if c else None for c in called])
    results = results if len(results) else tied(results, arrived)
    return travel(results.index_select(0, order.argsort()), taken, given, way.group)


def numbered(counts: Sequence[int], device: torch.device) -> Tensor:
    """0 as often as the first count says, then 1 as often as the second, and so on: on the device, without a wait for it."""
    repeats = upload(counts, device, torch.int64)
    return torch.arange(len(counts), device=device).repeat_interleave(repeats, output_size=sum(counts))


def _counts(counts: list[int | None], way: ExpertPlacement, device: torch.device) -> list[list[int]]:
    """Of each rank: how many rows it has for each expert of this rank; −1 where it did not call it. The hosts tell each other, where
    they can: all of them know theirs, and no device is waited for."""
    device = host_or(device, way.group)
    sizes, mine = list(way.rows.sizes), len(way.mine)
    sent = torch.tensor([-1 if n is None else n for n in counts], dtype=torch.int64, device=device)
    received = torch.empty(mine * len(sizes), dtype=torch.int64, device=device)
    dist.all_to_all_single(received, sent, [mine] * len(sizes), sizes, group=way.group)
    return received.view(len(sizes), mine).tolist()


def travel(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Rows [n, …] sent to the ranks of the group, `given[r]` to rank r, in order; of rank r come `taken[r]`."""
    needed = torch.is_grad_enabled() and not rows.requires_grad
    anchor = torch.zeros((), requires_grad=needed)  # so that backward comes here on every rank, and once
    return _Travel.apply(rows, anchor, given, taken, group)


def tied(result: Tensor, *others: Tensor) -> Tensor:
    """`result`, from which backward also comes to the `others`, with zeros."""
    return _Tied.apply(result, *others)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, given: list[int], taken: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.way = given, taken, group
        ctx.save_for_backward(anchor.new_empty(0))  # a recomputation comes as far as this on every rank
        return moved(rows, given, taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        _ = ctx.saved_tensors  # and on every rank it happens before the gradients travel
        given, taken, group = ctx.way
        return moved(grads[0], taken, given, group), None, None, None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(o.shape, o.dtype, o.device) for o in others]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0], *(torch.zeros(s, dtype=d, device=where) for s, d, where in ctx.others)


def moved(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """`travel`, not differentiated."""
    received = rows.new_empty([sum(taken), *rows.shape[1:]])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received


Through = Callable[[Tensor, list[int | None], Serve], Tensor]
"""What takes rows to the experts and back: `travelling`, or `at_home` where all experts are here."""


def travelling(way: ExpertPlacement) -> Through:
    """Rows travel to the ranks of the group."""
    return lambda rows, counts, serve: through(rows, counts, way, serve)


def at_home(rows: Tensor, counts: list[int | None], serve: Serve) -> Tensor:
    return serve(rows, counts)


class StackedExperts:
    """The forward of a module with stacked experts, of which this rank has `mine`."""

    def __init__(self, module: nn.Module, experts: int, through: Through, sharers: BatchPeers):
        self.own, self.experts, self.through, self.sharers = own_forward(module), experts, through, sharers
        self.names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args)) | kwargs
        name, index, weight = roles(given)
        hidden, chosen, weights = given[name], given[index], given[weight]
        flat = chosen.reshape(-1)
        expert = torch.where((flat >= 0) & (flat < self.experts), flat, self.experts).long()  # a token may be sent nowhere
        each = expert.new_zeros(self.experts + 1).index_add_(0, expert, torch.ones_like(expert))
        counts = [0] * self.experts if self.sharers.idle else [int(n) for n in HostCopy(each[:-1]).read()]
        order = expert.argsort(stable=True)[: sum(counts)]
        token = order // chosen.shape[1]

        def serve(rows: Tensor, totals: list[int | None]) -> Tensor:
            """Without a row, one of no meaning is computed and dropped: stacked parameters have a gradient on every rank."""
            count, sizes = len(rows), [n or 0 for n in totals]
            if not count:
                row = torch.linspace(-1.0, 1.0, rows.shape[1], dtype=rows.dtype, device=rows.device)
                rows, sizes = torch.cat([rows, row.unsqueeze(0)]), [1] + [0] * (len(sizes) - 1)
            experts = numbered(sizes, rows.device).unsqueeze(1)
            ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
            return spelled(self.own, given | {name: rows, index: experts, weight: ones}, len(args))[:count]

        result = self.through(hidden.index_select(0, token), [*counts], serve)
        result = (result * weights.reshape(-1).index_select(0, order).unsqueeze(1)).to(result.dtype)
        return result.new_zeros(len(hidden), *result.shape[1:]).index_add_(0, token, result)


def spelled(forward: Callable[..., Tensor], given: dict[str, Tensor], places: int) -> Tensor:
    """Call as the model does: the first `places` arguments by place, since a decorated forward may know them by other names."""
    values = list(given.values())
    return forward(*values[:places], **dict(list(given.items())[places:]))


def roles(given: dict[str, Any]) -> tuple[str, str, str]:
    """Which arguments are the tokens [tokens, width], the chosen experts and their weights [tokens, choices].

    KeyError when they are not those.
    """
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    whole = [n for n, t in tensors.items() if not t.is_floating_point() and t.dim() == 2]
    real = [n for n, t in tensors.items() if t.is_floating_point() and t.dim() == 2]
    if len(given) != 3 or len(whole) != 1 or len(real) != 2:
        raise KeyError("hidden, index, weights")
    shape = tensors[whole[0]].shape
    weight = next((n for n in reversed(real) if tensors[n].shape == shape), None)
    hidden = next(n for n in real if n != weight)
    if weight is None or tensors[hidden].shape[0] != shape[0]:
        raise KeyError("hidden, index, weights")
    return hidden, whole[0], weight


class Expert:
    """The forward of an expert: its own, unless its layer is noting what it is given, or giving what came back."""

    def __init__(self, module: nn.Module, number: int):
        self.own, self.number = own_forward(module), number
        self.ask: Callable[[int, Tensor], Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ask is None:
            return self.own(*args, **kwargs)
        rows = [*args, *kwargs.values()]
        if len(rows) != 1 or not isinstance(rows[0], Tensor):
            raise TypeError("an expert is given something else than one tensor of rows")
        flat = rows[0].reshape(-1, rows[0].shape[-1])
        result = self.ask(self.number, flat)
        return result.reshape(*rows[0].shape[:-1], *result.shape[1:])


class ListedExperts:
    """The forward of a layer with a list of experts, of which this rank has `mine`."""

    def __init__(self, layer: nn.Module, experts: list[nn.Module], mine: range, through: Through, sharers: BatchPeers):
        self.layer, self.own, self.modules, self.mine = layer, own_forward(layer), experts, mine
        self.through, self.sharers = through, sharers
        self.experts = [Expert(module, number) for number, module in enumerate(experts)]
        inside = {id(m) for module in experts for m in module.modules()}
        self.around = [m for m in layer.modules() if id(m) not in inside]
        self.width = 0
        """Numbers in a row, as last seen."""
        self.again: Callable[[], Callable[[], None]] = lambda: lambda: None
        """Notes where the random numbers are, and returns what goes back there."""
        for module, expert in zip(experts, self.experts):
            module.forward = expert

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, empty = self._first(args, kwargs)
        sharers = self.sharers
        order = [] if sharers.idle else sorted(range(len(given)), key=lambda k: given[k][0])
        counts: list[int | None] = [None] * len(self.experts)
        for k in order:
            counts[given[k][0]] = (counts[given[k][0]] or 0) + len(given[k][1])
        floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        rows = torch.cat([given[k][1] for k in order]) if order else tied(empty, *floats)
        whole = self.through(rows, counts, lambda r, totals: self._serve(r, totals, empty))
        results, at = dict[int, Tensor](), 0
        for k in order:  # not `split`: the code may write to what an expert returns
            results[k], at = whole.narrow(0, at, len(given[k][1])), at + len(given[k][1])
        nothing = lambda k: whole.new_zeros(len(given[k][1]), *whole.shape[1:])  # noqa: E731
        output = self._second(args, kwargs, given, lambda k: results[k] if k in results else nothing(k))
        leaves(output)  # a dataclass that torch's trees have not met is one leaf to them
        return tree_map_only(Tensor, lambda t: tied(t, whole) if t.is_floating_point() else t, output)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """What each call of an expert is given: (its number, rows), in order; and a tensor like them without rows."""
        given: list[tuple[int, Tensor]] = []
        like = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
        probe = self._serve_one(like.new_zeros(0, self.width))

        def note(number: int, rows: Tensor) -> Tensor:
            given.append((number, rows))
            return probe.new_zeros(len(rows), *probe.shape[1:])

        back = self.again()
        try:
            with state_kept(self.around, hooks=False):
                self._asking(
                    note, *tree_map_only(Tensor, torch.clone, args), **tree_map_only(Tensor, torch.clone, kwargs)
                )
        finally:
            back()
        for _, rows in given:
            if rows.dtype != like.dtype or rows.shape[1] != self.width:
                told = f"{rows.dtype} rows of {rows.shape[1]} numbers where the layer is given {like.dtype} and {self.width}"
                raise self._refused(f"an expert is given {told}")
        return given, like.new_zeros(0, self.width)

    def _second(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[int, Tensor]],
        result: Callable[[int], Tensor],
    ) -> Any:
        calls = 0

        def give(number: int, rows: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > len(given) or given[calls - 1][0] != number or given[calls - 1][1].shape != rows.shape:
                raise self._refused("its code took another course when it was run again with the experts' results")
            return result(calls - 1)

        output = self._asking(give, *args, **kwargs)
        if calls != len(given):
            raise self._refused("its code took another course when it was run again with the experts' results")
        return output

    def _serve(self, rows: Tensor, totals: list[int | None], empty: Tensor) -> Tensor:
        """An expert that nobody called does not run: it has no gradient."""
        found, at = [self._serve_one(empty)], 0
        for number, count in zip(self.mine, totals):
            if count is not None:
                found.append(self.modules[number](rows.narrow(0, at, count)))
                at += count
        return torch.cat(found)

    def _serve_one(self, empty: Tensor) -> Tensor:
        """What an expert of this rank makes of no rows: its width and number format."""
        with torch.no_grad():
            return self.experts[self.mine.start].own(empty)

    def _asking(self, ask: Callable[[int, Tensor], Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """The layer's own code, in which experts answer by `ask`."""
        for expert in self.experts:
            expert.ask = ask
        try:
            return self.own(*args, **kwargs)
        finally:
            for expert in self.experts:
                expert.ask = None

    def _refused(self, why: str) -> PlaitError:
        what = f"the experts of a {type(self.layer).__name__} cannot be called from other ranks"
        return PlaitError(Problem("P051", what, why=why, fix=("ep=1",)))


class GatheredExperts:
    """The forward of a module with stacked experts, of which this rank has `way.mine`."""

    def __init__(self, module: nn.Module, way: ExpertPlacement, sharers: BatchPeers):
        self.own, self.way, self.sharers = own_forward(module), way, sharers
        self.names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args)) | kwargs
        name, index, weight = roles(given)
        count = 0 if self.sharers.idle else len(given[name])
        rows, mine = rows_of_ranks(count, self.way.group, given[name].device), self.way.mine
        hidden, weights = (linear(given[n][:count], self._all, self._sum, rows) for n in (name, weight))
        chosen = self._all(given[index][:count], rows)
        local = chosen.reshape(-1) - mine.start
        here = (local >= 0) & (local < len(mine))
        order = torch.where(here, local, len(mine)).argsort(stable=True)
        here, expert = here[order].unsqueeze(1), local.clamp(0, len(mine) - 1)[order].unsqueeze(1)
        token, ones = order // chosen.shape[1], torch.ones(len(order), 1, dtype=weights.dtype, device=weights.device)
        whole = given | {name: hidden.index_select(0, token), index: expert, weight: ones}
        result = spelled(self.own, whole, len(args))
        factor = torch.where(here, weights.reshape(-1).index_select(0, order).unsqueeze(1), 0)
        result = (torch.where(here, result, 0) * factor).to(result.dtype)
        result = result.new_zeros(len(hidden), *result.shape[1:]).index_add(0, token, result)
        own = linear(result, self._sum, self._all, rows)
        places = torch.arange(count, device=own.device)
        return own.new_zeros(len(given[name]), *own.shape[1:]).index_add(0, places, own)

    def _all(self, x: Tensor, rows: Rows) -> Tensor:
        with self.sharers.ask():  # a dry run does not know how many the others have
            return gathered(x, 0, rows, self.way.group)

    def _sum(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's tokens of the sum over the ranks: the adjoint of `_all`."""
        with self.sharers.ask():
            return sum_part(x, 0, rows, self.way.group)
