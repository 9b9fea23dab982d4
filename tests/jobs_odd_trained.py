"""Small unusual jobs: optimizers and hooks on them, parametrizations, and hooks on modules and tensors."""

import torch
from jobs_odd import Seq, W, blk, job
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations as P
from torch.nn.utils import parametrize, prune

J = {}


def opt(name, make, model=None, kind="tokens", loss=None, **k):
    J["opt_" + name] = lambda: job(model or (lambda: Seq(blk(F.gelu))), kind, loss, make, **k)


opt(
    "muon",
    lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    model=lambda: nn.Sequential(nn.Linear(W, 2 * W, bias=False), nn.GELU(), nn.Linear(2 * W, W, bias=False)),
    kind="vec",
)
opt("adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2))
opt("asgd", lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1))
opt("rprop", lambda p: torch.optim.Rprop(p, lr=1e-2))
opt("nadam_decoupled", lambda p: torch.optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1))
opt("radam", lambda p: torch.optim.RAdam(p, lr=1e-2))
opt("amsgrad_max", lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, maximize=True))
opt("fused", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
opt(
    "foreach_sgd_nesterov",
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.01),
)
opt("lr_tensor", lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)))


def on_steps(name, make, change, after=False):
    """Return an optimizer with a hook that changes each parameter, or its gradient, before or after a step."""

    def hook(optimizer, *_):
        with torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                change(p)

    def made(parameters):
        optimizer = make(parameters)
        (optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook)(hook)
        return optimizer

    opt(name, made)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def rows_of_one(p):
    if p.ndim == 2:
        p.div_(p.norm(dim=1, keepdim=True).clamp_min(1.0))


on_steps("pre_hook", adamw, lambda p: p.grad.add_(p, alpha=0.01))
on_steps("pre_hook_norm", adamw, lambda p: p.grad.div_(p.grad.norm() + 1e-3))
on_steps("post_hook_clamp", adamw, lambda p: p.clamp_(-0.3, 0.3), after=True)
on_steps("post_hook_maxnorm", lambda p: torch.optim.SGD(p, lr=1e-1), rows_of_one, after=True)


class SAM(torch.optim.Optimizer):
    """Centralizes the gradient of each tensor."""

    def __init__(self, p, lr):
        super().__init__(p, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for q in g["params"]:
                if q.grad is None:
                    continue
                d = q.grad - q.grad.mean(dim=tuple(range(1, q.ndim)), keepdim=True) if q.ndim > 1 else q.grad
                q.add_(d, alpha=-g["lr"])


opt("centralized", lambda p: SAM(p, 1e-1))


class Lion(torch.optim.Optimizer):
    def __init__(self, p, lr=1e-3):
        super().__init__(p, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for q in g["params"]:
                if q.grad is None:
                    continue
                m = self.state[q].setdefault("m", torch.zeros_like(q))
                q.add_((0.9 * m + 0.1 * q.grad).sign(), alpha=-g["lr"])
                m.mul_(0.99).add_(q.grad, alpha=0.01)


opt("lion", lambda p: Lion(p))


class Trust(torch.optim.Optimizer):
    """Uses the global norm over all parameters in its step."""

    def __init__(self, p, lr=1e-2):
        super().__init__(p, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        n = torch.stack([q.grad.norm() for g in self.param_groups for q in g["params"] if q.grad is not None]).norm()
        for g in self.param_groups:
            for q in g["params"]:
                if q.grad is not None:
                    q.add_(q.grad / (n + 1), alpha=-g["lr"])


opt("global_norm_inside", lambda p: Trust(p))


# parametrizations
def par(name, wrap, kind="vec", **k):
    J["par_" + name] = lambda: job(
        lambda: nn.Sequential(
            nn.Linear(W, 2 * W), nn.GELU(), wrap(nn.Linear(2 * W, 2 * W)), nn.GELU(), nn.Linear(2 * W, W)
        ),
        kind,
        **k,
    )


par("weight_norm", P.weight_norm)
par("spectral", P.spectral_norm)
par("orthogonal", P.orthogonal)
par("old_weight_norm", torch.nn.utils.weight_norm)
par("old_spectral", torch.nn.utils.spectral_norm)
par("pruned", lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3))


class Sym(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


def sym(layer):
    parametrize.register_parametrization(layer, "weight", Sym())
    return layer


par("symmetric", sym)


class Std(nn.Linear):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)
        return F.linear(x, w, self.bias)


par("weight_std", lambda layer: Std(2 * W, 2 * W))


class ColStd(nn.Linear):
    def forward(self, x):
        w = self.weight
        w = w / (w.pow(2).mean(0, keepdim=True) + 1e-5).sqrt()
        return F.linear(x, w, self.bias)


par("col_std", lambda layer: ColStd(2 * W, 2 * W))


class Quant(nn.Linear):
    def forward(self, x):
        s = self.weight.abs().max() / 7
        w = self.weight + ((self.weight / s).round() * s - self.weight).detach()
        return F.linear(x, w, self.bias)


par("quant_ste", lambda layer: Quant(2 * W, 2 * W))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(2 * W, 2 * W)
        self.a = nn.Parameter(torch.randn(2, 2 * W) * 0.1)
        self.b = nn.Parameter(torch.zeros(2 * W, 2))
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


par("merged_lora", lambda layer: Lora())


class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(4, 2 * W * 2 * W)
        self.z = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.g(self.z).view(2 * W, 2 * W) / 8


par("hypernet", lambda layer: Hyper())


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * W * 2 * W + 2 * W) * 0.1)

    def forward(self, x):
        n = 4 * W * W
        return F.linear(x, self.flat[:n].view(2 * W, 2 * W), self.flat[n:])


par("flat", lambda layer: Flat())


# hooks
class Hooked(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a = nn.Linear(W, 2 * W)
        self.b = nn.Linear(2 * W, W)
        self.how = how
        if how == "bw":
            self.b.register_full_backward_hook(lambda m, gi, go: tuple(g * 0.5 for g in gi))
        if how == "bw_clip":
            self.b.register_full_backward_hook(lambda m, gi, go: tuple(g.clamp(-1e-3, 1e-3) for g in gi))
        if how == "bw_pre":
            self.b.register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go))
        if how == "fw_pre":
            self.b.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
        if how == "fw":
            self.a.register_forward_hook(lambda m, a, o: o + a[0].mean(-1, keepdim=True))
        if how == "tensor":
            pass
        if how == "param":
            self.a.weight.register_hook(lambda g: g * 0.1)
        if how == "param_clip":
            self.a.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        if how == "param_norm":
            self.a.weight.register_hook(lambda g: g / (g.norm() + 1e-3))
        if how == "post_acc":
            self.a.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.1), None)[1])

    def forward(self, x):
        h = self.a(x)
        if self.how == "tensor" and h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        if self.how == "retain" and h.requires_grad:
            h.retain_grad()
        return self.b(F.gelu(h))


for how in (
    "bw",
    "bw_clip",
    "bw_pre",
    "fw_pre",
    "fw",
    "tensor",
    "retain",
    "param",
    "param_clip",
    "param_norm",
    "post_acc",
):
    J["hook_" + how] = lambda how=how: job(
        lambda: nn.Sequential(nn.Linear(W, W), Hooked(how), nn.LayerNorm(W), Hooked(how), nn.Linear(W, W)), "seq"
    )
