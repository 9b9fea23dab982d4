"""A JobSet of Kubernetes: an indexed Job with a pod on each machine, and names by which the pods find each other.

Exit codes say what becomes of it. 75 means *saved, run me again*: the pods are made anew, as often as it takes. 2 means that the
command or the plan is wrong: it ends, as it does when its time is over. Anything else makes all pods anew, `--restarts` times, and
they go on from the newest checkpoint.
"""

from plait.config.errors import RESUMABLE, USAGE
from plait.integrations.submit import pods
from plait.integrations.submit.scheduler import Scheduler
from plait.integrations.submit.shell import comment
from plait.integrations.submit.submission import Submission
from plait.integrations.submit.yaml import Value, dump

FINAL: list[Value] = ["PodFailurePolicy", "DeadlineExceeded"]
"""Why a Job ended that is not made anew: the command was refused, or its time is over."""
GROUP, PORT = "node", 29500
"""The name of the one group of pods, and where number 0 listens."""


def write(asked: Submission) -> str:
    head = [f"{asked.job}: {asked.told}. Written by plait submit jobset; start it with  kubectl apply -f FILE"]
    return "".join(f"{comment(text)}\n" for text in head + pods.notes(asked)) + dump(_document(asked))


def _document(asked: Submission) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": asked.name},
        "failurePolicy": {
            "maxRestarts": asked.restarts,
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": FINAL}],
        },
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": _job(asked)}}],
    }
    document: dict[str, Value] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": asked.name}, "spec": spec,
    }  # fmt: skip
    return pods.overlaid(document, asked, "the JobSet")


def _job(asked: Submission) -> dict[str, Value]:
    def rule(action: str, code: int) -> Value:
        return {"action": action, "onExitCodes": {"containerName": "plait", "operator": "In", "values": [code]}}

    limit: dict[str, Value] = {} if asked.seconds is None else {"activeDeadlineSeconds": asked.seconds}
    return {
        "completionMode": "Indexed",
        "completions": asked.nodes,
        "parallelism": asked.nodes,
        "backoffLimit": 0,
        **limit,
        "podFailurePolicy": {"rules": [rule("Ignore", RESUMABLE), rule("FailJob", USAGE)]},
        "template": {"spec": _pod(asked)},
    }


def _pod(asked: Submission) -> dict[str, Value]:
    words = [*asked.train(), asked.counted]
    if asked.together:
        words.append(f"--master={asked.name}-{GROUP}-0-0.{asked.name}:{PORT}")
    container: dict[str, Value] = {"name": "plait", "image": asked.image, "command": pods.command(asked, words)}
    container |= {"workingDir": asked.folder} if asked.folder is not None else {}
    container |= {"env": pods.environment(asked)} if asked.together else {}
    container |= {"resources": pods.resources(asked), "volumeMounts": pods.mounts(asked)}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.GRACE,
        "containers": [container],
        "volumes": pods.volumes(asked),
    }


SCHEDULER = Scheduler(
    "a JobSet", write, "kubectl apply -f FILE",
    frozenset(("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "secret", "option", "call")), ("image",),
)  # fmt: skip
