"""The contract of a strategy: one technique, with its explanation, its refusals and its wiring.

No base class, no registry, no state: a strategy is a module with these names. Its docstring explains the technique
to a newcomer under fixed headings (What it does, Costs, Choose when, Avoid when, Paper).
"""

from collections.abc import Iterable
from typing import Protocol

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.built import Built


class Strategy(Protocol):
    """What `parallel/order.py` lists."""

    @property
    def AXIS(self) -> str | None:
        """The mesh axis it owns."""
        ...

    @property
    def EXACT(self) -> bool:
        """True when the result equals one device's up to the order of rounding."""
        ...

    @staticmethod
    def wanted(plan: Plan) -> bool:
        """Whether this plan uses it."""
        ...

    @staticmethod
    def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
        """What cannot work, with the arithmetic and what to change. Before any process starts."""
        ...

    @staticmethod
    def apply(built: Built) -> None:
        """The torch wiring."""
        ...

    @staticmethod
    def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
        """What cannot equal one device under this plan, by nature: named, never hidden behind a tolerance."""
        ...
