"""Compressed sums lose nothing: the sum of all results plus the sum of the ranks' residuals equals the sum of all inputs. Other
invariants for random tensors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.parallel.compression import compressor
from plait.parallel.compression.compressor import Compressor, orthonormalize

KINDS = ("bf16", "int8", "powersgd")
SHAPES = ((3,), (), (4, 5), (6, 1), (0, 3), (2, 3, 4), (9, 8))


class Threads:
    """A process group whose ranks are threads of this process. Messages stay in `given` until all ranks have received them."""

    def __init__(self, ranks: int):
        self.ranks, self.barrier, self.given = ranks, threading.Barrier(ranks), dict[int, Tensor]()
        self.mine, self.bytes = threading.local(), 0

    def size(self) -> int:
        return self.ranks

    def all(self, tensor: Tensor) -> list[Tensor]:
        self.given[self.mine.rank] = tensor.clone()
        self.barrier.wait(30)
        found = [self.given[rank] for rank in range(self.ranks)]
        self.barrier.wait(30)
        return found

    def gather(self, rows: list[Tensor], tensor: Tensor, group: Any) -> None:
        for row, one in zip(rows, self.all(tensor)):
            row.copy_(one)
        self.bytes += tensor.nbytes * (self.ranks - 1) * (self.mine.rank == 0)

    def reduce(self, tensor: Tensor, group: Any) -> None:
        tensor.copy_(torch.stack(self.all(tensor)).sum(0))
        self.bytes += 2 * tensor.nbytes * (self.ranks - 1) // self.ranks * (self.mine.rank == 0)

    def run(self, work: Callable[[int], None]) -> None:
        failed: list[BaseException] = []

        def one(rank: int) -> None:
            self.mine.rank = rank
            try:
                work(rank)
            except BaseException as error:
                failed.append(error)
                self.barrier.abort()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather", self.gather)
            patch.setattr(dist, "all_reduce", self.reduce)
            ranks = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
        if failed:
            raise failed[0]


def drawn(seed: int, *words: int) -> dict[str, Tensor]:
    """Tensors of very unequal sizes. Some are zero and some have low rank."""
    g = torch.Generator().manual_seed(hash((seed, *words)) % 2**31)
    found = {
        str(shape): torch.randn(shape, generator=g, dtype=torch.float64) * 10.0 ** (k - 3)
        for k, shape in enumerate(SHAPES)
    }
    found["flat"] = torch.outer(*torch.randn(2, 7, generator=g, dtype=torch.float64))
    found["zero"] = torch.zeros(5, 6, dtype=torch.float64)
    return found


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_nothing_is_lost(kind: str, ranks: int, rank: int, steps: int, seed: int) -> None:
    """For any number of steps, and for ranks that contribute a tensor or nothing. All ranks get the same bits."""
    like, group = drawn(seed), Threads(ranks)
    made = [Compressor(kind, like, seed, rank) for _ in range(ranks)]
    applied: list[list[dict[str, Tensor]]] = [[] for _ in range(ranks)]
    gives = lambda step, who, name: (step + who + len(name)) % 4 > 0  # noqa: E731

    def work(who: int) -> None:
        for step in range(steps):
            mine = {n: t if gives(step, who, n) else None for n, t in drawn(seed, step, who).items()}
            applied[who].append(made[who].sum(mine, group))
            made[who].commit()

    group.run(work)
    for name in like:
        parts = [
            drawn(seed, step, who)[name] for step in range(steps) for who in range(ranks) if gives(step, who, name)
        ]
        total = torch.stack([torch.zeros_like(like[name]), *parts]).sum(0)
        left = torch.stack([m.residuals.get(name, torch.zeros_like(total)) for m in made]).sum(0)
        found = torch.stack([row[name] for row in applied[0]]).sum(0) + left
        scale = max((float(t.abs().max()) for t in parts if t.numel()), default=1.0)
        assert torch.allclose(found, total, rtol=0, atol=1e-12 * max(scale, 1e-30) * len(parts) or 1e-30), name
    for other, rows in zip(made[1:], applied[1:]):
        assert all(torch.equal(a[n], b[n]) for a, b in zip(applied[0], rows) for n in like)
        assert all(torch.equal(f, other.factors[n]) for n, f in made[0].factors.items())


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_matrices_of_low_rank_arrive_whole(ranks: int, low: int, seed: int) -> None:
    """If together they have no more directions than the thin matrices have columns."""
    g = torch.Generator().manual_seed(seed)
    left, group = torch.randn(12, low, generator=g, dtype=torch.float64), Threads(ranks)
    each = [{"m": left @ torch.randn(low, 9, generator=g, dtype=torch.float64)} for _ in range(ranks)]
    made = [Compressor("powersgd", each[0], seed, 3) for _ in range(ranks)]
    sums: list[Any] = [None] * ranks

    def work(who: int) -> None:
        sums[who] = made[who].sum(each[who], group)
        made[who].commit()

    group.run(work)
    total = torch.stack([one["m"] for one in each]).sum(0)
    assert torch.allclose(sums[0]["m"], total, rtol=0, atol=1e-9 * float(total.abs().max()))


@given(st.integers(0, 99), st.integers(1, 4))
def test_columns_are_orthonormal_or_left_out(seed: int, rank: int) -> None:
    g = torch.Generator().manual_seed(seed)
    thin = torch.randn(6, 5, generator=g, dtype=torch.float64)
    thin[:, 1:rank] = thin[:, :1] * torch.arange(1.0, rank, dtype=torch.float64)
    basis, kept = orthonormalize(thin, torch.full((5,), 1e-8, dtype=torch.float64))
    assert kept.tolist() == [True] + [False] * (rank - 1) + [True] * (5 - rank)
    assert torch.allclose(basis.T @ basis, torch.diag(kept.double()), atol=1e-12)


@pytest.mark.parametrize("kind", ("bf16", "int8", "powersgd"))
@pytest.mark.parametrize("ranks", (2, 4))
def test_the_price_is_what_is_sent(kind: str, ranks: int) -> None:
    like = {name: t.float() for name, t in drawn(0).items()}
    group = Threads(ranks)
    made = [Compressor(kind, like, 0, 2) for _ in range(ranks)]
    group.run(lambda who: made[who].sum(like, group) and None)
    assert group.bytes == compressor.count_sent_bytes(kind, [tuple(t.shape) for t in like.values()], ranks, 4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_was_not_taken_over_leaves_nothing(kind: str) -> None:
    """For a step that is skipped or repeated, and for the unused results of a completed step."""
    like = drawn(3)
    made = Compressor(kind, like, 0, 1)
    made.sum(like, None)
    made.commit()
    before = {name: t.clone() for name, t in made.state().items()}
    made.sum(drawn(4) | {"flat": like["flat"] * torch.nan}, None)
    first = made.sum(drawn(5), None)
    assert all(torch.equal(t, before[name]) for name, t in made.state().items())
    assert all(torch.equal(t, first[name]) for name, t in made.sum(drawn(5), None).items())
    made.discard(["flat"])
    made.commit()
    changed = {name for name, t in made.state().items() if not torch.equal(t, before[name])}
    assert changed and not any(name.endswith("/flat") for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind: str) -> None:
    for wrong in (torch.nan, torch.inf):
        like = {"m": torch.ones(6, 6), "v": torch.ones(3)}
        given = {name: t.clone() for name, t in like.items()}
        given["m"][2, 3] = wrong
        assert not bool(Compressor(kind, like, 0, 1).sum(given, None)["m"].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_tensors_have_fp32_residuals(kind: str) -> None:
    like = {"m": torch.full((8, 8), 1 + 2**-7, dtype=torch.bfloat16)}
    made = Compressor(kind, like, 0, 1)
    assert made.sum(like, None)["m"].dtype == torch.bfloat16
    assert {t.dtype for t in made.state().values()} == {torch.float32}
