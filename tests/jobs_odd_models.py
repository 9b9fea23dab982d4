"""Small unusual models: state, ties and sequences."""

from functools import partial

import torch
from jobs_odd import T, W, row
from torch import nn
from torch.nn import functional as F

J = {}
m = partial(row, J)


class Teacher(nn.Module):
    """BYOL: an EMA teacher is updated in forward; the loss is inside."""

    def __init__(self):
        super().__init__()
        self.s = nn.Linear(W, W)
        self.t = nn.Linear(W, W)
        self.p = nn.Linear(W, W)
        for q in self.t.parameters():
            q.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for a, b in zip(self.t.parameters(), self.s.parameters()):
                    a.mul_(0.9).add_(b, alpha=0.1)
        return self.p(self.s(x)) - self.t(x).detach()


m("byol", Teacher, "vec")


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)
        self.register_buffer("q", torch.randn(16, W))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.f(x)
        out = h + (h @ self.q.T.clone()).softmax(-1) @ self.q.clone()
        if self.training:
            with torch.no_grad():
                n = len(x)
                p = int(self.ptr)
                idx = (torch.arange(n) + p) % 16
                self.q[idx] = h.detach()
                self.ptr.copy_((self.ptr + n) % 16)
        return out


m("moco_queue", Queue, "vec")


class Feedback(nn.Module):
    """The state of the last batch is used in the next one."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)
        self.register_buffer("last", torch.zeros(W))

    def forward(self, x):
        h = self.f(x) + self.last
        if self.training:
            self.last = h.detach().mean(0)
        return h


m("last_mean", Feedback, "vec")


class MaxNormEmb(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(32, W, max_norm=1.0)
        self.h = nn.Linear(W, 32)

    def forward(self, x):
        return self.h(self.e(x))


m("emb_max_norm", MaxNormEmb, "tokens")


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.EmbeddingBag(32, W, mode="max")
        self.h = nn.Linear(W, T * 32)

    def forward(self, x):
        return self.h(self.e(x)).view(-1, T, 32)


m("embedding_bag", Bag, "tokens")


class TiedT(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(W, 3 * W) * 0.2)

    def forward(self, x):
        return F.gelu(x @ self.w) @ self.w.T


m("tied_transpose", TiedT)


class TiedSub(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(W, 2 * W)
        self.b = nn.Linear(2 * W, W)

    def forward(self, x):
        return self.b(F.gelu(self.a(x))) + F.gelu(x @ self.a.weight[:W].T) @ self.b.weight[:, :W].T


m("tied_slices", TiedSub)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Parameter(torch.randn(W // 2 + 1, dtype=torch.cfloat))
        self.l = nn.Linear(W, W)

    def forward(self, x):
        return self.l(torch.fft.irfft(torch.fft.rfft(x) * self.f, n=W))


m("fft_filter", Complex)


class FNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(W, W)
        self.n = nn.LayerNorm(W)
        self.g = nn.Linear(W, W)

    def forward(self, x):
        return self.g(F.gelu(self.l(self.n(x + torch.fft.fft2(x.double(), dim=(-2, -1)).real.to(x)))))


m("fnet", FNet)


class Ssm(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(W, W)
        self.d = nn.Parameter(torch.rand(W))
        self.o = nn.Linear(W, W)

    def forward(self, x):
        u = self.i(x)
        h = torch.zeros_like(u[:, 0])
        ys = []
        for t in range(u.shape[1]):
            h = self.d.sigmoid() * h + u[:, t]
            ys.append(h)
        return self.o(torch.stack(ys, 1))


m("ssm_loop", Ssm)


class Cum(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(W, W)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        u = self.i(x)
        return self.o(u.cumsum(1) / torch.arange(1, u.shape[1] + 1).to(u)[None, :, None] + u.flip(1).cummax(1).values)


m("cumsum_flip", Cum)


class TopTok(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(W, W)
        self.s = nn.Linear(W, 1)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        u = self.i(x)
        s = self.s(u).squeeze(-1)
        idx = s.topk(3, dim=1).indices
        k = u.gather(1, idx[..., None].expand(-1, -1, W))
        return self.o(u).scatter_add(1, idx[..., None].expand(-1, -1, W), k * s.gather(1, idx)[..., None].sigmoid())


m("token_topk", TopTok)


class SortSeq(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(W, W)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        return self.o(self.i(x).sort(dim=1).values + x)


m("sort_seq", SortSeq)


class RollWin(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(W, 3 * W)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        b, t, w = x.shape
        x2 = x.roll(1, 1)
        q, k, v = self.q(x2).view(b, t // 2, 2, 3, W).unbind(3)
        a = (q @ k.mT / W**0.5).softmax(-1) @ v
        return self.o(a.reshape(b, t, w)).roll(-1, 1) + x


m("swin_roll", RollWin)


class Linformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(W, 3 * W)
        self.e = nn.Parameter(torch.randn(3, T) * 0.3)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        k = self.e @ k
        v = self.e @ v
        return self.o((q @ k.mT).softmax(-1) @ v) + x


m("linformer", Linformer)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Linear(T, T)
        self.c = nn.Linear(W, W)

    def forward(self, x):
        return self.c(x + self.t(x.mT).mT)


m("mlp_mixer", Mixer)


class NormSeq(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.LayerNorm((T, W))
        self.c = nn.Linear(W, W)

    def forward(self, x):
        return self.c(self.n(x)) + x.std(1, keepdim=True)


m("layernorm_over_seq", NormSeq)


class LinAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(W, 3 * W)
        self.o = nn.Linear(W, W)

    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        z = k.cumsum(1)
        return self.o(torch.einsum("btd,btde->bte", q, kv) / (q * z).sum(-1, keepdim=True))


m("linear_attention", LinAttn)


class Rel(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(W, 3 * W)
        self.o = nn.Linear(W, W)
        self.b = nn.Parameter(torch.randn(2 * T - 1) * 0.2)

    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        t = x.shape[1]
        i = torch.arange(t)
        a = q @ k.mT + self.b[(i[:, None] - i[None]) + T - 1]
        return self.o(a.masked_fill(i[:, None] < i[None], -1e9).softmax(-1) @ v)


m("relative_bias", Rel)
