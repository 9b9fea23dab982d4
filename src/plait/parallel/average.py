"""The moving average of the weights (EMA, Polyak averaging), kept in parts as the weights are.

After a step, average ← decay × average + (1 − decay) × weights, element by element. So each rank averages what it holds of every
parameter, copies of a part stay copies, and nothing is sent. It is numbers that were trained which are averaged: parameters that
are frozen, and buffers, are themselves.

What a rank averages is `SplitModel.own`, or under `offload=optimizer` its copy on the host, which takes nothing of the device.

To evaluate, the numbers of average and weights change places, and afterwards change back. No second model is made.

An optimizer with two modes (`model/optimizers.py`) evaluates other weights than it trains: those are averaged, and where there is
no average, those are evaluated.

Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; `torch.optim.swa_utils` does the same on one device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from plait.model.optimizers import evaluation_mode
from plait.parallel.rank_model import RankModel, SplitModel
from plait.tensors.moving_average import MovingAverage


def apply(split: SplitModel) -> SplitModel:
    """Begin an average, if the job wants one: once the rank's parts are what they stay."""
    if split.job.ema is None:
        return split
    own = {name: weight for name, weight in split.params.items() if weight.requires_grad}
    hosted = split.techniques.masters if split.plan.offload == "optimizer" and split.techniques.masters else {}
    average = MovingAverage(split.job.ema, own, {name: hosted.get(name, weight) for name, weight in own.items()})
    return split.using(average=average)


def in_eval_mode(rank_model: RankModel) -> AbstractContextManager[None]:
    """Inside, the model has the weights of the optimizer's eval mode, if it has one. All ranks call it."""

    def written() -> None:
        for copy in rank_model.hooks.masters_written:
            copy()
        rank_model.forget_gathered()

    return evaluation_mode(rank_model.optimizer, written)


@contextmanager
def evaluated_weights(rank_model: RankModel) -> Iterator[None]:
    """Inside, the model has the weights that are evaluated: their average if there is one, else those of the optimizer's eval mode.
    All ranks call it."""
    average = rank_model.techniques.average
    if average is None or not average.moved:
        with in_eval_mode(rank_model):
            yield
        return
    try:
        with average.in_place():
            rank_model.forget_gathered()
            yield
    finally:
        rank_model.forget_gathered()
