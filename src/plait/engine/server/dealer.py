"""The dealer: which group gets which portion at which version, and which gradients an update uses. Plain values only, so any course of a
run can be tested without processes.

    clock      clock c may be dealt once version c − staleness is made. Its update is made when `quorum` of its portions have
               arrived (all of them by default), and uses all arrived gradients of it and of earlier clocks. A gradient of an
               earlier clock that would exceed the staleness bound is dropped, and recorded.
    nesterov   an update for each gradient. A portion is dealt only while at most `staleness` others are outstanding. A gradient
               waits while its update would make another one too stale: the oldest is used first.

Both enforce the bound by waiting *before* a computation, or before its update. No gradient computed within the rules is discarded,
except the late gradients of a quorum.

The portion of a group that dies is returned, and dealt again before any new one. Every start of a group gets a higher fence, and
messages with an old one are rejected.

A clock is the equivalent of a step: the next samples of the epoch's order (`data/sampling.py`). It is split into as many contiguous
portions as there are groups, or fewer if it has fewer samples.

[Note: Ledger]
The ledger has a row for each gradient that the server used or dropped. From it the run can be reproduced in one process.

A version is a state of the server's weights; the run begins with version 0, and update number k makes version k + 1 of version k. The
*staleness* of a gradient is the number of versions made between the weights it was computed at and the update that uses it:
version_made − 1 − version_read. At 0 it equals the gradient of one device.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from plait.checkpoint.safetensors_file import Count
from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.tensors.rows import split_evenly


@dataclass(frozen=True)
class LedgerRow:
    """One gradient, used or dropped."""

    seq: int
    """Number of the row."""
    group: int
    fence: int
    """Fence of the group when the portion was dealt: a group that is declared dead and restarts gets a higher one."""
    clock: int
    epoch: int
    first: int
    """Index of its first sample in the clock's batch."""
    ids: tuple[int, ...]
    version_read: int
    version_made: int
    """The version made by the update that uses it; −1 if it was dropped."""
    weight: float
    """Its fraction of the update's total weight (of the clock's samples under nesterov)."""
    dropped: str = ""
    """Why it was dropped; "" if it was used."""

    @property
    def staleness(self) -> int:
        return self.version_made - 1 - self.version_read

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value}


@dataclass(frozen=True)
class GroupDeath:
    """The death of a group, declared after `seq` rows: no gradient with this or an earlier fence is used from then on."""

    seq: int
    group: int
    fence: int


def find_ledger_faults(
    rows: Sequence[LedgerRow], deaths: Iterable[GroupDeath], staleness: int, expected: Iterable[tuple[int, int]] | None = None,
    shards: Sequence[Sequence[int]] = (),
) -> list[str]:  # fmt: skip
    """List the violations in a ledger, one sentence each.

    `expected`: (clock, index in its batch) of every expected sample. `shards`: the numbers of the rows that each server applied, in
    order.
    """
    found = [*_find_numbering_faults(rows), *_find_version_faults(rows, staleness), *_find_fence_faults(rows, deaths)]
    seen = Counter((row.clock, row.first + k) for row in rows for k in range(len(row.ids)))
    found += [f"sample {place} of clock {clock} counts {n} times" for (clock, place), n in seen.items() if n > 1]
    if expected is not None:
        wanted = set(expected)
        found += [f"sample {place} of clock {clock} was lost" for clock, place in sorted(wanted - seen.keys())]
        found += [f"sample {place} of clock {clock} was not dealt" for clock, place in sorted(seen.keys() - wanted)]
    used = [row.seq for row in rows if not row.dropped]
    for number, applied in enumerate(shards):
        if list(applied) != used:
            found.append(
                f"server {number} applied {len(applied)} gradients in another order than the ledger's {len(used)}"
            )
    return found


def _find_numbering_faults(rows: Sequence[LedgerRow]) -> list[str]:
    wrong = next((i for i, row in enumerate(rows) if row.seq != rows[0].seq + i), None)
    return [] if wrong is None else [f"row {rows[wrong].seq} is in place of row {rows[0].seq + wrong}"]


def _find_version_faults(rows: Sequence[LedgerRow], staleness: int) -> list[str]:
    found, last = list[str](), None
    for row in rows:
        if row.dropped:
            continue
        if last is not None and row.version_made not in (last, last + 1):
            found.append(f"version {row.version_made} was made after version {last}")
        last = row.version_made
        if not 0 <= row.staleness <= staleness:
            found.append(
                f"row {row.seq} of group {row.group} read version {row.version_read} for version {row.version_made}: "
                f"staleness {row.staleness}, at most {staleness}"
            )
    return found


def _find_fence_faults(rows: Sequence[LedgerRow], deaths: Iterable[GroupDeath]) -> list[str]:
    return [
        f"row {row.seq} is of group {row.group} under fence {row.fence}, declared dead after {death.seq} rows"
        for death in deaths
        for row in rows
        if row.group == death.group and row.fence <= death.fence and row.seq >= death.seq and not row.dropped
    ]


PositiveInt = Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, order=True)
class Portion:
    """Samples first … first + count − 1 of a clock's batch."""

    clock: Count
    """Number of the clock, from 0: the steps completed before it."""
    first: Count
    count: PositiveInt
    size: PositiveInt
    """Samples of the clock."""
    epoch: Count
    start: Count
    """Start of the clock in the epoch's order."""

    @property
    def fraction(self) -> float:
        """Its fraction of the clock's samples."""
        return self.count / self.size


class Clocks:
    """The clocks of a job in order, from a position on."""

    def __init__(self, sampling: Sampling, groups: int, position: Position | None = None):
        self.sampling, self.groups = sampling, groups
        self.next_position = position or Position()
        """Start of the next clock to take."""

    def take_clock(self) -> list[Portion]:
        """Take the portions of the next clock."""
        at = self.next_position
        size = self.sampling.step_size(at.epoch, at.start)
        parts = min(self.groups, size)
        cuts = [split_evenly(size, parts, i) for i in range(parts)]
        ends = at.start + size == len(self.sampling.epoch_indices(at.epoch))
        self.next_position = Position(at.step + 1, at.epoch + ends, 0 if ends else at.start + size, at.samples + size)
        return [Portion(at.step, first, count, size, at.epoch, at.start) for first, count in cuts]

    def list_ids(self, portion: Portion) -> list[int]:
        begin = portion.start + portion.first
        return self.sampling.epoch_indices(portion.epoch)[begin : begin + portion.count].tolist()


@dataclass(frozen=True)
class DealerRules:
    """The values of a plan that the dealer uses."""

    groups: int
    staleness: int = 0
    update_per_gradient: bool = False
    """Make an update for each gradient."""
    quorum: int = 0


@dataclass(eq=False)
class Ticket:
    """A portion assigned to a group."""

    number: int
    group: int
    fence: int
    portion: Portion
    read_version: int
    """The version of the weights sent with it."""
    dealt_at: float = 0.0
    """Time of the assignment, by the dealer's clock."""
    has_arrived: bool = False
    weight: float = 0.0
    """Divisor of the mean in its loss."""


@dataclass(frozen=True)
class PlannedUpdate:
    """The next update: the gradients it uses, in order, and those dropped before it."""

    version: int
    used: tuple[Ticket, ...]
    dropped: tuple[Ticket, ...] = ()


class Dealer:
    """Deals the portions of `steps` clocks. `version`, `seq`, `fence` and `returned`: the state of a resumed run."""

    def __init__(
        self, clocks: Clocks, rules: DealerRules, steps: int, *, version: int = 0, seq: int = 0, fence: int = 0,
        returned: tuple[Portion, ...] = (),
    ):  # fmt: skip
        self.clocks, self.rules, self.steps, self.version, self.seq = clocks, rules, steps, version, seq
        self.outstanding: dict[int, Ticket] = {}
        """Portions dealt, but neither used nor dropped, by ticket number."""
        self.returned: list[Portion] = sorted(returned)
        """Portions returned by groups that died: dealt before any other."""
        self.undealt: list[Portion] = []
        """Portions of started clocks that are not dealt yet."""
        self.fences: dict[int, int] = {}
        """Fences of the connected groups."""
        self.fence, self.dealt_count = fence, 0
        self.portion_counts: dict[int, int] = {}
        """Portions of each started clock without an update."""
        self.begun_clocks = self.resumes_at = clocks.next_position.step
        """The first clock from which on no portion was used or dropped."""
        self.remaining = Counter(portion.clock for portion in returned)
        """Number of portions of each clock that were neither used nor dropped."""
        self.samples = clocks.next_position.samples - sum(portion.count for portion in returned)
        """Samples that were used or dropped."""
        self.positions = {self.begun_clocks: clocks.next_position}
        """Start positions of clocks from `resumes_at` on."""
        self.deaths: list[GroupDeath] = []
        self.max_staleness = 0
        self.is_halted = False
        """Whether dealing has stopped."""

    # groups that join and leave

    def add_group(self, group: int) -> int:
        """Register a group that connects or reconnects. Returns its fence."""
        if group in self.fences:
            self.remove_group(group)
        self.fence += 1
        self.fences[group] = self.fence
        return self.fence

    def remove_group(self, group: int) -> list[int]:
        """Declare a group dead and return its portion to the queue, even if its gradient arrived unused. Returns its tickets."""
        fence = self.fences.pop(group, None)
        if fence is None:
            return []
        self.deaths.append(GroupDeath(self.seq, group, fence))
        gone = [t for t in self.outstanding.values() if t.group == group]
        for ticket in gone:
            del self.outstanding[ticket.number]
            self.returned.append(ticket.portion)
        self.returned.sort()
        return [t.number for t in gone]

    # dealing

    def deal(self, group: int, now: float = 0.0) -> Ticket | None:
        """Deal the next portion to a group; None if it must wait, or if none is left."""
        if self.is_halted or group not in self.fences or not self._can_deal():
            return None
        portion = self._take_portion()
        if portion is None:
            return None
        ticket = Ticket(self.dealt_count, group, self.fences[group], portion, self.version, now)
        self.dealt_count += 1
        self.outstanding[ticket.number] = ticket
        return ticket

    def _can_deal(self) -> bool:
        if not self.rules.update_per_gradient:
            return True  # the bound is enforced when clocks are started
        mine = self.version
        return all(self.version + k - read <= self.rules.staleness for k, read in enumerate([*self._list_reads(()), mine]))

    def _list_reads(self, without: tuple[Ticket, ...]) -> list[int]:
        """List the versions read by outstanding portions, oldest first."""
        return sorted(t.read_version for t in self.outstanding.values() if t not in without)

    def _take_portion(self) -> Portion | None:
        if self.returned:
            return self.returned.pop(0)
        if not self.undealt and self.begun_clocks < self.steps and self._can_begin():
            self.undealt = self.clocks.take_clock()
            self.portion_counts[self.begun_clocks] = self.remaining[self.begun_clocks] = len(self.undealt)
            self.begun_clocks += 1
            self.positions[self.begun_clocks] = self.clocks.next_position
        return self.undealt.pop(0) if self.undealt else None

    def _can_begin(self) -> bool:
        return self.rules.update_per_gradient or self.begun_clocks <= self.version + self.rules.staleness

    # gradients and updates

    def accept_gradient(self, number: int, group: int, fence: int, weight: float = 1.0) -> bool:
        """Accept a gradient; False if it is a duplicate or its sender was declared dead."""
        ticket = self.outstanding.get(number)
        if ticket is None or ticket.has_arrived or (ticket.group, ticket.fence) != (group, fence):
            return False
        if self.fences.get(group) != fence:
            return False
        ticket.has_arrived, ticket.weight = True, weight
        return True

    def find_update(self) -> PlannedUpdate | None:
        """Return the update that can be made now, if any."""
        here = [t for t in self.outstanding.values() if t.has_arrived]
        if self.rules.update_per_gradient:
            for ticket in here:
                if self._leaves_others_fresh(ticket):
                    return PlannedUpdate(self.version, (ticket,))
            return None
        clock, parts = self.version, self.portion_counts.get(self.version)
        if parts is None or sum(t.portion.clock == clock for t in here) < min(self.rules.quorum or parts, parts):
            return None
        due = sorted((t for t in here if t.portion.clock <= clock), key=lambda t: t.portion)
        late = [t for t in due if self.version - t.read_version > self.rules.staleness]
        return PlannedUpdate(self.version, tuple(t for t in due if t not in late), tuple(late))

    def _leaves_others_fresh(self, ticket: Ticket) -> bool:
        """Return whether all other gradients can still be used within the bound after this one, oldest first."""
        others = self._list_reads((ticket,))
        return all(self.version + 1 + k - read <= self.rules.staleness for k, read in enumerate(others))

    def complete_update(self, update: PlannedUpdate) -> list[LedgerRow]:
        """Complete an update. Returns its ledger rows, the dropped ones first."""
        rows = self._drop_tickets(update.dropped, f"staler than {self.rules.staleness}")
        for ticket in (*update.dropped, *update.used):
            del self.outstanding[ticket.number]
        total = sum(t.weight for t in update.used)
        for ticket in update.used:
            weight = ticket.portion.fraction if self.rules.update_per_gradient else ticket.weight / total
            rows.append(self._make_row(ticket, self.version + 1, weight))
            self.max_staleness = max(self.max_staleness, self.version - ticket.read_version)
        self.version += 1
        if not self.rules.update_per_gradient:
            self.portion_counts.pop(update.version, None)
        return rows

    def _drop_tickets(self, tickets: tuple[Ticket, ...], why: str) -> list[LedgerRow]:
        return [self._make_row(ticket, -1, 0.0, why) for ticket in tickets]

    def _make_row(self, ticket: Ticket, made: int, weight: float, dropped: str = "") -> LedgerRow:
        portion = ticket.portion
        self.remaining[portion.clock] -= 1
        if not self.remaining[portion.clock]:
            del self.remaining[portion.clock]
        self.samples += portion.count
        self.resumes_at = max(self.resumes_at, portion.clock + 1)
        self.positions = {clock: at for clock, at in self.positions.items() if clock >= self.resumes_at}
        row = LedgerRow(
            self.seq, ticket.group, ticket.fence, portion.clock, portion.epoch, portion.first, tuple(self.clocks.list_ids(portion)),
            ticket.read_version, made, weight, dropped,
        )  # fmt: skip
        self.seq += 1
        return row

    # progress

    @property
    def done_clocks(self) -> int:
        """Number of completed clocks: updated, or with no portions left in them or in earlier ones."""
        if not self.rules.update_per_gradient:
            return self.version
        return min(self.remaining, default=self.begun_clocks)

    @property
    def is_finished(self) -> bool:
        return self.done_clocks >= self.steps

    def end(self) -> list[LedgerRow]:
        """Drop the remaining portions of a quorum once all clocks are done. Returns their rows."""
        why = "the run ended before it arrived"
        nobodys = [Ticket(-1, -1, 0, portion, self.version) for portion in (*self.returned, *self.undealt)]
        rows = self._drop_tickets((*self.outstanding.values(), *nobodys), why)
        self.outstanding, self.returned, self.undealt = {}, [], []
        return rows

    def list_pending(self) -> list[Portion]:
        """List portions of clocks before `resumes_at` that were neither used nor dropped: a resumed run deals them first."""
        portions = (*self.returned, *self.undealt, *(t.portion for t in self.outstanding.values()))
        return sorted(portion for portion in portions if portion.clock < self.resumes_at)

    @property
    def position(self) -> Position:
        """Start of the clock `resumes_at`."""
        return self.positions[self.resumes_at]
