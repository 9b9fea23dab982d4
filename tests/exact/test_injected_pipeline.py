"""Bugs of pipelines, each injected before the workers are forked; verify detects each."""

from dataclasses import replace
from typing import Any

import jobs
import jobs_pipeline
import pytest
import torch
from faulty import sees
from torch.distributed import distributed_c10d as dist

from plait.engine.passes import Passes
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.pipeline import runtime
from plait.parallel.pipeline.stage import PipelineStages
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness

DEEP, ROOT = jobs_pipeline.LISTED["deep"], jobs_pipeline.LISTED["root_gpt"]


@pytest.mark.slow
def test_a_tied_gradient_not_summed_over_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """19, 20: each stage continues with its own part of the gradient."""
    monkeypatch.setattr(GradientReducer, "_reduce_gradients", lambda self, names, group, means=(): None)
    sees(ROOT(), "pp=2 microbatches=2", "R", "")
    sees(jobs_pipeline.HARD["shared_norm"](), "pp=2 microbatches=2", "G", "norm.weight")


def test_a_tied_parameter_counted_twice_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: each stage that has it counts it."""
    monkeypatch.setattr(ShardPlan, "count_replicas", lambda self, name, at: 1)
    sees(ROOT(), "pp=2 microbatches=2", "U2")


def test_clipped_by_the_norm_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: each stage clips by its own parameters' norm."""
    monkeypatch.setattr(
        GradientReducer,
        "get_norm",
        lambda self: torch.nn.utils.get_total_norm(p.grad for p in self.own.values() if p.grad is not None),
    )
    sees(jobs.groups(), "pp=2 microbatches=2", "U2")


@pytest.mark.slow
def test_the_loss_scaled_by_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 4: each micro-batch has the same weight, independent of its samples."""
    real = Passes.make_micro_batches

    def pieces(self: Any, batch: Any, runs: Any) -> Any:
        found = real(self, batch, runs)
        return [replace(piece, scale=1.0 / len(found)) for piece in found]

    monkeypatch.setattr(Passes, "make_micro_batches", pieces)
    sees(jobs.ragged(), "pp=2 microbatches=2", "G", "embed.weight")


def test_the_loss_not_scaled_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """3: a sum over the micro-batches. It is invisible with Adam."""
    real = Passes.make_micro_batches
    monkeypatch.setattr(Passes, "make_micro_batches", lambda self, b, runs: [replace(p, scale=1.0) for p in real(self, b, runs)])
    sees(jobs.groups(), "pp=2 microbatches=2", "G", "0.weight")


def test_gradients_averaged_over_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """4: torch's `scale_grads`, applied to a loss that is already a mean."""
    real = runtime.PipelineRuntime.step

    def step(self: Any, pieces: Any, *args: Any) -> Any:
        losses = real(self, pieces, *args)
        for parameter in self.stages.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(pieces)
        return losses

    monkeypatch.setattr(runtime.PipelineRuntime, "step", step)
    sees(jobs.groups(), "pp=2 microbatches=2", "G", "0.weight")


def test_only_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """13: earlier gradients are overwritten."""
    real = runtime.PipelineRuntime._backward

    def backward(self: Any, action: Any) -> None:
        for parameter in self.stages.model.parameters():
            parameter.grad = None
        real(self, action)

    monkeypatch.setattr(runtime.PipelineRuntime, "_backward", backward)
    sees(jobs.groups(), "pp=2 microbatches=2", "G", "0.weight")


@pytest.mark.slow
def test_a_gradient_of_zeros_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """43: weight decay moves a parameter without a gradient."""
    import jobs_uncut

    real = GradientReducer.finish

    def finish(self: Any, *args: Any) -> Any:
        for parameter in self.own.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return real(self, *args)

    monkeypatch.setattr(GradientReducer, "finish", finish)
    sees(jobs_uncut.CUT["detached"](), "pp=2 microbatches=2", "G", "")


@pytest.mark.slow
def test_masks_of_a_stage_drawn_from_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """36: the random stream of a later stage starts at a wrong position."""
    real = Randomness.forward_pass

    def at(self: Any, step: int, first: int, *more: Any, **turn: Any) -> Any:
        return real(self, step, first + (dist.get_rank() if dist.is_initialized() else 0), *more, **turn)

    monkeypatch.setattr(Randomness, "forward_pass", at)
    sees(DEEP(), "pp=2 microbatches=2", "G", "")


@pytest.mark.slow
def test_a_skip_connection_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that only passes through a stage is changed there."""
    real = PipelineStages.forward

    def forward(self: Any, stage: int, samples: int, course: Any, received: Any, call: Any) -> Any:
        output, run = real(self, stage, samples, course, received, call)
        run.kept = {k: torch.zeros_like(v) if k in received else v for k, v in run.kept.items()}
        return output, run

    monkeypatch.setattr(PipelineStages, "forward", forward)
    sees(jobs_pipeline.LISTED["unet"](), "pp=3 microbatches=2", "G", "")


@pytest.mark.slow
def test_second_halves_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight-gradient half of the last micro-batch never runs."""
    real = runtime.split_backward
    count = [0]

    def halves(*args: Any) -> Any:
        weights = real(*args)
        count[0] += 1
        return (lambda: None) if count[0] % 2 == 0 else weights

    monkeypatch.setattr(runtime, "split_backward", halves)
    sees(DEEP(), "pp=2 microbatches=2 schedule=zb", "G", "")
