"""`plait.from_trainer`: convert the Trainer of transformers to a job.

The Trainer's own methods provide its DataLoader (without unused columns, with its collator), its optimizer (with its groups without weight
decay) and its scheduler. Its loss is a mean over the labels that count (not −100) of one optimizer step
(`num_items_in_batch`), which corresponds to a job's loss with a `weight`. Arguments of parallelism and computation belong to a plan, and a
warning lists the plan's keys.
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
OVERRIDABLE = {
    "compute_loss": "pass the loss of outputs and labels: compute_loss_func=",
    "training_step": "a step of a job is one forward and backward pass of its batch",
    "get_batch_samples": "a step of a job has Job.batch samples",
    "prediction_step": "use plait.Evaluate: dataclasses.replace(job, evaluate=plait.Evaluate(…))",
}
"""Methods of the Trainer that a subclass may override, and the replacement."""
REJECTED_ARGUMENTS: dict[str, tuple[object, str]] = {
    "auto_find_batch_size": (False, "a job's batch affects its result; plait plan computes beforehand which plans fit"),
    "neftune_noise_alpha": (
        None,
        "a hook of the Trainer adds the noise to embeddings; add it in the model's forward",
    ),
    "optim_target_modules": (None, "its optimizer steps inside backward"),
}
"""Arguments -> their neutral value, and why another value is rejected."""


def from_trainer(
    trainer: "Trainer | nn.Module", args: "TrainingArguments | None" = None, *, train_dataset: "Dataset[Any] | None" = None,
    data_collator: Callable[[list[Any]], Any] | None = None, eval_dataset: "Dataset[Any] | dict[str, Dataset[Any]] | None" = None,
    compute_loss_func: Callable[..., Any] | None = None, optimizers: tuple[Any, Any] = (None, None), world: int = 1,
) -> Job:  # fmt: skip
    """Convert a `transformers.Trainer` to a job; `trainer` is one, or a model with the Trainer's arguments.

    world: number of processes of the script. The job's batch is per_device_train_batch_size × gradient_accumulation_steps × world samples,
    under every plan. Where the Trainer shuffles, the samples are in plait's order, a permutation seeded by the seed and the epoch.

    The evaluation is the loss on the held-out data, over all labels that count. Raises `PlaitError` J037 for unsupported training. Warns about
    ignored settings, and lists those that belong to a plan.
    """
    if isinstance(trainer, nn.Module):
        from transformers import Trainer

        asked = Trainer(
            model=trainer, args=args, train_dataset=train_dataset, data_collator=data_collator, eval_dataset=eval_dataset,
            compute_loss_func=compute_loss_func, optimizers=optimizers,
        )  # fmt: skip
    else:
        asked = trainer
    _check_trainer(asked)
    job = _build_job(asked, world)
    told = "\n".join([*_suggest_plan_keys(asked.args, world), *_list_left_out(asked)])
    if told:
        warnings.warn(told, stacklevel=2)
    return job


def _check_trainer(trainer: "Trainer") -> None:
    """Raise J037 with all unsupported features."""
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        what = f"from_trainer was given a {type(trainer).__name__}"
        raise PlaitError(Problem(CODE, what, fix=("a transformers.Trainer, or a model and its TrainingArguments",)))
    args, problems = trainer.args, list[Problem]()
    for name, instead in OVERRIDABLE.items():
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            what = f"{type(trainer).__name__} overrides {name}, which a job does not call"
            problems.append(Problem(CODE, what, why="it changes the training result", fix=(instead,)))
    for name, (nothing, why) in REJECTED_ARGUMENTS.items():
        if getattr(args, name, nothing) != nothing:
            what = f"TrainingArguments({name}={getattr(args, name)!r}) is not part of a job"
            problems.append(Problem(CODE, what, why=why, fix=(f"{name}={nothing!r}",)))
    if args.deepspeed:
        fix = ("remove deepspeed, and use the plan fsdp=N zero_stage=1, 2 or 3",)
        problems.append(Problem(CODE, "TrainingArguments(deepspeed=…) has an engine of its own", fix=fix))
    for callback in trainer.callback_handler.callbacks:
        if not type(callback).__module__.startswith("transformers."):
            what = f"the callback {type(callback).__name__} has no counterpart in a job"
            why = "it may change the training result: it has access to the model, the optimizer and the loop"
            problems.append(Problem(CODE, what, why=why, fix=("trainer.remove_callback(…)",)))
    if trainer.train_dataset is None:
        problems.append(Problem(CODE, "there is no train_dataset", fix=("train_dataset=…",)))
    if problems:
        raise PlaitError(problems)


def _build_job(trainer: "Trainer", world: int) -> Job:
    """Build the job, with the Trainer's own optimizer and scheduler."""
    args, own, model = trainer.args, _find_loss(trainer), trainer.model
    assert model is not None
    split = loaders.make_pair_split(CODE) if own.is_separate else loaders.keep_labels(loaders.make_pair_split(CODE))
    together = args.per_device_train_batch_size * args.gradient_accumulation_steps
    loader, kind = trainer.get_train_dataloader(), args.train_sampling_strategy
    order = None if kind in ("random", "sequential") else _make_length_order(trainer, kind, together)
    loaded, batch = loaders.read_loader(loader, split, CODE, world=world, order=order), together * world
    length = args.max_steps if args.max_steps > 0 else None
    steps = loaded.count_total_steps(batch, length, None if length else args.num_train_epochs, CODE)
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(steps, optimizer)
    return Job(
        model=loop.make_model_factory(model, CODE), loss=own.loss, data=loaded.data, batch=batch,
        optimizer=loop.make_optimizer_factory(optimizer, model, CODE), steps=steps, weight=own.weight,
        schedule=loop.make_schedule(scheduler, loaded.make_step_counter(batch), CODE), clip=args.max_grad_norm or None, seed=args.seed,
        evaluate=_build_evaluate(trainer, own, steps, loaded.steps_per_epoch(batch)), order=loaded.order,
    )  # fmt: skip


def _build_evaluate(trainer: "Trainer", own: loop.ModelLoss, steps: int, of_an_epoch: int) -> Evaluate | None:
    """Build the evaluation: the loss on held-out data, for each label that counts. `of_an_epoch`: steps per epoch."""
    args = trainer.args
    if trainer.eval_dataset is None or own.metrics is None or isinstance(trainer.eval_dataset, dict):
        return None
    held_out = loaders.read_loader(trainer.get_eval_dataloader(), loaders.make_pair_split(CODE), CODE, order=sequential)
    kind, every = str(getattr(args.eval_strategy, "value", args.eval_strategy)), 0
    if kind == "steps":
        given = float(args.eval_steps or 0)
        every = int(given if given >= 1 else given * steps)
    elif kind == "epoch":
        every = of_an_epoch
    return Evaluate(held_out.data, own.metrics, every=every)


def _find_loss(trainer: "Trainer") -> loop.ModelLoss:
    """Return the Trainer's loss: a given function, the loss with label smoothing, or the model's own."""
    assert trainer.model is not None
    own, given, smoother = loop.find_model_loss(trainer.model), trainer.compute_loss_func, trainer.label_smoother
    shifted = getattr(trainer.model, "loss_type", None) == "ForCausalLM"
    count = loop.make_label_counter(shifted)
    if given is not None:
        loss = lambda outputs, y: given(outputs, y, num_items_in_batch=count(y).sum())  # noqa: E731
        return replace(own, loss=loss, weight=count, is_separate=True)
    if smoother is not None:
        loss = lambda outputs, y: smoother(outputs, y, shift_labels=shifted)  # noqa: E731
        return replace(own, loss=loss, weight=count, is_separate=True)
    return own


def _make_length_order(trainer: "Trainer", kind: str, batch: int) -> Order:
    """Return an order with samples of similar length next to each other, by the Trainer's sampler, seeded by (seed, epoch)."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if kind != "group_by_length":
        what = f"TrainingArguments(train_sampling_strategy={kind!r}) is an order that a job does not support"
        raise PlaitError(Problem(CODE, what, fix=("group_by_length, random or sequential", "Job.order")))
    data, column = vars(trainer)["train_dataset"], trainer.args.length_column_name
    known = data[column] if column in (getattr(data, "column_names", None) or ()) else None
    sampler = LengthGroupedSampler(batch, dataset=data, lengths=None if known is None else list(known))

    def order(seed: int, epoch: int, length: int) -> list[int]:
        sampler.generator = torch.Generator().manual_seed(seed + epoch)
        return list(sampler)

    return order


def _suggest_plan_keys(args: "TrainingArguments", world: int) -> list[str]:
    """Return a warning with the plan keys for the arguments."""
    keys = [f"dp={world}"] if world > 1 else []
    keys += [f"microbatches={args.gradient_accumulation_steps}"] if args.gradient_accumulation_steps > 1 else []
    keys += [f"fsdp={world}"] if args.fsdp and world > 1 else []
    if args.fsdp and world > 1:
        keys.remove(f"dp={world}")
    keys += ["precision=bf16"] if args.bf16 else ["precision=fp16"] if args.fp16 else ["precision=tf32"] if args.tf32 else []
    keys += ["activation_checkpointing=full"] if args.gradient_checkpointing else []
    keys += ["compile=true"] if args.torch_compile else []
    return [f'settings of computation belong to a plan and not to the job: --plan "{" ".join(keys)}"'] if keys else []


def _list_left_out(trainer: "Trainer") -> list[str]:
    """List the Trainer's settings that do not affect training and are ignored."""
    found = []
    if trainer.compute_metrics is not None:
        found.append(
            "compute_metrics needs all predictions at once and is ignored; use metrics per sample in Job.evaluate"
        )
    if isinstance(trainer.eval_dataset, dict):
        found.append("there are several eval_datasets and a job supports one, so none is evaluated")
    if trainer.args.load_best_model_at_end:
        found.append("load_best_model_at_end is ignored: a job ends with its last weights")
    ours = [type(c).__name__ for c in trainer.callback_handler.callbacks if type(c).__name__ == "EarlyStoppingCallback"]
    return [*found, *(f"{name} is ignored" for name in ours)]
