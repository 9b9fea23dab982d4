"""The dealer: which group is dealt which portion at which version, and which gradients an update takes. Values only, so that
any course of a run can be played without processes.

    clock      clock c may be dealt once version c − staleness is made; its update is made when `quorum` of its portions are
               there (all of them by default), and takes all that are there of it and of earlier clocks. A gradient of an
               earlier clock that would be staler than the bound is dropped, by name.
    nesterov   an update for each gradient. A portion is dealt only while no more than `staleness` others are out, and a gradient
               waits while its update would leave another one too stale: the oldest goes first.

Both keep the bound by waiting *before* something is computed, or before its update; nothing that was computed within the rules
is thrown away, but for the late gradients of a quorum.

A group that dies gives its portion back: it is dealt again before any new one. Every start of a group has a higher fence, and
what comes under an old one is not taken.

A clock is what a step is elsewhere: the next samples of the epoch's order (`data/sampling.py`). It is cut into as many contiguous
portions as there are groups, and fewer where it has fewer samples.

[Note: Ledger]
The ledger: a row for each gradient that the server used or dropped, from which the run can be made again in one process.

A version is a state of the server's weights; the run begins with version 0, and update number k makes version k + 1 of version k.
The *staleness* of a gradient is how many versions were made between the weights it was computed at and the update that uses
it: version_made − 1 − version_read. At 0 it is what one device would compute.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from plait.checkpoint.safetensors_file import Count
from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.tensors.rows import split


@dataclass(frozen=True)
class LedgerRow:
    """One gradient, used or dropped."""

    seq: int
    """Number of the row."""
    group: int
    fence: int
    """Of the group when the portion was dealt: who is declared dead and comes back has a higher one."""
    clock: int
    epoch: int
    first: int
    """Of its samples in the clock's batch."""
    ids: tuple[int, ...]
    version_read: int
    version_made: int
    """By the update that uses it; −1 when it was dropped."""
    weight: float
    """What it counts in that update, as a share of all that the update takes (of the clock's samples under nesterov)."""
    dropped: str = ""
    """Why, when it was."""

    @property
    def staleness(self) -> int:
        return self.version_made - 1 - self.version_read

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value}


@dataclass(frozen=True)
class Death:
    """A group was declared dead after `seq` rows: nothing it computed under this fence, or an earlier one, is used any more."""

    seq: int
    group: int
    fence: int


def problems(
    rows: Sequence[LedgerRow], deaths: Iterable[Death], staleness: int, expected: Iterable[tuple[int, int]] | None = None,
    shards: Sequence[Sequence[int]] = (),
) -> list[str]:  # fmt: skip
    """What does not hold of a ledger, a sentence each.

    `expected`: (clock, place in its batch) of every sample that was to be seen. `shards`: the numbers of the rows that each
    server applied, in its order.
    """
    found = [*_numbers(rows), *_versions(rows, staleness), *_fenced(rows, deaths)]
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


def _numbers(rows: Sequence[LedgerRow]) -> list[str]:
    wrong = next((i for i, row in enumerate(rows) if row.seq != rows[0].seq + i), None)
    return [] if wrong is None else [f"row {rows[wrong].seq} stands where row {rows[0].seq + wrong} belongs"]


def _versions(rows: Sequence[LedgerRow], staleness: int) -> list[str]:
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


def _fenced(rows: Sequence[LedgerRow], deaths: Iterable[Death]) -> list[str]:
    return [
        f"row {row.seq} is of group {row.group} under fence {row.fence}, declared dead after {death.seq} rows"
        for death in deaths
        for row in rows
        if row.group == death.group and row.fence <= death.fence and row.seq >= death.seq and not row.dropped
    ]


Some = Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, order=True)
class Portion:
    """Samples first … first + count − 1 of a clock's batch."""

    clock: Count
    """Number of the clock, from 0: the steps that were done before it."""
    first: Count
    count: Some
    size: Some
    """Samples of the clock."""
    epoch: Count
    start: Count
    """Where the clock begins in the epoch's order."""

    @property
    def share(self) -> float:
        """Its part of the clock, by samples."""
        return self.count / self.size


class Clocks:
    """The clocks of a job, one after the other, from a position on."""

    def __init__(self, sampling: Sampling, groups: int, at: Position | None = None):
        self.sampling, self.groups = sampling, groups
        self.after = at or Position()
        """Where the clock after the last one given begins."""

    def take(self) -> list[Portion]:
        """The portions of the next clock."""
        at = self.after
        size = self.sampling.size(at.epoch, at.start)
        parts = min(self.groups, size)
        cuts = [split(size, parts, i) for i in range(parts)]
        ends = at.start + size == len(self.sampling.epoch(at.epoch))
        self.after = Position(at.step + 1, at.epoch + ends, 0 if ends else at.start + size, at.samples + size)
        return [Portion(at.step, first, count, size, at.epoch, at.start) for first, count in cuts]

    def ids(self, portion: Portion) -> list[int]:
        begin = portion.start + portion.first
        return self.sampling.epoch(portion.epoch)[begin : begin + portion.count].tolist()


@dataclass(frozen=True)
class Rules:
    """What of a plan the dealer goes by."""

    groups: int
    staleness: int = 0
    each: bool = False
    """An update for each gradient."""
    quorum: int = 0


@dataclass(eq=False)
class Ticket:
    """A portion in the hands of a group."""

    number: int
    group: int
    fence: int
    portion: Portion
    read: int
    """The version of the weights that go with it."""
    dealt: float = 0.0
    """When, in the clock of who deals."""
    arrived: bool = False
    weight: float = 0.0
    """What the mean in its loss is over."""


@dataclass(frozen=True)
class Update:
    """The next update: what it takes, in order, and what is dropped before it."""

    version: int
    takes: tuple[Ticket, ...]
    drops: tuple[Ticket, ...] = ()


class Dealer:
    """Deals the portions of `steps` clocks. `version`, `seq`, `fence` and `back`: where a run goes on."""

    def __init__(
        self, clocks: Clocks, rules: Rules, steps: int, *, version: int = 0, seq: int = 0, fence: int = 0,
        back: tuple[Portion, ...] = (),
    ):  # fmt: skip
        self.clocks, self.rules, self.steps, self.version, self.seq = clocks, rules, steps, version, seq
        self.out: dict[int, Ticket] = {}
        """Dealt, and neither used nor dropped, by number."""
        self.back: list[Portion] = sorted(back)
        """Given back by groups that died: dealt before any other."""
        self.fresh: list[Portion] = []
        """Of clocks that are begun."""
        self.fences: dict[int, int] = {}
        """Of groups that are there."""
        self.fence, self.dealt = fence, 0
        self.parts: dict[int, int] = {}
        """Portions of each clock that is begun and not yet updated."""
        self.begun = self.resumes_at = clocks.after.step
        """`resumes_at`: the first clock of which, as of all later ones, nothing was used or dropped."""
        self.left = Counter(portion.clock for portion in back)
        """Portions of each clock that were neither used nor dropped, where there are any."""
        self.samples = clocks.after.samples - sum(portion.count for portion in back)
        """That were used or dropped."""
        self.positions = {self.begun: clocks.after}
        """Where clocks from `resumes_at` on begin."""
        self.deaths: list[Death] = []
        self.stalest = 0
        self.halted = False
        """Nothing new is dealt."""

    # groups that come and go

    def join(self, group: int) -> int:
        """A group is there (again): its fence."""
        if group in self.fences:
            self.lost(group)
        self.fence += 1
        self.fences[group] = self.fence
        return self.fence

    def lost(self, group: int) -> list[int]:
        """A group is declared dead: its portion goes back, also one whose gradient has arrived and is not used. Their tickets."""
        fence = self.fences.pop(group, None)
        if fence is None:
            return []
        self.deaths.append(Death(self.seq, group, fence))
        gone = [t for t in self.out.values() if t.group == group]
        for ticket in gone:
            del self.out[ticket.number]
            self.back.append(ticket.portion)
        self.back.sort()
        return [t.number for t in gone]

    # dealing

    def deal(self, group: int, now: float = 0.0) -> Ticket | None:
        """The next portion for a group; None while it must wait, or when there is none."""
        if self.halted or group not in self.fences or not self._may_read():
            return None
        portion = self._next()
        if portion is None:
            return None
        ticket = Ticket(self.dealt, group, self.fences[group], portion, self.version, now)
        self.dealt += 1
        self.out[ticket.number] = ticket
        return ticket

    def _may_read(self) -> bool:
        if not self.rules.each:
            return True  # the bound is kept by which clocks are begun
        mine = self.version
        return all(self.version + k - read <= self.rules.staleness for k, read in enumerate([*self._reads(()), mine]))

    def _reads(self, without: tuple[Ticket, ...]) -> list[int]:
        """The versions that portions were dealt at which are still out, the oldest first."""
        return sorted(t.read for t in self.out.values() if t not in without)

    def _next(self) -> Portion | None:
        if self.back:
            return self.back.pop(0)
        if not self.fresh and self.begun < self.steps and self._may_begin():
            self.fresh = self.clocks.take()
            self.parts[self.begun] = self.left[self.begun] = len(self.fresh)
            self.begun += 1
            self.positions[self.begun] = self.clocks.after
        return self.fresh.pop(0) if self.fresh else None

    def _may_begin(self) -> bool:
        return self.rules.each or self.begun <= self.version + self.rules.staleness

    # gradients and updates

    def arrived(self, number: int, group: int, fence: int, weight: float = 1.0) -> bool:
        """A gradient has come; False when it is not taken: its sender was declared dead, or it came before."""
        ticket = self.out.get(number)
        if ticket is None or ticket.arrived or (ticket.group, ticket.fence) != (group, fence):
            return False
        if self.fences.get(group) != fence:
            return False
        ticket.arrived, ticket.weight = True, weight
        return True

    def update(self) -> Update | None:
        """The update that can be made now, if any."""
        here = [t for t in self.out.values() if t.arrived]
        if self.rules.each:
            for ticket in here:
                if self._leaves_others_fresh(ticket):
                    return Update(self.version, (ticket,))
            return None
        clock, parts = self.version, self.parts.get(self.version)
        if parts is None or sum(t.portion.clock == clock for t in here) < min(self.rules.quorum or parts, parts):
            return None
        due = sorted((t for t in here if t.portion.clock <= clock), key=lambda t: t.portion)
        late = [t for t in due if self.version - t.read > self.rules.staleness]
        return Update(self.version, tuple(t for t in due if t not in late), tuple(late))

    def _leaves_others_fresh(self, ticket: Ticket) -> bool:
        """Whether all others can still be used in time after this one, the oldest first."""
        others = self._reads((ticket,))
        return all(self.version + 1 + k - read <= self.rules.staleness for k, read in enumerate(others))

    def made(self, update: Update) -> list[LedgerRow]:
        """The update was made: its rows, the dropped ones first."""
        rows = self._drop(update.drops, f"staler than {self.rules.staleness}")
        for ticket in (*update.drops, *update.takes):
            del self.out[ticket.number]
        total = sum(t.weight for t in update.takes)
        for ticket in update.takes:
            weight = ticket.portion.share if self.rules.each else ticket.weight / total
            rows.append(self._row(ticket, self.version + 1, weight))
            self.stalest = max(self.stalest, self.version - ticket.read)
        self.version += 1
        if not self.rules.each:
            self.parts.pop(update.version, None)
        return rows

    def _drop(self, tickets: tuple[Ticket, ...], why: str) -> list[LedgerRow]:
        return [self._row(ticket, -1, 0.0, why) for ticket in tickets]

    def _row(self, ticket: Ticket, made: int, weight: float, dropped: str = "") -> LedgerRow:
        portion = ticket.portion
        self.left[portion.clock] -= 1
        if not self.left[portion.clock]:
            del self.left[portion.clock]
        self.samples += portion.count
        self.resumes_at = max(self.resumes_at, portion.clock + 1)
        self.positions = {clock: at for clock, at in self.positions.items() if clock >= self.resumes_at}
        row = LedgerRow(
            self.seq, ticket.group, ticket.fence, portion.clock, portion.epoch, portion.first, tuple(self.clocks.ids(portion)),
            ticket.read, made, weight, dropped,
        )  # fmt: skip
        self.seq += 1
        return row

    # where it stands

    @property
    def done(self) -> int:
        """Clocks that are done: updated, or with nothing left of them or of those before."""
        if not self.rules.each:
            return self.version
        return min(self.left, default=self.begun)

    @property
    def finished(self) -> bool:
        return self.done >= self.steps

    def end(self) -> list[LedgerRow]:
        """All clocks are done: what is left of a quorum is dropped."""
        why = "the run ended before it came"
        nobodys = [Ticket(-1, -1, 0, portion, self.version) for portion in (*self.back, *self.fresh)]
        rows = self._drop((*self.out.values(), *nobodys), why)
        self.out, self.back, self.fresh = {}, [], []
        return rows

    def pending(self) -> list[Portion]:
        """Portions of clocks before `resumes_at` that were neither used nor dropped: a run that goes on from here deals them first."""
        portions = (*self.back, *self.fresh, *(t.portion for t in self.out.values()))
        return sorted(portion for portion in portions if portion.clock < self.resumes_at)

    @property
    def position(self) -> Position:
        """Where the clock `resumes_at` begins."""
        return self.positions[self.resumes_at]
