"""Code that changes gradients: hooks, custom functions, noise, frozen parts, derivatives in the forward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from trackers.samples import Chain, Texts, first, made, next_token, sgd


def _scaled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else 0.3 * g for g in inputs)


class _Hooked(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(_scaled)
        self.first.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))


def backward_hooks() -> plait.Job:
    """Full backward hooks behave differently in a wrapper: one hook scales the gradient that a block returns."""
    return made(_Hooked)


class _StepSize(torch.autograd.Function):
    """A learned step size of a weight's quantization: its gradient is scaled by the number of the weight's elements."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(w, step)
        return (w / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        w, step = ctx.saved_tensors
        ratio = w / step
        inside = (ratio > -8) & (ratio < 7)
        slope = torch.where(inside, ratio.round() - ratio, ratio.clamp(-8, 7))
        return g * inside, (g * slope).sum() / (w.numel() * 7) ** 0.5


class _Quantized(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.step = nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _StepSize.apply(self.weight, self.step), self.bias)


def learned_step_size() -> plait.Job:
    """Quantization-aware training: the gradient of a learned step size depends on the element count of the full weight."""
    return made(lambda: nn.Sequential(_Quantized(6, 16), nn.Tanh(), _Quantized(16, 4)))


class _FakeQuantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax() / 7
        w = self.weight + ((self.weight / scale).round() * scale - self.weight).detach()
        return F.linear(x, w, self.bias)


def fake_quantized() -> plait.Job:
    """Straight-through quantization uses the largest element of the full weight, but a rank may have a slice."""
    return made(lambda: nn.Sequential(_FakeQuantized(6, 16), nn.ReLU(), _FakeQuantized(16, 4)), optimizer=sgd)


class _Ranged(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scale = h.detach().abs().amax() / 7
        h = h + ((h / scale).round() * scale - h).detach()
        for layer in self.layers:
            h = layer(h)
        return self.last(h)


def quantized_activations() -> plait.Job:
    """Observers see only a rank's batch: activations are quantized by the maximum of the batch."""
    return made(_Ranged)


class _Penalised(Chain):
    """The squared slope of a random projection of the hidden state's logits."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        with torch.enable_grad():
            h = h if h.requires_grad else h.detach().requires_grad_()
            out = h
            for layer in self.layers:
                out = layer(out)
            out = self.last(out)
            (slope,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), h, create_graph=True)
        return out, slope.square().sum(-1)


def jacobian_penalty() -> plait.Job:
    """Double backward through a wrapped module: the loss contains the gradient of the outputs by a hidden state."""
    return made(_Penalised, lambda o, y: F.cross_entropy(o[0], y) + 0.1 * o[1].mean())


class _Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.predictor = Chain(outputs=6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        views = [self.norm(self.encoder(x + 0.1 * torch.randn_like(x))) for _ in range(2)]
        pairs = zip(map(self.predictor, views), reversed(views))
        return sum((1 - F.cosine_similarity(p, z.detach(), dim=-1) for p, z in pairs), x.new_zeros(()))


def stopped_gradient() -> plait.Job:
    """A batch norm runs twice before backward, on two noisy views of a batch. One view has no gradient."""
    return made(_Similar, first)


class _Leaky(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)) for _ in range(3)])


def random_slopes() -> plait.Job:
    """A randomized leaky ReLU is in a recomputed unit: the operator draws the noise and saves it for backward."""
    return made(_Leaky)


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(16, 6, padding_idx=0), Chain(outputs=16)
        self.tokens.weight.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, 6) / 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.prompt.expand(len(ids), -1, -1), self.tokens(ids)], 1)
        return self.body(h)[:, 2:]


def learned_prompt() -> plait.Job:
    """Prompt tuning: learned positions precede those of the text, and are removed from the outputs."""
    return made(_Frozen, next_token, Texts)
