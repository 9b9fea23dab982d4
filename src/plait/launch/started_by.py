"""Who started this process: whether it is one of several that a launcher meant to train together.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and plait joins. srun, mpirun and the launchers of clouds
set variables of their own. A process of theirs that knows nothing of the others would train alone, and so would each
of them: that is refused, with what to type. An allocation is not a launcher: in `salloc`, or in the script of a batch
job, one process runs.
"""

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta

from plait.config.errors import PlaitError, Problem

STORE = timedelta(seconds=5)
"""How long the store of torchrun's agent may take to answer."""
_TASKS = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpiexec (Hydra: MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE"),
    ("jsrun (LSF)", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("Kubeflow (TrainJob)", "PET_NODE_RANK", "PET_NNODES"),
    ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
    ("DGX Cloud Lepton", "LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS"),
)
"""Launcher, and the variables in which it says which process (or machine) this is, and of how many."""
LOCAL = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID",
)  # fmt: skip
"""Where launchers say which process of its machine this is."""


def check(environment: Mapping[str, str] = os.environ) -> None:
    """L002 when this process is one of several, and none of them knows how to find the others."""
    if "RANK" in environment:
        return
    found = next((row for row in (_slurm(environment), *_others(environment)) if row is not None), None)
    if found is None:
        return
    launcher, (rank_name, rank), (size_name, size) = found
    count = f" of {size}" if size else ""
    why = (
        f"{rank_name}={rank}"
        + (f" and {size_name}={size}" if size else "")
        + ", but RANK is not set: each would train alone"
    )
    raise PlaitError(
        Problem("L002", f"{launcher} started this process as number {rank}{count}, and plait does not join it by itself",
                why=why, fix=(_torchrun(launcher),
                f"export RANK=${rank_name} WORLD_SIZE=${size_name or '…'} MASTER_ADDR=<rank 0's host> MASTER_PORT=29500, in each process",
                f"unset {rank_name}    to run this one alone"))
    )  # fmt: skip


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


Row = tuple[str, tuple[str, str], tuple[str, str]]


def _slurm(environment: Mapping[str, str]) -> Row | None:
    """A task of a step of several. The script of a batch job has a SLURM_PROCID too, 0, and the job's SLURM_NTASKS."""
    rank = environment.get("SLURM_PROCID", "")
    if not rank.isdecimal() or environment.get("SLURM_STEP_NAME") in ("bash", "interactive"):
        return None
    in_step = "SLURM_STEP_ID" in environment or int(rank) > 0
    size_name = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in environment), "")
    size = environment.get(size_name, "")
    several = int(rank) > 0 or (size.isdecimal() and int(size) > 1)
    return ("srun", ("SLURM_PROCID", rank), (size_name, size)) if in_step and several else None


def _others(environment: Mapping[str, str]) -> list[Row]:
    found: list[Row] = []
    for launcher, rank_name, size_name in _TASKS:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if (rank.isdecimal() and int(rank) > 0) or (size.isdecimal() and int(size) > 1):
            found.append((launcher, (rank_name, rank or "?"), (size_name if size else "", size)))
    return found


def joined_as(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int | None]:
    """(rank, world, local rank) of a process with RANK set; the last is None when nobody says it. L001 when they are no such."""
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    fix = ("start it with torchrun", "unset RANK    to run alone")
    if missing:
        raise PlaitError(
            Problem("L001", "RANK is set, so plait joins a launcher, but " + ", ".join(missing) + " is not", fix=fix)
        )
    local = next((name for name in LOCAL if name in environment), "")
    given = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", local) if name}
    wrong = [f"{name}={value}" for name, value in given.items() if not (value.isascii() and value.isdecimal())]
    if not wrong and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        wrong = [f"RANK={given['RANK']} of WORLD_SIZE={given['WORLD_SIZE']}: ranks count from 0"]
    if wrong:
        raise PlaitError(Problem("L001", "plait cannot join a launcher by these numbers: " + ", ".join(wrong), fix=fix))
    return int(given["RANK"]), int(given["WORLD_SIZE"]), int(given[local]) if local else None
