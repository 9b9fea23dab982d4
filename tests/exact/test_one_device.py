"""The job's code sees one device under each plan: torch.distributed is unavailable to it. Code that needs it is named."""

import gc
import weakref

import jobs_communicating
import pytest
import torch
import torch.distributed as dist
from rarely import sampled
from torch import Tensor, nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork, one_device
from plait.launch.place import Place
from plait.proof.verify import verify

RIGHT = [(name, plan) for name in jobs_communicating.RIGHT for plan in ("dp=2", "fsdp=2", "pp=2")]


@pytest.mark.parametrize("name, plan", sampled(len(RIGHT), RIGHT))
def test_code_that_asks_for_ranks_takes_the_branch_of_one_device(name: str, plan: str) -> None:
    verdict = verify(jobs_communicating.RIGHT[name](), Plan.parse(plan), steps=3)
    assert verdict.equal, verdict.cause


@pytest.mark.parametrize("world", (1, pytest.param(2, marks=pytest.mark.slow)))
def test_code_that_communicates_is_named_before_the_first_update(world: int) -> None:
    """The error has its line and the fix, also on one device."""

    def run(place: Place) -> dict[str, str]:
        found = {}
        for name, job in jobs_communicating.REFUSED.items():
            try:
                engine = Engine(job(), f"dp={world}", place=place)
                next(engine.step(batch) for batch in engine.batches())
            except PlaitError as error:
                found[name] = str(error)
        return found

    for told in fork.run_ranks(run, world):
        assert set(told) == set(jobs_communicating.REFUSED)
        for name, text in told.items():
            assert "J044" in text and "plait sums gradients" in text, name
        assert "torch.distributed.all_reduce" in told["all_reduce"] and "in summed" in told["all_reduce"]


@pytest.mark.slow
def test_a_wrapped_model_is_named_where_ranks_could_wrap_it() -> None:
    """torch's own code sees the process group, and so would the wrapper."""

    def run(place: Place) -> str:
        with pytest.raises(PlaitError, match="J044") as error:
            Engine(jobs_communicating.make(lambda: nn.Sequential(_replicated())), "dp=2", place=place)
        return str(error.value)

    def _replicated() -> nn.Module:
        return nn.parallel.DistributedDataParallel(jobs_communicating.Net())

    assert all("DistributedDataParallel" in told for told in fork.run_ranks(run, 2))


def test_who_is_given_the_run_sees_its_ranks() -> None:
    def run(place: Place) -> list[int]:
        Engine(jobs_communicating.RIGHT["model"](), "dp=2", place=place)
        return [int(dist.is_initialized()), dist.get_world_size()]

    assert fork.run_ranks(run, 2) == [[1, 2], [1, 2]]


def test_looking_for_the_caller_keeps_no_tensor_alive() -> None:
    """A frame that refers to itself keeps its callers' tensors alive, including activations, until the garbage collector runs."""

    def called() -> weakref.ref[Tensor]:
        made = torch.ones(3)
        dist.is_initialized()
        return weakref.ref(made)

    def run(place: Place) -> bool:
        one_device.hide_process_group()
        gc.disable()
        return called()() is None

    assert fork.run_ranks(run, 1) == [True]
