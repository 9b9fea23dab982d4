"""What is searched for plans of a job on a machine, and the plans of it: branches, and what is left open in each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from plait.config.keys import AXES, SAME_LOSS
from plait.config.plan import Plan
from plait.parallel.shares.balance import by_speed, told
from plait.planner.estimate import Estimate, StageSchedule
from plait.planner.formulas import TimeModel


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
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Of keys, what is tried; of a key that is missing, its default. Less recomputation and less on the host come first."""
    stages: int = 1
    """The most stages the model can be cut into."""
    sliceable: bool = False
    stretchable: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""
    heads: int = 0
    """The most ranks over which its attention heads can be sharded; 0: it has none."""
    rooms: tuple[float, ...] = ()
    """Bytes that a plan may take of each device of a node, where they are unlike; `memory` is then the largest."""
    margin: float = 0.0
    """A plan that leaves fewer bytes of a device is tight."""
    shown: int = 8
    """Meshes of which the best plan is found."""

    def of(self, key: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        """The values to try of a key: the given one alone."""
        return (self.pins[key],) if key in self.pins else values or self.values.get(key) or (getattr(Plan, key),)

    def room(self, rank: int) -> float:
        """Bytes that a plan may take of a rank's device."""
        return self.rooms[rank % len(self.rooms)] if self.rooms else self.memory

    def spare(self, found: Estimate) -> float:
        """Bytes that a plan leaves of the device that it leaves least of."""
        return self.memory - found.allocated if found.spare is None else found.spare

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
    return [d for d in range(1, n + 1) if n % d == 0]


def branch_samples(plan: Plan, question: SearchSpace) -> float:
    """Samples of the largest micro-batch."""
    return -(-question.batch // (plan.shares * plan.replica_groups) // plan.microbatches)


def branches(question: SearchSpace) -> Iterator[Plan]:
    """What fixes the time of computing, in the first number format."""
    same: dict[str, Any] = {key: value for key, value in question.pins.items() if key not in FREE}
    for tp, pp, cp in _meshes(question):
        shares, rest = divmod(question.inside, tp * pp * cp)
        if rest or not shares or shares * question.groups > question.batch:
            continue
        experts = [e for e in divisors(shares) if question.experts and all(count % e == 0 for count in question.experts)]
        mesh: dict[str, Any] = {"replica_groups": question.groups, "pp": pp, "tp": tp, "cp": cp, "dp": shares}
        contexts = ["ring"] + ["ulysses"] * (cp > 1 and question.heads % (tp * cp) == 0)
        # under cp a unit that counts positions cannot be compiled, and a sketch without cp does not know which do
        splits = _splits(-(-question.batch // (shares * question.groups)))
        free = {"ep": question.of("ep", experts), "microbatches": question.of("microbatches", splits),
                "cp_method": question.of("cp_method", contexts), "sequence_parallel": question.of("sequence_parallel", () if tp > 1 else (True,)),
                "compile": question.of("compile", () if cp == 1 else (False,))}  # fmt: skip
        for values in product(*free.values()):
            yield Plan(**same, **mesh, **dict(zip(free, values)), precision=question.of("precision")[0])


def _meshes(question: SearchSpace) -> Iterator[tuple[int, int, int]]:
    """Numbers of slices, stages and sequence shards."""
    n = question.inside
    for tp in question.of("tp", [t for t in divisors(n) if t <= MOST["tp"] and (t == 1 or question.sliceable)]):
        for pp in question.of("pp", [p for p in divisors(n // tp) if p <= question.stages]):
            for cp in question.of("cp", [c for c in divisors(n // tp // pp) if c == 1 or (question.stretchable and c <= MOST["cp"])]):
                yield tp, pp, cp


MOST = {"tp": 64, "cp": 64}
"""No group of tp or cp is larger, since each of its ranks waits for all others in every layer."""
FREE = (
    *AXES, "ep", "microbatches", "precision", "zero_stage", "activation_checkpointing", "schedule", "stages_per_rank", "offload", "cp_method",
    "sequence_parallel", "compile", "shard_over_cp",
)  # fmt: skip
"""Keys that the search chooses; all others are as given."""


def _splits(own: int) -> list[int]:
    """Numbers of micro-batches of a share of `own` samples: those of which each has a power of two, and powers of two."""
    powers = [1 << k for k in range(own.bit_length())]
    return sorted({own // size for size in powers} | {d for d in powers if own % d == 0})


def shardings(branch: Plan, question: SearchSpace, per_node: int) -> list[int]:
    """Over how many devices a replica is sharded: one, all, or those of one node."""
    given, shares = question.pins, branch.shares
    node = max(1, per_node // branch.along(SAME_LOSS))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    found = (f for f in question.of("fsdp", sizes) if f and shares % f == 0)
    return [f for f in found if shares // f == given.get("dp", shares // f)]


def orders(branch: Plan, question: SearchSpace) -> list[StageSchedule]:
    """Schedules of a pipeline that are worth pricing: gpipe and sequential only when they are given."""
    if branch.pp == 1:
        return [StageSchedule(Plan().schedule, 1, 1)]
    given = question.pins
    found = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    if word := given.get("schedule"):
        found = [pair for pair in found if pair[0] == word] or [(word, 1)]
    if "stages_per_rank" in given:
        found = [(word, given["stages_per_rank"]) for word, _ in found]
    return [StageSchedule(word, branch.pp, v) for word, v in dict.fromkeys(found) if branch.pp * v <= question.stages]


LONGEST = 64
"""Shares of which parts are written into a plan."""


def ways(pace: TimeModel, plan: Plan, question: SearchSpace, refused: Callable[[Plan], str]) -> list[Plan]:
    """The plan with equal shares, and with shares by speed where devices differ: measured ones, or parts where speeds cannot be
    measured under the plan."""
    if not pace.machine.unlike or plan.ranks == 1 or "batch_split" in question.pins:
        return [plan]
    speeds = by_speed(pace.machine, plan)
    if len(set(speeds)) == 1:
        return [plan]
    auto = replace(plan, batch_split="auto")
    if refused(auto) and not refused(plan) and plan.ranks <= LONGEST:
        auto = replace(plan, batch_split=told([max(1, round(speed / 100)) for speed in speeds]))
    return [plan, auto]


RECOMPUTES = ("none", "selective", "full")
"""Least first."""
