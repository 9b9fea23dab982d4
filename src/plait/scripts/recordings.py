"""Recorded data of one side (`scripts/recorder.py`): its batches, steps and epochs, the rows of each step, and the errors in them.

The reference reads the candidate's rows, so that values can be compared; that hides errors in the rows. So rows are checked separately: against
the order of the reference's own sampler, and against the size of its own batches.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from plait.config.errors import PlaitError, Problem, problem_from_page
from plait.scripts.values import RecordedTensor
from plait.tensors.norm import shorten_names


class ProcessStart(msgspec.Struct, frozen=True, tag_field="is", tag="start"):
    """A process before its first training forward pass. `group`: ranks that share its rows (tensor parallelism)."""

    rank: int
    world: int
    weights: dict[str, RecordedTensor]
    trainable: list[str]
    batch_norms: list[str]
    group: list[int]


class ReadBatch(msgspec.Struct, frozen=True, tag_field="is", tag="batch"):
    """A batch that a process read. `source`: the pass of its loader; empty for rows recorded at the model's inputs."""

    source: str
    rows: list[str]
    indices: list[int | str] | None
    labels: list[int] | None
    stored: dict[str, RecordedTensor]
    shapes: list[list[int]]


class OptimizerStep(msgspec.Struct, frozen=True, tag_field="is", tag="step"):
    """A step of an optimizer; `step` counts those of the first one. `drew`: random numbers were drawn between batch and loss.

    `after`: gradients after backward, in the first step; `gradients`: before clipping, if that was recorded.
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
    after: dict[str, RecordedTensor]
    gradients: dict[str, RecordedTensor]
    applied: dict[str, RecordedTensor]
    weights: dict[str, RecordedTensor]
    buffers: dict[str, RecordedTensor]
    complete: bool


class PassOrder(msgspec.Struct, frozen=True, tag_field="is", tag="epoch"):
    """The batches of one pass, as indices, in the script's own order, and the number of rows of its first batch."""

    source: str
    order: list[list[Any]]
    own: int
    complete: bool


@dataclass(frozen=True)
class Recording:
    """The events of one process: its start, batches, optimizer steps, and the sample order of each epoch by source."""
    start: ProcessStart
    batches: tuple[ReadBatch, ...]
    steps: tuple[OptimizerStep, ...]
    orders: Mapping[str, PassOrder]

    @cached_property
    def rounds(self) -> tuple[tuple[OptimizerStep, ...], ...]:
        """The steps of all optimizers, grouped by those of the first."""
        return tuple(tuple(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.step))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(steps[0].source for steps in self.rounds))

    @cached_property
    def used_batches(self) -> tuple[tuple[ReadBatch, ...], ...]:
        """The batches of each round. A round uses as many batches as losses were differentiated; if that is inconsistent, an equal number."""
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


def read_recordings(folder: Path) -> tuple[Recording, ...]:
    """Read the recordings of all processes that stepped an optimizer, by rank."""
    decoder, found = msgspec.json.Decoder(ProcessStart | ReadBatch | OptimizerStep | PassOrder), list[Recording]()
    for path in sorted(folder.glob("*.jsonl")):
        events = decoder.decode_lines(path.read_bytes().rpartition(b"\n")[0])  # the last line is partial if the process was killed
        starts = [each for each in events if isinstance(each, ProcessStart)]
        batches = tuple(each for each in events if isinstance(each, ReadBatch))
        steps = tuple(each for each in events if isinstance(each, OptimizerStep) and each.complete)
        if starts and steps:
            found.append(Recording(starts[0], batches, steps, {each.source: each for each in events if isinstance(each, PassOrder)}))
    return tuple(sorted(found, key=lambda each: each.start.rank))


def find_unlike(first: Mapping[str, RecordedTensor], other: Mapping[str, RecordedTensor]) -> list[str]:
    return [name for name, t in first.items() if other.get(name, t) != t]


@dataclass(frozen=True)
class Readers:
    """The ranks whose batches count: of the ranks that read batches, one per group that shares its rows."""

    all: tuple[Recording, ...]
    distinct: tuple[Recording, ...]
    has_same_rows: bool
    """Whether groups read the same rows although the placements of their parameters do not require it."""
    wrong_ranks: tuple[int, ...]
    """Ranks of one group (tensor parallelism) whose rows differ from its first rank's."""

    @staticmethod
    def from_ranks(ranks: tuple[Recording, ...]) -> "Readers":
        reading = [each for each in ranks if any(each.used_batches)]
        reading = [each for each in reading if each.sources[0]] or reading  # some frameworks read on one rank, and broadcast
        rows = [[batch.rows for batches in each.used_batches for batch in batches] for each in reading]
        groups = [(*each.start.group,) if each.start.world > 1 else (each.start.rank, i) for i, each in enumerate(reading)]
        firsts = [groups.index(group) for group in groups]
        distinct = tuple(reading[i] for i in sorted({*firsts}))
        alike = len(distinct) > 1 and all(rows[i] == rows[0] for i in firsts)
        unlike = tuple(each.start.rank for each, own, first in zip(reading, rows, firsts) if own != rows[first])
        return Readers(ranks, distinct[:1] if alike else distinct, alike, unlike)

    @cached_property
    def steps(self) -> list[list[ReadBatch]]:
        """The batches of each step: micro-batch after micro-batch, of each reader."""
        rounds = zip(*(each.used_batches for each in self.distinct))
        return [[batch for micros in itertools.zip_longest(*parts) for batch in micros if batch is not None] for parts in rounds]

    def list_rows(self, k: int) -> list[str]:
        return [row for batch in self.steps[k] for row in batch.rows]


def make_replay(readers: Readers, by_content: bool = False) -> dict[str, Any]:
    """Make the replay of the reference: indices if loaders have them, else the stored rows; empty if no loader was used. E006."""
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
        why = f"batches have rows of {len(kinds)} kinds: {shorten_names(sorted(kinds))}" if len(kinds) > 1 else "batches contain no tensors with rows"
        raise PlaitError(problem_from_page("E006", "the candidate's rows cannot be given to the reference", why))
    for batches in steps:
        found[batches[0].source].append({name: [batch.stored[name] for batch in batches] for name in batches[0].stored})
    return {"contents": found}


def find_faults(readers: Readers, reference: Recording) -> Iterator[Problem]:
    """Yield the differences in the samples read and in the processes' setup. `reference`: of one device."""
    ranks, read, order = len(readers.all), len(readers.list_rows(0)), reference.orders.get(reference.sources[0])
    own = order.own if order else sum(len(batch.rows) for batch in reference.used_batches[0][:1])  # of its loader, or of its model's inputs
    share = not readers.has_same_rows and not any(find_unlike(readers.all[0].steps[-1].weights, each.steps[-1].weights) for each in readers.all)
    if ranks > 1 and all(each.start.world == 1 for each in readers.all) and not share:  # some frameworks reduce gradients without torch.distributed
        yield problem_from_page("E021", f"{ranks} processes trained without a common process group")
    if own and read != own:
        sizes = f"a step reads {read} different rows, the reference's own batch has {own}"
        if readers.has_same_rows:
            yield problem_from_page("E022", f"all {ranks} ranks read the same rows: {sizes}")
        yield problem_from_page("E021", f"one process ran: {sizes}") if ranks == 1 else problem_from_page("E025", sizes)
    if readers.wrong_ranks:
        yield problem_from_page("E036", f"rank {readers.wrong_ranks[0]} reads different rows than the ranks of its tensor-parallel group")
    mine, theirs = (each.passes[:2] for each in (readers.distinct[0], reference))
    repeats = [all(a == b for a, b in zip(*passes)) for passes in (mine, theirs) if len(passes) > 1]
    if repeats == [True, False]:
        yield problem_from_page("E023", "epoch 2 reads rows in the order of epoch 1, while the reference's order changes")
    surplus = count_surplus(readers, reference)
    twice, never = (+surplus).total(), (-surplus).total()
    if max(twice, never) >= max(read, 1) and not readers.has_same_rows:  # fewer rows pad the last batch, or are dropped from it
        yield problem_from_page("E024", f"in epoch 1 the ranks read {twice} rows twice and {never} never")


def count_surplus(readers: Readers, reference: Recording) -> Counter[str]:
    """Count how often more than the reference the ranks read each row in the first epoch; negative for missing rows."""
    found = Counter[str]()
    if all(each.passes for each in (*readers.distinct, reference)):
        found.update(str(i) for each in readers.distinct for i in each.passes[0])
        found.subtract(map(str, reference.passes[0]))
    return found


def list_notes(readers: Readers, reference: Recording) -> list[str]:
    surplus = count_surplus(readers, reference)
    twice, never = (+surplus).total(), (-surplus).total()
    others, is_uncounted = min(twice, never), any(order.order and not order.complete for order in reference.orders.values())
    found = {
        f"{others} rows are left out of an epoch that the reference reads, and {others} are read that it leaves out (drop_last)": others,
        f"an epoch's end is filled with {twice - others} rows that are read twice (DistributedSampler, Accelerate's even_batches)": twice > others,
        f"the last {never - others} rows of an epoch are left out": never > others,
        "rows of an epoch were not counted: the sampler draws very many, or never ends": is_uncounted,
        f"all {len(readers.all)} ranks read the same rows, and no part of the model is split: each does the full work": readers.has_same_rows,
    }
    return [note for note, is_so in found.items() if is_so]


def find_other_rows(readers: Readers, reference: Recording) -> int | None:
    """Return the first step, from 0, whose rows of equal shapes differ between the sides; None if there is none."""
    for k, (given, batches) in enumerate(zip(readers.steps, reference.used_batches)):
        same_shapes = len({str(batch.shapes) for batch in (*given, *batches)}) == 1 and given and batches
        if same_shapes and Counter(readers.list_rows(k)) != Counter(row for batch in batches for row in batch.rows):
            return k
    return None
