"""Which rows each step read: what the reference is to read, and what is wrong with the rows themselves.

The reference reads the candidate's rows, so that numbers can be compared; that hides whatever is wrong with the rows. So they are judged by
themselves: against the order that the reference's own sampler drew, and against the size of its own batches.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.scripts.recordings import ReadBatch, Recording


@dataclass(frozen=True)
class Cause:
    """Why both sides differ: a code of `plait help`, and a sentence with the script's own numbers."""

    code: str
    text: str


@dataclass(frozen=True)
class Coverage:
    """Rows of the first epoch: how many are read twice, how many never, and how many of each the end of an epoch explains."""

    twice: int = 0
    never: int = 0
    explained: int = 0


@dataclass(frozen=True)
class Readers:
    """The ranks whose batches count: one of each group that shares its rows, of those that read any."""

    all: tuple[Recording, ...]
    distinct: tuple[Recording, ...]
    alike: bool
    """Groups read the same rows, though nothing in the placements of their parameters says that they should."""
    unlike: tuple[int, ...]
    """Ranks of one group (tensor parallelism) that read other rows than its first."""

    @staticmethod
    def of(ranks: tuple[Recording, ...]) -> "Readers":
        reading = [each for each in ranks if any(each.used)]
        reading = [each for each in reading if each.loader >= 0] or reading  # some frameworks read on one rank, and send
        groups = dict[tuple[int, ...], Recording]()
        unlike = list[int]()
        for each in reading:
            first = groups.setdefault(tuple(each.start.group), each)
            if _rows(first) != _rows(each):
                unlike.append(each.rank)
        distinct = tuple(groups.values())
        alike = len(distinct) > 1 and len({str(_rows(each)) for each in distinct}) == 1
        return Readers(tuple(ranks), distinct[:1] if alike else distinct, alike, tuple(unlike))

    def step(self, k: int) -> list[tuple[Recording, ReadBatch]]:
        """The batches of step k (from 0): micro-batch after micro-batch, of each reader."""
        parts = [[(each, batch) for batch in each.used[k]] if k < len(each.used) else [] for each in self.distinct]
        return [part[m] for m in range(max(map(len, parts), default=0)) for part in parts if m < len(part)]

    def hashes(self, k: int) -> list[str]:
        """The rows of step k."""
        return [row for _, batch in self.step(k) for row in batch.rows]

    @property
    def steps(self) -> int:
        return min(len(each.used) for each in self.distinct) if self.distinct else 0


def _rows(each: Recording) -> list[list[str]]:
    return [batch.rows for batches in each.used for batch in batches]


def replayed(readers: Readers, by_content: bool = False) -> dict[str, Any]:
    """What the reference reads: indices where loaders have them, else the stored rows; nothing where no loader read any. E006."""
    first = readers.distinct[0]
    if first.loader < 0:
        return {}
    indices, contents = dict[str, list[list[Any]]](), dict[str, list[dict[str, list[Any]]]]()
    known = True
    for k in range(readers.steps):
        batches = readers.step(k)
        key = f"{batches[0][1].loader} {batches[0][1].epoch}" if batches else ""
        each = [reader.indices(batch) for reader, batch in batches]
        known = known and None not in each
        indices.setdefault(key, []).append([i for rows in each for i in rows or ()])
        contents.setdefault(key, []).append({name: [batch.stored[name] for _, batch in batches] for name in batches[0][1].stored} if batches else {})
    if known and not by_content:
        return {"rows": indices}
    shapes = {str(batch.shapes) for k in range(readers.steps) for _, batch in readers.step(k)}
    if len(shapes) > 1 or not any(contents.values()):
        why = f"batches have rows of {len(shapes)} shapes" if len(shapes) > 1 else "batches hold no tensors with rows"
        fix = ("read from a torch.utils.data.DataLoader over a dataset with indices", "or pad all rows to one length")
        raise PlaitError(Problem("E006", "the candidate's rows cannot be given to the reference", why=why, fix=fix))
    return {"contents": contents}


def faults(readers: Readers, reference: Recording) -> Iterator[Cause]:
    """What is wrong with the rows."""
    ranks, read, own = len(readers.all), len(readers.hashes(0)), own_batch(reference)
    if own and read != own:
        unlike = f"a step reads {read} different rows, the reference's own batch has {own}"
        if readers.alike:
            yield Cause("E022", f"all {ranks} ranks read the same rows: {unlike}")
        yield Cause("E021", f"one process ran: {unlike}") if ranks == 1 else Cause("E025", unlike)
    if readers.unlike:
        yield Cause("E036", f"rank {readers.unlike[0]} reads other rows than the ranks that share its layers by tensor parallelism")
    if same_order(readers, reference):
        yield Cause("E023", "epoch 2 reads rows in the order of epoch 1, while the reference's order changes")
    found = coverage(readers, reference)
    if max(found.twice, found.never) > found.explained and not readers.alike:
        yield Cause("E024", f"in epoch 1 the ranks read {found.twice} rows twice and {found.never} never")


def own_batch(reference: Recording) -> int:
    """The rows of a step as the reference's own loader draws them."""
    order = reference.orders.get((reference.loader, reference.steps[0].epoch))
    if order and order.order:
        return len(order.order[0])
    rows = [*(each.rows for each in reference.own), *(batch.rows for batch in reference.used[0] if reference.loader < 0)]
    return len(rows[0]) if rows else 0


def same_order(readers: Readers, reference: Recording) -> bool:
    """Whether the candidate's second epoch repeats its first, and the reference's does not."""
    mine, theirs = readers.distinct[0].passes, reference.passes
    if len(mine) < 2 or len(theirs) < 2:
        return False
    repeats = lambda passes: passes[0][: len(passes[1])] == passes[1][: len(passes[0])]  # noqa: E731
    return repeats(mine) and not repeats(theirs)


def coverage(readers: Readers, reference: Recording) -> Coverage:
    """How often the rows of the first epoch are read."""
    if not readers.distinct[0].passes or not reference.passes:
        return Coverage()
    counts = Counter(str(i) for each in readers.distinct for i in each.passes[0])
    own = Counter(str(i) for i in reference.passes[0])
    twice = sum(max(0, count - own.get(i, 0)) for i, count in counts.items())
    never = sum(max(0, count - counts.get(i, 0)) for i, count in own.items())
    return Coverage(twice, never, max(len(readers.hashes(0)), 1) - 1)


def notes(readers: Readers, reference: Recording) -> list[str]:
    """What is no difference, and worth knowing."""
    read = coverage(readers, reference)
    filled = f"the end of an epoch is filled with {read.twice} rows that are read twice (DistributedSampler, Accelerate's even_batches)"
    found = [filled] * bool(read.twice)
    found += [f"the last {read.never} rows of an epoch are left out"] * bool(read.never)
    if readers.alike:
        found.append(f"all {len(readers.all)} ranks read the same rows, and nothing of the model is split: each does the work of all")
    return found


def other_rows(readers: Readers, reference: Recording) -> int | None:
    """The first step in which the reference read other rows than the candidate, where rows have the same shapes; from 0."""
    for k in range(min(readers.steps, len(reference.used))):
        given, batches = readers.step(k), reference.used[k]
        if not given or not batches or any(batch.shapes != batches[0].shapes for _, batch in given):
            continue
        if Counter(readers.hashes(k)) != Counter(row for batch in batches for row in batch.rows):
            return k
    return None
