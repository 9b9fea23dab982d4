"""Sharding, recomputation and offloading of different jobs equal one device in float64, or inexact ones are named.

Each job is tried under a few of the plans, so that each plan is tried with many kinds of jobs; `prove` tries more.
"""

import jobs
import jobs_real
import jobs_unlike
import pytest
from rarely import crossed, every, sampled
from torch import Tensor, nn

from plait.config.plan import Plan
from plait.parallel.fsdp import groups
from plait.proof.verify import verify

JOBS = {**jobs.ALL, **jobs_unlike.ALL, **jobs_real.ALL}
PLANS = (
    "fsdp=2",
    "fsdp=4 zero_stage=1 offload=all",
    "dp=2 fsdp=2 activation_checkpointing=full",
    "fsdp=2 microbatches=3 zero_stage=2 offload=optimizer",
    "fsdp=3 activation_checkpointing=selective",
    "dp=2 fsdp=2 microbatches=2 zero_stage=2 activation_checkpointing=selective",
    "fsdp=4 zero_stage=2 activation_checkpointing=full",
    "fsdp=2 microbatches=3 zero_stage=1 activation_checkpointing=selective",
    "fsdp=4 offload=optimizer activation_checkpointing=selective",
    "fsdp=2 microbatches=3 activation_checkpointing=full offload=all",
)
TELLING = (
    "frozen_first", "uneven", "scalars", "unused", "layer_drop", "tied_across", "in_place", "structures", "spectral", "teacher",
    "forces", "writes_input", "counted", "objects", "aside", "multihead",
)  # fmt: skip
"""Different jobs that always run: most of them once revealed a bug. `prove` runs the others."""
BY_MICRO_BATCH = ("batch_norm", "norm_inside", "digits", "odd", "spectral")
"""Jobs with batch statistics, or with buffers that count forward passes."""


def equal_or_named(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text))
    if name in BY_MICRO_BATCH and "microbatches" in text:
        assert verdict.inexact and verdict.code in ("", "V010")
        return
    if name == "counted" and "microbatches" in text:
        return  # it counts its own calls: a different number of them is a different model, and no buffer shows it
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause)
    assert not verdict.inexact


def spread(names: list[str], each: int) -> list[tuple[str, str]]:
    """`each` plans for each job; the k-th job starts with the k-th plan, and continues in steps of three."""
    return [(name, PLANS[(k + 3 * i) % len(PLANS)]) for k, name in enumerate(names) for i in range(each)]


@pytest.mark.parametrize("name, text", sampled(2, every(4, spread(list(jobs.ALL), 1))))
def test_jobs(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.parametrize("name, text", sampled(3, every(6, spread([n for n in jobs_unlike.ALL if n in TELLING], 1))))
def test_unlike_jobs(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.parametrize("name, text", sampled(2, every(2, spread(["gpt", "llama_tied", "digits", "unet_example"], 1))))
def test_real_models(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.parametrize("name", sampled(2, ("teacher", "in_place_on_output")))
def test_units_that_share_a_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_BYTES", 2500)  # two blocks in float64
    equal_or_named(name, "fsdp=2 microbatches=2 activation_checkpointing=selective")


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(4, JOBS, PLANS))
def test_every_job(name: str, text: str) -> None:
    equal_or_named(name, text)


LAYOUTS = (
    "fsdp=2", "fsdp=3", "fsdp=4 zero_stage=1", "fsdp=4 zero_stage=2", "fsdp=4 zero_stage=3", "dp=2 fsdp=2", "fsdp=2 microbatches=3 zero_stage=1",
    "fsdp=2 microbatches=3 zero_stage=2", "fsdp=2 microbatches=3 zero_stage=3", "dp=2 fsdp=2 microbatches=2 zero_stage=2",
)  # fmt: skip
SAVING = tuple(f"activation_checkpointing={r} offload={o}" for r in ("none", "full", "selective") for o in ("none", "optimizer", "all"))


@pytest.mark.prove
@pytest.mark.parametrize("name", ("mlp", "ragged", "branches", "gpt", "unet_example", "llama_tied"))
@pytest.mark.parametrize("layout, saving", crossed(9, LAYOUTS, SAVING))
def test_layouts_with_less_memory(name: str, layout: str, saving: str) -> None:
    equal_or_named(name, f"{layout} {saving}")


class OneOrTwo(nn.Module):
    """Code that checks whether two arguments are the same tensor, as torch's own attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.one, self.two, self.out = nn.Linear(6, 8), Asks(), Asks(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        return self.out(self.one(h, h, more=h) + self.two(h, h + 0.5, more=None))


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, key: Tensor, value: Tensor, more: Tensor | None) -> Tensor:
        return self.map(key) * (2.0 if key is value else 0.5) + value + (1.0 if more is key else 0.0)


@pytest.mark.parametrize("plan", sampled(3, ("fsdp=2", "fsdp=2 zero_stage=1 activation_checkpointing=full", "dp=2 fsdp=2 microbatches=2")))
def test_one_tensor_given_twice_stays_one(plan: str) -> None:
    verdict = verify(jobs.make(OneOrTwo, units=("inside", "one", "two", "out")), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()
