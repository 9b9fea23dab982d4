"""The same batches as a plait job: the batch sampler becomes an order and a token budget, and every plan takes its steps.

    plait verify examples/ports/token_budget/job.py --plan "dp=2"
    plait train  examples/ports/token_budget/job.py --plan "dp=2 microbatches=2"

`Job.weight` says that the loss is a mean over tokens: ranks have unequal numbers of them. Without a grouping of your own,
`order=plait.orders.length_grouped(lengths, batch)` is one.
"""

import torch
from before import MOST, TOKENS, Model, Sentences, grouped, loss, padded
from torch.utils.data import DataLoader

import plait


def job(steps: int = 60) -> plait.Job:
    data = Sentences()
    lengths = data.lengths()
    return plait.Job(
        model=Model,
        loss=loss,
        weight=lambda targets: (targets != -100).sum(),
        data=lambda: DataLoader(data, batch_size=MOST, collate_fn=padded),
        order=lambda seed, epoch, length: grouped(epoch, lengths),
        token_budget=plait.TokenBudget(TOKENS, data.lengths),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        batch=MOST,
        steps=steps,
    )
