"""Bugs of sharding, recomputation and offloading, each injected before the workers are forked; verify detects each."""

from typing import Any

import jobs
import jobs_unlike
import pytest
import torch
from faulty import sees
from torch.distributed import distributed_c10d as dist

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.engine import passes
from plait.parallel import activation_checkpointing, offload
from plait.parallel.data import batch_norm
from plait.parallel.fsdp import runtime
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.fsdp.runtime import FsdpRuntime, ShardScatter
from plait.parallel.gradient_reducer import GradientReducer
from plait.proof.verify import verify
from plait.randomness.keyed import Randomness
from plait.tensors import module_state


def test_the_sum_divided_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """5: FSDP2's own default. It is invisible with Adam."""
    real = ShardScatter.reduce_open

    def settle(self: Any) -> None:
        opened = self.open_sum
        real(self)
        if opened is not None:
            opened[1].div_(2)

    monkeypatch.setattr(ShardScatter, "reduce_open", settle)
    sees(jobs.groups(), "fsdp=2", "G", "0.weight", "V002")


def test_copies_of_parts_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """14: shards are summed inside a replica, but not over replicas, so these diverge."""
    monkeypatch.setattr(fsdp, "ShardScatter", lambda copies: ShardScatter(None))
    sees(jobs.groups(), "dp=2 fsdp=2", "R", "0.weight", "V004")


def test_copies_summed_in_a_micro_batch_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """12: the sum over replicas is saved, and summed again at the end."""
    real = FsdpRuntime.begin

    def begin(self: Any, last: bool, idle: bool) -> None:
        real(self, last, idle)
        self.scatter.last = True

    monkeypatch.setattr(FsdpRuntime, "begin", begin)
    sees(jobs.groups(), "dp=2 fsdp=2 microbatches=2 zero_stage=2", "G", "0.weight", "V002")


def test_clipped_by_the_norm_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: each rank clips by the norm of its own shards."""
    monkeypatch.setattr(
        GradientReducer, "get_norm", lambda self: torch.nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad.numel()])
    )
    sees(jobs.groups(), "fsdp=2", "U2", "0.weight", "V007")


def test_a_micro_batch_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """13: only the last micro-batch's sum remains."""
    monkeypatch.setattr(FsdpRuntime, "_store_gradients", lambda self: [setattr(p, "grad", None) for p in self.sharded.values()])
    sees(jobs.groups(), "fsdp=2 microbatches=2 zero_stage=2", "G", "0.weight", "V014")


def test_the_first_partial_sum_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """13: the second of three overwrites the sum that the first saved."""
    real = FsdpRuntime._store_gradients

    def put_by(self: Any) -> None:
        self.partial_gradients = {}
        real(self)

    monkeypatch.setattr(FsdpRuntime, "_store_gradients", put_by)
    sees(jobs.groups(), "fsdp=2 microbatches=3", "G", "0.weight", "V014")


@pytest.mark.slow
def test_recomputation_draws_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """37: the second forward continues the random stream of the first."""
    real_keep = Randomness.draw_dropout_mask

    def keep(self: Any, x: Any, p: float, shape: Any = None) -> Any:
        mask = real_keep(self, x, p, shape)
        return mask.flip(-1) if self._replaying else mask

    monkeypatch.setattr(Randomness, "draw_dropout_mask", keep)
    job = jobs.make(jobs_unlike.Chain)
    verdict = verify(job, Plan.parse("fsdp=2 activation_checkpointing=full"))
    assert verdict.exit_code == DIFFERENT and verdict.parameter == "first.weight"
    assert verdict.code in ("V005", "V017")


@pytest.mark.slow
def test_recomputation_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """38: running statistics move twice in a step."""
    monkeypatch.setattr(module_state, "own_buffers", lambda module: {})
    sees(jobs_unlike.ALL["norm_inside"](), "fsdp=2 activation_checkpointing=full", "B", "num_batches_tracked", "V011")


@pytest.mark.slow
def test_selective_gives_back_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved output of one matrix product is returned for the next of the same shape."""
    real = activation_checkpointing._SelectiveMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = real(self, func, types, args, kwargs)
        return out.flip(0) if self.again and "mm" in str(func) else out

    monkeypatch.setattr(activation_checkpointing._SelectiveMode, "__torch_dispatch__", dispatch)
    sees(jobs.make(lambda: jobs_unlike.Chain()), "fsdp=2 activation_checkpointing=selective", "G", "first.weight", "V017")


def test_unused_parameter_gets_a_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """43: FSDP2's sum writes zeros for unused parameters; weight decay then moves them."""
    real = FsdpRuntime.finish

    def finish(self: Any) -> Any:
        self.used.update(self.trained)
        return real(self)

    monkeypatch.setattr(FsdpRuntime, "finish", finish)
    sees(jobs.branches(), "fsdp=2", "G", "never.bias", "V003")


def test_offload_gives_back_stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """24: the device trains with the weights of the previous step."""
    real = offload.apply

    def apply(split: Any) -> Any:
        done = real(split)
        masters = done.techniques.masters
        before = {name: m.detach().clone() for name, m in masters.items()}

        def stale() -> None:
            for name, master in masters.items():
                done.params[name].data.copy_(before[name])
                before[name] = master.detach().clone()

        done.hooks.after_update.append(stale)
        return done

    monkeypatch.setattr(offload, "apply", apply)
    sees(jobs.groups(), "fsdp=2 offload=optimizer", "U", "0.weight", "V009")


def test_a_gathered_copy_outlives_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """24: the parameters of the previous step are used once more, because they were not freed."""
    real = FsdpRuntime.begin

    def begin(self: Any, last: bool, idle: bool) -> None:
        real(self, last, idle)
        for module in self.modules:
            module.set_reshard_after_backward(False, recurse=False)

    monkeypatch.setattr(FsdpRuntime, "begin", begin)
    sees(jobs.groups(), "fsdp=2 zero_stage=1", "U", "0.weight", "V015")


def test_one_rank_holds_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """46: two shards of equal shape are swapped."""
    real = runtime.ShardGather.__call__

    def gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        work = real(self, output_tensor, input_tensor, group, False)
        output_tensor.copy_(output_tensor.view(group.size(), -1).flip(0).reshape(-1))
        return work

    monkeypatch.setattr(runtime.ShardGather, "__call__", gather)
    verdict = verify(jobs.groups(), Plan.parse("fsdp=2"))
    assert verdict.exit_code == DIFFERENT and verdict.parameter == "0.weight"


def test_batch_norm_over_the_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """38: statistics are over a rank's local batch."""
    monkeypatch.setattr(batch_norm, "sync_batch_norms", lambda *_: None)
    sees(jobs.batch_norm(), "fsdp=2", "B", "0.weight", "V015")


@pytest.mark.messages
def test_a_sum_that_no_dry_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """C: traffic that a dry run does not have, sent by another library in the ranks' processes."""
    real = FsdpRuntime.finish

    def finish(self: Any) -> Any:
        if dist.get_backend() != "fake":
            dist.all_reduce(torch.zeros(3))
        return real(self)

    monkeypatch.setattr(FsdpRuntime, "finish", finish)
    sees(jobs.groups(), "fsdp=2", "C", "", "V012")


@pytest.mark.slow
def test_an_empty_share_goes_where_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without samples must not return to a unit whose output the loss does not use."""
    seen: list[int] = []
    real = passes.make_zero_loss

    def nothing(loss: Any, outputs: Any, asked: Any = ()) -> Any:
        zero = real(loss, outputs, asked)
        seen.append(1)
        assert not torch.autograd.grad(zero, [outputs[1]], allow_unused=True, retain_graph=True)[0]
        return zero

    monkeypatch.setattr(passes, "make_zero_loss", nothing)
    assert verify(jobs_unlike.aside(), Plan.parse("fsdp=3 zero_stage=2")).equal
