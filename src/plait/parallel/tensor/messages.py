"""What a model cut into slices sends: one entry per sum, from one run of the whole model on fake tensors.

Nothing is cut for it. A row returns what it will return as a share of a sum, a column is given what it will be given:
the run shows how large they are, per sample, and whether a gradient comes back. Heads hand on a `Spread` whose other
ranks are absent, so that the model's own code and the job's loss show what they will ask of them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.sketch import PROBES, Figure, Sketch
from plait.model.slices import Argument, Slices
from plait.model.trace import watch
from plait.parallel.tensor.sequence.runtime import Quiet, put
from plait.parallel.tensor.vocabulary import heads, rows
from plait.randomness.sub_block import differing
from plait.tensors.collectives import Absent
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import Spread


@dataclass(frozen=True)
class Event:
    """One message of a run. `when`: forward, backward, between (of units, in the forward pass) or loss (in it, either way)."""

    op: str
    module: str
    when: str
    bytes: int
    again: bool = True
    """Whether a recomputation of its unit comes to it: one stops when it has all that was kept for backward."""
    shape: tuple[int, ...] = ()
    """Of an argument that the unit uses: a sequence may be none of its dims, or two. Of hidden states, flat or not: ends in 0."""
    rows: int = 0
    """Of a `gather` or a `scatter` of stretches, which are of `bytes` in whole: the length of the sequence."""
    call: int = -1
    """Number of the unit call in which it is sent; -1 between units, and where the model's own code computes again."""


class Listening:
    """Hooks on a model, for one run."""

    def __init__(self, model: nn.Module, slices: Slices, ranks: int):
        self.events: list[Event] = []
        self.waiting: list[int] = []
        """Numbers of the events after which nothing has been kept for backward."""
        self.heads: list[tuple[Tensor, Tensor]] = []
        """What a head returned, and the same without a past, of which the loss is made."""
        self.asked: list[int] = []
        """Numbers of the events that are sent if a gradient comes to what a column was given."""
        self.reached: set[int] = set()
        self.calls, self.call = 0, -1
        """Unit calls so far, and the number of the one that runs; -1 between them."""
        self.returning = False
        """The backward pass runs: what is called now is computed again by the model's own code."""
        self.absent = Absent(ranks)
        self.handles: list[Any] = []
        self.quiet = Quiet(model, slices, Absent(ranks))
        self.quiet.note, self.quiet.asks = self._note, self._asks
        for group in slices.groups:
            seen: dict[int, tuple[Tensor, Tensor]] = {}
            self._begins(model, group.row, seen)
            for name in group.columns:
                self._hook(model, name, self._entering(group.row, seen), pre=True)
            for argument in group.arguments:
                self._hook(model, argument.module, self._argument(argument), pre=True)
            packed = isinstance(
                model.get_submodule(group.container), nn.MultiheadAttention
            )  # calls no module of its own
            self._hook(model, group.container if packed else group.row, self._leaving(group.row, seen))
        for name in (n for n in slices.vocabulary if n not in slices.owed):
            made = self._table if isinstance(model.get_submodule(name), nn.Embedding) else self._head
            self._hook(model, name, made(name, ranks))

    def kept(self, x: Tensor) -> Tensor:
        """A tensor is kept for backward: what was sent before it is sent again when the unit is recomputed."""
        self.waiting.clear()
        return x

    def _hook(self, model: nn.Module, name: str, hook: Any, pre: bool = False) -> None:
        module = model.get_submodule(name)
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        self.handles.append(register(hook, with_kwargs=True))

    def _begins(self, model: nn.Module, row: str, seen: dict[int, tuple[Tensor, Tensor]]) -> None:
        """A region in a unit on stretches: what is gathered asks for no sum in backward."""
        gathered: dict[int, tuple[Tensor, Tensor]] = {}
        border = self.quiet.borders.get(row)
        for argument in border[0].given if border else ():

            def entering(_: Any, args: Any, kwargs: Any, key: int | str = argument.key, dim: Any = argument.dim) -> Any:
                x = kwargs[key] if isinstance(key, str) else args[key]
                if gathered.get(id(x), (None,))[0] is not x:
                    whole = self.quiet.begin(x, dim, row)
                    gathered[id(x)], seen[id(whole)] = (x, whole), (whole, whole)
                return put(args, kwargs, key, gathered[id(x)][1])

            self._hook(model, argument.module, entering, pre=True)

    def _asks(self, x: Tensor, op: str, module: str, sent: Tensor, rows: int = 0, shape: tuple[int, ...] = ()) -> None:
        """A message of the backward pass, which is sent if a gradient comes to `x`."""
        if not x.requires_grad or self.returning:
            return
        number = len(self.events)
        self.asked.append(number)
        x.register_hook(lambda gradient: self.reached.add(number))
        self._note(op, module, "backward", sent, shape, rows)

    def _note(self, op: str, module: str, when: str, x: Tensor, shape: tuple[int, ...] = (), rows: int = 0) -> None:
        if self.returning and when in ("backward", "between"):
            return  # its gradient goes the way of the first call
        if when == "forward" and not self.returning:
            self.waiting.append(len(self.events))
        size = x.numel() * x.element_size()
        call = -1 if self.returning else self.call
        self.events.append(Event(op, module, when, size, not self.returning, shape, rows, call))

    def begun(self) -> None:
        """A unit's call begins."""
        self.calls += not self.returning
        self.call = self.calls - 1

    def ended(self) -> None:
        """A unit's call is over: what nothing was kept after is not sent again."""
        for number in self.waiting:
            self.events[number] = replace(self.events[number], again=False)
        self.waiting.clear()
        self.call = -1

    def _entering(self, row: str, seen: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
        def entered(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.requires_grad):
                return value
            if id(value) not in seen:
                seen[id(value)] = value, value.view_as(value)
                self._asks(seen[id(value)][1], "allreduce_", row, value, shape=(*value.shape[:-1], 0))
            return seen[id(value)][1]

        def entering(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return tuple(map(entered, args)), {key: entered(value) for key, value in kwargs.items()}

        return entering

    def back(self, loss: Tensor, leaves: list[nn.Parameter]) -> None:
        """The backward pass: what it sends, and which gradients never come. Without one that can be run, all come."""
        heads = [(whole, local) for whole, local in self.heads if local.requires_grad]
        if not loss.requires_grad:
            return
        self.returning = True
        found = (
            torch.autograd.grad(loss, [local for _, local in heads], retain_graph=True, allow_unused=True)
            if heads
            else ()
        )
        ends = [(loss, torch.ones_like(loss))]
        ends += [(whole, g) for (whole, _), g in zip(heads, found) if g is not None and whole.requires_grad]
        try:
            torch.autograd.grad([end for end, _ in ends], leaves, [g for _, g in ends], allow_unused=True)
        except Exception:  # a checkpoint of the older kind, or an operator without a backward on fake tensors
            return
        self.events = [e for i, e in enumerate(self.events) if i not in self.asked or i in self.reached]

    def _argument(self, argument: Argument) -> Callable[..., None]:
        key, dim = argument.key, argument.dim

        def entering(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            if not (isinstance(value, Tensor) and value.requires_grad):
                return
            if dim is None:
                self._note("allreduce_", argument.module, "backward", value, tuple(value.shape))
            elif value.shape[dim] > 1:  # its parts travel from each rank to each
                mine = value.narrow(dim, 0, value.shape[dim] // self.absent.ranks)
                for op in ("send", "recv_") * (self.absent.ranks - 1):
                    self._note(op, argument.module, "backward", mine, tuple(value.shape))

        return entering

    def _leaving(self, row: str, seen: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., None]:
        border = self.quiet.borders.get(row)

        def leaving(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            seen.clear()
            first = output[0] if isinstance(output, tuple) else output
            if border is None:
                self._note("allreduce_", row, "forward", first, (*first.shape[:-1], 0))
                return None
            mine = self.quiet.end(first, border[0].given[0].dim or 0, row)
            return (mine, *output[1:]) if isinstance(output, tuple) else mine

        return leaving

    def _table(self, name: str, ranks: int) -> Callable[..., None]:
        return lambda module, args, kwargs, output: self._note("allreduce_", name, "forward", output)

    def _head(self, name: str, ranks: int) -> Callable[..., Any]:
        def head(module: nn.Linear, args: Any, kwargs: Any, output: Tensor) -> Spread:
            if args[0].requires_grad and not module.__dict__.get("_gathered"):
                self._note("allreduce_", name, "backward", args[0])
            cut = rows(output.shape[-1], ranks)
            whole = output.narrow(-1, *cut[0][0])
            local = whole.detach().requires_grad_(output.requires_grad)
            if not self.returning:
                self.heads.append((whole, local))
            return Spread(local, output.dim() - 1, Rows(cut), self.absent)

        return head


@dataclass(frozen=True)
class Made:
    """A model, and how to run it: `batches(n)` makes inputs and targets of n samples, `run(model, batch)` the loss."""

    model: nn.Module
    batches: Callable[[int], Any]
    run: Callable[[nn.Module, Any], Any]
    fake: bool = True


def listen(
    made: Made, samples: int, slices: Slices, ranks: int, units: tuple[str, ...]
) -> tuple[list[Event], dict[str, tuple[int, ...]]]:
    """The messages of one forward and backward pass, and what the first rank draws in it: place -> shape."""
    model = made.model if made.fake else copy.deepcopy(made.model)
    heard = Listening(model, slices, ranks)
    for unit in units:
        module = model.get_submodule(unit)
        heard.handles.append(module.register_forward_pre_hook(lambda *_: heard.begun(), prepend=True))
        heard.handles.append(module.register_forward_hook(lambda *_: heard.ended()))

    def listened(model: nn.Module, given: Any) -> Tensor:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(heard.kept, lambda x: x):
            loss = made.run(model, given)
        with torch.enable_grad():
            heard.back(loss, [p for p in model.parameters() if p.requires_grad])
        return loss

    try:
        heard.quiet.wrap()
        heard.handles += heard.quiet.install(units, heads(model, slices))
        watched = watch(model, made.batches(samples), listened, made.fake)
    finally:
        heard.quiet.unwrap()
        for handle in heard.handles:
            handle.remove()
    drawn = {place: tuple(shape) for place, shape in watched.drawn.items()}
    return heard.events + [Event(op, "", "loss", size) for op, size in heard.absent.calls], drawn


@dataclass(frozen=True)
class Toll:
    """One message per call, `bytes` large; `when`, `again` and `shape` as `Event` has them."""

    op: str
    module: str
    when: str
    bytes: Figure
    again: bool
    shape: tuple[int, ...] = ()
    rows: int = 0
    call: int = -1

    def messages(
        self, samples: Sequence[int], place: tuple[int, int], held: Fraction, direct: bool
    ) -> list[tuple[str, int, int]]:
        """(operator, calls, bytes) of a rank for micro-batches of so many samples. `place`: rank, ranks; `held`: how
        much of a sequence they have; `direct`: parts are exchanged by sends and receives."""
        size = sum(round(round(self.bytes.of(n)) * held) for n in samples)
        if not self.rows:
            return [(self.op, len(samples), size)]
        rank, ranks = place
        sizes = Rows.even(self.rows, ranks).sizes
        others = [n for r, n in enumerate(sizes) if r != rank and n]
        mine = [sizes[rank]] * (ranks - 1) if sizes[rank] else []
        sent, taken = (mine, others) if self.op == "gather" else (others, mine)
        count, row = len(samples), size // self.rows
        if not direct:
            return [("allgather_" if self.op == "gather" else "reduce_scatter_", count, row * sizes[rank])]
        return [("send", count * len(sent), row * sum(sent)), ("recv_", count * len(taken), row * sum(taken))]


def tolls(made: Made, slices: Slices, ranks: int, units: tuple[str, ...]) -> tuple[Toll, ...]:
    """What every call of the model sends. `units`: names of those that may be recomputed."""
    small, large = (listen(made, n, slices, ranks, units)[0] for n in PROBES)
    found = []
    for a, b in zip(small, large):
        each = (b.bytes - a.bytes) / (PROBES[1] - PROBES[0])
        size = Figure(a.bytes - PROBES[0] * each, each)
        found.append(Toll(a.op, a.module, a.when, size, a.again, a.shape, a.rows, a.call))
    return tuple(found)


def drawn(made: Made, slices: Slices, sketch: Sketch, ranks: int) -> frozenset[tuple[str, int]]:
    """(place, dim) of what units on stretches draw: along these the first rank draws less than one device would."""
    local = listen(made, PROBES[0], slices, ranks, tuple(unit.name for unit in sketch.units))[1]
    batched = lambda place, d, n: n * PROBES[0] if sketch.places.get(place) == d else n  # noqa: E731
    whole = {p: [batched(p, d, n) for d, n in enumerate(shape)] for p, shape in sketch.drawn.items()}
    return differing(whole, local)
