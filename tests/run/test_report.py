"""The report of a run: correct figures in the page, the trace, the pictures and the JSON, for damaged runs too."""

import errno
import json
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from launched import Command

from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory
from plait.parallel.pipeline.schedule_search import build_table
from plait.report.advice import RunFacts, advise
from plait.report.figures import Prediction, make_figures, thin_points
from plait.report.followed_page import follow_run
from plait.report.measured_step import RecordedStep, Span, flatten_spans
from plait.report.page import render_page
from plait.report.picture import PICTURES, draw_picture
from plait.report.run_files import RunFiles
from plait.report.step_split import StepSplit, split_steps
from plait.report.summary import draw_curve, format_evaluations, format_run_summary, read_metric_rows, summarize_run
from plait.report.timeline import make_chrome_trace, make_timeline, predict_rows

JOB = str(Path(__file__).parents[1] / "jobs.py") + ":mlp"
PLAN = "pp=2 microbatches=3 schedule=zb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    command = Command("train", JOB, "--plan", PLAN, "--batch", "12", "--steps", "8", folder=folder)
    assert command.wait() == 0, command.output
    return (folder / "runs" / "latest").resolve()


def actions(boxes: list[list[Any]]) -> list[str]:
    """The actions of a pipeline among the boxes of a row, in order."""
    found = [name for _, _, _, name in sorted(boxes, key=lambda box: box[1]) if re.fullmatch(r"[FBIW]\d+\.\d+", name)]
    return list(dict.fromkeys(found))  # a wait inside an action splits its box


@pytest.mark.slow
def test_what_is_shown_is_what_was_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--timeline"]) == 0
    said = capsys.readouterr().out
    found = make_timeline(RunFiles.read(run))
    assert found.predicted is not None and found.measured.bubble is not None
    assert f"bubble {100 * found.measured.bubble:.1f} % measured" in said and f"page        {run}/report.html" in said
    planned, blocks = build_table("zb", 2, 3), make_figures([RunFiles.read(run)])["timeline"]["blocks"]
    assert list(blocks) == ["measured", "predicted"]
    for rows in blocks.values():
        assert len(rows) == 2
        for row, expected in zip(rows, planned.rows):
            assert actions(row["boxes"]) == list(map(str, expected))
            ordered = sorted(row["boxes"], key=lambda box: box[1])
            assert all(a[1] + a[2] <= b[1] + 0.3 for a, b in pairwise(ordered)), "boxes overlap"
    names = [name for *_, name in blocks["measured"][1]["boxes"]]
    assert {"data", "reduce", "optimizer", "receive F1.0", "send I1.0"} <= set(names)
    assert sum(name.startswith("receive") for name in names) == 3


def test_metrics_that_were_measured_more_than_once_have_a_curve() -> None:
    rows = [
        {"step": 5, "error": 3.0, "rare": None},
        {"step": 10, "error": 2.0, "rare": 1.0},
        {"step": 15, "error": 1.0},
    ]
    head, bars = format_evaluations(rows)
    assert head == "evaluation  error 3 → 1 · lowest 1 · highest 3" and bars.strip() == draw_curve([3.0, 2.0, 1.0])


def test_a_summary_says_how_the_run_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["samples"]) == (8, rows[-1]["samples"]) and found["curve"] == losses
    assert found["loss"] == {"first": losses[0], "last": losses[-1], "lowest": min(losses)}
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["steps", "8", "·", str(rows[-1]["samples"]), "samples"] and draw_curve(losses) in "\n".join(
        lines
    )


def test_a_curve_is_as_wide_as_a_terminal() -> None:
    assert draw_curve([1.0]) == "▁" and draw_curve([2.0, 2.0]) == "▁▁"
    assert len(draw_curve([float(i) for i in range(1000)])) == 60 and draw_curve([0.0, 7.0]) == "▁█"


def test_a_torn_run_is_summed_up_or_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(PlaitError) as none:
        summarize_run(tmp_path)
    assert none.value.codes == ["R004"]
    row = {"step": 1, "loss": None, "samples": 4, "seconds": 0.5, "samples_per_s": 8.0, "skipped": True}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')
    found = summarize_run(tmp_path)
    assert (found["steps"], found["loss"], found["skipped"]) == (1, None, 1)
    assert "skipped     1 steps" in format_run_summary(found)


@pytest.mark.parametrize("line, word", [
    ('{"step": 1, "loss": 0.5, "seconds": 1.0, "samples_per_s": 4.0}', "`samples` is not there"),
    ('{"step": "one", "loss": 0.5, "samples": 4, "seconds": 1.0, "samples_per_s": 4.0}', "`step` is 'one'"),
    ('{"step": 1, "loss": [1], "samples": 4, "seconds": 1.0, "samples_per_s": 4.0}', "`loss` is [1]"),
    ('{"step": 1, "loss": 0.5, "samples": 4, "seconds": true, "samples_per_s": 4.0}', "`seconds` is True"),
    ('{"evaluation": {"error": 1.0}}', "`step` is not there"),
    ('{"step": 1, "evaluation": 7}', "`evaluation` is 7"),
])  # fmt: skip
def test_damaged_metrics_are_named(line: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 0.5, "samples": 4, "seconds": 0.5, "samples_per_s": 8.0}
    (tmp_path / "plan.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n[[[\n{line}\n")
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["steps"] == 1
    assert any("metrics.jsonl: 2 damaged lines skipped, the first is line 2" in note for note in found["notes"])
    with pytest.raises(PlaitError) as strict:
        read_metric_rows(tmp_path / "metrics.jsonl")
    assert strict.value.codes == ["R009"] and word in str(strict.value) and "metrics.jsonl:3" in str(strict.value)


@pytest.mark.slow
def test_damaged_events_are_named(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run, copied, symlinks=True)
    file = copied / "events" / "rank0.jsonl"
    good = file.read_text().splitlines()
    row = json.loads(good[-2])
    for change in ({"at": None}, {"spans": 3}, {"spans": [["F", 0]]}, {"size": "large"}, {"step": "last"}):
        file.write_text("\n".join([*good[:-2], json.dumps(row | change), good[-1]]) + "\n")
        found = RunFiles.read(copied)
        assert [note for note in found.notes if "rank0.jsonl: 1 damaged line skipped" in note], change
        assert len(found.steps) == 7 and make_figures([found])["timeline"] is not None


def test_the_trace_is_a_chrome_trace(run: Path) -> None:
    found = json.loads(make_chrome_trace(make_timeline(RunFiles.read(run))))
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    names = {
        (e["name"], e["pid"]): e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M" and "name" in e["args"]
    }
    assert names["process_name", 0] == "rank 0 · stage 0" and names["process_name", 1] == "rank 1 · stage 1"
    times = [e["ts"] for e in events]
    assert times == sorted(times) and times[0] == 0.0 and all(e["dur"] >= 0 for e in events)
    for pid in (0, 1):
        for thread in (0, 1):
            mine = [e for e in events if (e["pid"], e["tid"]) == (pid, thread)]
            assert mine and all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(mine))


def test_a_chosen_step_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--timeline", "--step", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["timeline"]["step"] == 1 and Path(facts["trace"]).is_file() and Path(facts["page"]).is_file()
    assert 0 < facts["timeline"]["bubble"]["predicted"] < 1


def test_ranks_share_one_clock(run: Path) -> None:
    """No rank receives a message before it was sent. The clock of another host is shifted to the end of its last collective."""
    found = make_timeline(RunFiles.read(run))
    ends = {b.name: b.end for row in found.measured.rows for b in row.boxes}
    starts = {b.name: b.start for row in found.measured.rows for b in row.boxes}
    assert all(starts[f"F1.{m}"] >= starts[f"send F0.{m}"] >= ends[f"F0.{m}"] for m in range(3))
    path = run / "events" / "rank1.jsonl"
    before = path.read_text()
    try:
        path.write_text(
            "".join(json.dumps(r | {"at": r["at"] + 1e5}) + "\n" for r in map(json.loads, before.splitlines()))
        )
        moved = make_timeline(RunFiles.read(run), found.step)
    finally:
        path.write_text(before)
    assert moved.measured.makespan == pytest.approx(found.measured.makespan, abs=0.1)


def test_a_plan_without_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("train", JOB, "--plan", "dp=2 microbatches=2", "--steps", "5", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert main(["report", str(tmp_path / "runs" / "latest"), "--timeline"]) == 0
    assert "no pipeline, so no bubble" in capsys.readouterr().out
    rows = make_figures([RunFiles.read(tmp_path / "runs" / "latest")])["timeline"]["blocks"]["measured"]
    for row in rows:
        kinds = [name for *_, name in row["boxes"] if not name.startswith(("wait", "checkpoint", "step"))]
        assert list(dict.fromkeys(kinds)) == ["callbacks", "record", "data", "forward", "backward", "reduce", "optimizer"]
        assert [name for *_, name in row["boxes"] if name.startswith("wait")], "what ranks wait for is shown"


def test_what_cannot_be_drawn_is_said(tmp_path: Path, run: Path) -> None:
    with pytest.raises(PlaitError) as error:
        make_timeline(RunFiles.read(tmp_path / "runs" / "latest"))
    assert error.value.codes == ["R003"]
    with pytest.raises(PlaitError) as error:
        make_timeline(RunFiles.read(run), 99)
    assert error.value.codes == ["R004"] and "steps 1 to 8" in str(error.value)
    empty = RunDirectory.create("net.py", Plan(pp=2), {}, tmp_path)
    with pytest.raises(PlaitError) as error:
        make_timeline(RunFiles.read(empty.path))
    assert error.value.codes == ["R004"]
    assert main(["report", str(tmp_path / "nowhere")]) == 2


GOLDEN = """\
rank 0 · stage 0: F0.0 0-1, send F0.0 1-1.25, F0.1 1.25-2.25, send F0.1 2.25-2.5, receive B0.0 5-5.5, B0.0 5.5-7.5, \
F0.2 7.5-8.5, send F0.2 8.5-8.75, B0.1 8.75-10.75, receive B0.2 12.5-13, B0.2 13-15
rank 1 · stage 1: receive F1.0 1.25-1.75, F1.0 1.75-2.75, B1.0 2.75-4.75, send B1.0 4.75-5, F1.1 5-6, B1.1 6-8, \
send B1.1 8-8.25, receive F1.2 8.75-9.25, F1.2 9.25-10.25, B1.2 10.25-12.25, send B1.2 12.25-12.5"""


def test_a_table_by_hand() -> None:
    """1f1b with F = 1, B = 2, half a second per message and a quarter to pass it on."""
    times = {(0, "F"): 1.0, (1, "F"): 1.0, (0, "B"): 2.0, (1, "B"): 2.0}
    block = predict_rows(build_table("1f1b", 2, 3), times, [0.5], 0.25)
    text = "\n".join(f"{r.label}: " + ", ".join(f"{b.name} {b.start:g}-{b.end:g}" for b in r.boxes) for r in block.rows)
    assert text == GOLDEN
    assert block.makespan == 15.0 and block.bubble == pytest.approx(1 - 18 / 30)
    free = predict_rows(build_table("1f1b", 2, 3), times, [0.0], 0.0)
    assert free.makespan == 12.0 and free.bubble == pytest.approx(1 / 4)


def test_a_span_inside_another_is_cut_out_of_it() -> None:
    spans = [Span("backward", 0.0, 4.0), Span("collect", 1.0, 2.0), Span("reduce", 4.0, 5.0)]
    assert [(s.name, s.start, s.end) for s in flatten_spans(spans)] == [
        ("backward", 0.0, 1.0), ("collect", 1.0, 2.0), ("backward", 2.0, 4.0), ("reduce", 4.0, 5.0),
    ]  # fmt: skip
    spans = [Span("step", 0.0, 9.0), Span("reduce", 1.0, 5.0), Span("optimizer", 6.0, 8.0), Span("wait dp", 2.0, 3.0), Span("record", 9.0, 9.0)]
    assert [(s.name, s.start, s.end) for s in flatten_spans(spans)] == [
        ("step", 0.0, 1.0), ("reduce", 1.0, 2.0), ("wait dp", 2.0, 3.0), ("reduce", 3.0, 5.0), ("step", 5.0, 6.0), ("optimizer", 6.0, 8.0),
        ("step", 8.0, 9.0), ("record", 9.0, 9.0),
    ], "also at three levels"  # fmt: skip


def test_a_page_has_all_in_it_and_fetches_nothing(run: Path) -> None:
    text = render_page(make_figures([RunFiles.read(run)]))
    fetched = [word for word in re.findall(r"https?://[^\s\"'<>)]+", text) if "leeoniya/uPlot" not in word]
    assert not fetched and not re.findall(r"<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(|src=", text)
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_the_page_has_the_figures_of_the_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    embedded = re.search(r'(?s)<script type="application/json" id="figures">(.*?)</script>', Path(said["page"]).read_text())
    assert embedded and json.loads(embedded[1]).items() <= said.items()


def test_a_name_cannot_end_the_script(run: Path) -> None:
    shown = make_figures([RunFiles.read(run)])
    shown["runs"][0]["job"] = "</script><script>alert(1)</script>"
    assert "<script>alert(1)" not in render_page(shown)


def measured(step: int, ranks: list[list[tuple[str, float, float]]]) -> RecordedStep:
    """A step with these spans (name, start, seconds) on each rank."""
    return RecordedStep(step, 8, tuple(tuple(flatten_spans([Span(n, s, s + t) for n, s, t in spans])) for spans in ranks))


def steps(ranks: list[list[tuple[str, float, float]]], seconds: float) -> list[RecordedStep]:
    """Ten equal steps of this length."""
    return [measured(k, [[(n, s + k * seconds, t) for n, s, t in spans] for spans in ranks]) for k in range(10)]


def causes(found: StepSplit, plan: Plan, predicted: dict[str, float] | None = None) -> list[str]:
    return [a.cause for a in advise(found, RunFacts(plan, "job.py", predicted=predicted or {}))]


def test_a_split_adds_up_and_names_who_is_late() -> None:
    """Rank 1 computes 3 s, rank 0 one: rank 0 waits for rank 1, and from then on both wait for the link."""
    quick = [("data", 0.0, 0.1), ("step", 0.1, 3.35), ("forward", 0.1, 0.4), ("backward", 0.5, 0.5),
             ("reduce", 1.0, 2.2), ("wait dp", 1.0, 2.1), ("optimizer", 3.2, 0.2)]
    slow = [("data", 0.0, 0.1), ("step", 0.1, 3.35), ("forward", 0.1, 1.4), ("backward", 1.5, 1.5),
            ("reduce", 3.0, 0.2), ("wait dp", 3.0, 0.1), ("optimizer", 3.2, 0.2)]
    found = split_steps(Plan(dp=2), steps([quick, slow], 3.5))
    fast, late = found.ranks
    assert fast.seconds == pytest.approx(3.5) and late.seconds == pytest.approx(3.5)
    assert fast.parts["waiting for the slowest rank"] == pytest.approx(2.0) and "waiting for the slowest rank" not in late.parts
    assert fast.parts["communication dp"] == pytest.approx(0.1) == late.parts["communication dp"]
    assert (late.late_seconds, fast.late_seconds) == (pytest.approx(2.0), 0.0)
    assert late.parts["computing"] == pytest.approx(2.9) and late.parts["Python"] == pytest.approx(0.05) == late.parts["other"]
    (first, *_) = advise(found, RunFacts(Plan(dp=2), "job.py"))
    assert first.cause == "slow rank" and "rank 1" in first.what and first.gain == pytest.approx(1.9 / 3.5, abs=0.05)


def test_a_slow_loader_a_slow_rank_and_a_slow_link_are_told_from_one_another() -> None:
    """Each of them makes the same steps equally longer in wall time."""
    usual = [("data", 0.0, 0.01), ("forward", 0.01, 0.49), ("backward", 0.5, 0.5)]
    waits = [("reduce", 1.0, 1.1), ("wait dp", 1.0, 1.0), ("optimizer", 2.1, 0.1)]
    late = [("backward", 1.5, 0.5), ("reduce", 2.0, 0.1), ("wait dp", 2.0, 0.01), ("optimizer", 2.1, 0.1)]
    loads = [("data", 0.0, 1.01), ("forward", 1.01, 0.49), *late]
    assert causes(split_steps(Plan(dp=2), steps([[*usual, *waits], loads], 2.2)), Plan(dp=2))[0] == "slow loader"
    computes = [("data", 0.0, 0.01), ("forward", 0.01, 1.49), *late]
    assert causes(split_steps(Plan(dp=2), steps([[*usual, *waits], computes], 2.2)), Plan(dp=2))[0] == "slow rank"
    link = split_steps(Plan(dp=2), steps([[*usual, *waits], [*usual, *waits]], 2.2))
    assert causes(link, Plan(dp=2), {"gradients": 0.01})[0] == "slow link", "one message a step does not say why"
    assert {r.rank for r in link.ranks if r.parts["communication dp"] == pytest.approx(1.0)} == {0, 1}


def test_a_split_of_a_run_explains_its_steps(run: Path) -> None:
    plan, steps = Plan.parse(PLAN), RunFiles.read(run).steps
    found = split_steps(plan, steps)
    assert found.is_complete and len(found.ranks) == 2
    for rank in found.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.seconds) and {"bubble", "computing", "optimizer"} <= set(rank.parts)
        other = [split_steps(plan, pair).ranks[rank.rank].get_fraction("other") for pair in pairwise(steps)]
        assert median(other) < 0.05, "spans leave little of a step unexplained"


def test_thinned_keeps_the_peaks() -> None:
    points: list[tuple[int, float | None]] = [(k, 1.0) for k in range(100_000)]
    points[54_321], points[77_777] = (54_321, 9.0), (77_777, None)
    found = thin_points(points)
    assert len(found) <= 3001 and (54_321, 9.0) in found and (77_777, None) in found and found[0] == (0, 1.0) and found[-1] == points[-1]


def made(folder: Path, count: int, job: str = "net", **more: object) -> Path:
    """A run of two ranks with that many steps, as files only."""
    directory = RunDirectory.create(f"{job}.py", Plan(dp=2), {}, folder)
    row = {"loss": 1.5, "norm": 0.5, "lr": 0.1, "seconds": 0.1, "samples_per_s": 80.0, "skipped": False, **more}
    with open(directory.metrics, "w") as file:
        file.writelines(json.dumps({"step": k, "samples": 8 * k} | row) + "\n" for k in range(1, count + 1))
    spans = [["data", 0.0, 0.01], ["forward", 0.01, 0.04], ["backward", 0.05, 0.04], ["optimizer", 0.09, 0.01]]
    for rank in (0, 1):
        with open(directory.get_events_path(rank), "w") as file:
            file.writelines(json.dumps({"step": k, "size": 8, "at": 0.1 * k, "spans": spans}) + "\n" for k in range(1, count + 1))
    return directory.path


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    """100,000 steps: at most 3 MB, and few seconds of this process's own processor time."""
    folder = made(tmp_path, 100_000)
    began = time.process_time()
    text = render_page(make_figures([RunFiles.read(folder)]))
    assert time.process_time() - began < 5
    assert len(text.encode()) < 3e6 and "100,000 steps" in text


@pytest.mark.parametrize("damage, word", [
    ("no events", "There are no events of any rank"), ("one rank", "There are no events of rank 1"), ("torn", "ends in the middle of a line"),
    ("older", "made by plait 0.0.1"), ("no plan", "plan.toml cannot be read"), ("no job", "job.json cannot be read"), ("one step", ""),
    ("no step", "No step is recorded"), ("binary", "damaged line"),
])  # fmt: skip
def test_what_is_missing_is_said_and_the_rest_is_shown(damage: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path, {"one step": 1, "no step": 0}.get(damage, 20))
    events = [folder / "events" / f"rank{rank}.jsonl" for rank in (0, 1)]
    if damage == "no events":
        shutil.rmtree(folder / "events")
    if damage == "one rank":
        events[1].unlink()
    if damage == "torn":
        for file in (*events, folder / "metrics.jsonl"):
            file.write_bytes(file.read_bytes()[:-20])
    if damage == "older":
        (folder / "env.json").write_text('{"plait": "0.0.1"}')
    if damage == "no plan":
        (folder / "plan.toml").write_text("[mesh")
    if damage == "no job":
        (folder / "job.json").unlink()
    if damage == "binary":
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines[:5], b"\x00\xff\xfe", *lines[5:]]) + b"\n")
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert word in said.out and not said.err and (folder / "report.html").stat().st_size > 50_000
    assert main(["report", str(folder), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["runs"][0]["steps"]
    assert steps == {"one step": 1, "no step": 0, "torn": 19}.get(damage, 20)


def test_runs_of_one_job_scale_and_of_two_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = made(tmp_path, 20), made(tmp_path, 20, samples_per_s=60.0), made(tmp_path, 20, "other")
    (two / "plan.toml").write_text(Plan().to_toml())
    assert main(["report", str(one), str(two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(s["devices"], s["ideal"], s["speed"]) for s in found["scaling"]] == [(1, 60.0, 60.0), (2, 120.0, 80.0)]
    assert found["page"] == str(tmp_path / "report.html") and len(found["curves"]["loss"]) == 2
    assert main(["report", str(one), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scaling"] == [] and any("2 different jobs" in note for note in found["notes"])
    assert main(["report", str(one), str(other), "--svg", "scaling"]) == 2
    assert "has no figures for --svg scaling" in capsys.readouterr().err


def test_pictures_for_a_paper(tmp_path: Path, run: Path) -> None:
    one, two = made(tmp_path, 20), made(tmp_path, 20)
    (two / "plan.toml").write_text(Plan().to_toml())
    scaled = make_figures([RunFiles.read(one), RunFiles.read(two)])
    shown = {name: make_figures([RunFiles.read(run)]) for name in PICTURES} | {"scaling": scaled}
    for name, each in shown.items():
        root = ElementTree.fromstring(draw_picture(each, name))
        assert root.tag.endswith("svg") and root.get("role") == "img"
        assert len(root.findall(".//{*}rect")) + len(root.findall(".//{*}polyline")) > 1, name


def test_a_full_disk_leaves_the_page_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path, 5)
    (folder / "report.html").write_text("before")
    write = Path.write_text

    def full(path: Path, text: str, **more: Any) -> int:
        write(path, text[:10], **more)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["report", str(folder)]) != 0
    assert "R005" in (said := capsys.readouterr().err) and "No space left" in said
    assert (folder / "report.html").read_text() == "before" and not list(folder.glob("*.tmp"))


def test_the_first_followed_page_does_not_wait_for_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, notes, calls = made(tmp_path, 5), list[list[str]](), list[str]()
    monkeypatch.setattr("plait.cli.report.load_prediction", lambda run, batch: calls.append(run.name) or Prediction(seconds=0.1))

    def follow(make: Callable[[], Any], *_: object) -> None:
        notes.extend([make()["notes"], make()["notes"], make()["notes"]])

    monkeypatch.setattr("plait.report.followed_page.follow_run", follow)
    assert main(["report", str(folder), "--follow"]) == 0
    assert "The prediction is running." in notes[0] and notes[1] == notes[2] and "The prediction is running." not in notes[1]
    assert calls == [folder.name], "it is made once"


def test_a_followed_page_is_updated_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    said: list[str] = []
    training = threading.Event()
    training.set()
    make = lambda: make_figures([RunFiles.read(folder)])  # noqa: E731
    thread = threading.Thread(target=follow_run, args=(make, training.is_set, said.append), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not said and time.monotonic() < end:
        time.sleep(0.05)
    address = said[0]
    assert address.startswith("http://127.0.0.1:")

    def fetch(path: str, **headers: str) -> str:
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=10) as answer:
            return answer.read().decode()

    before = fetch("version")
    assert f'data-follow="{before}"' in fetch("")
    for path, headers, code in (("etc/passwd", {}, 404), ("", {"Host": "evil.example"}, 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(path, **headers)
        with refused.value:  # keeps the response's socket open
            assert refused.value.code == code
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "loss": 1.0, "samples": 32, "seconds": 0.1, "samples_per_s": 80.0}) + "\n")
    while fetch("version") == before and time.monotonic() < end:
        time.sleep(0.2)
    assert fetch("version") != before
    training.clear()
    thread.join(60)
    assert not thread.is_alive()
