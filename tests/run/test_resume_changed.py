"""Resume by name, and resume of a changed job: nothing is ignored or overwritten, and ambiguous requests are rejected."""

import json
import shutil
from pathlib import Path
from typing import Any

import changing
import pytest
import torch
from launched import Command, rows
from rarely import sampled
from saved import manifest, read_checkpoint_tensors

from plait import Engine, PlaitError
from plait.checkpoint.manifest import MANIFEST_NAME, seal_json, unseal_json
from plait.cli.main import main
from run.test_checkpoint_hostile import changes

JOB = str(Path(changing.__file__))
ARGV = ("train", JOB, "--nproc", "1", "--save-every", "2")


def plait(folder: Path, *words: str, code: int = 0) -> str:
    command = Command(*ARGV, *words, folder=folder)
    assert command.wait() == code, command.output
    assert "Traceback" not in command.output
    return command.output


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps with 8 of 40 samples: it stopped in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("begun")
    plait(folder)
    return folder


@pytest.fixture
def runs(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path


def told(output: str) -> set[str]:
    return {line.removeprefix("changed  ") for line in output.splitlines() if line.startswith("changed  ")}


@pytest.mark.slow
def test_a_changed_learning_rate_is_honoured_and_told(runs: Path) -> None:
    said = plait(runs, "--resume", "--steps", "8", "--job.lr", "0.001", "--job.decay", "0.25")
    assert {"lr 0.01 → 0.001", "weight_decay 0.0 → 0.25", "steps 6 → 8"} <= told(said), said
    assert not {line for line in told(said) if line.startswith(("loss", "schedule", "model", "data", "clip", "batch"))}
    rates = [r["lr"] * (1 + (r["samples"] - 8) / 100) for r in rows(runs)]
    assert rates == pytest.approx([0.01] * 6 + [0.001] * 2)
    group = manifest(runs / "runs/latest/checkpoints/step-000008").optimizer.groups[0]
    assert group["initial_lr"] == 0.001 and group["weight_decay"] == 0.25
    assert "lr" not in str(told(plait(runs, "--resume", "--steps", "9", "--job.lr", "0.001", "--job.decay", "0.25")))


def test_each_group_has_its_own(tmp_path: Path) -> None:
    plait(tmp_path, "--job.optimizer", "groups")
    said = plait(tmp_path, "--job.optimizer", "groups", "--resume", "--steps", "7", "--job.decay", "0.5")
    assert "weight_decay 0.0 → 0.5 (1 of 2 groups)" in told(said), said
    groups = manifest(tmp_path / "runs/latest/checkpoints/step-000007").optimizer.groups
    assert [g["weight_decay"] for g in groups] == [0.01, 0.5] and groups[0]["initial_lr"] == 0.02


def test_nothing_changed_says_nothing(runs: Path) -> None:
    said = plait(runs, "--resume", "--steps", "8")
    assert told(said) == {"steps 6 → 8"}, said
    assert "complete at step 8" in plait(runs, "--resume", "--steps", "8")


CHANGED = (
    (("--job.batch", "4"), "batch 8 → 4"),
    (("--job.clip", "0.5"), "clip 1.0 → 0.5"),
    (("--job.power", "3.0"), "loss: power 2.0 → 3.0"),
    (("--job.warmup", "50"), "schedule: warmup 100 → 50"),
    (("--job.warmup", "50"), "schedule: the factor after 48 samples 0.675676 → 0.510204"),
    (("--job.dropout", "0.5"), "model: Dropout.p 0.0 → 0.5"),
    (("--job.shift", "1.0"), "data: 5 of 5 compared samples differ: 0, 39, 20, 10, 30"),
    (("--job.dropout", "0.5"), "--job.dropout (the job's own) → 0.5"),
    (("--plan", "precision=bf16"), "precision fp32 → bf16"),
)


@pytest.fixture(scope="module")
def engines() -> dict[Any, Any]:
    return {}


@pytest.mark.parametrize(("words", "line"), sampled(2, CHANGED), ids=lambda v: v if isinstance(v, str) else "")
def test_what_changed_is_told_by_name(runs: Path, words: tuple[str, ...], line: str) -> None:
    assert line in told(said := plait(runs, "--resume", "--steps", "7", *words)), said


@pytest.mark.parametrize(
    ("words", "line"),
    ((("--job.seed", "2"), "seed 1 → 2"), (("--job.length", "45"), "data: length 40 → 45"), (("--job.length", "4"), "length 40 → 4")),
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(runs: Path, words: tuple[str, ...], line: str) -> None:
    before = {p: p.read_bytes() for p in (runs / "runs").rglob("*") if p.is_file() and "log" not in p.name}
    said = plait(runs, "--resume", "--steps", "8", *words, code=2)
    assert "error[K010]" in said and line in said and "--allow-changes" in said
    assert {p: p.read_bytes() for p in before} == before, "a refused start changes nothing"
    assert line in str(told(plait(runs, "--resume", "--steps", "8", "--allow-changes", *words)))
    assert [r["step"] for r in rows(runs)] == list(range(1, 9))


def test_longer_data_at_the_end_of_an_epoch_is_meant(tmp_path: Path) -> None:
    plait(tmp_path, "--steps", "5")
    assert "data: length 40 → 45" in told(plait(tmp_path, "--resume", "--steps", "7", "--job.length", "45"))


def test_data_that_draws_numbers_is_not_said_to_have_changed(tmp_path: Path) -> None:
    plait(tmp_path, "--job.noise", "true")
    assert told(plait(tmp_path, "--job.noise", "true", "--resume", "--steps", "8")) == {"steps 6 → 8"}


def test_a_checkpoint_without_a_fingerprint_is_resumed(runs: Path) -> None:
    for path in runs.glob("runs/changing-1/checkpoints/*/manifest.json"):
        content = unseal_json(path.read_bytes())
        del content["job"]
        path.write_bytes(seal_json(content))
    assert told(plait(runs, "--resume", "--steps", "8", "--job.lr", "0.5")) == {"lr 0.01 → 0.5"}


@pytest.mark.slow
def test_a_run_by_name(runs: Path) -> None:
    plait(runs, "--steps", "2")
    for name in ("changing-1", "runs/changing-1", str(runs / "runs/changing-1"), "changing-1/checkpoints"):
        assert "resumed from runs/changing-1/checkpoints/step-000006" in plait(runs, "--resume", name).replace(
            f"{runs}/", ""
        )
        assert (runs / "runs/latest").resolve().name == "changing-1"
    assert "changing-2/checkpoints/step-000002" in plait(runs, "--resume")
    for name, words in (
        ("chnaging-1", "did you mean  changing-1 ?"),
        ("changing-1/checkpoints/step-000003", "it has step-000002, step-000004, step-000006"),
        ("x" * 5000, "there is no run"),
        (JOB + "x", "there is no run"),
        ("runs", "neither a run nor a checkpoint"),
        ("/dev/zero", "neither a run nor a checkpoint"),
    ):
        said = plait(runs, "--resume", name, code=2)
        assert "error[K001]" in said and words in said, said
    (runs / "runs/changing-7/checkpoints").mkdir(parents=True)
    assert "has no checkpoint" in plait(runs, "--resume", "changing-7", code=2)


def test_the_job_after_resume_is_the_job(runs: Path) -> None:
    command = Command("train", "--resume", JOB, "--nproc", "1", folder=runs)
    assert command.wait() == 0 and "resumed from" in command.output


@pytest.mark.slow
def test_an_older_checkpoint_starts_a_new_run(runs: Path) -> None:
    first = {p: p.read_bytes() for p in (runs / "runs/changing-1").rglob("*") if p.is_file()}
    said = plait(runs, "--resume", "runs/changing-1/checkpoints/step-000002")
    assert "changing-2 starts from" in said and "later checkpoints, which are kept" in said and "at step 2" in said
    assert {p: p.read_bytes() for p in first} == first
    assert [r["step"] for r in rows(runs)] == list(range(1, 7))
    again, before = (runs / f"runs/changing-{n}/checkpoints/step-000006" for n in (2, 1))
    a, b = read_checkpoint_tensors(again), read_checkpoint_tensors(before)
    assert all(torch.equal(a[k], b[k]) for k in b), "and ends where the first ended"
    assert "resumed from" in plait(runs, "--resume", "changing-1/checkpoints/step-000006")
    assert not (runs / "runs/changing-3").exists(), "the newest goes on in its run"
    shutil.copytree(before, runs / "elsewhere/step-000006")
    assert "changing-3" in plait(runs, "--resume", "elsewhere/step-000006", "--steps", "7")
    (runs / "elsewhere/step-000006" / MANIFEST_NAME).write_text("{}")
    assert "error[K002]" in plait(runs, "--resume", "elsewhere/step-000006", code=2)
    assert not (runs / "runs/changing-4").exists()


@pytest.mark.parametrize("words", (("--job.fail", "model"), ("--weights", "x"), ("--job.optimizer", "objects")))
def test_a_failed_start_leaves_nothing(runs: Path, words: tuple[str, ...]) -> None:
    code = 1 if "model" in words else 2
    kept = ["failed-start"] if "model" in words else []
    said = plait(runs, *words, code=code)
    assert sorted(p.name for p in (runs / "runs").iterdir()) == ["changing-1", *kept, "latest"]
    assert not kept or "no model today" in (runs / "runs/failed-start/rank0.log").read_text()
    assert not kept or "the ranks' output is in runs/failed-start" in said
    assert (runs / "runs/latest").resolve().name == "changing-1"
    shutil.rmtree(runs / "runs")
    plait(runs, *words, code=code)
    assert not (runs / "runs").exists() or sorted(p.name for p in (runs / "runs").iterdir()) == kept


@pytest.mark.parametrize(("optimizer", "code"), (("outside", "K011"), ("objects", "K005"), ("both", ""), ("counting", "")))
def test_an_optimizer_that_would_be_lost_is_refused(tmp_path: Path, optimizer: str, code: str) -> None:
    said = plait(tmp_path, "--job.optimizer", optimizer, code=2 if code else 0)
    if code:
        assert f"error[{code}]" in said and ("moving" in said or optimizer != "outside"), said
        engine = Engine(changing.job(optimizer=optimizer), "dp=1", device="cpu", directory=tmp_path)
        with pytest.raises(PlaitError):
            engine.save()
        return
    whole = read_checkpoint_tensors(tmp_path / "runs/latest/checkpoints/step-000006")
    plait(tmp_path, "--job.optimizer", optimizer, "--resume", "runs/changing-1/checkpoints/step-000004")
    again = read_checkpoint_tensors(tmp_path / "runs/changing-2/checkpoints/step-000006")
    assert all(torch.equal(whole[k], again[k]) for k in whole) and any(k.endswith("momentum_buffer") for k in whole)


def believed(folder: Path) -> tuple[int, int]:
    """Replaces each part of a manifest's values: rejected by name, or resumed with one further step. Returns (rejected, resumed)."""
    newest = folder / "runs/changing-1/checkpoints/step-000006"
    content = unseal_json((newest / MANIFEST_NAME).read_bytes())
    engine = Engine(changing.job(steps=100), "dp=1", device="cpu", directory=newest.parent)
    for other in newest.parent.glob("step-00000[24]"):
        shutil.rmtree(other)
    parts = {key: content[key] for key in ("optimizer", "position", "job", "seed", "batch", "scaler")}
    counts = [0, 0]
    for changed in changes(parts):
        if not isinstance(changed, dict):
            continue
        (newest / MANIFEST_NAME).write_bytes(seal_json({**content, **changed} if changed.keys() >= parts.keys() else changed))
        try:
            engine.resume(allow_changes=True)
            engine.step(next(engine.batches()))
            counts[1] += 1
        except PlaitError as error:
            assert {c[0] for c in error.codes} <= {"K", "N", "J"}, error
            counts[0] += 1
    return counts[0], counts[1]


@pytest.mark.prove
def test_forged_numbers_never_end_in_a_traceback(runs: Path) -> None:
    refused, resumed = believed(runs)
    assert refused > 200 and resumed > 5, (refused, resumed)


@pytest.mark.parametrize(
    ("key", "value"),
    (("lr", "x"), ("lr", float("nan")), ("betas", [-5.0, 2.0]), ("betas", [0.9]), ("betas", None), ("eps", []), ("lr", 10**400),
     ("step", "x"), ("step", -3.0), ("step", None), ("step", True)),
)  # fmt: skip
def test_a_forged_number_is_refused_by_name(runs: Path, key: str, value: Any, capfd: Any) -> None:
    newest = runs / "runs/changing-1/checkpoints/step-000006"
    content = unseal_json((newest / MANIFEST_NAME).read_bytes())
    if key == "step":
        for name in content["optimizer"]["scalars"]:
            content["optimizer"]["scalars"][name] = value
    else:
        content["optimizer"]["groups"][0][key] = value
    (newest / MANIFEST_NAME).write_bytes(seal_json(json.loads(json.dumps(content))))
    for older in newest.parent.glob("step-00000[24]"):
        shutil.rmtree(older)
    engine = Engine(changing.job(), "dp=1", device="cpu", directory=newest.parent)
    with pytest.raises(PlaitError) as caught:
        engine.resume()
    assert caught.value.codes[0] in ("K002", "K003"), str(caught.value)
    assert main(["checkpoint", "list", str(newest)]) == 0 and main(["checkpoint", "info", str(newest)]) in (0, 2)


@pytest.mark.parametrize("name", ("metrics.jsonl", "logs/rank0.log", "job.json", "lock", "events/rank0.jsonl"))
def test_a_run_that_cannot_be_written_is_told(runs: Path, name: str) -> None:
    victim = runs / "runs/changing-1" / name
    victim.unlink(missing_ok=True)
    victim.mkdir()
    said = plait(runs, "--resume", "--steps", "7", code=2)
    assert "error[R007]" in said and name in said, said
