"""Factors other than predicted time that decide between plans: per factor, one case in which it decides, and one in which it is too small."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner import search as searching
from plait.planner.answer import explain_choice
from plait.planner.estimate import Estimate
from plait.planner.formulas import TimeModel
from plait.planner.search import PREFERENCES, Candidate, SearchResult, find_best_plans
from plait.planner.search_space import SearchSpace
from plait.planner.workload import Block, Workload

VALUES = {"precision": ("bf16",), "offload": ("none", "optimizer", "all"), "compile": (False, True)}
SPACE = SearchSpace(16, 16, {}, 100.0, 100.0, VALUES, most_stages=4, can_slice=True, can_shard_sequence=True, experts=(16,), margin=5.0)
MACHINE = Machine.from_name("h100x8x2")
Priced = Callable[[Plan], tuple[float, float]]
"""Seconds and bytes of a plan."""


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SearchResult]:
    """A search for a very small model, so that only `priced` determines a plan's costs and no bound hides it."""

    def found(priced: Priced, without: str = "", **pins: Any) -> SearchResult:
        def price(pace: TimeModel, plan: Plan, *_: object) -> Estimate:
            seconds, size = priced(plan)
            return Estimate(plan, seconds, {"compute": seconds}, {"activations": size}, size)

        monkeypatch.setattr(searching, "price_plan", price)
        monkeypatch.setattr(searching, "PREFERENCES", replace(PREFERENCES, **{without: 1.0}) if without else PREFERENCES)
        pace = TimeModel(Workload("tiny", (Block("layer", 4, weights=1e-6, kept=1e-6, inputs=1e-6),)), MACHINE)
        return find_best_plans(pace, replace(SPACE, pins=pins), lambda plan: "")

    return found


def seconds(fast: Callable[[Plan], bool], slower: float) -> Priced:
    """One second for the fast plans, more for all others. Without full offload, only a plan with full recomputation fits."""
    fits = lambda plan: plan.offload == "all" or plan.activation_checkpointing == "full"  # noqa: E731
    return lambda plan: (1.0 if fast(plan) else slower, 50.0 if fits(plan) else 120.0)


CASES: dict[str, tuple[Callable[[Plan], bool], float, dict[str, Any]]] = {
    "offload": (lambda plan: plan.offload == "all" and plan.activation_checkpointing == "none", 1.15, {"fsdp": 16, "ep": 1}),
    "tp": (lambda plan: plan.tp == 16, 1.1, {"pp": 1, "cp": 1, "offload": "none"}),
    "ep": (lambda plan: plan.ep == 16, 1.1, {"fsdp": 16, "offload": "none"}),
    "cp": (lambda plan: plan.cp == 16 and plan.cp_method == "ulysses", 1.1, {"cp": 16, "offload": "none"}),
    "axis": (lambda plan: plan.fsdp == 8 and plan.cp == 2, 1.03, {"tp": 1, "ep": 1, "offload": "none"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_a_drawback_is_chosen_only_if_it_gains_more_than_its_factor(name: str, choose: Callable[..., SearchResult]) -> None:
    fast, factor, pins = CASES[name]
    others = 1.012**3  # possible factors of other keys
    assert not fast(choose(seconds(fast, factor / 1.02), **pins).best[0].plan)
    assert fast(choose(seconds(fast, factor * others * 1.03), **pins).best[0].plan)
    without = {"offload": "offload", "axis": "axis"}.get(name, "nodes")
    assert fast(choose(seconds(fast, factor / 1.005 if name == "axis" else factor / 1.02), without, **pins).best[0].plan)


def test_a_recomputation_is_simpler_than_an_axis(choose: Callable[..., SearchResult]) -> None:
    def priced(plan: Plan) -> tuple[float, float]:
        if plan.fsdp == 8 and plan.cp == 2:
            return 1.0, 50.0
        kept = plan.activation_checkpointing
        return (1.014 if plan.fsdp == 16 and kept == "selective" else 1.5), 50.0 if kept != "none" else 120.0

    best = choose(priced, tp=1, pp=1, ep=1, zero_stage=3, microbatches=1).best[0].plan
    assert str(best) == "fsdp=16 activation_checkpointing=selective precision=bf16"


def test_memory_is_left_unless_nothing_else_fits(choose: Callable[..., SearchResult]) -> None:
    """With less than 5 of 100 bytes free a plan is tight, and a plan that takes three times as long is preferred."""
    sizes = {"none": 97.0, "selective": 96.0, "full": 80.0}
    times = {"none": 1.0, "selective": 1.1, "full": 3.0}
    priced = lambda plan: (times[plan.activation_checkpointing], sizes[plan.activation_checkpointing])  # noqa: E731
    best = choose(priced).best[0]
    assert best.plan.activation_checkpointing == "full" and best.warnings == []
    assert choose(priced, without="tight").best[0].plan.activation_checkpointing == "none"
    sizes["full"] = 99.0
    tight = choose(priced).best[0]
    assert tight.plan.activation_checkpointing == "none" and tight.warnings == ["tight"]


def test_offload_is_taken_if_nothing_else_fits(choose: Callable[..., SearchResult]) -> None:
    best = choose(lambda plan: (2.0, 50.0) if plan.offload == "all" else (1.0, 101.0)).best[0]
    assert best.plan.offload == "all" and best.warnings == ["offload"]


def test_compiled_units_are_tried_without_cp(choose: Callable[..., SearchResult]) -> None:
    best = choose(seconds(lambda plan: plan.compile, 1.1)).best[0]
    assert best.plan.compile and best.plan.cp == 1
    assert not choose(seconds(lambda plan: plan.compile, 1.1), cp=2).best[0].plan.compile
    assert not choose(seconds(lambda plan: plan.compile, 1.1), compile=False).best[0].plan.compile


def test_a_row_says_what_keeps_a_faster_plan_from_being_chosen() -> None:
    def candidate(words: str, took: float, tight: bool = False) -> Candidate:
        plan = Plan.parse(words)
        factors = searching.compute_factors(plan, 8) | ({"tight": 10.0} if tight else {})
        return Candidate(plan, Estimate(plan, took, {"compute": took}), 1.0, factors=factors)

    best = candidate("fsdp=16", 1.0)
    assert explain_choice(candidate("tp=16", 0.95), best) == "5 % faster, but tp between nodes"
    assert explain_choice(candidate("fsdp=16 offload=all", 0.9, tight=True), best) == "10 % faster, but offload and tight"
    assert explain_choice(candidate("fsdp=8 cp=2", 0.99), best) == "same speed, but more complex"
    assert explain_choice(candidate("pp=16", 1.2), best) == "20 % slower: smaller matmuls"
