"""A process group that exists before plait is called, as in Ray Train: plait joins it unchanged, including one without host tensors."""

import contextlib
import io
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launched import TEST_JOB, Command, rows
from rarely import rarely

from plait import Engine
from plait.cli.main import main
from plait.launch import fork, groups
from plait.launch.place import Place

BLIND = "blind"
"""A backend for device tensors only, like NCCL. NCCL is not available here, so it is gloo under another name."""


def blind(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def make(place: Place, backend: str) -> None:
    """The setup that Ray Train does in each of its workers: variables, and a group."""
    os.environ |= {
        "RANK": str(place.rank), "WORLD_SIZE": str(place.world), "LOCAL_RANK": str(place.rank), "NODE_RANK": "0",
        "LOCAL_WORLD_SIZE": str(place.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
    }  # fmt: skip
    if backend == BLIND:
        dist.Backend.register_backend(BLIND, blind, devices=["cuda"])
    assert place.store is not None
    dist.init_process_group(backend, store=place.store(), rank=place.rank, world_size=place.world)


def joined(folder: Path, backend: str, plan: str, *words: str) -> list[dict[str, Any]]:
    """The output of two ranks of a program that creates a group and then calls `plait train`."""

    def rank(place: Place) -> dict[str, Any]:
        os.chdir(folder)
        make(place, backend)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(["train", TEST_JOB, "--plan", plan, *words])
        there = dist.get_backend_config()  # it still belongs to the program
        return {"code": code, "said": out.getvalue(), "there": there}

    return fork.run_ranks(rank, 2)


PLANS = ("fsdp=2", *rarely("dp=2", "tp=2", "pp=2 microbatches=2"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("gloo", BLIND))
@pytest.mark.parametrize("plan", PLANS)
def test_a_group_that_exists_trains_as_forked_ranks_do(tmp_path: Path, plan: str, backend: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = Command("train", TEST_JOB, "--plan", plan, "--steps", "8", folder=tmp_path / "one")
    first, second = joined(tmp_path / "two", backend, plan, "--steps", "8", "--check", "none")
    assert (first["code"], second["code"]) == (0, 0), first["said"] + second["said"]
    assert "a process group that exists: 2 ranks" in first["said"] and second["said"] == ""
    assert first["there"] == ("cuda:blind" if backend == BLIND else "cpu:gloo,cuda:gloo")
    assert alone.wait(60) == 0, alone.output
    there = [[(r["step"], r["loss"]) for r in rows(tmp_path / one)] for one in ("one", "two")]
    assert there[0] == there[1] and len(there[0]) == 8


def test_gloo_is_made_where_it_is_missing() -> None:
    def rank(place: Place) -> dict[str, Any]:
        make(place, BLIND)
        first, again = place.connect(groups_device()), place.connect(groups_device())
        some = groups.new_group([0, 1])
        return {
            "made": dist.get_backend_config(first), "same": first is again, "some": dist.get_backend_config(some),
            "count": dist.get_pg_count(),
        }  # fmt: skip

    said = fork.run_ranks(rank, 2)
    assert (
        said
        == [{"made": "cpu:gloo,cuda:blind", "same": True, "some": "cpu:gloo,cuda:blind", "count": said[0]["count"]}] * 2
    )


def test_an_engine_leaves_a_group_to_whoever_made_it() -> None:
    def rank(place: Place) -> dict[str, Any]:
        import training

        made = dist.HashStore() if place.rank else None  # rank 0 lets the engine create its own
        if made is not None:
            dist.init_process_group("gloo", store=made, rank=0, world_size=1)
        with Engine(
            training.job(steps=1), "dp=1", device="cpu", place=Place(joined=True, store=dist.HashStore)
        ) as engine:
            steps = [engine.step(batch).step for batch in engine.batches()]
        return {"steps": steps, "there": dist.is_initialized()}

    assert fork.run_ranks(rank, 2) == [{"steps": [1], "there": False}, {"steps": [1], "there": True}]


def groups_device() -> Any:
    import torch

    return torch.device("cpu")


@pytest.mark.slow
def test_an_attempt_of_a_named_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's workers do after one of them was killed: the same command, without --resume."""
    monkeypatch.setenv("PLAIT_START", "experiment 7")
    half = ("--save-every", "4", "--check", "none")
    first, _ = joined(tmp_path, "gloo", "dp=2", "--steps", "9", *half)
    second, _ = joined(tmp_path, "gloo", "dp=2", "--steps", "16", *half)
    assert "resumed from runs/training-1/checkpoints/step-000009" in second["said"], second["said"]
    assert json.loads((tmp_path / "runs/training-1/starts.json").read_text()) == ["PLAIT_START experiment 7"]
    monkeypatch.setenv("PLAIT_START", "experiment 8")
    third, _ = joined(tmp_path, "gloo", "dp=2", "--steps", "2", *half)
    assert "resumed" not in third["said"] and (tmp_path / "runs/training-2").is_dir()
    assert [r["step"] for r in rows(tmp_path)] == [1, 2] and (first["code"], third["code"]) == (0, 0)
