"""The work that `plait plan` does for a model of equal layers, counted so that a slow machine does not matter."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import plait
from plait.config.job import Job
from plait.config.library import pause_gc
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.model import trace
from plait.model.fake_model import sketch_fake_model
from plait.parallel.fsdp import optimizer_check
from plait.parallel.tensor.find import finder
from plait.parallel.tensor.find.dataflow_trace import DisableDropout
from plait.planner import estimate as pricing
from plait.planner import plan_request
from plait.planner.answer import find_answer
from plait.planner.estimate import estimate_plan
from plait.planner.goals import add_baseline
from plait.planner.plan_request import PlanRequest

LAYERS, WIDTH, WORDS = 8, 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, 4, w // 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(gelu(self.up(x)))


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(512, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 512))


def job() -> Job:
    return plait.Job(
        model=Words,
        loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        data=lambda: [(torch.zeros(WORDS, dtype=torch.long), torch.zeros(WORDS, dtype=torch.long))] * 64,
        optimizer=lambda params: torch.optim.AdamW(params),
        batch=32,
        steps=10,
    )


def rows(samples: int) -> Tensor:
    return torch.zeros(samples, WORDS, dtype=torch.long)


def run(model: nn.Module, inputs: Any) -> Any:
    return model(inputs)


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of a function's calls from now on."""
    calls, known = list[tuple[Any, ...]](), getattr(owner, name)

    def count(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return known(*given, **named)

    patch.setattr(owner, name, count)
    return calls


def test_a_run_on_fake_tensors_sees_operators_and_no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator passes one mode, once in each of two runs. Autograd's device queries pass none."""
    calls = counted(monkeypatch, trace._OperatorMode, "run")
    sketch_fake_model(job())
    seen = Counter(str(given[1]) for given in calls)
    assert seen["aten.gelu.default"] == 2 * LAYERS
    assert not any(name.startswith("prim.") for name in seen), seen
    assert sum(seen.values()) < 2 * (40 * LAYERS + 20), seen


def test_what_follows_a_model_asks_tensors_past_the_other_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a layer, the modes see its own functions, and the replacements of its four linear maps."""
    calls = counted(monkeypatch, DisableDropout, "__torch_function__")
    made = finder._SliceFinder(Words(), run, 2, {}, inputs=rows(5), given=(), most=1e9)
    seen = Counter(getattr(given[1], "__name__", "") for given in calls)
    assert len(made.trace.map_calls) == 4 * LAYERS + 1
    assert seen["gelu"] == LAYERS and sum(seen.values()) < 160 * LAYERS, seen


def test_of_equal_layers_of_a_large_model_one_is_searched_and_the_last_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "LARGE_MODEL", 1)
    searched, checked = counted(monkeypatch, finder, "adapt_group"), counted(monkeypatch, finder, "check_slices")
    found = finder.find_slices(Words(), rows, run, 2)
    assert len(found.groups) == 2 * LAYERS
    assert len(searched) == 2 and len(checked) <= 4


def test_what_does_not_depend_on_the_machine_is_found_out_once_for_all_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = PlanRequest.from_job(job(), "gpt.py", Machine.from_name("h100x8"))
    cuts, kinds = counted(monkeypatch, plan_request, "partition_stages"), counted(monkeypatch, optimizer_check, "inspect_optimizer")
    trials = counted(monkeypatch, optimizer_check, "try_optimizer")
    add_baseline(find_answer(asked, {}), {}, None)
    assert len(kinds) == 1 and len(trials) <= 4
    numbers = Counter(stages for _, stages, _ in cuts)
    assert numbers and max(numbers.values()) == 1, numbers


def test_ranks_that_hold_the_same_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks, the first, one with two layers and the last two have other blocks than the four others."""
    asked = PlanRequest.from_job(job(), "gpt.py", Machine.from_name("h100x8"))
    ranks = counted(monkeypatch, pricing, "_sum_rank_memory")
    assert estimate_plan(asked.pace, Plan.parse("pp=8 microbatches=8 schedule=zb"), 1.0).reserved > 0
    assert len(ranks) <= 5


def test_imports_are_left_out_of_collections() -> None:
    before = gc.get_freeze_count()
    try:
        with pause_gc():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
