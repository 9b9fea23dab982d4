"""Experts that the ranks of a larger `fsdp` distribute and shard: equal to one device, and as small as documented."""

import dataclasses
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jobs_moe
import pytest
import torch
from rarely import every, rarely, sampled

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp.runtime import ShardScatter, compute_padded_size
from plait.parallel.mesh import SAME_EXPERTS, Mesh, to_expert_axes
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.dryrun.measure import measure_step
from plait.proof.verify import verify

mixtral = jobs_moe.mixtral
listed = partial(jobs_moe.gpt, loss=jobs_moe.plain_loss)
balance = jobs_moe.gpt
five = partial(jobs_moe.gpt, experts=5, width=10, loss=jobs_moe.plain_loss, always=True)


def qwen3() -> plait.Job:
    return dataclasses.replace(jobs_moe.qwen3(), loss=jobs_moe.balanced)


class Scaled(jobs_moe.Expert):
    """An expert with a parameter that cannot be sharded."""

    def __init__(self, width: int):
        super().__init__(width)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def scaled() -> plait.Job:
    def model() -> torch.nn.Module:
        made = jobs_moe.Gpt()
        for block in made.blocks:
            block.moe.experts = torch.nn.ModuleList(Scaled(12) for _ in range(4))
        return made

    return dataclasses.replace(listed(), model=model)


def frozen() -> plait.Job:
    """The first layer's experts are frozen, and so is one tensor of each expert of the second layer."""

    def model() -> torch.nn.Module:
        made = jobs_moe.Gpt()
        made.blocks[0].moe.experts.requires_grad_(False)
        for expert in made.blocks[1].moe.experts:
            expert.up.weight.requires_grad_(False)
        return made

    return dataclasses.replace(listed(), model=model)


TRIED = (
    (mixtral, "fsdp=4 ep=2 zero_stage=1 microbatches=3"), (balance, "fsdp=4 ep=2 zero_stage=1"), (qwen3, "dp=2 fsdp=4 ep=2 zero_stage=2"),
    (listed, "pp=2 fsdp=4 ep=2 microbatches=2"), (five, "dp=2 fsdp=3 ep=2"),
    (mixtral, "fsdp=4 ep=2 activation_checkpointing=full offload=optimizer"), (scaled, "fsdp=4 ep=2"), (qwen3, "fsdp=4 ep=2 precision=bf16"),
)  # fmt: skip
MORE = (
    (mixtral, "fsdp=4 ep=2"), (mixtral, "fsdp=4 ep=2 tp=2"), (listed, "fsdp=4 ep=2 zero_stage=2 microbatches=2"),
    (mixtral, "dp=2 fsdp=4 ep=4 microbatches=2"), (qwen3, "fsdp=4 ep=2 cp=2"), (listed, "fsdp=4 ep=2 activation_checkpointing=selective"),
    (listed, "pp=2 fsdp=4 ep=2 microbatches=3 schedule=zb zero_stage=2"), (listed,
        "pp=2 fsdp=4 ep=2 microbatches=2 zero_stage=1 activation_checkpointing=full"),
    (partial(listed, always=True), "dp=2 fsdp=4 ep=2 microbatches=2 zero_stage=2"), (partial(balance, depth=1, times=2), "fsdp=4 ep=2"),
    (mixtral, "fsdp=4 ep=2 cp=2"), (jobs_moe.gpt_oss, "fsdp=4 ep=2 zero_stage=2 activation_checkpointing=full microbatches=2"), (frozen,
        "fsdp=4 ep=2"),
    (five, "fsdp=4 ep=2"), (qwen3, "fsdp=4 ep=2 tp=2 zero_stage=1"), (balance, "fsdp=8 ep=2"), (balance, "fsdp=8 ep=4 zero_stage=2"), (mixtral,
        "fsdp=8 ep=4"),
)  # fmt: skip


def equal(job: plait.Job, plan: str) -> None:
    verdict = verify(job, Plan.parse(plan))
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause)
    assert verdict.forced["clipped"]


@pytest.mark.slow
@pytest.mark.parametrize("job, plan", every(8, TRIED))
def test_experts_in_parts(job: Any, plan: str) -> None:
    equal(dataclasses.replace(job(), batch=24), plan)


@pytest.mark.prove
@pytest.mark.parametrize("job, plan", MORE)
def test_experts_in_parts_under_more_plans(job: Any, plan: str) -> None:
    equal(dataclasses.replace(job(), batch=24), plan)


@pytest.mark.slow
def test_a_batch_with_fewer_samples_than_ranks() -> None:
    """Ranks without a sample compute for the tokens of other ranks, and their experts' gradients count."""
    equal(dataclasses.replace(listed(), batch=9), "fsdp=8 ep=2")


def test_who_holds_what() -> None:
    """Ranks 0 2 4 6 have the first half. Of these, one `fsdp` group stores its shards, and the others store the same shards."""

    def groups(place: Place) -> list[list[int]]:
        mesh = Mesh(Plan.parse("dp=2 fsdp=4 ep=2"), place.rank, place.connect(torch.device("cpu")))
        mesh.connect_all()
        every = [mesh.group(*axes) for axes in (("ep",), SAME_EXPERTS, ("efsdp",), to_expert_axes(mesh.plan.replica_axes))]
        torch.distributed.barrier()  # no rank exits while others are still connecting
        return [torch.distributed.get_process_group_ranks(group) for group in every]

    told = fork.run_ranks(groups, 8)
    assert told[0] == [[0, 1], [0, 2, 4, 6], [0, 2], [0, 4]]
    assert told[7] == [[6, 7], [1, 3, 5, 7], [5, 7], [3, 7]]


@pytest.mark.parametrize(
    "plan, ranks",
    (("fsdp=4 ep=2", 2), ("dp=2 fsdp=4 ep=2", 2), ("fsdp=2 ep=2", 1), ("dp=4 fsdp=2 ep=8", 1), ("dp=2 fsdp=3 ep=2", 3)),
)
def test_how_many_ranks_share_an_expert(plan: str, ranks: int) -> None:
    assert Plan.parse(plan).expert_shards == ranks


def test_the_largest_part_of_what_is_empty_is_empty() -> None:
    assert [compute_padded_size(shape, 2) for shape in ((0,), (0, 3), (5, 0), (5, 3))] == [0, 0, 0, 9]
    assert compute_padded_size((3, 8), 4, 1) == 6


def held(job: plait.Job, plan: str) -> list[dict[str, int]]:
    """For each rank: elements of its experts' parameters, elements of their optimizer state, and the peak."""

    def run(place: Place) -> dict[str, int]:
        engine = Engine(job, plan, place=place)
        engine.step(next(engine.batches()))
        own = {n: p for n, p in engine.rank_model.params.items() if n in engine.rank_model.list_expert_params()}
        state = [t for p in own.values() for t in engine.optimizer.state[p].values() if t.dim()]
        return {"own": sum(p.numel() for p in own.values()), "state": sum(t.numel() for t in state)}

    return fork.run_ranks(run, Plan.parse(plan).world)


@pytest.mark.parametrize("zero", sampled(2, (1, 3)))
def test_ranks_keep_parts(zero: int) -> None:
    """Two ranks share one expert of a stack: its tensors are sharded."""
    job = dataclasses.replace(mixtral(), batch=16)
    whole = sum(prod(p.shape) for n, p in job.model().named_parameters() if "experts" in n)
    told = held(job, f"fsdp=8 ep=4 zero_stage={zero}")
    assert all(rank == {"own": whole // 8, "state": 2 * (whole // 8)} for rank in told)


class Turns(jobs_moe.Mixture):
    """Sends tokens to its experts in turn, so that each rank's count does not depend on the data."""

    def forward(self, x: torch.Tensor) -> Any:
        flat, count = x.reshape(-1, x.shape[-1]), len(self.experts)
        p, out = self.gate(flat).softmax(-1), self.shared(flat)
        turn = torch.arange(len(flat)) % count
        chosen = torch.stack([turn, (turn + 1) % count], 1)
        for number, expert in enumerate(self.experts):
            token, _ = torch.where(chosen == number)
            out = out.index_add(0, token, expert(flat[token]) * p[token, number, None])
        return x + out.reshape(x.shape), p, p


def turns() -> plait.Job:
    def model() -> torch.nn.Module:
        made = jobs_moe.Gpt(width=16)
        for block in made.blocks:
            block.moe = Turns(16, 4)
        return made

    return dataclasses.replace(listed(), model=model, batch=16)


@pytest.mark.prove
@pytest.mark.parametrize(
    "plan", (*rarely("fsdp=4 ep=2", "fsdp=4 ep=2 zero_stage=2 microbatches=2 activation_checkpointing=full"), "dp=2 fsdp=4 ep=2 zero_stage=1")
)
@pytest.mark.parametrize("total", (False, pytest.param(True, marks=pytest.mark.prove)))
def test_a_dry_run_allocates_the_same(plan: str, total: bool) -> None:
    """The time at which real ranks free gathered tensors depends on message arrival. The peak is comparable on idle cores only."""
    made = Plan.parse(plan)
    found = dry_run(turns(), made)
    told = fork.run_ranks(lambda place: asdict(measure_step(Engine(turns(), made, place=place, device="cpu"), 1)), made.world)
    for kind in found.kinds:
        peak = told[kind.rank]
        assert not total or kind.peak.total == pytest.approx(peak["total"], rel=0.01)
        assert all(kind.peak.categories[name] == peak["categories"][name] for name in ("parameters", "optimizer"))


@pytest.mark.prove
def test_a_dry_run_of_a_stage_that_looks_at_values_trains_it() -> None:
    """It runs on real tensors. The gradients it receives are zeros, and so is the gradient that it sends to the previous stage."""
    found = dry_run(dataclasses.replace(five(), batch=16), Plan.parse("pp=2 fsdp=4 ep=2 microbatches=2"))
    assert {kind.at["pp"] for kind in found.kinds} == {0, 1}
    assert all(kind.peak.categories["optimizer"] > kind.peak.categories["parameters"] for kind in found.kinds)


def losses(job: plait.Job, plan: str, folder: Path, resume: bool) -> list[float]:
    """The losses of two steps, after those of an existing checkpoint; a new one is saved."""

    def run(place: Place) -> list[float]:
        engine = Engine(job, plan, place=place, directory=folder, cast=torch.float64)
        if resume:
            engine.resume()
        source = engine.batches()
        found = [engine.step(next(source)).loss for _ in range(2)]
        engine.save()
        return found

    return fork.run_ranks(run, Plan.parse(plan).world)[0]


@pytest.mark.prove
@pytest.mark.parametrize(
    "job, plans",
    (
        *rarely((mixtral, ("dp=1", "fsdp=4 ep=2", "fsdp=8 ep=4"))),
        (listed, ("fsdp=4 ep=2 offload=optimizer", "fsdp=2", "fsdp=4 ep=2 zero_stage=1")),
    ),
)
def test_a_checkpoint_goes_into_parts_and_out(job: Any, plans: tuple[str, ...], tmp_path: Path) -> None:
    made = dataclasses.replace(job(), batch=16)
    whole = [loss for k in range(3) for loss in losses(made, "dp=1", tmp_path / "whole", k > 0)]
    parts = [loss for k, plan in enumerate(plans) for loss in losses(made, plan, tmp_path / "parts", k > 0)]
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.slow
def test_training_in_bf16() -> None:
    def run(place: Place) -> list[float]:
        engine = Engine(dataclasses.replace(mixtral(), batch=16), "fsdp=4 ep=2 precision=bf16", place=place)
        source = engine.batches()
        return [engine.step(next(source)).loss for _ in range(3)]

    assert all(0 < loss < 10 for told in fork.run_ranks(run, 4) for loss in told)


@pytest.mark.prove
def test_sums_that_copies_forget_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of the same shards never add up their gradients."""
    monkeypatch.setattr(ShardScatter, "find_replicas", lambda self, group: None if group.size() == 2 else self.replicas)
    verdict = verify(dataclasses.replace(mixtral(), batch=24), Plan.parse("dp=2 fsdp=4 ep=2"))
    assert not verdict.equal and "experts" in verdict.parameter
