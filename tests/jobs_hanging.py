"""Jobs that hang, or run for long, on rank 1; `how` names the place."""

import itertools
import os
import queue
import socket
import subprocess
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as dist

import plait

WAYS = ("loop", "sleep", "lock", "queue", "child", "socket", "pipe", "compiled", "join", "product")
"""The ways in which a forward pass never returns."""


def chosen(how: str, *ways: str) -> bool:
    """Whether this is rank 1, and `how` is one of these ways."""
    return how in ways and dist.is_initialized() and dist.get_rank() == 1


def began() -> None:
    """Write the time at which the hang starts to the folder of the run."""
    with open("began", "w") as file:
        file.write(str(time.monotonic()))


def hang(way: str) -> None:
    """Never return."""
    began()
    if way == "loop":
        while True:
            pass
    if way == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if way == "queue":
        queue.Queue().get()
    if way == "child":
        subprocess.run(["sleep", "1000"], check=False)
    if way == "socket":
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.accept()
    if way == "pipe":
        os.read(os.pipe()[0], 1)
    if way == "compiled":  # one call that keeps the GIL
        sum(itertools.repeat(0, 10**12))
    if way == "join":
        other = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        other.start()
        other.join()
    if way == "product":
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)
    time.sleep(1000)


def real(x: Any) -> bool:
    return not isinstance(x, torch._subclasses.FakeTensor)


class Slow(torch.autograd.Function):
    """Sleeps in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        hang("sleep")
        return g


class Model(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.calls = how, 0
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        if chosen(how, "construct"):
            hang("sleep")
        if how == "hook":
            self.body[1].register_forward_hook(self.hook)

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if real(output) and chosen(self.how, "hook") and self.training:
            hang("sleep")

    def forward(self, x: Tensor) -> Tensor:
        if real(x) and self.training:
            self.calls += 1
            if chosen(self.how, *WAYS) or (chosen(self.how, "late") and self.calls == 7):
                hang(self.how)
            if chosen(self.how, "collective"):
                began()
                dist.barrier()
            if chosen(self.how, "recv"):
                began()
                dist.recv(torch.zeros(1), 0)
            if chosen(self.how, "backward"):
                x = Slow.apply(x.requires_grad_())
        return self.body(x)


class Data:
    def __init__(self, how: str, seconds: float):
        self.how, self.seconds, self.read = how, seconds, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if (chosen(self.how, "read") and self.read == 20) or self.how == "drip":
            began()
            time.sleep(self.seconds)
        if chosen(self.how, "read loop") and self.read == 20:
            hang("loop")
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if chosen(self.how, "collate") and self.read > 20:
            hang("sleep")
        inputs, targets = zip(*samples)
        return torch.stack(inputs), torch.stack(targets)


class Stuck(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        hang("sleep")


def job(how: str = "", seconds: float = 1000.0, batch: int = 8) -> plait.Job:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if chosen(how, "loss") and real(outputs):
            hang("sleep")
        return (outputs - targets).square().mean()

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if chosen(how, "metrics") and len(outputs) > 2:  # not when plait tries the metrics
            hang("sleep")
        return {"error": (outputs - targets).abs()}

    def schedule(samples: int) -> float:
        if chosen(how, "schedule"):
            hang("sleep")
        return 1.0

    def data() -> Data:
        if chosen(how, "data set"):
            hang("sleep")
        return Data(how, seconds)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return (Stuck if chosen(how, "optimizer") else torch.optim.SGD)(parameters, lr=0.1)

    return plait.Job(
        model=lambda: Model(how), loss=loss, data=data, optimizer=optimizer, batch=batch, steps=10,
        schedule=schedule, evaluate=plait.Evaluate(lambda: Data("read" if how == "evaluation data" else "", seconds), metrics, every=5),
    )  # fmt: skip
