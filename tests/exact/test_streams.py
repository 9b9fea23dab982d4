"""Iterables over ranks: streams that are equal on all ranks train as on one device; the others are named."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import jobs
import pytest
import torch
from torch.distributed import distributed_c10d as dist
from torch.utils.data import IterableDataset

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.data.batch import Position
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.planner.dryrun.dry_run import dry_run
from plait.proof import verify


class Plain(IterableDataset):
    """torch's own kind of stream, without a length and without a state."""

    def __init__(self) -> None:
        self.items = jobs.Numbers(21)

    def order(self) -> list[int]:
        return list(range(21))

    def __iter__(self) -> Iterator[Any]:
        yield from (self.items[i] for i in self.order())


class Shuffled(Plain):
    def order(self) -> list[int]:
        return random.sample(range(21), 21)


class ByItself(Plain):
    """Shuffled by an unseeded generator."""

    def order(self) -> list[int]:
        return random.Random().sample(range(21), 21)


class Cut(Plain):
    """Each rank reads its own part."""

    def order(self) -> list[int]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return list(range(rank, 20, ranks))


class Uneven(Cut):
    def order(self) -> list[int]:
        return list(range(21 - (dist.get_rank() if dist.is_initialized() else 0)))


class Noisy(Plain):
    """The order is equal on all ranks, the noise is not."""

    def __iter__(self) -> Iterator[Any]:
        noise = torch.Generator()
        noise.seed()
        yield from ((x + torch.rand(1, generator=noise), y) for x, y in super().__iter__())


def job(data: Callable[[], Any], evaluated: Callable[[], Any] = jobs.Numbers) -> plait.Job:
    evaluate = plait.Evaluate(evaluated, lambda out, y: {"error": (out - y).abs()})
    return dataclasses.replace(jobs.mlp(), data=data, batch=8, evaluate=evaluate)


def trained(job: plait.Job, plan: str, steps: int = 5, workers: int = 0) -> list[list[Any]]:
    """For each rank: losses and norms, means, and the parts that are not exact."""

    def run(place: Place) -> list[Any]:
        with torch.random.fork_rng():
            engine = Engine(job, plan, place=place, cast=torch.float64, workers=workers)
            source, found = engine.batches(), []
            for _ in range(steps):
                step = engine.step(next(source))
                found += [step.loss, step.norm]
            source.close()  # type: ignore[attr-defined]
            return [found, list(engine.evaluate().values()), engine.inexact]

    return fork.run_ranks(run, Plan.parse(plan).world)


PLANS = ("fsdp=2", "dp=2 microbatches=2", "pp=2")


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(k, p, marks=[] if (k, p) in ((Shuffled, "fsdp=2"), (Plain, "pp=2")) else pytest.mark.prove)
        for k in (Plain, Shuffled)
        for p in PLANS
    ],
)
def test_streams_are_those_of_one_device(kind: type, plan: str) -> None:
    """Beyond the end of an epoch, in training and in evaluation."""
    ((losses, means, _),) = trained(job(kind, kind), "dp=1")
    for found in trained(job(kind, kind), plan, workers=int(plan == "pp=2")):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(means, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, pytest.param(Shuffled, marks=pytest.mark.prove)])
def test_verify_says_equal(kind: type) -> None:
    assert verify.verify(job(kind), Plan.parse("dp=2")).equal


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", pytest.param("pp=2", marks=pytest.mark.prove)])
@pytest.mark.parametrize("kind", [ByItself, Cut, pytest.param(Uneven, marks=pytest.mark.prove)])
def test_ranks_that_read_different_samples(kind: type, plan: str) -> None:
    for made in (job(kind), job(Plain, kind)):
        with pytest.raises(PlaitError) as caught:
            trained(made, plan)
        (problem,) = caught.value.problems
        assert problem.code == "J022"
        assert problem.where == ("Job(data=…)" if made.data is kind else "Evaluate(data=…)")


def test_noise_of_its_own_is_named() -> None:
    for _, _, inexact in trained(job(Noisy), "dp=2"):
        assert any("noise" in line for line in inexact)


class EveryNth(Plain):
    """Yields each Nth sample as its rank's share."""

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        return (self.items[i] for i in range(index, 21, num_shards))


class Halves(Plain):
    """The shares are contiguous ranges; the first is longer than the others."""

    def __len__(self) -> int:
        return 21

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        ends = [0, *(15 + 6 * i // (num_shards - 1) for i in range(num_shards))]
        return (self.items[i] for i in range(ends[index], ends[index + 1]))


class Same(Plain):
    """Ignores the index of the rank."""

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        return (self.items[i] for i in range(0, 21, num_shards))


class Fewer(Halves):
    """Omits samples."""

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        return (self.items[i] for i in range(index, 19, num_shards))


def plain(data: Callable[[], Any]) -> plait.Job:
    return dataclasses.replace(jobs.mlp(0.0), data=data, batch=8)


def steps(job: plait.Job, plan: str, count: int, workers: int = 0, at: Any = None) -> list[list[Any]]:
    """For each rank: (epoch, start, size), loss and norm of each step; ids by epoch; the parts that are not exact; the position."""

    def run(place: Place) -> list[Any]:
        with torch.random.fork_rng():
            engine = Engine(job, plan, place=place, cast=torch.float64, workers=workers)
            engine.position = at or engine.position
            rows, ids = [], []
            for _, batch in zip(range(count), engine.batches()):
                p = batch.position
                ids += [[p.epoch, x.tolist()] for m in batch.micro_batches if m.count for x in m.inputs[:, 0]]
                step = engine.step(batch)
                rows.append([p.epoch, p.start, batch.size, step.loss, step.norm])
            return [rows, ids, engine.inexact, dataclasses.astuple(engine.position)]

    return fork.run_ranks(run, Plan.parse(plan).world)


@pytest.mark.parametrize(
    ("plan", "workers"),
    [("dp=2", 0), *(pytest.param(p, 1, marks=pytest.mark.prove) for p in ("fsdp=3 microbatches=2", "pp=2 dp=2"))],
)
def test_shares_of_every_nth_sample_are_one_devices_batches(plan: str, workers: int) -> None:
    ((expected, _, _, _),) = steps(plain(Plain), "dp=1", 7)
    for rows, _, inexact, _ in steps(plain(EveryNth), plan, 7, workers):
        assert not inexact
        assert [row[:2] for row in rows] == [row[:2] for row in expected]
        for row, other in zip(rows, expected):
            assert row[2:] == pytest.approx(other[2:], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp=2 microbatches=2", pytest.param("pp=2 dp=2", marks=pytest.mark.prove)])
def test_other_shares_are_read_once_and_named(plan: str) -> None:
    ranks = steps(plain(Halves), plan, 6)
    read = sorted(x for _, ids, _, _ in ranks for epoch, x in ids if epoch == 0)
    times = Plan.parse(plan).pp
    assert read == pytest.approx(sorted(times * jobs.Numbers(21).x[:, 0].double().tolist()))
    assert all("an iterable split over" in " ".join(inexact) for _, _, inexact, _ in ranks)


@pytest.mark.parametrize("kind", [Same, Fewer])
def test_shares_that_are_not_the_parts(kind: type) -> None:
    with pytest.raises(PlaitError) as caught:
        steps(plain(kind), "dp=2", 6)
    assert caught.value.problems[0].code == "J023"


@pytest.mark.slow
def test_a_dry_run_of_a_stream_that_knows_its_share() -> None:
    """The other ranks do not exist in a dry run, so their shares are not read."""
    assert dry_run(plain(EveryNth), Plan.parse("pp=2 dp=2")).world == 4


@pytest.mark.slow
def test_a_resumed_run_reads_on_in_its_shares() -> None:
    """With a different number of shares only if each share is each Nth sample."""
    for kind in (EveryNth, Halves):
        whole = steps(plain(kind), "dp=2", 3)
        half = steps(plain(kind), "dp=2", 2)
        at = Position(*half[0][3])
        again = steps(plain(kind), "dp=2", 1, at=at)
        for rank in range(2):
            assert again[rank][0][0][:3] == whole[rank][0][2][:3]
            assert again[rank][1] == whole[rank][1][len(half[rank][1]) :]
        if kind is EveryNth:
            assert steps(plain(kind), "dp=1", 1, at=at)[0][0][0][:3] == whole[0][0][2][:3]
        else:
            for plan in ("dp=1", "dp=3"):
                with pytest.raises(PlaitError) as caught:
                    steps(plain(kind), plan, 1, at=at)
                assert caught.value.problems[0].code == "J026"
