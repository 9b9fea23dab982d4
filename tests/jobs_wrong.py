"""Jobs with one typical mistake each: `plait train jobs_wrong.py:NAME`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) + i
        return x, x * 2


class Dicts(Numbers):
    def __getitem__(self, i: int) -> Any:
        return {"input_ids": torch.arange(4), "classes": torch.arange(4)}


class Triples(Numbers):
    def __getitem__(self, i: int) -> Any:
        return (*super().__getitem__(i), 1)


class Ragged(Numbers):
    def __getitem__(self, i: int) -> Any:
        return torch.ones(4), torch.ones(1 + i)


class Empty(Numbers):
    def __len__(self) -> int:
        return 0


def right(**changes: Any) -> plait.Job:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 4), "loss": nn.functional.mse_loss, "data": Numbers,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "batch": 8, "steps": 2,
    }  # fmt: skip
    return plait.Job(**{**fields, **changes})


def job(width: int = 4, rate: float = 0.1, name: str = "x", flag: bool = False) -> plait.Job:
    return right()


def needs(depth: int) -> plait.Job:
    return right()


def not_a_job() -> Any:
    return {"model": nn.Linear(4, 4)}


def raises() -> plait.Job:
    raise KeyError("a key of mine")


def exits() -> plait.Job:
    raise SystemExit("bye")


def model_instance() -> plait.Job:
    return right(model=nn.Linear(4, 4))


def model_returns_class() -> plait.Job:
    return right(model=lambda: nn.Linear)


def model_without_parameters() -> plait.Job:
    return right(model=nn.Tanh)


def all_frozen() -> plait.Job:
    return right(model=lambda: nn.Linear(4, 4).requires_grad_(False))


def optimizer_instance() -> plait.Job:
    return right(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def optimizer_of_names() -> plait.Job:
    return right(optimizer=lambda named: torch.optim.SGD([p for name, p in named if "bias" not in name], lr=0.1))


def optimizer_is_none() -> plait.Job:
    return right(optimizer=lambda parameters: None)


def schedule_class() -> plait.Job:
    return right(schedule=torch.optim.lr_scheduler.CosineAnnealingLR)


def schedule_of_two() -> plait.Job:
    return right(schedule=lambda step, total: 1.0)


def schedule_of_none() -> plait.Job:
    return right(schedule=lambda samples: None)


def loss_class() -> plait.Job:
    return right(loss=nn.MSELoss)


def loss_of_vector() -> plait.Job:
    return right(loss=lambda outputs, targets: (outputs - targets).square())


def loss_of_float() -> plait.Job:
    return right(loss=lambda outputs, targets: float((outputs - targets).square().mean()))


def loss_of_one() -> plait.Job:
    return right(loss=lambda outputs: outputs.mean())


def batch_of_zero() -> plait.Job:
    return right(batch=0)


def batch_of_float() -> plait.Job:
    return right(batch=8.0)


def steps_negative() -> plait.Job:
    return right(steps=-1)


def clip_of_zero() -> plait.Job:
    return right(clip=0.0)


def unknown_field() -> plait.Job:
    return right(epochs=3)


def data_batches() -> plait.Job:
    return right(data=lambda: DataLoader(Numbers(), batch_size=8))


def data_dicts() -> plait.Job:
    return right(data=Dicts)


def data_triples() -> plait.Job:
    return right(data=Triples)


def data_ragged() -> plait.Job:
    return right(data=Ragged)


def data_empty() -> plait.Job:
    return right(data=Empty)


def data_number() -> plait.Job:
    return right(data=lambda: 3)


def wrong_features() -> plait.Job:
    return right(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 4)))


def metrics_tensor() -> plait.Job:
    return right(evaluate=plait.Evaluate(Numbers, lambda outputs, targets: outputs - targets))


def metrics_mean() -> plait.Job:
    return right(evaluate=plait.Evaluate(Numbers, lambda outputs, targets: {"error": (outputs - targets).mean()}))


def evaluate_empty() -> plait.Job:
    return right(evaluate=plait.Evaluate(Empty, lambda outputs, targets: {"error": outputs - targets}))


def units_unknown() -> plait.Job:
    return right(units=("layers.*",))


def adafactor() -> plait.Job:
    two = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    return right(model=two, optimizer=lambda parameters: torch.optim.Adafactor(parameters))
