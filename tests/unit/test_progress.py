"""The progress of a command: one line on a terminal, nothing elsewhere."""

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.cli.progress import ProgressLine

JOB = str(Path(__file__).parents[1] / "jobs.py") + ":mlp"


def terminal(command: list[str]) -> tuple[int, str]:
    """The exit code of a command on a terminal, and its full output there."""
    pid, descriptor = pty.fork()
    if pid == 0:
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        code = main(command)
        sys.stdout.flush()
        os._exit(code)
    read = b""
    while True:
        try:
            some = os.read(descriptor, 1 << 16)
        except OSError:  # the terminal is closed
            break
        if not some:
            break
        read += some
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), read.decode()


def test_what_is_left_is_shown_and_taken_away(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("plait.cli.progress.time.monotonic", lambda: now[0])
    with ProgressLine("chaos") as line:
        line.is_shown = True
        line.show("faults", 0, 4)
        now[0] = 10.0
        line.show("faults", 1, 4)
        line.print("a row")
    out, err = capsys.readouterr()
    assert out == "a row\n"
    states = err.split("\r\x1b[K")
    assert states[1].endswith("0/4") and states[2].endswith("1/4  0:30 left") and states[3:] == ["", ""]


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("plan") as line:
        line.show("plans", 1, 2)
        line("reading: 3 of 9")
    assert capsys.readouterr() == ("", "")


def test_verify_shows_parts_on_a_terminal_and_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = terminal(["verify", JOB, "--plan", "dp=2", "--device", "cpu"])
    assert code == 0 and re.search(r"\r\x1b\[Kverify  parts compared ━+╸? *1/3", text), text
    left = [line.rpartition("\x1b[K")[2] for line in text.split("\r\n")]
    assert not any("parts compared" in line for line in left) and any(line.startswith("EQUAL") for line in left)


def test_json_has_no_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = terminal(["verify", JOB, "--plan", "dp=2", "--device", "cpu", "--json"])
    assert code == 0 and "\x1b[K" not in text and json.loads(text.strip().splitlines()[-1])
