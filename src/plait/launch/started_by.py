"""Who started this process: whether it is one of several that a launcher meant to train together.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and plait joins. srun, mpirun and the launchers of clouds
set variables of their own. A process of theirs that knows nothing of the others would train alone, and so would each
of them: that is refused, with what to type. An allocation is not a launcher: in `salloc`, or in the script of a batch
job, one process runs.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from plait.config.errors import PlaitError, Problem

STORE = timedelta(seconds=5)
"""How long the store of torchrun's agent may take to answer."""


@dataclass(frozen=True)
class Launcher:
    """How a launcher says which of its processes (or machines) this is: names of environment variables."""

    name: str
    rank: str
    size: tuple[str, ...]
    """The first that is set counts."""
    joins: bool = False
    """It also says where rank 0 listens, in MASTER_ADDR and MASTER_PORT, so that plait can join."""

    def number(self, environment: Mapping[str, str]) -> tuple[str, str]:
        """(the variable that has the number of processes, what it says); empty when none has."""
        name = next((n for n in self.size if n in environment), "")
        return name, environment.get(name, "")

    def several(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process as one of several."""
        rank, size = environment.get(self.rank, ""), self.number(environment)[1]
        return (rank.isdecimal() and int(rank) > 0) or (size.isdecimal() and int(size) > 1)


class _Slurm(Launcher):
    def several(self, environment: Mapping[str, str]) -> bool:
        """A task of a step of several. The script of a batch job has a SLURM_PROCID too, 0, and the job's SLURM_NTASKS."""
        rank = environment.get(self.rank, "")
        if not rank.isdecimal() or environment.get("SLURM_STEP_NAME") in ("bash", "interactive"):
            return False
        return ("SLURM_STEP_ID" in environment or int(rank) > 0) and super().several(environment)


LAUNCHERS = (
    Launcher("torchrun", "RANK", ("WORLD_SIZE",), joins=True),
    _Slurm("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    Launcher("mpiexec (MVAPICH)", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    Launcher("mpiexec (Hydra: MPICH, Intel MPI)", "PMI_RANK", ("PMI_SIZE",)),
    Launcher("jsrun (LSF)", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",)),
    Launcher("flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",)),
    Launcher("Kubeflow (TrainJob)", "PET_NODE_RANK", ("PET_NNODES",)),
    Launcher("SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
    Launcher("dstack", "DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",)),
    Launcher("DGX Cloud Lepton", "LEPTON_JOB_WORKER_INDEX", ("LEPTON_JOB_TOTAL_WORKERS",)),
)
"""They are asked in this order. A new one is one line; one that `joins` needs nothing else."""
LOCAL = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID",
)  # fmt: skip
"""Where launchers say which process of its machine this is."""


def joined(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher whose processes this one joins, if there is one."""
    return next((one for one in LAUNCHERS if one.joins and one.rank in environment), None)


def check(environment: Mapping[str, str] = os.environ) -> None:
    """L002 when this process is one of several, and none of them knows how to find the others."""
    if joined(environment) is not None:
        return
    found = next((one for one in LAUNCHERS if not one.joins and one.several(environment)), None)
    if found is None:
        return
    rank, (size_name, size) = environment.get(found.rank) or "?", found.number(environment)
    count = f" of {size}" if size else ""
    what = f"{found.name} started this process as number {rank}{count}, and plait does not join it by itself"
    numbers = f"{found.rank}={rank}" + (f" and {size_name}={size}" if size else "")
    why = f"{numbers}, but RANK is not set: each would train alone"
    names = f"RANK=${found.rank} WORLD_SIZE=${size_name or '…'} MASTER_ADDR=<rank 0's host> MASTER_PORT=29500"
    fix = (_torchrun(found.name), f"export {names}, in each process", f"unset {found.rank}    to run this one alone")
    raise PlaitError(Problem("L002", what, why=why, fix=fix))


def _torchrun(launcher: str) -> str:
    tail = "--nproc-per-node <devices> -m plait train …"
    if launcher == "srun":
        where = "--nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --master-addr <first host> --master-port 29500"
        return f"srun --ntasks-per-node 1 bash -c 'torchrun {where} {tail}'"
    return f"torchrun --nnodes <machines> --node-rank <0, 1, …> --master-addr <first host> --master-port 29500 {tail}"


def says(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to show an error: of the ranks that torchrun started, the first that has this text."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        from torch.distributed import TCPStore

        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=STORE)
        name = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        return store.add(f"plait/said/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}", 1) == 1
    except Exception:  # no store, no agreement: said too often is better than not at all
        return True


def joined_as(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int | None]:
    """(rank, world, local rank) of a process that joins; the last is None when nobody says it. L001 when they are no such."""
    launcher = joined(environment) or LAUNCHERS[0]
    rank, size = launcher.rank, launcher.number(environment)[0] or launcher.size[0]
    missing = [name for name in (size, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    fix = ("start it with torchrun", f"unset {rank}    to run alone")
    if missing:
        what = f"{rank} is set, so plait joins a launcher, but {', '.join(missing)} is not"
        raise PlaitError(Problem("L001", what, fix=fix))
    local = next((name for name in LOCAL if name in environment), "")
    given = {name: environment[name] for name in (rank, size, "MASTER_PORT", local) if name}
    wrong = [f"{name}={value}" for name, value in given.items() if not (value.isascii() and value.isdecimal())]
    if not wrong and int(given[rank]) >= int(given[size]):
        wrong = [f"{rank}={given[rank]} of {size}={given[size]}: ranks count from 0"]
    if wrong:
        raise PlaitError(Problem("L001", "plait cannot join a launcher by these numbers: " + ", ".join(wrong), fix=fix))
    return int(given[rank]), int(given[size]), int(given[local]) if local else None
