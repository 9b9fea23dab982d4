"""Which rows each step read: what the reference is to read, and what is wrong with the rows themselves.

The reference reads the candidate's rows, so that numbers can be compared; that hides whatever is wrong with the rows. So they are judged by
themselves: against the order that the reference's own sampler drew, and against the size of its own batches.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plait.config.errors import PlaitError, Problem, problem_of_page
from plait.scripts.recordings import ReadBatch, Recording, unlike
from plait.tensors.norm import several


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
        reading = [each for each in reading if each.sources[0]] or reading  # some frameworks read on one rank, and send
        rows = [[batch.rows for batches in each.used for batch in batches] for each in reading]
        groups = [(*each.start.group,) if each.start.world > 1 else (each.start.rank, i) for i, each in enumerate(reading)]
        firsts = [groups.index(group) for group in groups]
        distinct = tuple(reading[i] for i in sorted({*firsts}))
        alike = len(distinct) > 1 and all(rows[i] == rows[0] for i in firsts)
        unlike = tuple(each.start.rank for each, own, first in zip(reading, rows, firsts) if own != rows[first])
        return Readers(ranks, distinct[:1] if alike else distinct, alike, unlike)

    @cached_property
    def steps(self) -> list[list[ReadBatch]]:
        """The batches of each step: micro-batch after micro-batch, of each reader."""
        rounds = zip(*(each.used for each in self.distinct))
        return [[batch for micros in itertools.zip_longest(*parts) for batch in micros if batch is not None] for parts in rounds]

    def hashes(self, k: int) -> list[str]:
        """The rows of step k, from 0."""
        return [row for batch in self.steps[k] for row in batch.rows]


def replayed(readers: Readers, by_content: bool = False) -> dict[str, Any]:
    """What the reference reads: indices where loaders have them, else the stored rows; nothing where no loader read any. E006."""
    if not readers.distinct[0].sources[0]:
        return {}
    steps, found = [batches for batches in readers.steps if batches], defaultdict[str, list[Any]](list)
    every = [batch for batches in steps for batch in batches]
    if not by_content and all(batch.indices is not None for batch in every):
        for batches in steps:
            found[batches[0].source].append([i for batch in batches for i in batch.indices or ()])
        return {"rows": found}
    kinds = {str([*zip(batch.stored, batch.shapes)]) for batch in every}
    if len(kinds) > 1 or not every[0].stored:
        why = f"batches have rows of {len(kinds)} kinds: {several(sorted(kinds))}" if len(kinds) > 1 else "batches hold no tensors with rows"
        raise PlaitError(problem_of_page("E006", "the candidate's rows cannot be given to the reference", why))
    for batches in steps:
        found[batches[0].source].append({name: [batch.stored[name] for batch in batches] for name in batches[0].stored})
    return {"contents": found}


def faults(readers: Readers, reference: Recording) -> Iterator[Problem]:
    """What is wrong with the rows."""
    ranks, read, order = len(readers.all), len(readers.hashes(0)), reference.orders.get(reference.sources[0])
    own = order.own if order else sum(len(batch.rows) for batch in reference.used[0][:1])  # as its loader gives them, or as its model gets them
    share = not readers.alike and not any(unlike(readers.all[0].steps[-1].weights, each.steps[-1].weights) for each in readers.all)
    if ranks > 1 and all(each.start.world == 1 for each in readers.all) and not share:  # some sum gradients without torch.distributed
        yield problem_of_page("E021", f"{ranks} processes trained, and none joined the others")
    if own and read != own:
        sizes = f"a step reads {read} different rows, the reference's own batch has {own}"
        if readers.alike:
            yield problem_of_page("E022", f"all {ranks} ranks read the same rows: {sizes}")
        yield problem_of_page("E021", f"one process ran: {sizes}") if ranks == 1 else problem_of_page("E025", sizes)
    if readers.unlike:
        yield problem_of_page("E036", f"rank {readers.unlike[0]} reads other rows than the ranks that share its layers by tensor parallelism")
    mine, theirs = (each.passes[:2] for each in (readers.distinct[0], reference))
    repeats = [all(a == b for a, b in zip(*passes)) for passes in (mine, theirs) if len(passes) > 1]
    if repeats == [True, False]:
        yield problem_of_page("E023", "epoch 2 reads rows in the order of epoch 1, while the reference's order changes")
    surplus = surplus_rows(readers, reference)
    twice, never = (+surplus).total(), (-surplus).total()
    if max(twice, never) >= max(read, 1) and not readers.alike:  # fewer fill the last batch, or are left out of it
        yield problem_of_page("E024", f"in epoch 1 the ranks read {twice} rows twice and {never} never")


def surplus_rows(readers: Readers, reference: Recording) -> Counter[str]:
    """How many times more than the reference the ranks read each row in the first epoch; negative for rows that they leave out."""
    found = Counter[str]()
    if all(each.passes for each in (*readers.distinct, reference)):
        found.update(str(i) for each in readers.distinct for i in each.passes[0])
        found.subtract(map(str, reference.passes[0]))
    return found


def notes(readers: Readers, reference: Recording) -> list[str]:
    """What is no difference, and worth knowing."""
    surplus = surplus_rows(readers, reference)
    twice, never = (+surplus).total(), (-surplus).total()
    filled = f"the end of an epoch is filled with {twice} rows that are read twice (DistributedSampler, Accelerate's even_batches)"
    found = [filled] * bool(twice) + [f"the last {never} rows of an epoch are left out"] * bool(never)
    if any(not order.complete for order in reference.orders.values() if order.order):
        found.append("rows of an epoch were not counted: the sampler draws very many, or never ends")
    if readers.alike:
        found.append(f"all {len(readers.all)} ranks read the same rows, and nothing of the model is split: each does the work of all")
    return found


def other_rows(readers: Readers, reference: Recording) -> int | None:
    """The first step in which the reference read other rows than the candidate, where rows have the same shapes; from 0."""
    for k, (given, batches) in enumerate(zip(readers.steps, reference.used)):
        same_shapes = len({str(batch.shapes) for batch in (*given, *batches)}) == 1 and given and batches
        if same_shapes and Counter(readers.hashes(k)) != Counter(row for batch in batches for row in batch.rows):
            return k
    return None
