"""Pods that Kubernetes starts, one on each machine. Kubeflow's kinds number them in variables; a JobSet, or an indexed Job, only in part.

A TrainJob speaks the variables that torchrun reads as its options (PET_*). A PyTorchJob of the first generation sets RANK and
WORLD_SIZE, and means pods by them: some releases multiply WORLD_SIZE by the processes of a pod, and leave RANK a pod's.
An indexed Job tells each pod its number and nobody how many there are: PLAIT_NNODES or --nnodes must.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.config.errors import PlaitError, Problem
from plait.launch.launchers.launcher import Launcher, Reading, wrong
from plait.launch.launchers.membership import Membership


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
