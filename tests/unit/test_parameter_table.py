"""`plait plan --show parameters`: each rank's part of each parameter, and how its gradient is reduced and why."""

import json
from dataclasses import replace
from pathlib import Path

import jobs_moe
import jobs_real
import pytest
import torch

from plait.cli.main import main
from plait.cli.plan_tables import build_parameter_table, format_parameters
from plait.config.plan import Plan

GPT = str(Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "job.py")


def test_slices_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", GPT, "--plan", "dp=2 tp=2", "--show", "parameters", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["blocks.0-3.out.weight"] == {
        "name": "blocks.0-3.out.weight", "count": 4, "shape": [128, 128], "dtype": "float32", "trainable": True,
        "on_ranks": [[128, 64]], "ranks": 4, "split": ["dim 1 by tp"], "gradient": ["sum over dp"], "updated_by": [],
    }  # fmt: skip
    assert rows["norm.weight"]["gradient"] == ["sum over dp", "sum over tp"] and rows["norm.weight"]["split"] == []
    assert sum(row["count"] for row in rows.values()) == 52 and found["fullest"] == found["emptiest"]
    assert {"sum over dp", "sum over tp"} == found["why"].keys()
    assert main(["plan", GPT, "--plan", "dp=2 tp=2", "--show", "parameters"]) == 0
    said = capsys.readouterr().out
    assert "blocks.0-3.out.weight        4  128 × 128  128 × 64 " in said and "842k parameters, 1.64 MiB on each rank" in said


def test_stages_experts_owners_and_what_is_frozen() -> None:
    tied = format_parameters(build_parameter_table(jobs_real.gpt2(), Plan.parse("pp=2 microbatches=2")), "job.py")
    assert "sum over pp of 0–1: several stages use it, and each has a part of its gradient" in tied
    experts = build_parameter_table(jobs_moe.gpt(stacked=True), Plan.parse("fsdp=4 ep=2"))
    of_experts = [row for row in experts.rows if any("ep" in one.split()[-1:] for one in row.split)]
    assert of_experts and all(row.gradient[0] == "scatter over efsdp" and len(row.split) == 2 for row in of_experts)
    job = jobs_real.gpt()
    muon = replace(job, optimizer=lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2))
    owners = [[row.updated_by for row in build_parameter_table(one, Plan.parse("fsdp=2")).rows] for one in (muon, job)]
    assert any(owners[0]) and not any(owners[1])

    def model() -> torch.nn.Module:
        made = job.model()
        for parameter in made.blocks[0].parameters():
            parameter.requires_grad_(False)
        return made

    frozen = build_parameter_table(replace(job, model=model), Plan.parse("dp=2"))
    assert any(not row.trainable and row.gradient == () for row in frozen.rows) and " frozen" in format_parameters(frozen, "job.py")
