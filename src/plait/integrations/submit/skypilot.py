"""A task of SkyPilot: on each machine `run` starts one `plait train`, which reads from SkyPilot's variables which of them it is.

As a managed job (`sky jobs launch`) it is started again when a machine is taken away, when it ends with 75, and `--max-restarts` times when
it fails; each start goes on from the newest checkpoint.
"""

from plait.config.errors import RESUMABLE
from plait.integrations.submit.jobset import Value, dump, overlaid
from plait.integrations.submit.submission import Scheduler, Submission, comment, line


def write(asked: Submission) -> str:
    start = "sky jobs launch --secret PLAIT_SECRET FILE" if asked.together else "sky jobs launch FILE"
    head = [f"{asked.job}: {asked.told}. Written by plait submit skypilot; start it with  {start}"]
    if asked.together:
        head += ["The machines know each other by a secret:  export PLAIT_SECRET=$(openssl rand -hex 32)"]
        shared = f"All machines must see one file system at {asked.runs}: --volume NAME:/path"
        head += [] if asked.volumes else [shared]
    return "".join(f"{comment(text)}\n" for text in head) + dump(_document(asked))


def _document(asked: Submission) -> dict[str, Value]:
    resources: dict[str, Value] = {"accelerators": f"{asked.gpu}:{asked.each}"} if asked.gpus else {}
    resources |= {"cpus": f"{asked.cpus}+"} if asked.cpus else {}
    resources |= {"image_id": f"docker:{asked.image}"} if asked.image else {}
    resources |= {"job_recovery": {"max_restarts_on_errors": asked.restarts, "recover_on_exit_codes": [RESUMABLE]}}
    volumes: dict[str, Value] = {path: name for name, path in asked.volumes}
    document: dict[str, Value] = {"name": asked.name, "num_nodes": asked.nodes, "workdir": asked.folder or "."}
    document |= {"resources": resources}
    document |= {"volumes": volumes} if volumes else {}
    document |= {"secrets": {"PLAIT_SECRET": None}} if asked.together else {}
    run = [*asked.setup, f"exec {line([*asked.train(), asked.counted])}", ""]
    return overlaid(document | {"run": "\n".join(run)}, asked, "the task")


SCHEDULER = Scheduler(
    "SkyPilot", write, "sky jobs launch FILE",
    frozenset(("cpus", "gpu", "image", "volume", "chdir", "setup", "option", "launch_cmd")), ("gpu",),
)  # fmt: skip
