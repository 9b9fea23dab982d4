"""Console output: the live line at any width, the plain line, ranks' text, and warnings that are printed once."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from plait.cli import console
from plait.cli.console import Console, format_live_line, format_plain_line

STATUS: dict[str, Any] = {
    "step": 187, "steps": 300, "loss": 2.2049, "rate": 23400.4, "unit": "tok/s", "share": 0.853, "devices": 2,
    "memory": 0.3 * 2**30, "comm": 0.061, "data": 0.0, "data_rank": None, "eta": 21.4,
}  # fmt: skip


def shown(**options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(out=out, **options), out


def test_the_live_line_says_all_when_there_is_room() -> None:
    line = format_live_line(STATUS, 140)
    expected = "  loss 2.205  23 400 tok/s  (85 % of 2 × one)  mem 0.3 GiB  comm 6 %  data 0 %  ETA 0:21"
    assert line.startswith("step 187/300 ━")
    assert line.endswith(expected)
    bar = line.removeprefix("step 187/300 ").removesuffix(expected)
    assert bar == "━" * 12 + "╸" + " " * 7


@pytest.mark.parametrize("width", range(1, 150, 7))
@pytest.mark.parametrize("step", [0, 1, 187, 299, 300])
def test_the_live_line_fits_any_width(width: int, step: int) -> None:
    line = format_live_line(STATUS | {"step": step}, width)
    assert len(line) < width
    assert "\n" not in line
    if width > 40:
        assert f"step {step}/300" in line
        assert "loss 2.205" in line
    assert line == format_live_line(STATUS | {"step": step}, 500)[: len(line)] or width < 130


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_a_narrow_live_line_keeps_what_matters(width: int) -> None:
    line = format_live_line(STATUS, width)
    assert "loss 2.205" in line
    assert line.endswith("ETA 0:21")


def test_the_bar_grows_with_the_steps() -> None:
    bars = [format_live_line(STATUS | {"step": step}, 140).count("━") for step in range(301)]
    assert bars == sorted(bars)
    assert (bars[0], bars[300]) == (0, 20)
    assert {len(format_live_line(STATUS | {"step": s}, 140)) - len(f"step {s}/300 ") for s in range(301)} == {
        len(format_live_line(STATUS, 140)) - len("step 187/300 ")
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.9, "0:59"), (60, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (360000, "100:00:00")],
)
def test_the_time_that_is_left(seconds: float, text: str) -> None:
    assert format_live_line(STATUS | {"eta": seconds}, 200).endswith(f"ETA {text}")


def test_the_rank_that_waits_longest_for_its_samples_is_named() -> None:
    slow = STATUS | {"data": 0.42, "data_rank": 1}
    assert "comm 6 %  data 42 % (rank 1)  ETA" in format_live_line(slow, 160)
    assert "data=0.420 data_rank=1 eta_s=21" in format_plain_line(slow)


def test_a_loss_that_is_no_number() -> None:
    line = format_live_line(STATUS | {"loss": float("nan"), "rate": 1234567.0, "unit": "samples/s"}, 200)
    assert "loss nan  1 234 567 samples/s" in line
    assert "loss=nan" in format_plain_line(STATUS | {"loss": float("nan")})


def test_the_plain_line_is_for_grep() -> None:
    time, *words = format_plain_line(STATUS).split()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time)
    assert dict(word.split("=") for word in words) == {
        "step": "187/300", "loss": "2.2049", "tok/s": "23400", "share": "0.853", "mem_gib": "0.30", "comm": "0.061",
        "data": "0.000", "eta_s": "21",
    }  # fmt: skip


def test_plain_lines_come_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    view, out = shown()
    for step in range(1, 31):
        now += 1.0
        view.show_status(STATUS | {"step": step})
    lines = out.getvalue().splitlines()
    assert [re.search(r"step=(\d+)", line)[1] for line in lines] == ["10", "20", "30"]  # type: ignore[index]


def test_an_evaluation_is_one_line() -> None:
    view, out = shown()
    view.show_status({"evaluation": {"loss": 0.123456, "accuracy": 0.5}, "step": 20})
    assert out.getvalue() == "evaluation at step 20: loss 0.1235 accuracy 0.5\n"
    assert view.last_status is None


def test_the_text_of_the_chosen_ranks() -> None:
    view, out = shown()
    view.add_output(0, b"one\ntw")
    view.add_output(1, b"hidden\n")
    view.add_output(0, b"o\n\nthree")
    assert out.getvalue() == "one\ntwo\n\n"
    view.close()
    assert out.getvalue() == "one\ntwo\n\nthree\n"
    view, out = shown(shown_ranks=(0, 2))
    view.add_output(2, b"[bold]x[/bold] " + b"y" * 300 + b"\n")
    view.add_output(0, b"z\n")
    assert out.getvalue() == "[rank 2] [bold]x[/bold] " + "y" * 300 + "\n[rank 0] z\n"


def test_bytes_that_are_no_text() -> None:
    view, out = shown()
    view.add_output(0, b"a\xffb\n")
    assert out.getvalue() == "a\ufffdb\n"


def test_a_character_split_over_two_reads() -> None:
    view, out = shown()
    first, second = "é".encode()[:1], "é\n".encode()[1:]
    view.add_output(0, first)
    view.add_output(0, second)
    assert out.getvalue() == "é\n"


def test_a_progress_bar_of_the_job() -> None:
    view, out = shown()
    view.add_output(0, b"50%\r100%\n")
    assert "50%100%" not in out.getvalue()


def test_a_warning_is_told_once_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    view, out = shown()
    for rank in (1, 0, 2, 0):
        view.count_warning(rank, "UserWarning: slow")
    view.count_warning(3, "other")
    view.show_pending()
    assert out.getvalue() == ""
    now += 1.5
    view.count_warning(1, "late")
    view.show_pending()
    assert (
        out.getvalue()
        == "[ranks 0-2] UserWarning: slow (4×, full text in logs/)\n[rank 3] other (full text in logs/)\n"
    )
    for rank in range(4):
        view.count_warning(rank, "UserWarning: slow")
    view.close()
    assert out.getvalue().splitlines()[2:] == ["[rank 1] late (full text in logs/)"]


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "rank 0"), ([0, 1], "ranks 0-1"), ([5, 3, 4], "ranks 3-5"), ([0, 2, 3], "ranks 0,2,3")]
)
def test_ranks_are_written_short(ranks: list[int], text: str) -> None:
    view, out = shown()
    for rank in ranks:
        view.count_warning(rank, "w")
    view.close()
    assert out.getvalue().startswith(f"[{text}] w (")


def test_the_last_line() -> None:
    view, _ = shown()
    assert "0 steps" in view.format_summary(Path("runs/x-1"), None)
    assert "checkpoint none" in view.format_summary(Path("runs/x-1"), None)
    view.show_status(STATUS | {"step": 1})
    view.show_status(STATUS | {"step": 300, "loss": 1.5})
    line = view.format_summary(Path("runs/x-1"), "step-000300")
    assert line.startswith("done  300 steps in 0 s · loss 2.205 → 1.500 · ")
    assert line.endswith("checkpoint step-000300 · runs/x-1")
