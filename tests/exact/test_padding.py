"""Dynamic padding: a local batch is padded like the full batch, so each plan trains like one device."""

import dataclasses

import jobs_padded
import pytest
from jobs_padded import Pairs, Sentences, Streamed, each, tagger
from rarely import sampled

import plait
from plait.config.plan import Plan
from plait.data.padding import BatchPadder
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify

PLANS = (
    "dp=2",
    "dp=2 microbatches=2",
    "fsdp=2",
    "tp=2",
    "pp=2 microbatches=2",
    "cp=2",
    "dp=3 microbatches=2",
    "dp=2 tp=2",
)
LIGHT = ("dp=2 microbatches=2", "cp=2")
JOBS = {
    "right": lambda: tagger(),
    "left": lambda: tagger(lambda: Sentences(side="left")),
    "eights": lambda: tagger(lambda: Sentences(multiple=8)),
    "pairs": lambda: dataclasses.replace(tagger(Pairs), weight=None, loss=_square),
    "stream": lambda: tagger(Streamed),
    "pooled": jobs_padded.pooled,
}


def _square(out, labels):
    return (out.square().mean((1, 2)) * (labels + 101).float().mean(1)).mean()


def skipped(name: str, text: str) -> bool:
    """Whether the job is excluded: its pool has no layer that tp can slice, and no blocks."""
    return name == "pooled" and ("cp" in text or "pp" in text or "tp" in text)


SHORT = [("right", "cp=2"), *((n, LIGHT[0]) for n in ("right", "pairs", "stream"))]


@pytest.mark.parametrize(
    "name, text",
    sampled(
        3,
        [
            pytest.param(n, t, marks=() if (n, t) in SHORT else pytest.mark.prove)
            for n in JOBS
            for t in PLANS
            if not skipped(n, t)
        ],
    ),
)
def test_padded_jobs_are_equal(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()


def evaluated(plan: str, data: type) -> list[dict[str, float]]:
    job = dataclasses.replace(tagger(masked=False), evaluate=plait.Evaluate(data, each))

    def run(place: Place) -> dict[str, float]:
        return Engine(job, plan, place=place, cast=None).evaluate()

    return fork.run_ranks(run, Plan.parse(plan).world)


@pytest.mark.parametrize("data", (Sentences, Streamed))
def test_evaluation_pads_as_one_device_does(data: type) -> None:
    """Attention sees the padding, so the padded length of a sample changes its metric."""
    (expected,) = evaluated("dp=1", data)
    for means in evaluated("dp=2 microbatches=2", data):
        assert means == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_each_part_padded_by_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic padding per local batch, without plait's rule."""
    monkeypatch.setattr(BatchPadder, "pad_batch", lambda self, batch, fetch: batch)
    assert verify(tagger(), Plan.parse("dp=2")).code == "V005"
    assert not verify(jobs_padded.pooled(), Plan.parse("dp=2")).equal
