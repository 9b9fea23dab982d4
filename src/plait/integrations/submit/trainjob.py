"""A TrainJob of Kubeflow. Its runtime defines how pods are created and recreated; each pod gets its index and their number (PET_*).

After it has ended with 75, *saved, run me again*, the same file starts it again, and it continues.
"""

from plait.integrations.submit import jobset
from plait.integrations.submit.jobset import Value, dump_yaml
from plait.integrations.submit.submission import Scheduler, Submission, format_comment

RUNTIME = "torch-distributed"
"""Kubeflow's own runtime; select another one with --option spec.runtimeRef.name=NAME."""
CONTAINER = GROUP = "node"
"""Name of the training container in Kubeflow's runtimes, and of its group of pods."""


def write_trainjob(submission: Submission) -> str:
    head = [
        f"{submission.job}: {submission.description}. Written by plait submit trainjob; start it with  kubectl apply -f FILE",
        "When it was stopped (exit code 75), start it again with  kubectl replace --force -f FILE",
    ]
    return "".join(f"{format_comment(text)}\n" for text in head + jobset.list_notes(submission)) + dump_yaml(_build_trainjob(submission))


def _build_trainjob(submission: Submission) -> dict[str, Value]:
    trainer: dict[str, Value] = {
        "image": submission.image,
        "command": jobset.build_command(submission, submission.build_train_words(), submission.folder),
        "numNodes": submission.nodes,
        "numProcPerNode": submission.per_node if submission.plan.processes != "one" else 1,
    }
    trainer |= {"env": jobset.build_environment(submission)} if submission.is_multi_node else {}
    trainer |= {"resourcesPerNode": jobset.build_resources(submission)}
    spec: dict[str, Value] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    spec |= {"activeDeadlineSeconds": submission.seconds} if submission.seconds is not None else {}
    document: dict[str, Value] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": submission.name},
        "spec": spec | {"runtimePatches": [_build_patch(submission)]},
    }  # fmt: skip
    return jobset.apply_options(document, submission, "the TrainJob")


def _build_patch(submission: Submission) -> Value:
    """Build the patch of the runtime's pods: shared memory, volumes, and time to save."""
    pod: Value = {
        "terminationGracePeriodSeconds": jobset.GRACE_S,
        "volumes": jobset.build_volumes(submission),
        "containers": [{"name": CONTAINER, "volumeMounts": jobset.build_mounts(submission)}],
    }
    job: Value = {"name": GROUP, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": "plait", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


SCHEDULER = Scheduler(
    "a TrainJob", write_trainjob, "kubectl apply -f FILE",
    frozenset(("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "secret", "option", "launch_cmd")), ("image",),
)  # fmt: skip
