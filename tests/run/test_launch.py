"""The launcher: it starts fast, returns results from every rank, and ignores races at exit."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.config.errors import PlaitError, Problem
from plait.launch import fork, place
from plait.launch.place import Place


def meet(place: Place) -> dict[str, Any]:
    place.connect(torch.device("cpu"))
    total = torch.tensor([float(place.rank)])
    dist.all_reduce(total)
    return {"sum": float(total), "at": time.monotonic()}


@pytest.mark.slow
def test_eight_ranks_meet_within_half_a_second() -> None:
    fork.run_ranks(meet, 2)  # the parent imports once
    taken = []
    for _ in range(5):
        began = time.monotonic()
        results = fork.run_ranks(meet, 8)
        assert [r["sum"] for r in results] == [28.0] * 8
        taken.append(max(r["at"] for r in results) - began)
    busy = max(1.0, os.getloadavg()[0] / 2)  # two processes per core
    assert min(taken) <= 0.5 * busy, taken


@pytest.mark.slow
def test_no_spurious_failure_in_many_runs() -> None:
    for _ in range(20):
        fork.run_ranks(meet, 3)


def fails(place: Place) -> dict[str, Any]:
    place.connect(torch.device("cpu"))
    if place.rank == 2:
        raise PlaitError(Problem("J009", "made up", fix=("nothing",)))
    dist.barrier()
    return {}


def test_a_plait_error_in_a_rank_is_raised_as_itself() -> None:
    with pytest.raises(PlaitError, match="made up") as caught:
        fork.run_ranks(fails, 3)
    assert caught.value.codes == ["J009"]
    assert "Traceback" in caught.value.trace


@pytest.mark.parametrize("said, each", (("3", 3), ("", 2), ("none", 2)))
def test_threads_of_a_process(said: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's setting has priority, as in plain PyTorch. Otherwise processes divide the cores."""
    monkeypatch.setattr(place, "count_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert [r["threads"] for r in fork.run_ranks(lambda _: {"threads": torch.get_num_threads()}, 2)] == [each, each]
