"""Detect the launcher that started this process, among all known launchers.

A launcher may run inside another one; the inner one counts. Two launchers that contradict each other are an error. The order of precedence:
options that the user typed, an existing process group, torchrun, ranks in RANK and WORLD_SIZE, launchers of processes, launchers of nodes.
`plait train --nnodes 2` on two nodes, without any of these, also counts as a launcher.
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
    LOCAL_RANK_VARIABLES,
    MVAPICH,
    OPEN_MPI,
    PALS,
    PYTORCH_JOB,
    SKYPILOT,
    SLURM,
    TORCHRUN,
    TRAIN_JOB,
    EnvironmentReader,
    Membership,
)

LAUNCHERS = {
    one.name: one
    for one in (
        TORCHRUN, BY_HAND, SLURM, OPEN_MPI, MVAPICH, HYDRA, PALS, JSRUN, FLUX, TRAIN_JOB, PYTORCH_JOB, INDEXED_JOB, SKYPILOT,
        DSTACK, LEPTON,
    )
}  # fmt: skip
"""Launchers by name, in the order in which they are checked. A new launcher is a `Launcher` that is listed here."""


@dataclass(frozen=True)
class NodeOptions:
    """The user's options for nodes; None is taken from the launcher."""

    count: int | None
    rank: int | None
    master: str | None
    """host:port, or a host."""
    min_count: int | None = None
    """The first number of 1:2."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "NodeOptions":
        """Read the variables that correspond to --nnodes, --node-rank and --master."""
        reading = EnvironmentReader("plait", environment)
        count, least = reading.read_range("PLAIT_NNODES")
        return NodeOptions(count, reading.read_number("PLAIT_NODE_RANK"), reading.read_text("PLAIT_MASTER"), least)


def export_node_options(count: str | None, rank: int | None, master: str | None) -> None:
    """Export typed options for `find_membership`; they take precedence over the environment.

    Call it before torch is imported. Otherwise torch's store prints C++ stacks when another node is lost, in addition to plait's error.
    """
    for name, value in (("PLAIT_NNODES", count), ("PLAIT_NODE_RANK", rank), ("PLAIT_MASTER", master)):
        if value is not None:
            os.environ[name] = str(value)
    if find_membership() is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def find_membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Return this process's index among the launched processes; None if it is alone.

    Raises L001 if a launcher's variables are inconsistent, L005 if two launchers contradict each other, L006 if --nnodes, --node-rank or
    --master is missing.
    """
    nodes = NodeOptions.from_environment(environment)
    group = _read_process_group(environment)
    if group is not None:
        return group
    said = [found for found in (one.find(environment) for one in LAUNCHERS.values()) if found is not None]
    chosen = next((one for one in said if _is_distributed(one)), None)
    for other in said:
        if chosen is not None and _is_distributed(other) and not _is_compatible(chosen, other):
            raise _contradiction(chosen, other, environment)
    if chosen is not None and chosen.launcher == TORCHRUN.name:
        return chosen
    if nodes.count is None:
        if nodes.rank is not None or nodes.master is not None:
            return _set_address(chosen, nodes)
        return chosen
    return _apply_flags(nodes, chosen)


def _is_distributed(found: Membership) -> bool:
    """Whether this is one of several processes; `srun -n 1` starts a single one. torchrun and RANK count even with one process."""
    return found.count > 1 or found.launcher in (TORCHRUN.name, BY_HAND.name)


def _is_compatible(inner: Membership, outer: Membership) -> bool:
    """Whether both can be true: they are equal, or the outer launcher started one process per node and the inner one its ranks."""
    if inner.launcher == TORCHRUN.name or (inner.member_kind, inner.index, inner.count) == (outer.member_kind, outer.index, outer.count):
        return True
    each, rest = divmod(inner.count, outer.count)
    one_each = outer.member_kind == "nodes" or outer.local_count == 1
    return one_each and each > 1 and rest == 0 and inner.index // each == outer.index


def _contradiction(one: Membership, other: Membership, environment: Mapping[str, str]) -> PlaitError:
    what = f"{one}, and {other.launcher} sets number {other.index} of {other.count}"
    why = f"{format_variables(one, environment)}, but {format_variables(other, environment)}"
    fix = (
        f"unset {other.variables[0]}    if {one.launcher} is right",
        f"unset {one.variables[0]}    if {other.launcher} is",
    )
    return PlaitError(Problem("L005", what, why=why, fix=fix))


def format_variables(found: Membership, environment: Mapping[str, str]) -> str:
    """Format the first variables that a membership was read from, with their values: RANK=0, WORLD_SIZE=1."""
    return ", ".join(f"{name}={environment[name]}" for name in found.variables[:2] if name in environment)


def launcher_mismatch(found: Membership, given: str, fix: Iterable[str]) -> Problem:
    """L005: the user gave a number of processes (`given`: --nproc 2) that this process's launcher did not start.

    `fix`: fixes for a correct launcher.
    """
    named = [name for name in found.variables if name in os.environ]
    what = f"{given} contradicts the environment: {found}"
    why = f"{format_variables(found, os.environ) or found.variables[0]}: this process is one rank, and starts no others"
    left_over = [f"unset {' '.join(named)}    if they are left over"] * bool(named)
    return Problem("L005", what, why=why, fix=(*left_over, *fix))


def _read_process_group(environment: Mapping[str, str]) -> Membership | None:
    """Read a process group that exists already: a program, or Ray Train, made it before it called plait."""
    module = sys.modules.get("torch.distributed")
    if module is None or not (module.is_available() and module.is_initialized()):
        return None
    reading, rank, world = EnvironmentReader("the process group", environment), module.get_rank(), module.get_world_size()
    local = reading.read_number(*LOCAL_RANK_VARIABLES)
    return Membership(
        "a process group that exists", rank, world, local_rank=local, local_count=reading.read_number("LOCAL_WORLD_SIZE"),
        variables=("torch.distributed", *reading.names_read), has_agent_store=True,
    )  # fmt: skip


def _set_address(found: Membership | None, nodes: NodeOptions) -> Membership | None:
    """Set the address that the user gave. Raises L006 without a launcher, or if --nnodes is missing."""
    if found is None or nodes.rank is not None:
        what = "--nnodes is missing: --node-rank and --master need it"
        raise PlaitError(
            Problem("L006", what, fix=("--nnodes <machines> --node-rank <0, 1, …> --master <host of number 0>:29500",))
        )
    host, port = _parse_endpoint(nodes.master or "")
    return replace(found, master=host, port=port or found.port)


def _apply_flags(nodes: NodeOptions, found: Membership | None) -> Membership | None:
    """Return the membership of one process per node, from the user's options; missing ones come from the launcher."""
    assert nodes.count is not None
    if nodes.count < 1:
        raise PlaitError(Problem("L006", f"--nnodes {nodes.count}: the minimum is 1", fix=("--nnodes 2",)))
    if nodes.count == 1:
        return None
    if found is not None and found.count != nodes.count:
        what = f"--nnodes {nodes.count}, but {found.launcher} started {found.count} processes"
        why = "--nnodes needs one process on each machine, which starts the ranks there"
        fix = (
            "srun --ntasks-per-node 1 …" if found.launcher == SLURM.name else "one process on each machine",
            "leave --nnodes out",
        )
        raise PlaitError(Problem("L006", what, why=why, fix=fix))
    rank = nodes.rank if nodes.rank is not None or found is None else found.index
    master = nodes.master if nodes.master is not None or found is None else found.master
    missing = [name for name, value in (("--node-rank", rank), ("--master", master)) if value is None]
    if rank is None or master is None:
        what = f"--nnodes {nodes.count} needs {' and '.join(missing)} too"
        fix = (f"--nnodes {nodes.count} --node-rank <0 to {nodes.count - 1}> --master <host of number 0>:29500",)
        raise PlaitError(Problem("L006", what, why="no launcher sets it", fix=fix))
    if rank >= nodes.count:
        what = f"--node-rank {rank} of --nnodes {nodes.count}: numbers begin at 0"
        raise PlaitError(Problem("L006", what, fix=(f"--node-rank 0 to {nodes.count - 1}",)))
    host, port = _parse_endpoint(master)
    given = Membership("--nnodes", rank, nodes.count, "nodes", nodes=nodes.count, variables=("--nnodes",))
    base = (
        given
        if found is None
        else replace(found, member_kind="nodes", index=rank, nodes=nodes.count, local_rank=None, local_count=None)
    )
    return replace(base, master=host, port=port or base.port, min_count=nodes.min_count)


def _parse_endpoint(said: str) -> tuple[str, int | None]:
    """Parse host:port, [IPv6 address]:port, or a host. Raises L006 for other values."""
    host, colon, port = said.rpartition(":")
    if not colon or said.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = said, ""
    if not host or (port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536)):
        what = f"--master {said} is not an address of the form host:port"
        raise PlaitError(Problem("L006", what, fix=("--master node0:29500",)))
    return host.strip("[]"), int(port) if port else None
