"""Whether float64 computes the job's own model (`proof/float64_check.py`): models whose result depends on the number format are named."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof import float64_check, reference
from plait.proof.scenario import harden
from plait.proof.verify import verify


class Pairs:
    """Inputs of eight values, and a class."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, int(x[:4].argmax())


class Net(nn.Module):
    """Three layers, with a module in the middle."""

    def __init__(self, middle: Callable[["Net", Tensor], Tensor], width: int = 16):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.middle, self.generator = middle, torch.Generator().manual_seed(1)
        self.steps = torch.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.last(self.second(h) + self.middle(self, h))


def job_of(
    middle: Callable[[Net, Tensor], Tensor],
    change: Callable[[nn.Module], nn.Module] = lambda m: m,
    loss=F.cross_entropy,
) -> plait.Job:
    return plait.Job(
        model=lambda: change(Net(middle)), loss=loss, data=Pairs, optimizer=lambda p: torch.optim.SGD(p, 0.1), batch=8, steps=4
    )  # fmt: skip


def found(job: plait.Job) -> float64_check.ValueDifference | None:
    hard = harden(job, Plan.parse("dp=2"), 1)
    return float64_check.find_first_difference(reference.OneDevice.from_job(hard, hard.data(), torch.float64, "cpu"))


def _branch(net: Net, h: Tensor) -> Tensor:
    return h.tanh() if h.dtype == torch.float32 else h


def _smallest(net: Net, h: Tensor) -> Tensor:
    return (h * 0 + torch.finfo(h.dtype).eps).log() * h


def _own_generator(net: Net, h: Tensor) -> Tensor:
    return h * h.new_empty(h.shape).log_normal_(generator=torch.Generator().manual_seed(3))


class _AsBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return (
            torch.from_numpy(np.frombuffer(x.detach().numpy().tobytes(), np.float32)[: x.numel()].copy())
            .view(x.shape)
            .tanh()
        )

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0]


def _bits(net: Net, h: Tensor) -> Tensor:
    return _AsBits.apply(h).nan_to_num()


def _backward_only(net: Net, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda g: g * (2.0 if g.dtype == torch.float32 else 1.0))
    return h


@pytest.mark.parametrize("middle", [_branch, _smallest, _bits, _backward_only], ids=lambda m: m.__name__)
def test_what_goes_by_the_format_is_found(middle: Callable[[Net, Tensor], Tensor]) -> None:
    difference = found(job_of(middle))
    assert difference is not None
    assert difference.relative > 10 * difference.limit
    assert difference.value.kind == ("gradient" if middle is _backward_only else "output")
    assert difference.value.unit == ("first.weight" if middle is _backward_only else "last")


def test_a_loss_that_goes_by_the_format_is_found() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.1 if output.dtype == torch.float64 else 0.0)

    difference = found(job_of(lambda net, h: h, loss=loss))
    assert difference is not None and difference.value.kind == "loss"


def _written(net: Net, h: Tensor) -> Tensor:
    counts = torch.zeros(16)
    counts.index_add_(0, h.detach().argmax(-1), torch.ones(len(h)))
    net.steps.copy_(counts)
    return (h / (1 + net.steps[None])).to(h.dtype)


def _largest(net: Net, h: Tensor) -> Tensor:
    top = h.topk(4, -1)
    return torch.zeros_like(h).scatter(-1, top.indices, top.values) + h.sign() + (h * 31).round() / 31


def _sixteen(net: Net, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.second(h).to(h.dtype) + F.linear(h.bfloat16(), net.second.weight.bfloat16()).to(h.dtype)


def _random(net: Net, h: Tensor) -> Tensor:
    return F.dropout(h, 0.3, net.training) + torch.randn_like(h) * F.gumbel_softmax(h)


def _masked(net: Net, h: Tensor) -> Tensor:
    scores = (h @ h.T).masked_fill(torch.eye(len(h), dtype=torch.bool), torch.finfo(h.dtype).min)
    return scores.softmax(-1) @ h


@pytest.mark.parametrize("middle", [_written, _largest, _sixteen, _random, _masked], ids=lambda m: m.__name__)
@pytest.mark.parametrize("change", [lambda m: m, lambda m: m.bfloat16()], ids=["fp32", "bf16"])
def test_what_rounds_is_not_accused(
    middle: Callable[[Net, Tensor], Tensor], change: Callable[[nn.Module], nn.Module]
) -> None:
    class Cast(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(self.inner.first.weight.dtype))

    assert found(job_of(middle, lambda m: Cast(change(m)))) is None


@pytest.mark.slow
def test_verify_gives_no_proof_of_another_model() -> None:
    with pytest.raises(PlaitError) as raised:
        verify(job_of(_branch), Plan.parse("dp=2"))
    (problem,) = raised.value.problems
    assert problem.code == "V030" and problem.where == "last (Linear)" and "float64" in problem.what
