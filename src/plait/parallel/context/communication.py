"""Which units of a model cut over `cp` tell other ranks something, seen in one run without ranks.

The model runs once on a short sequence as one of the ranks, with others that never answer. The run is on real tensors,
because code that makes masks at need makes others on fake ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError
from plait.model.trace import Call, trace_run
from plait.parallel.context.attention import AttentionCall, plainly
from plait.parallel.context.opened_unit import Layout
from plait.parallel.context.runtime import ContextParallelUnits
from plait.parallel.context.sequence_layout import GroupLayout, SequenceLayout
from plait.parallel.context.sequences import refused, short
from plait.tensors.collectives import Absent
from plait.tensors.torch_private import checkpoint_frame


@dataclass(frozen=True)
class Communication:
    """What tells other ranks something: units, `""` for code between them; and how many heads the queries of attentions have."""

    units: frozenset[str] = frozenset()
    heads: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Deaf(GroupLayout):
    """Rows of a rank whose group never answers."""

    tell: Callable[[], None]

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.tell()
        shape = list(local.shape)
        shape[dim] = self.cut.length - shape[dim]
        return torch.cat([local, local.new_zeros(shape)], dim)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return self.gather(local, dim)


def communication(
    model: nn.Module, inputs: object, call: Call, parallel_units: ContextParallelUnits, layout: Layout
) -> Communication:
    """What tells other ranks something in a forward pass; `parallel_units` has wrapped the model.

    P040 when a unit itself would compute its attention again, seeing its rows alone.
    """
    units, heads, absent = set[str](), set[int](), Absent(parallel_units.ranks)

    def answer(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        if checkpoint_frame() is not parallel_units.frame:
            why = "a checkpoint in its own code (torch.utils.checkpoint) holds its attention, and runs that alone in backward"
            fix = "checkpoint the whole unit", "recompute=full in the plan"
            raise refused(f"unit {parallel_units.unit} cannot run on a stretch of the sequence", why, *fix)
        units.add(parallel_units.unit)
        heads.add(asked.q.shape[1])
        return plainly(replace(asked, mask=None, causal=False))

    def run(module: nn.Module, given: object) -> object:
        with torch.enable_grad():
            return call(module, given)

    tell = lambda: units.add(parallel_units.unit)  # noqa: E731
    parallel_units.hold = lambda length: _Deaf(layout(length, parallel_units.ranks), 0, absent, tell)
    parallel_units.answer = answer
    handles = parallel_units.install()
    try:
        try:
            trace_run(model, short(parallel_units.sequence_plan, inputs, parallel_units.ranks), run, False)
        except PlaitError:
            raise
        except Exception:  # it may need its own length
            trace_run(model, inputs, run, False)
    finally:
        for handle in handles:
            handle.remove()
        parallel_units.held = {}
    return Communication(frozenset(units), frozenset(heads))
