"""Checkpoints with NaN or infinity are marked by the rank that saves them, reported by every command, and never used as the last good one."""

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

from plait import Engine, Plan
from plait.checkpoint.manifest import read_manifest
from plait.cli.main import main
from plait.launch import fork


def poison(engine: Engine, what: str) -> None:
    """Writes a non-finite value into this rank's weights, optimizer state or buffers."""
    parameter = next(iter(engine.rank_model.params.values()))
    if not parameter.numel():
        return
    with torch.no_grad():
        if what == "weights":
            parameter.view(-1)[-1] = float("inf")
        if what == "optimizer":
            next(t for t in engine.optimizer.state[parameter].values() if t.dim()).view(-1)[-1] = float("nan")
        if what == "mask":
            engine.model.mask.fill_(float("-inf"))


def masked() -> Any:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 1))
        made.register_buffer("mask", torch.zeros(3))
        return made

    return jobs.make(model)


def saved(folder: Path, plan: str, wrong: dict[int, str], keep: int = 9, steps: int = 5) -> list[str]:
    """Trains and saves every step, with poison in some of the saved states. Returns the remaining checkpoints."""

    def rank(place: Any) -> None:
        engine = Engine(masked(), Plan.parse(plan), device="cpu", directory=folder, place=place)
        for batch in engine.batches():
            step = engine.step(batch).step
            before = {n: p.detach().clone() for n, p in engine.rank_model.params.items()}
            if step in wrong:
                poison(engine, wrong[step])
            engine.save(keep)
            with torch.no_grad():
                for name, parameter in engine.rank_model.params.items():
                    parameter.copy_(before[name])
            if step == steps:
                break

    fork.run_ranks(rank, Plan.parse(plan).world, fork.Listener(lambda *_: None))
    return sorted(path.name for path in folder.iterdir())


def marked(folder: Path) -> dict[int, tuple[str, ...]]:
    found = {int(path.name[5:]): read_manifest(path).nonfinite for path in folder.iterdir()}
    return {step: names for step, names in found.items() if names}


@pytest.mark.parametrize("plan", ("dp=1", "fsdp=2"))
def test_what_is_not_finite_is_marked(tmp_path: Path, plan: str, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, plan, {2: "mask", 4: "weights", 5: "optimizer"})
    found = marked(tmp_path)
    assert found[4] == ("model/0.weight",)
    assert found[5] == ("optimizer/0.weight/exp_avg",)
    assert set(found) == {4, 5}, "a buffer of minus infinity is a mask"
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    rows = capfd.readouterr().out.splitlines()
    assert ["not finite: model/0.weight" in row for row in rows] == [False, True, False, False, False]
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    text = capfd.readouterr().out
    assert (
        "error[N004]" in text
        and "step-000003  good" in text
        and f"newest good checkpoint is {tmp_path}/step-000003" in text
    )
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "3"]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "info", str(tmp_path), "--step", "4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["not finite"] == ["model/0.weight"]


def test_the_last_sound_one_stays_and_is_resumed_from(tmp_path: Path) -> None:
    names = saved(tmp_path, "dp=2", {3: "weights", 4: "optimizer", 5: "weights"}, keep=2)
    assert names == ["step-000002", "step-000004", "step-000005"]

    def rank(place: Any) -> dict[str, Any]:
        engine = Engine(masked(), Plan.parse("dp=2"), device="cpu", directory=tmp_path, place=place)
        path = engine.resume()
        assert path is not None
        refused = [problem.code + problem.what for problem in engine.checkpoints.damaged_found]
        for batch in engine.batches():
            if engine.step(batch).step == 4:
                break
        engine.save(2)
        return {"path": path.name, "refused": refused}

    for result in fork.run_ranks(rank, 2, fork.Listener(lambda *_: None)):
        assert result["path"] == "step-000002"
        assert len(result["refused"]) == 2 and all(text.startswith("N004") for text in result["refused"])
    assert set(marked(tmp_path)) == {5}, "step 4 was saved anew"


def test_without_a_sound_one_the_newest_is_taken_and_it_is_said(tmp_path: Path) -> None:
    saved(tmp_path, "dp=1", dict.fromkeys(range(1, 6), "weights"), keep=2)
    assert sorted(marked(tmp_path)) == [4, 5]
    engine = Engine(masked(), "dp=1", device="cpu", directory=tmp_path)
    path = engine.resume()
    assert path is not None and path.name == "step-000005"
    assert [problem.code for problem in engine.checkpoints.nonfinite_found] == ["N004"]
