"""Bugs of replica groups, each injected into the ranks; verify has k models in one process and must detect each.

None of them stops a training, and each leaves a plausible loss curve.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs_compressed
import pytest
import torch
from faulty import Patch
from jobs import Numbers
from rarely import every, sampled
from torch import Tensor
from torch.distributed import distributed_c10d as dist

import plait
from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.data.batch import BatchShare
from plait.engine import passes, train_step
from plait.engine.engine import Engine
from plait.parallel.replica_groups import outer_synchronizer
from plait.parallel.replica_groups.outer_synchronizer import GroupMessage, OuterSynchronizer
from plait.proof.verify import verify

DILOCO = "outer_sync=diloco sync_every=2"
STREAM = "outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=1 fragment_alpha=0.5"


def after_sync(change: Callable[[OuterSynchronizer], None]) -> Patch:
    """Call `change` after each applied message."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = OuterSynchronizer._apply_message

        def apply(self: OuterSynchronizer, message: GroupMessage) -> Any:
            found = real(self, message)
            change(self)
            return found

        monkeypatch.setattr(OuterSynchronizer, "_apply_message", apply)

    return patch


def averaged_state(self: OuterSynchronizer) -> None:
    for state in self.optimizer.state.values():  # type: ignore[attr-defined]
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                dist.all_reduce(value, group=self.group)
                value.div_(self.count)


def with_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.__init__

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.rank_model.techniques.replica_groups is not None:
            self.rank_model.techniques.replica_groups.optimizer = self.optimizer  # type: ignore[attr-defined]

    monkeypatch.setattr(Engine, "__init__", init)
    after_sync(averaged_state)(monkeypatch)


def reset_state(self: OuterSynchronizer) -> None:
    if self.outer_optimizer is not None:
        self.outer_optimizer.state.clear()


def applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OuterSynchronizer._apply_message
    monkeypatch.setattr(
        OuterSynchronizer, "_apply_message", lambda self, message: (real(self, message), real(self, message))[1]
    )


def of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of the message is inverted: the movement of the weights, not the lead of the global weights."""
    real = OuterSynchronizer._make_message

    def message(self: OuterSynchronizer, *given: Any) -> GroupMessage:
        found = real(self, *given)
        for flat in found.flats[:-1]:
            flat.neg_()
        return found

    monkeypatch.setattr(OuterSynchronizer, "_make_message", message)


def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OuterSynchronizer._split_message
    monkeypatch.setattr(OuterSynchronizer, "_split_message", lambda self, m: ((n, t * self.count) for n, t in real(self, m)))


def other_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    real = outer_synchronizer.list_due_fragments
    monkeypatch.setattr(outer_synchronizer, "list_due_fragments", lambda plan, step: [(p + 1) % plan.num_fragments for p in real(plan, step)])


def a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = outer_synchronizer.list_due_fragments
    monkeypatch.setattr(outer_synchronizer, "list_due_fragments", lambda plan, step: real(plan, step - 1))


def unmixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterSynchronizer, "_mix_into", lambda self, here, there: here.copy_(there))


def mixed_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: OuterSynchronizer, here: Tensor, there: Tensor) -> None:
        alpha = 1 - self.plan.fragment_alpha * 0.5
        here.copy_(alpha * here + (1 - alpha) * there)

    monkeypatch.setattr(OuterSynchronizer, "_mix_into", mixed)


def no_nesterov(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.optim.SGD

    def sgd(parameters: Any, lr: float, momentum: float, nesterov: bool) -> torch.optim.SGD:
        return real(parameters, lr, momentum)

    monkeypatch.setattr(outer_synchronizer.torch.optim, "SGD", sgd)


def without_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's loss is its own mean, independent of its part of the batch."""
    real = passes.sum_batch_weight
    least = lambda training, batch, weights: min(real(training, batch, weights), sum(weights) or 0.0)  # noqa: E731
    monkeypatch.setattr(train_step, "sum_batch_weight", least)


def same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups train on the first part of the batch."""
    real = Engine.batch_share.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Engine, "batch_share", property(lambda self: replace(real(self), group=0)))


def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group has one sample more than its part."""
    real = BatchShare.locate_group

    def of_group(self: BatchShare, size: int) -> tuple[int, int]:
        first, count = real(self, size)
        cut = int(self.groups > 1 and size > 2)
        return (
            (first, count + cut)
            if self.group == 0
            else (first + cut, count - cut)
            if self.group == 1
            else (first, count)
        )

    monkeypatch.setattr(BatchShare, "locate_group", of_group)


def clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups clip by the largest of their norms."""
    real = Engine.total_norm

    def total_norm(self: Engine) -> Tensor:
        most = real(self).clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    monkeypatch.setattr(Engine, "total_norm", total_norm)


def no_step_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterSynchronizer, "record_gradients", lambda self, samples: None)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter is in no fragment."""
    real = OuterSynchronizer.__init__

    def init(self: OuterSynchronizer, *given: Any) -> None:
        real(self, *given)
        self.fragments[0] = self.fragments[0][1:]

    monkeypatch.setattr(OuterSynchronizer, "__init__", init)


def one_group_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OuterSynchronizer._apply_message

    def apply(self: OuterSynchronizer, message: GroupMessage) -> Any:
        kept = {n: part.tensor.clone() for n, part in self.trained_parts.items()}
        found = real(self, message)
        if dist.get_rank() == 1:
            for name, tensor in kept.items():
                self.trained_parts[name].tensor.copy_(tensor)
        return found

    monkeypatch.setattr(OuterSynchronizer, "_apply_message", apply)


def global_weights_drift(self: OuterSynchronizer) -> None:
    if dist.get_rank() == 1:
        for tensor in self.global_tensors.values():
            tensor += 1e-12


def own_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up steps, which all groups should make together, are made separately."""
    monkeypatch.setattr(OuterSynchronizer, "is_warmup_step", lambda self, step: False)


def lost_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.parallel.compression.compressor import Compressor

    monkeypatch.setattr(Compressor, "commit", lambda self: None)


def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation uses a group's own weights."""
    from contextlib import nullcontext

    monkeypatch.setattr(OuterSynchronizer, "use_global_weights", lambda self: nullcontext())


BUGS: dict[str, tuple[Patch, str]] = {
    "the inner state is averaged": (with_optimizer, DILOCO),
    "the outer momentum is forgotten": (after_sync(reset_state), DILOCO),
    "a message is applied twice": (applied_twice, DILOCO),
    "the sign of the outer gradient": (of_weights, DILOCO),
    "a sum instead of the mean": (summed, "sync_every=2"),
    "a sum instead of the mean of deltas": (summed, DILOCO),
    "another fragment": (other_fragment, STREAM),
    "a step late": (a_step_late, "sync_every=2"),
    "fragments are not mixed": (unmixed, STREAM),
    "fragments are mixed the wrong way round": (mixed_backwards, STREAM),
    "no Nesterov": (no_nesterov, DILOCO),
    "a group's loss is its own mean": (without_scale, "sync_every=2"),
    "all groups have the same samples": (same_part, "sync_every=2"),
    "parts of the batch that are not even": (uneven, "sync_every=2"),
    "all clip by one norm": (clipped_together, "sync_every=2"),
    "no step without samples": (no_step_without_samples, "sync_every=2"),
    "a parameter in no fragment": (forgotten, "sync_every=2"),
    "one group keeps its weights": (one_group_keeps_its_own, "sync_every=2"),
    "global weights diverge": (after_sync(global_weights_drift), DILOCO),
    "no common steps at the start": (own_at_the_start, "sync_every=2 warmup_sync_steps=2"),
    "the residual is lost": (lost_residual, "sync_every=2 grad_compression=int8"),
    "evaluation of a group's own weights": (own_weights, "outer_sync=diloco sync_every=4 outer_lr=0.5"),
}  # fmt: skip


@pytest.mark.parametrize("bug", sampled(4, every(2, BUGS)))
def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    patch, kind = BUGS[bug]
    patch(monkeypatch)
    job = jobs_compressed.job(
        "pictures", clip=1.0, evaluate=plait.Evaluate(Numbers, lambda out, y: {"error": (out - y).abs()})
    )
    verdict = verify(job, Plan.parse(f"replica_groups=2 {kind}"))
    assert verdict.exit_code == DIFFERENT, "not found"
    assert verdict.cause


@pytest.mark.parametrize("kind", [DILOCO, STREAM])
def test_what_changes_nothing_is_no_bug(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    after_sync(lambda self: [tensor.mul_(1.0) for tensor in self.global_tensors.values()] and None)(monkeypatch)
    assert verify(jobs_compressed.job("pictures", clip=1.0), Plan.parse(f"replica_groups=2 {kind}")).equal
