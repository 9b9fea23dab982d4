"""The fake groups and tensors of a dry run, its kinds of ranks, and its detection of ranks that would wait for each other."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import jobs_pipeline
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Job, PlaitError, Plan
from plait.cli.main import main
from plait.engine.traffic import Message, Traffic, check_agreement
from plait.parallel.apply_order import make_shard_plan
from plait.planner.dryrun.dry_run import RankKinds, dry_run, sketch_weights
from plait.planner.dryrun.fake_rank_mode import FakeRankMode, fake_process_group
from plait.planner.dryrun.measure import measure_step
from plait.tensors.torch_private import FakeTensorMode

WIDTH, BATCH = 8, 20


class Rows:
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(i)), torch.tensor(i % 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def mlp() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 3))


def job(model: Any = mlp, loss: Any = F.cross_entropy, batch: int = BATCH) -> Job:
    return Job(
        model=model,
        loss=loss,
        data=Rows,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        batch=batch,
        steps=9,
        clip=1.0,
    )


# — fakes —


def test_numbers_that_are_not_there_have_stand_ins() -> None:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeRankMode(fakes):
        hollow = fakes.from_tensor(torch.full((3,), 7.0))
        assert hollow.tolist() == [0.0, 0.0, 0.0] and float(hollow.sum()) == 0.0
        assert (hollow > 1).tolist() == [True, True, True]
        assert hollow.argmax().item() == 1


def test_a_real_tensor_keeps_its_numbers_when_one_without_is_written_into_it() -> None:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeRankMode(fakes):
        real = torch.arange(4.0, dtype=torch.float64)
        same = real.copy_(fakes.from_tensor(torch.ones(4, dtype=torch.float64)))
        assert same is real and real.tolist() == [0.0, 1.0, 2.0, 3.0]
        real[:2].add_(1)
        assert real.tolist() == [1.0, 2.0, 2.0, 3.0]


def test_other_ranks_send_what_this_one_sends() -> None:
    with fake_process_group(1, 3), FakeRankMode(FakeTensorMode(allow_non_fake_inputs=True)):
        gathered = [torch.empty(2, dtype=torch.int64) for _ in range(3)]
        torch.distributed.all_gather(gathered, torch.tensor([4, 5]))
        assert [t.tolist() for t in gathered] == [[4, 5]] * 3
        there = torch.zeros(2, dtype=torch.bool)
        torch.distributed.recv(there, 0)
        assert there.tolist() == [True, True]
    assert not torch.distributed.is_initialized()


# — kinds of ranks —

PLANS = (
    "dp=1", "dp=4", "dp=3", "fsdp=3", "dp=2 fsdp=4", "tp=4", "tp=2", "pp=2 microbatches=2", "pp=2 dp=3 tp=2 microbatches=3",
    "pp=4 dp=4 fsdp=2 tp=4 microbatches=2",
)  # fmt: skip


def kinds_of(line: str, batch: int = BATCH) -> RankKinds:
    plan, asked = Plan.parse(line), job(batch=batch)
    sketch = sketch_weights(asked, plan)[0]
    return RankKinds.from_table(make_shard_plan(asked, plan, sketch), sketch, batch)


@pytest.mark.parametrize("line", PLANS)
def test_every_rank_is_like_one_that_runs(line: str) -> None:
    kinds = kinds_of(line, 64)
    counts = Counter(kinds.get_first(rank) for rank in range(Plan.parse(line).world))
    assert counts == kinds.count_kinds()
    assert all(kinds.get_first(rank) == rank for rank in counts)


def test_ranks_with_other_samples_or_shorter_parts_are_of_another_kind() -> None:
    assert kinds_of("dp=3").count_kinds() == {0: 2, 2: 1}  # 7, 7 and 6 samples
    assert kinds_of("fsdp=5").count_kinds() == {0: 3, 3: 1, 4: 1}  # of 3 rows: 1, 1, 1, 0, 0; of 8, 32


def test_shards_of_one_size_of_unlike_slices_are_of_two_kinds() -> None:
    """Shards are gathered as if all had the size of the largest, which differs per slice: V012 for an LSTM under fsdp and tp."""
    asked, plan = jobs_pipeline.LISTED["recurrent"](), Plan.parse("fsdp=2 tp=2")
    sketch = sketch_weights(asked, plan)[0]
    assert RankKinds.from_table(make_shard_plan(asked, plan, sketch), sketch, 4).count_kinds() == {0: 1, 1: 2, 2: 1}


def test_stages_without_uneven_parts_have_no_kinds_for_them() -> None:
    """The layer of 3 rows is on the last of two stages. The others' rows divide evenly."""
    assert kinds_of("pp=2 fsdp=4 microbatches=2", 32).count_kinds() == {0: 4, 4: 3, 7: 1}


def test_sixteen_thousand_ranks_are_few_kinds() -> None:
    counts = kinds_of("pp=4 dp=1024 tp=4 microbatches=2", 4096).count_kinds()
    assert sum(counts.values()) == 16384 and len(counts) == 4


# — messages —


@pytest.fixture(scope="module")
def records() -> dict[int, Traffic]:
    """Traffic of the four ranks of a pipeline of two stages, each with tp=2."""
    from plait.planner.dryrun import dry_run as dryrun

    plan = Plan.parse("pp=2 tp=2 microbatches=2")
    sketch = dryrun.sketch_weights(job(), plan)[0]
    kinds = RankKinds((0, 1, 2, 3))
    found: dict[int, Traffic] = {}
    for rank in kinds.count_kinds():
        found[rank] = Traffic(rank, plan)
        with dryrun.run_alone(job(), found[rank], sketch, real=False) as (engine, given, _):
            measure_step(engine, 1, given)
    return found


def like(rank: int) -> int:
    return rank


def changed(records: dict[int, Traffic], rank: int, op: str, change: Any) -> dict[int, Traffic]:
    """The records with the first message of that operator changed or removed."""
    traffic = records[rank]
    at = next(i for i, m in enumerate(traffic.messages) if m.op == op)
    made = change(traffic.messages[at])
    messages = [*traffic.messages[:at], *([made] if made else []), *traffic.messages[at + 1 :]]
    return records | {rank: Traffic(rank, traffic.plan, traffic.groups, messages)}


def test_ranks_of_a_plan_agree(records: dict[int, Traffic]) -> None:
    check_agreement(records, like)
    assert {c.axes for m in records.values() for c in m.groups} == {"pp", "tp", "pp×tp"}
    assert all(m.messages for m in records.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, op, change, told",
    [
        (1, "allreduce_", lambda m: None, "ranks 0 and 1"),
        (1, "allreduce_", lambda m: replace(m, bytes=m.bytes + 4), "ranks 0 and 1"),
        (3, "allreduce_", lambda m: replace(m, op="broadcast_"), "ranks 2 and 3"),
        (2, "recv_", lambda m: None, "ranks 0 and 2"),
        (0, "send", lambda m: replace(m, bytes=1), "ranks 0 and 2"),
        (0, "send", lambda m: replace(m, peer=0), "ranks 0 and 2"),
    ],
)
def test_ranks_that_would_wait_for_each_other_are_named(
    records: dict[int, Traffic], rank: int, op: str, change: Any, told: str
) -> None:
    with pytest.raises(PlaitError, match="D001") as caught:
        check_agreement(changed(records, rank, op, change), like)
    assert told in str(caught.value)


def test_an_extra_message_is_seen(records: dict[int, Traffic]) -> None:
    extra = Traffic(
        3, records[3].plan, records[3].groups, [*records[3].messages, Message(0, "send", 8, "[2] float32", 1)]
    )
    with pytest.raises(PlaitError, match="nothing more"):
        check_agreement(records | {3: extra}, like)


# — complete dry runs —


class Looks(nn.Module):
    """Takes another branch if its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if float(x.detach().sum()) > 0 else -x)


def looking(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[outputs.detach() > -9].mean()


@pytest.mark.parametrize("given", [{"model": Looks}, {"loss": looking}])
def test_what_looks_at_values_runs_on_real_tensors(given: dict[str, Any]) -> None:
    found = dry_run(job(**given), Plan.parse("dp=2"))
    assert found.fullest.ranks == 2 and found.fullest.peak.total > 0


@pytest.mark.parametrize("line", ["compile=true", "dp=2 processes=one"])
def test_what_cannot_run_dry_is_said(line: str) -> None:
    with pytest.raises(PlaitError, match="D002"):
        dry_run(job(), Plan.parse(line))


def test_a_plan_that_cannot_work_is_refused() -> None:
    with pytest.raises(PlaitError, match="P012"):
        dry_run(job(), Plan.parse("dp=32"))


@pytest.mark.slow
def test_nothing_of_a_dry_run_stays() -> None:
    state = torch.get_rng_state()
    dry_run(job(), Plan.parse("fsdp=2"))
    assert not torch.distributed.is_initialized()
    assert torch.equal(torch.zeros(2), torch.tensor([0.0, 0.0])) and type(torch.zeros(2)) is Tensor
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # torch's own value, when it makes a fake tensor of a view
def test_the_command_line_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "tests/training.py", "--plan", "pp=2 dp=2 microbatches=2", "--dry-run"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "one rank of each of 2 kinds, of 4 ranks" in shown and "  parameters" in shown and "pp×dp 1×" in shown
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [k["ranks"] for k in found["kinds"]] == [2, 2] and found["fullest"] in (0, 2)
    assert all(k["peak"]["total"] == sum(k["peak"]["categories"].values()) for k in found["kinds"])
