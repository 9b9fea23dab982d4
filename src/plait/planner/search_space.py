"""The plans to search for a job on a machine: branches, and the keys left open in each branch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from plait.config.keys import AXES, SAME_LOSS
from plait.config.plan import Plan
from plait.parallel.batch_split.batch_balancer import compute_speed_parts, format_parts
from plait.planner.estimate import Estimate, StageSchedule
from plait.planner.formulas import TimeModel


@dataclass(frozen=True)
class SearchSpace:
    """The limits of a search: `devices` ranks, `batch` samples per step, and pinned keys."""

    devices: int
    batch: int
    pins: dict[str, Any] = field(default_factory=dict)
    memory: float = inf
    """Usable bytes of a device."""
    host_memory: float = inf
    """Usable bytes of host memory per rank."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values to try by key; a missing key has its default. Less recomputation and less offloading come first."""
    most_stages: int = 1
    """Maximum number of pipeline stages of the model."""
    can_slice: bool = False
    can_shard_sequence: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""
    most_head_shards: int = 0
    """Maximum number of ranks over which its attention heads can be sharded; 0 if it has none."""
    device_bytes: tuple[float, ...] = ()
    """Usable bytes of each device of a node with unequal devices. `memory` is then the largest of them."""
    margin: float = 0.0
    """A plan that leaves fewer bytes of a device is tight."""
    shown_meshes: int = 8
    """Number of meshes whose best plan is found."""

    def get_values(self, key: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        """Return the values to try for a key; only its own if it is pinned."""
        return (self.pins[key],) if key in self.pins else values or self.values.get(key) or (getattr(Plan, key),)

    def get_usable_bytes(self, rank: int) -> float:
        """Return the usable bytes of a rank's device."""
        return self.device_bytes[rank % len(self.device_bytes)] if self.device_bytes else self.memory

    def count_spare(self, found: Estimate) -> float:
        """Return the free bytes on the device with least free memory."""
        return self.memory - found.allocated if found.spare is None else found.spare

    @property
    def groups(self) -> int:
        """Number of replica groups, as pinned."""
        return self.pins.get("replica_groups", 1) or 1

    @property
    def group_devices(self) -> int:
        """Devices of one replica group."""
        return self.devices // self.groups if self.devices % self.groups == 0 else 0

    def can_hold(self, found: Estimate | None) -> bool:
        """Whether a plan's memory fits into the devices and their hosts."""
        return found is not None and self.count_spare(found) >= 0 and found.host_bytes <= self.host_memory


def list_divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def count_branch_samples(plan: Plan, space: SearchSpace) -> float:
    """Return the samples of the largest micro-batch."""
    return -(-space.batch // (plan.shares * plan.replica_groups) // plan.microbatches)


def iter_branches(space: SearchSpace) -> Iterator[Plan]:
    """Yield branches: the keys that fix the compute time, with the first number format."""
    same: dict[str, Any] = {key: value for key, value in space.pins.items() if key not in SEARCHED_KEYS}
    for tp, pp, cp in _iter_meshes(space):
        shares, rest = divmod(space.group_devices, tp * pp * cp)
        if rest or not shares or shares * space.groups > space.batch:
            continue
        experts = [e for e in list_divisors(shares) if space.experts and all(count % e == 0 for count in space.experts)]
        mesh: dict[str, Any] = {"replica_groups": space.groups, "pp": pp, "tp": tp, "cp": cp, "dp": shares}
        contexts = ["ring"] + ["ulysses"] * (cp > 1 and space.most_head_shards % (tp * cp) == 0)
        # under cp a unit that counts positions cannot be compiled, and a sketch without cp does not have these units
        splits = _list_splits(-(-space.batch // (shares * space.groups)))
        free = {"ep": space.get_values("ep", experts), "microbatches": space.get_values("microbatches", splits),
                "cp_method": space.get_values("cp_method", contexts),
                "sequence_parallel": space.get_values("sequence_parallel", () if tp > 1 else (True,)),
                "compile": space.get_values("compile", () if cp == 1 else (False,))}  # fmt: skip
        for values in product(*free.values()):
            yield Plan(**same, **mesh, **dict(zip(free, values)), precision=space.get_values("precision")[0])


def _iter_meshes(space: SearchSpace) -> Iterator[tuple[int, int, int]]:
    """Yield sizes of tp, pp and cp."""
    n = space.group_devices
    for tp in space.get_values("tp", [t for t in list_divisors(n) if t <= LARGEST_GROUPS["tp"] and (t == 1 or space.can_slice)]):
        for pp in space.get_values("pp", [p for p in list_divisors(n // tp) if p <= space.most_stages]):
            for cp in space.get_values(
                "cp",
                [
                    c
                    for c in list_divisors(n // tp // pp)
                    if c == 1 or (space.can_shard_sequence and c <= LARGEST_GROUPS["cp"])
                ],
            ):
                yield tp, pp, cp


LARGEST_GROUPS = {"tp": 64, "cp": 64}
"""Maximum sizes of tp and cp groups: each rank waits for all others in every layer."""
SEARCHED_KEYS = (
    *AXES, "ep", "microbatches", "precision", "zero_stage", "activation_checkpointing", "schedule", "stages_per_rank", "offload", "cp_method",
    "sequence_parallel", "compile", "shard_over_cp",
)  # fmt: skip
"""Keys that the search varies; all others are pinned or default."""


def _list_splits(own: int) -> list[int]:
    """List micro-batch counts for a local batch of `own` samples: powers of two, and counts that give micro-batches of a power of two."""
    powers = [1 << k for k in range(own.bit_length())]
    return sorted({own // size for size in powers} | {d for d in powers if own % d == 0})


def list_shardings(branch: Plan, space: SearchSpace, per_node: int) -> list[int]:
    """List fsdp sizes to try: one, all, or the ranks of one node."""
    given, shares = space.pins, branch.shares
    node = max(1, per_node // branch.along(SAME_LOSS))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    found = (f for f in space.get_values("fsdp", sizes) if f and shares % f == 0)
    return [f for f in found if shares // f == given.get("dp", shares // f)]


def list_schedules(branch: Plan, space: SearchSpace) -> list[StageSchedule]:
    """List pipeline schedules to price; gpipe and sequential only if pinned."""
    if branch.pp == 1:
        return [StageSchedule(Plan().schedule, 1, 1)]
    given = space.pins
    found = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    if word := given.get("schedule"):
        found = [pair for pair in found if pair[0] == word] or [(word, 1)]
    if "stages_per_rank" in given:
        found = [(word, given["stages_per_rank"]) for word, _ in found]
    return [StageSchedule(word, branch.pp, v) for word, v in dict.fromkeys(found) if branch.pp * v <= space.most_stages]


MOST_WRITTEN_SHARES = 64
"""Maximum number of local batch sizes written into a plan."""


def list_batch_splits(pace: TimeModel, plan: Plan, space: SearchSpace, refused: Callable[[Plan], str]) -> list[Plan]:
    """Return the plan with equal local batches and, on unequal devices, with local batches by speed. The speeds are measured during training, or
    fixed
    parts if the plan cannot measure them."""
    if not pace.machine.is_heterogeneous or plan.ranks == 1 or "batch_split" in space.pins:
        return [plan]
    speeds = compute_speed_parts(pace.machine, plan)
    if len(set(speeds)) == 1:
        return [plan]
    auto = replace(plan, batch_split="auto")
    if refused(auto) and not refused(plan) and plan.ranks <= MOST_WRITTEN_SHARES:
        auto = replace(plan, batch_split=format_parts([max(1, round(speed / 100)) for speed in speeds]))
    return [plan, auto]


RECOMPUTES = ("none", "selective", "full")
"""Least recomputation first."""
