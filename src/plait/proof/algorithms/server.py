"""A run of groups and a server (sync=async), played again in one process from its ledger.

    for (samples, version read) of each row:   g = gradient(weights[version read], samples) ;  rule(g)

It shares with the run what a job means, the keyed random numbers, and the ledger, and nothing else.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.proof.reference import OneDevice, call, collated
from plait.randomness.keyed import Randomness, seed_host
from plait.tensors.float64 import Wide

Row = dict[str, Any]


class Replay:
    """The model, all versions of its weights and buffers, and what the updates did."""

    def __init__(self, job: Job, nesterov: int = 0):
        self.job, self.data, self.nesterov = job, job.data(), nesterov
        one = OneDevice.of(job, self.data, torch.float64, "cpu")
        self.model, self.optimizer, self.keyed, self.rates = one.model, one.optimizer, one.keyed, one.rates
        self.keyed: Randomness
        one.notes.close()
        self.state = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        self.versions, self.told = [{n: t.detach().clone() for n, t in self.state.items()}], list[Row]()
        self.momentum, self.delta, self.pushes, self.samples = dict[Tensor, Tensor](), dict[Tensor, Tensor](), 0, 0

    def run(self, rows: list[Row]) -> None:
        """All rows, in order; those of one update stand together."""
        for _, update in groupby(
            rows, key=lambda row: row["version_made"] if not row.get("dropped") else -row["seq"] - 2
        ):
            used = [row for row in update if not row.get("dropped") or self.count(row)]
            if used:
                self.update(used, [self.gradient(row) for row in used])

    def count(self, row: Row) -> bool:
        self.samples += len(row["ids"])
        return False

    def gradient(self, row: Row) -> Row:
        """Of the mean loss of a row's samples at the weights that were read; what it weighs, and how buffers changed."""
        before = self.versions[row["version_read"]]
        self.put(before)
        self.model.zero_grad()
        samples = [seed_host(self.job.seed, "sample", row["epoch"], i) or self.data[i] for i in row["ids"]]
        inputs, targets = collated(self.data, samples, torch.float64, "cpu")
        with Wide(), self.keyed.at(row["clock"], row["first"], len(samples)):
            loss = self.job.loss(call(self.model, inputs), targets)
        with self.keyed.replay():
            loss.backward()
        weight = (
            float(torch.as_tensor(self.job.weight(targets)).double().sum()) if self.job.weight else float(len(samples))
        )
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None and weight}
        moved = {n: b - before[n] for n, b in self.model.named_buffers() if b.dtype != torch.bool}
        return {"g": gradients, "weight": weight, "loss": loss.item() if weight else 0.0, "moved": moved}

    def update(self, rows: list[Row], found: list[Row]) -> None:
        """One version from the last: the sum of the gradients, clipped, and a step."""
        total = sum(each["weight"] for each in found)
        shares = [row["weight"] for row in rows] if self.nesterov else [each["weight"] / total for each in found]
        self.put(self.versions[-1])
        for name, p in self.model.named_parameters():
            parts = [
                (1.0 if self.nesterov else a) * each["g"][name] for a, each in zip(shares, found) if name in each["g"]
            ]
            p.grad = torch.stack(parts).sum(0) if parts else None
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.model.parameters() if p.requires_grad], self.job.clip or torch.inf
        )
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * (self.job.schedule(self.samples) if self.job.schedule else 1.0)
        self.delayed(shares[0]) if self.nesterov else self.optimizer.step()
        for name, b in self.model.named_buffers():
            moved = [(a, each["moved"][name]) for a, each in zip(shares, found) if name in each["moved"]]
            step = sum(a * m for a, m in moved) if b.is_floating_point() else max(m for _, m in moved) if moved else 0
            b.copy_(b + step)
        self.versions.append({n: t.detach().clone() for n, t in self.state.items()})
        self.samples += sum(len(row["ids"]) for row in rows)
        loss = sum(a * each["loss"] for a, each in zip(shares, found)) / sum(shares)
        self.told.append({"loss": loss, "norm": float(norm), "lr": self.optimizer.param_groups[0]["lr"]})

    @torch.no_grad()
    def delayed(self, a: float) -> None:
        """Delayed Nesterov: momentum moves with every N-th gradient, by what N of them have left."""
        self.pushes += 1
        for group in self.optimizer.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g, beta = a * (p.grad + group["weight_decay"] * p), group["momentum"]
                self.delta[p] = self.delta.get(p, 0.0) + g
                if self.pushes % self.nesterov == 0:
                    self.momentum[p] = beta * self.momentum.get(p, 0.0) + self.delta.pop(p)
                    g = g + beta * self.momentum[p]
                p -= group["lr"] * g

    def put(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            [t.copy_(state[n]) for n, t in self.state.items()]
