"""Each plan preserves a job's settings on its parameters: hooks on gradients, attributes, subclasses."""

from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from rarely import rarely, sampled
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify


class Blocks(nn.Module):
    """Two blocks that tp can slice, between an embedding and a head."""

    def __init__(self, change: Callable[["Blocks"], object] = lambda model: None) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.count = 0
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    @property
    def wide(self) -> nn.Parameter:
        """A weight that tp slices."""
        return self.layers[0][1].weight


def rows(model: Blocks) -> None:
    mask = torch.zeros(16, 1)
    mask[5:] = 1
    model.wide.register_hook(lambda g: g * mask.to(g))
    model.embed.weight.register_hook(lambda g: g * mask[:8].to(g))


def clamps(model: Blocks) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-2e-3, 1e-3))


def unit_length(model: Blocks) -> None:
    model.wide.register_hook(lambda g: g / (g.norm() + 1e-3))
    model.layers[1][3].bias.register_hook(lambda g: g - g.mean())


def in_place(model: Blocks) -> None:
    def hook(g: Tensor) -> None:
        g[2:5] *= 0.1
        g.nan_to_num_()

    model.wide.register_hook(hook)


def looks_at_weight(model: Blocks) -> None:
    keep = model.layers[1][1]
    keep.weight.register_hook(lambda g: g * (model.layers[1][1].bias.abs() > 0.05).unsqueeze(1))
    model.head.weight.register_hook(lambda g: g * (model.head.weight.abs() > 0.1))


def adaptive(model: Blocks) -> None:
    """Brock et al. 2021: a gradient is clipped by the norm of its weight."""

    def clip(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_((1e-2 * p.norm() / (p.grad.norm() + 1e-9)).clamp(max=1.0))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)


def replaced(model: Blocks) -> None:
    def decay(p: Tensor) -> None:
        p.grad = p.grad.sign() * 1e-2 + 0.1 * p.detach()

    def drop(p: Tensor) -> None:
        p.grad = None

    model.wide.register_post_accumulate_grad_hook(decay)
    model.layers[0][0].weight.register_post_accumulate_grad_hook(drop)


def counts(model: Blocks) -> None:
    handles = list[Any]()

    def hook(g: Tensor) -> Tensor:
        model.count += 1
        if model.count == 2:
            handles[0].remove()
        return g * 0.1

    handles.append(model.wide.register_hook(hook))
    model.wide.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


def pruned(model: Blocks) -> None:
    prune.l1_unstructured(model.layers[0][1], "weight", 0.3)
    prune.random_unstructured(model.layers[1][3], "weight", 0.5)
    model.layers[0][1].weight_orig.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


def normed(model: Blocks) -> None:
    parametrizations.weight_norm(model.embed)
    original = model.embed.parametrizations.weight.original1
    original.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    original.mark = True


def first_rows_stay(p: Tensor) -> None:
    assert p.grad is not None
    p.grad[:4] = 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.body = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 17)
        self.head.weight = self.embed.weight
        self.embed.weight.register_hook(lambda g: g.clamp(-3e-3, 3e-3))
        self.embed.weight.register_post_accumulate_grad_hook(first_rows_stay)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.body(x))


def in_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    for p in parameters[:3]:
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return torch.optim.AdamW(parameters, lr=1e-2)


HOOKS = [
    (clamps, "dp=2 microbatches=2"),
    (rows, "fsdp=2"), (clamps, "fsdp=2 microbatches=2 zero_stage=2"), (clamps, "tp=2"), (adaptive, "fsdp=2 tp=2"),
    (adaptive, "pp=2 microbatches=2"),
    (unit_length, "tp=2"), (unit_length, "fsdp=2 offload=optimizer"), (in_place, "fsdp=2"), (looks_at_weight, "fsdp=2"),
    (replaced, "fsdp=2"), (replaced, "tp=2"), (counts, "fsdp=2 zero_stage=1"), (pruned, "fsdp=2"), (normed, "fsdp=2"),
    *rarely(
        (rows, "dp=2"), (rows, "tp=2"), (rows, "fsdp=2 tp=2"), (rows, "pp=2"), (clamps, "dp=2 fsdp=2"), (clamps, "pp=2 fsdp=2 microbatches=2"),
        (clamps, "microbatches=3"), (in_place, "dp=2"), (in_place, "tp=2"), (looks_at_weight, "dp=2"), (replaced, "dp=2"), (replaced, "pp=2"),
        (adaptive, "dp=2"), (adaptive, "tp=2"), (counts, "dp=2"), (counts, "tp=2"), (unit_length, "fsdp=3"), (pruned, "dp=2"), (pruned, "pp=2"),
        (normed, "dp=2"), (clamps, "offload=all"), (adaptive, "fsdp=2 offload=all"), (unit_length, "processes=one dp=2"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("change, plan", sampled(len(HOOKS), HOOKS))
def test_hooks_are_given_the_gradient_of_the_whole_batch(change: Callable[[Blocks], object], plan: str) -> None:
    _equal(jobs.make(lambda: Blocks(change), clip=0.5), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp=2", "pp=2", *rarely("dp=2", "tp=2")])
def test_hooks_of_tied_parameters_and_of_the_optimizer(plan: str) -> None:
    _equal(jobs.make(Tied, jobs.Tokens, jobs.language_loss, weight=lambda t: (t != -100).sum(), optimizer=in_optimizer), plan)


def _equal(job: Any, plan: str) -> None:
    verdict = verify(job, Plan.parse(plan))
    assert verdict.equal, (verdict.cause, verdict.first_wrong)


class Scaled(nn.Parameter):
    """A parameter with attributes for its layer's scale and for its training."""

    scale = 0.5


class Marked(Blocks):
    """Attributes that an optimizer and the forward pass read; some are set after the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Scaled(torch.ones(8, 1))
        self.gain.scale = 2.0
        self.layers[0][1].weight = Scaled(self.wide.detach().clone())
        self.wide.rate = {"lr": 3e-2}
        self.wide.rows = torch.linspace(0.5, 1.5, 16).unsqueeze(1)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * (self.gain.scale * self.gain.squeeze(1))
        assert isinstance(self.gain, Scaled)
        x = x + self.layers[0](x)
        return self.head(x + self.layers[1](x))


def by_marks(parameters: list[Any]) -> torch.optim.Optimizer:
    lots: dict[str, list[Any]] = {"none": [], "own": [], "scaled": [], "rest": []}
    for p in parameters:
        kind = "none" if hasattr(p, "_no_weight_decay") else "own" if hasattr(p, "rate") else "scaled" if isinstance(p, Scaled) else "rest"
        lots[kind].append(p)
    (own,) = lots["own"]
    return torch.optim.AdamW([
        {"params": lots["none"], "weight_decay": 0.0}, {"params": lots["rest"]},
        {"params": [own], **own.rate}, {"params": lots["scaled"], "lr": 1e-3 * lots["scaled"][0].scale},
    ], lr=1e-2, weight_decay=0.4)  # fmt: skip


class AtStep(torch.optim.SGD):
    """Reads attributes in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=getattr(p, "rate", {"lr": 1e-2})["lr"] * (0.1 if isinstance(p, Scaled) else 1.0))


def muon(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2 and not isinstance(p, Scaled)])


MARKS = [
    (by_marks, "fsdp=2"), (by_marks, "tp=2"), (by_marks, "pp=2"), (AtStep, "fsdp=2 tp=2"), (muon, "fsdp=2"),
    *rarely(
        (by_marks, "dp=2 microbatches=2"), (by_marks, "fsdp=2 offload=optimizer"), (by_marks, "offload=all"), (AtStep, "tp=2"),
        (by_marks, "pp=2 fsdp=2"), (by_marks, "processes=one dp=2"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("make, plan", sampled(len(MARKS), MARKS))
def test_attributes_and_classes_travel_with_parameters(make: Callable[[Any], torch.optim.Optimizer], plan: str) -> None:
    _equal(jobs.make(Marked, optimizer=make), plan)


def steps_by_itself(model: Blocks) -> None:
    own = {p: torch.optim.SGD([p], 1e-2) for p in model.layers.parameters()}

    def step(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)


def draws(model: Blocks) -> None:
    model.wide.register_hook(lambda g: g + 1e-3 * torch.randn_like(g))


@pytest.mark.parametrize("change, plan, words", [
    (steps_by_itself, "dp=2", "changes the weight itself"),
    pytest.param(steps_by_itself, "dp=1", "changes the weight itself", marks=pytest.mark.slow),
    pytest.param(draws, "fsdp=2", "draw random numbers", marks=pytest.mark.slow),
    pytest.param(clamps, "dp=2 grad_compression=int8", "does not work with grad_compression=int8", marks=pytest.mark.slow),
    pytest.param(clamps, "replica_groups=2 sync_every=2", "does not work with replica_groups=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(change: Callable[[Blocks], object], plan: str, words: str) -> None:
    with pytest.raises(PlaitError, match=words) as raised:
        verify(jobs.make(lambda: Blocks(change)), Plan.parse(plan))
    assert raised.value.codes == ["P093"]
