"""The price of rare, late and compressed synchronisation: bytes against a count by hand, times, break-even links, the map, the gate."""

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
from plait.cli.plan_map import page
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.model.table import speed
from plait.parallel.compression.compressor import sent
from plait.planner import late
from plait.planner.answer import ask, text
from plait.planner.estimate import Estimate, estimate
from plait.planner.exactness import crossing, progress, told
from plait.planner.inexact import with_inexact
from plait.planner.late_map import LateJob, LateMap, late_map, ways
from plait.planner.question import PlanRequest

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
    """On token ids."""
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
    return PlanRequest.of(job(), "small.py", Machine.named("h100x2x4").with_network(1e8))


def priced(asked: PlanRequest, words: str) -> Estimate:
    return estimate(asked.pace, Plan.parse(words), 1)


@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "powersgd"])
def test_bytes_of_copies_are_those_that_compression_itself_counts(asked: PlanRequest, kind: str) -> None:
    """To a thousandth: scales and lengths are not in the closed form."""
    assert sum(torch.Size(s).numel() for s in SHAPES) == NUMBERS == sum(p.numel() for p in Model().parameters())
    words = "dp=8" if kind == "none" else f"dp=8 grad_compression={kind}"
    by_hand = {"none": 2 * 7 / 8 * 4 * NUMBERS, "bf16": 7 * 2 * NUMBERS, "int8": 7 * NUMBERS}
    thin = 2 * (512 + 64) * 2 + 2 * (256 + 64) * 2 + 256 + 64 + 512
    by_hand["powersgd"] = 2 * 7 / 8 * 4 * thin
    assert priced(asked, words).sent == {"dp": pytest.approx(by_hand[kind])}
    assert sent(kind, SHAPES, 8) == pytest.approx(by_hand[kind], rel=1e-3)


def test_bytes_of_groups_by_hand(asked: PlanRequest) -> None:
    """A mean over 4 groups in a ring is 1.5 times the bytes, once in H steps; a server takes gradients and gives weights."""
    size = 4 * NUMBERS
    assert priced(asked, f"{GROUPS}local sync_every=16").sent == {"replica_groups": pytest.approx(1.5 * size / 16)}
    assert priced(asked, f"{GROUPS}diloco sync_every=16 num_fragments=2").sent == {
        "replica_groups": pytest.approx(1.5 * size / 16)
    }
    assert priced(asked, f"{GROUPS}diloco sync_every=16 grad_compression=int8").sent == {
        "replica_groups": pytest.approx(3 * size / 4 / 16)
    }
    assert priced(asked, f"{GROUPS}async staleness=1").sent == {"replica_groups": pytest.approx(2 * size)}
    inside = priced(asked, f"{GROUPS}local sync_every=16 dp=2 fsdp=4 zero_stage=1").sent
    assert inside["replica_groups"] == pytest.approx(1.5 * size / 4 / 16) and inside["dp"] == pytest.approx(size / 4)
    assert inside["fsdp"] == pytest.approx(3 / 4 * 2 * size)


def test_fsdp_gathers_for_8_bit_products_what_it_gathers_for_16(asked: PlanRequest) -> None:
    fp8, bf16, fp32 = (priced(asked, f"fsdp=8 precision={precision}").sent["fsdp"] for precision in ("fp8", "bf16", "fp32"))
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
    assert [e.sent["replica_groups"] for e in found] == sorted((e.sent["replica_groups"] for e in found), reverse=True)
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
    """On a fast link rounding takes longer than what it saves; a mean of weights always takes less time than sums of gradients."""
    pace = PlanRequest.of(job(), "small.py", Machine.named("h100x1x4"), split=False).pace
    blocks = tuple(replace(b, weights=b.weights * 1e4) for b in pace.work.blocks)
    large = replace(pace.work, blocks=blocks, matrices=tuple((100 * m, 100 * n) for m, n in pace.work.matrices))
    pace, plan = replace(pace, work=large, known={}), Plan.parse(words)
    found = crossing(pace, plan, 8, 8)
    assert found.twin == Plan(dp=4)
    if found.bits == inf:
        assert plan.replica_groups == 4 and "at any speed" in found.told("nodes")
        return
    for factor, faster in ((0.9, True), (1.1, False)):
        at = late.at_speed(pace, found.bits * factor)
        assert (estimate(at, plan, 8).seconds < estimate(at, found.twin, 8).seconds) is faster
    assert found.told("nodes").endswith(f"less than {speed(found.bits)}")


def test_what_never_pays_has_no_break_even() -> None:
    """Between 32 copies numbers of 16 bits are gathered: 31 × 2 bytes for each, where a sum in fp32 sends 7.75."""
    slow = PlanRequest.of(job(), "small.py", Machine.named("h100x8x4").with_network(1e8), split=False)
    found = crossing(slow.pace, Plan.parse("dp=32 grad_compression=bf16"), 1, 1)
    assert found.bits == 0 and "however slow" in found.told("nodes")


def test_staleness_that_is_enough() -> None:
    """Three ranks that are three times as fast as the fourth do nine gradients meanwhile."""
    spread = (3.0, 3.0, 3.0, 1.0)
    each, clock = Plan.parse(f"{GROUPS}async server_update=nesterov"), Plan.parse(f"{GROUPS}async")
    assert late.needed(each, spread) == 9 and late.needed(clock, spread) == 2
    assert late.needed(each, (1.0,) * 4) == 3 and late.needed(clock, (1.0,) * 4) == 0
    pace = PlanRequest.of(job(), "small.py", Machine.named("h100x8"), split=False).pace
    steps = (1.0, 1.0, 1.0, 3.0)
    times = [late.served(pace, replace(clock, staleness=s), 1e3, steps) for s in (0, 1, 2, 9)]
    assert times[0] > times[1] >= times[2] == times[3] == pytest.approx(4 / (3 + 1 / 3), rel=1e-3)


def test_exactness_is_told_in_words_and_in_samples() -> None:
    plan = Plan.parse("replica_groups=4 sync_every=16")
    assert told(plan) == "not the same training as on one device: weights of 4 groups are averaged every 16 steps"
    assert told(Plan.parse("dp=4 batch_split=auto")) == "" and progress(Plan.parse("dp=4 batch_split=auto")) == 1
    for words in (
        "dp=4 grad_compression=int8",
        "dp=4 grad_compression=powersgd",
        f"{GROUPS}diloco sync_every=64 num_fragments=4 fragment_delay=1",
        f"{GROUPS}async",
    ):
        assert told(Plan.parse(words)).startswith("not the same training") and 0 < progress(Plan.parse(words)) <= 1
    rarer = [progress(Plan.parse(f"{GROUPS}local sync_every={h}")) for h in (1, 2, 4, 8, 16, 64, 1024)]
    assert rarer == sorted(rarer, reverse=True) and rarer[0] == 1 and rarer[-1] >= 1 / 4


def test_inexact_plans_are_offered_on_request_alone(asked: PlanRequest) -> None:
    found = ask(asked, {})
    assert found.question.devices == 8
    assert all(told(row.plan) == "" for row in found.rows)
    wide = with_inexact(found)
    offers = [row for row in wide.rows if told(row.plan)]
    assert offers and all(row.why.startswith("not the same training") for row in offers)
    assert {row.plan for row in found.rows} <= {row.plan for row in wide.rows}
    assert all(row.seconds < found.rows[0].seconds for row in offers)
    given = ask(asked, {"replica_groups": 4, "sync_every": 16, "outer_sync": "diloco"})
    best = given.rows[0].plan
    assert best.replica_groups == 4 and best.sync_every == 16 and best.devices == 8
    assert "break-even: " in text(given) and "an outer optimizer steps on how far they moved" in text(given)


def test_a_map_has_a_cell_for_each_link_and_spread(asked: PlanRequest) -> None:
    every = tuple(ways(Plan(dp=2), 4, 100))
    cells = late_map(LateJob(asked.pace, 32, 100), every, (1e7, 1e9, 4e12), (1.0, 3.0))
    shown = LateMap("small.py", "4 nodes", every, cells)
    assert [len(row) for row in cells] == [3, 3] and {*cells[0][0].seconds} == {way.name for way in every}
    assert cells[0][0].gain(False) > 2 and cells[0][0].best(False) != "dp"
    even, spread = cells[0][2], cells[1][2]
    assert even.gain(True) < 1.1, "nothing pays on a fast link between equal ranks"
    assert spread.best(True) in ("shares", "async") and spread.gain(True) > 2
    for row in cells:
        times = [c.seconds["dp"] for c in row]
        assert times == sorted(times, reverse=True)
    said = json.loads(json.dumps(shown.to_dict()))
    assert len(said["cells"]) == 6 and said["ways"]["int8"]["plan"] == "dp=8 grad_compression=int8"
    assert shown.text().count("10 Mbit/s") == 2
    picture = ElementTree.fromstring(page(said))
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
