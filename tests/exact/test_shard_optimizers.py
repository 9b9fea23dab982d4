"""Which optimizers can update sharded tensors exactly. Those that need full tensors are exact too: an owner rank updates these.
Optimizers that combine several tensors are rejected by name.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import jobs_real
import pytest
import torch
from rarely import every, sampled
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.parallel.fsdp import optimizer_check
from plait.parallel.fsdp.optimizer_check import ELEMENTWISE_OPTIMIZERS, ONE_RANK, find_mismatch
from plait.planner.dryrun.dry_run import dry_run
from plait.proof.verify import verify

PARTS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam_foreach_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "nesterov": lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_fused": lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, dampening=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, 1e-1, lr_decay=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, decoupled_weight_decay=True, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


class Lamb(torch.optim.Optimizer):
    """You et al. 2020: Adam's direction, scaled by the norm of the tensor over the norm of its update."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(p.grad, 0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        return state["m"] / (state["v"].sqrt() + 1e-6)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self.direction(p)
                    trust = p.norm() / update.norm() if p.dim() > 1 else 1.0
                    p.sub_(group["lr"] * trust * update)


class Lars(Lamb):
    """You et al. 2017: the gradient itself, scaled likewise."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad


WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2),
    "Lamb": Lamb,
    "Lars": Lars,
}


@pytest.mark.parametrize("name", sampled(4, PARTS))
def test_element_wise_optimizers_are_exact(name: str) -> None:
    plan = "dp=2 fsdp=2 offload=optimizer" if "foreach" in name else "fsdp=3 zero_stage=2"
    verdict = verify(jobs.make(lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)), optimizer=PARTS[name]),
                     Plan.parse(plan))  # fmt: skip
    assert verdict.equal, verdict.cause


class Clipped(torch.optim.Optimizer):
    """Clips by the norm of all gradients itself."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([p.grad.flatten() for p in mine]).norm()
        for p in mine:
            p.sub_(p.grad / norm.clamp_min(1e-6), alpha=0.01)


class Rarely(Clipped):
    """Clips if the norm exceeds a limit, or from some step on."""

    def __init__(self, params: Any, least: float = 0.0, most: float = float("inf"), after: int = 0):
        super().__init__(params)
        self.least, self.most, self.after, self.steps = least, most, after, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([p.grad.flatten() for p in mine]).norm()
        acts = self.least < norm < self.most and self.steps > self.after
        for p in mine:
            p.sub_(p.grad / norm if acts else p.grad, alpha=0.01)


class Rowwise(torch.optim.Optimizer):
    """Scales each row by its own norm: a rank may have some of the rows, but not a part of each."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            norm = p.grad.norm(dim=-1, keepdim=True) if p.dim() > 1 else torch.ones(())
            p.sub_(p.grad / norm.clamp_min(1e-6), alpha=0.01)


def matrices(params: Any) -> torch.optim.Optimizer:
    """Lamb for weights selected by their size, which a small stand-in does not have."""
    return Lamb([p for p in params if p.dim() == 2 and p.shape[0] > 200])


OWNED = [(name, plan) for name in WHOLE for plan in ("fsdp=2", "tp=2")]
PAIRS = [
    ("Muon", "dp=2 fsdp=2"), ("Muon", "fsdp=2 tp=2"), ("Adafactor", "fsdp=2 tp=2"), ("Adafactor", "pp=2 fsdp=2 microbatches=2"),
    ("Muon", "fsdp=2 cp=2"), ("Lamb", "fsdp=3 zero_stage=1 microbatches=2"), ("Adafactor", "fsdp=3 zero_stage=2"),
    ("Muon", "pp=2 tp=2 microbatches=2"), ("Muon", "fsdp=2 precision=bf16"), ("Adafactor", "tp=2 cp=2"),
]  # fmt: skip
REFUSED = [
    ("Lamb", Lamb, "fsdp=2 offload=optimizer"),
    ("Clipped", Clipped, "pp=2 microbatches=2"),
    ("Clipped", Clipped, "tp=2"),
    ("Rarely", lambda p: Rarely(p, least=1e4), "fsdp=2"),
    ("Rarely", lambda p: Rarely(p, least=1e4), "tp=2"),
    ("Rarely", lambda p: Rarely(p, most=1e-2), "fsdp=2"),
    ("Rarely", lambda p: Rarely(p, after=9), "pp=2 microbatches=2"),
]
KEPT = [
    ("Lamb", Lamb, "dp=2"),
    ("Lars", Lars, "pp=2 microbatches=2"),
    ("Adafactor", WHOLE["Adafactor"], "pp=2 microbatches=2"),
    ("Clipped", Clipped, "dp=2"),
    ("Rarely", lambda p: Rarely(p, least=1e4), "dp=2"),
    ("Rowwise", Rowwise, "fsdp=2"),
    ("Rowwise", Rowwise, "tp=2"),
    ("adamw", PARTS["adamw"], "tp=2"),
]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def gpt(name: str) -> Any:
    """With Muon for matrices only, as in its paper, and AdamW for the others: two optimizers in one."""
    return dataclasses.replace(jobs_real.gpt(), optimizer=WHOLE[name] if name != "Muon" else both)


def both(params: Any) -> torch.optim.Optimizer:
    """Muon's step for matrices, Adam's for the rest."""
    return Mixed(params)


class Mixed(torch.optim.Optimizer):
    """Newton-Schulz on the momentum of matrices; the sign of the momentum for all others."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                x = m / m.norm().clamp_min(1e-7)
                for _ in range(3 if p.dim() == 2 else 0):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.sub_(x, alpha=group["lr"])


@pytest.mark.parametrize("name, plan", sampled(3, OWNED))
def test_optimizers_of_whole_tensors_are_exact(name: str, plan: str) -> None:
    """An owner rank updates each full tensor."""
    verdict = verify(jobs.make(mlp, optimizer=WHOLE[name]), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict.cause


@pytest.mark.parametrize("name, plan", sampled(3, every(4, PAIRS)))
def test_of_a_language_model_beside_other_axes(name: str, plan: str) -> None:
    verdict = verify(gpt(name), Plan.parse(plan), steps=3)
    assert verdict.equal, verdict.cause


@pytest.mark.parametrize("name", sampled(2, ("Adafactor", "Lamb")))
def test_their_checkpoints_go_from_plan_to_plan(name: str, tmp_path: Path) -> None:
    """Saved by owner ranks under `fsdp`, resumed under `tp`, and without sharding: the losses continue as on one device."""
    job = jobs.make(mlp, optimizer=WHOLE[name])
    plans = ("fsdp=2", "tp=2", "dp=1", "fsdp=3")
    found: list[float] = []
    for number, plan in enumerate(plans):

        def run(place: Any, plan: str = plan, number: int = number) -> list[float]:
            engine = Engine(job, plan, place=place, directory=tmp_path, cast=torch.float64)
            if number:
                engine.resume()
            losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2))]
            engine.save()
            return losses

        found += fork.run_ranks(run, Plan.parse(plan).world)[0]

    def one(place: Any) -> list[float]:
        engine = Engine(job, "dp=1", place=place, cast=torch.float64, directory=tmp_path / "one")
        return [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2 * len(plans)))]

    assert found == pytest.approx(fork.run_ranks(one, 1)[0], rel=1e-9)


@pytest.mark.parametrize("name, made, plan", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_optimizers_of_several_tensors_are_refused(name: str, made: Any, plan: str) -> None:
    """They are found by trials, on shards and on full tensors without the others."""
    with pytest.raises(PlaitError, match="P022") as error:
        _build(jobs.make(mlp, optimizer=made), plan)
    assert name in str(error.value) and plan.split()[0] in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("name, made, plan", sampled(3, KEPT), ids=lambda v: v if isinstance(v, str) else "")
def test_what_a_plan_does_not_cut_is_not_refused(name: str, made: Any, plan: str) -> None:
    verdict = verify(jobs.make(mlp, optimizer=made), Plan.parse(plan))
    assert verdict.equal, verdict.cause


def test_an_optimizer_that_chooses_by_size_is_tried_on_the_sizes_there_are() -> None:
    shapes = {"weight": (300, 6), "bias": (300,)}
    job = jobs.make(mlp, optimizer=matrices)
    found = find_mismatch(job, shapes, {"weight": 0, "bias": 0})
    assert found is not None and found.optimizer == "Lamb"
    assert find_mismatch(job, shapes, {"bias": 0}) is None


def test_verify_and_a_dry_run_refuse_as_training_does() -> None:
    job = jobs.make(mlp, optimizer=Clipped)
    with pytest.raises(PlaitError, match="P022"):
        verify(job, Plan.parse("tp=2"))
    with pytest.raises(PlaitError, match="P022"):
        dry_run(job, Plan.parse("tp=2"))


def _build(job: Any, plan: str) -> list[dict[str, bool]]:
    def run(place: Any) -> dict[str, bool]:
        Engine(job, plan, place=place)
        return {}

    made: Callable[[Any], dict[str, bool]] = run
    return fork.run_ranks(made, 2)


class Blocks(torch.Tensor):
    """Stands for 8-bit values and their scales, as an optimizer of torchao stores them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class EightBit(torch.optim.Optimizer):
    """Keeps its momentum as `Blocks`."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["exp_avg"] = torch.zeros_like(p).as_subclass(Blocks)


def test_state_of_another_make_is_refused_in_the_first_step() -> None:
    engine = Engine(jobs.make(mlp, optimizer=EightBit), "dp=1", device="cpu")
    with pytest.raises(PlaitError, match="K005") as error:
        engine.step(next(engine.batches()))
    assert "EightBit keeps exp_avg as Blocks" in str(error.value)


SHAPES = {"weight": (7, 6), "bias": (7,), "scale": ()}
HALVES = {"weight": 0, "bias": 0, "scale": 0}


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE_OPTIMIZERS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lots", (HALVES, dict.fromkeys(HALVES, ONE_RANK)), ids=("halves", "alone"))
def test_optimizers_that_need_no_trial_pass_it(kind: Any, lots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.make(mlp, optimizer=lambda p: kind([{"params": p[1:], "lr": 1e-3}, {"params": p[:1]}], lr=1e-2))
    assert optimizer_check._is_elementwise(lambda p: job.optimizer(p), [*SHAPES.values()], [*lots.values()])
    monkeypatch.setattr(optimizer_check, "ELEMENTWISE_OPTIMIZERS", frozenset())
    assert find_mismatch(job, SHAPES, lots) is None


def clip(optimizer: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-2)


def hooked(p: Any) -> Any:
    made = torch.optim.SGD(p, 1e-2)
    made.register_step_pre_hook(clip)
    return made


def wrapped(p: Any) -> Any:
    made = torch.optim.AdamW(p, 1e-2)
    own = made.step
    made.step = lambda closure=None: (clip(made), own())
    return made


def by_size(p: Any) -> Any:
    return torch.optim.Adam([{"params": q, "lr": 1e-2 / max(1, q.numel())} for q in p])


def tensor_by_size(p: Any) -> Any:
    return torch.optim.SGD([{"params": q, "lr": torch.tensor(1e-2 / max(1, q.numel()))} for q in p], foreach=False)


def preset(p: Any) -> Any:
    made = torch.optim.SGD(p, 1e-2, momentum=0.9)
    for q in p:
        made.state[q]["momentum_buffer"] = torch.full_like(q, float(q.numel()))
    return made


def in_one(p: Any) -> Any:
    return plait.CombinedOptimizer(torch.optim.SGD(p[:1], 1e-2), hooked(p[1:]))


def above_all(p: Any) -> Any:
    made = plait.CombinedOptimizer(torch.optim.SGD(p[:1], 1e-2), torch.optim.Adam(p[1:], 1e-2))
    made.register_step_pre_hook(clip)
    return made


@pytest.mark.parametrize("made", (hooked, wrapped, by_size, tensor_by_size, preset, in_one, above_all))
def test_what_is_added_to_an_optimizer_of_torch_is_tried(made: Callable[..., Any]) -> None:
    assert find_mismatch(jobs.make(mlp, optimizer=made), SHAPES, HALVES) is not None


def test_hooks_of_all_optimizers_are_tried() -> None:
    handle = optimizer_check.register_optimizer_step_pre_hook(clip)
    try:
        assert find_mismatch(jobs.make(mlp, optimizer=torch.optim.SGD), SHAPES, HALVES) is not None
    finally:
        handle.remove()
    assert find_mismatch(jobs.make(mlp, optimizer=torch.optim.SGD), SHAPES, HALVES) is None


def test_a_class_of_torch_whose_step_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.optim.RMSprop.step

    @functools.wraps(own)
    def step(self: Any, closure: Any = None) -> None:
        clip(self)
        own(self)

    monkeypatch.setattr(torch.optim.RMSprop, "step", step)
    assert find_mismatch(jobs.make(mlp, optimizer=torch.optim.RMSprop), SHAPES, HALVES) is not None


def normalizing(before: bool, everywhere: bool) -> Callable[[Any], Any]:
    """Adam with a hook, its own or a global one, that reads full tensors: gradients before a step, or weights after it."""

    def gradients(optimizer: Any, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.div_(p.grad.norm() + 1e-3)

    def weights(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.div_(p.norm().clamp_min(1.0))

    def make(parameters: Any) -> Any:
        made = torch.optim.Adam(parameters, 1e-2)
        if everywhere:  # each process makes its own
            register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
            if not any(hook.__name__ in ("gradients", "weights") for hook in hooks_of_all(before)):
                register(gradients if before else weights)
        elif before:
            made.register_step_pre_hook(gradients)
        else:
            made.register_step_post_hook(weights)
        return made

    return make


def hooks_of_all(before: bool) -> list[Any]:
    """Return the global hooks. torch has no list of them, but a handle refers to the table."""
    handle = (register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook)(lambda *_: None)
    found = list(handle.hooks_dict_ref().values())
    handle.remove()
    return found


@pytest.mark.parametrize("plan, before, everywhere", sampled(4, (
    ("fsdp=2", True, False), ("fsdp=2", False, True), ("tp=2", True, True), ("offload=optimizer", True, False), ("offload=optimizer", False, True),
    ("offload=all", True, False), ("fsdp=2 zero_stage=1", True, False), ("fsdp=2 tp=2", True, False),
    ("fsdp=2 offload=optimizer", True, False),
)))  # fmt: skip
def test_a_hook_sees_the_gradients_of_the_step_and_what_it_writes_is_used(plan: str, before: bool, everywhere: bool) -> None:
    """It once ran before gradients were gathered, or copied to the host, so it had no effect; or after weights had been scattered."""
    made = jobs.make(mlp, optimizer=normalizing(before, everywhere))
    try:
        verdict = verify(made, Plan.parse(plan))
        assert verdict.equal and not verdict.inexact, verdict
    except PlaitError as error:  # full tensors are available only if ranks can exchange shards
        assert error.codes == ["P022"] and "offload" in plan, error
