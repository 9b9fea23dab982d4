"""The output of `plait submit` is run: sbatch's script with stand-ins for Slurm's programs, ssh's script with a stand-in for ssh, and the
commands of pods with the variables that Kubernetes sets. Two launchers on this machine train together, stop, and resume.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launched import TEST_JOB, Command, free_port
from rarely import rarely
from submitted import Programs

from plait.cli.main import main

STEPS = 12
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
count = int(next(word for word in words if word.startswith("--ntasks=")).partition("=")[2])
command = words[next(k for k, word in enumerate(words) if not word.startswith("--")):]
shared = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NAME": "plait", "SLURM_STEP_NUM_TASKS": str(count),
    "SLURM_STEP_NUM_NODES": str(count), "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}}
tasks = [subprocess.Popen(command, env=os.environ | shared | {{"SLURM_PROCID": str(k), "SLURM_GTIDS": str(k)}})
    for k in range(count)]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCANCEL = '#!/bin/bash\necho "$@" >> scancelled\nkill -TERM $(cat tasks)\n'
SCONTROL = '#!/bin/bash\necho "$@" >> controlled\n'
SSH = '#!/bin/bash\nprintf "%s\\n" "$*" >> connected\nexec sh -c "${@: -1}"\n'


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    made = Programs(tmp_path)
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL), ("ssh", SSH)):
        made.add(name, text)
    return made


def submitted(tmp_path: Path, kind: str, *more: str) -> str:
    """The files for the job of the launching tests, under dp=2 on two machines."""
    out = tmp_path / f"written.{kind}"
    own = ("--plan", "dp=2", "--device", "cpu", "--runs", str(tmp_path / "a run's folder"), "--output", str(out))
    if kind in ("slurm", "ssh"):
        own += ("--launch-cmd", f"{sys.executable} -m plait")
    assert main(["submit", kind, TEST_JOB, "--nnodes", "2", *own, "--job.steps", str(STEPS), *more]) == 0
    return out.read_text()


class Script:
    """A script that runs in a folder. All processes that it starts end with the test."""

    def __init__(self, text: str, folder: Path, programs: Programs, **more: str):
        self.log = folder / f"script-{time.monotonic_ns()}.log"
        environment = programs.environment(SLURM_JOB_ID="42", SLURM_CPUS_ON_NODE="2", SLURM_JOB_NUM_NODES="2", **more)
        environment |= {"OMP_NUM_THREADS": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", text], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout: float = 100) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def steps(folder: Path) -> list[int]:
    """The steps in the metrics of all runs under a folder."""
    found = [json.loads(row) for path in folder.glob("**/metrics.jsonl") for row in path.read_text().splitlines()]
    return [row["step"] for row in found if "loss" in row]


def until_step(folder: Path, step: int, script: Script) -> None:
    end = time.monotonic() + 90
    while max(steps(folder), default=0) < step:
        assert time.monotonic() < end and script.process.poll() is None, script.log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ssh_starts_two_launchers_that_train_as_one(tmp_path: Path, programs: Programs) -> None:
    text = submitted(
        tmp_path,
        "ssh",
        "--hosts",
        "127.0.0.1,localhost",
        "--chdir",
        str(tmp_path),
        "--master",
        f"127.0.0.1:{free_port()}",
    )
    script = Script(text, tmp_path, programs, PLAIT_SECRET="known-to-both-of-them")
    assert script.wait() == 0, script.log.read_text()
    assert steps(tmp_path / "a run's folder" / "training") == list(range(1, STEPS + 1))
    assert "known-to-both" not in (tmp_path / "connected").read_text()
    assert "one process on each of 2 machines" in script.log.read_text()


@pytest.mark.timeout(300)
@pytest.mark.prove
def test_who_stops_the_script_of_ssh_stops_and_saves_the_run(tmp_path: Path, programs: Programs) -> None:
    text = submitted(
        tmp_path, "ssh", "--hosts", "localhost", "--nnodes", "1", "--chdir", str(tmp_path), "--job.pause", "0.15"
    )
    script, runs = Script(text, tmp_path, programs), tmp_path / "a run's folder" / "training"
    until_step(runs, 2, script)
    os.kill(script.process.pid, signal.SIGTERM)
    assert script.wait() == 75, script.log.read_text()
    assert "stopped at step" in script.log.read_text() and 2 <= max(steps(runs)) < STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slurms_warning_saves_and_queues_again_and_the_next_start_goes_on(tmp_path: Path, programs: Programs) -> None:
    text, runs = submitted(tmp_path, "slurm", "--job.pause", "0.15"), tmp_path / "a run's folder" / "training-42"
    script = Script(text, tmp_path, programs)
    until_step(runs, 2, script)
    os.kill(script.process.pid, signal.SIGUSR1)
    assert script.wait() == 75, script.log.read_text()
    assert (tmp_path / "controlled").read_text() == "requeue 42\n"
    assert (tmp_path / "scancelled").read_text() == "--quiet --signal=TERM 42\n"
    assert 2 <= max(steps(runs)) < STEPS
    script = Script(text, tmp_path, programs, SLURM_RESTART_COUNT="1")
    assert script.wait() == 0, script.log.read_text()
    assert "resumed from" in script.log.read_text() and steps(runs) == list(range(1, STEPS + 1))
    assert len([path for path in runs.iterdir() if not path.is_symlink()]) == 1


@pytest.mark.prove
def test_a_job_that_is_cancelled_is_not_queued_again(tmp_path: Path, programs: Programs) -> None:
    """Slurm sends SIGTERM to the script and to the step: the run is saved, and not requeued."""
    text = submitted(tmp_path, "slurm", "--job.pause", "0.15")
    script = Script(text, tmp_path, programs)
    until_step(tmp_path / "a run's folder", 2, script)
    for pid in (script.process.pid, *map(int, (tmp_path / "tasks").read_text().split())):
        os.kill(pid, signal.SIGTERM)
    assert script.wait() == 75, script.log.read_text()
    assert not (tmp_path / "controlled").exists()


@pytest.mark.prove
def test_a_lost_rank_is_started_again_in_the_same_allocation_and_then_left_out(tmp_path: Path, programs: Programs) -> None:
    text = submitted(tmp_path, "slurm", "--job.fault", "kill", "--job.at", "7", "--save-every", "2", "--max-restarts", "1")
    script = Script(text, tmp_path, programs)
    assert script.wait() == 0, script.log.read_text()
    said = script.log.read_text()
    assert said.count("rank 1 was killed (SIGKILL)") == 2 and "note  round 2: dp=1 on 1 rank" in said, said
    assert steps(tmp_path / "a run's folder" / "training-42") == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("trainjob", *rarely("jobset", "skypilot")))
def test_the_commands_of_pods_train_together(tmp_path: Path, kind: str) -> None:
    """With the variables that each pod sets. The name of node 0 is this machine."""
    image = () if kind == "skypilot" else ("--image", "r/t:1")
    document, port = yaml.safe_load(submitted(tmp_path, kind, *image)), str(free_port())
    if kind == "skypilot":
        words = subprocess.run(
            ["bash", "-c", document["run"].replace("exec plait", "printf '%s\\0'")], capture_output=True, text=True
        )
        words = words.stdout.split("\0")[:-1]
        own = [
            {"SKYPILOT_NODE_RANK": str(k), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
            for k in (0, 1)
        ]
    elif kind == "trainjob":
        (_, *words), nodes = document["spec"]["trainer"]["command"], document["spec"]["trainer"]["numNodes"]
        shared = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        own = [shared | {"PET_NODE_RANK": str(k)} for k in (0, 1)]
    else:
        job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
        (_, *words), own = (
            job["template"]["spec"]["containers"][0]["command"],
            [{"JOB_COMPLETION_INDEX": str(k)} for k in (0, 1)],
        )
        words = [re.sub("training-node-0-0.training:29500", f"127.0.0.1:{port}", word) for word in words]
    secret = {"PLAIT_SECRET": "of-a-kubernetes-secret"}
    both = [Command(*words, folder=tmp_path, environment=variables | secret) for variables in own]
    assert [one.wait(100) for one in both] == [0, 0], both[0].output + both[1].output
    assert steps(tmp_path / "a run's folder" / "training") == list(range(1, STEPS + 1))
    assert "one process on each of 2 machines" in both[0].output
