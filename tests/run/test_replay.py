"""`plait replay`: a replayed step equals the run's step on any layout, and the cause of a bad step is named."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from launched import Command

from plait.cli.main import main
from plait.cli.replay import describe_coupling, find_first_outlier
from plait.data.batch import Batch
from plait.engine.engine import Engine
from plait.engine.step import Step

JOB = str(Path(__file__).parents[1] / "jobs_replayed.py")
PLANS = ("dp=2 tp=2", "pp=2 dp=2 microbatches=2 activation_checkpointing=full", "fsdp=2 tp=2 microbatches=2 activation_checkpointing=full")


def trained(folder: Path, plan: str, *words: str, code: int = 0) -> Path:
    """A run of 8 steps with a checkpoint every three steps."""
    command = Command("train", JOB, "--plan", plan, "--steps", "8", "--save-every", "3", "--check", "none", *words, folder=folder)
    assert command.wait(240.0) == code, command.output
    return (folder / "runs" / "latest").resolve()


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code = main(["replay", *words, "--json"])
    out = capsys.readouterr()
    assert code == 0, out
    return json.loads(out.out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("replay"), "dp=2")


def is_running(command: Command) -> bool:
    return os.waitpid(command.pid, os.WNOHANG) == (0, 0)


def contents(run: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("double, limit", [("True", 1e-9), ("False", 1e-5)])
def test_a_step_of_any_layout_is_that_of_the_log(
    plan: str, double: str, limit: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, plan, f"--job.double={double}")
    for step, under in ((2, "dp=1"), (8, "tp=2")):
        found = replayed(capsys, str(run), "--step", str(step), "--plan", under)
        assert (found["from"], found["size"], len(found["samples"])) == (0 if step == 2 else 6, 16, 16)
        for name in ("loss", "norm"):
            assert found[name] == pytest.approx(found["logged"][name], rel=limit, abs=0)
        mean = sum(row["loss"] for row in found["samples"]) / 16
        assert mean == pytest.approx(found["loss"], rel=limit) and not found["notes"]


def test_samples_are_ranked_alike_under_any_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = replayed(capsys, str(run), "--step", "5")["samples"]
    split = replayed(capsys, str(run), "--step", "5", "--plan", "pp=2 dp=2 microbatches=2")["samples"]
    for one, other in zip(alone, split, strict=True):
        assert one == {name: pytest.approx(value, rel=1e-9) for name, value in other.items()}
    assert main(["replay", str(run), "--step", "5", "--top", "2"]) == 0
    text = capsys.readouterr().out
    first = max(alone, key=lambda row: row["loss"])["sample"]
    assert f"sample {first} " in text and text.count("sample ") == 4, "two ranks in two columns"


@pytest.mark.parametrize(
    "words, code, first",
    [
        (["--job.spoiled=nan"], 1, "the inputs"),
        (["--job.spoiled=targets"], 0, "the targets"),
        (["--job.spoiled=module", "--job.bad=nan"], 1, "2"),
        (["--job.spoiled=module", "--job.bad=1000"], 0, "2"),
    ],
)
def test_what_spoils_a_step_is_named(
    words: list[str], code: int, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "dp=2", *words, code=code)
    found = replayed(capsys, str(run), "--step", "3", "--bisect")
    assert (found["logged"] is None) == bool(code), "a step that is not finite ends the run before it is logged"
    assert found["first_module"]["module"] == first and found["first_module"]["samples"] == [42]
    worst = [row["sample"] for row in found["samples"] if row["loss"] is None or row["loss"] > 1000]
    assert worst == ([42] if code or first == "the targets" else [])


def test_the_run_is_only_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-000006.tmp-1234").mkdir()  # of a save that is in progress, or was killed
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "loss": 0.')  # torn by a kill
    before = contents(run)
    assert replayed(capsys, str(run), "--step", "7")["from"] == 6
    assert contents(run) == before


def test_a_run_that_trains_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = str(Path(__file__).parents[1] / "training.py")
    words = ("--plan", "dp=2", "--steps", "400", "--job.pause", "0.2", "--check", "none")
    command = Command("train", training, *words, folder=tmp_path)
    metrics = tmp_path / "runs" / "training-1" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert is_running(command), command.output
    found = replayed(capsys, str(tmp_path / "runs" / "training-1"), "--step", "2")
    assert found["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-9) and is_running(command)
    command.kill()


def test_a_replay_that_is_asked_to_stop_says_so(run: Path, tmp_path: Path) -> None:
    def host() -> None:
        step = Engine.step

        def asking(engine: Engine, batch: Batch) -> Step:
            os.kill(os.getppid(), signal.SIGTERM)
            while not engine.place.is_stopping():
                time.sleep(0.01)
            return step(engine, batch)

        Engine.step = asking  # pyrefly: ignore[bad-assignment]

    command = Command("replay", str(run), "--step", "3", folder=tmp_path, host=host)
    assert command.wait(120.0) == 2 and "C007" in command.output and "after 1 of 2 steps before step 3" in command.output, command.output


def test_checkpoints_that_are_damaged_or_gone_are_passed_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy-1"
    shutil.copytree(run, copy, symlinks=True)
    for file in (copy / "checkpoints" / "step-000006").glob("model-*"):
        file.write_bytes(file.read_bytes()[:-9])
    found = replayed(capsys, str(copy), "--step", "8")
    assert found["from"] == 3 and "step-000006" in found["notes"][0]
    assert found["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-9)
    for file in (copy / "checkpoints" / "step-000003").glob("model-*"):
        os.remove(file)
    found = replayed(capsys, str(copy), "--step", "8")
    assert found["from"] == 0 and found["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-9)


def test_a_changed_job_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy-1"
    shutil.copytree(run, copy, symlinks=True)
    job = tmp_path / "jobs_replayed.py"
    job.write_text(Path(JOB).read_text().replace("lr: float = 1e-2", "lr: float = 2e-2").replace("tanh()", "sin()"))
    told = json.loads((copy / "job.json").read_text()) | {"job": str(job)}
    told["command"] = [word.replace(JOB, str(job)) for word in told["command"]]
    (copy / "job.json").write_text(json.dumps(told))
    (copy / "env.json").write_text(json.dumps({"plait": "0.0.1"}))
    for step in ("2", "8"):  # from the seed, and from a checkpoint
        assert main(["replay", str(copy), "--step", step]) == 2
        text = capsys.readouterr().err
        assert "R011" in text and "lr 0.01 → 0.02" in text and "compared samples differ" in text
    found = replayed(capsys, str(copy), "--step", "8", "--allow-changes")
    assert found["loss"] != found["logged"]["loss"]
    assert "0.0.1" in found["notes"][0] and any("lr 0.01 → 0.02" in note for note in found["notes"])


@pytest.mark.parametrize(
    "words, code, why",
    [
        (["--step", "10"], "R010", "the last step in its metrics.jsonl is 8"),
        (["--step", "0"], "U002", "--step 0"),
        (["--step", "2", "--plan", "dp=2 tp=x"], "T", ""),
        (["--step", "2", "--plan", "replica_groups=2 sync_every=2"], "R012", "different weights"),
        (["--step", "2", "--plan", "compile=true", "--bisect"], "U002", "compiled units"),
    ],
)
def test_what_cannot_be_replayed(words: list[str], code: str, why: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), *words]) == 2
    text = capsys.readouterr().err
    assert f"error[{code}" in text and why in text and "Traceback" not in text


def test_a_run_without_a_job_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy-1"
    shutil.copytree(run, copy, symlinks=True)
    for content in ("", '{"job": "waves", "arguments": {}}'):
        (copy / "job.json").write_text(content)
        assert main(["replay", str(copy), "--step", "2"]) == 2
        assert "error[R012]" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "2"]) == 2
    assert "error[R003]" in capsys.readouterr().err


def test_batch_statistics_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "dp=1", "--job.norm=True")
    found = replayed(capsys, str(run), "--step", "4")
    assert found["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-9) and "batch statistics" in found["notes"][0]


def test_a_module_is_compared_with_the_step_before() -> None:
    samples = [{"place": i, "sample": 10 + i, "weight": 1.0, "loss": 1.0, "norm": 1.0} for i in range(5)]
    found = {"samples": samples, "gradients": {}, "before": {"a": 1.0, "b": 1.0}, "loss": 1.0}
    usual = {i: 1.0 + 0.1 * i for i in range(5)}
    assert find_first_outlier(found | {"sizes": {"a": usual, "b": usual}}) is None
    first = find_first_outlier(found | {"sizes": {"a": usual, "b": dict.fromkeys(usual, 20.0)}})
    assert first is not None and (first["module"], first["samples"]) == ("b", [10, 11, 12, 13, 14])
    first = find_first_outlier(found | {"sizes": {"a": usual, "b": usual | {3: 50.0}}})
    assert first is not None and (first["module"], first["samples"]) == ("b", [13])
    assert not describe_coupling(found) and describe_coupling(found | {"loss": 2.0})


def test_a_run_that_was_resumed_with_another_rate_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "dp=2", "--steps=4")
    run = trained(tmp_path, "dp=1", "--steps=8", "--resume", "--job.lr=0.02")
    for step in (3, 7):
        found = replayed(capsys, str(run), "--step", str(step))
        assert (found["loss"], found["lr"]) == pytest.approx((found["logged"]["loss"], found["logged"]["lr"]), rel=1e-9)
    assert len(found["samples"]) == 16


def test_a_step_with_phases_has_no_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(Path(__file__).parents[1] / "jobs_phased.py") + ":wgan_gp"
    command = Command("train", job, "--plan", "dp=2", "--steps", "4", "--check", "none", folder=tmp_path)
    assert command.wait(120.0) == 0, command.output
    found = replayed(capsys, str(tmp_path / "runs" / "latest"), "--step", "3", "--bisect")
    for name, row in found["logged"]["phases"].items():
        assert found["phases"][name]["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert "not ranked" in found["notes"][0] and "first_module" not in found
