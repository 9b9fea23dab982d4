"""Context parallelism of models whose positions interact in written-out code: equal to one device in float64.

Attention as products and a softmax, with its own masks, biases and dropout; recurrences, convolutions and transforms over
positions. Only the tensors that need it are gathered, and the cost is reported.
"""

from collections.abc import Callable
from typing import Any

import jobs_written
import pytest
import torch
from rarely import crossed, every, sampled
from torch import Tensor
from torch.nn import functional as F

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.unit_opening import FullLayout, GatherLog, TrialLayout
from plait.proof.verdict import Verdict
from plait.proof.verify import verify
from plait.tensors.rows import Rows, RowsPlusFull

PLANS = (
    "cp=2",
    "cp=2 cp_method=ulysses microbatches=2",
    "cp=3 activation_checkpointing=full",
    "dp=2 cp=2 microbatches=2",
    "fsdp=2 cp=2 activation_checkpointing=selective",
    "tp=2 cp=2",
    "pp=2 cp=2 microbatches=2",
    "cp=4",
)
SMALL = (
    ("own_einsum", "dp=2 cp=2"),
    ("own_buffered", "tp=2 cp=2 activation_checkpointing=full"),
    ("own_scan", "pp=2 cp=2 microbatches=2"),
    ("own_both", "cp=3"),
)


def equal(name: str, text: str) -> Verdict:
    verdict = verify(jobs_written.ALL[name](), Plan.parse(text), steps=3)
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())
    return verdict


@pytest.mark.parametrize("name, text", sampled(2, every(2, SMALL)))
def test_equal(name: str, text: str) -> None:
    (told, *_) = equal(name, text).notes
    assert "blocks.* itself" in told and "of its products" in told, told


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:Initializing zero-element:UserWarning")  # a shard of mobilebert is empty
@pytest.mark.parametrize("name, text", crossed(4, jobs_written.ALL, PLANS))
def test_every_model(name: str, text: str) -> None:
    try:
        verdict = verify(jobs_written.ALL[name](), Plan.parse(text), steps=3)
        named = "batch_norm" in name and "microbatches" in text and verdict.code == "V010"
        assert verdict.equal or named, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())
    except PlaitError as error:
        tp, split = {"P034", "P031"}, {"P042"}  # no module that tp can slice; short sequences, few heads
        pp = {"P041"} if "pp" in text else set()  # code between units, which several stages run, gathers the sequence
        assert set(error.codes) <= (tp if "tp" in text else set()) | split | pp, error


def test_what_spares_nobody_any_work_is_refused() -> None:
    with pytest.raises(PlaitError) as caught:
        verify(jobs_written.conv_net(), Plan.parse("cp=2"))
    problem = caught.value.problems[0]
    assert problem.code == "P040" and "save no rank" in problem.what and "blocks.0" in problem.why, caught.value


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


Q, K = numbers(2, 3, 9, 4), numbers(2, 3, 9, 4) + 1
FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "scores": (lambda q, k: q @ k.mT, 1),
    "attention": (lambda q, k: (q @ k.mT).softmax(-1) @ k, 2),
    "einsum": (lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), 1),
    "einsum with dots": (lambda q, k: torch.einsum("...id, ...jd -> ...ij", q, k), 1),
    "einsum with weights": (lambda q, k: torch.einsum("bhid,de->bhie", q, numbers(4, 5)), 0),
    "einsum of keys first": (lambda q, k: torch.einsum("bhjd,bhid->bhij", k, q), 1),
    "summed over rows": (lambda q, k: q.mT @ k, 2),
    "bmm": (lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)), 1),
    "baddbmm": (lambda q, k: numbers(6, 1, 9).baddbmm(q.flatten(0, 1), batch2=k.flatten(0, 1).mT, beta=0.5), 1),
    "addmm": (lambda q, k: torch.addmm(numbers(5), q[0, 0], numbers(4, 5), alpha=2), 0),
    "matrix first": (lambda q, k: numbers(7, 4) @ q.mT, 0),
    "triangle": (lambda q, k: torch.tril(q @ k.mT), 1),
    "upper triangle": (lambda q, k: (q @ k.mT).triu(1), 1),
    "mask of the length": (lambda q, k: (q @ k.mT).masked_fill(torch.ones(q.shape[-2], 9).tril() == 0, -9.0), 1),
    "largest of two": (lambda q, k: torch.max(q @ k.mT, torch.tensor(0.5).double()), 1),
    "numbers looked up": (lambda q, k: torch.gather(q, -1, (torch.arange(81).view(9, 9) % 4).expand(2, 3, 9, 9)), 0),
    "repeated": (lambda q, k: q.repeat(1, 2, 1, 1) + 1, 0),
    "picked": (lambda q, k: q.index_select(1, torch.tensor([2, 0])), 0),
    "features by a list": (lambda q, k: q[..., [3, 1]], 0),
    "heads by a list": (lambda q, k: q.transpose(1, 2)[:, :, [-1], :], 0),
    "format": (lambda q, k: q.type(torch.float32), 0),
    "padded": (lambda q, k: F.pad(q, (1, 2)), 0),
    "padded rows": (lambda q, k: F.pad(q, (0, 0, 1, 0))[:, :, :-1], 1),
    "parts": (lambda q, k: q.tensor_split(2, -1)[1], 0),
    "row after row": (lambda q, k: torch.stack([q[:, :, i] * i for i in range(q.shape[2])], 2), 1),
    "sums so far": (lambda q, k: q.cumsum(2) * q, 1),
    "Fourier": (lambda q, k: torch.fft.fft(q, dim=2).real, 1),
    "batch and rows in one dim": (
        lambda q, k: F.dropout((q[:, 0].reshape(18, 4) @ numbers(4, 4)).relu(), 0.0).view(2, 9, 4),
        0,
    ),
    "rows of a batch, and a mean": (lambda q, k: q[:, 0].reshape(-1, 4) - q[:, 1].flatten(0, 1).mean(0), 1),
    "batch in one dim with rows, beside a whole": (lambda q, k: q[:, 0].flatten(0, 1) * torch.arange(18.0)[:, None], 0),
    "written in place": (lambda q, k: (q @ k.mT).mul_(2.0).add_(1.0), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_rows(name: str) -> None:
    """On each rank's rows, a function returns its rows of the result, with no more messages than necessary."""
    function, asked = FUNCTIONS[name]
    expected, told = function(Q.clone(), K.clone()), GatherLog()

    def run(held: FullLayout | TrialLayout) -> Tensor:
        found = function(*(SequenceShard.of(held.take(t.clone(), 2), 2, held, True) for t in (Q, K)))
        if isinstance(found, SequenceShard):
            assert torch.allclose(found.local, found.take_rows(expected, found.shard_dim), atol=1e-6), name
            assert found.shape == expected.shape
        else:
            assert torch.allclose(found, expected, atol=1e-6)
        return found

    run(FullLayout(RowsPlusFull.append_full(Rows.make_zigzag(9, 2)), 2, told))
    assert len(told.tensors) == asked
    for rank in range(2):
        told.number = 0
        run(TrialLayout(Rows.make_zigzag(9, 2), rank, told))
        assert told.number == asked and told.max_diff < 1e-12


def test_a_rank_that_asks_for_something_else_is_seen() -> None:
    told, cut = GatherLog([Q]), Rows.make_even(9, 2)
    TrialLayout(cut, 1, told).gather(cut.take_part(Q, 2, 1) + 1e-3, 2)
    assert told.max_diff > 1e-4
    with pytest.raises(RuntimeError, match="other tensors"):
        TrialLayout(cut, 1, told).gather(cut.take_part(Q, 2, 1), 2)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_that_is_lost_is_seen(inside: bool) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 2).local.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].expand(Q.shape)

    held = TrialLayout(Rows.make_even(9, 2), 0, GatherLog([]))
    x = SequenceShard.of(held.take(Q.clone().requires_grad_(), 2), 2, held, inside)
    with pytest.raises(TypeError, match="sharded over ranks, and its gradient is lost"):
        Own.apply(x).backward()
