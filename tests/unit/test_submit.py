"""The output of `plait submit`: the formats of the schedulers, the values of the plan, and errors with the user's values."""

import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from submitted import asked, faults, sbatch

from plait.cli.main import main
from plait.config.command_options import SCHEDULERS
from plait.config.errors import PlaitError
from plait.integrations.submit.command import parse_seconds
from plait.integrations.submit.submission import make_slug

BARE = {
    "slurm": (), "ray": (), "ssh": ("--hosts", "a,b"), "skypilot": ("--gpu", "H100"), "jobset": ("--image", "r/t:1"),
    "trainjob": ("--image", "r/t:1"),
}  # fmt: skip
"""Further options that each kind needs, in addition to a plan and machines."""
POD = (
    "--cpus",
    "8",
    "--gpu",
    "amd.com/gpu",
    "--time",
    "1d12h",
    "--volume",
    "shared:/mnt",
    "--chdir",
    "/w",
    "--setup",
    "true",
)
FULL = {
    "slurm": ("--cpus", "8", "--gpu", "h100", "--time", "1d12h", "--chdir", "/w", "--setup", "true", "--option", "qos=high"),
    "ray": ("--chdir", "/w", "--option", "no-wait"),
    "ssh": ("--chdir", "/w", "--setup", "true", "--option", "Port=22", "--master", "10.0.0.1:4000"),
    "skypilot": ("--cpus", "8", "--image", "r/t:1", "--volume", "shared:/mnt", "--setup", "true", "--option", "resources.infra=aws"),
    "jobset": (*POD, "--option", "metadata.namespace=team", "--option", "spec.suspend=true"),
    "trainjob": (*POD, "--option", "metadata.namespace=team"),
}  # fmt: skip


def said(*words: str) -> tuple[int, str]:
    """The result of the command, and its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["submit", *words])
    return code, out.getvalue()


def written(kind: str, *more: str, plan: str = "dp=2 tp=2") -> str:
    code, text = said(kind, "jobs/net/job.py", "--plan", plan, *BARE[kind], *more)
    assert code == 0, text
    return text


@pytest.mark.parametrize("kind", ("jobset", "trainjob", "skypilot"))
@pytest.mark.parametrize("full", (False, True))
def test_documents_are_of_their_schemas(kind: str, full: bool) -> None:
    text = written(kind, "--nnodes", "2", *(FULL[kind] if full else ()))
    assert faults(yaml.safe_load(text), kind) == []
    assert faults(yaml.safe_load(written(kind, "--device", "cpu")), kind) == []


def test_a_document_that_is_wrong_is_not_of_its_schema() -> None:
    """The test above can fail."""
    document = yaml.safe_load(written("jobset", "--nnodes", "2"))
    document["spec"] |= {"replicaJobs": []}
    document["spec"]["failurePolicy"]["maxRestarts"] = "2"
    assert faults(document, "jobset") == [
        "jobset.spec does not know replicaJobs",
        "jobset.spec.failurePolicy.maxRestarts is '2', no ['integer']",
    ]


@pytest.mark.parametrize("kind", ("slurm", "ray", "ssh"))
@pytest.mark.parametrize("nodes", ("1", "2"))
def test_scripts_are_scripts(kind: str, nodes: str) -> None:
    hosts = ("--hosts", "a") if kind == "ssh" and nodes == "1" else ()
    for more in ((), FULL[kind]):
        text = written(kind, "--nnodes", nodes, *more, *hosts)
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", "-S", "warning", "-"], input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout


def test_sbatch_is_asked_for_what_the_plan_needs() -> None:
    options = sbatch(written("slurm", "--nnodes", "2", *FULL["slurm"]))
    assert options == {
        "job-name": "net", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "h100:2", "cpus-per-task": "8",
        "time": "1-12:00:00", "chdir": "/w", "signal": "B:USR1@120", "requeue": None, "open-mode": "append",
        "output": "net-%j.out", "qos": "high",
    }  # fmt: skip
    assert sbatch(written("slurm", "--device", "cpu"))["mem"] == "0"
    assert "gpus-per-node" not in sbatch(written("slurm", "--device", "cpu"))
    assert sbatch(written("slurm", "--option", "gres=gpu:a100:4", "--option", "time=5")).items() >= {
        ("gres", "gpu:a100:4"),
        ("time", "5"),
    }


def test_exit_codes_say_what_becomes_of_a_jobset() -> None:
    spec = yaml.safe_load(written("jobset", "--nnodes", "2", "--max-restarts", "7"))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in job["podFailurePolicy"]["rules"]]
    assert rules == [("Ignore", [75]), ("FailJob", [2])] and spec["failurePolicy"]["maxRestarts"] == 7
    assert job["completions"] == job["parallelism"] == 2 and job["completionMode"] == "Indexed"
    words = job["template"]["spec"]["containers"][0]["command"]
    assert "--master=net-node-0-0.net:29500" in words and spec["network"]["subdomain"] == "net"


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_secret_is_in_no_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_SECRET", "the-secret-of-this-shell")
    text = written(kind, "--nnodes", "2")
    assert "the-secret" not in text and ("PLAIT_SECRET" in text or kind == "ray")
    alone = written(kind, "--nnodes", "1", *(("--hosts", "a") if kind == "ssh" else ()))
    assert "PLAIT_SECRET" not in alone


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_options_of_train_are_passed_on(kind: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[mesh]\ndp = 4\n")
    own = (
        "--steps",
        "7",
        "--batch",
        "32",
        "--scale-lr",
        "sqrt",
        "--max-restarts",
        "5",
        "--tracker",
        "tensorboard",
        "--allow-inexact",
    )
    text = written(kind, "--nnodes", "2", *own, "--job.lr", "-1", "--runs", "/shared", plan=str(tmp_path / "plan.toml"))
    for word in ("--steps=7", "--batch=32", "--scale-lr=sqrt", "--max-restarts=5", "--tracker=tensorboard", "--allow-inexact"):
        assert word in text
    assert "--job.lr=-1" in text and "--runs=/shared/net" in text and "dp=4" in text and "plan.toml" not in text
    assert "--resume=auto" in text and "--save-every" not in text


def test_who_says_where_to_go_on_is_obeyed() -> None:
    text = written("slurm", "--nnodes", "2", "--resume", "net-3")
    assert "--runs=runs --resume=net-3" in text and "--resume=auto" not in text


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--plan", "dp=16", "--nnodes", "2", "--nproc", "4"), "S001", "needs 16 devices, and 2 machines of 4 are 8"),
        (("--plan", "dp=16", "--nnodes", "2", "--nproc", "4"), "S001", "--nnodes 2 --nproc 8"),
        (("--plan", "dp=16", "--machine", "h100x8"), "S001", "1 machine of 8 are 8"),
        (("--plan", "dp=3", "--nnodes", "2"), "S001", "needs 3 devices, and 2 machines of 1 are 2"),
        (("--plan", "dp=*", "--nnodes", "2"), "S001", "the number of devices is unknown"),
        (("--plan", "dp=2 processes=one", "--nnodes", "2"), "S001", "one machine only"),
        (("--plan", "auto"), "S001", "--output plan.toml"),
        ((), "S001", "needs a plan"),
        (("--plan", "dp=2", "--nnodes", "0"), "U002", "--nnodes 0"),
        (("--plan", "dp=2", "--steps", "0"), "U002", "--steps 0"),
        (("--plan", "dp=2", "--node-rank", "0"), "S002", "--node-rank"),
        (("--plan", "dp=2", "--image", "x"), "S002", "Slurm has no --image"),
        (("--plan", "dp=2", "--hosts", "a,b"), "S002", "Slurm has no --hosts"),
        (("--plan", "dp=2", "--time", "noon"), "S002", "--time noon"),
        (("--plan", "dp=2", "--name", "My_Job"), "S002", "--name my-job"),
        (("--plan", "dp=2", "--option", "--a b=c"), "S002", "not an option of sbatch"),
        (("--plan", "dp=2 zero_stage=1"), "P030", "zero_stage=1 has no effect"),
        (("--plan", "dp=2", "--runs", "a\udc80b"), "S002", "not UTF-8"),
        (("--plan", "dp=2", "--output", "/nowhere/x"), "M016", "/nowhere"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told(words: tuple[str, ...], code: str, told: str) -> None:
    exit_code, text = said("slurm", "job.py", *words)
    assert exit_code == 2 and f"error[{code}]" in text and told in text, text


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("jobset", (), "needs --image"), ("ssh", (), "needs --hosts"), ("skypilot", (), "needs --gpu"),
        ("ssh", ("--hosts=-oProxyCommand=x",), "is not a host"), ("ssh", ("--hosts", "a;b"), "is not a host"),
        ("ssh", ("--hosts", "a,b", "--nnodes", "1"), "--hosts names 2, and --nnodes says 1"),
        ("ssh", ("--hosts", "a", "--option", "x"), "has no value"), ("ssh", ("--hosts", "a", "--time", "1h"), "no --time"),
        ("jobset", ("--image", "i", "--volume", "mnt"), "--volume mnt"), ("ray", ("--option", "a b"), "not an option"),
        ("jobset", ("--image", "i", "--option", "kind.x=1"), "kind is not a table"),
    ],
)  # fmt: skip
def test_what_a_scheduler_cannot_is_told(kind: str, words: tuple[str, ...], told: str) -> None:
    exit_code, text = said(kind, "job.py", "--plan", "dp=2", *words)
    assert exit_code == 2 and "error[S00" in text and told in text, text


def test_it_is_printed_or_written(tmp_path: Path) -> None:
    out = tmp_path / "a job.sbatch"
    code, text = said("slurm", "job.py", "--plan", "dp=2", "--output", str(out))
    assert code == 0 and text == f"{out} is written; start it with  sbatch '{out}'\n"
    assert out.read_text() == said("slurm", "job.py", "--plan", "dp=2")[1]
    code, text = said("slurm", "job.py", "--plan", "dp=2", "--json")
    assert json.loads(text)["text"] == out.read_text()


def test_a_plan_of_wildcards_is_filled() -> None:
    assert "--plan 'dp=4 tp=2'" in written("slurm", "--machine", "h100x4x2", plan="dp=* tp=2")


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("job.py", "job"), ("examples/stdlib_gpt/job.py", "stdlib-gpt"), ("net.py:big", "net-big"), ("../7.py", "job-7"),
        ("é.py", "job"), ("-x.py", "x"), ("a" * 90 + ".py", "a" * 40), ("./--..py", "job"),
    ],
)  # fmt: skip
def test_names_come_from_paths(job: str, name: str) -> None:
    assert make_slug(job) == name


def test_times() -> None:
    assert [parse_seconds(text) for text in ("90s", "5m", "24h", "1d12h", None)] == [90, 300, 86400, 129600, None]
    for text in ("", "5", "h", "1h 5m", "0h", "-1h"):
        with pytest.raises(PlaitError, match="S002"):
            parse_seconds(text)


def test_a_job_whose_name_begins_with_a_dash_is_no_option() -> None:
    assert asked(job="-x.py").path == "./-x.py"


def test_the_page_names_every_scheduler() -> None:
    page = (Path(__file__).parents[2] / "docs" / "many_machines.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in page for kind in SCHEDULERS) and "plait submit slurm" in page
