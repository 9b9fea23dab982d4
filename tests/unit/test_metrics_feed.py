"""A tracker receives every row of `metrics.jsonl` once, in whatever pieces the file grows, also if two rows belong to the same step."""

import json
from pathlib import Path
from typing import Any

import pytest

from plait.engine.run_directory import RunDirectory
from plait.integrations.trackers import tracker_processes

ROWS = (
    {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "memory": {"when": "first", "total": 7}},
    {"step": 2, "evaluation": {"loss": 2.5}}, {"step": 3, "loss": 1.0}, {"step": 3, "evaluation": {"loss": 1.5}},
    {"step": 3, "memory": {"when": "end", "total": 9}},
)  # fmt: skip


class Kept:
    can_rewind = False
    rows: list[Any] = []  # noqa: RUF012  of all instances: a resumed run has another process

    def start(self, run: Any, known: str | None) -> str:
        return "id"

    def write(self, rows: list[Any]) -> None:
        Kept.rows += rows


@pytest.mark.parametrize("pieces", (1, 2, 7))
def test_rows_of_one_step_all_arrive(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker_processes.TRACKERS, "kept", Kept)
    monkeypatch.setattr(Kept, "rows", [])
    monkeypatch.setattr(tracker_processes.MetricsFeed, "_describe_run", lambda self: None)
    (tmp_path / "trackers").mkdir()
    run = RunDirectory(tmp_path)
    feed = tracker_processes.MetricsFeed("kept", run, 0, print)
    size = -(-len(ROWS) // pieces)
    for first in range(0, len(ROWS), size):
        feed._read_rows("".join(json.dumps(row) + "\n" for row in ROWS[first : first + size]).encode())
        feed._send_rows()
    assert [step for step, _ in Kept.rows] == [row["step"] for row in ROWS]
    again = tracker_processes.MetricsFeed("kept", run, 3, print)  # a resumed run: the existing rows were sent
    again._read_rows("".join(json.dumps(row) + "\n" for row in (*ROWS[:-1], {"step": 4, "loss": 0.5})).encode())
    again._send_rows()
    assert Kept.rows[len(ROWS) :] == [(4, {"loss": 0.5})]
