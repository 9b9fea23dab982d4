"""Why plait, and not DDP's hooks, sums the gradients of replicas of a pipeline's stages.

torch sums the gradients of a module's replicas in hooks that a backward pass fires. Under a pipeline schedule this is silently
wrong in two ways. The first test here fails when a release of torch has fixed one of them:

- `torch.distributed._composable.replicate`, the older one, prepares hooks at the end of a forward pass, for one backward. torch's
  pipeline supports DDP's class and FSDP2's, but not this one. If two forward passes come before two backward passes, the second
  backward sums nothing.
- A backward in two halves calls `autograd.grad` instead of letting autograd accumulate gradients, so that DDP's hooks do not fire
  (pytorch/pytorch#144530). The first stage sends no input gradients, and runs its backward in one piece.

Here each of two ranks is a replica of the pipeline and has both of its stages; the schedule is torch's.
"""

from functools import partial
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from plait.config.plan import Plan
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify

COPIES, MICROBATCHES, SAMPLES, TOLERANCE = 2, 4, 16, 1e-9


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
    return [first.double(), nn.Sequential(nn.Tanh(), nn.Linear(8, 1)).double()]


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SAMPLES, n, generator=g, dtype=torch.float64) for n in (6, 1))


def gradients(parts: list[nn.Module]) -> list[list[Tensor]]:
    return [[p.grad for p in part.parameters()] for part in parts]


def one_device() -> list[list[Tensor]]:
    made, (x, y) = stages(), batch()
    F.mse_loss(made[1](made[0](x)), y).backward()
    return gradients(made)


def by_hand(part: nn.Module) -> nn.Module:
    """Without replicas in torch: gradients are averaged after the step."""
    return part


def torchs(place: Place, schedule: Any, how: Any) -> list[bool]:
    """For each stage, whether the gradients equal one device if `how` replicates it."""
    device = torch.device("cpu")
    place.connect(device)
    alone = [dist.new_group([rank]) for rank in range(COPIES)][place.rank]
    made = [how(part) for part in stages()]
    pipe = schedule(
        [PipelineStage(part, i, len(made), device, group=alone) for i, part in enumerate(made)],
        MICROBATCHES,
        loss_fn=F.mse_loss,
    )
    x, y = (t.chunk(COPIES)[place.rank] for t in batch())
    pipe.step(x, target=y)
    for gradient in (g for part in gradients(made) for g in part if how is by_hand):
        dist.all_reduce(gradient)
        gradient /= COPIES
    pairs = zip(gradients(made), one_device())
    return [all(float((a - b).abs().max()) < TOLERANCE for a, b in zip(*pair)) for pair in pairs]


@pytest.mark.parametrize(
    "schedule, how, right",
    (
        (ScheduleInterleaved1F1B, DistributedDataParallel, [True, True]),
        (ScheduleInterleaved1F1B, replicate, [False, True]),
        (ScheduleInterleavedZeroBubble, by_hand, [True, True]),
        (ScheduleInterleavedZeroBubble, DistributedDataParallel, [True, False]),
        (ScheduleInterleavedZeroBubble, replicate, [False, False]),
    ),
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_torchs_copies_under_a_pipelines_table(schedule: Any, how: Any, right: list[bool]) -> None:
    """`right`, for each stage. A stage that becomes right is a bug that torch fixed: the module docstring describes them."""
    assert fork.run_ranks(partial(torchs, schedule=schedule, how=how), COPIES) == [right] * COPIES


@pytest.mark.parametrize("schedule", ("1f1b", "zb"))
def test_plaits_copies_equal_one_device(schedule: str) -> None:
    job = jobs.make(lambda: nn.Sequential(*(layer for part in stages() for layer in part)).float())
    verdict = verify(job, Plan.parse(f"pp=2 dp=2 microbatches=4 schedule={schedule}"))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()
