"""Plans that are not the same training as on one device, for those who ask for them: `plait plan --allow-inexact`.

Groups are what is searched inside, by `planner/search.py`; how they synchronise, how rarely and in which format is priced on top,
which takes microseconds. Plans are compared by the time to the same loss, as far as a small model tells
(`planner/exactness.py`); an exact plan comes first unless another is faster by more than predictions are sure of.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from plait.config.keys import KEYS
from plait.config.plan import Plan
from plait.planner.answer import Answer
from plait.planner.exactness import progress, told
from plait.planner.question import PlanRequest
from plait.planner.search import ALIKE, Candidate, price, search
from plait.planner.search_space import SearchSpace

GROUPS = 64
"""The most replica groups that are tried."""
EVERY = (4, 16, 64, 256)
FORMATS = ("none", "bf16", "int8", "powersgd")
UNCUT = {"bf16": ("fsdp", "cp", "ep"), "int8": ("fsdp", "cp", "ep", "tp"), "powersgd": ("fsdp", "cp", "ep", "tp")}
"""Axes beside which copies cannot compress in a format: what it refuses need not be searched."""
KEPT = 2
"""Plans of the inside of a group that are priced with every way to synchronise."""
SHOWN = 3
"""Inexact plans that are shown."""


def to_loss(offer: Candidate) -> float:
    """Seconds of a step, over the progress that a sample makes."""
    return offer.seconds / progress(offer.plan)


def with_inexact(found: Answer) -> Answer:
    """The answer with the best plans that are not exact, each with what that costs in words."""
    best = found.best
    if best is None or found.question.devices == 1:
        return found
    exact = best.seconds
    faster = [o for o in offered(found.asked, found.question, best) if o.seconds < exact * (1 - ALIKE)]
    offers = sorted(faster, key=lambda o: (to_loss(o), str(o.plan)))
    if not offers:
        return replace(found, beside=f"no inexact plan is faster by more than {100 * ALIKE:.0f} %")
    kinds: dict[tuple[str, ...], Candidate] = {}
    for offer in offers:
        kinds.setdefault((offer.plan.outer_sync if offer.plan.replica_groups > 1 else "", offer.plan.grad_compression), offer)
    rows = []
    for offer in list(kinds.values())[:SHOWN]:
        times = f"{exact / offer.seconds:.3g} × the samples/s, {exact / to_loss(offer):.3g} × as fast to the same loss (fitted)"
        rows.append(replace(offer, why=f"{told(offer.plan)}; {times}"))
    ahead = to_loss(rows[0]) < exact * (1 - ALIKE)
    return replace(found, rows=(*rows, *found.rows) if ahead else (found.rows[0], *rows, *found.rows[1:]))


def offered(asked: PlanRequest, question: SearchSpace, best: Candidate) -> Iterator[Candidate]:
    """Plans that are predicted to take less time than `best`, and that the job can run under."""
    pins, refused, learned = question.pins, asked.refused(), asked.learned
    within = inf if learned.anchors else best.cost  # it is of corrected times
    formats = [pins["grad_compression"]] if "grad_compression" in pins else list(FORMATS)
    for how in formats if pins.get("replica_groups", 1) == 1 else ():
        if how != "none":
            alone = dict.fromkeys(UNCUT[how], 1)
            copies = replace(question, pins=alone | pins | {"grad_compression": how, "replica_groups": 1})
            yield from (candidate for candidate in asked.searched(copies, best.cost).best[:KEPT] if candidate.plan.dp > 1)
    for groups in counts(question, asked.machine.nodes):
        free = {"replica_groups": groups, "sync_every": pins.get("sync_every", 1 << 20),
            "outer_sync": "local"}  # keys with which groups cost next to nothing
        inside = replace(question, pins={k: v for k, v in pins.items() if k != "grad_compression"} | free)
        for candidate in search(asked.pace, inside, refused, within).best[:KEPT]:
            for plan in rarely(candidate.plan, pins, formats):
                if not refused(plan):
                    priced = Candidate(plan, learned.applied(price(asked.pace, plan, question, candidate.samples)), candidate.samples)
                    if question.holds(priced.estimate) and priced.seconds < best.seconds:
                        yield priced


def counts(question: SearchSpace, nodes: int) -> list[int]:
    """Numbers of replica groups to try: powers of two, and the nodes, that divide the devices and have a sample each."""
    if "replica_groups" in question.pins:
        return [question.groups] if question.groups > 1 else []
    most = min(GROUPS, question.devices, question.batch)
    found = {1 << k for k in range(1, most.bit_length())} | {nodes}
    return sorted(k for k in found if 1 < k <= most and question.devices % k == 0)


def rarely(inner: Plan, pins: dict[str, Any], formats: list[str]) -> Iterator[Plan]:
    """A plan of replica groups with every way to synchronise, those keys that are given being as they are."""
    given = {key: value for key, value in pins.items() if KEYS[key].table == "groups"}
    for sync in [given["outer_sync"]] if "outer_sync" in given else ["local", "diloco", "async"]:
        for every in [given["sync_every"]] if "sync_every" in given else EVERY if sync != "async" else [1]:
            for how in formats:
                more: dict[str, Any] = {"outer_sync": sync, "sync_every": every, "grad_compression": how}
                more |= {"staleness": 1} if sync == "async" else {}
                yield replace(inner, **more | given)
