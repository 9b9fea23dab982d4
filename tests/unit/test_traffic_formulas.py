"""A dry run's bytes and messages, compared with the formulas of the literature for a model that allows a calculation by hand.

A stack of blocks of two linear maps, without any tied, random or conditional parts. `P` is the number of parameters, `B`
the number of samples in a batch, `W` the number of values per sample between blocks.
"""

import jobs_pipeline
import pytest
import torch
from rarely import rarely
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Job
from plait.config.plan import Plan
from plait.planner.dryrun.dry_run import trace_first_step

W, L, B = 8, 4, 8
P, TENSORS = L * (2 * 4 * W * W + 4 * W + W), L * 4
BYTES = 4
ROW = 6
"""Loss, request to stop, the state of two saves, request to end the run, new names of logged values."""


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((W,), float(i)), torch.zeros(W)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def job() -> Job:
    return Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(L))),
        loss=F.mse_loss,
        data=Rows,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        batch=B,
        steps=4,
    )


def sent(line: str) -> list[dict[str, tuple[int, int]]]:
    """Per rank, without the all-reduce of the statistics row, if it is a separate message."""
    plan = Plan.parse(line)
    found = [dict(rank.totals) for rank in trace_first_step(job(), plan)]
    flags = TENSORS if plan.fsdp > 1 else 0
    row = 8 * (1 + ROW + plan.ranks + 2 * plan.world + flags)  # the norm; samples, times; which parameters were used
    for rank in found if plan.fsdp * plan.tp * plan.cp * plan.pp > 1 else ():
        calls, size = rank.pop("allreduce_")
        if calls > 1:
            rank["allreduce_"] = calls - 1, size - row
        else:
            assert size == row
    return found


@pytest.mark.parametrize("ranks", (2, 4))
def test_copies_sum_all_gradients_once(ranks: int) -> None:
    """The same message contains the flags of used parameters and the statistics row."""
    numbers = P + TENSORS + ROW + 2 * ranks + ranks
    for line in (f"dp={ranks}", f"dp={ranks} microbatches=2"):
        assert sent(line) == [{"allreduce_": (1, BYTES * numbers)}] * ranks


@pytest.mark.parametrize("ranks", (2, 4))
def test_shards_gather_parameters_and_sum_gradients(ranks: int) -> None:
    """A model this small is gathered at once: in forward, and freed after backward. With micro-batches, in each of them."""
    part, others = BYTES * P // ranks, ranks - 1
    for microbatches in (1, 2):
        times = 2 * microbatches
        each = dict.fromkeys(("send", "recv_"), (times * others, times * others * part))
        assert sent(f"fsdp={ranks} microbatches={microbatches}") == [each] * ranks


def test_copies_of_shards_sum_their_parts() -> None:
    for rank in sent("dp=2 fsdp=2"):
        assert rank["allreduce_"] == (1, BYTES * P // 2)


@pytest.mark.parametrize("ranks", (2, 4))
def test_slices_sum_where_a_pair_ends_and_where_it_begins(ranks: int) -> None:
    """In backward there is none at the first slice: the samples need no gradient. The rows' biases are used in part."""
    sums, biases = (L + L - 1) * B * W, L * (W + 1)
    assert sent(f"tp={ranks} sequence_parallel=false") == [{"allreduce_": (2 * L, BYTES * (sums + biases))}] * ranks


@pytest.mark.parametrize("stages", (2, 4))
def test_stages_hand_activations_on_and_their_gradients_back(stages: int) -> None:
    """With a flag for each, which shows whether there is a gradient."""
    activations = stages, BYTES * B * W
    gradients = stages, BYTES * B * W + 4 * stages
    both = 2 * stages, activations[1] + gradients[1]
    ranks = sent(f"pp={stages} microbatches={stages}")
    assert ranks[0] == {"recv_": gradients, "send": activations}
    assert ranks[-1] == {"recv_": activations, "send": gradients}
    assert ranks[1:-1] == [{"recv_": both, "send": both}] * (stages - 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, *rarely(4)))
def test_a_ring_goes_round_with_keys_and_values(ranks: int) -> None:
    """Forward and backward: N - 1 ring steps with a rank's sequence shard, and N - 1 with the gradients of keys and values."""
    found = trace_first_step(jobs_pipeline.HARD["gpt"](), Plan.parse(f"cp={ranks}"))
    for rank in found:
        calls = rank.totals["send"][0]
        assert calls == rank.totals["recv_"][0] and calls % (3 * (ranks - 1)) == 0 and calls
