"""What the first rank of `tp` draws at random on its stretches, and how long the sequences are: seen in one run without ranks.

A unit that runs on a stretch of the sequence draws dropout for its rows alone. Along which dims of what is drawn a rank
has fewer numbers than one device would is not written anywhere in the model: the whole model runs once on fake tensors,
with its units on the first rank's stretches and the other ranks absent, and what it draws is compared with the sketch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from plait.model.sketch import PROBES, Sketch
from plait.model.slices import RegionBorder, Slices
from plait.model.trace import trace_run
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits, put
from plait.parallel.tensor.vocabulary import heads
from plait.randomness.sub_block import differing
from plait.tensors.collectives import Absent
from plait.tensors.modules import forwards_kept
from plait.tensors.parameters import copy_module
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor


def on_first_rank(
    model: nn.Module,
    pairs: Callable[[int], Any],
    run: Callable[[nn.Module, Any], Any],
    slices: Slices,
    sketch: Sketch,
    *,
    ranks: int,
    fake: bool,
) -> Slices:
    """The slices with what units draw on stretches, and the lengths of their sequences, as the first rank has them.

    `pairs(n)` makes inputs and targets of n samples, `run(model, pair)` the loss; `fake`: of a model without numbers.
    """
    model = model if fake else copy_module(model)
    units, alone = [unit.name for unit in sketch.units], _AloneUnits(model, slices, Absent(ranks))
    handles = [hook for one in slices.stretches for border in one.borders for hook in alone.border(border, slices)]
    handles += [
        model.get_submodule(name).register_forward_hook(alone.spread)
        for name in slices.vocabulary
        if name not in slices.owed and not isinstance(model.get_submodule(name), nn.Embedding)
    ]
    try:
        with forwards_kept(model.get_submodule(one.unit) for one in slices.stretches):
            handles += [*alone.wrap(), *alone.install(units, heads(model, slices))]
            watched = trace_run(model, pairs(PROBES[0]), run, fake)
    finally:
        for handle in handles:
            handle.remove()
    batched = lambda place, d, n: n * PROBES[0] if sketch.places.get(place) == d else n  # noqa: E731
    whole = {p: [batched(p, d, n) for d, n in enumerate(shape)] for p, shape in sketch.drawn.items()}
    local = {place: tuple(shape) for place, shape in watched.drawn.items()}
    return replace(slices, drawn=differing(whole, local), lengths=tuple(sorted(alone.lengths)))


class _AloneUnits(SequenceParallelUnits):
    """Units on the stretches of a rank whose group is not there: what would be received is empty."""

    def __init__(self, model: nn.Module, slices: Slices, group: Absent):
        super().__init__(model, slices, group)
        self.lengths: set[int] = set()

    def border(self, border: RegionBorder, slices: Slices) -> list[Any]:
        """Hooks that gather where the region of a row begins, and take a rank's rows where it ends."""
        gathered: dict[int, tuple[Tensor, Tensor]] = {}

        def begins(key: int | str, dim: int) -> Callable[..., Any]:
            def entering(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                x = kwargs[key] if isinstance(key, str) else args[key]
                if gathered.get(id(x), (None,))[0] is not x:
                    gathered[id(x)] = x, self.begin(x, dim)
                return put(args, kwargs, key, gathered[id(x)][1])

            return entering

        def ends(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
            gathered.clear()
            first, *rest = output if isinstance(output, tuple) else (output,)
            mine = self.end(first, border.given[0].dim or 0)
            return (mine, *rest) if isinstance(output, tuple) else mine

        begin = [
            self.model.get_submodule(one.module).register_forward_pre_hook(
                begins(one.key, one.dim or 0), with_kwargs=True
            )
            for one in border.given
        ]
        group = next(group for group in slices.groups if group.row == border.row)
        container = self.model.get_submodule(group.container)  # torch's attention calls no module of its own
        end = container if isinstance(container, nn.MultiheadAttention) else self.model.get_submodule(border.row)
        return [*begin, end.register_forward_hook(ends)]

    def spread(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> ShardedTensor:
        """A head's logits, of which other ranks would have the other words."""
        rows = Rows.chunks(output.shape[-1], self.group.size())
        return ShardedTensor(rows.take(output, -1, 0), output.dim() - 1, rows, self.group)

    def split(self, length: int) -> Rows:
        """Notes the length too."""
        self.lengths.add(length)
        return super().split(length)

    def left(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """This rank's rows of its own share: nobody has the others."""
        return self.taken(x, dim, rows)
