"""The run directory: its number, the link to the newest, the lock, and removal of the records that a resumed run writes again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory, describe_environment, get_job_name


def create(root: Path, job: str = "net.py", plan: Plan | None = None) -> RunDirectory:
    return RunDirectory.create(job, plan or Plan(), {"depth": "8"}, root)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("examples/digits/job.py", "digits"),
        ("examples/digits/job.py:job", "digits"),
        ("examples/digits/job.py:big", "digits-big"),
        ("net.py", "net"),
        ("some/net.py:big", "net-big"),
        ("net.v2.py", "net.v2"),
        ("a b.py", "a b"),
        ("/job.py", "job"),
    ],
)
def test_a_run_is_named_after_its_job(job: str, name: str) -> None:
    assert get_job_name(job) == name


def test_job_py_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path / "digits")
    assert get_job_name("job.py") == "digits"


def test_runs_are_numbered(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs"
    assert [create(root).path.name for _ in range(3)] == ["net-1", "net-2", "net-3"]
    assert create(root, "net.py:big").path.name == "net-big-1"
    assert create(root, "ne.py").path.name == "ne-1"
    for name in ("net-10", "net-x", "net-", "net-3.5", "net-10-2", "other-99"):
        (root / name).mkdir()
    (root / "net-11").write_text("a file")
    assert create(root).path.name == "net-12"
    assert create(root, "net-10.py").path.name == "net-10-3"


def test_what_is_written_before_the_start(tmp_path: Path) -> None:
    plan = Plan(dp=2, precision="bf16")
    run = create(tmp_path, "some/net.py", plan)
    assert Plan.load(run.path / "plan.toml") == plan
    job = json.loads((run.path / "job.json").read_text())
    assert (job["job"], job["arguments"]) == ("some/net.py", {"depth": "8"})
    facts = json.loads((run.path / "env.json").read_text())
    assert facts == json.loads(json.dumps(describe_environment()))
    assert {"plait", "python", "torch", "platform", "cores", "cuda", "variables"} <= set(facts)
    assert run.checkpoints.is_dir()
    assert run.get_events_path(3) == run.path / "events" / "rank3.jsonl"
    assert run.get_log_path(3) == run.path / "logs" / "rank3.log"
    assert run.metrics.parent == run.path


def test_no_secret_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    assert "hunter2" not in (create(tmp_path).path / "env.json").read_text()


def test_latest_points_to_the_newest(tmp_path: Path) -> None:
    first = create(tmp_path)
    second = create(tmp_path, "other.py")
    assert os.readlink(tmp_path / "latest") == "other-1"
    assert (tmp_path / "latest").samefile(second.path)
    first.link_latest()
    assert os.readlink(tmp_path / "latest") == "net-1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "net-1", "other-1"]


def test_what_is_resumed(tmp_path: Path) -> None:
    runs = [create(tmp_path) for _ in range(11)]
    create(tmp_path, "net.py:big")
    assert RunDirectory.find_latest("net.py", tmp_path) == runs[10]
    (runs[1].checkpoints / "step-000100").mkdir()
    assert RunDirectory.find_latest("net.py", tmp_path) == runs[1]
    (runs[9].checkpoints / "step-000001").mkdir()
    assert RunDirectory.find_latest("elsewhere/net.py", tmp_path) == runs[9]


@pytest.mark.parametrize("root", [".", "none"])
def test_nothing_to_resume(tmp_path: Path, root: str) -> None:
    create(tmp_path, "netting.py")
    with pytest.raises(PlaitError) as caught:
        RunDirectory.find_latest("net.py", tmp_path / root)
    assert caught.value.codes == ["K001"]
    assert "net" in caught.value.problems[0].what


def test_a_run_killed_in_its_first_save_is_not_resumed(tmp_path: Path) -> None:
    good, killed = create(tmp_path), create(tmp_path)
    (good.checkpoints / "step-000100").mkdir()
    (killed.checkpoints / "step-000050.tmp").mkdir()
    assert RunDirectory.find_latest("net.py", tmp_path) == good


def test_a_name_with_brackets(tmp_path: Path) -> None:
    run = create(tmp_path, "net[1].py")
    assert RunDirectory.find_latest("net[1].py", tmp_path) == run


def test_a_folder_with_an_odd_number(tmp_path: Path) -> None:
    (tmp_path / "net-²").mkdir()
    assert create(tmp_path).path.name == "net-1"


@pytest.mark.parametrize("what", ["root is a file", "latest is a folder", "a link is left from a killed process"])
def test_a_run_directory_that_cannot_be_made(tmp_path: Path, what: str) -> None:
    root = tmp_path / "runs"
    if what == "root is a file":
        root.write_text("")
    elif what == "latest is a folder":
        (root / "latest").mkdir(parents=True)
    else:
        root.mkdir()
        (root / f".latest-{os.getpid()}").symlink_to("net-0")
    try:
        assert create(root).path.is_dir()
    except PlaitError as error:
        assert str(root) in str(error)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is tried several times before an error. Here there is no wait between the attempts."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.usefixtures("impatient")
def test_the_lock(tmp_path: Path) -> None:
    run, other = create(tmp_path), create(tmp_path)
    held = run.lock()
    with pytest.raises(PlaitError) as caught:
        run.lock()
    assert caught.value.codes == ["R001"]
    assert str(run.path) in caught.value.problems[0].what
    other.lock().close()
    held.close()
    run.lock().close()


@pytest.mark.usefixtures("impatient")
def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    run = create(tmp_path)
    script = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-S", "-c", script, str(run.path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(PlaitError):
            run.lock()
        holder.kill()
        holder.wait()
        run.lock().close()


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("content", "step", "left"),
    [
        (rows(1, 2, 3, 4), 2, rows(1, 2)),
        (rows(1, 2), 2, rows(1, 2)),
        (rows(1, 2), 0, ""),
        ("", 5, ""),
        (rows(1, 2) + '{"step": 3, "lo', 9, rows(1, 2)),
        (rows(1, 2) + '{"step": 3', 1, rows(1)),
        (rows(1) + "\0\0\0\0", 9, rows(1)),
        (rows(1) + '[1]\n5\n{"loss": 1}\n' + rows(2), 9, rows(1, 2)),
        (
            rows(3, 4) + '{"step": 3, "evaluation": {"accuracy": NaN}}\n',
            3,
            rows(3) + '{"step": 3, "evaluation": {"accuracy": NaN}}\n',
        ),
    ],
)
def test_cut_forgets_later_and_torn_rows(tmp_path: Path, content: str, step: int, left: str) -> None:
    run = create(tmp_path)
    for path in (run.metrics, run.get_events_path(0), run.get_events_path(1)):
        path.write_text(content)
    run.truncate(step)
    for path in (run.metrics, run.get_events_path(0), run.get_events_path(1)):
        assert path.read_text() == left
    assert sorted(p.name for p in (run.path / "events").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]


def test_cut_of_a_run_that_wrote_nothing(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.truncate(3)
    assert not run.metrics.exists()


@pytest.mark.parametrize("row", [b'{"step": 2, "x": "\xe2\x82', b'{"step": null}\n', b'{"step": "x"}\n'])
def test_cut_survives_damage(tmp_path: Path, row: bytes) -> None:
    run = create(tmp_path)
    run.metrics.write_bytes(rows(1).encode() + row)
    run.truncate(3)
    assert run.metrics.read_text() == rows(1)
