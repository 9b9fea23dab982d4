"""torchrun, and ranks numbered by hand in the variables that torchrun made common: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.launch.launchers.launcher import Launcher, wrong
from plait.launch.launchers.membership import Membership

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
        """Not where the pods of a PyTorchJob are numbered so, one for each machine (see `kubernetes`)."""
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
