"""A tracker gets every row of `metrics.jsonl` once, in whatever pieces the file grows, also where two rows are of the same step."""

import json
from pathlib import Path
from typing import Any

import pytest

from plait.engine.run_directory import RunDirectory
from plait.integrations.trackers import follow

ROWS = (
    {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "memory": {"when": "first", "total": 7}},
    {"step": 2, "evaluation": {"loss": 2.5}}, {"step": 3, "loss": 1.0}, {"step": 3, "evaluation": {"loss": 1.5}},
    {"step": 3, "memory": {"when": "end", "total": 9}},
)  # fmt: skip


class Kept:
    forgets = False
    rows: list[Any] = []  # noqa: RUF012  of all that were made: a process that goes on is another

    def start(self, run: Any, known: str | None) -> str:
        return "id"

    def write(self, rows: list[Any]) -> None:
        Kept.rows += rows


@pytest.mark.parametrize("pieces", (1, 2, 7))
def test_rows_of_one_step_all_arrive(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(follow.TRACKERS, "kept", Kept)
    monkeypatch.setattr(Kept, "rows", [])
    monkeypatch.setattr(follow.MetricsFeed, "_described", lambda self: None)
    (tmp_path / "trackers").mkdir()
    run = RunDirectory(tmp_path)
    feed = follow.MetricsFeed("kept", run, 0, print)
    size = -(-len(ROWS) // pieces)
    for first in range(0, len(ROWS), size):
        feed._read("".join(json.dumps(row) + "\n" for row in ROWS[first : first + size]).encode())
        feed._send()
    assert [step for step, _ in Kept.rows] == [row["step"] for row in ROWS]
    again = follow.MetricsFeed("kept", run, 3, print)  # a run that goes on: what is there was sent
    again._read("".join(json.dumps(row) + "\n" for row in (*ROWS[:-1], {"step": 4, "loss": 0.5})).encode())
    again._send()
    assert Kept.rows[len(ROWS) :] == [(4, {"loss": 0.5})]
