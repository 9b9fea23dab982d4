"""The dealer of outer_sync=async under random speeds, deaths, joins and late messages, in virtual time: what its ledger must show.

The transport is a list of messages with times. A group that dies may have sent its gradient before, or be only thought dead and
send it later; the server learns of a death late. Wrong dealers, each with one mistake, are found by the same checks.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.engine.server.dealing import Clocks, Dealer, Death, LedgerRow, Portion, Rules, Ticket, Update, problems


@dataclass
class Course:
    """A run in virtual time."""

    dealer: Dealer
    draw: random.Random
    deaths: float = 0.0
    """How likely a group dies while it computes."""
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
            if self.dealer.finished:
                self.rows += self.dealer.end()
                return self
            assert self.events, "nobody computes, and nobody will come"
            self.now, _, what, group, ticket = heapq.heappop(self.events)
            getattr(self, what)(group, ticket)
            self._update()
            self._deal()
        raise AssertionError("the run does not end")

    def join(self, group: int, _: object) -> None:
        self.dealer.join(group)
        self.waiting.add(group)

    def push(self, group: int, ticket: Ticket | None) -> None:
        assert ticket is not None
        if (
            self.dealer.arrived(ticket.number, group, ticket.fence, 1.0 + ticket.portion.count)
            or self.dealer.fences.get(group) == ticket.fence
        ):
            self.waiting.add(group)

    def dead(self, group: int, ticket: Ticket | None) -> None:
        assert ticket is not None
        if self.dealer.fences.get(group) == ticket.fence:
            self.dealer.lost(group)
            self.waiting.discard(group)
            self.after(self.draw.random() * 3, "join", group)

    def _update(self) -> None:
        while (update := self.dealer.update()) is not None:
            made = self.dealer.made(update)
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
                if self.draw.random() < 0.5:  # thought dead: what it computed comes late
                    self.after(took + 2.0, "push", group, ticket)
                self.after(took * self.draw.random() + 1.0, "dead", group, ticket)
            else:
                self.after(took, "push", group, ticket)


def course(seed: int, rules: Rules | None = None, kind: type[Dealer] = Dealer, deaths: float | None = None) -> Course:
    draw = random.Random(seed)
    groups = draw.randint(1, 5)
    each = draw.random() < 0.5
    quorum = 0 if each or draw.random() < 0.5 else draw.randint(1, groups)
    rules = rules or Rules(groups, draw.randint(0, 9), each, quorum)
    length, batch, steps = draw.randint(3, 40), draw.randint(rules.groups, 12), draw.randint(1, 12)
    slow = {g: draw.choice((1.0, 1.0, 3.0, 9.0)) for g in range(rules.groups)}
    dealer = kind(Clocks(Sampling(length, max(batch, rules.groups), seed), rules.groups), rules, steps)
    return Course(dealer, draw, draw.choice((0.0, 0.1, 0.3)) if deaths is None else deaths, slow)


def expected(dealer: Dealer) -> list[tuple[int, int]]:
    """Every sample of the run."""
    clocks = Clocks(dealer.clocks.sampling, dealer.clocks.groups)
    portions = [portion for _ in range(dealer.steps) for portion in clocks.take()]
    return [(portion.clock, portion.first + k) for portion in portions for k in range(portion.count)]


def wrong(course: Course) -> list[str]:
    dealer = course.dealer
    return problems(course.rows, dealer.deaths, dealer.rules.staleness, expected(dealer), course.shards)


@pytest.mark.parametrize("block", range(8))
def test_the_ledger_holds_under_delays_deaths_and_joins(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        made = course(seed).run()
        assert not wrong(made), (seed, made.dealer.rules, wrong(made))
        dropped = [row for row in made.rows if row.dropped]
        assert made.dealer.rules.quorum or not dropped, "only a quorum drops samples"


def test_the_ids_are_those_of_one_device() -> None:
    made = course(5, Rules(3, 2), deaths=0.2).run()
    by_clock = {
        clock: [i for row in sorted(rows, key=lambda r: r.first) for i in row.ids]
        for clock, rows in itertools.groupby(sorted(made.rows, key=lambda r: r.clock), key=lambda r: r.clock)
    }
    clocks = Clocks(replace(made.dealer.clocks.sampling, seed=5), 1)
    assert by_clock == {k: clocks.ids(clocks.take()[0]) for k in range(made.dealer.steps)}


@pytest.mark.parametrize("each", (False, True))
def test_staleness_zero_is_one_version_at_a_time(each: bool) -> None:
    made = course(3, Rules(4, 0, each), deaths=0.0).run()
    assert {row.staleness for row in made.rows} == {0}
    if not each:
        assert all(row.version_read == row.clock for row in made.rows)


def test_a_slow_group_holds_up_nobody_within_the_bound() -> None:
    """Three fast groups and one three times slower: a bound of 3 · (N − 1) is enough for a version per gradient, and 0 is not."""

    def seconds(staleness: int) -> float:
        dealer = Dealer(Clocks(Sampling(10**6, 8, 0), 4), Rules(4, staleness, True), 100)
        return Course(dealer, random.Random(1), slow={3: 3.0}).run().now

    free, bound, sync = seconds(10**6), seconds(9), seconds(0)
    assert bound < 1.1 * free and sync > 2.5 * free


@pytest.mark.parametrize("seed", range(60))
def test_a_run_goes_on_from_anywhere(seed: int) -> None:
    """What a checkpoint keeps (version, rows, position, pending portions) is enough: together both halves saw every sample once."""
    first = course(seed)
    dealer = first.dealer
    stop = first.draw.randint(0, dealer.steps - 1)
    steps, dealer.steps = dealer.steps, dealer.steps
    for group in range(dealer.rules.groups):
        first.after(first.draw.random(), "join", group)
    while dealer.done < stop or (dealer.rules.each and dealer.version < stop):
        first.now, _, what, group, ticket = heapq.heappop(first.events)
        getattr(first, what)(group, ticket)
        first._update()
        first._deal()
    if dealer.finished:
        return
    clocks = Clocks(dealer.clocks.sampling, dealer.clocks.groups, dealer.position)
    known = {"version": dealer.version, "seq": dealer.seq, "fence": dealer.fence, "back": tuple(dealer.pending())}
    going_on = Dealer(clocks, dealer.rules, steps, **known)
    assert going_on.samples == dealer.samples == sum(len(row.ids) for row in first.rows)
    second = Course(going_on, first.draw, 0.1).run()
    rows = first.rows + second.rows
    assert not problems(rows, [*dealer.deaths, *going_on.deaths], dealer.rules.staleness, expected(dealer))


# Dealers with one mistake each


class Stale(Dealer):
    """Deals clocks, and portions, beyond the bound."""

    def _may_begin(self) -> bool:
        return self.begun <= self.version + self.rules.staleness + 2

    def _may_read(self) -> bool:
        return True

    def _leaves_others_fresh(self, ticket: Ticket) -> bool:
        return True


class Twice(Dealer):
    """Uses a gradient again in the next update."""

    again: Ticket | None = None

    def made(self, update: Update) -> list[LedgerRow]:
        before, self.again = self.again, update.takes[0] if update.takes else None
        rows = super().made(update)
        if before is not None and self.seq % 3 == 0:
            rows.append(self._row(before, self.version, 0.1))
        return rows


class Late(Dealer):
    """Takes what a group sends that was declared dead."""

    def lost(self, group: int) -> list[int]:
        kept = {n: t for n, t in self.out.items() if t.group == group}
        gone = super().lost(group)
        self.ghosts = {**getattr(self, "ghosts", {}), **kept}
        return gone

    def arrived(self, number: int, group: int, fence: int, weight: float = 1.0) -> bool:
        ghost = getattr(self, "ghosts", {}).pop(number, None)
        if ghost is not None and ghost.portion in self.back:
            self.back.remove(ghost.portion)
            self.out[number] = ghost
            ghost.arrived, ghost.weight = True, weight
            return True
        return super().arrived(number, group, fence, weight)


class Lost(Dealer):
    """Forgets the portion of a group that died."""

    def lost(self, group: int) -> list[int]:
        gone = super().lost(group)
        if self.back:
            portion = self.back.pop()
            self.left[portion.clock] -= 1
            self.parts[portion.clock] = self.parts.get(portion.clock, 1) - 1
        return gone


class WrongVersion(Dealer):
    """Writes down the version that the server has now in place of the one that was read."""

    def made(self, update: Update) -> list[LedgerRow]:
        return [replace(row, version_made=row.version_made + 1) if row.seq % 2 else row for row in super().made(update)]


class Misnumbered(Dealer):
    """Loses count of its rows."""

    def made(self, update: Update) -> list[LedgerRow]:
        rows = super().made(update)
        self.seq += self.version == 2
        return rows


class Unordered(Course):
    """The second server applies two gradients the other way round."""

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
        except (AssertionError, KeyError, ValueError):  # it does not even end
            found += 1
    assert found > 10, f"{found} of 60"


def test_servers_that_disagree_are_found() -> None:
    made = course(1, Rules(3, 2), deaths=0.0)
    other = Unordered(made.dealer, made.draw).run()
    assert any("another order" in line for line in wrong(other))


def test_a_row_after_a_death_is_found() -> None:
    row = LedgerRow(0, 1, 4, 0, 0, 0, (3,), 0, 1, 1.0)
    assert not problems([row], [Death(1, 1, 4)], 0)
    assert "declared dead" in problems([row], [Death(0, 1, 4)], 0)[0]
    assert not problems([replace(row, fence=5)], [Death(0, 1, 4)], 0)


def test_pieces_end_with_the_epoch() -> None:
    clocks = Clocks(Sampling(7, 4, 0), 3, Position())
    assert [(p.clock, p.epoch, p.first, p.count) for p in clocks.take()] == [(0, 0, 0, 2), (0, 0, 2, 1), (0, 0, 3, 1)]
    assert [(p.clock, p.epoch, p.start, p.count) for p in clocks.take()] == [(1, 0, 4, 1)] * 3
    assert clocks.after == Position(2, 1, 0, 7)
    assert clocks.take()[0] == Portion(2, 0, 2, 4, 1, 0)
