"""The same batches as a plait job: an order and a token budget replace the batch sampler, and every plan makes the same steps.

    plait verify examples/ports/token_budget/job.py --plan "dp=2"
    plait train  examples/ports/token_budget/job.py --plan "dp=2 microbatches=2"

`Job.weight` makes the loss a mean over tokens, because ranks have unequal numbers of tokens. If you have no grouping of your own,
use `order=plait.orders.length_grouped(lengths, batch)`.
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
