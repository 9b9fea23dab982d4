"""The moving average of the weights (EMA, Polyak averaging), split over ranks like the weights.

After a step, average ← decay × average + (1 − decay) × weights, for every element. So each rank averages its own parts of the
parameters, replicas stay equal, and no messages are sent. Only trained parameters are averaged. Frozen parameters and buffers are
used as they are.

A rank averages `SplitModel.own`. Under `offload=optimizer` it averages the host's copy of these, which needs no device memory.

For an evaluation, the values of average and weights are swapped, and swapped back afterwards. No second model is made.

An optimizer with two modes (`model/optimizers.py`) evaluates other weights than it trains. The average is taken over those
weights. Without an average, the evaluation uses them directly.

Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; `torch.optim.swa_utils` does the same on one
device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from plait.model.optimizers import evaluation_mode
from plait.parallel.rank_model import RankModel, SplitModel
from plait.tensors.moving_average import MovingAverage


def install_average(split: SplitModel) -> SplitModel:
    """Start the moving average if the job has one. Call it when the rank's parts are final."""
    if split.job.ema is None:
        return split
    own = {name: weight for name, weight in split.params.items() if weight.requires_grad}
    hosted = split.techniques.masters if split.plan.offload == "optimizer" and split.techniques.masters else {}
    average = MovingAverage(split.job.ema, own, {name: hosted.get(name, weight) for name, weight in own.items()})
    return split.with_techniques(average=average)


def use_eval_mode(rank_model: RankModel) -> AbstractContextManager[None]:
    """Context in which the model has the weights of the optimizer's eval mode, if it has one. All ranks call it."""

    def copy_masters() -> None:
        for copy in rank_model.hooks.masters_written:
            copy()
        rank_model.discard_gathered()

    return evaluation_mode(rank_model.optimizer, copy_masters)


@contextmanager
def use_evaluated_weights(rank_model: RankModel) -> Iterator[None]:
    """Context in which the model has the weights to evaluate: the average if there is one, else those of the optimizer's eval mode.
    All ranks call it."""
    average = rank_model.techniques.average
    if average is None or not average.moved:
        with use_eval_mode(rank_model):
            yield
        return
    try:
        with average.use_average():
            rank_model.discard_gathered()
            yield
    finally:
        rank_model.discard_gathered()
