"""What a rank of `plait train` does beside its steps."""

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
from plait.engine.train import train
from plait.launch import fork
from plait.launch.place import Place


class Frozen(plait.Callback):
    """By step, how many objects collections of garbage leave out, and how many they look at."""

    def __init__(self) -> None:
        self.counts: dict[int, tuple[int, int]] = {}

    def on_step(self, engine: Any, step: Step) -> None:
        self.counts[step.step] = gc.get_freeze_count(), len(gc.get_objects())


def test_collections_of_garbage_leave_out_what_was_built(tmp_path: Path) -> None:
    """From the second step on; garbage that is made later is collected as the user has it set."""
    run, noting = RunDirectory(tmp_path), Frozen()
    for path in (run.path, run.checkpoints, run.events(0).parent):
        path.mkdir(parents=True, exist_ok=True)
    options = RankOptions(
        name="mlp", job=jobs.mlp(), plan=Plan.parse("dp=1"), arguments={}, device="cpu", callbacks=lambda: [noting]
    )

    def rank(place: Place) -> dict[str, Any]:
        train(options, run, place)
        return {"counts": noting.counts, "enabled": gc.isenabled(), "threshold": gc.get_threshold()}

    (found,) = fork.run(rank, 1, fork.Listener(lambda *_: None))
    (built, looked_at), (left_out, then) = (found["counts"][str(step)] for step in (1, 3))
    assert left_out > built + looked_at // 3 and then < looked_at // 3, found
    assert found["enabled"] and tuple(found["threshold"]) == gc.get_threshold()


def test_a_span_that_a_step_ends_in_begins_again_with_the_next_one() -> None:
    spans = Spans(lambda name: None, torch.device("cpu"))
    with spans.around("step"):
        first = spans.taken()()
    ((name, start, took),), ((again, begin, _),) = first, spans.taken()()
    assert (name, again) == ("step", "step") and begin == start + took


class FakeEvent:
    """A moment of a device whose clock counts events, and whose milliseconds are those between two."""

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
    """Events are used again, and a step that is read late has the times that it had: no event is given to two moments."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    spans, unread = Spans(lambda name: None, torch.device("cuda")), list[Any]()
    for _ in range(6):
        with spans.around("step"):
            with spans.around("forward"):
                pass
            unread.append(spans.taken())
            with spans.around("callbacks"):
                pass
        if len(unread) > 1:  # as on a GPU, one step late
            found = {name: round(1e3 * took) for name, _, took in unread.pop(0)()}
            assert found == {"step": 3, "forward": 1} | ({"callbacks": 1} if "callbacks" in found else {})
    assert len(set(map(id, spans.clock.free if spans.clock else ()))) == len(spans.clock.free if spans.clock else ())
