"""SkyPilot, dstack and DGX Cloud Lepton: each runs one command on every machine."""

from dataclasses import dataclass

from plait.launch.launchers.launcher import Launcher, Reading


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
