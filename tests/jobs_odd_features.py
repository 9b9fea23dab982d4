"""Small unusual models: features, routing, functions with their own backward, norms, losses and recurrences."""

from functools import partial

import torch
from jobs_odd import Seq, W, blk, ce, row
from torch import nn
from torch.nn import functional as F

J = {}
m = partial(row, J)


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, 3 * W)
        self.g = nn.Linear(3 * W, W)

    def forward(self, x):
        h = self.f(x)
        h = F.normalize(h, dim=-1)
        return self.g(h * h.norm(p=1, dim=-1, keepdim=True) + h.logsumexp(-1, keepdim=True) + h.prod(-1, keepdim=True))


m("hidden_norms", Cosine)


class HidSort(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, 3 * W)
        self.g = nn.Linear(3 * W, W)

    def forward(self, x):
        h = self.f(x)
        return self.g(h.sort(-1).values + h.roll(1, -1) + h.cumsum(-1) + h.flip(-1))


m("hidden_sort", HidSort)


class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, 4 * W)
        self.g = nn.Linear(W, W)

    def forward(self, x):
        return self.g(self.f(x).view(*x.shape[:-1], W, 4).max(-1).values)


m("maxout", Maxout)


class Glu(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, 4 * W)
        self.g = nn.Linear(2 * W, W)

    def forward(self, x):
        a, b = self.f(x).view(*x.shape[:-1], 2 * W, 2).unbind(-1)
        return self.g(a * b.sigmoid())


m("glu_interleaved", Glu)


class SoftMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(W, 4))
        self.e = nn.ModuleList(nn.Linear(W, W) for _ in range(4))

    def forward(self, x):
        scores = x @ self.phi
        d = scores.softmax(1)
        c = scores.softmax(2)
        s = torch.einsum("btd,bte->bed", x, d)
        return torch.einsum("bed,bte->btd", torch.stack([f(s[:, i]) for i, f in enumerate(self.e)], 1), c)


m("soft_moe", SoftMoe)


class Hard(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(W, 3)
        self.e = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x):
        i = self.r(x).argmax(-1)
        out = torch.zeros_like(x)
        for k, f in enumerate(self.e):
            sel = i == k
            if sel.any():
                out[sel] = f(x[sel]).to(out)
        return out + self.r(x).softmax(-1).max(-1, keepdim=True).values


m("hard_routing", Hard)


class Cap(nn.Module):
    """Batch-prioritized routing: the capacity is over all tokens of the batch."""

    def __init__(self):
        super().__init__()
        self.r = nn.Linear(W, 1)
        self.f = nn.Linear(W, W)

    def forward(self, x):
        s = self.r(x).flatten()
        keep = s.topk(len(s) // 2).indices
        m_ = torch.zeros_like(s)
        m_[keep] = 1
        return x + self.f(x) * (m_ * s.sigmoid()).view(*x.shape[:-1], 1)


m("batch_capacity", Cap)


class GradPen(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(W, 2 * W), nn.Tanh(), nn.Linear(2 * W, 1))

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            e = self.f(x).sum()
            (g,) = torch.autograd.grad(e, x, create_graph=self.training or torch.is_grad_enabled())
        return g


m("score_model", GradPen, "vec")


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (0.5 / (x.abs().sqrt() + 0.1)) * (1 + g.abs().mean() * 0)


m("custom_function", blk(Fn.apply))


class FnB(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-3)


m("backward_normalizes", blk(FnB.apply))


class CondDepth(nn.Module):
    """Depth set by an epoch counter from outside; layer drop by torch.rand."""

    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x):
        for layer in self.b:
            if torch.rand(()) < 0.7:
                x = x + layer(x).tanh()
        return x


m("layerdrop_batch", CondDepth)


class SD(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x):
        for layer in self.b:
            x = x + layer(x).tanh() * (torch.rand(x.shape[0], *[1] * (x.ndim - 1)) < 0.7).to(x) / 0.7
        return x


m("stochastic_depth_rows", SD)


class Normed(nn.Module):
    def __init__(self, norm, pool):
        super().__init__()
        self.c = nn.Conv2d(3, 8, 3, padding=1)
        self.n = norm
        self.h = nn.Linear(8, 5)
        self.pool = pool

    def forward(self, x):
        return self.h(self.pool(self.n(self.c(x)).relu()))


m(
    "instancenorm_tracked",
    lambda: Normed(nn.InstanceNorm2d(8, track_running_stats=True, affine=True), lambda x: x.mean((2, 3))),
    "img",
)
m("batchnorm_cumulative", lambda: Normed(nn.BatchNorm2d(8, momentum=None), lambda x: x.amax((2, 3))), "img")


class BnShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 8, 3)
        self.d = nn.Conv2d(8, 8, 3, padding=1)
        self.n = nn.BatchNorm2d(8)
        self.h = nn.Linear(8, 5)

    def forward(self, x):
        x = self.n(self.c(x)).relu()
        x = self.n(self.d(x)).relu()
        return self.h(x.mean((2, 3)))


m("batchnorm_shared", BnShared, "img")


class OwnBn(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(W, W)
        self.register_buffer("m", torch.zeros(W))
        self.register_buffer("v", torch.ones(W))

    def forward(self, x):
        h = self.c(x)
        if self.training:
            d = tuple(range(h.ndim - 1))
            mu, va = h.mean(d), h.var(d, unbiased=False)
            self.m.lerp_(mu.detach(), 0.1)
            self.v.lerp_(va.detach(), 0.1)
        else:
            mu, va = self.m, self.v
        return (h - mu) / (va + 1e-5).sqrt()


m("own_batchnorm", OwnBn, "vec")


class EvalBuf(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(W, W)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return self.c(x)


m("counter_always", EvalBuf, "vec")


class DictOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(W, W)
        self.b = nn.Linear(W, W)

    def forward(self, x):
        return {"a": self.a(x), "aux": [self.b(x).square().mean()]}


m("aux_loss_mean", DictOut, "seq", lambda o, y: F.mse_loss(o["a"], y) + 0.1 * o["aux"][0])
m("aux_loss_sq", lambda: DictOut(), "seq", lambda o, y: F.mse_loss(o["a"], y) + 0.1 * o["aux"][0] ** 2)
m(
    "mean_over_valid",
    lambda: Seq(blk(F.gelu)),
    "tokens",
    lambda o, y: F.cross_entropy(o.flatten(0, 1), torch.where(y > 20, -100, y).flatten()),
)
m(
    "per_sample_mean",
    lambda: Seq(blk(F.gelu)),
    "tokens",
    lambda o, y: torch.stack([F.cross_entropy(a, b) for a, b in zip(o, y)]).mean(),
)
m("logits_zloss", lambda: Seq(blk(F.gelu)), "tokens", lambda o, y: ce(o, y) + 1e-3 * o.logsumexp(-1).square().mean())
m("huber_sum_over_n", lambda: nn.Linear(W, W), "vec", lambda o, y: F.huber_loss(o, y, reduction="sum") / len(y))
m("rmse", lambda: nn.Linear(W, W), "vec", lambda o, y: F.mse_loss(o, y).sqrt())


class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.GRU(W, W, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.h = nn.Linear(2 * W, W)

    def forward(self, x):
        return self.h(self.r(x)[0])


m("bigru", Rnn)


class RnnH(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.LSTM(W, 2 * W, proj_size=W, batch_first=True)
        self.h = nn.Linear(W, W)
        self.h0 = nn.Parameter(torch.zeros(1, 1, W))
        self.c0 = nn.Parameter(torch.zeros(1, 1, 2 * W))

    def forward(self, x):
        n = len(x)
        return self.h(self.r(x, (self.h0.expand(-1, n, -1).contiguous(), self.c0.expand(-1, n, -1).contiguous()))[0])


m("lstm_proj_learned_state", RnnH)


class Mha(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(W, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True, dropout=0.1)
        self.h = nn.Linear(W, W)

    def forward(self, x):
        a, w = self.a(x, x, x)
        return self.h(a) + w.mean((1, 2))[:, None, None]


m("mha_bias_kv", Mha)


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(W, 2, 16, dropout=0.1, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.h = nn.Linear(W, W)

    def forward(self, x):
        return self.h(self.e(x, src_key_padding_mask=torch.arange(x.shape[1])[None].expand(len(x), -1) > 4))


m("torch_encoder_padded", Enc)
