"""The plans to search, in branches: plans that compute for the same time.

A branch fixes pp, tp, cp, ep, the micro-batches and the number format. What is left of a plan, its sharding, recomputation,
schedule and what is kept on the host, `planner/search.py` goes through.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from plait.config.keys import AXES, SAME_LOSS
from plait.config.plan import Plan
from plait.planner.estimate import Estimate


@dataclass(frozen=True)
class SearchSpace:
    """What is searched: `devices` ranks, `batch` samples a step, keys that are given."""

    devices: int
    batch: int
    pins: dict[str, Any] = field(default_factory=dict)
    memory: float = inf
    """Bytes of a device that a plan may take."""
    host: float = inf
    """Bytes of its host's memory that a device's rank may take."""
    precisions: tuple[str, ...] = ("fp32",)
    stages: int = 1
    """The most stages the model can be cut into."""
    sliceable: bool = False
    stretchable: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""
    heads: int = 0
    """The most ranks that its attention's heads can be shared out to; 0: it has none."""
    offloads: tuple[str, ...] = ("none",)
    """What may be kept on the host, least first."""
    stretches: tuple[bool, ...] = (True,)
    """Whether what lies between slices may run on stretches of the sequence."""
    rooms: tuple[float, ...] = ()
    """Bytes that a plan may take of each device of a node, where they are unlike; `memory` is then the largest."""

    def room(self, rank: int) -> float:
        """Bytes that a plan may take of a rank's device."""
        return self.rooms[rank % len(self.rooms)] if self.rooms else self.memory

    def spare(self, found: Estimate) -> float:
        """Bytes that a plan leaves of the device that it leaves least of."""
        return self.memory - found.reserved if found.spare is None else found.spare

    @property
    def groups(self) -> int:
        """Replica groups: as many as are given."""
        return self.pins.get("replica_groups", 1) or 1

    @property
    def inside(self) -> int:
        """Devices of one of them."""
        return self.devices // self.groups if self.devices % self.groups == 0 else 0

    def holds(self, found: Estimate | None) -> bool:
        """Whether devices and their hosts have the memory that a plan takes."""
        return found is not None and self.spare(found) >= 0 and found.hosted <= self.host


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [1 << k for k in range(max(1, limit).bit_length()) if 1 << k <= limit]


def branch_samples(plan: Plan, question: SearchSpace) -> float:
    """Samples of the largest micro-batch."""
    return -(-question.batch // (plan.shares * plan.replica_groups) // plan.microbatches)


def branches(question: SearchSpace) -> Iterator[Plan]:
    """What fixes the time of computing."""
    given = question.pins
    same: dict[str, Any] = {key: value for key, value in given.items() if key not in FREE}
    for tp, pp, cp in _meshes(question):
        shares, rest = divmod(question.inside, tp * pp * cp)
        if rest or not shares or shares * question.groups > question.batch:
            continue
        experts = [e for e in divisors(shares) if all(count % e == 0 for count in question.experts)]
        own = -(-question.batch // (shares * question.groups))
        for ep in of("ep", experts if question.experts else [1], given):
            for micro in of("microbatches", _splits(own), given):
                for precision in of("precision", list(question.precisions), given):
                    mesh: dict[str, Any] = {"replica_groups": question.groups, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp": shares}
                    for way in _ways(question, tp, cp):
                        yield Plan(**same, **mesh, **way, microbatches=micro, precision=precision)


def _ways(question: SearchSpace, tp: int, cp: int) -> Iterator[dict[str, Any]]:
    """How attention sees the other stretches, and whether what lies between slices is cut too."""
    given = question.pins
    contexts = ["ring"] + ["ulysses"] * (question.heads % (tp * cp) == 0)
    for context in of("context", contexts if cp > 1 else ["ring"], given):
        for stretched in of("sequence_parallel", list(question.stretches) if tp > 1 else [True], given):
            yield {"context": context, "sequence_parallel": stretched}


def _meshes(question: SearchSpace) -> Iterator[tuple[int, int, int]]:
    """Numbers of slices, stages and stretches."""
    given, n = question.pins, question.inside
    tps = [t for t in divisors(n) if t <= MOST["tp"] and (t == 1 or question.sliceable)]
    for tp in of("tp", tps, given):
        for pp in of("pp", [p for p in divisors(n // tp) if p <= question.stages], given):
            stretches = [c for c in divisors(n // tp // pp) if c == 1 or question.stretchable]
            for cp in of("cp", [c for c in stretches if c <= MOST["cp"]], given):
                yield tp, pp, cp


MOST = {"tp": 64, "cp": 64, "stages": 4}
"""No group of slices or stretches is larger, since each of them waits for all others in every layer; nor do ranks have more
stages, unless it is given."""
FREE = (
    *AXES, "ep", "microbatches", "precision", "zero", "recompute", "schedule", "stages_per_rank", "offload", "context",
    "sequence_parallel",
)  # fmt: skip
"""Keys that the search chooses; all others are as given."""


def _splits(own: int) -> list[int]:
    """Numbers of micro-batches of a share of `own` samples: those that leave no sample over, and powers of two."""
    return sorted({own // size for size in powers(own)} | {d for d in powers(own) if own % d == 0})


def of(key: str, values: list[Any], given: dict[str, Any]) -> list[Any]:
    """The values to try of a key: the given one alone."""
    return [given[key]] if key in given else values


def shardings(branch: Plan, question: SearchSpace, per_node: int) -> list[int]:
    """Between how many devices a copy is shared out: none, all, those of one node."""
    given, shares = question.pins, branch.shares
    node = max(1, per_node // branch.along(SAME_LOSS))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    found = (f for f in of("fsdp", sizes, given) if f and shares % f == 0)
    return [f for f in found if shares // f == given.get("dp", shares // f)]


def orders(branch: Plan, question: SearchSpace) -> list[tuple[str, int]]:
    """(schedule, stages per rank) of a pipeline that are worth pricing: gpipe and sequential only when they are given."""
    if branch.pp == 1:
        return [(Plan().schedule, 1)]
    given = question.pins
    found = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    if "schedule" in given:
        word = str(given["schedule"])
        found = [pair for pair in found if pair[0] == word] or [(word, 1)]
    if "stages_per_rank" in given:
        found = [(word, given["stages_per_rank"]) for word, _ in found]
    return [(word, v) for word, v in dict.fromkeys(found) if branch.pp * v <= question.stages]
