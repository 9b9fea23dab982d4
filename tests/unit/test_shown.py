"""External text reaches a terminal as plain text: control characters are escaped, and plait's own characters have ASCII alternatives."""

import io
import sys
from pathlib import Path

import pytest

from plait.cli.console import Console
from plait.cli.main import main
from plait.config.errors import ASCII_FALLBACKS, PlaitError, Problem, escape_controls

EVIL = "a\x1b]0;owned\x07\x1b[31m\x9b1mred\x00\r\x08"


def test_control_characters_are_spelled_out() -> None:
    assert (
        escape_controls(EVIL) == r"a\x1b]0;owned\x07\x1b[31m\x9b1mred\x00\r\x08"
        and escape_controls("two\nlines\tand ü · ✓") == "two\nlines\tand ü · ✓"
    )


@pytest.mark.parametrize("place", ("what", "why", "where", "fix"))
def test_no_part_of_an_error_is_obeyed(place: str) -> None:
    said = {"what": "x", place: (EVIL,) if place == "fix" else EVIL}
    text = str(PlaitError(Problem("J003", **said)))  # pyrefly: ignore
    assert not {c for c in text if not c.isprintable()} - {"\n"} and r"\x1b" in text


def test_neither_is_what_a_rank_prints() -> None:
    out = io.StringIO()
    console = Console(out=out)
    console.add_output(0, b"a bar\x1b[2J\x1b[1;1H\n")
    console.print_lines(f"note  {EVIL}")
    console.close()
    assert "\x1b" not in out.getvalue() and r"\x1b[2J" in out.getvalue()


@pytest.mark.parametrize("words", (["train", f"{EVIL}.py"], ["train", "x.py", "--runs", EVIL], ["plan", EVIL], ["verify", EVIL], [EVIL]))
def test_nor_what_a_command_line_says(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([word.replace("\x00", "") for word in words]) == 2
    said = capsys.readouterr()
    assert not {c for c in said.out + said.err if not c.isprintable()} - {"\n"}


def test_an_encoding_without_plaits_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="plait")
    out.write("done · 3 → 4 × 5 … ✓ ü \udcff\n")
    out.flush()
    assert raw.getvalue() == rb"done - 3 -> 4 x 5 ... y \xfc \udcff" + b"\n" and all(map(str.isascii, ASCII_FALLBACKS.values()))
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["help", "P012"]) == 0
