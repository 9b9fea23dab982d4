"""Small unusual jobs: random numbers of each kind in blocks, and code between units."""

import torch
from torch import nn
from torch.nn import functional as F

import plait

W, N, T = 8, 64, 6


def data(kind="tokens"):
    def make():
        g = torch.Generator().manual_seed(3)
        if kind == "tokens":
            x = torch.randint(0, 32, (N, T), generator=g)
            y = torch.randint(0, 32, (N, T), generator=g)
        elif kind == "vec":
            x = torch.randn(N, W, generator=g)
            y = torch.randn(N, W, generator=g)
        elif kind == "seq":
            x = torch.randn(N, T, W, generator=g)
            y = torch.randn(N, T, W, generator=g)
        elif kind == "img":
            x = torch.randn(N, 3, 8, 8, generator=g)
            y = torch.randint(0, 5, (N,), generator=g)
        return [(x[i], y[i]) for i in range(N)]

    return make


def ce(out, y):
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def mse(out, y):
    return F.mse_loss(out, y)


def job(model, kind, loss=None, opt=None, **k):
    loss = loss or (ce if kind in ("tokens", "img") else mse)
    return plait.Job(
        model=model,
        data=data(kind),
        loss=loss,
        optimizer=opt or (lambda p: torch.optim.AdamW(p, lr=1e-2)),
        batch=8,
        steps=4,
        **k,
    )


class Seq(nn.Module):
    """An embedding, blocks, and a head over tokens."""

    def __init__(self, block, n=2):
        super().__init__()
        self.e = nn.Embedding(32, W)
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.h = nn.Linear(W, 32)

    def forward(self, x):
        x = self.e(x)
        for b in self.blocks:
            x = b(x)
        return self.h(x)


def blk(f):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(W, 2 * W)
            self.b = nn.Linear(2 * W, W)

        def forward(self, x):
            return x + self.b(f(self.a(x)))

    return B


def row(table, name, model, kind="seq", loss=None, **k):
    """Add a job to a table of jobs by name."""
    table[name] = lambda: job(model, kind, loss, **k)


J = {}


def rand_block(name, f):
    J["rand_" + name] = lambda: job(lambda: Seq(blk(f)), "tokens")


rand_block("rrelu", lambda x: F.rrelu(x, training=True))
rand_block("gumbel", lambda x: F.gumbel_softmax(x, dim=-1) * x)
rand_block("poisson", lambda x: x * torch.poisson(x.detach().abs()))
rand_block("normal_mean", lambda x: x + 0.1 * torch.normal(x.detach(), 0.5))
rand_block("exponential", lambda x: x * torch.empty_like(x).exponential_())
rand_block("geometric", lambda x: x * torch.empty_like(x).geometric_(0.5))
rand_block("cauchy", lambda x: x * torch.empty_like(x).cauchy_().clamp(-2, 2))
rand_block("lognormal", lambda x: x * torch.empty_like(x).log_normal_())
rand_block(
    "multinomial",
    lambda x: x * torch.multinomial(x.detach().reshape(-1, x.shape[-1]).softmax(-1), 1).reshape(*x.shape[:-1], 1) / 8,
)
rand_block("randint_like", lambda x: x * torch.randint_like(x, 0, 3))
rand_block("alpha", lambda x: F.alpha_dropout(x, 0.3, True))
rand_block("feature_alpha", lambda x: F.feature_alpha_dropout(x, 0.3, True))
rand_block("dropout1d", lambda x: F.dropout1d(x, 0.3, True))
rand_block("gamma", lambda x: x * torch.distributions.Gamma(x.detach().abs() + 1, 1.0).rsample())
rand_block("beta", lambda x: x * torch.distributions.Beta(x.detach().abs() + 1, 2.0).rsample())
rand_block("dirichlet", lambda x: x * torch.distributions.Dirichlet(x.detach().abs() + 1).rsample())
rand_block("studentt", lambda x: x * torch.distributions.StudentT(x.detach().abs() + 3).rsample().clamp(-2, 2))
rand_block("categorical", lambda x: x * torch.distributions.Categorical(logits=x.detach()).sample()[..., None] / 8)
rand_block("binomial", lambda x: x * torch.distributions.Binomial(4, logits=x.detach()).sample())
rand_block("vonmises", lambda x: x * torch.distributions.VonMises(x.detach(), 1.0).sample())
rand_block("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_(0.5))
rand_block("bernoulli_p", lambda x: x * torch.bernoulli(x.detach().sigmoid()))
rand_block("trunc_normal", lambda x: x + nn.init.trunc_normal_(torch.empty_like(x)))
rand_block("randperm", lambda x: x[..., torch.randperm(x.shape[-1])])
rand_block(
    "rand_out", lambda x: x * torch.rand(x.shape, out=torch.empty(x.shape, dtype=torch.get_default_dtype())).to(x)
)
rand_block("native_dropout", lambda x: torch.native_dropout(x, 0.3, True)[0])
rand_block("sdpa_drop", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3))
rand_block(
    "fractional",
    lambda x: (
        x
        + F.fractional_max_pool2d(x[:, None].repeat(1, 1, 1, 1), (2, 2), output_size=(3, 8)).mean((1, 2, 3))[
            :, None, None
        ]
    ),
)


class Between(nn.Module):
    """Runs `f` between its units."""

    def __init__(self, f):
        super().__init__()
        self.i = nn.Linear(W, W)
        self.k = nn.Linear(W, W)
        self.o = nn.Linear(W, W)
        self.f = f

    def forward(self, x):
        return self.o(self.k(self.f(self.i(x))))


def between(f):
    return job(lambda: Between(f), "seq")


def two(name, f):
    J[name] = lambda: between(f)


two("cumsum", lambda u: u.cumsum(1))
two("arange_to", lambda u: u * torch.arange(1, u.shape[1] + 1).to(u)[None, :, None])
two("arange_like", lambda u: u / torch.arange(1, u.shape[1] + 1, dtype=u.dtype)[None, :, None])
two("cumsum_div", lambda u: u.cumsum(1) / torch.arange(1, u.shape[1] + 1, dtype=u.dtype)[None, :, None])
two("cummax", lambda u: u.flip(1).cummax(1).values)
two("flip", lambda u: u + u.flip(1))
two("type_as", lambda u: u * torch.arange(u.shape[1]).type_as(u)[None, :, None])
two("where_pos", lambda u: torch.where(torch.arange(u.shape[1])[None, :, None] % 2 == 0, u, -u))
two("linspace", lambda u: u * torch.linspace(0, 1, u.shape[1], dtype=u.dtype).view(1, -1, 1))
two("tril_mask", lambda u: u * torch.ones(u.shape[1], u.shape[1], dtype=u.dtype).tril().sum(1)[None, :, None])
two("new_ones", lambda u: u * u.new_ones(u.shape).cumsum(1))
two("diff_prepend", lambda u: u.diff(dim=1, prepend=u[:, :1]))
two("pad_shift", lambda u: F.pad(u, (0, 0, 1, 0))[:, :-1])
two("unfold", lambda u: F.pad(u, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1))
two("index_rev", lambda u: u[:, torch.arange(u.shape[1] - 1, -1, -1)])
two("gather_sort", lambda u: u.gather(1, u[..., 0].argsort(1)[..., None].expand_as(u)))
two("softmax_seq", lambda u: u * u.softmax(1))
two("norm_seq", lambda u: u / u.norm(dim=1, keepdim=True))
two("std_seq", lambda u: (u - u.mean(1, keepdim=True)) / u.std(1, keepdim=True))
two("einsum_tt", lambda u: torch.einsum("btd,bsd->bts", u, u).softmax(-1) @ u)
two("max_seq_vals", lambda u: u + u.max(1, keepdim=True).values)
two("first_tok", lambda u: u + u[:, :1])
two("avgpool1d", lambda u: u + F.avg_pool1d(u.mT, 3, 1, 1).mT)
two("interp", lambda u: F.interpolate(u.mT, scale_factor=2).mT[:, ::2] + u)
two("repeat_interleave", lambda u: u[:, ::2].repeat_interleave(2, 1) + u)
two("stack_pairs", lambda u: u.view(len(u), -1, 2, W).flip(2).reshape(len(u), -1, W))
two("logcumsumexp", lambda u: u.logcumsumexp(1))
two("bincount", lambda u: u * u[..., 0].argmax(1)[:, None, None].remainder(3).to(u))
two("nonzero_mask", lambda u: u.masked_fill(u.mean(-1, keepdim=True) > u.mean((1, 2), keepdim=True), 0.0))
two(
    "scatter_len",
    lambda u: torch.zeros_like(u).scatter_(1, torch.arange(u.shape[1]).flip(0)[None, :, None].expand_as(u), u),
)
