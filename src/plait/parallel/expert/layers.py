"""The forward of layers whose experts are distributed over ranks (see `parallel/expert/strategy.py`).

`StackedExperts`: a module with experts in parameters [experts, …], and an argument that selects the experts of each token. The
rows of tokens are sent. The rank of an expert runs the module's own forward with its part of the experts.

`ListedExperts`: a layer with a list of expert modules, which it calls in its own code. The code runs twice. In the first run,
each expert only records its input and returns zeros. The recorded rows are sent to the experts, and the results are sent back. In
the second run, each call returns the expert's result. This is the same function if no expert's input depends on another expert's
output, and rows are independent inside an expert. Both are checked before training (`parallel/expert/mixture_finder.py`).

[Note: All-gather]
`GatheredExperts`: stacked experts that receive all tokens of a group by an all-gather (`token_dispatcher=allgather`). Every rank
has the tokens of all ranks of the group, and their choices. It runs its experts on every choice; choices of other ranks' experts
count zero. A reduce-scatter sums the results of all ranks into each rank's own tokens. All sizes follow from the number of tokens
per rank, which the hosts have. So no host waits for a device, whatever the router chose.

Each row has one choice with a weight of one, as in `StackedExperts`, and the weights are applied after. A module with several
choices per row may overwrite one by another if both have the same expert.

[Note: Dispatch]
Rows are sent to the ranks of their experts and back by an all-to-all with uneven counts. Every rank of a group has the number of
its rows for each expert of a layer. The ranks exchange these counts and the rows, compute their experts, and return the results
in the order of the rows. Backward sends gradients in the other direction. So an expert's gradient is the sum over the rows of all
ranks, and needs no further sum or division (see `parallel/expert/strategy.py`).

All of these are collectives. Every rank must call each of them in the same order, also without rows, and also when backward
recomputes the forward pass. So all sent and received rows require gradients, and every received row stays in the graph.
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
from plait.tensors.collectives import (
    all_gather_rows,
    apply_linear,
    choose_exchange_device,
    exchange_row_counts,
    reduce_scatter_rows,
)
from plait.tensors.module_state import bind_forward, restore_module_state
from plait.tensors.rows import Rows
from plait.tensors.torch_private import dataclass_leaves, tree_leaves, tree_map_only
from plait.tensors.transfers import HostCopy, upload_row

ServeRows = Callable[[Tensor, list[int | None]], Tensor]
"""(rows sorted by expert, number of rows for each of this rank's experts; None: no rank called it) -> a result for each row."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The placement of a layer's experts on the ranks of a group: in rank order, with sizes that differ by at most one."""

    group: ProcessGroup
    experts: int

    @property
    def rows(self) -> Rows:
        """The experts of each rank."""
        return Rows.make_even(self.experts, self.group.size())

    @property
    def mine(self) -> range:
        """The experts of this rank."""
        ((first, length),) = self.rows.ranks[self.group.rank()]
        return range(first, first + length)


def dispatch_rows(rows: Tensor, counts: list[int | None], way: ExpertPlacement, serve: ServeRows) -> Tensor:
    """Return a result for each row, from the rank of the row's expert, in the order of the rows.

    rows [n, …], sorted by expert. `counts`: number of rows for each expert of the layer, None if there was no call.
    """
    mine = len(way.mine)
    asked = _exchange_counts(counts, way, rows.device)
    given = [sum(n or 0 for n in counts[first : first + length]) for ((first, length),) in way.rows.ranks]
    taken = [sum(max(n, 0) for n in row) for row in asked]
    arrived = exchange_rows(rows, given, taken, way.group)
    order = repeat_index([max(n, 0) for row in asked for n in row], rows.device).remainder(mine).argsort(stable=True)
    called = [[row[e] for row in asked if row[e] >= 0] for e in range(mine)]
    results = serve(arrived.index_select(0, order), [sum(c) if c else None for c in called])
    results = results if len(results) else tie_gradients(results, arrived)
    return exchange_rows(results.index_select(0, order.argsort()), taken, given, way.group)


def repeat_index(counts: Sequence[int], device: torch.device) -> Tensor:
    """Repeat each index by its count: 0 `counts[0]` times, then 1 `counts[1]` times, and so on. The device is not waited for."""
    repeats = upload_row(counts, device, torch.int64)
    return torch.arange(len(counts), device=device).repeat_interleave(repeats, output_size=sum(counts))


def _exchange_counts(counts: list[int | None], way: ExpertPlacement, device: torch.device) -> list[list[int]]:
    """Exchange counts: the number of rows that each rank has for each expert of this rank; −1 if it did not call the expert.

    The hosts communicate if possible: they have their counts, so no device is waited for.
    """
    device = choose_exchange_device(device, way.group)
    sizes, mine = list(way.rows.sizes), len(way.mine)
    sent = torch.tensor([-1 if n is None else n for n in counts], dtype=torch.int64, device=device)
    received = torch.empty(mine * len(sizes), dtype=torch.int64, device=device)
    dist.all_to_all_single(received, sent, [mine] * len(sizes), sizes, group=way.group)
    return received.view(len(sizes), mine).tolist()


def exchange_rows(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Send rows [n, …] to the ranks of the group, `given[r]` rows to rank r, in order; receive `taken[r]` rows from rank r."""
    needed = torch.is_grad_enabled() and not rows.requires_grad
    anchor = torch.zeros((), requires_grad=needed)  # so that backward runs here on every rank, once
    return _RowExchange.apply(rows, anchor, given, taken, group)


def tie_gradients(result: Tensor, *others: Tensor) -> Tensor:
    """Return `result`, from which backward also reaches the `others`, with zeros."""
    return _GradientTie.apply(result, *others)


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, given: list[int], taken: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.way = given, taken, group
        ctx.save_for_backward(anchor.new_empty(0))  # on every rank, a recomputation runs up to this point
        return send_rows(rows, given, taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        _ = ctx.saved_tensors  # on every rank, the recomputation ends before the gradients are sent
        given, taken, group = ctx.way
        return send_rows(grads[0], taken, given, group), None, None, None, None


class _GradientTie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(o.shape, o.dtype, o.device) for o in others]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0], *(torch.zeros(s, dtype=d, device=where) for s, d, where in ctx.others)


def send_rows(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Exchange rows without gradients."""
    received = rows.new_empty([sum(taken), *rows.shape[1:]])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received


DispatchRows = Callable[[Tensor, list[int | None], ServeRows], Tensor]
"""Sends rows to the experts and the results back: from `make_dispatch`, or `serve_locally` if all experts are here."""


def make_dispatch(way: ExpertPlacement) -> DispatchRows:
    """Make a dispatch that sends rows to the ranks of the group."""
    return lambda rows, counts, serve: dispatch_rows(rows, counts, way, serve)


def serve_locally(rows: Tensor, counts: list[int | None], serve: ServeRows) -> Tensor:
    return serve(rows, counts)


class StackedExperts:
    """The forward of a module with stacked experts, of which this rank has some."""

    def __init__(self, module: nn.Module, experts: int, dispatch: DispatchRows, peers: BatchPeers):
        self.own, self.experts, self.dispatch, self.peers = bind_forward(module), experts, dispatch, peers
        self.names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args)) | kwargs
        name, index, weight = find_roles(given)
        hidden, chosen, weights = given[name], given[index], given[weight]
        flat = chosen.reshape(-1)
        expert = torch.where((flat >= 0) & (flat < self.experts), flat, self.experts).long()  # a token may have no expert
        each = expert.new_zeros(self.experts + 1).index_add_(0, expert, torch.ones_like(expert))
        counts = [0] * self.experts if self.peers.idle else [int(n) for n in HostCopy(each[:-1]).read()]
        order = expert.argsort(stable=True)[: sum(counts)]
        token = order // chosen.shape[1]

        def serve(rows: Tensor, totals: list[int | None]) -> Tensor:
            """Run the module on rows. Without rows, run it on one dummy row, so that stacked parameters have a gradient on every rank."""
            count, sizes = len(rows), [n or 0 for n in totals]
            if not count:
                row = torch.linspace(-1.0, 1.0, rows.shape[1], dtype=rows.dtype, device=rows.device)
                rows, sizes = torch.cat([rows, row.unsqueeze(0)]), [1] + [0] * (len(sizes) - 1)
            experts = repeat_index(sizes, rows.device).unsqueeze(1)
            ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
            return call_positionally(self.own, given | {name: rows, index: experts, weight: ones}, len(args))[:count]

        result = self.dispatch(hidden.index_select(0, token), [*counts], serve)
        result = (result * weights.reshape(-1).index_select(0, order).unsqueeze(1)).to(result.dtype)
        return result.new_zeros(len(hidden), *result.shape[1:]).index_add_(0, token, result)


def call_positionally(forward: Callable[..., Tensor], given: dict[str, Tensor], places: int) -> Tensor:
    """Call as the model does: the first `places` arguments by position, since a decorated forward may have other names for them."""
    values = list(given.values())
    return forward(*values[:places], **dict(list(given.items())[places:]))


def find_roles(given: dict[str, Any]) -> tuple[str, str, str]:
    """Find the arguments that are the tokens [tokens, width], the chosen experts and their weights [tokens, choices].

    Raises KeyError for other arguments.
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


class ExpertForward:
    """The forward of an expert: its own, or a handler while its layer records inputs or returns results."""

    def __init__(self, module: nn.Module, number: int):
        self.own, self.number = bind_forward(module), number
        self.handler: Callable[[int, Tensor], Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None:
            return self.own(*args, **kwargs)
        rows = [*args, *kwargs.values()]
        if len(rows) != 1 or not isinstance(rows[0], Tensor):
            raise TypeError("an expert must get exactly one tensor of rows")
        flat = rows[0].reshape(-1, rows[0].shape[-1])
        result = self.handler(self.number, flat)
        return result.reshape(*rows[0].shape[:-1], *result.shape[1:])


class ListedExperts:
    """The forward of a layer with a list of experts, of which this rank has `mine`."""

    def __init__(self, layer: nn.Module, experts: list[nn.Module], mine: range, dispatch: DispatchRows, peers: BatchPeers):
        self.layer, self.own, self.modules, self.mine = layer, bind_forward(layer), experts, mine
        self.dispatch, self.peers = dispatch, peers
        self.experts = [ExpertForward(module, number) for number, module in enumerate(experts)]
        inside = {id(m) for module in experts for m in module.modules()}
        self.around = [m for m in layer.modules() if id(m) not in inside]
        self.width = 0
        """Width of a row."""
        self.mark_random_state: Callable[[], Callable[[], None]] = lambda: lambda: None
        """Records the state of the random generators, and returns a function that restores it."""
        for module, expert in zip(experts, self.experts):
            module.forward = expert

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, empty = self._record_inputs(args, kwargs)
        sharers = self.peers
        order = [] if sharers.idle else sorted(range(len(given)), key=lambda k: given[k][0])
        counts: list[int | None] = [None] * len(self.experts)
        for k in order:
            counts[given[k][0]] = (counts[given[k][0]] or 0) + len(given[k][1])
        floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        rows = torch.cat([given[k][1] for k in order]) if order else tie_gradients(empty, *floats)
        whole = self.dispatch(rows, counts, lambda r, totals: self._serve_rows(r, totals, empty))
        results, at = dict[int, Tensor](), 0
        for k in order:  # not `split`: the code may write into an expert's output
            results[k], at = whole.narrow(0, at, len(given[k][1])), at + len(given[k][1])
        nothing = lambda k: whole.new_zeros(len(given[k][1]), *whole.shape[1:])  # noqa: E731
        output = self._run_with_results(args, kwargs, given, lambda k: results[k] if k in results else nothing(k))
        dataclass_leaves(output)  # registers dataclasses, which are leaves to torch's trees before
        return tree_map_only(Tensor, lambda t: tie_gradients(t, whole) if t.is_floating_point() else t, output)

    def _record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """Record the input of each expert call: (expert, rows), in order. Also return an empty tensor of such rows."""
        given: list[tuple[int, Tensor]] = []
        like = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
        probe = self._probe_output(like.new_zeros(0, self.width))

        def record(number: int, rows: Tensor) -> Tensor:
            given.append((number, rows))
            return probe.new_zeros(len(rows), *probe.shape[1:])

        back = self.mark_random_state()
        try:
            with restore_module_state(self.around, hooks=False):
                self._run_layer(
                    record, *tree_map_only(Tensor, torch.clone, args), **tree_map_only(Tensor, torch.clone, kwargs)
                )
        finally:
            back()
        for _, rows in given:
            if rows.dtype != like.dtype or rows.shape[1] != self.width:
                told = f"{rows.dtype} rows of {rows.shape[1]} values, but the layer gets {like.dtype} and {self.width}"
                raise self._make_error(f"an expert gets {told}")
        return given, like.new_zeros(0, self.width)

    def _run_with_results(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[int, Tensor]],
        result: Callable[[int], Tensor],
    ) -> Any:
        calls = 0

        def return_result(number: int, rows: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > len(given) or given[calls - 1][0] != number or given[calls - 1][1].shape != rows.shape:
                raise self._make_error("its code called other experts when it ran again with the experts' results")
            return result(calls - 1)

        output = self._run_layer(return_result, *args, **kwargs)
        if calls != len(given):
            raise self._make_error("its code called other experts when it ran again with the experts' results")
        return output

    def _serve_rows(self, rows: Tensor, totals: list[int | None], empty: Tensor) -> Tensor:
        """Run the called experts of this rank. An expert without calls does not run, so it has no gradient."""
        found, at = [self._probe_output(empty)], 0
        for number, count in zip(self.mine, totals):
            if count is not None:
                found.append(self.modules[number](rows.narrow(0, at, count)))
                at += count
        return torch.cat(found)

    def _probe_output(self, empty: Tensor) -> Tensor:
        """Run an expert of this rank on no rows, for the width and format of its output."""
        with torch.no_grad():
            return self.experts[self.mine.start].own(empty)

    def _run_layer(self, ask: Callable[[int, Tensor], Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own code, in which experts call `ask`."""
        for expert in self.experts:
            expert.handler = ask
        try:
            return self.own(*args, **kwargs)
        finally:
            for expert in self.experts:
                expert.handler = None

    def _make_error(self, why: str) -> PlaitError:
        what = f"the experts of a {type(self.layer).__name__} cannot be called from other ranks"
        return PlaitError(Problem("P051", what, why=why, fix=("ep=1",)))


class GatheredExperts:
    """The forward of a module with stacked experts, of which this rank has `placement.mine`."""

    def __init__(self, module: nn.Module, placement: ExpertPlacement, peers: BatchPeers):
        self.own, self.placement, self.peers = bind_forward(module), placement, peers
        self.names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args)) | kwargs
        name, index, weight = find_roles(given)
        count = 0 if self.peers.idle else len(given[name])
        rows, mine = exchange_row_counts(count, self.placement.group, given[name].device), self.placement.mine
        hidden, weights = (apply_linear(given[n][:count], self._gather_all, self._sum_local, rows) for n in (name, weight))
        chosen = self._gather_all(given[index][:count], rows)
        local = chosen.reshape(-1) - mine.start
        here = (local >= 0) & (local < len(mine))
        order = torch.where(here, local, len(mine)).argsort(stable=True)
        here, expert = here[order].unsqueeze(1), local.clamp(0, len(mine) - 1)[order].unsqueeze(1)
        token, ones = order // chosen.shape[1], torch.ones(len(order), 1, dtype=weights.dtype, device=weights.device)
        whole = given | {name: hidden.index_select(0, token), index: expert, weight: ones}
        result = call_positionally(self.own, whole, len(args))
        factor = torch.where(here, weights.reshape(-1).index_select(0, order).unsqueeze(1), 0)
        result = (torch.where(here, result, 0) * factor).to(result.dtype)
        result = result.new_zeros(len(hidden), *result.shape[1:]).index_add(0, token, result)
        own = apply_linear(result, self._sum_local, self._gather_all, rows)
        places = torch.arange(count, device=own.device)
        return own.new_zeros(len(given[name]), *own.shape[1:]).index_add(0, places, own)

    def _gather_all(self, x: Tensor, rows: Rows) -> Tensor:
        with self.peers.mark_exchange():  # in a dry run, the counts of other ranks are not available
            return all_gather_rows(x, 0, rows, self.placement.group)

    def _sum_local(self, x: Tensor, rows: Rows) -> Tensor:
        """Sum over the ranks and return this rank's tokens: the adjoint of `_gather_all`."""
        with self.peers.mark_exchange():
            return reduce_scatter_rows(x, 0, rows, self.placement.group)
