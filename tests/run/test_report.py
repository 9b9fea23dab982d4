"""The picture of a step: what was run is what is drawn, in the page, in the trace and in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from launched import Command

from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory
from plait.parallel.pipeline.schedule_search import table
from plait.report.drawing import drawn, page
from plait.report.summary import curve, evaluation_curves, summary, text
from plait.report.timeline import RankRow, Span, StepBox, Timeline, flat, predict, timeline, trace

JOB = str(Path(__file__).parents[1] / "jobs.py") + ":mlp"
PLAN = "pp=2 microbatches=3 schedule=zb"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    command = Command("train", JOB, "--plan", PLAN, "--batch", "12", "--steps", "8", folder=folder)
    assert command.wait() == 0, command.output
    return (folder / "runs" / "latest").resolve()


def svgs(text: str) -> list[ElementTree.Element]:
    """The pictures of a page, parsed."""
    found = re.findall(r'(?s)<svg class="time".*?</svg>', text)
    return [ElementTree.fromstring(svg) for svg in found]


def boxes(row: ElementTree.Element) -> list[tuple[str, float, float, str]]:
    """(name, left, right, text) of each box of a row, from left to right."""
    found = []
    for g in row.findall("g"):
        rect, text = g.find("rect"), g.find("text")
        assert rect is not None and float(rect.get("width", "0")) > 0 and float(rect.get("height", "0")) > 0
        left = float(rect.get("x", "nan"))
        found.append(
            (g.get("data-name", ""), left, left + float(rect.get("width", "0")), "" if text is None else text.text)
        )
    return sorted(found, key=lambda box: box[1])


def actions(row: list[tuple[str, float, float, str]]) -> list[str]:
    return [name for name, *_ in row if re.fullmatch(r"[FBIW]\d+\.\d+", name)]


@pytest.mark.slow
def test_what_is_drawn_is_what_was_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--timeline"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{run}/timeline.html · {run}/trace.json · step ") and said.count("\n") == 1
    found = timeline(run)
    assert found.predicted is not None and found.measured.bubble is not None
    assert f"bubble {100 * found.measured.bubble:.1f} % measured" in said
    planned = table("zb", 2, 3)
    pictures = svgs((run / "timeline.html").read_text())
    assert [p.get("id") for p in pictures] == ["measured", "predicted"]
    for picture in pictures:
        assert picture.get("role") == "img" and picture.find("title") is not None and picture.find("desc") is not None
        rows = [boxes(g) for g in picture.findall("g") if g.get("data-rank") is not None]
        assert len(rows) == 2
        for row, expected in zip(rows, planned.rows):
            assert actions(row) == list(map(str, expected))
            assert all(a[2] <= b[1] + 0.03 for a, b in pairwise(row)), "boxes overlap"
            assert all(text in ("", name.partition(".")[2]) for name, _, _, text in row if name in actions(row))
    names = [name for g in pictures[0].findall("g") if g.get("data-rank") == "1" for name, *_ in boxes(g)]
    assert {"data", "reduce", "optimizer", "receive F1.0", "send I1.0"} <= set(names)
    assert sum(name.startswith("receive") for name in names) == 3


def test_metrics_that_were_measured_more_than_once_have_a_curve() -> None:
    rows = [
        {"step": 5, "error": 3.0, "rare": None},
        {"step": 10, "error": 2.0, "rare": 1.0},
        {"step": 15, "error": 1.0},
    ]
    head, bars = evaluation_curves(rows)
    assert head == "evaluation  error 3 → 1 · lowest 1 · highest 3" and bars.strip() == curve([3.0, 2.0, 1.0])


def test_a_summary_says_how_the_run_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["samples"]) == (8, rows[-1]["samples"]) and found["curve"] == losses
    assert found["loss"] == {"first": losses[0], "last": losses[-1], "lowest": min(losses)}
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["steps", "8", "·", str(rows[-1]["samples"]), "samples"] and curve(losses) in "\n".join(
        lines
    )


def test_a_curve_is_as_wide_as_a_terminal() -> None:
    assert curve([1.0]) == "▁" and curve([2.0, 2.0]) == "▁▁"
    assert len(curve([float(i) for i in range(1000)])) == 60 and curve([0.0, 7.0]) == "▁█"


def test_a_torn_run_is_summed_up_or_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(PlaitError) as none:
        summary(tmp_path)
    assert none.value.codes == ["R004"]
    row = {"step": 1, "loss": None, "samples": 4, "seconds": 0.5, "samples_per_s": 8.0, "skipped": True}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')
    found = summary(tmp_path)
    assert (found["steps"], found["loss"], found["skipped"]) == (1, None, 1)
    assert "skipped     1 steps" in text(found)


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
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "error[R009]" in said and word in said and "metrics.jsonl:3" in said


@pytest.mark.slow
def test_damaged_events_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run, copied, symlinks=True)
    file = copied / "events" / "rank0.jsonl"
    good = file.read_text().splitlines()
    row = json.loads(good[-1])
    for change in ({"at": None}, {"spans": 3}, {"spans": [["F", 0]]}, {"size": "large"}, {"step": "last"}):
        file.write_text("\n".join([*good[:-1], json.dumps(row | change)]) + "\n")
        assert main(["report", str(copied), "--timeline"]) == 2
        said = capsys.readouterr().err
        assert "error[R009]" in said and f"rank0.jsonl:{len(good)}" in said and next(iter(change)) in said


@pytest.mark.slow
def test_the_page_fetches_nothing(run: Path) -> None:
    text = page(timeline(run))
    assert not re.findall(r"https?://|<script|@import|url\(", text)
    assert all(f"micro-batch {m}" in text for m in range(3)) and "rank 1 · stage 1" in text


def test_the_trace_is_a_chrome_trace(run: Path) -> None:
    found = json.loads(trace(timeline(run)))
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
    assert facts["step"] == 1 and facts["drawn"] == [0, 1] and Path(facts["trace"]).is_file()
    assert 0 < facts["bubble"]["predicted"] < 1 and set(facts["times"]) == {"F0", "B0", "F1", "I1", "W1"}


def test_ranks_share_one_clock(run: Path) -> None:
    """No rank takes a message before it was sent; a host with another clock is moved to where its last sum ends."""
    found = timeline(run)
    ends = {b.name: b.end for row in found.measured.rows for b in row.boxes}
    starts = {b.name: b.start for row in found.measured.rows for b in row.boxes}
    assert all(starts[f"F1.{m}"] >= starts[f"send F0.{m}"] >= ends[f"F0.{m}"] for m in range(3))
    path = run / "events" / "rank1.jsonl"
    before = path.read_text()
    try:
        path.write_text(
            "".join(json.dumps(r | {"at": r["at"] + 1e5}) + "\n" for r in map(json.loads, before.splitlines()))
        )
        moved = timeline(run, found.step)
    finally:
        path.write_text(before)
    assert moved.measured.makespan == pytest.approx(found.measured.makespan, abs=0.1)


def test_a_plan_without_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("train", JOB, "--plan", "dp=2 microbatches=2", "--steps", "5", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert main(["report", str(tmp_path / "runs" / "latest"), "--timeline"]) == 0
    assert "no pipeline, so no bubble" in capsys.readouterr().out
    (picture,) = svgs((tmp_path / "runs" / "latest" / "timeline.html").read_text())
    for g in (g for g in picture.findall("g") if g.get("data-rank") is not None):
        assert [b[0] for b in boxes(g)] == ["data", *("forward", "backward") * 2, "reduce", "optimizer"]


def test_what_cannot_be_drawn_is_said(tmp_path: Path, run: Path) -> None:
    with pytest.raises(PlaitError) as error:
        timeline(tmp_path / "runs" / "latest")
    assert error.value.codes == ["R003"]
    with pytest.raises(PlaitError) as error:
        timeline(run, step=99)
    assert error.value.codes == ["R004"] and "steps 1 to 8" in str(error.value)
    empty = RunDirectory.create("net.py", Plan(pp=2), {}, tmp_path)
    with pytest.raises(PlaitError) as error:
        timeline(empty.path)
    assert error.value.codes == ["R004"]
    assert main(["report", str(tmp_path / "nowhere")]) == 2


GOLDEN = """\
rank 0 · stage 0: F0.0 0-1, send F0.0 1-1.25, F0.1 1.25-2.25, send F0.1 2.25-2.5, receive B0.0 5-5.5, B0.0 5.5-7.5, \
F0.2 7.5-8.5, send F0.2 8.5-8.75, B0.1 8.75-10.75, receive B0.2 12.5-13, B0.2 13-15
rank 1 · stage 1: receive F1.0 1.25-1.75, F1.0 1.75-2.75, B1.0 2.75-4.75, send B1.0 4.75-5, F1.1 5-6, B1.1 6-8, \
send B1.1 8-8.25, receive F1.2 8.75-9.25, F1.2 9.25-10.25, B1.2 10.25-12.25, send B1.2 12.25-12.5"""


def test_a_table_by_hand() -> None:
    """1f1b with F = 1, B = 2, half a second for a message and a quarter to hand it over."""
    times = {(0, "F"): 1.0, (1, "F"): 1.0, (0, "B"): 2.0, (1, "B"): 2.0}
    block = predict(table("1f1b", 2, 3), times, [0.5], 0.25)
    text = "\n".join(f"{r.label}: " + ", ".join(f"{b.name} {b.start:g}-{b.end:g}" for b in r.boxes) for r in block.rows)
    assert text == GOLDEN
    assert block.makespan == 15.0 and block.bubble == pytest.approx(1 - 18 / 30)
    free = predict(table("1f1b", 2, 3), times, [0.0], 0.0)
    assert free.makespan == 12.0 and free.bubble == pytest.approx(1 / 4)


def test_a_span_inside_another_is_cut_out_of_it() -> None:
    spans = [Span("backward", 0.0, 4.0), Span("collect", 1.0, 2.0), Span("reduce", 4.0, 5.0)]
    assert [(s.name, s.start, s.end) for s in flat(spans)] == [
        ("backward", 0.0, 1.0), ("collect", 1.0, 2.0), ("backward", 2.0, 4.0), ("reduce", 4.0, 5.0),
    ]  # fmt: skip


def test_too_many_boxes_draw_fewer_ranks() -> None:
    rows = tuple(
        RankRow(r, f"rank {r}", tuple(Span(f"F0.{m}", float(m), m + 0.5) for m in range(1000))) for r in range(16)
    )
    found = Timeline(Path("runs/x"), Plan(pp=16), 1, 1, StepBox(rows, 0.5, 1000.0), None, {})
    assert drawn(found) == [0, 4, 8, 11, 15]
    text = unescape(page(found))
    assert "of 16 ranks only 0, " in text and len(svgs(text)[0].findall("g")) == 6  # and the axis
    assert drawn(replace(found, measured=StepBox(rows[:4], 0.5, 1000.0))) == [0, 1, 2, 3]


PROBE = """<script>
const told = []; window.onerror = m => told.push(m); console.error = m => told.push(m);
window.onload = () => {
  const boxes = [...document.querySelectorAll("svg.time g[data-name] rect")].map(r => r.getBoundingClientRect());
  const texts = [...document.querySelectorAll("svg.time g[data-name] text")];
  const box = document.querySelector(".scroll"), names = document.querySelector("svg.names text");
  const left = names.getBoundingClientRect().left; box.scrollLeft = 1e6;
  const size = texts.map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a);
  document.title = JSON.stringify({told, boxes: boxes.length, empty: boxes.filter(b => !(b.width > 0 && b.height > 10)).length,
    texts: texts.length, small: Math.min(...size), width: innerWidth, page: document.documentElement.scrollWidth,
    scrolled: box.scrollLeft, moved: Math.abs(names.getBoundingClientRect().left - left),
    fill: getComputedStyle(document.querySelector("g.k-F rect")).fill, dark: matchMedia("(prefers-color-scheme:dark)").matches});
};</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome here")
@pytest.mark.parametrize("width", [420, 1280])
def test_in_a_browser(run: Path, tmp_path: Path, width: int) -> None:
    """No errors, boxes with an area, and text of 10 pixels or more in a frame of this width, whose picture scrolls."""
    inner, outer = tmp_path / "inner.html", tmp_path / "outer.html"
    inner.write_text(page(timeline(run)).replace("</head>", PROBE + "</head>"), encoding="utf-8")
    outer.write_text(
        f'<iframe src="inner.html" width="{width}" height="800" frameborder="0"></iframe><pre id="out"></pre><script>'
        'const f = document.querySelector("iframe"); f.onload = () => setTimeout(() => '
        'document.querySelector("pre").textContent = f.contentDocument.title, 100);</script>',
        encoding="utf-8",
    )
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", profile)
    wanted = ("--virtual-time-budget=5000", "--window-size=1400,900", "--dump-dom", outer.as_uri())
    done = subprocess.run([str(BROWSER), *flags, *wanted], capture_output=True, text=True, timeout=90)
    found = re.search(r'<pre id="out">(\{.*\})</pre>', done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    told = json.loads(unescape(found[1]))
    assert told["told"] == [] and "CONSOLE" not in done.stderr
    assert told["boxes"] > 30 and told["empty"] == 0 and told["texts"] >= 10 and told["small"] >= 10
    assert told["width"] == width and told["page"] <= width, "the page itself must not scroll sideways"
    assert told["moved"] < 1 and (width > 1000 or told["scrolled"] > 300), "the picture scrolls, the ranks' names stay"
