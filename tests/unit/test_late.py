"""Costs of infrequent, late and compressed synchronization: bytes compared with a manual count, times, break-even links, the map, the gate."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import plait
from plait.cli.main import main
from plait.cli.plan_map import draw_map
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.model.sketch_table import format_speed
from plait.parallel.compression.compressor import count_sent_bytes
from plait.planner import sync_costs
from plait.planner.answer import find_answer, format_answer
from plait.planner.estimate import Estimate, estimate_plan
from plait.planner.exactness import describe_inexact, estimate_progress, find_break_even
from plait.planner.inexact import add_inexact
from plait.planner.plan_request import PlanRequest
from plait.planner.sync_map import SyncJob, SyncMap, compute_sync_map, list_sync_ways

SHAPES = ((512, 64), (256, 64), (256,), (64, 256), (64,), (512, 64), (512,))
NUMBERS = 512 * 64 + 256 * 64 + 256 + 64 * 256 + 64 + 512 * 64 + 512
GROUPS = "replica_groups=4 outer_sync="


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.down(torch.relu(self.up(x))))


def job() -> plait.Job:
    """A job on token ids."""
    return plait.Job(
        model=Model,
        loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        data=lambda: [(torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long))] * 256,
        optimizer=lambda params: torch.optim.AdamW(params),
        batch=32,
        steps=100,
    )


@pytest.fixture(scope="module")
def asked() -> PlanRequest:
    return PlanRequest.from_job(job(), "small.py", Machine.from_name("h100x2x4").with_network(1e8))


def priced(asked: PlanRequest, words: str) -> Estimate:
    return estimate_plan(asked.pace, Plan.parse(words), 1)


@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "powersgd"])
def test_bytes_of_copies_are_those_that_compression_itself_counts(asked: PlanRequest, kind: str) -> None:
    """Within a thousandth, because scales and lengths are not in the closed form."""
    assert sum(torch.Size(s).numel() for s in SHAPES) == NUMBERS == sum(p.numel() for p in Model().parameters())
    words = "dp=8" if kind == "none" else f"dp=8 grad_compression={kind}"
    by_hand = {"none": 2 * 7 / 8 * 4 * NUMBERS, "bf16": 7 * 2 * NUMBERS, "int8": 7 * NUMBERS}
    thin = 2 * (512 + 64) * 2 + 2 * (256 + 64) * 2 + 256 + 64 + 512
    by_hand["powersgd"] = 2 * 7 / 8 * 4 * thin
    assert priced(asked, words).sent_bytes == {"dp": pytest.approx(by_hand[kind])}
    assert count_sent_bytes(kind, SHAPES, 8) == pytest.approx(by_hand[kind], rel=1e-3)


def test_bytes_of_groups_by_hand(asked: PlanRequest) -> None:
    """A ring average over 4 groups sends 1.5 times the bytes, once in H steps. A server receives gradients and sends weights."""
    size = 4 * NUMBERS
    assert priced(asked, f"{GROUPS}local sync_every=16").sent_bytes == {"replica_groups": pytest.approx(1.5 * size / 16)}
    assert priced(asked, f"{GROUPS}diloco sync_every=16 num_fragments=2").sent_bytes == {
        "replica_groups": pytest.approx(1.5 * size / 16)
    }
    assert priced(asked, f"{GROUPS}diloco sync_every=16 grad_compression=int8").sent_bytes == {
        "replica_groups": pytest.approx(3 * size / 4 / 16)
    }
    assert priced(asked, f"{GROUPS}async staleness=1").sent_bytes == {"replica_groups": pytest.approx(2 * size)}
    inside = priced(asked, f"{GROUPS}local sync_every=16 dp=2 fsdp=4 zero_stage=1").sent_bytes
    assert inside["replica_groups"] == pytest.approx(1.5 * size / 4 / 16) and inside["dp"] == pytest.approx(size / 4)
    assert inside["fsdp"] == pytest.approx(3 / 4 * 2 * size)


def test_fsdp_gathers_for_8_bit_products_what_it_gathers_for_16(asked: PlanRequest) -> None:
    fp8, bf16, fp32 = (priced(asked, f"fsdp=8 precision={precision}").sent_bytes["fsdp"] for precision in ("fp8", "bf16", "fp32"))
    assert fp8 == bf16 < fp32


def test_memory_of_groups(asked: PlanRequest) -> None:
    size = 4 * NUMBERS
    plain, local, outer = (
        priced(asked, w).memory for w in ("dp=1", f"{GROUPS}local sync_every=4", f"{GROUPS}diloco sync_every=4")
    )
    assert "outer" not in local and outer["outer"] == pytest.approx(2 * size)
    assert {k: v for k, v in local.items() if k != "messages"} == plain
    assert priced(asked, f"{GROUPS}diloco sync_every=4 outer_momentum=0.0").memory["outer"] == pytest.approx(size)
    assert priced(asked, "dp=8 grad_compression=int8").memory["residuals"] == pytest.approx(size)
    assert priced(asked, f"{GROUPS}async").memory["optimizer"] == 0 < plain["optimizer"]
    sharded = priced(asked, f"{GROUPS}diloco sync_every=4 fsdp=8").memory
    assert sharded["outer"] == pytest.approx(2 * size / 8)


@pytest.mark.parametrize("sync", ["local", "diloco"])
def test_rarer_is_fewer_bytes_and_less_time(asked: PlanRequest, sync: str) -> None:
    found = [priced(asked, f"{GROUPS}{sync} sync_every={h}") for h in (2, 4, 16, 64, 256)]
    assert [e.sent_bytes["replica_groups"] for e in found] == sorted((e.sent_bytes["replica_groups"] for e in found), reverse=True)
    assert [e.seconds for e in found] == sorted((e.seconds for e in found), reverse=True)
    assert found[0].parts["sync"] > 50 * found[-1].parts["sync"] > 0


def test_a_delay_hides_messages(asked: PlanRequest) -> None:
    times = [
        priced(asked, f"{GROUPS}diloco sync_every=16 num_fragments=2 fragment_delay={d}").parts["sync"] for d in (0, 1, 4, 8)
    ]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize(
    "words", ["dp=4 grad_compression=int8", "dp=4 grad_compression=powersgd", f"{GROUPS}local sync_every=4 grad_compression=int8"]
)
def test_times_cross_at_the_break_even(words: str) -> None:
    """On a fast link rounding takes longer than it saves. An average of weights always takes less time than all-reducing gradients."""
    pace = PlanRequest.from_job(job(), "small.py", Machine.from_name("h100x1x4"), split=False).pace
    blocks = tuple(replace(b, weights=b.weights * 1e4) for b in pace.work.blocks)
    large = replace(pace.work, blocks=blocks, matrices=tuple((100 * m, 100 * n) for m, n in pace.work.matrices))
    pace, plan = replace(pace, work=large), Plan.parse(words)
    found = find_break_even(pace, plan, 8, 8)
    assert found.twin == Plan(dp=4)
    if found.bits_per_s == inf:
        assert plan.replica_groups == 4 and "at any speed" in found.describe("nodes")
        return
    for factor, faster in ((0.9, True), (1.1, False)):
        at = sync_costs.with_link_speed(pace, found.bits_per_s * factor)
        assert (estimate_plan(at, plan, 8).seconds < estimate_plan(at, found.twin, 8).seconds) is faster
    assert found.describe("nodes").endswith(f"is slower than {format_speed(found.bits_per_s)}")


def test_what_never_pays_has_no_break_even() -> None:
    """Among 32 replicas 16-bit values are gathered: 31 × 2 bytes per value, while an fp32 all-reduce sends 7.75."""
    slow = PlanRequest.from_job(job(), "small.py", Machine.from_name("h100x8x4").with_network(1e8), split=False)
    found = find_break_even(slow.pace, Plan.parse("dp=32 grad_compression=bf16"), 1, 1)
    assert found.bits_per_s == 0 and "at any speed" in found.describe("nodes")


def test_staleness_that_is_enough() -> None:
    """While the fourth rank computes one gradient, three ranks that are three times as fast compute nine."""
    spread = (3.0, 3.0, 3.0, 1.0)
    each, clock = Plan.parse(f"{GROUPS}async server_update=nesterov"), Plan.parse(f"{GROUPS}async")
    assert sync_costs.find_staleness(each, spread) == 9 and sync_costs.find_staleness(clock, spread) == 2
    assert sync_costs.find_staleness(each, (1.0,) * 4) == 3 and sync_costs.find_staleness(clock, (1.0,) * 4) == 0
    pace = PlanRequest.from_job(job(), "small.py", Machine.from_name("h100x8"), split=False).pace
    steps = (1.0, 1.0, 1.0, 3.0)
    times = [sync_costs.time_servers(pace, replace(clock, staleness=s), 1e3, steps) for s in (0, 1, 2, 9)]
    assert times[0] > times[1] >= times[2] == times[3] == pytest.approx(4 / (3 + 1 / 3), rel=1e-3)


def test_exactness_is_told_in_words_and_in_samples() -> None:
    plan = Plan.parse("replica_groups=4 sync_every=16")
    assert describe_inexact(plan) == "changes the training result: weights of 4 groups are averaged every 16 steps"
    assert describe_inexact(Plan.parse("dp=4 batch_split=auto")) == "" and estimate_progress(Plan.parse("dp=4 batch_split=auto")) == 1
    for words in (
        "dp=4 grad_compression=int8",
        "dp=4 grad_compression=powersgd",
        f"{GROUPS}diloco sync_every=64 num_fragments=4 fragment_delay=1",
        f"{GROUPS}async",
    ):
        assert describe_inexact(Plan.parse(words)).startswith("changes the training result") and 0 < estimate_progress(Plan.parse(words)) <= 1
    rarer = [estimate_progress(Plan.parse(f"{GROUPS}local sync_every={h}")) for h in (1, 2, 4, 8, 16, 64, 1024)]
    assert rarer == sorted(rarer, reverse=True) and rarer[0] == 1 and rarer[-1] >= 1 / 4


def test_inexact_plans_are_offered_on_request_alone(asked: PlanRequest) -> None:
    found = find_answer(asked, {})
    assert found.space.devices == 8
    assert all(describe_inexact(row.plan) == "" for row in found.rows)
    wide = add_inexact(found)
    offers = [row for row in wide.rows if describe_inexact(row.plan)]
    assert offers and all(row.why.startswith("changes the training result") for row in offers)
    assert {row.plan for row in found.rows} <= {row.plan for row in wide.rows}
    assert all(row.seconds < found.rows[0].seconds for row in offers)
    given = find_answer(asked, {"replica_groups": 4, "sync_every": 16, "outer_sync": "diloco"})
    best = given.rows[0].plan
    assert best.replica_groups == 4 and best.sync_every == 16 and best.devices == 8
    assert "break-even: " in format_answer(given) and "an outer optimizer updates the global weights" in format_answer(given)


def test_a_map_has_a_cell_for_each_link_and_spread(asked: PlanRequest) -> None:
    every = tuple(list_sync_ways(Plan(dp=2), 4, 100))
    cells = compute_sync_map(SyncJob(asked.pace, 32, 100), every, (1e7, 1e9, 4e12), (1.0, 3.0))
    shown = SyncMap("small.py", "4 nodes", every, cells)
    assert [len(row) for row in cells] == [3, 3] and {*cells[0][0].seconds} == {way.name for way in every}
    assert cells[0][0].compute_gain(False) > 2 and cells[0][0].find_fastest(False) != "dp"
    even, spread = cells[0][2], cells[1][2]
    assert even.compute_gain(True) < 1.1, "nothing pays on a fast link between equal ranks"
    assert spread.find_fastest(True) in ("shares", "async") and spread.compute_gain(True) > 2
    for row in cells:
        times = [c.seconds["dp"] for c in row]
        assert times == sorted(times, reverse=True)
    said = json.loads(json.dumps(shown.to_dict()))
    assert len(said["cells"]) == 6 and said["ways"]["int8"]["plan"] == "dp=8 grad_compression=int8"
    assert shown.to_text().count("10 Mbit/s") == 2
    picture = ElementTree.fromstring(draw_map(said))
    cells_drawn = [g for g in picture.iter("{http://www.w3.org/2000/svg}g") if g.get("class") == "cell"]
    assert len(cells_drawn) == 2 * 6


def test_the_command_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "job.py", tmp_path / "map.svg"
    file.write_text(
        Path(__file__).read_text(encoding="utf-8").replace("from plait.cli.main import main\n", ""), encoding="utf-8"
    )
    words: list[Any] = ["plan", f"{file}:job", "--machine", "h100x2x4", "--map", "--json", "--output", str(out)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["between"] == "4 nodes" and out.read_text().startswith("<svg")
    assert main(["plan", f"{file}:job", "--machine", "h100", "--map"]) == 2
    assert "--map needs two groups" in capsys.readouterr().err
