"""Bugs of compressed all-reduces, each injected into the ranks; verify has its own implementation and must detect each.

None of these stops a training, and error feedback hides most of them from a loss curve.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jobs_compressed
import pytest
import torch
from faulty import Patch
from rarely import sampled
from torch import Tensor
from torch.distributed import distributed_c10d as dist

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.parallel.compression import compressor
from plait.parallel.compression.compressor import Compressor
from plait.parallel.data.buckets import CompressedSums
from plait.proof.verify import verify


def committed(change: Callable[[Compressor], None]) -> Patch:
    """Call `change` after each step."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Compressor.commit

        def commit(self: Compressor) -> None:
            real(self)
            change(self)

        monkeypatch.setattr(Compressor, "commit", commit)

    return patch


def lost(self: Compressor) -> None:
    for residual in self.residuals.values():
        residual.zero_()


def swapped(self: Compressor) -> None:
    for residual in self.residuals.values():
        both = [torch.empty_like(residual) for _ in range(2)]
        dist.all_gather(both, residual)
        residual.copy_(both[1 - dist.get_rank()])


def cold(self: Compressor) -> None:
    self.factors = dict(self.first_factors)


def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Compressor._add_residual

    def ready(self: Compressor, name: str, tensor: Tensor | None) -> Tensor:
        found = real(self, name, tensor)
        return found + self.residuals[name] if name in self.residuals else found

    monkeypatch.setattr(Compressor, "_add_residual", ready)


def clipped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CompressedSums.finish

    def finish(self: CompressedSums) -> Tensor | None:
        given = [p for p in self.parameters.values() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(given, 0.1)
        return real(self)

    monkeypatch.setattr(CompressedSums, "finish", finish)


def unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank scales the integers of all others by its own scale."""
    real = compressor.gather_tensors

    def gathered(tensors: Mapping[str, Tensor], group: Any) -> Any:
        for name, rows in real(tensors, group):
            yield name, [tensors[name]] * len(rows) if rows[0].dtype == torch.float64 else rows

    monkeypatch.setattr(compressor, "gather_tensors", gathered)


def averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Compressor.sum
    monkeypatch.setattr(
        Compressor, "sum", lambda self, given, group: {n: t / group.size() for n, t in real(self, given, group).items()}
    )


def of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's residual is its gradient minus the sum, not minus its own message."""
    real = compressor.sum_int8

    def sum_int8(given: Mapping[str, Tensor], group: Any) -> Any:
        sums, _ = real(given, group)
        return sums, {name: x - sums[name] for name, x in given.items()}

    monkeypatch.setattr(compressor, "sum_int8", sum_int8)


def unorthogonal(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(thin: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        return thin / torch.linalg.vector_norm(thin, dim=0).clamp(min=1e-30), torch.ones(
            thin.shape[1], dtype=torch.bool
        )

    monkeypatch.setattr(compressor, "orthonormalize", normed)


def unforgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that no rank used in a step are treated as sent."""
    monkeypatch.setattr(Compressor, "discard", lambda self, names: None)


def own_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank draws the first factor from its own generator."""
    real = compressor.make_first_factor
    monkeypatch.setattr(
        compressor, "make_first_factor", lambda name, like, seed, rank: real(name, like, seed + dist.get_rank(), rank)
    )


def never_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compressor, "commit", lambda self: None)


FIRST, LATER = "the first sum", "later steps are not"
BUGS: dict[str, tuple[Patch, str, str, str]] = {
    "the residual is lost": (committed(lost), "int8", "V026", LATER),
    "bf16 without error feedback": (never_taken_over, "bf16", "V026", LATER),
    "the residual of the other rank": (committed(swapped), "int8", "V026", LATER),
    "clipped before the sum": (clipped_first, "int8", "V026", FIRST),
    "another rank's scale is forgotten": (unscaled, "int8", "V004", "ranks"),
    "a mean instead of the sum": (averaged, "bf16", "V026", "0.5 times"),
    "the factor begins anew in every step": (committed(cold), "powersgd compression_rank=1", "V026", LATER),
    "the residual counts twice": (twice, "int8", "V026", LATER),
    "the residual is that of the sum": (of_the_sum, "int8", "V026", LATER),
    "columns that are not orthogonal": (unorthogonal, "powersgd", "V026", FIRST),
    "a factor of each rank's own": (own_factor, "powersgd", "V026", FIRST),
    "what no rank used is taken for sent": (unforgotten, "int8", "V026", LATER),
}  # fmt: skip


@pytest.mark.parametrize("bug", sampled(4, BUGS))
def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    patch, kind, code, told = BUGS[bug]
    patch(monkeypatch)
    verdict = verify(jobs_compressed.job("courses", clip=1.0), Plan.parse(f"dp=2 grad_compression={kind}"))
    assert verdict.exit_code == DIFFERENT, "not found"
    assert verdict.code == code and told in verdict.cause, (verdict.code, verdict.cause)


def test_what_changes_nothing_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals that were swapped twice are unchanged."""
    committed(lambda self: (swapped(self), swapped(self), None)[2])(monkeypatch)
    assert verify(jobs_compressed.job("courses", clip=1.0), Plan.parse("dp=2 grad_compression=int8")).equal
