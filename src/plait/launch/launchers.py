"""Description of a launcher: the environment variables in which it numbers its processes. Most launchers need nothing else.

A `Membership` is the result for this process: its index, the number of processes, and the address of process 0.

[Note: Known launchers] The launchers that plait supports, and the variables in which each numbers its processes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from plait.config.errors import PlaitError, Problem


@dataclass(frozen=True)
class Membership:
    """This process is number `index` of `count` processes that one launcher started to train together."""

    launcher: str
    """Name as a user types it: srun."""
    index: int
    count: int
    member_kind: Literal["ranks", "nodes"] = "ranks"
    """`ranks`: every process is a rank. `nodes`: one process per node, and plait starts the ranks there."""
    local_rank: int | None = None
    """Rank on its node; None if unknown."""
    local_count: int | None = None
    """Ranks on this node."""
    nodes: int | None = None
    """Number of nodes; None if unknown."""
    min_count: int | None = None
    """Minimum number of nodes for a start or a restart; None if not given."""
    master: str | None = None
    """Host name or address of node 0."""
    port: int | None = None
    """Port of process 0; None: selected by plait."""
    job: str = ""
    """ID that distinguishes this start from other starts of the same user, if the launcher has one."""
    variables: tuple[str, ...] = ()
    """The environment variables that this was read from."""
    has_agent_store: bool = False
    """The launcher has its own rendezvous store, which ranks use: torchrun's agent."""

    def __str__(self) -> str:
        """Format as: srun started this process as rank 3 of 8 on 2 machines"""
        what = "rank" if self.member_kind == "ranks" else "machine"
        where = f" on {self.nodes} machines" if self.member_kind == "ranks" and (self.nodes or 1) > 1 else ""
        return f"{self.launcher} started this process as {what} {self.index} of {self.count}{where}"

    def describe(self) -> str:
        """Format the first line of a run: its launcher, and the variables that show it."""
        count = f"{self.count} ranks" if self.member_kind == "ranks" else f"one process on each of {self.count} machines"
        where = f" on {self.nodes} machines" if self.member_kind == "ranks" and (self.nodes or 1) > 1 else ""
        return f"started by {self.launcher}: {count}{where}   (from {', '.join(self.variables)})"


@dataclass(frozen=True)
class Launcher:
    """Names of environment variables; if there are several, the first one that is set counts."""

    name: str
    index: str
    """Variable with the index of this process. If it is not set, the launcher did not start this process."""
    count: tuple[str, ...]
    member_kind: Literal["ranks", "nodes"] = "ranks"
    local_rank: tuple[str, ...] = ()
    local_count: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    job: tuple[str, ...] = ()
    """Variables that together identify a start."""

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process."""
        return self.index in environment

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        """Return this process's membership; None if it did not start it. Raises L001 for inconsistent variables."""
        if not self.has_started(environment):
            return None
        reading = EnvironmentReader(self.name, environment)
        index, (count, least) = reading.require_number(self.index), reading.read_range(*self.count)
        if count is None:
            count = reading.require_number(*self.count)
        if index >= count:
            names = f"{self.index}={index} of {reading.find_name(*self.count)}={count}"
            raise launcher_error(self.name, f"{names}: numbers begin at 0", self.index)
        return Membership(
            self.name, index, count, self.member_kind,
            local_rank=reading.read_number(*self.local_rank),
            local_count=self.read_local_count(reading),
            nodes=count if self.member_kind == "nodes" else reading.read_number(*self.nodes),
            min_count=least,
            master=self.read_master(reading),
            port=reading.read_number(*self.port),
            job=" ".join(environment[name] for name in self.job if name in environment),
            variables=tuple(reading.names_read),
        )  # fmt: skip

    def read_local_count(self, reading: "EnvironmentReader") -> int | None:
        """Return the number of ranks on this node."""
        return reading.read_number(*self.local_count)

    def read_master(self, reading: "EnvironmentReader") -> str | None:
        """Return the host of node 0."""
        return reading.read_text(*self.address)


class EnvironmentReader:
    """Reads environment variables, and records the names of those that are set."""

    def __init__(self, launcher: str, environment: Mapping[str, str]):
        self.launcher, self.environment = launcher, environment
        self.names_read = list[str]()

    def find_name(self, *names: str) -> str:
        """Return the first of these names that is set; empty if none is."""
        return next((name for name in names if self.environment.get(name)), "")

    def read_text(self, *names: str) -> str | None:
        """Return the value of the first name that is set."""
        name = self.find_name(*names)
        if not name:
            return None
        if name not in self.names_read:
            self.names_read.append(name)
        return self.environment[name]

    def read_number(self, *names: str) -> int | None:
        """Return it as an integer. Raises L001 for other text."""
        said = self.read_text(*names)
        if said is None:
            return None
        if not (said.isascii() and said.isdecimal()):
            raise launcher_error(self.launcher, f"{self.find_name(*names)}={said} is not a number", self.find_name(*names))
        return int(said)

    def read_range(self, *names: str) -> tuple[int | None, int | None]:
        """Return (count, minimum) of a number or of torchrun's range, such as 1:2. Raises L001."""
        said = self.read_text(*names)
        if said is None or ":" not in said:
            return self.read_number(*names), None
        least, _, most = said.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise launcher_error(self.launcher, f"{self.find_name(*names)}={said} is not a number or a range such as 1:2", self.find_name(*names))
        return int(most), int(least)

    def require_number(self, *names: str) -> int:
        """Return it as an integer. Raises L001 if no name is set, too."""
        found = self.read_number(*names)
        if found is None:
            set_ = self.find_name(*self.names_read) or "nothing"
            raise launcher_error(self.launcher, f"{set_} is set, but {' or '.join(names)} is not", set_)
        return found


def launcher_error(launcher: str, why: str, name: str) -> PlaitError:
    """L001: the launcher's variables are inconsistent."""
    what = f"the variables of {launcher} are inconsistent"
    return PlaitError(
        Problem("L001", what, why=why, fix=(f"start it with {launcher} again", f"unset {name}    to run alone"))
    )


# — Slurm: processes that `srun` starts. An allocation alone starts one process, in `salloc` or in a batch job's script —
# Variables of the job differ from the step's: SLURM_NTASKS is the allocation's, even in a smaller step, and SLURM_LAUNCH_NODE_IPADDR
# is the node where `srun` was typed. So all values come from SLURM_STEP_*.

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Lowest number of Slurm's own steps: the shell of an interactive allocation, the script of a batch job."""
MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables of an mpirun whose helpers `srun` started, one per node."""


@dataclass(frozen=True)
class _Slurm(Launcher):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        """The script of a batch job has SLURM_PROCID=0 too, and no step of its own."""
        step = environment.get("SLURM_STEP_ID", "")
        helper = any(name in environment for name in MPIRUN_VARIABLES) and "," not in environment.get("SLURM_GTIDS", ",")
        if helper or (step.isdecimal() and int(step) >= FIRST_SPECIAL_STEP) or not super().has_started(environment):
            return False
        return bool(step) or environment["SLURM_PROCID"] != "0"

    def read_local_count(self, reading: EnvironmentReader) -> int | None:
        tasks = reading.read_text("SLURM_GTIDS")
        return len(tasks.split(",")) if tasks else None

    def read_master(self, reading: EnvironmentReader) -> str | None:
        listed = reading.read_text("SLURM_STEP_NODELIST")
        return parse_first_host(listed) if listed else super().read_master(reading)


def parse_first_host(listed: str) -> str:
    """Return the first host of a list in Slurm's notation: n[08-11,15],login → n08."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group() if first else listed)


SLURM = _Slurm(
    "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), local_rank=("SLURM_LOCALID",),
    nodes=("SLURM_STEP_NUM_NODES",), port=(), job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)  # fmt: skip


def describe_unused_tasks(environment: Mapping[str, str]) -> str | None:
    """Return a note for a process in an allocation of several tasks that `srun` did not start: it trains on this node only."""
    tasks, nodes = environment.get("SLURM_NTASKS", "1"), environment.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" not in environment or tasks == "1" == nodes or SLURM.has_started(environment):
        return None
    return f"note  Slurm gave {tasks} tasks on {nodes} machines, and this process is alone: srun plait train … starts all of them"


# — torchrun, and ranks numbered by hand in torchrun's variables —

LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID",
)  # fmt: skip
"""Variables with the local rank of a process. RANK set by hand often comes with one of them."""


@dataclass(frozen=True)
class _Torchrun(Launcher):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environment and super().has_started(environment)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        found = super().find(environment)
        return found and replace(found, has_agent_store=True)


@dataclass(frozen=True)
class _ByHand(Launcher):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        """False for the pods of a PyTorchJob, which have the same variables, one pod per node (see `_PyTorchJob`)."""
        per_pod = {"NPROC_PER_NODE", "PET_NPROC_PER_NODE"} & set(environment)
        return super().has_started(environment) and ("LOCAL_RANK" in environment or not per_pod)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        found = super().find(environment)
        missing = [name for name in (*self.address, *self.port) if not environment.get(name)]
        if found is not None and missing:
            raise launcher_error("RANK", f"RANK is set, but {' and '.join(missing)} is not", "RANK")
        return found


TORCHRUN = _Torchrun(
    "torchrun", "RANK", ("WORLD_SIZE",), local_rank=("LOCAL_RANK",), local_count=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",), job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)  # fmt: skip
BY_HAND = _ByHand("RANK", "RANK", ("WORLD_SIZE",), local_rank=LOCAL_RANK_VARIABLES, local_count=("LOCAL_WORLD_SIZE",))


# — mpirun, mpiexec and similar launchers: they start processes, and no data is sent through MPI —
# Some have no variable with rank 0's node. Then MASTER_ADDR must be set, unless all ranks are on one node, or Slurm lists the nodes.


@dataclass(frozen=True)
class _Mpi(Launcher):
    def read_master(self, reading: EnvironmentReader) -> str | None:
        said = super().read_master(reading)
        if said is None and self.read_local_count(reading) == reading.read_number(*self.count):
            return "127.0.0.1"  # all of them are here
        listed = None if said else reading.read_text("SLURM_JOB_NODELIST")
        return parse_first_host(listed) if listed else said


@dataclass(frozen=True)
class _OpenMpi(_Mpi):
    def read_master(self, reading: EnvironmentReader) -> str | None:
        """Rank 0 runs on mpirun's host, unless Slurm or a host file says otherwise; ranks receive mpirun's address.

        PMIx gives the helper on the rank's own node instead, often by a loopback address, which is useless.
        """
        said = super().read_master(reading)
        uri = None if said else reading.read_text("OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4")
        found = re.search(r"tcp4?://(?!127\.)([^,:;]+)", uri or "")
        return found.group(1) if found else said


@dataclass(frozen=True)
class _Lsf(_Mpi):
    def read_master(self, reading: EnvironmentReader) -> str | None:
        """LSF lists hosts with their slots: the first is the host of the script, the second that of rank 0."""
        hosts = (reading.read_text("LSB_MCPU_HOSTS") or "").split()[::2]
        return super().read_master(reading) or (hosts[min(1, len(hosts) - 1)] if hosts else None)


@dataclass(frozen=True)
class _Hydra(_Mpi):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Slurm and PALS also set PMI_RANK for MPI programs, and their own variables are more specific."""
        others = {"SLURM_STEP_ID", "PALS_RANKID"} & set(environment)
        return super().has_started(environment) and ("MPI_LOCALRANKID" in environment or not others)


OPEN_MPI = _OpenMpi(
    "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_count=("OMPI_COMM_WORLD_LOCAL_SIZE",), nodes=("OMPI_MCA_orte_num_nodes",),
    job=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
)  # fmt: skip
MVAPICH = _Mpi(
    "mpiexec (MVAPICH)", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_count=("MV2_COMM_WORLD_LOCAL_SIZE",),
)  # fmt: skip
HYDRA = _Hydra(
    "mpiexec (Hydra: MPICH, Intel MPI)", "PMI_RANK", ("PMI_SIZE",), local_rank=("MPI_LOCALRANKID",),
    local_count=("MPI_LOCALNRANKS",),
)  # fmt: skip
PALS = _Mpi(
    "mpiexec (PALS)", "PALS_RANKID", ("PALS_SIZE", "PMI_SIZE"), local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_count=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), job=("PALS_APID",),
)  # fmt: skip
JSRUN = _Lsf(
    "jsrun (LSF)", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_count=("JSM_NAMESPACE_LOCAL_SIZE",), job=("LSB_JOBID", "JSM_JSRUN_STEP_ID"),
)  # fmt: skip
FLUX = _Mpi(
    "flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), local_rank=("FLUX_TASK_LOCAL_ID",), nodes=("FLUX_JOB_NNODES",),
    job=("FLUX_JOB_ID",),
)  # fmt: skip


# — pods of Kubernetes, one per node —
# Kubeflow's kinds number them in variables; a JobSet or an indexed Job does so only in part.
# A TrainJob sets the variables that torchrun reads as its options (PET_*). A PyTorchJob of the first generation sets RANK and
# WORLD_SIZE for pods; some releases multiply WORLD_SIZE by the processes of a pod, while RANK stays the pod's.
# An indexed Job gives each pod its index and not the number of pods, so PLAIT_NNODES or --nnodes must be set.


class _Pods(Launcher):
    def read_local_count(self, reading: EnvironmentReader) -> int | None:
        """A number, or auto, gpu or cpu, which leave it to the node."""
        said = reading.read_text(*self.local_count)
        return None if said in (None, "auto", "gpu", "cpu") else reading.read_number(*self.local_count)


@dataclass(frozen=True)
class _TrainJob(_Pods):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        return "PET_NNODES" in environment and "RANK" not in environment


@dataclass(frozen=True)
class _PyTorchJob(_Pods):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        per_pod = not {"NPROC_PER_NODE", "PET_NPROC_PER_NODE"}.isdisjoint(environment)
        return super().has_started(environment) and per_pod and "LOCAL_RANK" not in environment

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        """WORLD_SIZE is the number of pods, or of all their processes; PET_NNODES decides, if it is set."""
        found = super().find(environment)
        pods = EnvironmentReader(self.name, environment).read_number("PET_NNODES") if found is not None else None
        if found is None or pods is None or pods == found.count:
            return found
        if found.local_count is None or pods * found.local_count != found.count:
            each = found.local_count or "auto"
            why = f"WORLD_SIZE={found.count}, but PET_NNODES={pods} times {each} processes each"
            raise launcher_error(self.name, why, "PET_NNODES")
        if found.index >= pods:
            raise launcher_error(self.name, f"RANK={found.index} of PET_NNODES={pods} pods: numbers begin at 0", "RANK")
        return replace(found, count=pods, nodes=pods, variables=(*found.variables, "PET_NNODES"))


@dataclass(frozen=True)
class _IndexedJob(Launcher):
    def has_started(self, environment: Mapping[str, str]) -> bool:
        """A TrainJob consists of indexed Jobs, and its variables are more specific."""
        return super().has_started(environment) and not {"PET_NNODES", "RANK"} & set(environment)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        if self.has_started(environment) and "PLAIT_NNODES" not in environment:
            what = f"this pod is number {environment[self.index]} of an indexed Job, and the number of pods is unknown"
            why = "JOB_COMPLETION_INDEX is set; the number of pods is in no variable"
            together = (
                "PLAIT_NNODES=<pods> PLAIT_MASTER=<host name of pod 0>    in the container's env, to train together"
            )
            raise PlaitError(
                Problem("L006", what, why=why, fix=(together, "PLAIT_NNODES=1    to train alone in each pod"))
            )
        return None if environment.get("PLAIT_NNODES") == "1" else super().find(environment)


TRAIN_JOB = _TrainJob(
    "a Kubeflow TrainJob", "PET_NODE_RANK", ("PET_NNODES",), "nodes", local_count=("PET_NPROC_PER_NODE",),
    address=("PET_MASTER_ADDR",), port=("PET_MASTER_PORT",),
)  # fmt: skip
PYTORCH_JOB = _PyTorchJob(
    "a Kubeflow PyTorchJob", "RANK", ("WORLD_SIZE",), "nodes", local_count=("NPROC_PER_NODE", "PET_NPROC_PER_NODE")
)
INDEXED_JOB = _IndexedJob(
    "an indexed Job or JobSet", "JOB_COMPLETION_INDEX", ("PLAIT_NNODES",), "nodes"
)  # fmt: skip


# — SkyPilot, dstack and DGX Cloud Lepton: each runs one command per node —


@dataclass(frozen=True)
class _SkyPilot(Launcher):
    def read_master(self, reading: EnvironmentReader) -> str | None:
        """The head is the first of the nodes, which are listed one per line."""
        listed = (reading.read_text("SKYPILOT_NODE_IPS") or "").split()
        return listed[0] if listed else super().read_master(reading)


SKYPILOT = _SkyPilot(
    "SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",), "nodes", local_count=("SKYPILOT_NUM_GPUS_PER_NODE",),
    job=("SKYPILOT_TASK_ID",),
)  # fmt: skip
DSTACK = Launcher(
    "dstack", "DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",), "nodes", local_count=("DSTACK_GPUS_PER_NODE",),
    address=("DSTACK_MASTER_NODE_IP",), job=("DSTACK_RUN_NAME",),
)  # fmt: skip
LEPTON = Launcher("DGX Cloud Lepton", "LEPTON_JOB_WORKER_INDEX", ("LEPTON_JOB_TOTAL_WORKERS",), "nodes")
