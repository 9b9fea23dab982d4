"""Models whose forward pass is not a chain of layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

import plait
from trackers.samples import Block, Chain, Images, Rows, Texts, adamw, first, made, next_token, sgd


class _Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.weights = nn.ParameterDict({k.replace(".", "_"): v.detach() for k, v in stacked.items()})
        self.names, self.shape = tuple(stacked), [members[0].to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: self.weights[name.replace(".", "_")] for name in self.names}
        return vmap(lambda w: functional_call(self.shape[0], w, (x,)))(weights).mean(0)


def vmapped_ensemble() -> plait.Job:
    """`vmap` runs over stacked weights: an ensemble is one function, with members on the meta device."""
    return made(_Ensemble)


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, 8, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.norm(x), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return x + self.out(torch.fft.irfft(waves, n=x.shape[1], dim=1, norm="ortho"))


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(16, 8), nn.ModuleList([_Spectral() for _ in range(3)]), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def spectral_filter() -> plait.Job:
    """Collectives do not support complex values: filters view their real parameters as complex in forward."""
    return made(_Waves, next_token, Texts)


class _Scaled(Rows):
    """Vectors of unequal sizes, so that some samples need many iterations."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x * (i % 5), y


class _Equilibrium(nn.Module):
    def __init__(self, together: bool) -> None:
        super().__init__()
        self.inputs, self.cell, self.last, self.together = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4), together

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.inputs(x), torch.zeros(len(x), 8, dtype=x.dtype)
        for _ in range(20):
            new = torch.tanh(1.5 * self.cell(z) + u)
            error = (new - z).detach().abs().amax(-1, keepdim=True)
            if self.together and error.amax() < 0.02:
                break
            z = new if self.together else torch.where(error < 0.02, z, new)
        return self.last(z)


def equilibrium() -> plait.Job:
    """Deep equilibrium: iterations stop once all samples of the batch have converged, which differs between ranks."""
    return made(lambda: _Equilibrium(True), data=_Scaled)


class _Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), flip

    def forward(self, x: Tensor, det: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=-1)[:: -1 if self.flip else 1]
        shift, scale = self.net(a).chunk(2, dim=-1)
        b = b * scale.tanh().exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], -1), det + scale.tanh().sum(-1)


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Coupling(bool(k % 2)) for k in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        z, det = x, x.new_zeros(len(x))
        for layer in self.layers:
            z, det = layer(z, det)
        return 0.5 * z.square().sum(-1) - det


def coupling_flow() -> plait.Job:
    """Units return tuples: each coupling of a flow passes on values and the log-determinant."""
    return made(_Flow, first)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.last = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 6)), nn.Linear(6, 4)

    def rate(self, t: float, x: Tensor) -> Tensor:
        return self.slope(torch.cat([x, x.new_full((len(x), 1), t)], -1))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for k in range(4):
            a = self.rate(k * h, x)
            b = self.rate(k * h + h / 2, x + h / 2 * a)
            x = x + h * b
        return self.last(x)


def neural_ode() -> plait.Job:
    """A forward pass calls one network eight times (a neural ODE with the midpoint rule)."""
    return made(_Field)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.layers = nn.Linear(12, 8), nn.ModuleList([Block() for _ in range(3)])
        self.blank, self.places, self.out = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.randn(16, 8) / 4), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        order = torch.rand(patches.shape[:2]).argsort(1)
        hidden = torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :8], True)
        h = torch.where(hidden[..., None], self.blank, self.patch(patches)) + self.places
        for layer in self.layers:
            h = layer(h)
        errors = (self.out(h) - patches).square().mean(-1)
        return (errors * hidden).sum(1) / 8


def masked_autoencoder() -> plait.Job:
    """Random masks differ under another split: sorted random numbers select half of an image's patches."""
    return made(_Masked, first, Images)


class _Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.times = Chain(inputs=12, outputs=6), nn.Embedding(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.randint(0, 10, ((len(x) + 1) // 2,))
        t = torch.cat([half, 9 - half])[: len(x)]
        noise, kept = torch.randn_like(x), 1 - 0.09 * t[:, None].to(x.dtype)
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return (self.body(torch.cat([noised, self.times(t)], -1)) - noise).square().mean(-1)


def antithetic_times() -> plait.Job:
    """Diffusion with antithetic times: half of the batch draws times, the other half uses the mirrored times."""
    return made(_Diffusion, first)


class _ExpertChoice(nn.Module):
    """Each expert chooses the tokens with its highest scores, among all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 8) / 3), nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scores = self.router(h).softmax(-1)
        value, chosen = scores.topk(max(1, len(x) // 2), dim=0)
        out = h
        for k in range(4):
            made_ = F.gelu(h[chosen[:, k]] @ self.up[k]) @ self.down[k]
            out = out.index_add(0, chosen[:, k], made_ * value[:, k : k + 1])
        return self.last(out)


def expert_choice() -> plait.Job:
    """Experts choose tokens among all tokens of the same forward pass, so the choice depends on the split."""
    return made(_ExpertChoice)


def _real(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    fake = model["generator"](torch.randn(len(x), 3)).detach()
    return model["critic"](x), model["critic"](fake)


def _fake(model: Any, x: Tensor) -> Tensor:
    return model["critic"](model["generator"](torch.randn(len(x), 3)))


def least_squares_gan() -> plait.Job:
    """A loop has two optimizers: a GAN with different learning rates, whose generator updates every second step."""
    halves = nn.Sequential, nn.Linear
    model = lambda: nn.ModuleDict({  # noqa: E731
        "generator": halves[0](halves[1](3, 12), nn.Tanh(), halves[1](12, 6)),
        "critic": halves[0](halves[1](6, 12), nn.LeakyReLU(0.2), halves[1](12, 1)),
    })  # fmt: skip
    critic = plait.Phase(
        "critic", ("critic.*",), lambda o, y: ((o[0] - 1).square() + o[1].square()).mean(), adamw, _real
    )
    generator = plait.Phase("generator", ("generator.*",), lambda o, y: (o - 1).square().mean(), sgd, _fake, every=2)
    return plait.Job(model=model, data=Rows, phases=(critic, generator), batch=8, steps=12)


class _Grouped(nn.Module):
    """Attention with one key and value for all heads, and a relative position bias that the first layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (t[:, None].expand(-1, 4, -1, -1) for t in self.kv(h).chunk(2, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(a.transpose(1, 2).flatten(2))


class _Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.distance, self.head = nn.Embedding(16, 8), nn.Embedding(8, 4), nn.Linear(8, 16)
        self.layers = nn.ModuleList([_Grouped() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        h, at = self.tokens(ids), torch.arange(ids.shape[1])
        past = at[:, None] - at[None]
        bias = self.distance(past.clamp(min=0)).permute(2, 0, 1).masked_fill(past < 0, float("-inf"))
        for layer in self.layers:
            h = layer(h, bias)
        return self.head(h)


def one_key_head() -> plait.Job:
    """The model has fewer key heads than ranks (multi-query attention), and a position bias that all layers share."""
    return made(_Relative, next_token, Texts)


class _Fused(nn.Module):
    """Queries, keys and values of each head are adjacent in one weight, as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x.float(), (8,)).to(x.dtype)
        q, k, v = self.qkv(h).unflatten(-1, (4, 6)).transpose(1, 2).chunk(3, dim=-1)
        window = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-3)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=window)
        return x + self.out(a.transpose(1, 2).flatten(2))


class _Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(16, 8), nn.ModuleList([_Fused() for _ in range(3)]), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def fused_by_head() -> plait.Job:
    """Fused projections are ordered by head, norms run in float32 in every format, and attention has a sliding window."""
    return made(_Windowed, next_token, Texts)
