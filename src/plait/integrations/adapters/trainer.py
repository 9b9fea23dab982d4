"""`plait.from_trainer`: the Trainer of transformers as a job.

The Trainer itself is asked for what it would train with: its data loader (unused columns removed, its collator), its optimizer (the
groups without weight decay by its own rule), its scheduler. Its loss is a mean over the labels that count (not −100) of all batches
of one optimizer step (`num_items_in_batch`), which is what a job's loss with a `weight` is. Arguments that say how to split or to
compute belong to a plan: a warning names the keys.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from plait import Evaluate, Job, PlaitError
from plait.config.errors import Problem
from plait.data.orders import sequential
from plait.data.sampling import Order
from plait.integrations.adapters import loaders, loop

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

CODE = "J037"
OVERRIDDEN = {
    "compute_loss": "give the loss of outputs and labels: compute_loss_func=",
    "training_step": "a step of a job is one forward and backward pass of its batch",
    "get_batch_samples": "a step of a job has Job.batch samples",
    "prediction_step": "give plait.Evaluate: dataclasses.replace(job, evaluate=plait.Evaluate(…))",
}
"""Methods of the Trainer that a class of one's own may have overridden, and what to do instead."""
REFUSED: dict[str, tuple[object, str]] = {
    "auto_find_batch_size": (False, "a job's batch is part of what it trains; plait plan tells beforehand what fits"),
    "neftune_noise_alpha": (
        None,
        "noise on embeddings is put in by a hook of the Trainer; add it in the model's forward",
    ),
    "optim_target_modules": (None, "its optimizer steps inside backward"),
}
"""Arguments -> the value that means nothing, and why another one is refused."""


def from_trainer(
    trainer: "Trainer | nn.Module", args: "TrainingArguments | None" = None, *, train_dataset: "Dataset[Any] | None" = None,
    data_collator: Callable[[list[Any]], Any] | None = None, eval_dataset: "Dataset[Any] | dict[str, Dataset[Any]] | None" = None,
    compute_loss_func: Callable[..., Any] | None = None, optimizers: tuple[Any, Any] = (None, None), world: int = 1,
) -> Job:  # fmt: skip
    """The job that a `transformers.Trainer` trains; `trainer` is one, or a model with the arguments that one is made of.

    world: on how many processes the script ran. The job's batch is per_device_train_batch_size × gradient_accumulation_steps ×
    world samples, under every plan. Its samples come in plait's order, a permutation keyed by the seed, where the Trainer shuffles.

    Evaluation is the loss on the held-out data, over all labels that count. Raises `PlaitError` J037 for what a job cannot mean.
    Warns of what is left out, and names what belongs to a plan.
    """
    if isinstance(trainer, nn.Module):
        from transformers import Trainer

        asked = Trainer(
            model=trainer, args=args, train_dataset=train_dataset, data_collator=data_collator, eval_dataset=eval_dataset,
            compute_loss_func=compute_loss_func, optimizers=optimizers,
        )  # fmt: skip
    else:
        asked = trainer
    _refuse(asked)
    job = _job(asked, world)
    told = "\n".join([*_plan_keys(asked.args, world), *_left_out(asked)])
    if told:
        warnings.warn(told, stacklevel=2)
    return job


def _refuse(trainer: "Trainer") -> None:
    """J037 of all that a job cannot mean."""
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        what = f"from_trainer was given a {type(trainer).__name__}"
        raise PlaitError(Problem(CODE, what, fix=("a transformers.Trainer, or a model and its TrainingArguments",)))
    args, problems = trainer.args, list[Problem]()
    for name, instead in OVERRIDDEN.items():
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            what = f"{type(trainer).__name__} overrides {name}, which a job does not call"
            problems.append(Problem(CODE, what, why="it changes what is trained", fix=(instead,)))
    for name, (nothing, why) in REFUSED.items():
        if getattr(args, name, nothing) != nothing:
            what = f"TrainingArguments({name}={getattr(args, name)!r}) is not part of a job"
            problems.append(Problem(CODE, what, why=why, fix=(f"{name}={nothing!r}",)))
    if args.deepspeed:
        fix = ("leave deepspeed out, and give the plan fsdp=N zero_stage=1, 2 or 3",)
        problems.append(Problem(CODE, "TrainingArguments(deepspeed=…) has an engine of its own", fix=fix))
    for callback in trainer.callback_handler.callbacks:
        if not type(callback).__module__.startswith("transformers."):
            what = f"the callback {type(callback).__name__} is not carried into a job"
            why = "it may change what is trained: it is given the model, the optimizer and the control of the loop"
            problems.append(Problem(CODE, what, why=why, fix=("trainer.remove_callback(…)",)))
    if trainer.train_dataset is None:
        problems.append(Problem(CODE, "there is no train_dataset", fix=("train_dataset=…",)))
    if problems:
        raise PlaitError(problems)


def _job(trainer: "Trainer", world: int) -> Job:
    """The job, with the Trainer's own optimizer and scheduler."""
    args, own, model = trainer.args, _loss(trainer), trainer.model
    assert model is not None
    split = loaders.pair(CODE) if own.apart else loaders.labels_kept(loaders.pair(CODE))
    together = args.per_device_train_batch_size * args.gradient_accumulation_steps
    loader, kind = trainer.get_train_dataloader(), args.train_sampling_strategy
    order = None if kind in ("random", "sequential") else _grouped(trainer, kind, together)
    loaded, batch = loaders.read(loader, split, CODE, world=world, order=order), together * world
    length = args.max_steps if args.max_steps > 0 else None
    steps = loaded.length_of(batch, length, None if length else args.num_train_epochs, CODE)
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(steps, optimizer)
    return Job(
        model=loop.model_handed_out(model, CODE), loss=own.loss, data=loaded.data, batch=batch,
        optimizer=loop.optimizer_made_again(optimizer, model, CODE), steps=steps, weight=own.weight,
        schedule=loop.factor(scheduler, loaded.steps_made(batch), CODE), clip=args.max_grad_norm or None, seed=args.seed,
        evaluate=_evaluate(trainer, own, steps, loaded.steps(batch)), order=loaded.order,
    )  # fmt: skip


def _evaluate(trainer: "Trainer", own: loop.OwnLoss, steps: int, of_an_epoch: int) -> Evaluate | None:
    """The loss on held-out data, for each label that counts. `steps`, `of_an_epoch`: of the training, and of one epoch."""
    args = trainer.args
    if trainer.eval_dataset is None or own.metrics is None or isinstance(trainer.eval_dataset, dict):
        return None
    held_out = loaders.read(trainer.get_eval_dataloader(), loaders.pair(CODE), CODE, order=sequential)
    kind, every = str(getattr(args.eval_strategy, "value", args.eval_strategy)), 0
    if kind == "steps":
        given = float(args.eval_steps or 0)
        every = int(given if given >= 1 else given * steps)
    elif kind == "epoch":
        every = of_an_epoch
    return Evaluate(held_out.data, own.metrics, every=every)


def _loss(trainer: "Trainer") -> loop.OwnLoss:
    """The Trainer's loss: a function that it was given, the one with smoothed labels, or the model's own."""
    assert trainer.model is not None
    own, given, smoother = loop.of(trainer.model), trainer.compute_loss_func, trainer.label_smoother
    shifted = getattr(trainer.model, "loss_type", None) == "ForCausalLM"
    count = loop.counted(shifted)
    if given is not None:
        loss = lambda outputs, y: given(outputs, y, num_items_in_batch=count(y).sum())  # noqa: E731
        return replace(own, loss=loss, weight=count, apart=True)
    if smoother is not None:
        loss = lambda outputs, y: smoother(outputs, y, shift_labels=shifted)  # noqa: E731
        return replace(own, loss=loss, weight=count, apart=True)
    return own


def _grouped(trainer: "Trainer", kind: str, batch: int) -> Order:
    """Samples of similar length beside each other, by the Trainer's own rule, drawn anew for every epoch from (seed, epoch)."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if kind != "group_by_length":
        what = f"TrainingArguments(train_sampling_strategy={kind!r}) is not an order that a job can have"
        raise PlaitError(Problem(CODE, what, fix=("group_by_length, random or sequential", "Job.order")))
    data, column = vars(trainer)["train_dataset"], trainer.args.length_column_name
    known = data[column] if column in (getattr(data, "column_names", None) or ()) else None
    sampler = LengthGroupedSampler(batch, dataset=data, lengths=None if known is None else list(known))

    def order(seed: int, epoch: int, length: int) -> list[int]:
        sampler.generator = torch.Generator().manual_seed(seed + epoch)
        return list(sampler)

    return order


def _plan_keys(args: "TrainingArguments", world: int) -> list[str]:
    """What of the arguments a plan says."""
    keys = [f"dp={world}"] if world > 1 else []
    keys += [f"microbatches={args.gradient_accumulation_steps}"] if args.gradient_accumulation_steps > 1 else []
    keys += [f"fsdp={world}"] if args.fsdp and world > 1 else []
    if args.fsdp and world > 1:
        keys.remove(f"dp={world}")
    keys += ["precision=bf16"] if args.bf16 else ["precision=fp16"] if args.fp16 else ["precision=tf32"] if args.tf32 else []
    keys += ["activation_checkpointing=full"] if args.gradient_checkpointing else []
    keys += ["compile=true"] if args.torch_compile else []
    return [f'a plan says how to compute, and not the job: --plan "{" ".join(keys)}"'] if keys else []


def _left_out(trainer: "Trainer") -> list[str]:
    """What of a Trainer is not training, and is left out."""
    found = []
    if trainer.compute_metrics is not None:
        found.append(
            "compute_metrics looks at all predictions at once and is left out: give Job.evaluate metrics per sample"
        )
    if isinstance(trainer.eval_dataset, dict):
        found.append("there are several eval_datasets, and a job has one: none is evaluated")
    if trainer.args.load_best_model_at_end:
        found.append("load_best_model_at_end is left out: a job ends with the weights that it trained")
    ours = [type(c).__name__ for c in trainer.callback_handler.callbacks if type(c).__name__ == "EarlyStoppingCallback"]
    return [*found, *(f"{name} is left out" for name in ours)]
