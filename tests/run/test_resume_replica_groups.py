"""Runs with replica groups resume from a checkpoint bit for bit: each group's weights and optimizer, outer momentum, messages."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs_compressed
import pytest
import torch
from launched import TEST_JOB, Command, rows
from rarely import every, sampled
from saved import manifest, whole_and_killed
from torch import nn

from plait.checkpoint import replica_groups
from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.manifest import MANIFEST_NAME, seal_json, unseal_json
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.replica_groups.outer_synchronizer import OuterSynchronizer

SAVED, LAST = 5, 12


def train(
    folder: Path, text: str, *, resume: bool = False, allow: bool = False, last: int = LAST
) -> list[dict[str, Any]]:
    """Each rank's weights and global weights, and the differences to the checkpoint's job. Saves a checkpoint on the way."""

    def rank(place: Place) -> dict[str, Any]:
        job = replace(jobs_compressed.job("pictures"), steps=100, seed=3)
        if "tp" in text:  # it has five features, of which tp=2 shards none
            job = replace(job, model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)))
        engine = Engine(job, text, place=place, directory=folder, device="cpu")
        if resume:
            engine.resume(allow_changes=allow)
        for batch in engine.batches():
            engine.step(batch)
            if engine.position.step == SAVED and not resume:
                engine.save()
            if engine.position.step == last:
                break
        rare = engine.rank_model.techniques.replica_groups
        common = {n: p.tensor.tolist() for n, p in rare.reduce_global_parts().items()} if rare is not None else {}
        weights = {name: p.tolist() for name, p in engine.rank_model.params.items()}
        return {"changed": engine.checkpoints.job_changes, "weights": weights, "global": common}

    return fork.run_ranks(rank, Plan.parse(text).world)


PLANS = (
    "replica_groups=2 sync_every=4",
    "replica_groups=3 outer_sync=diloco sync_every=3",
    "replica_groups=2 outer_sync=diloco sync_every=6 num_fragments=2 fragment_delay=3 fragment_alpha=0.5",
    "replica_groups=2 outer_sync=diloco sync_every=2 fsdp=2",
    "replica_groups=2 sync_every=3 grad_compression=int8",
    "replica_groups=2 warmup_sync_steps=7 sync_every=2",
    "replica_groups=2 outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=2 grad_compression=powersgd compression_rank=1",
    "replica_groups=2 tp=2 sync_every=4",
)


@pytest.mark.parametrize(
    "text", every(2, (PLANS[0], PLANS[1], PLANS[2], PLANS[3], PLANS[6], PLANS[5], PLANS[4], PLANS[7]))
)
def test_resumed_is_uninterrupted(tmp_path: Path, text: str) -> None:
    assert train(tmp_path, text) == train(tmp_path, text, resume=True)
    names = manifest(tmp_path / f"step-{SAVED:06d}").tensors
    groups = {n.split("/")[1] for n in names if n.startswith("groups/") and "/model/" in n}
    assert groups == set(map(str, range(Plan.parse(text).replica_groups)))


def without(what: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = OuterSynchronizer.get_state_parts
        kept = lambda self: {n: p for n, p in real(self).items() if not n.startswith(what)}  # noqa: E731
        monkeypatch.setattr(OuterSynchronizer, "get_state_parts", kept)

    return patch


def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    without("sent")(monkeypatch)
    monkeypatch.setattr(OuterSynchronizer, "get_state_values", lambda self: {"sent": []})


def all_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group continues with the weights and the optimizer of the first."""
    monkeypatch.setattr(replica_groups, "group_prefix", lambda training: "groups/0/")


LOST = {
    "the outer momentum is not saved": (PLANS[3], without("outer")),
    "what is on its way is not saved": (PLANS[2], no_messages),
}


@pytest.mark.parametrize("bug", LOST)
def test_what_is_not_saved_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: str) -> None:
    text, patch = LOST[bug]
    patch(monkeypatch)
    assert train(tmp_path, text) != train(tmp_path, text, resume=True)


def test_groups_that_go_on_as_the_first_are_other_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path, PLANS[0])
    all_as_the_first(monkeypatch)
    assert whole != train(tmp_path, PLANS[0], resume=True)


@pytest.mark.parametrize("text", sampled(2, ("replica_groups=3 sync_every=4", "dp=2", "fsdp=2")))
def test_another_number_of_groups_is_refused_unless_allowed(tmp_path: Path, text: str) -> None:
    train(tmp_path, PLANS[0], last=SAVED)
    with pytest.raises(PlaitError, match="K010") as error:
        train(tmp_path, text, resume=True)
    assert "replica_groups 2 →" in str(error.value) and "--allow-changes" in str(error.value)
    assert any("replica_groups 2 →" in line for line in train(tmp_path, text, resume=True, allow=True)[0]["changed"])


def test_groups_go_on_from_a_run_without_any(tmp_path: Path) -> None:
    """Each group starts with the run's weights and its optimizer state."""
    train(tmp_path, "dp=2", last=SAVED)
    ends = train(
        tmp_path, "replica_groups=2 outer_sync=diloco sync_every=1 outer_lr=1 outer_momentum=0.0", resume=True, last=SAVED + 1
    )
    assert ends[0]["weights"] == ends[1]["weights"] and ends[0]["global"] == ends[1]["global"]


def test_a_checkpoint_without_a_groups_weights_is_damaged(tmp_path: Path) -> None:
    train(tmp_path, PLANS[0], last=SAVED)
    path = tmp_path / f"step-{SAVED:06d}" / MANIFEST_NAME
    content = unseal_json(path.read_bytes())
    del content["tensors"]["groups/1/model/last.weight"]
    path.write_bytes(seal_json(content))
    with pytest.raises(PlaitError, match="K002"):
        train(tmp_path, PLANS[0], resume=True)


@pytest.mark.slow
def test_a_checkpoint_is_told_of_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages sent before rank 0 starts to publish report written files, not a published checkpoint."""
    real = Checkpoints.publish_save

    def publish(self: Checkpoints, flight: Any, ranks: int) -> None:
        time.sleep(1.0)
        real(self, flight, ranks)

    monkeypatch.setattr(Checkpoints, "publish_save", publish)

    def rank(place: Place) -> dict[str, Any]:
        plan = "replica_groups=2 outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=3"
        job = replace(jobs_compressed.job("pictures"), steps=400)
        engine, told = Engine(job, plan, place=place, directory=tmp_path, device="cpu"), list[bool]()
        engine.checkpoints.on_published = lambda path: told.append((path / MANIFEST_NAME).exists())
        for batch in engine.batches():
            engine.step(batch)
            time.sleep(0.02)
            if engine.position.step == SAVED:
                engine.save(wait=False)
            if told or engine.position.step == 300:
                break
        return {"told": told}

    assert fork.run_ranks(rank, 2) == [{"told": [True]}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, ("replica_groups=2 outer_sync=diloco sync_every=5", "replica_groups=2 dp=2 sync_every=3")))
def test_killed_and_resumed(tmp_path: Path, plan: str) -> None:
    """The command itself, killed between two checkpoints and between two synchronizations."""
    ends = whole_and_killed(tmp_path, plan, "not exact: 2 groups train separately", "--max-restarts", "0")
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(t, ends[1][n]) for n, t in ends[0].items())
    assert any(n.startswith("groups/1/") for n in ends[0])


def test_a_wish_to_stop_is_heard_at_a_synchronisation(tmp_path: Path) -> None:
    plan = "replica_groups=2 sync_every=4"
    argv = ("train", TEST_JOB, "--plan", plan, "--job.steps", "4000", "--job.pause", "0.01", "--max-restarts", "0")
    command = Command(*argv, folder=tmp_path)
    command.until(lambda: len(rows(tmp_path)) >= 3)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 75, command.output
    (made,) = (tmp_path / "runs/latest/checkpoints").glob("step-*")
    assert int(made.name[5:]) % 4 == 0
