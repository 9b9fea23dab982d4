"""Which units of a model cut over `cp` tell other ranks something, seen in one run without ranks.

The model runs once on a short sequence as one of the ranks, with others that never answer. The run is on real tensors,
because code that makes masks at need makes others on fake ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import PlaitError
from plait.model.trace import Call, watch
from plait.parallel.context.attention import Asked
from plait.parallel.context.opened_unit import Layout
from plait.parallel.context.runtime import Stretching
from plait.parallel.context.sequence_shard import Held
from plait.parallel.context.sequences import refused, short
from plait.tensors.collectives import Absent
from plait.tensors.sharded_tensor import Spread
from plait.tensors.torch_private import checkpoint_frame


@dataclass(frozen=True)
class Communication:
    """What tells other ranks something: units, `""` for code between them; and how many heads the queries of attentions have."""

    units: frozenset[str] = frozenset()
    heads: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Deaf(Held):
    """Rows of a rank whose group never answers."""

    told: Callable[[], None] = lambda: None
    length_of: Callable[[Held], int] = field(default=lambda held: 0)

    @property
    def length(self) -> int:
        """Of the sequence as it was sketched."""
        return self.length_of(self)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.told()
        shape = list(local.shape)
        shape[dim] = self.cut.length - shape[dim]
        return torch.cat([local, local.new_zeros(shape)], dim)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return self.gather(local, dim)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        return Spread(local, dim, self.cut, self.group)


def communication(model: nn.Module, inputs: Any, call: Call, stretching: Stretching, layout: Layout) -> Communication:
    """What tells in a forward pass ; `stretching` has wrapped the model.

    P040 when a unit itself would compute its attention again, seeing its rows alone.
    """
    units, heads, absent = set[str](), set[int](), Absent(stretching.ranks)

    def answer(asked: Asked, queries: Held, keys: Held) -> Tensor:
        if checkpoint_frame() is not stretching.frame:
            why = "a checkpoint in its own code (torch.utils.checkpoint) holds its attention, and runs that alone in backward"
            fix = "checkpoint the whole unit", "recompute=full in the plan"
            raise refused(f"unit {stretching.unit} cannot run on a stretch of the sequence", why, *fix)
        units.add(stretching.unit)
        heads.add(asked.q.shape[1])
        return F.scaled_dot_product_attention(
            asked.q, asked.k, asked.v, enable_gqa=asked.k.shape[1] != asked.q.shape[1]
        )

    def run(module: nn.Module, given: Any) -> Any:
        with torch.enable_grad():
            return call(module, given)

    told = lambda: units.add(stretching.unit)  # noqa: E731
    stretching.hold = lambda length: _Deaf(layout(length, stretching.ranks), absent, 0, told, stretching.sketched)
    stretching.answer = answer
    handles = stretching.install()
    try:
        try:
            watch(model, short(stretching.course, inputs, stretching.ranks), run, False)
        except PlaitError:
            raise
        except Exception:  # it may need its own length
            watch(model, inputs, run, False)
    finally:
        for handle in handles:
            handle.remove()
        stretching.held = {}
    return Communication(frozenset(units), frozenset(heads))
