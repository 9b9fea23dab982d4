"""A job with phases is trained, killed and resumed under other layouts, and ends with the result of an uninterrupted run."""

import json
from pathlib import Path

import pytest
from launched import Command, rows
from rarely import rarely
from saved import read_checkpoint_tensors

JOB = str(Path(__file__).parents[1] / "jobs_phased.py") + ":resumed"
STEPS = 15
ARGV = ("train", JOB, "--save-every", "3", "--check", "none")


def end(folder: Path):
    return read_checkpoint_tensors(folder / f"runs/latest/checkpoints/step-{STEPS:06d}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    command = Command(*ARGV, "--plan", "dp=1", folder=folder)
    assert command.wait() == 0, command.output
    return folder


def test_rows_tell_of_every_phase(whole: Path) -> None:
    found = rows(whole)
    assert [sorted(row["phases"]) for row in found] == [["critic"], ["critic"], ["critic", "generator"]] * (STEPS // 3)
    for row in found:
        assert {k: row[k] for k in ("loss", "norm", "lr")} == row["phases"]["critic"], json.dumps(row)
    assert {row["phases"]["generator"]["lr"] for row in found if "generator" in row["phases"]} == {0.005}


@pytest.mark.parametrize(
    "plans", [("dp=2", "fsdp=2"), *rarely((("tp=2", "dp=2 microbatches=2"),), (("fsdp=2 zero_stage=1", "tp=2"),))]
)
def test_resumed_under_another_plan(plans: tuple[str, str], whole: Path, tmp_path: Path) -> None:
    first = Command(*ARGV, "--plan", plans[0], "--steps", "8", folder=tmp_path)
    assert first.wait() == 0, first.output
    assert sorted(rows(tmp_path)[-1]["phases"]) == ["critic"]
    second = Command(*ARGV, "--plan", plans[1], "--resume", folder=tmp_path)
    assert second.wait() == 0, second.output
    expected, found = end(whole), end(tmp_path)
    assert expected.keys() == found.keys()
    assert {"optimizer/critic.0.weight/exp_avg", "optimizer/generator.0.weight/exp_avg"} <= expected.keys()
    for name, tensor in expected.items():
        assert float((found[name].double() - tensor.double()).abs().max()) <= 1e-12, name
