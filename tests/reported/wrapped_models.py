# wrappers that scripts leave in a model: converted SyncBatchNorm, torch.compile, DataParallel, ScriptModule parts
import torch
import torch.nn.functional as F
from torch import nn

import plait


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return x, int(x.mean() > 0)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def job(kind: str = "sync"):
    m = {
        "sync": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(net()),
        "compile": lambda: torch.compile(net(), backend="eager"),
        "dp": lambda: nn.DataParallel(net()),
        "script": lambda: torch.jit.script(net()),
        "last": lambda: net().to(memory_format=torch.channels_last),
    }[kind]
    return plait.Job(
        model=m,
        loss=F.cross_entropy,
        data=D,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        batch=16,
        steps=12,
    )
