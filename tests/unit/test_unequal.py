"""Plans on a machine with unequal devices: local batches by speed are offered, and each rank's memory is that of its own device."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner.answer import find_answer, format_answer
from plait.planner.plan_request import PlanRequest
from plait.planner.search import describe_share_gain, price_plan
from plait.planner.search_space import count_branch_samples

FILE = """
name = "mixed"
devices_per_node = 4
speeds = [1.0, 1.0, 1.0, 0.25]
memories_gib = [80, 80, 80, 24]
[device]
name = "D"
memory_gib = 80
memory_gb_per_s = 3350
peak_tflops = { bf16 = 989, fp32 = 67 }
[[links]]
name = "NVLink"
kind = "nvlink"
devices = 4
gb_per_s = 450
"""


class Vectors:
    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.ones(2048)
        return x, x


def job(batch: int) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4))),
        loss=F.mse_loss, data=Vectors, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch, steps=9,
    )  # fmt: skip


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    path = tmp_path_factory.mktemp("machine") / "mixed.toml"
    path.write_text(FILE)
    return Machine.load(path)


@pytest.fixture(scope="module")
def asked(machine: Machine) -> PlanRequest:
    return PlanRequest.from_job(job(1 << 16), "job.py", machine)


def test_a_machine_of_unlike_devices(machine: Machine, tmp_path: Path) -> None:
    assert machine.is_heterogeneous and [machine.speed(rank) for rank in (0, 3, 7)] == [1.0, 0.25, 0.25]
    assert machine.memory(3) == 24 * 2**30 and "speeds 1, 1, 1, 0.25" in str(machine)
    (tmp_path / "again.toml").write_text(machine.to_toml())
    assert Machine.load(tmp_path / "again.toml") == machine
    fewer = machine.resize(3)
    assert fewer.devices == 3 and not fewer.is_heterogeneous


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("speeds = [1.0, 0.5]", "2 numbers for devices_per_node = 4"),
        ("speeds = [1, 1, 1, 2]", "from 0 to 1"),
        ("speeds = []", "from 0 to 1"),
    ],
)
def test_speeds_that_are_none(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "m.toml").write_text(FILE.replace("speeds = [1.0, 1.0, 1.0, 0.25]", line))
    with pytest.raises(PlaitError, match=why):
        Machine.load(tmp_path / "m.toml")


def test_shares_by_speed_are_offered_with_their_gain(asked: PlanRequest) -> None:
    found = find_answer(asked, {"precision": "fp32", "fsdp": 1, "tp": 1, "pp": 1, "microbatches": 1, "compile": False})
    assert found.best is not None and str(found.best.plan) == "dp=4 batch_split=auto"
    question = found.space
    equal, auto = (
        price_plan(asked.pace, Plan.parse(f"dp=4 precision=fp32 batch_split={s}"), question, 1 << 14)
        for s in ("equal", "auto")
    )
    assert equal.parts["compute"] / auto.parts["compute"] == pytest.approx(
        13 / 4, rel=0.1
    )  # 16384 on the slow one, then 5041 of 65536
    given = price_plan(asked.pace, Plan.parse("dp=4 precision=fp32 batch_split=4:4:4:1"), question, 1 << 14)
    assert given.seconds == pytest.approx(auto.seconds, rel=1e-6)
    assert "× as fast as equal local batches" in format_answer(found)
    assert describe_share_gain(asked.pace, Plan(dp=4), question, 1 << 14) == ""


def test_parts_are_written_where_speeds_cannot_be_measured(asked: PlanRequest) -> None:
    found = find_answer(asked, {"precision": "bf16", "fsdp": 4, "tp": 1, "pp": 1})
    assert found.best is not None and found.best.plan.batch_split == "4:4:4:1"


def test_every_rank_is_held_against_its_own_device(asked: PlanRequest) -> None:
    """A batch whose equal local batch does not fit on the smallest device, and whose local batch by speed does."""
    wide = PlanRequest.from_job(job(1 << 18), "job.py", asked.machine)
    pins = {"precision": "fp32", "dp": 4, "fsdp": 1, "tp": 1, "pp": 1, "microbatches": 1, "activation_checkpointing": "none"}
    question, plan = wide.make_space(pins), Plan.parse("dp=4")
    samples = count_branch_samples(plan, question)
    equal, auto = (price_plan(wide.pace, replace(plan, batch_split=s), question, samples) for s in ("equal", "auto"))
    assert equal.spare is not None and auto.spare is not None and question.get_usable_bytes(3) < question.get_usable_bytes(0) == question.memory
    small = replace(question, device_bytes=tuple(0.9 * equal.reserved if i == 3 else n for i, n in enumerate(question.device_bytes)))
    equal, auto = (price_plan(wide.pace, replace(plan, batch_split=s), small, samples) for s in ("equal", "auto"))
    assert not small.can_hold(equal) and small.can_hold(auto)


def test_alike_devices_are_as_before(asked: PlanRequest, machine: Machine) -> None:
    alike = asked.with_machine(replace(machine, speeds=(), memories=()))
    found = find_answer(alike, {"precision": "bf16"})
    assert all(row.plan.batch_split == "equal" and (row.estimate is None or row.estimate.spare is None)
               for row in found.rows)  # fmt: skip
