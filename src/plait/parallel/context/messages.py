"""What the ranks of a sequence tell each other in a step, known before there are any: the price of context parallelism.

The model runs once on a short sequence as one of the ranks, with others that never answer: whatever would be sent is
noted. From these notes come the messages of any rank, for sequences of any length in a batch of any size. The run is on
real tensors, because code that makes masks at need makes others on fake ones.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.model.trace import Call, watch
from plait.parallel.context.attention import Asked
from plait.parallel.context.blockwise import wide
from plait.parallel.context.opened_unit import Layout, reached
from plait.parallel.context.runtime import Stretching
from plait.parallel.context.sequence_shard import Held
from plait.parallel.context.sequences import SAMPLES, Course, Talk, refused, short
from plait.parallel.context.ulysses import enough
from plait.tensors.collectives import Absent
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import Spread
from plait.tensors.torch_private import checkpoint_frame

Loss = Callable[[Any, Any], Tensor]


Notes = list[tuple[Talk, Tensor]]
"""What is told, and the tensor that comes of it."""


@dataclass(frozen=True)
class Deaf(Held):
    """Rows of a rank whose group never answers."""

    notes: Notes = field(default_factory=list)
    ends: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of the model, and as the loss sees them."""
    stretching: Any = None

    @property
    def length(self) -> int:
        """Of the sequence as it was sketched."""
        return self.stretching.sketched(self)

    def _note(self, kind: str, local: Tensor, dim: int) -> Tensor:
        rows, dim = local.shape[dim], dim % local.dim()
        twice = checkpoint_frame() is not None
        lengths = (self.length, self.length)
        squares = sum(n == self.cut.length for d, n in enumerate(local.shape) if d != dim)
        each = local.numel() // max(rows, 1) * self.length**squares // self.cut.length**squares
        shape = list(local.shape)
        shape[dim] = self.cut.length - rows
        whole = torch.cat([local, local.new_zeros(shape)], dim)
        talk = Talk(kind, self.stretching.unit, (each,), (0, 0), local.dtype, local.requires_grad, twice, lengths)
        self.notes.append((talk, whole))
        return whole

    def gather(self, local: Tensor, dim: int) -> Tensor:
        return self._note("gather", local, dim)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return self._note("fetch", local, dim)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        seen = local.detach().requires_grad_(local.requires_grad)
        self.ends.append((local, seen))
        return Spread(seen, dim, self.cut, self.group)


def overhear(
    model: nn.Module, batch: Callable[[int], Any], call: Call, loss: Loss, stretching: Stretching, layout: Layout
) -> Course:
    """The course with what is told in it. `batch(n)`: inputs and targets; `stretching` has wrapped the model."""
    some, more = (_heard(model, batch(n), call, loss, (stretching, layout, n)) for n in (SAMPLES - 1, SAMPLES))
    asked = [(op, size, other) for (op, size), (_, other) in zip(some[1], more[1])]
    alike = len(some[0]) == len(more[0])
    talks = [_of_a_sample(talk, other) for talk, other in zip(some[0] if alike else more[0], more[0])]
    return replace(stretching.course, talks=tuple(talks), asked=tuple(asked))


def _of_a_sample(some: Talk, more: Talk) -> Talk:
    """What is gathered, from batches of `SAMPLES` - 1 and of `SAMPLES`: of a sample, and whatever their number."""
    if more.kind not in ("gather", "fetch"):
        return more
    each = more.each[0] // SAMPLES if some is more else more.each[0] - some.each[0]
    return replace(more, each=(each,), fixed=0 if some is more else more.each[0] - SAMPLES * each)


def _heard(
    model: nn.Module, pair: Any, call: Call, loss: Loss, how: tuple[Stretching, Layout, int]
) -> tuple[list[Talk], list[tuple[str, int]]]:
    """What is told in one run on a batch of so many samples, and (operator, bytes) of what the loss asks."""
    stretching, layout, samples = how
    notes: Notes = []
    absent, ends = Absent(stretching.ranks), list[tuple[Tensor, Tensor]]()
    targets, starts = list[Any](), list[Tensor]()

    def silent(asked: Asked, queries: Held, keys: Held) -> Tensor:
        out = F.scaled_dot_product_attention(asked.q, asked.k, asked.v, enable_gqa=asked.k.shape[1] != asked.q.shape[1])
        notes.extend(_noted(asked, out, (queries, keys), (stretching, samples)))
        return out

    keeping = _Keeping(stretching, notes)

    def run(module: nn.Module, given: Any) -> Any:
        with torch.enable_grad():
            with keeping:
                outputs = call(module, given)
            made = loss(outputs, targets[-1])
            learned = [(end, seen) for end, seen in ends if seen.requires_grad]
            if learned and made.requires_grad:
                found = torch.autograd.grad(made, [seen for _, seen in learned], retain_graph=True, allow_unused=True)
                starts.extend(end for (end, _), g in zip(learned, found) if g is not None)
            starts.append(made)

    def once(given: Any) -> None:
        targets.append(given[1])
        watch(model, given[0], run, False)

    stretching.hold = lambda length: Deaf(layout(length, stretching.ranks), absent, 0, notes, ends, stretching)
    stretching.answer = silent
    handles = stretching.install()
    try:
        try:
            once(short(stretching.course, pair, stretching.ranks))
        except Exception:  # it may need its own length
            for noted in (notes, ends, starts, absent.calls):
                noted.clear()
            once(pair)
    finally:
        for handle in handles:
            handle.remove()
        stretching.held = {}
    passed = reached(starts)
    return [
        replace(talk, grad=talk.grad and made.grad_fn in passed, again=_again(talk, number, keeping.last))
        for number, (talk, made) in enumerate(notes)
    ], absent.calls


class _Keeping(torch.autograd.graph.saved_tensors_hooks):
    """Notes, of each unit, how much was told when something was last kept for backward in it."""

    def __init__(self, stretching: Stretching, notes: Notes):
        self.last: dict[str, int] = {}

        def kept(x: Tensor) -> Tensor:
            self.last[stretching.unit] = len(notes)
            return x

        super().__init__(kept, lambda x: x)


def _again(talk: Talk, number: int, last: dict[str, int]) -> bool:
    """Whether a recomputation comes to a message: attention keeps something for backward itself."""
    return talk.twice or talk.kind not in ("gather", "fetch") or number < last.get(talk.unit, 0)


def _noted(
    asked: Asked, out: Tensor, held: tuple[Held, Held], how: tuple[Stretching, int]
) -> Iterator[tuple[Talk, Tensor]]:
    """An attention, and the rows of its mask. P040 when the unit itself would compute it again, seeing its rows alone."""
    stretching, samples = how
    if checkpoint_frame() is not stretching.frame:
        why = (
            "a checkpoint in its own code (torch.utils.checkpoint) holds its attention, and runs that alone in backward"
        )
        fix = "checkpoint the whole unit", "recompute=full in the plan"
        raise refused(f"unit {stretching.unit} cannot run on a stretch of the sequence", why, *fix)
    q, k, v = asked.q, asked.k, asked.v
    each = tuple(t.numel() // (t.shape[2] * samples) for t in (q, k, v, out))
    lengths = stretching.sketched(held[0]), stretching.sketched(held[1])
    grad = any(t.requires_grad for t in (q, k, v))
    heads, twice = (q.shape[1], k.shape[1]), checkpoint_frame() is not None
    found = Talk("attention", stretching.unit, each, heads, k.dtype, grad, twice, lengths)
    yield found, out
    if asked.mask is not None and asked.mask.shape[-2] == held[0].size:
        each = (asked.mask.numel() // (held[0].size * samples),)
        yield replace(found, kind="rows", each=each, dtype=asked.mask.dtype, grad=asked.mask.requires_grad), out


def messages(
    talk: Talk, layout: Callable[[int], Rows], rank: int, how: tuple[str, int], again: bool, *, direct: bool
) -> Iterator[tuple[str, int, int]]:
    """(operator, calls, bytes) of a rank in one pass forward and backward. `layout`: how a sequence of a length is cut.

    `how`: ring or ulysses, and the samples. `again`: the forward pass is made twice. `direct`: see `scattering.directly`.
    """
    context, samples = how
    forward = 1 + (again and talk.again)
    queries, keys = map(layout, talk.lengths)
    if talk.kind == "attention" and context == "ring":
        yield from _ring(talk, keys, rank, samples, forward)
    elif talk.kind == "attention":
        yield from _swaps(talk, (queries, keys), rank, samples, forward)
    elif talk.kind != "rows" or context == "ulysses":
        yield from _gathers(talk, queries, rank, (samples, forward), direct)


def _ring(talk: Talk, cut: Rows, rank: int, samples: int, forward: int) -> Iterator[tuple[str, int, int]]:
    ranks = len(cut.ranks)
    row = (talk.each[1] + talk.each[2]) * samples
    met = [cut.sizes[(rank - step) % ranks] for step in range(ranks + 1)]
    rounds = forward + talk.grad
    sums = row * wide(talk.dtype).itemsize * talk.grad
    yield (
        "send",
        (ranks - 1) * (rounds + talk.grad),
        row * talk.dtype.itemsize * rounds * sum(met[:-2]) + sums * sum(met[1:-1]),
    )
    taken = row * talk.dtype.itemsize * rounds * sum(met[1:-1]) + sums * sum(met[2:])
    yield "recv_", (ranks - 1) * (rounds + talk.grad), taken


def _swaps(
    talk: Talk, cuts: tuple[Rows, Rows], rank: int, samples: int, forward: int
) -> Iterator[tuple[str, int, int]]:
    (queries, keys), ranks = cuts, len(cuts[0].ranks)
    heads, kv = talk.heads
    more = enough(kv, heads, ranks) // kv
    rows = [talk.each[0], talk.each[1] * more, talk.each[2] * more, talk.each[3]]
    there = [row * cut.length // ranks for row, cut in zip(rows, (queries, keys, keys, queries))]
    back = [row * cut.sizes[rank] for row, cut in zip(rows, (queries, keys, keys, queries))]
    size = forward * (sum(there[:3]) + back[3]) + talk.grad * (sum(back[:3]) + there[3])
    yield "alltoall_base_", 4 * (forward + talk.grad), size * samples * talk.dtype.itemsize


def _gathers(talk: Talk, cut: Rows, rank: int, how: tuple[int, int], direct: bool) -> Iterator[tuple[str, int, int]]:
    """Messages of `regions.gathered`, and of `regions.sum_part` in backward. `how`: samples, forward passes."""
    samples, forward = how
    row = (talk.each[0] * samples + talk.fixed) * talk.dtype.itemsize
    mine, others = cut.sizes[rank], cut.length - cut.sizes[rank]
    peers = len(cut.ranks) - 1
    back = int(talk.kind == "gather" and talk.grad)
    if row and not direct:
        yield "allgather_", forward, row * forward * mine
        yield "reduce_scatter_", back, row * back * mine
    elif row:
        yield "send", peers * (forward + back), row * (forward * mine * peers + back * others)
        yield "recv_", peers * (forward + back), row * (forward * others + back * mine * peers)


def total(
    course: Course,
    layout: Callable[[int], Rows],
    rank: int,
    how: tuple[str, list[int]],
    twice: Callable[[str], bool],
    direct: bool = True,
) -> Counter[tuple[str, str]]:
    """(operator, what) -> of a step's micro-batches: calls under ("op", "calls"), bytes under ("op", "bytes")."""
    found: Counter[tuple[str, str]] = Counter()
    context, samples = how
    for n in samples:
        for talk in course.talks:
            for op, calls, size in messages(
                talk, layout, rank, (context, n), talk.twice or (bool(talk.unit) and twice(talk.unit)), direct=direct
            ):
                found[op, "calls"] += calls
                found[op, "bytes"] += size
        for op, some, more in course.asked:
            found[op, "calls"] += 1
            found[op, "bytes"] += some + (more - some) * (n - SAMPLES + 1)
    return found
