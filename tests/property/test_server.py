"""The server of outer_sync=async under random speeds, deaths, joins and late messages, in virtual time: the invariants of its ledger.

The transport is a list of messages with times. A group that dies may have sent its gradient before. It may also only seem dead, and
send the gradient later. The server detects a death late. The same checks find faulty servers with one mistake each.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.engine.server.dealer import (
    Clocks,
    Dealer,
    DealerRules,
    GroupDeath,
    LedgerRow,
    PlannedUpdate,
    Portion,
    Ticket,
    find_ledger_faults,
)


@dataclass
class Course:
    """A run in virtual time."""

    dealer: Dealer
    draw: random.Random
    deaths: float = 0.0
    """The probability that a group dies while it computes."""
    slow: dict[int, float] = field(default_factory=dict)
    rows: list[LedgerRow] = field(default_factory=list)
    shards: tuple[list[int], ...] = field(default_factory=lambda: ([], []))
    now: float = 0.0
    events: list[tuple[float, int, str, int, Ticket | None]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    stalls: dict[int, float] = field(default_factory=dict)
    count: itertools.count = field(default_factory=itertools.count)

    def after(self, seconds: float, what: str, group: int, ticket: Ticket | None = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), what, group, ticket))

    def run(self, most: int = 20_000) -> "Course":
        for group in range(self.dealer.rules.groups):
            self.after(self.draw.random(), "join", group)
        for _ in range(most):
            if self.dealer.is_finished:
                self.rows += self.dealer.end()
                return self
            assert self.events, "nobody computes, and nobody will come"
            self.now, _, what, group, ticket = heapq.heappop(self.events)
            getattr(self, what)(group, ticket)
            self._update()
            self._deal()
        raise AssertionError("the run does not end")

    def join(self, group: int, _: object) -> None:
        self.dealer.add_group(group)
        self.waiting.add(group)

    def push(self, group: int, ticket: Ticket | None) -> None:
        assert ticket is not None
        if (
            self.dealer.accept_gradient(ticket.number, group, ticket.fence, 1.0 + ticket.portion.count)
            or self.dealer.fences.get(group) == ticket.fence
        ):
            self.waiting.add(group)

    def dead(self, group: int, ticket: Ticket | None) -> None:
        assert ticket is not None
        if self.dealer.fences.get(group) == ticket.fence:
            self.dealer.remove_group(group)
            self.waiting.discard(group)
            self.after(self.draw.random() * 3, "join", group)

    def _update(self) -> None:
        while (update := self.dealer.find_update()) is not None:
            made = self.dealer.complete_update(update)
            self.rows += made
            for shard in self.shards:
                shard += [row.seq for row in made if not row.dropped]

    def _deal(self) -> None:
        for group in sorted(self.waiting):
            ticket = self.dealer.deal(group, self.now)
            if ticket is None:
                continue
            self.waiting.discard(group)
            took = self.slow.get(group, 1.0) * (0.5 + self.draw.random())
            if self.draw.random() < self.deaths:
                if self.draw.random() < 0.5:  # presumed dead: its result arrives late
                    self.after(took + 2.0, "push", group, ticket)
                self.after(took * self.draw.random() + 1.0, "dead", group, ticket)
            else:
                self.after(took, "push", group, ticket)


def course(seed: int, rules: DealerRules | None = None, kind: type[Dealer] = Dealer, deaths: float | None = None) -> Course:
    draw = random.Random(seed)
    groups = draw.randint(1, 5)
    each = draw.random() < 0.5
    quorum = 0 if each or draw.random() < 0.5 else draw.randint(1, groups)
    rules = rules or DealerRules(groups, draw.randint(0, 9), each, quorum)
    length, batch, steps = draw.randint(3, 40), draw.randint(rules.groups, 12), draw.randint(1, 12)
    slow = {g: draw.choice((1.0, 1.0, 3.0, 9.0)) for g in range(rules.groups)}
    dealer = kind(Clocks(Sampling(length, max(batch, rules.groups), seed), rules.groups), rules, steps)
    return Course(dealer, draw, draw.choice((0.0, 0.1, 0.3)) if deaths is None else deaths, slow)


def expected(dealer: Dealer) -> list[tuple[int, int]]:
    """Every sample of the run."""
    clocks = Clocks(dealer.clocks.sampling, dealer.clocks.groups)
    portions = [portion for _ in range(dealer.steps) for portion in clocks.take_clock()]
    return [(portion.clock, portion.first + k) for portion in portions for k in range(portion.count)]


def wrong(course: Course) -> list[str]:
    dealer = course.dealer
    return find_ledger_faults(course.rows, dealer.deaths, dealer.rules.staleness, expected(dealer), course.shards)


@pytest.mark.parametrize("block", range(8))
def test_the_ledger_holds_under_delays_deaths_and_joins(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        made = course(seed).run()
        assert not wrong(made), (seed, made.dealer.rules, wrong(made))
        dropped = [row for row in made.rows if row.dropped]
        assert made.dealer.rules.quorum or not dropped, "only a quorum drops samples"


def test_the_ids_are_those_of_one_device() -> None:
    made = course(5, DealerRules(3, 2), deaths=0.2).run()
    by_clock = {
        clock: [i for row in sorted(rows, key=lambda r: r.first) for i in row.ids]
        for clock, rows in itertools.groupby(sorted(made.rows, key=lambda r: r.clock), key=lambda r: r.clock)
    }
    clocks = Clocks(replace(made.dealer.clocks.sampling, seed=5), 1)
    assert by_clock == {k: clocks.list_ids(clocks.take_clock()[0]) for k in range(made.dealer.steps)}


@pytest.mark.parametrize("each", (False, True))
def test_staleness_zero_is_one_version_at_a_time(each: bool) -> None:
    made = course(3, DealerRules(4, 0, each), deaths=0.0).run()
    assert {row.staleness for row in made.rows} == {0}
    if not each:
        assert all(row.version_read == row.clock for row in made.rows)


def test_a_slow_group_holds_up_nobody_within_the_bound() -> None:
    """Three fast groups and one three times slower: a bound of 3 · (N − 1) is enough for a version per gradient, and 0 is not."""

    def seconds(staleness: int) -> float:
        dealer = Dealer(Clocks(Sampling(10**6, 8, 0), 4), DealerRules(4, staleness, True), 100)
        return Course(dealer, random.Random(1), slow={3: 3.0}).run().now

    free, bound, sync = seconds(10**6), seconds(9), seconds(0)
    assert bound < 1.1 * free and sync > 2.5 * free


@pytest.mark.parametrize("seed", range(60))
def test_a_run_goes_on_from_anywhere(seed: int) -> None:
    """The contents of a checkpoint (version, rows, position, pending portions) are sufficient: both halves together use every sample once."""
    first = course(seed)
    dealer = first.dealer
    stop = first.draw.randint(0, dealer.steps - 1)
    steps, dealer.steps = dealer.steps, dealer.steps
    for group in range(dealer.rules.groups):
        first.after(first.draw.random(), "join", group)
    while dealer.done_clocks < stop or (dealer.rules.update_per_gradient and dealer.version < stop):
        first.now, _, what, group, ticket = heapq.heappop(first.events)
        getattr(first, what)(group, ticket)
        first._update()
        first._deal()
    if dealer.is_finished:
        return
    clocks = Clocks(dealer.clocks.sampling, dealer.clocks.groups, dealer.position)
    known = {"version": dealer.version, "seq": dealer.seq, "fence": dealer.fence, "returned": tuple(dealer.list_pending())}
    going_on = Dealer(clocks, dealer.rules, steps, **known)
    assert going_on.samples == dealer.samples == sum(len(row.ids) for row in first.rows)
    second = Course(going_on, first.draw, 0.1).run()
    rows = first.rows + second.rows
    assert not find_ledger_faults(rows, [*dealer.deaths, *going_on.deaths], dealer.rules.staleness, expected(dealer))


# Servers with one mistake each


class Stale(Dealer):
    """Distributes clocks and portions beyond the bound."""

    def _can_begin(self) -> bool:
        return self.begun_clocks <= self.version + self.rules.staleness + 2

    def _can_deal(self) -> bool:
        return True

    def _leaves_others_fresh(self, ticket: Ticket) -> bool:
        return True


class Twice(Dealer):
    """Uses a gradient again in the next update."""

    again: Ticket | None = None

    def complete_update(self, update: PlannedUpdate) -> list[LedgerRow]:
        before, self.again = self.again, update.used[0] if update.used else None
        rows = super().complete_update(update)
        if before is not None and self.seq % 3 == 0:
            rows.append(self._make_row(before, self.version, 0.1))
        return rows


class Late(Dealer):
    """Accepts messages of a group that was declared dead."""

    def remove_group(self, group: int) -> list[int]:
        kept = {n: t for n, t in self.outstanding.items() if t.group == group}
        gone = super().remove_group(group)
        self.ghosts = {**getattr(self, "ghosts", {}), **kept}
        return gone

    def accept_gradient(self, number: int, group: int, fence: int, weight: float = 1.0) -> bool:
        ghost = getattr(self, "ghosts", {}).pop(number, None)
        if ghost is not None and ghost.portion in self.returned:
            self.returned.remove(ghost.portion)
            self.outstanding[number] = ghost
            ghost.has_arrived, ghost.weight = True, weight
            return True
        return super().accept_gradient(number, group, fence, weight)


class Lost(Dealer):
    """Loses the portion of a group that died."""

    def remove_group(self, group: int) -> list[int]:
        gone = super().remove_group(group)
        if self.returned:
            portion = self.returned.pop()
            self.remaining[portion.clock] -= 1
            self.portion_counts[portion.clock] = self.portion_counts.get(portion.clock, 1) - 1
        return gone


class WrongVersion(Dealer):
    """Records the server's current version instead of the version that was read."""

    def complete_update(self, update: PlannedUpdate) -> list[LedgerRow]:
        return [replace(row, version_made=row.version_made + 1) if row.seq % 2 else row for row in super().complete_update(update)]


class Misnumbered(Dealer):
    """Counts its rows incorrectly."""

    def complete_update(self, update: PlannedUpdate) -> list[LedgerRow]:
        rows = super().complete_update(update)
        self.seq += self.version == 2
        return rows


class Unordered(Course):
    """The second server applies two gradients in reverse order."""

    def run(self, most: int = 20_000) -> "Course":
        super().run(most)
        self.shards[1].reverse()
        return self


@pytest.mark.parametrize("kind", (Stale, Twice, Late, Lost, WrongVersion, Misnumbered))
def test_a_dealer_with_a_mistake_is_found(kind: type[Dealer]) -> None:
    found = 0
    for seed in range(60):
        try:
            found += bool(wrong(course(seed, kind=kind, deaths=0.3).run(4000)))
        except (AssertionError, KeyError, ValueError):  # the run does not even end
            found += 1
    assert found > 10, f"{found} of 60"


def test_servers_that_disagree_are_found() -> None:
    made = course(1, DealerRules(3, 2), deaths=0.0)
    other = Unordered(made.dealer, made.draw).run()
    assert any("another order" in line for line in wrong(other))


def test_a_row_after_a_death_is_found() -> None:
    row = LedgerRow(0, 1, 4, 0, 0, 0, (3,), 0, 1, 1.0)
    assert not find_ledger_faults([row], [GroupDeath(1, 1, 4)], 0)
    assert "declared dead" in find_ledger_faults([row], [GroupDeath(0, 1, 4)], 0)[0]
    assert not find_ledger_faults([replace(row, fence=5)], [GroupDeath(0, 1, 4)], 0)


def test_pieces_end_with_the_epoch() -> None:
    clocks = Clocks(Sampling(7, 4, 0), 3, Position())
    assert [(p.clock, p.epoch, p.first, p.count) for p in clocks.take_clock()] == [(0, 0, 0, 2), (0, 0, 2, 1), (0, 0, 3, 1)]
    assert [(p.clock, p.epoch, p.start, p.count) for p in clocks.take_clock()] == [(1, 0, 4, 1)] * 3
    assert clocks.next_position == Position(2, 1, 0, 7)
    assert clocks.take_clock()[0] == Portion(2, 0, 2, 4, 1, 0)
