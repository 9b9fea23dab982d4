"""A process that is no rank analyzes the model once. Forked ranks run the model on real tensors only."""

import os
from pathlib import Path

import pytest
import torch
from launched import Command
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.cli.verify import verify_plan
from plait.config.command_options import VerifyOptions
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.plan import Plan
from plait.proof.probes import Trace
from plait.proof.verify import verify

FILE = Path(__file__)
ANALYSED, TRAINED = "analysed", "trained"


class Noting(nn.Module):
    """Records each process that runs it: as `analysed` on fake tensors, as `trained` on real tensors with gradients."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder, self.blocks = folder, nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        fake = isinstance(x, torch._subclasses.FakeTensor)
        if fake or (self.training and torch.is_grad_enabled()):
            (Path(self.folder) / f"{ANALYSED if fake else TRAINED}-{os.getpid()}").touch()
        return self.blocks(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(2, 8, generator=torch.Generator().manual_seed(i))
        return drawn[0], drawn[1]


def job(folder: str = ".") -> plait.Job:
    return plait.Job(
        model=lambda: Noting(folder), loss=F.mse_loss, data=Samples, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), batch=8, steps=2
    )  # fmt: skip


def processes(folder: Path, kind: str) -> set[str]:
    return {path.name for path in folder.glob(f"{kind}-*")}


@pytest.mark.parametrize("plan", ["dp=2 tp=2", "pp=4 microbatches=4", "dp=2 activation_checkpointing=full"])
def test_forked_ranks_do_not_analyse_the_model(plan: str, tmp_path: Path) -> None:
    command = Command("train", f"{FILE}:job", "--plan", plan, "--check", "none", "--device", "cpu", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert len(processes(tmp_path, ANALYSED)) == 1
    assert len(processes(tmp_path, TRAINED)) >= Plan.parse(plan).world


def test_a_proof_analyses_the_model_while_its_reference_trains(tmp_path: Path) -> None:
    verdict = verify_plan(VerifyOptions(job="noting", device="cpu"), Plan.parse("dp=4"), job(str(tmp_path)))
    assert verdict.equal, verdict
    ranks = processes(tmp_path, TRAINED)
    assert len(ranks) >= 5
    assert len(processes(tmp_path, ANALYSED)) <= 2  # the reference and the analysis


def test_a_reference_that_is_stopped_is_not_tried_with_a_larger_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a busy machine, a stopped first attempt caused a second one, which failed on leftovers of the first: P072 for a correct job."""
    tries = list[int]()

    def stopped(*_: object) -> Trace:
        tries.append(1)
        raise PlaitError(Problem("C001", "the reference on one device has made no progress for 90 s"), FAILED)

    monkeypatch.setattr(Trace, "from_process", stopped)
    with pytest.raises(PlaitError) as raised:
        verify(job(str(tmp_path)), Plan.parse("dp=4"), device="cpu")
    assert raised.value.codes == ["C001"] and len(tries) == 1
