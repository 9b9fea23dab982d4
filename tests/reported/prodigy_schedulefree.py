# optimizers that read all parameters at once (Prodigy, D-Adaptation) or have a train and an eval mode (schedule-free)
import torch
import torch.nn.functional as F
from torch import nn

import plait


class MiniProdigy(torch.optim.Optimizer):
    def __init__(self, ps, lr=1.0):
        super().__init__(ps, dict(lr=lr, d=1e-3, num=0.0))

    @torch.no_grad()
    def step(self, closure=None):
        num, den = 0.0, 0.0
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["x0"], s["s"] = p.clone(), torch.zeros_like(p)
                num += float((p.grad * (s["x0"] - p)).sum()) * g["d"]
                s["s"].mul_(0.9).add_(p.grad, alpha=g["d"])
                den += float(s["s"].abs().sum())
        for g in self.param_groups:
            g["num"] = 0.9 * g["num"] + num
            g["d"] = max(g["d"], g["num"] / (den + 1e-12))
            for p in g["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-g["lr"] * g["d"])


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.1, beta=0.9):
        super().__init__(ps, dict(lr=lr, beta=beta, k=0, train_mode=True))

    @torch.no_grad()
    def eval(self):
        for g in self.param_groups:
            if g["train_mode"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / g["beta"])
                g["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for g in self.param_groups:
            if not g["train_mode"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - g["beta"])
                g["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            if not g["train_mode"]:
                raise RuntimeError("optimizer.train() was not called")
            g["k"] += 1
            c = 1 / g["k"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if "z" not in s:
                    s["z"] = p.clone()
                p.lerp_(s["z"], c)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - c) - 1))
                s["z"].sub_(p.grad, alpha=g["lr"])


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1)


def job(kind: str = "prodigy"):
    o = {"prodigy": MiniProdigy, "free": ScheduleFree}[kind]
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6)),
        loss=F.mse_loss,
        data=D,
        optimizer=lambda p: o(p),
        batch=16,
        steps=16,
        evaluate=plait.Evaluate(D, lambda o, y: {"mse": (o - y).pow(2).mean(1)}, every=8),
    )
