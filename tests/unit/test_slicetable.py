"""`plait plan --show tensor`: the tensors that a plan slices, one line for layers of the same form, and why the rest is not sliced."""

import json
from dataclasses import replace
from pathlib import Path

import jobs
import jobs_pipeline
import jobs_real
import pytest
from jobs_unlike import Chain
from torch import nn

from plait.cli.main import main
from plait.cli.plan_tables import TensorTable, _join_names, build_tensor_table, describe_slice, format_tensor_table
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.sketch_table import generalize_name, label_names

LLAMA = str(Path(__file__).parents[2] / "examples" / "llama" / "job.py")


def of(job: object, plan: str = "tp=2") -> TensorTable:
    return build_tensor_table(job(), Plan.parse(plan))  # type: ignore[operator]


def test_blocks_of_the_same_form_are_one_line() -> None:
    found = of(jobs_real.llama, "tp=4")
    attention, mlp = found.pairs
    assert (attention.block, attention.kind, attention.count) == ("model.layers.0-2.self_attn", "LlamaAttention", 3)
    assert (attention.columns, attention.row) == (("q_proj", "k_proj", "v_proj"), "o_proj")
    assert attention.how == ("q_proj contiguous", "k_proj, v_proj contiguous, heads shared by 2 ranks")
    assert mlp.count == 3 and mlp.how == ("contiguous",) and mlp.parameters == 3 * 3 * 16 * 24
    assert [t.name for t in found.vocabulary] == ["model.embed_tokens", "lm_head"]
    assert found.vocabulary[0].rows == (8, 8, 8, 7)
    assert not found.whole and found.parameters > 2 * found.held


def test_parts_sizes_and_sums() -> None:
    attention, mlp = of(jobs_real.gpt).pairs
    assert attention.how == ("inside 3 parts", "sizes in the code adapted") and attention.summed == ("out.bias",)
    assert (mlp.columns, mlp.row, mlp.count) == (("0",), "2", 3)
    packed = of(jobs.attention).pairs[1]
    assert (packed.columns, packed.how, packed.changed) == (("itself",), ("inside 3 parts",), ("num_heads 2 → 1",))
    assert of(jobs_pipeline.gpt2).pairs[0].changed == ("split_size 16 → 8",)


@pytest.mark.slow
def test_what_stays_whole_is_named_with_its_reason() -> None:
    found = of(jobs_pipeline.t5)
    whole = {row.name: row for row in found.whole}
    first = whole["encoder.block.0.layer.0.SelfAttention.q, k, v, o"]
    assert first.count == 4 and "relative_attention_bias.weight is used both between the layers" in first.reason
    assert [row.share for row in found.whole] == sorted((row.share for row in found.whole), reverse=True)
    assert any("position_bias" in how for pair in found.pairs for how in pair.how)


def test_a_model_with_nothing_to_cut() -> None:
    job = lambda: replace(jobs.mlp(), model=lambda: nn.Linear(6, 1))  # noqa: E731
    found = of(job)
    assert not found.pairs and found.held == found.parameters
    assert "no layer can be sharded" in format_tensor_table(found, "j") and "the model" in format_tensor_table(found, "j")


def test_what_the_job_wants() -> None:
    """The job's own choice replaces the detected one."""
    job = lambda: jobs.make(Chain, tensor={"blocks.1.up": "whole"})  # noqa: E731
    found = of(job)
    assert sum(pair.count for pair in found.pairs) == 2  # of three blocks
    assert "Job.tensor requests blocks.1.up as whole" in {row.reason for row in found.whole}
    with pytest.raises(PlaitError, match="J021"):
        of(lambda: jobs.make(Chain, tensor={"nothing": "row"}))


def test_names() -> None:
    assert label_names(["a.0.b", "a.1.b", "a.2.b"]) == "a.0-2.b" and label_names(["a.0.b", "a.2.b"]) == "a.*.b"
    assert label_names(["a.0.b.0", "a.0.b.1", "a.1.b.0"]) == "a.*.b.*" and label_names([""]) == "the model"
    assert _join_names(["a.0.q", "a.1.q", "a.0.k", "a.1.k"]) == "a.0-1.q, k" and _join_names(["a.0", "a.1"]) == "a.0-1"
    assert _join_names(["x", "y"]) == "x, y" and generalize_name("a.3 reaches a.4.b, not 2") == "a.* reaches a.*.b, not 2"
    from plait.model.slices import ParameterSlice

    assert describe_slice(ParameterSlice("w", 0, (((0, 2), (4, 2)), ((2, 2), (6, 2))))) == "inside 2 parts"


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, "--plan", "tp=2", "--show", "tensor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] > 1.9 * told["held"] and told["pairs"][0]["count"] == 4
    assert main(["plan", LLAMA, "--plan", "tp=2", "--show", "tensor"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("job     ") and "q_proj, k_proj, v_proj → o_proj" in told


@pytest.mark.parametrize(
    "words, said",
    (
        (["--plan", "dp=2", "--show", "tensor"], "needs a plan with tp > 1"),
        (["--show", "tensor"], "needs a plan with tp > 1"),
        (["--plan", "tp=2", "--show", "memory"], "invalid choice"),
        (["--plan", "tp=2 processes=one", "--show", "tensor"], "error[P033]"),
    ),
)
def test_what_is_not_there_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, *words]) == 2
    assert said in capsys.readouterr().err
