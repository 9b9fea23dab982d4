"""`plait.from_loop`: the objects of a training loop, the very ones that a script gives to `accelerator.prepare`, as a job.

What the loop does with them is said in words: how many steps or epochs, how many batches it accumulates, on how many processes it
ran, where it clips. The job's batch is what all of these make together in one optimizer step.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from plait import Evaluate, Job, PlaitError
from plait.config.errors import Problem
from plait.data.sampling import Order
from plait.integrations.adapters import loaders, optimizers, own_losses, schedulers

CODE = "J038"


def from_loop(
    model: nn.Module, optimizer: object, dataloader: object, loss: Callable[[Any, Any], Any] | None = None, scheduler: object = None, *,
    steps: int | None = None, epochs: int | None = None, accumulation: int = 1, world: int = 1, clip: float | None = None,
    split: loaders.Split | None = None, weight: Callable[[Any], Any] | None = None, order: Order | None = None,
    per_epoch: bool = False, seed: int = 0, evaluate: Evaluate | None = None,
) -> Job:  # fmt: skip
    """The job that a training loop over these objects is.

    model: a module, whose weights are where training starts. optimizer: a torch optimizer of its parameters that has taken no
    step, or a function from parameters to one. dataloader: its data set, `collate_fn`, `batch_size`, `drop_last` and whether it
    shuffles are used. loss: (outputs, targets) -> the mean over the samples; None: the model computes it when it is given the whole
    batch, as those of transformers do with labels (see `plait/integrations/adapters/own_losses.py`). scheduler: one of torch that steps after
    every optimizer step, or with `per_epoch` after every epoch; or a function from samples seen to a factor.

    steps or epochs: how long. accumulation, world: batches that the loop accumulates, and processes it ran on; a step of the job
    has batch_size × accumulation × world samples. clip: the norm given to `clip_grad_norm_`. split: a batch -> (inputs,
    targets), where it is neither a pair nor a dict with labels. weight: as `Job.weight`, for a loss that is a mean over something
    else than samples. order: as `Job.order`, instead of the loader's sampler.

    Raises `PlaitError` J038 for what a job cannot mean.
    """
    own = own_losses.of(model) if loss is None and isinstance(model, nn.Module) else None
    cut = split or loaders.pair(CODE)
    if own is not None and not own.apart:
        cut = loaders.labels_kept(cut)
    loaded = loaders.read(dataloader, cut, CODE, world=world, order=order)
    if not loaded.batch:
        fix = ("torch.utils.data.DataLoader(dataset, batch_size=N, shuffle=True)",)
        raise PlaitError(Problem(CODE, f"the data is a {type(dataloader).__name__}, not a DataLoader", fix=fix))
    batch = loaded.batch * accumulation * world
    if own is not None:
        loss, weight = own.loss, weight or own.weight
    make = optimizer if callable(optimizer) else optimizers.made_again(optimizer, model, CODE)
    schedule = scheduler if callable(scheduler) else None
    if scheduler is not None and schedule is None:
        clock = loaded.epochs_made(CODE) if per_epoch else loaded.steps_made(batch)
        schedule = schedulers.factor(scheduler, clock, CODE)
    return Job(
        model=optimizers.handed_out(model, CODE), loss=_given(loss), data=loaded.data, optimizer=make, batch=batch,
        steps=loaded.length_of(batch, steps, epochs, CODE), weight=weight, schedule=schedule, clip=clip, seed=seed,
        evaluate=evaluate, order=loaded.order,
    )  # fmt: skip


def _given(loss: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    if loss is None:
        raise PlaitError(Problem(CODE, "there is no loss, and no model that could have its own", fix=("loss=…",)))
    return loss
