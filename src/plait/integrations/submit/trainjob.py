"""A TrainJob of Kubeflow. The runtime that it names says how pods are made and made again; each is told which of how many it is (PET_*).

When it has ended with 75, *saved, run me again*, the same file starts it again where it stopped.
"""

from plait.integrations.submit import jobset
from plait.integrations.submit.jobset import Value, dump
from plait.integrations.submit.submission import Scheduler, Submission, comment

RUNTIME = "torch-distributed"
"""The runtime that Kubeflow brings along; another: --option spec.runtimeRef.name=NAME."""
CONTAINER = GROUP = "node"
"""What runtimes of Kubeflow call the container that trains, and its group of pods."""


def write(asked: Submission) -> str:
    head = [
        f"{asked.job}: {asked.told}. Written by plait submit trainjob; start it with  kubectl apply -f FILE",
        "When it was stopped (exit code 75), start it again with  kubectl replace --force -f FILE",
    ]
    return "".join(f"{comment(text)}\n" for text in head + jobset.notes(asked)) + dump(_document(asked))


def _document(asked: Submission) -> dict[str, Value]:
    trainer: dict[str, Value] = {
        "image": asked.image,
        "command": jobset.command(asked, asked.train(), asked.folder),
        "numNodes": asked.nodes,
        "numProcPerNode": asked.each if asked.plan.processes != "one" else 1,
    }
    trainer |= {"env": jobset.environment(asked)} if asked.together else {}
    trainer |= {"resourcesPerNode": jobset.resources(asked)}
    spec: dict[str, Value] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    spec |= {"activeDeadlineSeconds": asked.seconds} if asked.seconds is not None else {}
    document: dict[str, Value] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": asked.name},
        "spec": spec | {"runtimePatches": [_patch(asked)]},
    }  # fmt: skip
    return jobset.overlaid(document, asked, "the TrainJob")


def _patch(asked: Submission) -> Value:
    """What the runtime's pods lack: shared memory, volumes, and time to save."""
    pod: Value = {
        "terminationGracePeriodSeconds": jobset.GRACE,
        "volumes": jobset.volumes(asked),
        "containers": [{"name": CONTAINER, "volumeMounts": jobset.mounts(asked)}],
    }
    job: Value = {"name": GROUP, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": "plait", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


SCHEDULER = Scheduler(
    "a TrainJob", write, "kubectl apply -f FILE",
    frozenset(("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "secret", "option", "launch_cmd")), ("image",),
)  # fmt: skip
