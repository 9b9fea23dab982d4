"""Asks every launcher whether it started this process. One that runs inside another counts; two that contradict each other are an error.

The order: what the user typed, a process group that exists, torchrun, ranks numbered by hand, then launchers of processes, then
those of machines. `plait train --nnodes 2` on two machines, with nothing else, is a launcher too.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from plait.config.errors import PlaitError, Problem
from plait.launch.launchers import (
    BY_HAND,
    DSTACK,
    FLUX,
    HYDRA,
    INDEXED_JOB,
    JSRUN,
    LEPTON,
    LOCAL_RANKS,
    MVAPICH,
    OPEN_MPI,
    PALS,
    PYTORCH_JOB,
    SKYPILOT,
    SLURM,
    TORCHRUN,
    TRAIN_JOB,
    Membership,
    Reading,
)

LAUNCHERS = {
    one.name: one
    for one in (
        TORCHRUN, BY_HAND, SLURM, OPEN_MPI, MVAPICH, HYDRA, PALS, JSRUN, FLUX, TRAIN_JOB, PYTORCH_JOB, INDEXED_JOB, SKYPILOT,
        DSTACK, LEPTON,
    )
}  # fmt: skip
"""By name. They are asked in this order; a new one is a `Launcher`, and its place here."""


@dataclass(frozen=True)
class Nodes:
    """What the user said of the machines; None is looked for elsewhere."""

    count: int | None
    rank: int | None
    master: str | None
    """host:port, or a host."""
    least: int | None = None
    """The first number of 1:2."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Nodes":
        """Of the variables that stand for --nnodes, --node-rank, --master."""
        reading = Reading("plait", environment)
        count, least = reading.counted("PLAIT_NNODES")
        return Nodes(count, reading.number("PLAIT_NODE_RANK"), reading.text("PLAIT_MASTER"), least)


def say(count: str | None, rank: int | None, master: str | None) -> None:
    """Put what was typed where `find` looks: it outweighs what the environment said of machines before.

    Called before torch is imported, whose store would print stacks of C++ when another machine is lost, beside plait's error.
    """
    for name, value in (("PLAIT_NNODES", count), ("PLAIT_NODE_RANK", rank), ("PLAIT_MASTER", master)):
        if value is not None:
            os.environ[name] = str(value)
    if find() is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def find(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Which of how many processes this is; None when it is alone.

    L001 when a launcher's numbers do not go together, L005 when two launchers contradict each other, L006 when what the user said
    of the machines is not enough.
    """
    nodes = Nodes.of(environment)
    group = _group(environment)
    if group is not None:
        return group
    said = [found for found in (one.find(environment) for one in LAUNCHERS.values()) if found is not None]
    chosen = next((one for one in said if _together(one)), None)
    for other in said:
        if chosen is not None and _together(other) and not _goes_with(chosen, other):
            raise _contradiction(chosen, other, environment)
    if chosen is not None and chosen.launcher == TORCHRUN.name:
        return chosen
    if nodes.count is None:
        if nodes.rank is not None or nodes.master is not None:
            return _addressed(chosen, nodes)
        return chosen
    return _by_flags(nodes, chosen)


def _together(found: Membership) -> bool:
    """Whether it is one of several: `srun -n 1` starts a process that is alone. torchrun's, and a numbered rank, are joined even then."""
    return found.count > 1 or found.launcher in (TORCHRUN.name, BY_HAND.name)


def _goes_with(inner: Membership, outer: Membership) -> bool:
    """Whether two answers can both be true: the same one, or ranks that something started on machines which another started."""
    if inner.launcher == TORCHRUN.name or (inner.of, inner.index, inner.count) == (outer.of, outer.index, outer.count):
        return True
    each, rest = divmod(inner.count, outer.count)
    one_each = outer.of == "nodes" or outer.local_count == 1
    return one_each and each > 1 and rest == 0 and inner.index // each == outer.index


def _contradiction(one: Membership, other: Membership, environment: Mapping[str, str]) -> PlaitError:
    what = f"{one}, and {other.launcher} says number {other.index} of {other.count}"
    why = f"{variables(one, environment)}, but {variables(other, environment)}"
    fix = (
        f"unset {other.variables[0]}    if {one.launcher} is right",
        f"unset {one.variables[0]}    if {other.launcher} is",
    )
    return PlaitError(Problem("L005", what, why=why, fix=fix))


def variables(found: Membership, environment: Mapping[str, str]) -> str:
    """The first environment variables that a membership was read from, with their values: RANK=0, WORLD_SIZE=1."""
    return ", ".join(f"{name}={environment[name]}" for name in found.variables[:2] if name in environment)


def mismatch(found: Membership, given: str, fix: Iterable[str]) -> Problem:
    """L005: the user gave a number of processes (`given`: --nproc 2) that the launcher of this process did not start. `fix`: if
    the launcher is right."""
    named = [name for name in found.variables if name in os.environ]
    what = f"{given} contradicts the environment: {found}"
    why = f"{variables(found, os.environ) or found.variables[0]}: this process is one rank, and starts no others"
    left_over = [f"unset {' '.join(named)}    if they are left over"] * bool(named)
    return Problem("L005", what, why=why, fix=(*left_over, *fix))


def _group(environment: Mapping[str, str]) -> Membership | None:
    """A process group that is there already: a program, or Ray Train, made it before it called plait."""
    module = sys.modules.get("torch.distributed")
    if module is None or not (module.is_available() and module.is_initialized()):
        return None
    reading, rank, world = Reading("the process group", environment), module.get_rank(), module.get_world_size()
    local = reading.number(*LOCAL_RANKS)
    return Membership(
        "a process group that exists", rank, world, local_rank=local, local_count=reading.number("LOCAL_WORLD_SIZE"),
        variables=("torch.distributed", *reading.read), agent=True,
    )  # fmt: skip


def _addressed(found: Membership | None, nodes: Nodes) -> Membership | None:
    """A membership whose address the user gave. L006 when there is none to which it belongs."""
    if found is None or nodes.rank is not None:
        what = "the machines are not counted: --node-rank and --master belong to --nnodes"
        raise PlaitError(
            Problem("L006", what, fix=("--nnodes <machines> --node-rank <0, 1, …> --master <host of number 0>:29500",))
        )
    host, port = _endpoint(nodes.master or "")
    return replace(found, master=host, port=port or found.port)


def _by_flags(nodes: Nodes, found: Membership | None) -> Membership | None:
    """One process on each of so many machines, as the user said; what was left out is the launcher's answer."""
    assert nodes.count is not None
    if nodes.count < 1:
        raise PlaitError(Problem("L006", f"--nnodes {nodes.count}: there is at least one machine", fix=("--nnodes 2",)))
    if nodes.count == 1:
        return None
    if found is not None and found.count != nodes.count:
        what = f"--nnodes {nodes.count}, but {found.launcher} started {found.count} processes"
        why = "--nnodes wants one process on each machine, which starts the ranks there"
        fix = (
            "srun --ntasks-per-node 1 …" if found.launcher == SLURM.name else "one process on each machine",
            "leave --nnodes out",
        )
        raise PlaitError(Problem("L006", what, why=why, fix=fix))
    rank = nodes.rank if nodes.rank is not None or found is None else found.index
    master = nodes.master if nodes.master is not None or found is None else found.master
    missing = [name for name, value in (("--node-rank", rank), ("--master", master)) if value is None]
    if rank is None or master is None:
        what = f"--nnodes {nodes.count} wants {' and '.join(missing)} too"
        fix = (f"--nnodes {nodes.count} --node-rank <0 to {nodes.count - 1}> --master <host of number 0>:29500",)
        raise PlaitError(Problem("L006", what, why="no launcher says it", fix=fix))
    if rank >= nodes.count:
        what = f"--node-rank {rank} of --nnodes {nodes.count}: numbers begin at 0"
        raise PlaitError(Problem("L006", what, fix=(f"--node-rank 0 to {nodes.count - 1}",)))
    host, port = _endpoint(master)
    given = Membership("--nnodes", rank, nodes.count, "nodes", nodes=nodes.count, variables=("--nnodes",))
    base = (
        given
        if found is None
        else replace(found, of="nodes", index=rank, nodes=nodes.count, local_rank=None, local_count=None)
    )
    return replace(base, master=host, port=port or base.port, least=nodes.least)


def _endpoint(said: str) -> tuple[str, int | None]:
    """host:port, [address of IPv6]:port, or a host alone. L006 when it is none."""
    host, colon, port = said.rpartition(":")
    if not colon or said.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = said, ""
    if not host or (port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536)):
        what = f"--master {said} is no address: it is host:port"
        raise PlaitError(Problem("L006", what, fix=("--master node0:29500",)))
    return host.strip("[]"), int(port) if port else None
