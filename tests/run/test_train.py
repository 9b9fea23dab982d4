"""A complete run: its files, its output, and that it listens on no address other than loopback."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from launched import TEST_JOB, Command, rows
from rarely import rarely
from saved import read_checkpoint_tensors

import plait
from plait.randomness.keyed import make_permutation


@pytest.mark.slow
def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--nproc", "2", "--save-every", "10", "--keep", "2", folder=tmp_path)
    assert command.wait() == 0, command.output
    run = tmp_path / "runs" / "latest"
    steps = rows(tmp_path)
    assert [r["step"] for r in steps] == list(range(1, 31))
    assert all(r["ranks"] == 2 and sum(r["samples_by_rank"]) in (8, 1) for r in steps)
    assert steps[4]["samples_by_rank"] == [4, 4] and steps[5]["samples_by_rank"] == [1, 0]  # 41 samples: 5 × 8 + 1
    assert steps[-1]["lr"] == pytest.approx(1e-2 / (1 + (steps[-2]["samples"]) / 100))
    evaluations = [
        json.loads(line)["evaluation"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "evaluation" in line
    ]
    assert len(evaluations) == 3 and evaluations[-1]["error"] > 0
    for name in ("plan.toml", "job.json", "env.json", "events/rank0.jsonl", "events/rank1.jsonl", "logs/rank1.log"):
        assert (run / name).exists(), name
    assert plait.Plan.load(run / "plan.toml") == plait.Plan(dp=2)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000020", "step-000030"]
    spans = {span[0] for span in json.loads((run / "events/rank1.jsonl").read_text().splitlines()[0])["spans"]}
    assert spans == {"data", "forward", "backward", "reduce", "wait dp", "optimizer", "step"}
    assert "done  30 steps" in command.output


def test_same_result_under_every_plan(tmp_path: Path) -> None:
    finals = []
    for number, plan in enumerate(("dp=1", "dp=2", "dp=3 microbatches=2", "dp=2 processes=one")):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = Command("train", TEST_JOB, "--plan", plan, "--workers", str(number % 2), folder=folder)
        assert command.wait() == 0, command.output
        finals.append(read_checkpoint_tensors(folder / "runs/latest/checkpoints/step-000030"))
    for final in finals[1:]:
        for name, tensor in finals[0].items():
            assert float((final[name] - tensor).abs().max()) < 1e-12, name


@pytest.mark.slow
def test_nothing_listens_but_loopback(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--nproc", "3", "--job.pause", "0.05", folder=tmp_path)
    command.until(lambda: len(rows(tmp_path)) >= 3)
    pids = {command.pid, *command.workers()}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    assert listening and all(c.laddr.ip == "127.0.0.1" for c in listening), listening
    assert command.wait() == 0


@pytest.mark.slow
def test_plain_lines_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cli.console.LINE_INTERVAL_S", 0.2)
    command = Command("train", TEST_JOB, "--nproc", "2", "--job.pause", "0.03", "--json", folder=tmp_path)
    assert command.wait() == 0
    lines = [line for line in command.output.splitlines() if " step=" in line]
    assert lines and all(
        f"{key}=" in lines[0] for key in ("loss", "samples/s", "share", "mem_gib", "comm", "data", "eta_s")
    )
    summary = json.loads(next(line for line in command.output.splitlines() if line.startswith("{")))
    assert summary["step"] == 30 and summary["stopped"] is False


@pytest.mark.slow
def test_warnings_are_collapsed_and_logs_complete(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--nproc", "2", "--job.loud", "true", "--job.pause", "0.02", folder=tmp_path)
    assert command.wait() == 0
    shown = [line for line in command.output.splitlines() if "a sample was read" in line]
    assert len(shown) == 1 and shown[0].startswith("[ranks 0-1] UserWarning: a sample was read"), command.output
    assert "a sample was read" in (tmp_path / "runs/latest/logs/rank1.log").read_text()


def test_tensorboard_mirror(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--steps", "3", "--tracker", "tensorboard", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert list((tmp_path / "runs/latest/tensorboard").glob("events.out.*"))


def test_learning_rate_is_scaled_only_on_request(tmp_path: Path) -> None:
    quiet = Command("train", TEST_JOB, "--steps", "2", "--batch", "16", folder=tmp_path)
    assert quiet.wait() == 0 and "learning rate unchanged" in quiet.output and rows(tmp_path)[0]["lr"] == 1e-2
    loud = Command("train", TEST_JOB, "--steps", "2", "--batch", "16", "--scale-lr", "linear", folder=tmp_path)
    assert (
        loud.wait() == 0
        and "learning rate × 2  (linear: batch 8 → 16, 2)" in loud.output
        and rows(tmp_path)[0]["lr"] == 2e-2
    )


def test_ledger_of_samples(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--nproc", "2", "--steps", "12", folder=tmp_path)
    assert command.wait() == 0
    used = ledger(tmp_path / "runs" / "latest")
    assert sorted(used[0]) == list(range(41)) and sorted(used[1]) == list(range(41))


def ledger(run: Path, length: int = 41) -> dict[int, list[int]]:
    """Sample ids used per epoch, from a run's events."""
    used: dict[int, list[int]] = {}
    for line in (run / "events/rank0.jsonl").read_text().splitlines():
        row = json.loads(line)
        order = make_permutation(5, row["epoch"], length)
        used.setdefault(row["epoch"], []).extend(order[row["start"] : row["start"] + row["size"]].tolist())
    return used


@pytest.mark.slow
@pytest.mark.parametrize("script", ["-m plait train {job} --steps 5", *rarely("{loop}")])
def test_joins_torchrun(tmp_path: Path, script: str) -> None:
    root = Path(__file__).parents[2]
    words = script.format(job=TEST_JOB, loop=root / "examples/own_loop/train.py").split()
    torchrun = root / ".venv/bin/torchrun"
    import sys

    start = [str(torchrun)] if torchrun.exists() else [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*start, "--standalone", "--nproc-per-node", "2", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "plait" in words:
        assert "done  5 steps" in done.stdout and rows(tmp_path)[-1]["ranks"] == 2
    else:
        assert "step 100" in done.stdout and "ranks 2" in done.stdout


SLOW = """
import time, torch, torch.distributed.distributed_c10d as dist, plait
from torch.nn import functional as F

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.03)
        return torch.ones(4), torch.ones(1)

def job():
    return plait.Job(model=lambda: torch.nn.Linear(4, 1), loss=F.mse_loss, data=Data, batch=4, steps=60,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""


@pytest.mark.slow
def test_a_slow_loader_is_named_and_not_taken_for_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.cli.console.LINE_INTERVAL_S", 0.0)
    (tmp_path / "slow.py").write_text(SLOW)
    command = Command("train", "slow.py", "--nproc", "2", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert (
        "note  rank 1 waits " in command.output
        and "as long for its samples as the median rank for 50 steps" in command.output
    )
    assert all(row["data_by_rank"][1] >= 0.06 > row["data_by_rank"][0] for row in rows(tmp_path)[5:10])
    last = [line for line in command.output.splitlines() if " step=" in line][-1]
    told = dict(word.split("=") for word in last.split()[1:])
    assert told["data_rank"] == "1" and float(told["data"]) > 0.3 and float(told["comm"]) < float(told["data"]), last


def test_a_complete_run_has_nothing_to_resume(tmp_path: Path) -> None:
    argv = ("train", TEST_JOB, "--job.steps", "3")
    first = Command(*argv, folder=tmp_path)
    assert first.wait() == 0, first.output
    again = Command(*argv, "--resume", "--json", folder=tmp_path)
    assert again.wait() == 0, again.output
    assert "complete at step 3: nothing was left to do · continue with --resume --steps 6" in again.output
    assert "none" not in again.output and "done" not in again.output
    assert json.loads(again.output.splitlines()[-1])["checkpoint"].endswith("step-000003")
