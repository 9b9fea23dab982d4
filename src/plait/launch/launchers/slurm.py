"""A step of Slurm: what `srun` starts. An allocation is none: in `salloc`, or in a batch job's script, one process runs.

The job's numbers are not the step's: SLURM_NTASKS stays the allocation's in a step that is smaller, and SLURM_LAUNCH_NODE_IPADDR
is the machine where `srun` was typed. So all numbers are those of SLURM_STEP_*.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.launch.launchers.launcher import Launcher, Reading

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
