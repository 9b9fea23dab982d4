"""A dry run's memory compared with manual calculations for a multi-layer perceptron. The meter on cases that are hard to measure."""

import gc
import json
from math import prod
from typing import Any

import pytest
import torch
from rarely import rarely, sampled
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait import Job, PlaitError, Plan, sketch_of
from plait.cli.main import main
from plait.parallel.data.buckets import fill_buckets
from plait.planner.dryrun.allocations import AllocationRecorder
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.dryrun.memory_table import make_memory_table
from plait.planner.dryrun.optimizer_step import measure_state_bytes

WIDTH, BATCH = 100, 60
PARAMETERS = 4 * (20 * WIDTH + WIDTH + WIDTH * 10 + 10)


class Rows:
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((20,), float(i)), torch.tensor(i % 10)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def job(optimizer: Any = torch.optim.SGD, model: Any = mlp) -> Job:
    return Job(
        model=model,
        loss=nn.functional.cross_entropy,
        data=Rows,
        optimizer=lambda p: optimizer(p, lr=0.1),
        batch=BATCH,
        steps=10,
    )


def of(plan: str, **given: Any) -> dict[str, int]:
    return make_memory_table(job(**given), Plan.parse(plan)).categories


# — the meter —


def test_the_meter_sees_what_a_step_by_hand_makes() -> None:
    """Forward saves the output of the ReLU, which both it and the head need, and the sum. The rest is freed."""
    model, x = mlp(), torch.randn(BATCH, 20)
    with AllocationRecorder() as meter:
        meter.add_existing("parameters", model.parameters())
        meter.add_existing("batch", [x])
        loss = model(x).sum()
        forward = meter.tape.sum_categories(len(meter.tape.changes))
        loss.backward()
        for parameter in model.parameters():
            meter.label("gradients", parameter.grad)
        del loss, parameter
    after = meter.tape.sum_categories(len(meter.tape.changes))
    assert forward == {"parameters": PARAMETERS, "batch": 4 * BATCH * 20, "temporary": 4 * BATCH * WIDTH + 4}
    assert after == {"parameters": PARAMETERS, "batch": 4 * BATCH * 20, "gradients": PARAMETERS}


def test_views_share_resizing_counts_and_what_is_freed_is_gone() -> None:
    with AllocationRecorder() as meter:
        base = torch.zeros(1000)
        view = base[10:20]
        assert meter.tape.find_peak().total == 4000
        base.untyped_storage().resize_(0)
        assert sum(meter.tape.sum_categories(len(meter.tape.changes)).values()) == 0
        base.untyped_storage().resize_(8000)
        del base
        assert sum(meter.tape.sum_categories(len(meter.tape.changes)).values()) == 8000
        del view
    assert sum(meter.tape.sum_categories(len(meter.tape.changes)).values()) == 0
    assert meter.tape.find_peak().total == 8000


def test_the_meter_is_on_in_backward_and_in_what_is_computed_again_there() -> None:
    inner = nn.Sequential(nn.Linear(50, 4000), nn.ReLU(), nn.Linear(4000, 50))
    x = torch.randn(10, 50, requires_grad=True)
    with AllocationRecorder() as meter:
        meter.add_existing("parameters", inner.parameters(), free=True)
        y = checkpoint(inner, x, use_reentrant=False)
        kept = sum(meter.tape.sum_categories(len(meter.tape.changes)).values())
        assert kept < 4 * 10 * 4000
        meter.mark_moment("backward")
        y.sum().backward()
    assert meter.tape.find_peak().total > 2 * 4 * 10 * 4000
    assert meter.tape.find_peak().moment == "backward"


def test_nothing_of_the_meter_stays_behind() -> None:
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), AllocationRecorder():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before
    with AllocationRecorder() as meter:
        pass
    torch.zeros(10)
    assert meter.tape.changes == []


# — the table —


@pytest.mark.slow
def test_one_device() -> None:
    found = of("dp=1")
    assert found["parameters"] == PARAMETERS
    assert found["batch"] == BATCH * (4 * 20 + 8)
    assert "optimizer" not in found and "host copies" not in found and "gathered" not in found


@pytest.mark.slow
def test_the_optimizers_state_is_found_by_running_it() -> None:
    assert "optimizer" not in of("dp=1")
    assert of("dp=1", optimizer=torch.optim.AdamW)["optimizer"] == 2 * PARAMETERS + 4 * 4  # and one per step
    momentum = lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)  # noqa: E731
    assert of("dp=1", optimizer=momentum)["optimizer"] == PARAMETERS


@pytest.mark.slow
def test_copies_hold_gradients_in_buckets_with_a_flag_for_each_and_the_row_of_the_step() -> None:
    assert len(fill_buckets([((10,), torch.float32)])) == 1
    assert of("dp=2")["gradients"] == PARAMETERS + 4 * (4 + 6 + 3 * 2)
    assert of("dp=2")["parameters"] == PARAMETERS


@pytest.mark.slow
def test_shards_hold_parts_padded_to_the_largest() -> None:
    shapes = [(WIDTH, 20), (WIDTH,), (10, WIDTH), (10,)]
    for n in (2, 3):
        parts = sum(4 * -(-s[0] // n) * prod(s[1:]) for s in shapes)
        found = of(f"fsdp={n}", optimizer=torch.optim.AdamW)
        assert found["parameters"] == parts
        assert found["optimizer"] == 2 * parts + 4 * 4


@pytest.mark.slow
def test_host_copies_count_where_the_host_is() -> None:
    found = make_memory_table(job(torch.optim.AdamW), Plan.parse("dp=2 offload=optimizer"))
    assert found.host_categories["host copies"] == PARAMETERS
    assert found.host_categories["temporary"] >= PARAMETERS  # gradients: the maximum is during the update
    assert found.host_categories["optimizer"] == 2 * PARAMETERS + 4 * 4
    assert not {"host copies", "optimizer"} & found.categories.keys()
    assert "device" in str(found) and "of its host's memory" in str(found)
    everything = make_memory_table(job(torch.optim.AdamW), Plan.parse("fsdp=2 offload=all"))
    assert "parameters" in everything.host_categories and "parameters" not in everything.categories
    staged = make_memory_table(job(torch.optim.AdamW), Plan.parse("pp=2 microbatches=2 offload=optimizer"))
    assert {"host copies", "optimizer"} <= staged.host_categories.keys() and "optimizer" not in staged.categories


class Reading(torch.optim.Optimizer):
    """Reads norms, and a truth value, from its tensors."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if torch.isnan(p.grad).any():
                raise ValueError("NaN")
            self.state[p].setdefault("m", torch.zeros_like(p)).add_(
                p.grad, alpha=float(p.norm()) / p.grad.norm().item()
            )
            p.sub_(self.state[p]["m"])


class Choosing(Reading):
    """The size of its allocation depends on values of tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("m", torch.zeros_like(p))[p.grad.abs() > 0.1] += len(p.grad[p.grad.abs() > 0.1])
            p.sub_(self.state[p]["m"])


@pytest.mark.parametrize("optimizer", sampled(2, [Reading, *rarely(Choosing), torch.optim.Adafactor]))
def test_optimizers_that_read_their_tensors_are_followed(optimizer: Any) -> None:
    kept = {Reading: PARAMETERS, Choosing: PARAMETERS, torch.optim.Adafactor: 4 * (20 + 100 + 100 + 100 + 10 + 10) + 16}
    assert of("dp=2", optimizer=optimizer)["optimizer"] == kept[optimizer]
    for plan in ("dp=2", "pp=2 microbatches=2"):
        dry_run(job(optimizer), Plan.parse(plan))


def test_an_optimizer_that_is_too_large_to_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.planner.dryrun.optimizer_step.MOST_REAL_BYTES", 100)
    with pytest.raises(PlaitError, match="M015"):
        measure_state_bytes(job(Choosing), sketch_of(job(Choosing)))


@pytest.mark.slow
def test_micro_batches_hold_the_activations_of_one() -> None:
    deep = lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(20, 20), nn.Tanh())), nn.Linear(20, 10))  # noqa: E731
    whole, third = (of(plan, model=deep)["activations"] for plan in ("dp=1", "dp=1 microbatches=3"))
    assert 2 * third < whole < 4 * third


@pytest.mark.slow
def test_recomputation_forgets_and_the_table_says_so() -> None:
    blocks = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(20, 64),
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)),
        nn.Linear(64, 10),
    )
    kept = {r: of(f"dp=1 activation_checkpointing={r}", model=blocks)["activations"] for r in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.slow
def test_the_table_is_the_same_every_time() -> None:
    plans = [Plan.parse(p) for p in ("dp=1", "dp=2 microbatches=2", "fsdp=2", "fsdp=2 zero_stage=1 microbatches=3", "dp=1")]
    tables = [make_memory_table(job(torch.optim.AdamW), plan) for plan in plans]
    for found in tables:
        assert all(size > 0 and f"  {name} " in str(found) for name, size in found.categories.items())
    gc.collect()
    assert tables[0] == tables[-1]


@pytest.mark.slow
def test_ranks_that_are_not_alike_have_the_table_of_the_fullest() -> None:
    wide = lambda: nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 3000), nn.ReLU(), nn.Linear(3000, 10))  # noqa: E731
    found = make_memory_table(job(torch.optim.AdamW, wide), Plan.parse("pp=2 microbatches=2"))
    assert found.total == dry_run(job(torch.optim.AdamW, wide), Plan.parse("pp=2 microbatches=2")).fullest.peak.total and not found.notes
    assert found.categories["parameters"] == 4 * (20 * 20 + 20 + 20 * 3000 + 3000)  # of the first stage
    assert found.samples == BATCH // 2
    half = make_memory_table(job(torch.optim.AdamW), Plan.parse("tp=2"))
    assert half.categories["parameters"] == (PARAMETERS + 4 * 10) // 2  # the bias of the last layer is not sharded


def test_a_plan_that_cannot_work_has_no_table() -> None:
    with pytest.raises(Exception, match="P012"):
        make_memory_table(job(), Plan.parse(f"dp={BATCH + 1}"))


@pytest.mark.slow
def test_the_command_line_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", "examples/digits/job.py", "--plan", "fsdp=2"]) == 0
    shown = capsys.readouterr().out
    assert "per rank under fsdp=2" in shown and "  parameters" in shown and "the shards on rank 0" in shown


@pytest.mark.prove
def test_the_command_line_has_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", "examples/digits/job.py", "--plan", "fsdp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["total"] == sum(found["categories"].values())
    assert found["plan"] == "fsdp=2"
