"""Texts generated during training equal those of one device, text by text and token by token, under each plan."""

import dataclasses
from typing import Any

import jobs_moe
import jobs_real
import numpy as np
import pytest
import torch
from rarely import rarely, sampled

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.engine.generate import TokenSampling, choose_token
from plait.launch import fork
from plait.launch.place import Place

PROMPTS = [[3], [1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9], [3, 2, 3]]
"""Prompts of different lengths. There are more than samples in some plans' forward passes, and not a multiple of the ranks."""
WAYS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 6},
    {"max_new_tokens": 6, "temperature": 0.8, "seed": 7},
    {"max_new_tokens": 6, "temperature": 1.5, "top_k": 4, "stop": 11},
)
PLANS = ("dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2 microbatches=3", "dp=3", "fsdp=2 tp=2", "pp=2 dp=2", "cp=2", "fsdp=2 zero_stage=1",
         "pp=2 schedule=zbv stages_per_rank=2 microbatches=2", "batch_split=3:1 dp=2", "processes=one dp=2", "tp=2 microbatches=12")  # fmt: skip
QUICK = [
    ("gpt2", "dp=2 microbatches=3"),
    ("gpt2", "fsdp=2"),
    ("gpt2", "tp=2"),
    ("gpt2", "pp=2"),
    ("llama", "dp=3"),
    ("gpt", "cp=2"),
]


class Rows:
    """Tokens as a tensor."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.arange(9) * (i + 3) % 31
        return row[:-1], row[1:]


def gpt() -> plait.Job:
    """Inputs and outputs are tensors; positions are a table."""
    job = jobs_real.example("stdlib_gpt", depth=2, width=16, heads=2, length=16, dropout=0.1, batch=12)
    return dataclasses.replace(job, data=Rows)


JOBS = {"gpt2": jobs_real.gpt2, "llama": jobs_real.llama, "gpt": gpt}


def texts_of(job: plait.Job, plan: str, ways: tuple[dict[str, Any], ...] = WAYS) -> list[Any]:
    """For each rank: the texts before the first step and after two, and the loss of a third."""

    def run(place: Place) -> dict[str, Any]:
        with torch.random.fork_rng():
            engine = Engine(job, plan, place=place, cast=torch.float64)
            source, found = engine.batches(), list[Any]()
            for _ in range(2):
                found += [engine.generate(PROMPTS, **way) for way in ways]
                engine.step(next(source))
            return {"texts": [*found, engine.generate(PROMPTS, **ways[0])], "loss": engine.step(next(source)).loss}

    return fork.run_ranks(run, Plan.parse(plan).world)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: texts_of(make(), "dp=1")[0] for name, make in JOBS.items()}


@pytest.mark.parametrize(
    ("name", "plan"), sampled(6, [*QUICK, *rarely(*((n, p) for n in JOBS for p in PLANS if (n, p) not in QUICK))])
)
def test_every_plan_writes_the_same(name: str, plan: str, alone: dict[str, dict[str, Any]]) -> None:
    for rank in texts_of(JOBS[name](), plan):
        assert rank["texts"] == alone[name]["texts"]
        assert rank["loss"] == pytest.approx(alone[name]["loss"], rel=1e-10)


@pytest.mark.slow
def test_experts_on_other_ranks() -> None:
    """A rank whose texts are complete continues to run, because other ranks need its experts."""
    job, ways = jobs_moe.mixtral(), ({"max_new_tokens": 4, "stop": 5}, {"max_new_tokens": 3, "temperature": 1.0})
    (one,) = texts_of(job, "dp=1", ways)
    assert all(rank["texts"] == one["texts"] for rank in texts_of(job, "fsdp=2 ep=2", ways))


@pytest.mark.parametrize("name", JOBS)
def test_a_text_is_as_if_it_were_alone(name: str) -> None:
    """By hand: each prompt alone, without padding, the most likely token each time."""
    engine = Engine(JOBS[name](), "dp=1", place=Place(), cast=torch.float64)
    written = engine.generate(PROMPTS, max_new_tokens=5)
    engine.model.eval()
    for prompt, new in zip(PROMPTS, written):
        text = list(prompt)
        for _ in range(5):
            with torch.no_grad():
                outputs = engine.model(torch.tensor([text]))
            text.append(int(getattr(outputs, "logits", outputs)[0, -1].argmax()))
        assert new == text[len(prompt) :]


def test_generating_changes_nothing_of_the_training(alone: dict[str, dict[str, Any]]) -> None:
    engine = Engine(jobs_real.gpt2(), "dp=1", place=Place(), cast=torch.float64)
    source = engine.batches()
    assert [engine.step(next(source)).loss for _ in range(3)][-1] == alone["gpt2"]["loss"]
    assert engine.model.training


def test_a_text_ends_with_its_stop_token() -> None:
    engine = Engine(jobs_real.gpt2(), "dp=1", place=Place(), cast=torch.float64)
    free = engine.generate(PROMPTS, max_new_tokens=8, temperature=2.0, seed=3)
    stop = free[1][3]
    for one, cut in zip(free, engine.generate(PROMPTS, max_new_tokens=8, temperature=2.0, seed=3, stop=stop)):
        assert cut == (one[: one.index(stop) + 1] if stop in one else one)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.05, 0.25]))
    draw = lambda **how: np.bincount(  # noqa: E731
        [choose_token(logits, TokenSampling(1, **how), i, 5) for i in range(4000)], minlength=4
    )
    assert draw(temperature=1.0) / 4000 == pytest.approx([0.5, 0.2, 0.05, 0.25], abs=0.03)
    assert draw(temperature=0.5) / 4000 == pytest.approx(np.array([0.25, 0.04, 0.0025, 0.0625]) / 0.355, abs=0.03)
    assert draw(temperature=1.0, top_k=2) / 4000 == pytest.approx([2 / 3, 0, 0, 1 / 3], abs=0.03)
    assert list(draw()) == [4000, 0, 0, 0] and list(draw(temperature=9.0, top_k=1)) == [4000, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": []}, "the list of prompts is empty"),
        ({"prompts": [[1], []]}, "prompt 1 has no tokens"),
        ({"prompts": ["a b"]}, "not a list of token ids"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompts": [[1]], "temperature": -1.0}, "temperature is -1.0"),
        ({"prompts": [[1]], "top_k": 0}, "top_k is 0"),
        ({"prompts": [[1]], "length": 3}, "length=3 is too short"),
        ({"prompts": [[1]], "inputs": lambda tokens: tokens[:1].expand(3, -1)}, "not logits of the next token"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlaitError) as caught:
        Engine(gpt(), "dp=1", place=Place()).generate(**given)
    assert caught.value.codes == ["U019"] and said in str(caught.value)


def test_ranks_must_continue_the_same() -> None:
    def run(place: Place) -> dict[str, Any]:
        with torch.random.fork_rng():
            Engine(gpt(), "dp=2", place=place).generate([[place.rank]], max_new_tokens=2)
        return {}

    with pytest.raises(PlaitError) as caught:
        fork.run_ranks(run, 2)
    assert caught.value.codes == ["U019"]


def test_inputs_of_another_kind_ask_for_a_way() -> None:
    with pytest.raises(PlaitError) as caught:
        Engine(jobs_real.digits(), "dp=1", place=Place()).generate([[1]])
    assert caught.value.codes == ["U019"] and "inputs=lambda tokens" in str(caught.value)
