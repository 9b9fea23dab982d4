"""Inputs of a model or a loss have the memory layout of a batch of their size: in trials, on ranks, between stages."""

import jobs_viewed
import pytest
import torch
from rarely import sampled

from plait.config.plan import Plan
from plait.parallel.context.sequences import shorten_inputs
from plait.proof.verify import verify
from plait.tensors.rows import memory_order
from plait.tensors.trees import ProbeSizes, capture_form, make_template

CASES = [
    ("loss_in_forward", "cp=2 cp_method=ulysses"), ("flat_words", "cp=2"), ("flat_words", "cp=2 cp_method=ulysses"),
    ("patches", "cp=2"), ("patches", "cp=2 cp_method=ulysses"), ("time_first", "dp=2"), ("time_first", "dp=2 microbatches=2"),
    ("transposed", "pp=2"), ("transposed", "pp=2 microbatches=2 stages_per_rank=2 schedule=interleaved"),
    ("channels_last", "pp=2 microbatches=2"), ("channels_last", "fsdp=2"), ("flat_words", "tp=2"),
]  # fmt: skip


@pytest.mark.parametrize("kind, plan", sampled(len(CASES), CASES))
def test_a_model_that_depends_on_it_is_split(kind: str, plan: str) -> None:
    verdict = verify(jobs_viewed.job(kind), Plan.parse(plan), steps=3)
    assert verdict.equal, verdict.cause


def test_a_shorter_batch_has_no_gaps_and_keeps_its_order() -> None:
    ids, pictures = torch.arange(36).view(3, 12), torch.randn(3, 4, 12, 8).contiguous(memory_format=torch.channels_last)
    less = shorten_inputs({"ids": ids, "pictures": (pictures, 7)}, [12], [11])
    assert less["ids"].is_contiguous() and torch.equal(less["ids"], ids[:, :11])
    assert less["pictures"][0].is_contiguous(memory_format=torch.channels_last) and less["pictures"][1] == 7


@pytest.mark.parametrize("order", ((0, 1, 2), (0, 2, 1), (2, 0, 1)))
def test_what_a_stage_receives_lies_as_what_was_sent(order: tuple[int, ...]) -> None:
    def made(samples: int) -> torch.Tensor:
        shape = [(samples, 4, 6)[d] for d in order]
        return torch.randn(shape).permute([order.index(d) for d in range(3)])

    (slot,) = make_template(capture_form(made(3)), capture_form(made(5)), ProbeSizes(3, 5)).slots
    received, sent = slot.allocate(7, torch.device("cpu")), made(7)
    assert received.shape == sent.shape and received.stride() == sent.stride() and slot.to_memory_order(sent).is_contiguous()
    assert memory_order(sent.narrow(1, 0, 3)) == (() if order == (0, 1, 2) else order)
