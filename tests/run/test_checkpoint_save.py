"""A save during training: its contents, the files that a kill leaves, and the effect of a failed save."""

import dataclasses
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from rarely import rarely
from saved import read_checkpoint_tensors
from torch import nn

from plait import Engine, Job, PlaitError, Plan
from plait.checkpoint import saving
from plait.checkpoint.checkpoints import verify_checkpoint
from plait.launch import fork
from plait.tensors.rows import Part


def wide() -> Job:
    """A model whose save takes a few milliseconds."""
    return jobs.make(
        lambda: nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 40), nn.Linear(40, 1)), steps=40
    )


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    write = saving.write_safetensors

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    monkeypatch.setattr(saving, "write_safetensors", slow)


def listener() -> fork.Listener:
    return fork.Listener(lambda *_: None)


@pytest.mark.parametrize("plan", (*rarely("dp=1", "dp=2"), "fsdp=2"))
def test_training_goes_on_and_the_checkpoint_is_of_its_step(
    tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 0.1)

    def rank(place: Any, beside: bool) -> list[int]:
        """Saves step 3 and continues to step 12. Returns the steps at which step 3's checkpoint existed."""
        folder = tmp_path / str(beside)
        engine = Engine(wide(), Plan.parse(plan), device="cpu", directory=folder, place=place)
        there = []
        for batch in engine.batches():
            step = engine.step(batch).step
            if step == 3:
                engine.save(wait=not beside)
            if engine.checkpoints.list_published():
                there.append(step)
            time.sleep(0.05)
            if step == 12:
                break
        engine.save()
        return there

    world = Plan.parse(plan).world
    there = fork.run_ranks(lambda place: rank(place, True), world, listener())
    assert 4 < there[0][0] <= 12, "published beside training, without a second save"
    fork.run_ranks(lambda place: rank(place, False), world, listener())
    for step in ("step-000003", "step-000012"):
        assert same(read_checkpoint_tensors(tmp_path / "True" / step), read_checkpoint_tensors(tmp_path / "False" / step))
        assert not verify_checkpoint(tmp_path / "True" / step)[1]
    assert sorted(p.name for p in (tmp_path / "True").iterdir()) == ["step-000003", "step-000012"]


def test_snapshot_memory_is_used_again(tmp_path: Path) -> None:
    engine = Engine(wide(), "dp=1", device="cpu", directory=tmp_path)
    places = []
    for batch, _ in zip(engine.batches(), range(3)):
        engine.step(batch)
        engine.save(wait=False)
        places.append({h.name: t.data_ptr() for h, t in engine.checkpoints._snapshot._reused.items()})
    engine.checkpoints.finish_save(engine)
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("beside", (True, False))
@pytest.mark.parametrize("culprit", (0, 1))
def test_a_failure_anywhere_is_everyones(
    tmp_path: Path, beside: bool, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_safetensors
    fail = [False]

    def full(path: Path, *arguments: Any) -> Any:
        if fail[0] and "step-000004" in str(path):  # that of step 2 may still be in progress
            write(path, *arguments)
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(saving, "write_safetensors", full)

    def rank(place: Any) -> list[Any]:
        engine = Engine(wide(), "dp=2", device="cpu", directory=tmp_path, place=place)
        try:
            for batch in engine.batches():
                step = engine.step(batch).step
                if step in (2, 4):
                    fail[0] = step == 4 and place.rank == culprit
                    engine.save(wait=not beside)
                time.sleep(0.01)
        except PlaitError as error:
            return [error.codes, str(error), error.exit_code, engine.position.step]
        return []

    for codes, text, code, step in fork.run_ranks(rank, 2, listener()):
        assert codes == ["K004"] and "No space left" in text and "MiB are free" in text and code == 1
        assert 4 <= step < 30
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    assert not verify_checkpoint(tmp_path / "step-000002")[1]


def test_a_checkpoint_that_cannot_fit_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, a partial checkpoint would take the space that metric lines still need."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20480))

    def rank(place: Any) -> tuple[list[str], str]:
        engine = Engine(wide(), "dp=2", device="cpu", directory=tmp_path, place=place)
        engine.step(next(iter(engine.batches())))
        with pytest.raises(PlaitError) as caught:
            engine.save(wait=False)
        return caught.value.codes, str(caught.value)

    for codes, text in fork.run_ranks(rank, 2, listener()):
        assert codes == ["K004"] and "it takes" in text and "0.02 MiB are free" in text
    assert not list(tmp_path.iterdir())


def killed(folder: Path, kills: int) -> set[str]:
    """Kills a process that saves in a loop, `kills` times. The newest checkpoint is always complete and correct.

    Returns the unfinished files that the kills left behind.
    """
    moments = random.Random(3)
    reference = Engine(wide(), "dp=1", device="cpu", directory=folder)
    copies: dict[int, torch.Tensor] = {}
    source, left = reference.batches(), set[str]()
    for kill in range(kills):
        before, pid = sorted(folder.iterdir()), os.fork()
        if pid == 0:
            try:
                engine = Engine(wide(), "dp=1", device="cpu", directory=folder)
                engine.resume(missing_ok=True)
                for number, batch in enumerate(engine.batches()):
                    engine.step(batch)
                    engine.save(keep=2, wait=number % 2 == 0)
                engine.checkpoints.finish_save(engine)
            finally:
                os._exit(0)
        while kill % 2 and sorted(folder.iterdir()) == before and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.001)  # every other kill happens after a save has started, however slow the machine is
        time.sleep(moments.random() * (0.02 if kill % 2 else 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left |= {path.suffix[1:4] for path in folder.iterdir()}
        engine = Engine(wide(), "dp=1", device="cpu", directory=folder)
        path = engine.resume(missing_ok=True)
        assert not engine.checkpoints.damaged_found
        if path is None:
            continue
        step = engine.position.step
        while reference.position.step < step:
            reference.step(next(source))
            copies[reference.position.step] = next(reference.model.parameters()).detach().clone()
        assert torch.equal(copies[step], next(engine.model.parameters())), step
        assert path.name == f"step-{step:06d}"
        if step > 30:  # start over: the job has 40 steps
            for old in engine.checkpoints.list_published():
                saving.delete_directory(old)
    return left


@pytest.mark.slow
def test_killed_in_the_middle_of_saves(tmp_path: Path) -> None:
    killed(tmp_path, 15)


@pytest.mark.prove
def test_killed_often_in_the_middle_of_saves(tmp_path: Path) -> None:
    left = killed(tmp_path, 100)
    assert "tmp" in left, "no kill met a save"


def adafactor() -> Job:
    """Its state of a matrix is a row and a column, which are not shaped like any part of the parameter."""
    return jobs.make(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-2),
    )


def test_state_of_another_shape_belongs_to_a_whole_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(adafactor(), "dp=1", device="cpu", directory=tmp_path / "a")
    for batch, _ in zip(engine.batches(), range(2)):
        engine.step(batch)
    path = engine.save()
    again = Engine(adafactor(), "dp=1", device="cpu", directory=tmp_path / "a")
    assert again.resume() == path
    again.checkpoints = type(again.checkpoints)(tmp_path / "b")
    assert same(read_checkpoint_tensors(path), read_checkpoint_tensors(again.save()))
    weight = again.model[0].weight.detach()
    half = {
        **again.rank_model.get_parts(),
        "0.weight": Part(weight[:4], tuple(weight.shape), (((0, 4),), ((0, weight.shape[1]),))),
    }
    monkeypatch.setattr(type(again.rank_model), "get_parts", lambda self: half)
    for act in (again.save, again.resume):
        again.position = dataclasses.replace(again.position, step=9)
        with pytest.raises(PlaitError) as caught:
            act()
        assert caught.value.codes == ["K006"], caught.value
        assert "0.weight" in str(caught.value)
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["step-000002"]


def test_the_optimizers_numbers_come_back_exactly(tmp_path: Path) -> None:
    """Steps, a learning rate that is a tensor, tuples, unusual floats, and values that only one parameter has."""

    def job() -> Job:
        return jobs.make(
            lambda: nn.Linear(6, 1),
            optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.1 + 0.2, 1 / 3), capturable=False),
        )

    engine = Engine(job(), "dp=1", device="cpu", directory=tmp_path)
    engine.step(next(engine.batches()))
    state = engine.optimizer.state[engine.model.weight]
    state |= {"small": 5e-324, "large": 2**53 + 1, "flag": True, "word": "a/b", "none": None, "nan": math.nan}
    state |= {"half": torch.tensor(1 / 3, dtype=torch.bfloat16), "count": torch.tensor(2**61 + 1)}
    engine.save()
    again = Engine(job(), "dp=1", device="cpu", directory=tmp_path)
    again.resume()
    found = again.optimizer.state[again.model.weight]
    assert found.keys() == state.keys() and math.isnan(found["nan"])
    for key in ("small", "large", "flag", "word", "none"):
        assert found[key] == state[key] and type(found[key]) is type(state[key]), key
    assert found["count"] == 2**61 + 1 and found["step"].dtype == torch.float32
    group = again.optimizer.param_groups[0]
    assert group["betas"] == (0.1 + 0.2, 1 / 3) and torch.equal(group["lr"], torch.tensor(0.1))


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    engine = Engine(jobs.mlp(), "dp=1", device="cpu", directory=tmp_path)
    engine.step(next(engine.batches()))
    engine.optimizer.state[engine.model[0].weight]["history"] = [1, 2]
    with pytest.raises(PlaitError, match="K005") as caught:
        engine.save()
    assert "0.weight/history is a list" in str(caught.value) and not list(tmp_path.iterdir())
