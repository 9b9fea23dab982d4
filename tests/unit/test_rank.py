"""Work of a rank of `plait train` outside of its steps."""

import gc
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

import plait
from plait.config.plan import Plan
from plait.engine.rank_start import RankOptions
from plait.engine.run_directory import RunDirectory
from plait.engine.step import Spans, Step
from plait.engine.train import train_rank
from plait.launch import fork
from plait.launch.place import Place


class Frozen(plait.Callback):
    """By step: the number of objects that garbage collection skips, and the number that it visits."""

    def __init__(self) -> None:
        self.counts: dict[int, tuple[int, int]] = {}

    def on_step(self, engine: Any, step: Step) -> None:
        self.counts[step.step] = gc.get_freeze_count(), len(gc.get_objects())


def test_collections_of_garbage_leave_out_what_was_built(tmp_path: Path) -> None:
    """From the second step on. Later garbage is collected with the user's settings."""
    run, noting = RunDirectory(tmp_path), Frozen()
    for path in (run.path, run.checkpoints, run.get_events_path(0).parent):
        path.mkdir(parents=True, exist_ok=True)
    options = RankOptions(
        name="mlp", job=jobs.mlp(), plan=Plan.parse("dp=1"), arguments={}, device="cpu", callbacks=lambda: [noting]
    )

    def rank(place: Place) -> dict[str, Any]:
        train_rank(options, run, place)
        return {"counts": noting.counts, "enabled": gc.isenabled(), "threshold": gc.get_threshold()}

    (found,) = fork.run_ranks(rank, 1, fork.Listener(lambda *_: None))
    (built, looked_at), (left_out, then) = (found["counts"][str(step)] for step in (1, 3))
    assert left_out > built + looked_at // 3 and then < looked_at // 3, found
    assert found["enabled"] and tuple(found["threshold"]) == gc.get_threshold()


def test_a_span_that_a_step_ends_in_begins_again_with_the_next_one() -> None:
    spans = Spans(lambda name: None, torch.device("cpu"))
    with spans.record_span("step"):
        first = spans.take_spans()()
    ((name, start, took),), ((again, begin, _),) = first, spans.take_spans()()
    assert (name, again) == ("step", "step") and begin == start + took


class FakeEvent:
    """A point in time of a device whose clock counts events. Milliseconds are the number of events between two."""

    made = 0

    def __init__(self, enable_timing: bool):
        self.at = 0

    def record(self) -> None:
        FakeEvent.made += 1
        self.at = FakeEvent.made

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "FakeEvent") -> float:
        return float(later.at - self.at)


def test_the_clock_of_a_device_knows_spans_that_steps_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are reused, and a step that is read late has its own times: no event is used for two points in time."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    spans, unread = Spans(lambda name: None, torch.device("cuda")), list[Any]()
    for _ in range(6):
        with spans.record_span("step"):
            with spans.record_span("forward"):
                pass
            unread.append(spans.take_spans())
            with spans.record_span("callbacks"):
                pass
        if len(unread) > 1:  # as on a GPU, one step late
            found = {name: round(1e3 * took) for name, _, took in unread.pop(0)()}
            assert found == {"step": 3, "forward": 1} | ({"callbacks": 1} if "callbacks" in found else {})
    assert len(set(map(id, spans.clock.free_events if spans.clock else ()))) == len(spans.clock.free_events if spans.clock else ())
