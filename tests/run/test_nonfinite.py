"""Non-finite values, injected at ten places: every rank stops in that step, restores the state before it, and names the source."""

import json
import math
from pathlib import Path
from typing import Any

import nonfinite
import pytest
import torch
from launched import Command, rows

from plait import Engine, PlaitError, Plan
from plait.checkpoint.manifest import read_manifest
from plait.cli.main import main
from plait.launch import fork

JOB = str(Path(nonfinite.__file__))
FEW = [
    (
        "data",
        "dp=2",
        {},
        "samples 14, 4, 17, 12, of which 17 have non-finite values themselves (inputs and targets)",
        "rank 1, micro-batch 0",
    ),
    (
        "backward 0",
        "pp=2 microbatches=4",
        {},
        "samples 17, 12",
        "rank 0, micro-batch 3 of 4: the gradient of blocks.0.out.bias",
    ),
    (
        "forward 1",
        "fsdp=2 microbatches=2",
        {},
        "samples 17, 12",
        "rank 1, micro-batch 1 of 2: unit blocks.1 is the first",
    ),
]
"""Place, plan, further job arguments, and the samples and the rank that the message names."""
MORE = [
    ("data", "dp=1", {}, "of which 17 have non-finite values", "rank 0, micro-batch 0 of 1"),
    ("loss", "dp=2 microbatches=2", {}, "samples 17, 12", "rank 1, micro-batch 1 of 2: the loss is nan"),
    ("loss", "dp=2 precision=fp16", {}, "samples 14, 4, 17, 12", "rank 1, micro-batch 0 of 1: the loss is nan"),
    ("forward 0", "pp=2 microbatches=4", {}, "samples 17, 12", "rank 0, micro-batch 3 of 4: unit blocks.0"),
    ("backward 1", "pp=2 microbatches=4 schedule=zb", {}, "samples 17, 12", "rank 1, micro-batch 3 of 4: the gradient of blocks.1"),
    ("backward 0", "dp=2 microbatches=2", {}, "samples 17, 12", "rank 1, micro-batch 1 of 2: the gradient of blocks.0"),
    ("backward 0", "fsdp=2 microbatches=2 activation_checkpointing=full", {}, "samples 17, 12", "rank 1, micro-batch 1 of 2"),
    ("backward 1", "fsdp=2 zero_stage=1 microbatches=2", {}, "samples 17, 12", "rank 1, micro-batch 1 of 2: the gradient of blocks.1"),
    ("forward 1", "tp=2", {}, "samples 20, 3, 11, 9, 14, 4, 17, 12", "ranks 0, 1, micro-batch 0 of 1"),
    ("loss", "cp=2", {}, "samples 20, 3, 11, 9, 14, 4, 17, 12", "ranks 0, 1, micro-batch 0 of 1"),
    ("data", "dp=2 processes=one", {}, "of which 17 have non-finite values", "rank 0, micro-batch 0 of 1"),
    ("data", "dp=2", {"norm": True}, "of which 17 have non-finite values", "rank 1, micro-batch 0 of 1"),
    ("loss", "dp=2 offload=optimizer", {}, "samples 14, 4, 17, 12", "rank 1"),
    ("loss", "pp=2 dp=2 microbatches=2", {"sample": 23, "steps": 30}, "23", "rank"),
]  # fmt: skip


def state(engine: Engine) -> dict[str, torch.Tensor]:
    """All state that a step can change on a rank."""
    found = {name: part.tensor for name, part in engine.rank_model.get_parts().items()}
    for number, held in enumerate(engine.optimizer.state.values()):
        found |= {f"{number} {key}": value for key, value in held.items() if isinstance(value, torch.Tensor)}
    return {name: t.detach().clone() for name, t in found.items()}


def trained(at: str, plan: str, folder: Path, on_nan: str = "stop", **given: Any) -> list[dict[str, Any]]:
    """Per rank: the step in which it stopped, the message, and whether its state equals the state before the step."""

    def rank(place: Any) -> dict[str, Any]:
        engine = Engine(
            nonfinite.job(at, **given), Plan.parse(plan), device="cpu", directory=folder, place=place, on_nan=on_nan
        )
        left: list[int] = []
        try:
            for batch in engine.batches():
                before = state(engine)
                step = engine.step(batch)
                left += [step.step] * step.skipped
        except PlaitError as error:
            after = state(engine)
            same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in after)
            bare = all(p.grad is None for p in engine.rank_model.params.values())
            return {"step": batch.next_position.step, "at": engine.position.step, "text": str(error), "code": error.exit_code,
                    "same": same and bare, "left": left}  # fmt: skip
        whole = all(bool(t.isfinite().all()) for t in state(engine).values())
        return {"step": engine.position.step, "text": "", "left": left, "same": whole}

    return fork.run_ranks(rank, Plan.parse(plan).world, fork.Listener(lambda *_: None))


@pytest.mark.parametrize(
    ("at", "plan", "given", "samples", "who"), [*FEW, *(pytest.param(*row, marks=pytest.mark.prove) for row in MORE)]
)
def test_all_ranks_stop_in_that_step(
    at: str, plan: str, given: dict[str, Any], samples: str, who: str, tmp_path: Path
) -> None:
    found = trained(at, plan, tmp_path, **given)
    assert len({(r["step"], r["at"], r["text"]) for r in found}) == 1, "all ranks alike"
    assert all(r["same"] and r["code"] == 1 and r["at"] == r["step"] - 1 for r in found)
    assert samples in found[0]["text"] and who in found[0]["text"], found[0]["text"]
    assert f"error[N001] step {found[0]['step']}: " in found[0]["text"]


@pytest.mark.parametrize("plan", ("dp=2", pytest.param("pp=2", marks=pytest.mark.prove)))
def test_steps_are_left_out(plan: str, tmp_path: Path) -> None:
    """Sample 17 occurs once in an epoch of three steps. Batch norm's statistics stay finite."""
    found = trained("data", plan, tmp_path, "skip", norm=plan == "dp=2")
    assert all(r["step"] == 12 and r["same"] and not r["text"] for r in found)
    assert all(r["left"] == found[0]["left"] and [(s - 1) // 3 for s in r["left"]] == [0, 1, 2, 3] for r in found)


def test_ten_in_a_row_and_weights_that_an_update_spoilt(tmp_path: Path) -> None:
    found = trained("forward 0", "dp=1", tmp_path, "skip", sample=-1)[0]
    assert (found["step"], found["same"]) == (10, True) and "error[N002]" in found["text"] and "N001" in found["text"]
    for on_nan in ("stop", "skip"):
        found = trained("", "dp=1", tmp_path, on_nan, poison=4)[0]
        assert found["step"] == 5 and "error[N003] weights are not finite after step 4: head.bias" in found["text"]


def test_fp16_lowers_its_scale_first(tmp_path: Path) -> None:
    """An overflow halves the scale and skips the step. At a scale of 1 it is an error, and so is a NaN loss."""
    found = trained("backward 0", "dp=1 precision=fp16", tmp_path, sample=-1, steps=30)[0]
    assert found["left"] == list(range(1, 17)), "65,536 is 2 to the power of 16"
    assert found["step"] == 17 and found["same"] and "the loss scale is 1, the smallest there is" in found["text"]


def test_a_run_stops_saves_and_goes_on(tmp_path: Path) -> None:
    """The state before the bad step is saved. --resume reaches the step again, and --on-nan skip skips it."""
    argv = ("train", JOB, "--nproc", "2", "--job.at", "data", "--save-every", "100", "--job.sample", "23")
    command = Command(*argv, folder=tmp_path)
    assert command.wait() == 1
    done = [row["step"] for row in rows(tmp_path)]
    bad = done[-1] + 1
    saved = f"runs/nonfinite-1/checkpoints/step-{bad - 1:06d}"
    assert (
        f"error[N001] step {bad}: the loss is nan" in command.output and "of which 23 have non-finite values" in command.output
    )
    assert f"the state before it is saved in {saved}" in command.output and "--resume --on-nan skip" in command.output
    assert read_manifest(tmp_path / saved).position.step == bad - 1
    again = Command(*argv, "--resume", folder=tmp_path)
    assert again.wait() == 1 and f"error[N001] step {bad}: " in again.output
    on = Command(*argv, "--resume", "--on-nan", "skip", "--json", folder=tmp_path)
    assert on.wait() == 0, on.output
    assert f"note  left out step {bad}: the loss is nan" in on.output and "4 steps were left out" in on.output
    lines = (tmp_path / "runs/latest/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in lines]
    assert [row["step"] for row in found] == list(range(1, 13))
    assert [(row["loss"] is None, row["skipped"]) for row in found if row["skipped"] or row["loss"] is None] == [
        (True, True)
    ] * 4
    assert json.loads(on.output.splitlines()[-1])["skipped"] == 4


@pytest.mark.parametrize("inner", ("dp=1", "fsdp=2"))
def test_one_replica_group_stops_the_run_or_skips_its_own_step(inner: str, tmp_path: Path) -> None:
    """Its ranks waited for the other groups to save a checkpoint, and those waited for the next outer step: the run hung. Steps that
    another group than the first skipped were not reported."""
    plan = f"replica_groups=2 outer_sync=diloco sync_every=4 {inner}"
    argv = ("train", JOB, "--plan", plan, "--job.at", "data", "--save-every", "2", "--job.sample")
    named, inner_ranks = set[int](), int(inner[-1])
    for sample in ("3", "7"):  # each group reads them in some epoch
        folder = tmp_path / sample
        folder.mkdir()
        command = Command(*argv, sample, folder=folder)
        assert command.wait() == 1, command.output
        assert "error[N001] step " in command.output and f"of which {sample} have non-finite values" in command.output
        assert "is saved in" not in command.output and "--resume --on-nan skip" in command.output
        on = Command(*argv, sample, "--resume", "--on-nan", "skip", "--json", folder=folder)
        assert on.wait() == 0, on.output
        left = on.output.count("note  left out step ")
        assert left == json.loads(on.output.splitlines()[-1])["skipped"] >= 2 and f"{left} steps were left out" in on.output, on.output
        named |= {int(line.partition("rank ")[2][0]) for line in on.output.splitlines() if "have non-finite values themselves" in line}
    assert {rank // inner_ranks for rank in named} == {0, 1}, "ranks are numbered over all groups"


def test_what_an_update_spoils_last_is_not_called_done(tmp_path: Path) -> None:
    """The checkpoints in between are marked, and the last good one is kept."""
    command = Command(
        "train", JOB, "--nproc", "1", "--job.poison", "12", "--save-every", "1", "--keep", "1", folder=tmp_path
    )
    assert command.wait() == 1
    assert "error[N003] weights are not finite after step 12" in command.output
    kept = sorted((tmp_path / "runs/latest/checkpoints").iterdir())
    assert [(path.name, bool(read_manifest(path).nonfinite)) for path in kept] == [
        ("step-000011", False),
        ("step-000012", True),
    ]


def test_verify_says_that_one_device_fails_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{JOB}", "--nproc", "2", "--job.at", "forward 0", "--job.sample", "-1"]) == 1
    assert "error[J011] non-finite values on one device: in step 1" in capfd.readouterr().err


def test_a_choice_that_there_is_not() -> None:
    with pytest.raises(PlaitError, match="U002"):
        Engine(nonfinite.job(), "dp=1", device="cpu", on_nan="warn")
    assert not math.isfinite(trained_ignoring())


def trained_ignoring() -> float:
    """With `ignore` the job trains as in plain PyTorch."""
    engine = Engine(nonfinite.job("data"), "dp=1", device="cpu", on_nan="ignore")
    return [engine.step(batch).loss for batch in engine.batches()][-1]
