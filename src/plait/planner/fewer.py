"""What fewer devices would do: one alone, and the fewest that are as fast as all of them."""

from dataclasses import replace
from typing import Any

from plait.config.machine import Machine
from plait.planner.answer import Answer, One, PlanRow, why_not
from plait.planner.question import PlanRequest, sized
from plait.planner.search import ALIKE, Found, search

KEPT = ("precision", "recompute", "compile", "offload")
"""Given keys that mean the same on one device."""


def halves(machine: Machine) -> list[int]:
    """Numbers of devices to try: 1, 2, 4 … of a node, then 1, 2, 4 … nodes, up to the machine."""
    node = [n for n in (1 << k for k in range(20)) if n < machine.devices_per_node]
    nodes = [n for n in (1 << k for k in range(20)) if n < machine.nodes]
    return [*node, *(machine.devices_per_node * n for n in nodes), machine.devices]


def compared(found: Answer, pins: dict[str, Any], memory: float | None, choose: bool = True) -> Answer:
    """The answer with what one device alone would do.

    With `choose`, the choice becomes the plan on the fewest devices that is predicted within `ALIKE` of the fastest.
    """
    asked, best = found.asked, found.best
    if found.question.devices == 1:
        return found
    own = {key: value for key, value in pins.items() if key in KEPT}
    alone = _searched(asked, own, memory, 1)
    large = min(alone.large, key=lambda c: c.estimate.hosted if c.estimate else 0.0, default=None)
    why = why_not(large, None, asked.on(sized(asked.machine, 1)).question(own, memory, 1)) if large else ""
    found = replace(found, one=One(next(iter(alone.best), None), why))
    if best is None or not choose:
        return found
    fastest = min(c.seconds for c in found.found.best)
    first = None
    for devices in reversed([n for n in halves(asked.machine) if n < found.question.devices]):
        got = _searched(asked, pins, memory, devices, fastest * (1 + ALIKE))
        good = [c for c in got.best if c.seconds <= fastest * (1 + ALIKE)]
        if not good:
            break
        first = good[0]
    if first is None:
        return found
    rows = (
        PlanRow(row.candidate, row.fits, why_not(row.candidate, first) if row.fits else row.why) for row in found.rows
    )
    return replace(found, rows=(PlanRow(first, True, "chosen"), *rows), fewest=ALIKE)


def _searched(
    asked: PlanRequest, pins: dict[str, Any], memory: float | None, devices: int, within: float = float("inf")
) -> Found:
    fewer = asked.on(sized(asked.machine, devices))
    return search(fewer.pace, fewer.question(pins, memory, devices), fewer.refused(), within)
