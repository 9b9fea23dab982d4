"""A job's own order and its token budget, under each kind of plan: exactly the steps of one device."""

import dataclasses

import jobs_ordered
import pytest
from rarely import every, sampled

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.data.sampling import Sampling
from plait.proof.verdict import Verdict
from plait.proof.verify import verify

PLANS = ("dp=2 microbatches=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "cp=2", "dp=3", "dp=2 pp=2")
CASES = [(order, text) for text in PLANS for order in jobs_ordered.ORDERS]


def proved(text: str, **settings: object) -> Verdict:
    return verify(jobs_ordered.job(**settings), Plan.parse(text))


@pytest.mark.parametrize("order, text", sampled(4, every(11, CASES)))
def test_an_order_and_a_budget_are_equal(order: str, text: str) -> None:
    try:
        verdict = proved(text, order=order)
        assert verdict.equal and not verdict.inexact, verdict.to_dict()
    except PlaitError as error:  # a local batch may have only sentences of three words
        assert text == "cp=2" and error.codes == ["P042"], error


@pytest.mark.parametrize(
    "order, padded", sampled(5, every(3, [(o, p) for o in jobs_ordered.ORDERS for p in (True, False)]))
)
def test_each_alone_is_equal(order: str, padded: bool) -> None:
    assert proved("dp=2", order=order, tokens=0).equal
    assert proved("dp=2", order="permutation", padded=padded).equal


@pytest.mark.slow
@pytest.mark.whole
def test_with_batches_of_its_own_size_and_messages() -> None:
    assert proved("dp=2 microbatches=2").equal


@pytest.mark.slow
def test_a_budget_that_one_side_counts_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sampling.step_size

    def wrong(self: Sampling, number: int, start: int) -> int:
        budget = self.budget and dataclasses.replace(self.budget, padded=False)
        return plain(dataclasses.replace(self, budget=budget), number, start)

    monkeypatch.setattr(Sampling, "step_size", wrong)
    verdict = proved("dp=2", order="permutation")
    assert not verdict.equal and verdict.code == "V006", verdict.to_dict()


def test_an_order_that_one_side_has_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sampling.epoch_indices
    monkeypatch.setattr(Sampling, "epoch_indices", lambda self, number: plain(self, number + 1))
    verdict = proved("dp=2", tokens=0)
    assert not verdict.equal and verdict.code == "V006", verdict.to_dict()
