"""Bugs of replica groups, each injected into the ranks: verify, which has k models in one process, must see every one.

None of them stops a training, and each leaves a loss curve that looks like one.
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
from plait.parallel.replica_groups import synchronise
from plait.parallel.replica_groups.synchronise import GroupMessage, RareSynchroniser
from plait.proof.verify import verify

DILOCO = "outer_sync=diloco sync_every=2"
STREAM = "outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=1 fragment_alpha=0.5"


def after_sync(change: Callable[[RareSynchroniser], None]) -> Patch:
    """`change` is called when a message was applied."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = RareSynchroniser._take_over

        def apply(self: RareSynchroniser, message: GroupMessage) -> Any:
            found = real(self, message)
            change(self)
            return found

        monkeypatch.setattr(RareSynchroniser, "_take_over", apply)

    return patch


def averaged_state(self: RareSynchroniser) -> None:
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


def reset_state(self: RareSynchroniser) -> None:
    if self.sgd is not None:
        self.sgd.state.clear()


def applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RareSynchroniser._take_over
    monkeypatch.setattr(
        RareSynchroniser, "_take_over", lambda self, message: (real(self, message), real(self, message))[1]
    )


def of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of what is sent is turned: how far the weights moved, not how far the global ones are ahead."""
    real = RareSynchroniser._message

    def message(self: RareSynchroniser, *given: Any) -> GroupMessage:
        found = real(self, *given)
        for flat in found.flats[:-1]:
            flat.neg_()
        return found

    monkeypatch.setattr(RareSynchroniser, "_message", message)


def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RareSynchroniser._rows
    monkeypatch.setattr(RareSynchroniser, "_rows", lambda self, m: ((n, t * self.count) for n, t in real(self, m)))


def other_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    real = synchronise.due
    monkeypatch.setattr(synchronise, "due", lambda plan, step: [(p + 1) % plan.num_fragments for p in real(plan, step)])


def a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = synchronise.due
    monkeypatch.setattr(synchronise, "due", lambda plan, step: real(plan, step - 1))


def unmixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RareSynchroniser, "_mixed", lambda self, here, there: here.copy_(there))


def mixed_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: RareSynchroniser, here: Tensor, there: Tensor) -> None:
        alpha = 1 - self.plan.fragment_alpha * 0.5
        here.copy_(alpha * here + (1 - alpha) * there)

    monkeypatch.setattr(RareSynchroniser, "_mixed", mixed)


def no_nesterov(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.optim.SGD

    def sgd(parameters: Any, lr: float, momentum: float, nesterov: bool) -> torch.optim.SGD:
        return real(parameters, lr, momentum)

    monkeypatch.setattr(synchronise.torch.optim, "SGD", sgd)


def without_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's loss is its own mean, whatever part of the batch it has."""
    real = passes.total_weight
    least = lambda training, batch, weights: min(real(training, batch, weights), sum(weights) or 0.0)  # noqa: E731
    monkeypatch.setattr(train_step, "total_weight", least)


def same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups train on the first part of the batch."""
    real = Engine.share.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Engine, "share", property(lambda self: replace(real(self), group=0)))


def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group has one sample more than its part."""
    real = BatchShare.of_group

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

    monkeypatch.setattr(BatchShare, "of_group", of_group)


def clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups clip by the largest of their norms."""
    real = Engine.total_norm

    def total_norm(self: Engine) -> Tensor:
        most = real(self).clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    monkeypatch.setattr(Engine, "total_norm", total_norm)


def no_step_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RareSynchroniser, "given", lambda self, samples: None)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter is in no fragment."""
    real = RareSynchroniser.__init__

    def init(self: RareSynchroniser, *given: Any) -> None:
        real(self, *given)
        self.fragments[0] = self.fragments[0][1:]

    monkeypatch.setattr(RareSynchroniser, "__init__", init)


def one_group_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RareSynchroniser._take_over

    def apply(self: RareSynchroniser, message: GroupMessage) -> Any:
        kept = {n: part.tensor.clone() for n, part in self.own.items()}
        found = real(self, message)
        if dist.get_rank() == 1:
            for name, tensor in kept.items():
                self.own[name].tensor.copy_(tensor)
        return found

    monkeypatch.setattr(RareSynchroniser, "_take_over", apply)


def global_weights_drift(self: RareSynchroniser) -> None:
    if dist.get_rank() == 1:
        for tensor in self.base.values():
            tensor += 1e-12


def own_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that all groups should make together are their own."""
    monkeypatch.setattr(RareSynchroniser, "sums", lambda self, step: False)


def lost_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.parallel.compression.compressor import Compressor

    monkeypatch.setattr(Compressor, "commit", lambda self: None)


def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation uses a group's own weights."""
    from contextlib import nullcontext

    monkeypatch.setattr(RareSynchroniser, "global_weights", lambda self: nullcontext())


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
    "global weights drift apart": (after_sync(global_weights_drift), DILOCO),
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
    after_sync(lambda self: [tensor.mul_(1.0) for tensor in self.base.values()] and None)(monkeypatch)
    assert verify(jobs_compressed.job("pictures", clip=1.0), Plan.parse(f"replica_groups=2 {kind}")).equal
