"""mpirun, mpiexec and their kin. plait uses them to start processes; nothing is sent through MPI.

Some do not say on which machine rank 0 runs: then MASTER_ADDR must, unless all ranks are on one machine, or Slurm lists the machines.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.launch.launchers.launcher import Launcher, Reading
from plait.launch.launchers.slurm import first_host


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
