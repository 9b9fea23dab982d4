"""A job's loss of sharded logits is that of the full logits on each rank, and each rank's gradient is its shard of the full gradient.

Each case runs on ranks with uneven, empty and zigzag shards of the words or of the sequence, in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from plait import LinearCrossEntropy, linear_cross_entropy
from plait.launch.fork import run_ranks
from plait.tensors import collectives
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor, to_full

BATCH, TIME, WORDS = 2, 6, 7
CUTS = {
    2: [(2, Rows.from_sizes([4, 3])), (2, Rows.from_sizes([7, 0])), (1, Rows.make_zigzag(TIME, 2)), (1, Rows.from_sizes([1, 5])),
        (0, Rows.from_sizes([1, 1]))],
    3: [(2, Rows.from_sizes([1, 4, 2])), (1, Rows.make_zigzag(TIME, 3)), (1, Rows.from_sizes([0, 4, 2])), (0, Rows.from_sizes([1, 0, 1]))],
}  # fmt: skip
TARGETS = torch.tensor([[3, 0, -100, 6, 2, 5], [1, 1, 4, -100, -100, 6]])
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0, 1.5, 0.7], dtype=torch.float64)
SOFT = torch.rand(BATCH, TIME, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
MASK = TARGETS != -100

Function = Callable[[Tensor, Tensor], Any]
ce, nll = F.cross_entropy, F.nll_loss


def hugging_face(x: Tensor, w: Tensor) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(x, TARGETS.clamp(min=0), WORDS)


def shifted(x: Tensor) -> Tensor:
    return x[..., :-1, :].contiguous().view(-1, WORDS)


def in_place(x: Tensor) -> Tensor:
    x = x * 1
    x /= 2.0
    x.mul_(3).masked_fill_(MASK.unsqueeze(-1), 0.5)
    return x


KEPT: dict[str, Function] = {
    "flatten": lambda x, w: ce(x.flatten(0, 1), TARGETS.flatten()),
    "view": lambda x, w: ce(x.view(-1, WORDS), TARGETS.view(-1), reduction="sum"),
    "classes second": lambda x, w: ce(x.transpose(1, 2), TARGETS, label_smoothing=0.1),
    "weighted": lambda x, w: ce(x.flatten(0, 1), TARGETS.flatten(), weight=CLASS_WEIGHTS),
    "smoothed": lambda x, w: ce(x.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.2),
    "smoothed sum of weighted": lambda x, w: ce(
        x.flatten(0, 1), TARGETS.flatten(), CLASS_WEIGHTS, reduction="sum", label_smoothing=0.2
    ),
    "smoothed mean of weighted": lambda x, w: ce(
        x.flatten(0, 1), TARGETS.flatten().clamp(min=0), CLASS_WEIGHTS, label_smoothing=0.2
    ),
    "another ignored": lambda x, w: ce(x.flatten(0, 1), TARGETS.flatten().clamp(min=0), ignore_index=1),
    "none, masked mean": lambda x, w: (
        (ce(x.flatten(0, 1), TARGETS.flatten(), reduction="none").view(TARGETS.shape) * MASK).sum() / MASK.sum()
    ),
    "probabilities": lambda x, w: ce(x.flatten(0, 1), SOFT.flatten(0, 1), label_smoothing=0.1),
    "probabilities weighted": lambda x, w: ce(x.flatten(0, 1), SOFT.flatten(0, 1), CLASS_WEIGHTS),
    "module": lambda x, w: nn.CrossEntropyLoss()(x.reshape(-1, x.size(-1)), TARGETS.reshape(-1)),
    "nll": lambda x, w: nll(F.log_softmax(x.flatten(0, 1), dim=-1), TARGETS.flatten()),
    "nll weighted": lambda x, w: nll(x.flatten(0, 1).log_softmax(-1), TARGETS.flatten(), CLASS_WEIGHTS),
    "shifted": lambda x, w: ce(shifted(x), TARGETS[:, 1:].reshape(-1)),
    "shifted, transposed": lambda x, w: ce(x[:, :-1].transpose(1, 2), TARGETS[:, 1:]),
    "from the second": lambda x, w: ce(x[:, 1:].reshape(-1, WORDS), TARGETS[:, 1:].reshape(-1)),
    "gathered log probabilities": lambda x, w: (
        (torch.log_softmax(x, -1).gather(-1, TARGETS.clamp(min=0).unsqueeze(-1)).squeeze(-1) * MASK).sum()
    ),
    "Hugging Face": hugging_face,
    "temperature": lambda x, w: ce((x / w[0]).flatten(0, 1), TARGETS.flatten()),
    "bias": lambda x, w: ce((x + w).flatten(0, 1), TARGETS.flatten()),
    "a whole operand": lambda x, w: ((x - w * SOFT) ** 2).mean(),
    "soft cap": lambda x, w: ce((30 * torch.tanh(x / 30)).flatten(0, 1), TARGETS.flatten()),
    "z-loss": lambda x, w: x.logsumexp(-1).square().mean(),
    "entropy": lambda x, w: -(x.softmax(-1) * F.log_softmax(x, -1)).sum(-1).mean(),
    "mse": lambda x, w: F.mse_loss(x, SOFT),
    "l1 sum": lambda x, w: nn.L1Loss(reduction="sum")(x, SOFT),
    "kl": lambda x, w: F.kl_div(x.log_softmax(-1), SOFT, reduction="batchmean"),
    "with logits": lambda x, w: F.binary_cross_entropy_with_logits(x, SOFT),
    "mean of all": lambda x, w: x.square().mean(),
    "mean of dims": lambda x, w: (x.mean(dim=(0, 2)) * w[:TIME]).sum(),
    "sum kept": lambda x, w: (x / x.exp().sum(-1, keepdim=True)).sum(),
    "sum over time": lambda x, w: (x.sum(1) ** 2).sum(),
    "rsub": lambda x, w: (1 - x).abs().sum() + (2 / (x.exp() + 1)).sum(),
    "where": lambda x, w: torch.where(x > 0, x, w * x).sum(),
    "in place": lambda x, w: in_place(x).square().sum(),
    "permuted": lambda x, w: (x.permute(2, 0, 1).flatten(1) * SOFT.permute(2, 0, 1).flatten(1)).sum(),
    "there and back": lambda x, w: (x.flatten(0, 1).unflatten(0, (BATCH, TIME)).unsqueeze(1).squeeze(1) * SOFT).sum(),
    "all in one dim": lambda x, w: (x.flatten() * SOFT.flatten()).sum(),
    "halves": lambda x, w: sum((h * h).sum() * (k + 1) for k, h in enumerate(x.chunk(2, 1))),
    "splits": lambda x, w: sum((h * h).sum() * (k + 1) for k, h in enumerate(x.split([1, 4, 2], dim=2))),
    "narrow": lambda x, w: x.narrow(1, 2, 3).square().sum() + x.narrow(-1, 1, 4).sum(),
    "a slice of words": lambda x, w: x[..., 1:5].square().sum() + x[:, None, 2:, :3].sum(),
    "an empty slice": lambda x, w: x[:, 6:].sum() + x.sum(),
    "checkpointed": lambda x, w: torch.utils.checkpoint.checkpoint(
        lambda t: ce((t * w[1]).flatten(0, 1), TARGETS.flatten()), x, use_reentrant=False
    ),
}  # fmt: skip
GATHERED: dict[str, Function] = {
    "one place": lambda x, w: x[:, 2].square().sum() + x[0, 1, 3] + x[..., -1].sum() + x.select(1, 3).sum(),
    "masked": lambda x, w: x[MASK].square().sum(),
    "masked loss": lambda x, w: ce(x[MASK], TARGETS[MASK]),
    "matmul": lambda x, w: (x @ w).square().sum(),
    "max": lambda x, w: x.max(-1).values.sum() + x.max() + x.amax(1).sum(),
    "every second": lambda x, w: x[:, ::2].square().sum(),
    "norm": lambda x, w: torch.linalg.norm(x),
    "concatenated": lambda x, w: torch.cat([x, x * 2], 1).square().sum(),
    "written": lambda x, w: written(x).square().sum(),
    "along other dims": lambda x, w: (
        x.norm(2, 1).sum() + x.topk(2, -1).values.sum() + (x.flip(1) * SOFT).sum() + x.cumprod(0).sum() + x.mT.sum((0, 2)).prod()
    ),
    "odd view": lambda x, w: (x.reshape(3, -1) * SOFT.reshape(3, -1)).sum(),
    "rows": lambda x, w: torch.stack([row.square().sum() for row in x]).sum(),
    "plain first": lambda x, w: SOFT.mul(x).sum() + F.mse_loss(SOFT, x),
    "weighted bce": lambda x, w: F.binary_cross_entropy_with_logits(x, SOFT, pos_weight=CLASS_WEIGHTS),
}  # fmt: skip


def written(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 1:3, 2] = 0.25
    return x


def ranked(ranks: int, body: Callable[[Any], None]) -> None:
    def target(place: Any) -> dict[str, Any]:
        group = place.connect(torch.device("cpu"))
        body(group)
        dist.barrier(group)
        return {}

    run_ranks(target, ranks)


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, TIME, WORDS, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def both(function: Function, dim: int, rows: Rows, group: Any) -> list[tuple[Tensor, Tensor]]:
    """(actual, expected): the loss, the gradient of this rank's shard, the gradient of a full tensor."""
    x, w = logits(), (CLASS_WEIGHTS + 0.5).requires_grad_()
    expected = function(x, w)
    right = torch.autograd.grad(expected, (x, w), allow_unused=True)
    mine, w = rows.take_part(x.detach(), dim, group.rank()).clone().requires_grad_(), w.detach().requires_grad_()
    found = function(ShardedTensor(mine, dim, rows, group), w)
    got = torch.autograd.grad(found, (mine, w), allow_unused=True)
    pairs = [(found.detach(), expected.detach()), (got[0], rows.take_part(right[0], dim, group.rank()))]
    return pairs + ([(got[1], right[1])] if right[1] is not None else [])


def equal(cases: dict[str, Function], group: Any, counted: list[int]) -> None:
    for name, function in cases.items():
        for dim, rows in CUTS[group.size()]:
            counted.clear()
            try:
                pairs = both(function, dim, rows, group)
            except Exception as error:
                raise AssertionError(f"{name}, dim {dim} cut as {rows}") from error
            worst = [float((a - b).abs().max()) if b.numel() else 0.0 for a, b in pairs]
            assert max(worst) < (1e-6 if name == "Hugging Face" else 1e-12), (name, dim, rows, worst)
            assert torch.equal(collectives.all_reduce_copy(pairs[0][0], group, dist.ReduceOp.MAX), pairs[0][0]), name
            assert cases is GATHERED or not counted, (name, dim, rows, "the whole was gathered")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cases", [KEPT, GATHERED], ids=["kept", "gathered"])
def test_the_loss_and_the_gradients_are_those_of_the_whole(
    ranks: int, cases: dict[str, Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    before = ShardedTensor.gather_full
    monkeypatch.setattr(ShardedTensor, "gather_full", lambda self: (counted.append(1), before(self))[1])
    ranked(ranks, lambda group: equal(cases, group, counted))


def surfaces(group: Any) -> None:
    """Tensor properties that code reads before it computes."""
    rank, (dim, rows) = group.rank(), CUTS[2][0]
    mine = rows.take_part(logits().detach(), dim, rank).clone().requires_grad_()
    x = ShardedTensor(mine, dim, rows, group)
    assert isinstance(x, Tensor) and x.shape == x.size() == (BATCH, TIME, WORDS) and x.size(-1) == WORDS
    assert len(x) == BATCH and x.numel() == x.nelement() == BATCH * TIME * WORDS and x.dim() == x.ndim == 3
    assert x.requires_grad and x.dtype == torch.float64 and x.device.type == "cpu" and x.is_floating_point()
    assert not x.detach().requires_grad and type(x.data) is ShardedTensor and "dim 2" in repr(x)
    assert x.float().dtype == x.to(torch.float32).dtype == x.to("cpu", torch.float32).dtype == torch.float32
    assert type(to_full(x)) is Tensor and to_full(mine) is mine and torch.equal(to_full(x), logits())
    assert torch.equal(x.argmax(-1), logits().argmax(-1)) and torch.equal(to_full(x.argmax(1)), logits().argmax(1))
    assert x.requires_grad_() is x and x.stride() == mine.stride()
    seen = []
    x.register_hook(lambda g: seen.append(g.shape))
    (x * 2).sum().backward()
    assert seen == [mine.shape] and torch.equal(mine.grad, torch.full_like(mine, 2.0))
    with pytest.raises(ValueError, match="rows, not"):
        ShardedTensor(mine.narrow(2, 0, 1), 2, rows, group)
    assert torch.equal(torch.ops.aten.add.Tensor(x, 1), logits() + 1)
    with pytest.raises(TypeError, match="sharded over ranks"), torch._C.DisableTorchFunctionSubclass():
        torch.add(x, 1)
    with pytest.raises(RuntimeError, match="into a view"):
        (x * 1)[0][1, 2] = 3.0

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].expand(BATCH, TIME, WORDS)

    with pytest.raises(TypeError, match="its gradient is lost"):
        Own.apply(x).backward()


def test_a_spread_tensor_looks_like_the_whole() -> None:
    ranked(2, surfaces)


def formats(group: Any) -> None:
    """16-bit losses round like those of the full logits; autocast computes the loss in 32 bits."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim, rows in CUTS[2]:
            for cast in (False, True)[: 1 if dtype is torch.float16 else 2]:
                x = logits(dtype)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    expected = ce(x.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1)
                    (right,) = torch.autograd.grad(expected, x)
                    mine = rows.take_part(x.detach(), dim, group.rank()).clone().requires_grad_()
                    spread = ShardedTensor(mine, dim, rows, group)
                    found = ce(spread.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1)
                    (got,) = torch.autograd.grad(found, mine)
                assert found.dtype == expected.dtype and got.dtype == dtype
                bound = 4 * torch.finfo(dtype).eps
                assert torch.allclose(found, expected, rtol=bound), (dtype, dim, cast, found, expected)
                worst = (got - rows.take_part(right, dim, group.rank())).abs()
                assert not worst.numel() or float(worst.max()) <= bound, (dtype, dim, cast)


def test_low_precision() -> None:
    ranked(2, formats)


def large(group: Any) -> None:
    """Logits that overflow without the maximum subtracted, and words that are masked out on all of a rank."""
    rows = Rows.from_sizes([4, 3])
    x = (logits().detach() * 300).requires_grad_()
    x = x.masked_fill(torch.arange(WORDS) < 4, -torch.inf)
    targets = torch.full((BATCH * TIME,), 5)
    found = ce(ShardedTensor(rows.take_part(x, 2, group.rank()), 2, rows, group).flatten(0, 1), targets)
    assert torch.allclose(found, ce(x.flatten(0, 1), targets), rtol=1e-12)


def test_large_logits() -> None:
    ranked(2, large)


def headed(group: Any) -> None:
    """The loss without logits: of a head sharded by words, of tokens sharded over ranks, and inside of a model."""
    rank, generator = group.rank(), torch.Generator().manual_seed(4)
    shapes = ((BATCH, TIME, 5), (WORDS, 5), (WORDS,))
    hidden, weight, bias = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    loss = ce(F.linear(hidden, weight, bias).flatten(0, 1), TARGETS.flatten())
    right = torch.autograd.grad(loss, (hidden, weight, bias))
    for dim, rows in CUTS[group.size()]:
        for chunk in (1, 5, 100):
            given = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
            if dim == 2:
                given[1:] = [rows.take_part(t.detach(), 0, rank).clone().requires_grad_() for t in (weight, bias)]
                found = linear_cross_entropy(*given[:2], TARGETS, given[2], chunk=chunk, rows=rows, group=group)
            else:
                given[0] = rows.take_part(hidden.detach(), dim, rank).clone().requires_grad_()
                x = ShardedTensor(given[0], dim, rows, group)
                found = linear_cross_entropy(x, given[1], TARGETS, given[2], chunk=chunk)
            assert torch.allclose(found, loss, rtol=1e-13)
            got = list(torch.autograd.grad(found * 2, given))
            if dim == 2:
                expected = [right[0], *(rows.take_part(t, 0, rank) for t in right[1:])]
            else:
                expected = [rows.take_part(right[0], dim, rank), *right[1:]]
                got[1:] = [collectives.all_reduce_copy(g, group) for g in got[1:]]
            assert all(torch.allclose(g, 2 * e, rtol=1e-12, atol=1e-14) for g, e in zip(got, expected))
    attached(group, hidden.detach(), weight.detach())


def attached(group: Any, hidden: Tensor, weight: Tensor) -> None:
    rows = CUTS[group.size()][0][1]
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(5, WORDS, bias=False, dtype=torch.float64))
    head, job_loss = model.lm_head, LinearCrossEntropy(chunk=5)
    head.weight = nn.Parameter(rows.take_part(weight, 0, group.rank()))
    vars(head).update(_rows=rows, _ranks=group)
    job_loss.attach(model)
    found = job_loss(model(hidden), TARGETS)
    whole_loss = ce(F.linear(hidden, weight).flatten(0, 1), TARGETS.flatten())
    assert torch.allclose(found, whole_loss, rtol=1e-13)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loss_without_logits(ranks: int) -> None:
    ranked(ranks, headed)
