"""The training of before.py as a job: the same model, data, optimizer, schedule and average; the loop is plait's.

    plait train  examples/ports/vit_ema/job.py --nproc 2
    plait verify examples/ports/vit_ema/job.py --plan "fsdp=2"
    plait checkpoint export runs/latest --ema --output averaged.safetensors

Mixup draws its partner and its ratio in `__getitem__`, where random numbers belong to the sample, so every plan mixes the same images. In
a `collate`, it would mix only images of the same rank.
"""

from typing import Any

import torch
from stripes import BATCH, STEPS, Mixup, Stripes, vit
from torch import Tensor
from torch.nn import functional as F
from transformers import get_cosine_schedule_with_warmup

import plait


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy with the mixed classes."""
    return F.cross_entropy(outputs.logits, targets)


def accuracy(outputs: Any, targets: Tensor) -> dict[str, Tensor]:
    """Return 1 for each image whose predicted class is correct."""
    return {"accuracy": (outputs.logits.argmax(-1) == targets).float()}


def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    """AdamW without weight decay on biases and norms."""
    groups = plait.parameter_groups(parameters, {"*bias": {"weight_decay": 0.0}, "*layernorm*": {"weight_decay": 0.0}})
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.05)


def job(steps: int = STEPS, batch: int = BATCH, decay: float = 0.9) -> plait.Job:
    return plait.Job(
        model=vit,
        loss=loss,
        data=lambda: Mixup(Stripes(512, 1)),
        optimizer=optimizer,
        batch=batch,
        steps=steps,
        schedule=plait.schedule_of(lambda o: get_cosine_schedule_with_warmup(o, steps // 10, steps), batch),
        clip=1.0,
        ema=plait.EMA(decay),
        evaluate=plait.Evaluate(lambda: Stripes(128, 2), accuracy),
    )
