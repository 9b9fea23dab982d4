"""How a launcher is described: the environment variables in which it numbers what it starts. Most need nothing else. What a
launcher told this process is a `Membership`: which of how many it is, and where the first of them can be reached.

[Note: Known launchers]
The launchers that plait knows, and the variables in which each numbers what it starts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from plait.config.errors import PlaitError, Problem


@dataclass(frozen=True)
class Membership:
    """This process is number `index` of `count` that one launcher started to train together."""

    launcher: str
    """Its name, as a user would type it: srun."""
    index: int
    count: int
    of: Literal["ranks", "nodes"] = "ranks"
    """`ranks`: every process is a rank. `nodes`: there is one process on each machine, and plait starts the ranks there."""
    local_rank: int | None = None
    """Which rank of its machine this is; None when nobody says it."""
    local_count: int | None = None
    """Ranks on this machine."""
    nodes: int | None = None
    """Machines; None when nobody says it."""
    least: int | None = None
    """With so many machines it may start and go on, where that was said."""
    master: str | None = None
    """Name or address of the machine of number 0."""
    port: int | None = None
    """Where number 0 listens; None: plait chooses."""
    job: str = ""
    """What tells this start from others of the same user at the same time, where the launcher says such a thing."""
    variables: tuple[str, ...] = ()
    """The environment variables that this was read from."""
    agent: bool = False
    """The launcher keeps a rendezvous store of its own, which ranks use: torchrun's agent."""

    def __str__(self) -> str:
        """srun started this process as rank 3 of 8 on 2 machines"""
        what = "rank" if self.of == "ranks" else "machine"
        where = f" on {self.nodes} machines" if self.of == "ranks" and (self.nodes or 1) > 1 else ""
        return f"{self.launcher} started this process as {what} {self.index} of {self.count}{where}"

    def told(self) -> str:
        """The line of a run's beginning: who started it, and how that is known."""
        count = f"{self.count} ranks" if self.of == "ranks" else f"one process on each of {self.count} machines"
        where = f" on {self.nodes} machines" if self.of == "ranks" and (self.nodes or 1) > 1 else ""
        return f"started by {self.launcher}: {count}{where}   (from {', '.join(self.variables)})"


@dataclass(frozen=True)
class Launcher:
    """Names of environment variables; where there are several, the first that is set counts."""

    name: str
    index: str
    """Which of the processes this is. Where it is not set, the launcher did not start this process."""
    count: tuple[str, ...]
    of: Literal["ranks", "nodes"] = "ranks"
    local_rank: tuple[str, ...] = ()
    local_count: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    job: tuple[str, ...] = ()
    """All of these together tell one start from another."""

    def started(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process."""
        return self.index in environment

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        """What it says of this process; None when it did not start it. L001 when its numbers do not go together."""
        if not self.started(environment):
            return None
        reading = Reading(self.name, environment)
        index, (count, least) = reading.wanted(self.index), reading.counted(*self.count)
        if count is None:
            count = reading.wanted(*self.count)
        if index >= count:
            names = f"{self.index}={index} of {reading.name(*self.count)}={count}"
            raise wrong(self.name, f"{names}: numbers begin at 0", self.index)
        return Membership(
            self.name, index, count, self.of,
            local_rank=reading.number(*self.local_rank),
            local_count=self.on_this_machine(reading),
            nodes=count if self.of == "nodes" else reading.number(*self.nodes),
            least=least,
            master=self.master(reading),
            port=reading.number(*self.port),
            job=" ".join(environment[name] for name in self.job if name in environment),
            variables=tuple(reading.read),
        )  # fmt: skip

    def on_this_machine(self, reading: "Reading") -> int | None:
        """Ranks on this machine."""
        return reading.number(*self.local_count)

    def master(self, reading: "Reading") -> str | None:
        """The machine of number 0."""
        return reading.text(*self.address)


class Reading:
    """Reads variables, and keeps the names of those that were there."""

    def __init__(self, launcher: str, environment: Mapping[str, str]):
        self.launcher, self.environment = launcher, environment
        self.read = list[str]()

    def name(self, *names: str) -> str:
        """The first of the names that is set; empty when none is."""
        return next((name for name in names if self.environment.get(name)), "")

    def text(self, *names: str) -> str | None:
        """What the first that is set says."""
        name = self.name(*names)
        if not name:
            return None
        if name not in self.read:
            self.read.append(name)
        return self.environment[name]

    def number(self, *names: str) -> int | None:
        """The same, a number. L001 when it is none."""
        said = self.text(*names)
        if said is None:
            return None
        if not (said.isascii() and said.isdecimal()):
            raise wrong(self.launcher, f"{self.name(*names)}={said} is no number", self.name(*names))
        return int(said)

    def counted(self, *names: str) -> tuple[int | None, int | None]:
        """How many there are; and, of a range such as 1:2 as torchrun has it, how many there must be at least. L001."""
        said = self.text(*names)
        if said is None or ":" not in said:
            return self.number(*names), None
        least, _, most = said.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise wrong(self.launcher, f"{self.name(*names)}={said} is no number, and no range such as 1:2", self.name(*names))
        return int(most), int(least)

    def wanted(self, *names: str) -> int:
        """The same; L001 when none is set, too."""
        found = self.number(*names)
        if found is None:
            set_ = self.name(*self.read) or "nothing"
            raise wrong(self.launcher, f"{set_} is set, but {' or '.join(names)} is not", set_)
        return found


def wrong(launcher: str, why: str, name: str) -> PlaitError:
    """L001."""
    what = f"what {launcher} says of this process does not go together"
    return PlaitError(
        Problem("L001", what, why=why, fix=(f"start it with {launcher} again", f"unset {name}    to run alone"))
    )


# — Slurm: what `srun` starts. An allocation is none: in `salloc`, or in a batch job's script, one process runs —
# The job's numbers are not the step's: SLURM_NTASKS stays the allocation's in a step that is smaller, and SLURM_LAUNCH_NODE_IPADDR
# is the machine where `srun` was typed. So all numbers are those of SLURM_STEP_*.

SPECIAL = 0xFFFFFFF0
"""Steps with numbers from here on are Slurm's own: the shell of an interactive allocation, the script of a batch job."""
OTHERS = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""What an mpirun sets whose helpers `srun` started, one on each machine."""


@dataclass(frozen=True)
class _Slurm(Launcher):
    def started(self, environment: Mapping[str, str]) -> bool:
        """The script of a batch job has a SLURM_PROCID too, 0, and no step of its own."""
        step = environment.get("SLURM_STEP_ID", "")
        helper = any(name in environment for name in OTHERS) and "," not in environment.get("SLURM_GTIDS", ",")
        if helper or (step.isdecimal() and int(step) >= SPECIAL) or not super().started(environment):
            return False
        return bool(step) or environment["SLURM_PROCID"] != "0"

    def on_this_machine(self, reading: Reading) -> int | None:
        tasks = reading.text("SLURM_GTIDS")
        return len(tasks.split(",")) if tasks else None

    def master(self, reading: Reading) -> str | None:
        listed = reading.text("SLURM_STEP_NODELIST")
        return first_host(listed) if listed else super().master(reading)


def first_host(listed: str) -> str:
    """The first of a list of hosts as Slurm writes it: n[08-11,15],login → n08."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group() if first else listed)


SLURM = _Slurm(
    "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), local_rank=("SLURM_LOCALID",),
    nodes=("SLURM_STEP_NUM_NODES",), port=(), job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)  # fmt: skip


def unused(environment: Mapping[str, str]) -> str | None:
    """A line for a process in an allocation of several tasks of which `srun` started none: it trains on this machine alone."""
    tasks, nodes = environment.get("SLURM_NTASKS", "1"), environment.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" not in environment or tasks == "1" == nodes or SLURM.started(environment):
        return None
    return f"note  Slurm gave {tasks} tasks on {nodes} machines, and this process is alone: srun plait train … starts all of them"


# — torchrun, and ranks numbered by hand in the variables that it made common —

LOCAL_RANKS = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID",
)  # fmt: skip
"""Where launchers say which process of its machine this is. Who numbers ranks by hand often leaves it to them."""


@dataclass(frozen=True)
class _Torchrun(Launcher):
    def started(self, environment: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environment and super().started(environment)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        found = super().find(environment)
        return found and replace(found, agent=True)


@dataclass(frozen=True)
class _ByHand(Launcher):
    def started(self, environment: Mapping[str, str]) -> bool:
        """Not where the pods of a PyTorchJob are numbered so, one for each machine (see `_PyTorchJob`)."""
        per_pod = {"NPROC_PER_NODE", "PET_NPROC_PER_NODE"} & set(environment)
        return super().started(environment) and ("LOCAL_RANK" in environment or not per_pod)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        found = super().find(environment)
        missing = [name for name in (*self.address, *self.port) if not environment.get(name)]
        if found is not None and missing:
            raise wrong("RANK", f"RANK is set, but {' and '.join(missing)} is not", "RANK")
        return found


TORCHRUN = _Torchrun(
    "torchrun", "RANK", ("WORLD_SIZE",), local_rank=("LOCAL_RANK",), local_count=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",), job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)  # fmt: skip
BY_HAND = _ByHand("RANK", "RANK", ("WORLD_SIZE",), local_rank=LOCAL_RANKS, local_count=("LOCAL_WORLD_SIZE",))


# — mpirun, mpiexec and their kin: they start processes, and nothing is sent through MPI —
# Some do not say on which machine rank 0 runs: then MASTER_ADDR must, unless all ranks are on one machine, or Slurm lists the machines.


@dataclass(frozen=True)
class _Mpi(Launcher):
    def master(self, reading: Reading) -> str | None:
        said = super().master(reading)
        if said is None and self.on_this_machine(reading) == reading.number(*self.count):
            return "127.0.0.1"  # all of them are here
        listed = None if said else reading.text("SLURM_JOB_NODELIST")
        return first_host(listed) if listed else said


@dataclass(frozen=True)
class _OpenMpi(_Mpi):
    def master(self, reading: Reading) -> str | None:
        """Rank 0 runs where mpirun was typed, unless Slurm or a host file says otherwise; ranks learn mpirun's address.

        Those of PMIx name the helper on their own machine instead, often by a loopback address, which says nothing.
        """
        said = super().master(reading)
        uri = None if said else reading.text("OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4")
        found = re.search(r"tcp4?://(?!127\.)([^,:;]+)", uri or "")
        return found.group(1) if found else said


@dataclass(frozen=True)
class _Lsf(_Mpi):
    def master(self, reading: Reading) -> str | None:
        """Hosts and their slots: the first one is the machine of the script, the second that of rank 0."""
        hosts = (reading.text("LSB_MCPU_HOSTS") or "").split()[::2]
        return super().master(reading) or (hosts[min(1, len(hosts) - 1)] if hosts else None)


@dataclass(frozen=True)
class _Hydra(_Mpi):
    def started(self, environment: Mapping[str, str]) -> bool:
        """Slurm and PALS set PMI_RANK for programs of MPI too, and say more in their own variables."""
        others = {"SLURM_STEP_ID", "PALS_RANKID"} & set(environment)
        return super().started(environment) and ("MPI_LOCALRANKID" in environment or not others)


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


# — pods that Kubernetes starts, one on each machine —
# Kubeflow's kinds number them in variables; a JobSet, or an indexed Job, only in part.
# A TrainJob speaks the variables that torchrun reads as its options (PET_*). A PyTorchJob of the first generation sets RANK and
# WORLD_SIZE, and means pods by them: some releases multiply WORLD_SIZE by the processes of a pod, and leave RANK a pod's.
# An indexed Job tells each pod its number and nobody how many there are: PLAIT_NNODES or --nnodes must.


class _Pods(Launcher):
    def on_this_machine(self, reading: Reading) -> int | None:
        """A number, or one of the words that leave it to the machine: auto, gpu, cpu."""
        said = reading.text(*self.local_count)
        return None if said in (None, "auto", "gpu", "cpu") else reading.number(*self.local_count)


@dataclass(frozen=True)
class _TrainJob(_Pods):
    def started(self, environment: Mapping[str, str]) -> bool:
        return "PET_NNODES" in environment and "RANK" not in environment


@dataclass(frozen=True)
class _PyTorchJob(_Pods):
    def started(self, environment: Mapping[str, str]) -> bool:
        per_pod = not {"NPROC_PER_NODE", "PET_NPROC_PER_NODE"}.isdisjoint(environment)
        return super().started(environment) and per_pod and "LOCAL_RANK" not in environment

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        """WORLD_SIZE counts pods, or the processes of all of them: PET_NNODES decides, where it is there."""
        found = super().find(environment)
        pods = Reading(self.name, environment).number("PET_NNODES") if found is not None else None
        if found is None or pods is None or pods == found.count:
            return found
        if found.local_count is None or pods * found.local_count != found.count:
            each = found.local_count or "auto"
            why = f"WORLD_SIZE={found.count}, but PET_NNODES={pods} times {each} processes each"
            raise wrong(self.name, why, "PET_NNODES")
        if found.index >= pods:
            raise wrong(self.name, f"RANK={found.index} of PET_NNODES={pods} pods: numbers begin at 0", "RANK")
        return replace(found, count=pods, nodes=pods, variables=(*found.variables, "PET_NNODES"))


@dataclass(frozen=True)
class _IndexedJob(Launcher):
    def started(self, environment: Mapping[str, str]) -> bool:
        """A TrainJob is built of these, and says more."""
        return super().started(environment) and not {"PET_NNODES", "RANK"} & set(environment)

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        if self.started(environment) and "PLAIT_NNODES" not in environment:
            what = f"this pod is number {environment[self.index]} of an indexed Job, and nobody says of how many"
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


# — SkyPilot, dstack and DGX Cloud Lepton: each runs one command on every machine —


@dataclass(frozen=True)
class _SkyPilot(Launcher):
    def master(self, reading: Reading) -> str | None:
        """The head is the first of the machines, which are listed a line each."""
        listed = (reading.text("SKYPILOT_NODE_IPS") or "").split()
        return listed[0] if listed else super().master(reading)


SKYPILOT = _SkyPilot(
    "SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",), "nodes", local_count=("SKYPILOT_NUM_GPUS_PER_NODE",),
    job=("SKYPILOT_TASK_ID",),
)  # fmt: skip
DSTACK = Launcher(
    "dstack", "DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",), "nodes", local_count=("DSTACK_GPUS_PER_NODE",),
    address=("DSTACK_MASTER_NODE_IP",), job=("DSTACK_RUN_NAME",),
)  # fmt: skip
LEPTON = Launcher("DGX Cloud Lepton", "LEPTON_JOB_WORKER_INDEX", ("LEPTON_JOB_TOTAL_WORKERS",), "nodes")
