"""The contract of a strategy: one file, one technique, with its explanation, its wiring and its price.

No base class, no registry, no state: a strategy is a module with these names. Its docstring explains the technique
to a newcomer under fixed headings (What it does, Costs, Choose when, Avoid when, Paper).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.role import Role

if TYPE_CHECKING:
    from plait.parallel.built import Built


Moment = tuple[str, int]
"""A named moment of a step (`planner/dryrun/rehearsal.py` notes them), and the place in the order of what happens at that moment."""
START: Moment = ("start", -1)
OVER: Moment = ("over", 0)


@dataclass(frozen=True)
class Charge:
    """One predicted cost of a plan, of one rank in one step. `kind` traffic: `calls` collectives of `bytes` in all.

    `kind` memory: `bytes` of the category `op`, held from the moment `since` to the moment `until`.
    """

    kind: str
    axis: str
    op: str
    calls: int
    bytes: int
    reason: str
    since: Moment = START
    until: Moment = OVER
    turns: frozenset[str] = frozenset()
    """Only in a micro-batch that is all of these: `first` or `later`, `early` or `last` (a single one is first and last)."""


def held(
    category: str, size: float, reason: str, since: Moment = START, until: Moment = OVER, turns: str = ""
) -> Charge:
    """A charge of memory; `turns` are words."""
    return Charge("memory", "", category, 0, round(size), reason, since, until, frozenset(turns.split()))


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
    def apply(built: "Built") -> None:
        """The torch wiring."""
        ...

    @staticmethod
    def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
        """What cannot equal one device under this plan, by nature: named, never hidden behind a tolerance."""
        ...

    @staticmethod
    def price(plan: Plan, sketch: Sketch, role: Role) -> Iterable[Charge]:
        """What it costs one rank in one step. `sketch`: of what this rank has of the model, its stages in a pipeline."""
        ...
