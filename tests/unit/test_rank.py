"""What a rank of `plait train` does beside its steps."""

import gc
from pathlib import Path
from typing import Any

import jobs

import plait
from plait.config.plan import Plan
from plait.engine.rank_start import RankOptions
from plait.engine.run_directory import RunDirectory
from plait.engine.step import Step
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
