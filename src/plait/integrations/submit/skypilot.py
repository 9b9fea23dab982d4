"""A task of SkyPilot: on each node `run` starts one `plait train`, which reads its node rank from SkyPilot's variables.

As a managed job (`sky jobs launch`) it is restarted when a node is preempted, when it ends with 75, and up to `--max-restarts` times when
it fails. Each start continues from the newest checkpoint.
"""

from plait.config.errors import RESUMABLE
from plait.integrations.submit.jobset import Value, apply_options, dump_yaml
from plait.integrations.submit.submission import Scheduler, Submission, format_comment, join_shell_words


def write_sky_task(submission: Submission) -> str:
    start = "sky jobs launch --secret PLAIT_SECRET FILE" if submission.is_multi_node else "sky jobs launch FILE"
    head = [f"{submission.job}: {submission.description}. Written by plait submit skypilot; start it with  {start}"]
    if submission.is_multi_node:
        head += ["The machines authenticate each other by a secret:   export PLAIT_SECRET=$(openssl rand -hex 32)"]
        shared = f"All machines must see one file system at {submission.runs}: --volume NAME:/path"
        head += [] if submission.volumes else [shared]
    return "".join(f"{format_comment(text)}\n" for text in head) + dump_yaml(_build_task(submission))


def _build_task(submission: Submission) -> dict[str, Value]:
    resources: dict[str, Value] = {"accelerators": f"{submission.gpu}:{submission.per_node}"} if submission.gpus else {}
    resources |= {"cpus": f"{submission.cpus}+"} if submission.cpus else {}
    resources |= {"image_id": f"docker:{submission.image}"} if submission.image else {}
    resources |= {"job_recovery": {"max_restarts_on_errors": submission.restarts, "recover_on_exit_codes": [RESUMABLE]}}
    volumes: dict[str, Value] = {path: name for name, path in submission.volumes}
    document: dict[str, Value] = {"name": submission.name, "num_nodes": submission.nodes, "workdir": submission.folder or "."}
    document |= {"resources": resources}
    document |= {"volumes": volumes} if volumes else {}
    document |= {"secrets": {"PLAIT_SECRET": None}} if submission.is_multi_node else {}
    run = [*submission.setup, f"exec {join_shell_words([*submission.build_train_words(), submission.nnodes_flag])}", ""]
    return apply_options(document | {"run": "\n".join(run)}, submission, "the task")


SCHEDULER = Scheduler(
    "SkyPilot", write_sky_task, "sky jobs launch FILE",
    frozenset(("cpus", "gpu", "image", "volume", "chdir", "setup", "option", "launch_cmd")), ("gpu",),
)  # fmt: skip
