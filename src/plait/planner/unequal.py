"""Plans on a machine whose devices are unlike: every share of the batch is priced on its own devices.

A step ends with its slowest share. Equal shares are as slow as the slowest device; shares by speed (`batch_shares`) as slow as all
devices are together. Each rank's memory is held against that of its own device.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from plait.config.plan import Plan
from plait.data.shares import sizes
from plait.parallel.shares.balance import told
from plait.planner.estimate import Estimate, estimate
from plait.planner.space import SearchSpace
from plait.planner.time import TimeModel

LONGEST = 64
"""Shares of which parts are written into a plan."""


def ways(pace: TimeModel, plan: Plan, question: SearchSpace, refused: Callable[[Plan], str]) -> list[Plan]:
    """The plan with equal shares, and with shares by speed where devices differ: measured ones, or parts where speeds cannot be
    measured under the plan."""
    if not pace.machine.unlike or plan.ranks == 1 or "batch_shares" in question.pins:
        return [plan]
    speeds = by_speed(pace, plan)
    if len(set(speeds)) == 1:
        return [plan]
    auto = replace(plan, batch_shares="auto")
    if refused(auto) and not refused(plan) and plan.ranks <= LONGEST:
        auto = replace(plan, batch_shares=told([max(1, round(speed / 100)) for speed in speeds]))
    return [plan, auto]


def by_speed(pace: TimeModel, plan: Plan) -> tuple[int, ...]:
    """Of each share the speed of its slowest device, in whole numbers."""
    found = [min(pace.machine.speed(rank) for rank in ranks) for ranks in members(plan)]
    return tuple(max(1, round(10_000 * speed)) for speed in found)


def members(plan: Plan) -> list[list[int]]:
    """The ranks of each share."""
    found: list[list[int]] = [[] for _ in range(plan.ranks)]
    for rank in range(plan.world):
        found[plan.share(rank)].append(rank)
    return found


def price(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float) -> Estimate:
    """As `estimate`, whose micro-batches have so many `samples` with equal shares; here each has its own."""
    machine, batch = pace.machine, ceil(question.batch / plan.replica_groups)
    if not machine.unlike:
        return estimate(pace, plan, samples, question.memory)
    parts = plan.parts or (by_speed(pace, plan) if plan.batch_shares == "auto" else (1,) * plan.ranks)
    found = dict[tuple[float, float, float], Estimate]()
    for held, ranks in zip(sizes(batch, parts, plan.microbatches), members(plan)):
        each = float(ceil(held / plan.microbatches))
        key = each, min(map(machine.speed, ranks)), min(question.room(rank) for rank in ranks)
        if key not in found:
            got = estimate(pace.on(key[1]), plan, each)
            found[key] = replace(got, spare=key[2] - got.reserved)
    slowest = max(found.values(), key=lambda got: got.seconds)
    fullest = min(found.values(), key=lambda got: got.spare or 0.0)
    flops = 3 * pace.work.flops * question.batch / plan.devices
    return replace(slowest, memory=fullest.memory, reserved=fullest.reserved, spare=fullest.spare, flops=flops)


def gain(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float) -> str:
    """What shares by speed of a plan are predicted to gain over equal ones; nothing of a plan without them."""
    if plan.batch_shares == "equal" or not pace.machine.unlike:
        return ""
    equal = price(pace, replace(plan, batch_shares="equal"), question, samples)
    times = equal.seconds / price(pace, plan, question, samples).seconds
    fits = "" if question.holds(equal) else ", which would not fit"
    return f"shares by speed: {times:.2f} × as fast as the same plan with equal shares{fits}"
