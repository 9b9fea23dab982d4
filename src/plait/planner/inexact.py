"""Search plans that change the training result, for `plait plan --allow-inexact`.

`planner/search.py` finds the plans inside a replica group. Synchronization method, period and format are priced on top, which takes
microseconds. Plans are ordered by the time to the same loss, as measured on a small model (`planner/exactness.py`). An exact plan is first,
unless another one is faster by more than the prediction error.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from plait.config.keys import KEYS
from plait.config.plan import Plan
from plait.planner.answer import Answer
from plait.planner.exactness import describe_inexact, estimate_progress
from plait.planner.plan_request import PlanRequest
from plait.planner.search import TIE_FRACTION, Candidate, find_best_plans, price_plan
from plait.planner.search_space import SearchSpace

MOST_GROUPS = 64
"""Maximum number of replica groups to try."""
SYNC_PERIODS = (4, 16, 64, 256)
FORMATS = ("none", "bf16", "int8", "powersgd")
UNCOMPRESSED_AXES = {"bf16": ("fsdp", "cp", "ep"), "int8": ("fsdp", "cp", "ep", "tp"), "powersgd": ("fsdp", "cp", "ep", "tp")}
"""Axes under which replicas cannot compress in each format; such plans are rejected and need no search."""
KEPT_PLANS = 2
"""Plans inside a group that are priced with every synchronization method."""
SHOWN_PLANS = 3
"""Maximum number of inexact plans in the table."""


def time_to_loss(offer: Candidate) -> float:
    """Return seconds of a step divided by its progress per sample."""
    return offer.seconds / estimate_progress(offer.plan)


def add_inexact(answer: Answer) -> Answer:
    """Add the best inexact plans to an answer, each with a description of the changes to the result."""
    best = answer.best
    if best is None or answer.space.devices == 1:
        return answer
    exact = best.seconds
    faster = [o for o in find_inexact(answer.request, answer.space, best) if o.seconds < exact * (1 - TIE_FRACTION)]
    offers = sorted(faster, key=lambda o: (time_to_loss(o), str(o.plan)))
    if not offers:
        return replace(answer, note=f"no inexact plan is faster by more than {100 * TIE_FRACTION:.0f} %")
    kinds: dict[tuple[str, ...], Candidate] = {}
    for offer in offers:
        kinds.setdefault((offer.plan.outer_sync if offer.plan.replica_groups > 1 else "", offer.plan.grad_compression), offer)
    rows = []
    for offer in list(kinds.values())[:SHOWN_PLANS]:
        times = f"{exact / offer.seconds:.3g} × the samples/s, {exact / time_to_loss(offer):.3g} × as fast to the same loss (fitted)"
        rows.append(replace(offer, why=f"{describe_inexact(offer.plan)}; {times}"))
    ahead = time_to_loss(rows[0]) < exact * (1 - TIE_FRACTION)
    return replace(answer, rows=(*rows, *answer.rows) if ahead else (answer.rows[0], *rows, *answer.rows[1:]))


def find_inexact(request: PlanRequest, space: SearchSpace, best: Candidate) -> Iterator[Candidate]:
    """Yield valid inexact plans with a lower predicted step time than `best`."""
    pins, refused, learned = space.pins, request.make_refusal(), request.learned
    within = inf if learned.anchors else best.cost  # `max_cost` would be a corrected time
    formats = [pins["grad_compression"]] if "grad_compression" in pins else list(FORMATS)
    for how in formats if pins.get("replica_groups", 1) == 1 else ():
        if how != "none":
            alone = dict.fromkeys(UNCOMPRESSED_AXES[how], 1)
            copies = replace(space, pins=alone | pins | {"grad_compression": how, "replica_groups": 1})
            yield from (candidate for candidate in request.find_plans(copies, best.cost).best[:KEPT_PLANS] if candidate.plan.dp > 1)
    for groups in list_group_counts(space, request.machine.nodes):
        free = {"replica_groups": groups, "sync_every": pins.get("sync_every", 1 << 20),
            "outer_sync": "local"}  # keys with which groups cost almost nothing
        inside = replace(space, pins={k: v for k, v in pins.items() if k != "grad_compression"} | free)
        for candidate in find_best_plans(request.pace, inside, refused, within).best[:KEPT_PLANS]:
            for plan in vary_sync(candidate.plan, pins, formats):
                if not refused(plan):
                    priced = Candidate(plan, learned.correct_estimate(price_plan(request.pace, plan, space, candidate.samples)), candidate.samples)
                    if space.can_hold(priced.estimate) and priced.seconds < best.seconds:
                        yield priced


def list_group_counts(space: SearchSpace, nodes: int) -> list[int]:
    """List replica group counts to try: powers of two and the number of nodes that divide the devices and have a sample each."""
    if "replica_groups" in space.pins:
        return [space.groups] if space.groups > 1 else []
    most = min(MOST_GROUPS, space.devices, space.batch)
    found = {1 << k for k in range(1, most.bit_length())} | {nodes}
    return sorted(k for k in found if 1 < k <= most and space.devices % k == 0)


def vary_sync(inner: Plan, pins: dict[str, Any], formats: list[str]) -> Iterator[Plan]:
    """Yield a plan of replica groups with every synchronization method. Pinned keys stay."""
    given = {key: value for key, value in pins.items() if KEYS[key].table == "groups"}
    for sync in [given["outer_sync"]] if "outer_sync" in given else ["local", "diloco", "async"]:
        for every in [given["sync_every"]] if "sync_every" in given else SYNC_PERIODS if sync != "async" else [1]:
            for how in formats:
                more: dict[str, Any] = {"outer_sync": sync, "sync_every": every, "grad_compression": how}
                more |= {"staleness": 1} if sync == "async" else {}
                yield replace(inner, **more | given)
