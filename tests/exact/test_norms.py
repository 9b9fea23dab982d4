"""Batch norms other than torch's plain ones: a SyncBatchNorm, and subclasses with their own forward."""

import copy
from typing import Any

import jobs_norms
import pytest
import torch
from rarely import rarely
from torch import nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.losses.global_batch import BatchPeers
from plait.model.build_model import make_model, make_plain_model
from plait.parallel.data.batch_norm import sync_batch_norms
from plait.proof.verify import verify

CASES = [
    ("converted", "dp=2"), ("written", "dp=2"), ("own_sync", "fsdp=2"), ("made", "dp=2"),
    *rarely(("activated", "dp=2"), ("cumulative", "dp=2"), ("not_affine", "dp=2"),
            ("converted", "pp=2 microbatches=1"), ("written", "fsdp=2"), ("written", "dp=2 compile=true")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
@pytest.mark.parametrize("name, plan", CASES)
def test_unlike_batch_norms_are_exact(name: str, plan: str) -> None:
    verdict = verify(jobs_norms.ALL[name](), Plan.parse(plan), steps=3)
    assert verdict.equal, repr(verdict)


@pytest.mark.prove
def test_layers_before_a_batch_norm_stay_whole_under_tp() -> None:
    """Its statistics would have to be sliced too. No other layer of this model can be sliced."""
    with pytest.raises(PlaitError, match="running_mean should contain 3 elements not 6") as caught:
        verify(jobs_norms.ALL["made"](), Plan.parse("tp=2"), steps=3)
    assert caught.value.codes == ["P034"]


@pytest.fixture
def group(tmp_path: Any) -> Any:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["converted", "cumulative", "own_sync", "activated", "written"])
def test_a_norm_in_a_rank_computes_what_it_computes_alone(name: str, group: Any) -> None:
    """Forward, gradients and statistics equal plain PyTorch without a process group, in training and in evaluation."""
    job = jobs_norms.ALL[name]()
    x = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = make_model(job).double()
    theirs = copy.deepcopy(ours)  # without messages, as in one process
    names = [n for n, m in ours.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    sync_batch_norms(ours, names, group, BatchPeers())
    assert ours.state_dict().keys() == make_plain_model(job).state_dict().keys()
    for train in (True, True, False):
        outputs = [model.train(train)(x) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
    for model in (ours, theirs):
        model.train()(x).square().sum().backward()
    for (_, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10)
    for (_, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_process_group_of_its_own_is_refused_by_name(group: Any) -> None:
    job = jobs_norms.job(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(jobs_norms.net(), group))
    with pytest.raises(PlaitError) as caught:
        make_model(job)
    assert caught.value.codes == ["J054"] and "1 is a SyncBatchNorm" in str(caught.value)
