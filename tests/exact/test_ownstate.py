"""Models whose forward writes into their own weights or buffers: proved, named or rejected, but never a silently different result."""

from dataclasses import replace
from typing import Any

import jobs
import pytest
import torch
from rarely import every
from torch import Tensor, nn

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.model.build_model import run_model
from plait.model.sketch import Sketch, sketch_model
from plait.planner.plan_request import PlanRequest
from plait.proof import reference
from plait.proof.verify import verify


def net(width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


class Follower(nn.Module):
    """A teacher that is the moving average of its student. x: [rows, 6]."""

    def __init__(self, assigned: bool = False) -> None:
        super().__init__()
        self.student, self.teacher, self.assigned = net(), net().requires_grad_(False), assigned

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for new, old in zip(self.student.parameters(), self.teacher.parameters()):
                    if self.assigned:
                        old.data = old.data * 0.9 + new.data * 0.1
                    else:
                        old.mul_(0.9).add_(new, alpha=0.1)
        return self.student(x) + self.teacher(x)


class Chain(nn.Module):
    """Some layers in a row and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Running(nn.Module):
    """Subtracts the running mean of its inputs, updated in place or as a new buffer."""

    def __init__(self, assigned: bool = False) -> None:
        super().__init__()
        self.assigned, self.layer = assigned, nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            now = x.mean(0)
            if self.assigned:
                self.mean = self.mean * 0.9 + now * 0.1
            else:
                self.mean.mul_(0.9).add_(now, alpha=0.1)
        return self.layer(x - self.mean)


class Clipped(nn.Module):
    """An embedding that clips the norm of the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table((x[:, 0].abs() * 7).long() % 9))


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def job(*layers: Any) -> Job:
    return jobs.make(lambda: Chain(*(layer() for layer in layers)))


def seen(made: Job) -> Sketch:
    model = made.model()
    return sketch_model(model, lambda n: torch.stack([made.data()[i][0] for i in range(n)]), run_model)


FOLLOWS = {f"layers.0.teacher.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


@pytest.mark.parametrize("assigned", (False, True))
def test_weights_that_follow_others_are_seen(assigned: bool) -> None:
    found = seen(job(lambda: Follower(assigned)))
    assert found.rewritten.keys() == FOLLOWS and not found.from_samples and not found.changed_buffers
    assert assigned or set(found.rewritten.values()) == {("layers.0",)}


def test_what_is_made_of_samples_is_told_from_what_is_not() -> None:
    assert seen(job(Counter)).changed_buffers == ("layers.0.calls",) and not seen(job(Counter)).from_samples
    for assigned in (False, True):
        found = seen(job(lambda: Running(assigned)))  # noqa: B023
        assert found.changed_buffers == found.from_samples == ("layers.0.mean",) and not found.rewritten
    found = seen(job(Clipped))
    assert found.rewritten == {"layers.0.table.weight": ("layers.0.table",)} and found.from_samples == (
        "layers.0.table.weight",
    )
    assert not seen(jobs.batch_norm()).from_samples


@pytest.mark.parametrize(
    "layers, plan",
    every(2, [
        ((Follower,), "dp=2 activation_checkpointing=full"), ((lambda: Follower(True),), "dp=2"), ((Follower, net), "dp=3"),
        ((Follower,), "dp=2"), ((Counter,), "dp=2"), ((Clipped,), "dp=1 activation_checkpointing=full"),
    ]),
)  # fmt: skip
def test_equal(layers: tuple[Any, ...], plan: str) -> None:
    verdict = verify(job(*layers), Plan.parse(plan), steps=4)
    assert verdict.equal and not verdict.inexact, verdict.to_dict()


@pytest.mark.slow
def test_a_stage_keeps_what_its_unit_changes() -> None:
    pair = job(Follower, net)
    apart = Plan.parse("pp=2")
    assert verify(replace(pair, units=("layers.0", "layers.1")), apart, steps=4).equal
    with pytest.raises(PlaitError, match="P024"):
        verify(replace(pair, units=("layers.0.student", "layers.0.teacher", "layers.1")), apart)


@pytest.mark.parametrize(
    "layers, plan, text",
    [
        ((Follower,), "dp=2 microbatches=2", "weight layers.0.teacher.0.weight changes in every forward pass"),
        ((Running,), "dp=2", "buffer layers.0.mean is computed from the samples"),
        ((lambda: Running(True),), "fsdp=2", "buffer layers.0.mean is computed from the samples"),
        ((Running,), "dp=2 processes=one", "buffer layers.0.mean is computed from the samples"),
    ],
)
def test_what_cannot_be_equal_is_named(layers: tuple[Any, ...], plan: str, text: str) -> None:
    verdict = verify(job(*layers), Plan.parse(plan))
    assert verdict.code == "V010" and any(line.startswith(text) for line in verdict.inexact), verdict.to_dict()


@pytest.mark.parametrize(
    "layers, plan, code, why",
    [
        ((Follower,), "fsdp=2", "P031", "drops it"), ((Follower,), "dp=2 offload=optimizer", "P031", "on the host"),
        ((Follower,), "dp=2 processes=one", "P031", "threads"), ((Clipped,), "dp=2", "P031", "different samples"),
        ((Clipped,), "fsdp=2", "P031", "drops it"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(layers: tuple[Any, ...], plan: str, code: str, why: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(job(*layers), Plan.parse(plan))
    (problem,) = caught.value.problems
    assert problem.code == code and why in problem.why and problem.fix, problem


def test_the_planner_does_not_choose_it() -> None:
    why = PlanRequest.from_job(job(Follower), "job", Machine.from_name("h100x8")).make_refusal()
    assert "changes the weight" in why(Plan.parse("fsdp=2")) and not why(Plan.parse("dp=2"))


AROUND = nn.Linear(6, 6).requires_grad_(False)
"""A teacher outside of the model."""


class Outside(nn.Module):
    """Writes into tensors outside of the model. x: [rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            AROUND.weight.lerp_(self.layer.weight, 0.5)
            AROUND.bias.add_(1.0)
        return self.layer(x) + AROUND(x)


TALLY = torch.zeros(3)


class Tallied(nn.Module):
    """Writes a value that depends on samples, and on no weight, into a tensor outside of the model. x: [rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            TALLY.add_(1.0)[1:].sub_(x.mean())
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize("plan", ("tp=2", pytest.param("dp=2 processes=one", marks=pytest.mark.slow)))
def test_building_a_rank_leaves_tensors_outside_of_the_model(plan: str) -> None:
    build = lambda place: (Engine(job(Tallied), plan, place=place), TALLY.tolist())[1]  # noqa: E731
    assert all(found == [0.0] * 3 for found in fork.run_ranks(build, Plan.parse(plan).world))


@pytest.mark.parametrize("layer", (Follower, lambda: Follower(True), Clipped, Counter, Running, Outside))
def test_building_a_rank_leaves_the_initial_state(layer: Any) -> None:
    """A trial on fake tensors writes real data if an operator's argument is not fake."""
    made = job(layer)
    expected = reference.make_reference_model(made, None, "cpu").state_dict()
    outside = [p.clone() for p in AROUND.parameters()]
    engine = Engine(made, "dp=1")
    found = {name: part.tensor for name, part in engine.rank_model.get_parts().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    assert all(map(torch.equal, outside, AROUND.parameters()))


class Appending(nn.Module):
    """Appends to an input list. x: [rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(torch.tanh(self.layer(sum(seen, x))))
        return seen[-1]


class Summing(Appending):
    """Replaces an attribute of an input object, and adds a key to a dict in it."""

    def forward(self, x: Tensor, bag: Any) -> Tensor:
        bag.total, bag.by[len(bag.by)] = bag.total + self.layer(x), x
        return x * torch.sigmoid(bag.total + sum(bag.by.values()))


class Noting(Appending):
    """Changes a dict passed by keyword, and a list in it; its output depends on both."""

    def forward(self, x: Tensor, *, memo: dict[str, Any]) -> Tensor:
        memo["calls"] += 1
        memo["seen"].append(self.layer(x) / memo["calls"])
        memo["last"] = memo["last"] * memo["seen"][-1].sigmoid()
        return x + memo["last"] + sum(memo["seen"])


class Bag:
    def __init__(self, x: Tensor) -> None:
        self.total, self.by = x, dict[int, Tensor]()


class Passing(nn.Module):
    """Passes one object from layer to layer."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(layer() for _ in range(3)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = Bag(x) if isinstance(self.blocks[0], Summing) else [x]
        memo = {"seen": [x], "last": x, "calls": 0}
        for block in self.blocks:
            x = block(x, memo=memo) if isinstance(block, Noting) else block(x, passed)
        return self.head(x if isinstance(block, Summing) else x + (memo["seen"] + passed)[-1])


@pytest.mark.parametrize(
    "layer, plan",
    [
        (Appending, "dp=1 activation_checkpointing=full"), (Appending, "fsdp=2"),
        *(pytest.param(layer, plan, marks=pytest.mark.slow) for layer, plan in (
            (Appending, "fsdp=2 activation_checkpointing=selective"), (Summing, "dp=1 activation_checkpointing=selective"), (Summing,
                "dp=2 activation_checkpointing=full"),
            (Noting, "fsdp=2 zero_stage=2 microbatches=2"), (Noting, "dp=2 activation_checkpointing=full"), (Noting,
                "fsdp=2 activation_checkpointing=full"),
            (Summing, "fsdp=2"),
        )),
    ],
)  # fmt: skip
def test_units_change_lists_dicts_and_objects_that_they_are_given(layer: Any, plan: str) -> None:
    verdict = verify(jobs.make(lambda: Passing(layer), units=("blocks.*",)), Plan.parse(plan), steps=3)
    assert verdict.equal and not verdict.inexact, verdict.to_dict()
