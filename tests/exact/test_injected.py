"""Bugs from the list of silent differences, each injected into the engine; verify must detect and name each.

Each is a monkeypatch, applied before the workers are forked. None of them is visible in a loss curve.
"""

from dataclasses import replace
from typing import Any

import jobs
import pytest
import torch
from faulty import sees
from torch.distributed import distributed_c10d as dist

from plait.data import batch as data
from plait.data import loading, sampling
from plait.engine import engine, passes, train_step
from plait.engine.train_step import TrainStep
from plait.parallel.data import batch_norm
from plait.parallel.data.buckets import BucketSums
from plait.randomness import keyed


def test_mean_of_per_rank_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """1: each rank averages over its own tokens."""
    real = passes.sum_batch_weight
    own = lambda training, batch, weights: real(training, batch, weights) * 0 + sum(weights) * training.plan.dp  # noqa: E731
    monkeypatch.setattr(train_step, "sum_batch_weight", own)
    sees(jobs.ragged(), "dp=2", "G", "embed.weight", "V014")


def test_micro_batches_of_unequal_size_averaged_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """2: accumulation divides by the number of micro-batches."""
    monkeypatch.setattr(passes, "weigh_micro_batch", lambda weight, micro: 1.0 if micro.count else 0.0)
    monkeypatch.setattr(train_step, "sum_batch_weight", lambda training, batch, weights: 6.0)
    sees(jobs.groups(), "dp=2 microbatches=3", "G", "0.weight", "V014")


def test_sum_instead_of_mean_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """5: invisible to Adam, and in any loss curve."""
    real = data.weigh_micro_batch
    monkeypatch.setattr(passes, "weigh_micro_batch", lambda weight, micro: 2 * real(weight, micro))
    sees(jobs.groups(), "dp=2", "G", "0.weight", "V002")


def test_synchronised_in_the_wrong_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """12, 14: the last micro-batch's gradient is not summed over the ranks."""
    _keep_own(monkeypatch, lambda p: True)
    sees(jobs.mlp(), "dp=2", "R", "0.weight", "V004")


def _keep_own(monkeypatch: pytest.MonkeyPatch, which: Any) -> None:
    """After the sum, restore this rank's own gradient of the chosen parameters."""
    ready, plain = BucketSums.arm, BucketSums.finish

    def late(self: Any, step_row: Any) -> None:
        ready(self, step_row)
        self.armed = False

    def finish(self: Any) -> Any:
        everything = [p for b in self.buckets for p in b.parameters]
        own = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in everything]
        step_row = plain(self)
        for p, gradient in zip(everything, own):
            p.grad = gradient if which(p) else p.grad
        return step_row

    monkeypatch.setattr(BucketSums, "arm", late)
    monkeypatch.setattr(BucketSums, "finish", finish)


def test_one_parameter_left_out_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """15: a replicated parameter without a reduction."""
    _keep_own(monkeypatch, lambda p: p.shape == (1, 9))
    sees(jobs.groups(), "dp=2", "R", "2.weight", "V004")


@pytest.mark.slow
def test_tied_weight_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """19: the gradient of a shared weight is added twice."""
    real = BucketSums.finish

    def finish(self: Any) -> Any:
        step_row = real(self)
        for bucket in self.buckets:
            for p in bucket.parameters:
                if p.shape == (17, 12):
                    p.grad.mul_(2)
        return step_row

    monkeypatch.setattr(BucketSums, "finish", finish)
    sees(jobs.ragged(), "dp=2", "G", "embed.weight", "V003")


def test_clipped_by_the_norm_of_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: each rank clips by its own norm, before the sum."""
    real = BucketSums.arm

    def ready(self: Any, step_row: Any) -> None:
        real(self, step_row)
        self.armed = False

    def finish(self: Any) -> Any:
        grads = [p.grad for b in self.buckets for p in b.parameters if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for b in self.buckets for p in b.parameters], 0.1, torch.nn.utils.get_total_norm(grads)
        )
        self.armed = True
        return plain(self)

    plain = BucketSums.finish
    monkeypatch.setattr(BucketSums, "arm", ready)
    monkeypatch.setattr(BucketSums, "finish", finish)
    sees(jobs.groups(), "dp=2", "G", "0.weight", "V019")


def test_clipping_with_another_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: the gradients are right, but the norm is a local batch's."""
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads, *a: torch.linalg.vector_norm(grads[0]))
    real = engine.torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda ps, m: (_plain_clip(ps, m), real)[0])
    sees(replace(jobs.groups()), "dp=2", "U2", "0.weight", "V007")


def _plain_clip(parameters: Any, largest: float) -> torch.Tensor:
    norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
    for p in parameters:
        p.grad.mul_(min(1.0, largest / (float(norm) + 1e-6)))
    return norm


def test_schedule_stepped_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """27: the learning-rate schedule advances twice as fast."""

    def set_rate(self: Any) -> None:
        training = self.training
        for group in training.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * training.job.schedule(training.position.samples * training.plan.dp)

    monkeypatch.setattr(TrainStep, "_set_rate", set_rate)
    sees(jobs.groups(), "dp=2", "S", "0.weight", "V008")


def test_same_data_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """29: no sampler."""
    monkeypatch.setattr(engine.Engine, "batch_share", property(lambda self: data.BatchShare(0, self.plan.ranks, 1)))
    sees(jobs.groups(), "dp=2", "D", "0.weight", "V006")


def test_other_shuffle_seed_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """30: ranks overlap and miss samples."""
    real = sampling.epoch_order
    mine = lambda seed: seed + (dist.get_rank() if dist.is_initialized() else 0)  # noqa: E731
    monkeypatch.setattr(sampling, "epoch_order", lambda order, seed, epoch, n: real(order, mine(seed), epoch, n))
    sees(jobs.groups(), "dp=2", "D", "0.weight", "V006")


def test_order_not_reshuffled_in_the_second_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """31: set_epoch is missing; the first epoch is right."""
    real = sampling.epoch_order
    monkeypatch.setattr(sampling, "epoch_order", lambda order, seed, epoch, n: real(order, seed, 0, n))
    sees(jobs.groups(), "dp=2", "D", "0.weight", "V006")


def test_augmentation_keyed_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """33: workers' generators."""
    real = loading.seed_host
    monkeypatch.setattr(
        loading,
        "seed_host",
        lambda *words, **only: real(*words, dist.get_rank() if dist.is_initialized() else 0, **only),
    )
    sees(jobs.mlp(0.0), "dp=2", "D", "0.weight", "V006")


def test_same_dropout_mask_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """36: masks drawn from each rank's start."""
    real = keyed.Randomness.forward_pass
    monkeypatch.setattr(passes.Passes, "forward", _forward_with_first_zero(passes.Passes.forward))
    assert real is keyed.Randomness.forward_pass
    sees(jobs.mlp(), "dp=2", "G", "0.weight", "V005")


def _forward_with_first_zero(real: Any) -> Any:
    return lambda self, piece, step: real(self, replace(piece, first=0), step)


def test_batch_norm_not_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """38: statistics per rank."""
    monkeypatch.setattr(batch_norm, "sync_batch_norms", lambda *_: None)
    sees(jobs.batch_norm(), "dp=2", "B", "0.weight", "V015")


def test_unused_parameter_gets_a_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """43: weight decay moves a parameter that is constant on one device."""

    def finish(self: Any) -> Any:
        step_row = plain(self)
        for bucket in self.buckets:
            for i, p in enumerate(bucket.parameters):
                if p.grad is None:
                    p.grad = bucket.views[i].zero_()
        return step_row

    plain = BucketSums.finish
    monkeypatch.setattr(BucketSums, "finish", finish)
    sees(jobs.branches(), "dp=2", "G", "never.bias", "V003")


@pytest.mark.messages
def test_a_collective_that_no_dry_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """C: traffic that a dry run does not have, sent by another library in the ranks' processes."""
    real = BucketSums.finish

    def finish(self: Any) -> Any:
        step_row = real(self)
        if dist.get_backend() != "fake":
            dist.all_reduce(torch.zeros(3))
        return step_row

    monkeypatch.setattr(BucketSums, "finish", finish)
    sees(jobs.groups(), "dp=2", "C", "", "V012")


def test_loss_that_couples_samples() -> None:
    """39: a contrastive loss sees only its local batch. No plan can correct this, and the verdict reports it."""

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out @ out.T).logsumexp(1).mean() - (out * target).mean()

    sees(jobs.make(lambda: torch.nn.Linear(6, 1), loss=loss), "dp=2", "G", "weight", "V013")
