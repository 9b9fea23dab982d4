"""Small random jobs of many kinds, for `bench/false_alarms.py`: sizes, activations, optimizers and losses are drawn from a seed."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Job

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU, nn.Hardswish)


class Rows:
    """`n` samples of one shape, drawn once. y: [1], or a class."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, seed: int, n: int = 64, dtype: torch.dtype = torch.float32
    ):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, *shape, generator=g).to(dtype)
        self.y = torch.randint(classes, (n,), generator=g) if classes else torch.randn(n, 1, generator=g).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Words(Rows):
    """Sequences of tokens. y: the next tokens."""

    def __init__(self, length: int, vocabulary: int, seed: int, n: int = 64):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(vocabulary, (n, length), generator=g)
        self.y = self.x.roll(-1, 1)


class Dense(nn.Module):
    """Blocks whose outputs are concatenated. x: [rows, columns]."""

    def __init__(self, columns: int, width: int, depth: int, act: nn.Module, out: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(columns + k * width, width), act) for k in range(depth))
        self.head = nn.Linear(columns + depth * width, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([x, block(x)], -1)
        return self.head(x)


class Attention(nn.Module):
    """Self-attention with a bias for keys, whose gradient is truly zero. x: [rows, length, width]."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts in which each token is sent to the best `k`. x: [rows, length, width]."""

    def __init__(self, width: int, experts: int, k: int):
        super().__init__()
        self.gate, self.k = nn.Linear(width, experts, bias=False), k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        chances, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * (chances * (chosen == i)).sum(-1, keepdim=True)
        return out


class Block(nn.Module):
    """A transformer block. x: [rows, length, width]."""

    def __init__(self, width: int, heads: int, act: nn.Module, causal: bool, first: bool, experts: int = 0):
        super().__init__()
        self.norm1, self.norm2, self.attention, self.first = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            Attention(width, heads, causal),
            first,
        )
        self.mlp: nn.Module = nn.Sequential(nn.Linear(width, 4 * width), act, nn.Linear(4 * width, width))
        if experts:
            self.mlp = Experts(width, experts, 1 + experts % 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Transformer(nn.Module):
    """x: [rows, length], integers."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, tied: bool, **block: Any):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Recurrent(nn.Module):
    """x: [rows, length], integers."""

    def __init__(self, vocabulary: int, width: int, depth: int, kind: type[nn.RNNBase]):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(vocabulary, width),
            kind(width, width, depth, batch_first=True),
            nn.Linear(width, vocabulary),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


class Adapter(nn.Module):
    """A frozen layer in bf16 with an adapter in fp32. x: [rows, columns]."""

    def __init__(self, columns: int, out: int):
        super().__init__()
        self.base = nn.Linear(columns, out).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, columns) / columns), nn.Parameter(torch.randn(out, 4) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).to(x.dtype) + F.linear(F.linear(x, self.down), self.up)


class Doubled(nn.Module):
    """A layer in float64 between others. x: [rows, columns]."""

    def __init__(self, columns: int, width: int, act: nn.Module):
        super().__init__()
        self.first, self.middle, self.last, self.act = (
            nn.Linear(columns, width),
            nn.Linear(width, width).double(),
            nn.Linear(width, 1),
            act,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        return self.last(self.middle(h.to(self.middle.weight.dtype)).to(h.dtype))


class Graph(nn.Module):
    """Sums over the adjacent nodes of a ring. x: [rows, nodes, columns]."""

    def __init__(self, columns: int, width: int, depth: int, act: nn.Module):
        super().__init__()
        self.layers, self.act, self.head = (
            nn.ModuleList(nn.Linear(columns if not k else width, width) for k in range(depth)),
            act,
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = self.act(h + torch.zeros_like(h).index_add(1, torch.arange(h.shape[1], device=h.device).roll(1), h))
        return self.head(x.amax(1))


class Scaled(nn.Module):
    """Learned scalars and matrices. x: [rows, columns]."""

    def __init__(self, columns: int, width: int, depth: int, act: nn.Module):
        super().__init__()
        self.first, self.layers, self.act, self.head = (
            nn.Linear(columns, width),
            nn.ModuleList(nn.Linear(width, width) for _ in range(depth)),
            act,
            nn.Linear(width, 1),
        )
        self.gains, self.heat = (
            nn.ParameterList(torch.full((1,), 0.5) for _ in range(depth)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer, gain in zip(self.layers, self.gains):
            h = h + gain * self.act(layer(h))
        return self.head(h) * self.heat


class Mixer(nn.Module):
    """Mixes positions and columns alternately. x: [rows, length, columns]."""

    def __init__(self, length: int, columns: int, depth: int, act: nn.Module):
        super().__init__()
        self.places, self.columns = (
            nn.ModuleList(nn.Linear(length, length) for _ in range(depth)),
            nn.ModuleList(nn.Linear(columns, columns) for _ in range(depth)),
        )
        self.norm, self.act, self.head = nn.LayerNorm(columns), act, nn.Linear(columns, 5)

    def forward(self, x: Tensor) -> Tensor:
        for place, column in zip(self.places, self.columns):
            x = x + self.act(place(self.norm(x).transpose(1, 2))).transpose(1, 2)
            x = x + self.act(column(self.norm(x)))
        return self.head(x.mean(1))


def images(width: int, depth: int, act: nn.Module, norm: Callable[[int], nn.Module], pool: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for k in range(depth):
        layers += [
            nn.Conv2d(3 if not k else width, width, 3, padding=1),
            norm(width),
            act,
            nn.MaxPool2d(2) if pool else nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * (8 // 2**depth) ** 2, 5))


class Lion(torch.optim.Optimizer):
    """Updates by the sign of a mean."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((0.9 * mean + 0.1 * p.grad).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def optimizer(r: random.Random) -> Callable[[Any], torch.optim.Optimizer]:
    lr = 10 ** r.uniform(-4, -1.5)
    return r.choice((
        lambda p: torch.optim.AdamW(p, lr), lambda p: torch.optim.AdamW(p, lr, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr), lambda p: torch.optim.RMSprop(p, lr), lambda p: torch.optim.Adagrad(p, lr), lambda p: Lion(p, lr / 10),
        lambda p: torch.optim.Adam(p, lr, amsgrad=True),
    ))  # fmt: skip


def words_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def made(model: Callable[[], nn.Module], data: Callable[[], Any], loss: Any, r: random.Random, **fields: Any) -> Job:
    clip = r.choice((None, 1.0))
    return Job(
        model=model,
        loss=loss,
        data=data,
        optimizer=optimizer(r),
        batch=12,
        steps=6,
        seed=r.randrange(10**6),
        clip=clip,
        **fields,
    )


def regression(r: random.Random) -> Any:
    return r.choice(
        (
            F.mse_loss,
            F.l1_loss,
            F.huber_loss,
            F.smooth_l1_loss,
        )
    )


def chain(r: random.Random) -> Job:
    width, depth, act = r.choice((8, 16, 33, 64)), r.randint(1, 4), r.choice(ACTIVATIONS)
    columns, seed, norm = r.choice((3, 6, 40)), r.randrange(10**6), r.choice((nn.Identity, lambda: nn.LayerNorm(width)))

    def model() -> nn.Module:  # fmt: skip
        middle = [nn.Sequential(nn.Linear(width, width), norm(), act()) for _ in range(depth)]
        return nn.Sequential(nn.Linear(columns, width), act(), *middle, nn.Linear(width, 1))

    return made(model, lambda: Rows((columns,), 0, seed), regression(r), r)


def dense(r: random.Random) -> Job:
    columns, width, depth, act, seed = (
        r.choice((4, 9)),
        r.choice((8, 16)),
        r.randint(2, 5),
        r.choice(ACTIVATIONS)(),
        r.randrange(10**6),
    )
    return made(lambda: Dense(columns, width, depth, act, 5), lambda: Rows((columns,), 5, seed), F.cross_entropy, r)


def pictures(r: random.Random) -> Job:
    width, depth, act, seed, pool = (
        r.choice((4, 8)),
        r.randint(1, 3),
        r.choice(ACTIVATIONS)(),
        r.randrange(10**6),
        r.random() < 0.5,
    )
    norm = r.choice((lambda w: nn.BatchNorm2d(w), lambda w: nn.GroupNorm(2, w), lambda w: nn.Identity()))
    return made(lambda: images(width, depth, act, norm, pool), lambda: Rows((3, 8, 8), 5, seed), F.cross_entropy, r)


def transformer(r: random.Random, experts: int = 0) -> Job:
    v, n, w, depth, seed = (
        r.choice((17, 64)),
        r.choice((8, 12)),
        r.choice((16, 32)),
        r.randint(1, 3),
        r.randrange(10**6),
    )
    block = {
        "heads": r.choice((2, 4)),
        "act": r.choice(ACTIVATIONS)(),
        "causal": r.random() < 0.6,
        "first": r.random() < 0.6,
        "experts": experts,
    }
    tied = r.random() < 0.4
    return made(lambda: Transformer(v, n, w, depth, tied, **block), lambda: Words(n, v, seed), words_loss, r)


def mixture(r: random.Random) -> Job:
    return transformer(r, r.choice((3, 4)))


def recurrent(r: random.Random) -> Job:
    v, n, w, depth, seed, kind = (
        17,
        r.choice((5, 9)),
        r.choice((8, 16)),
        r.randint(1, 2),
        r.randrange(10**6),
        r.choice((nn.LSTM, nn.GRU, nn.RNN)),
    )
    return made(lambda: Recurrent(v, w, depth, kind), lambda: Words(n, v, seed), words_loss, r)


def adapters(r: random.Random) -> Job:
    width, act, seed = r.choice((8, 32)), r.choice(ACTIVATIONS)(), r.randrange(10**6)
    return made(
        lambda: nn.Sequential(Adapter(6, width), act, Adapter(width, width), act, Adapter(width, 1)),
        lambda: Rows((6,), 0, seed),
        regression(r),
        r,
    )


def halved(r: random.Random) -> Job:
    width, depth, act, seed = r.choice((8, 32)), r.randint(1, 3), r.choice(ACTIVATIONS), r.randrange(10**6)

    def model() -> nn.Module:  # fmt: skip
        middle = [nn.Sequential(nn.Linear(width, width), act()) for _ in range(depth)]
        return nn.Sequential(nn.Linear(6, width), *middle, nn.Linear(width, 1)).bfloat16()

    return made(model, lambda: Rows((6,), 0, seed, dtype=torch.bfloat16), F.mse_loss, r)


def doubled(r: random.Random) -> Job:
    width, act, seed = r.choice((8, 32)), r.choice(ACTIVATIONS)(), r.randrange(10**6)
    return made(lambda: Doubled(6, width, act), lambda: Rows((6,), 0, seed), F.mse_loss, r)


def graph(r: random.Random) -> Job:
    width, depth, act, seed = r.choice((8, 20)), r.randint(1, 3), r.choice(ACTIVATIONS)(), r.randrange(10**6)
    return made(lambda: Graph(5, width, depth, act), lambda: Rows((7, 5), 0, seed), regression(r), r)


def scaled(r: random.Random) -> Job:
    width, depth, act, seed = r.choice((8, 24)), r.randint(1, 4), r.choice(ACTIVATIONS)(), r.randrange(10**6)
    return made(lambda: Scaled(6, width, depth, act), lambda: Rows((6,), 0, seed), regression(r), r)


def mixer(r: random.Random) -> Job:
    length, columns, depth, act, seed = (
        r.choice((4, 10)),
        r.choice((8, 16)),
        r.randint(1, 3),
        r.choice(ACTIVATIONS)(),
        r.randrange(10**6),
    )
    return made(
        lambda: Mixer(length, columns, depth, act), lambda: Rows((length, columns), 5, seed), F.cross_entropy, r
    )


def halved_words(r: random.Random) -> Job:
    """A transformer with all parameters in bf16."""
    job = transformer(r)
    make = job.model
    return Job(**{**job.__dict__, "model": lambda: make().bfloat16()})


FITTED = {f.__name__: f for f in (chain, dense, pictures, transformer, mixture, recurrent, adapters, halved)}
"""The kinds on which the limit was chosen."""
FRESH = {f.__name__: f for f in (doubled, graph, scaled, mixer, halved_words)}
"""The kinds for which its rate of false alarms is stated, together with new seeds of the others."""
