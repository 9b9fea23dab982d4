"""What the recorders of a side left (`scripts/recorder.py`): its batches, steps and epochs, which rows each step read, and what is wrong with them.

The reference reads the candidate's rows, so that numbers can be compared; that hides whatever is wrong with the rows. So they are judged by
themselves: against the order that the reference's own sampler drew, and against the size of its own batches.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from plait.config.errors import PlaitError, Problem, problem_of_page
from plait.scripts.values import StoredTensor
from plait.tensors.norm import several


class ProcessStart(msgspec.Struct, frozen=True, tag_field="is", tag="start"):
    """A process before its first forward pass that trains. `group`: ranks that share its rows (tensor parallelism)."""

    rank: int
    world: int
    weights: dict[str, StoredTensor]
    trainable: list[str]
    batch_norms: list[str]
    group: list[int]


class ReadBatch(msgspec.Struct, frozen=True, tag_field="is", tag="batch"):
    """A batch that a process read. `source`: the pass of a loader that gave it, empty if the model got rows that no loader read."""

    source: str
    rows: list[str]
    indices: list[int | str] | None
    labels: list[int] | None
    stored: dict[str, StoredTensor]
    shapes: list[list[int]]


class OptimizerStep(msgspec.Struct, frozen=True, tag_field="is", tag="step"):
    """A step of an optimizer; `step` counts those of the first one, `drew` says that random numbers were drawn between batch and loss.

    `after`: gradients as backward leaves them, in the first step; `gradients`: before clipping, as far as it was seen.
    """

    step: int
    optimizer: int
    kind: str
    formats: list[str]
    lr: dict[str, float]
    decay: dict[str, float]
    losses: list[float]
    source: str
    drew: bool
    after: dict[str, StoredTensor]
    gradients: dict[str, StoredTensor]
    applied: dict[str, StoredTensor]
    weights: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    complete: bool


class PassOrder(msgspec.Struct, frozen=True, tag_field="is", tag="epoch"):
    """The batches of one pass, as indices, in the script's own order, and the rows of its own first batch."""

    source: str
    order: list[list[Any]]
    own: int
    complete: bool


@dataclass(frozen=True)
class Recording:
    """Of one process that trained."""

    start: ProcessStart
    batches: tuple[ReadBatch, ...]
    steps: tuple[OptimizerStep, ...]
    orders: Mapping[str, PassOrder]

    @cached_property
    def rounds(self) -> tuple[tuple[OptimizerStep, ...], ...]:
        """The steps of all optimizers, by those of the first."""
        return tuple(tuple(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.step))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The passes that rounds read from, in order."""
        return tuple(dict.fromkeys(steps[0].source for steps in self.rounds))

    @cached_property
    def used(self) -> tuple[tuple[ReadBatch, ...], ...]:
        """The batches of each round. Those of a pass belong to its rounds in order: as many as losses were differentiated, else equally many."""
        found = list[tuple[ReadBatch, ...]]()
        for source in self.sources:
            read = [batch for batch in self.batches if batch.source == source]
            counts = [sum(len(step.losses) for step in steps) for steps in self.rounds if steps[0].source == source]
            if sum(counts) > len(read) or (len(counts) > 1 and len(read) >= 2 * sum(counts)):
                counts = [len(read) // len(counts)] * len(counts)
            found += [tuple(read[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
        return tuple(found)

    @cached_property
    def passes(self) -> tuple[list[Any], ...]:
        """All indices of each pass that steps read from, as the script's own sampler drew them."""
        orders = (self.orders.get(source) for source in self.sources)
        return tuple([i for batch in order.order for i in batch] for order in orders if order and order.order and order.complete)


def recordings(folder: Path) -> tuple[Recording, ...]:
    """Of all processes that stepped an optimizer, by rank."""
    decoder, found = msgspec.json.Decoder(ProcessStart | ReadBatch | OptimizerStep | PassOrder), list[Recording]()
    for path in sorted(folder.glob("*.jsonl")):
        events = decoder.decode_lines(path.read_bytes().rpartition(b"\n")[0])  # the last line is torn if the process was ended
        starts = [each for each in events if isinstance(each, ProcessStart)]
        batches = tuple(each for each in events if isinstance(each, ReadBatch))
        steps = tuple(each for each in events if isinstance(each, OptimizerStep) and each.complete)
        if starts and steps:
            found.append(Recording(starts[0], batches, steps, {each.source: each for each in events if isinstance(each, PassOrder)}))
    return tuple(sorted(found, key=lambda each: each.start.rank))


def unlike(first: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> list[str]:
    """The names in both of tensors that are not the same, bit for bit."""
    return [name for name, t in first.items() if other.get(name, t) != t]


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
    others, is_uncounted = min(twice, never), any(order.order and not order.complete for order in reference.orders.values())
    found = {
        f"{others} rows are left out of an epoch that the reference reads, and {others} are read that it leaves out (drop_last)": others,
        f"an epoch's end is filled with {twice - others} rows that are read twice (DistributedSampler, Accelerate's even_batches)": twice > others,
        f"the last {never - others} rows of an epoch are left out": never > others,
        "rows of an epoch were not counted: the sampler draws very many, or never ends": is_uncounted,
        f"all {len(readers.all)} ranks read the same rows, and nothing of the model is split: each does the work of all": readers.alike,
    }
    return [note for note, is_so in found.items() if is_so]


def other_rows(readers: Readers, reference: Recording) -> int | None:
    """The first step in which the reference read other rows than the candidate, where rows have the same shapes; from 0."""
    for k, (given, batches) in enumerate(zip(readers.steps, reference.used)):
        same_shapes = len({str(batch.shapes) for batch in (*given, *batches)}) == 1 and given and batches
        if same_shapes and Counter(readers.hashes(k)) != Counter(row for batch in batches for row in batch.rows):
            return k
    return None
