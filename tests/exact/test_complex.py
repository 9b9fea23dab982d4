"""Complex parameters and buffers: proofs use complex128 and compare both parts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config.plan import Plan
from plait.proof.probes import compare_tensors
from plait.proof.verify import verify


class Waves:
    """A wave, and the same wave some time later."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(i)
        x = torch.randn(2, 16, generator=g)
        return x, x.roll(3, -1)


class Filter(nn.Module):
    """Multiplies frequencies by complex weights, and by a complex running mean of their phases."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 9, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(9), torch.arange(9.0) / 9))
        self.gain = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.gain(x)) * self.weight * self.turn
        return torch.fft.irfft(spectrum.cfloat(), n=16) + spectrum.abs().mean((-2, -1))[:, None, None]


def job() -> plait.Job:
    return plait.Job(
        model=lambda: nn.Sequential(Filter(), nn.Tanh(), Filter(), nn.Tanh(), Filter()), loss=nn.functional.mse_loss, data=Waves,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2), batch=8, steps=6, clip=1.0,
    )  # fmt: skip


def test_imaginary_parts_are_compared() -> None:
    right = {"w": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)}
    wrong = {"w": torch.tensor([1 + 2j, 3 + 1j], dtype=torch.complex128)}
    assert compare_tensors("B", "buffers", right, right, ["w"], 0.0).equal
    assert not compare_tensors("B", "buffers", right, wrong, ["w"], 0.0).equal


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "dp=2 microbatches=2", "dp=3"])
def test_complex_parameters_are_equal(plan: str) -> None:
    verdict = verify(job(), Plan.parse(plan))
    assert verdict.equal, str(verdict)


@pytest.mark.slow
def test_complex_parameters_resume_under_another_plan(tmp_path: Path) -> None:
    straight = plait.train(job(), plan="dp=2", quiet=True, runs=str(tmp_path / "straight"))
    plait.train(job(), plan="dp=2", steps=3, quiet=True, runs=str(tmp_path / "resumed"))
    resumed = plait.train(job(), plan="pp=2", resume=True, quiet=True, runs=str(tmp_path / "resumed"))
    assert resumed.losses[-1] == pytest.approx(straight.losses[-1], rel=1e-5)
