"""A LightningModule whose forward is its training step, so that it is a model like any other.

A job's model is called with a batch and returns the loss. The module stays itself: its class becomes a subclass of its own, with
the parameters, names and submodules as they were, so that plans find its units and its weights load where they came from. Inside a
step the module may call itself (`self(x)`): that is its own forward. What a step asks of a Trainer has an answer where a job has
one, and is refused by name where it has none.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from plait import PlaitError
from plait.config.errors import FAILED, Problem

CODE = "J036"
TRAINING, HELD_OUT = "batch", "held_out"
"""What a batch is called among the inputs: the first goes to training_step, the second to validation_step."""
UNKNOWN = {
    "current_epoch": "the model does not know how far training is: a schedule does (Job.schedule)",
    "global_step": "the model does not know how far training is: plait.log records a number of every step",
    "global_rank": "a job is written for one device",
    "local_rank": "a job is written for one device",
    "optimizers": "a step of a job is forward, backward and update; the optimizer is out of the model's reach",
    "lr_schedulers": "a step of a job is forward, backward and update; the schedule is out of the model's reach",
    "manual_backward": "a job's backward pass comes after its loss",
    "clip_gradients": "give the limit to the job: clip=",
    "toggle_optimizer": "a job has one optimizer",
    "all_gather": "a loss over the whole batch uses plait.global_batch",
}
"""What a LightningModule has of a Trainer and a job does not -> why."""
COMPARED = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__",
            "__floordiv__", "__truediv__", "__index__", "__int__", "__float__", "__bool__", "__hash__", "__str__", "__repr__",
            "__format__", "__iter__", "__getattr__")  # fmt: skip


def refuse(what: str, why: str, fix: str = "") -> NoReturn:
    """J036 of something that a step does."""
    raise PlaitError(Problem(CODE, what, why=why, fix=(fix,) if fix else ()), FAILED)


def _used(*_: object) -> NoReturn:
    refuse(
        "a step uses batch_idx, which a job does not have",
        "a batch is cut over devices and into micro-batches, so its parts have no number of their own",
        "def training_step(self, batch, batch_idx):    without a use of batch_idx",
    )


BatchIndex = type(
    "BatchIndex",
    (),
    {"__doc__": "The index of a batch, which may be handed on and not used."} | dict.fromkeys(COMPARED, _used),
)


class TrainerFacts:
    """What a job knows of what a Trainer knows: how long it trains, and that it is on one device."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"the module asks for self.trainer.{name}", f"a job has no Trainer; it knows {', '.join(sorted(facts))}")


class _Steps(nn.Module):
    """Comes before the module's own class among its bases."""

    inside = False
    facts: TrainerFacts
    logged: dict[str, Any]
    own: type[nn.Module]
    training_step: Callable[..., Any]
    validation_step: Callable[..., Any]
    log_outside: Callable[..., None] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.inside:
            return self.own.forward(self, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, batch: object = None, held_out: object = None) -> Any:
        """The loss of a batch; of a held-out one what validation_step logs, as values for each sample."""
        with self._step():
            if held_out is not None:
                return self._validated(held_out)
            return loss_of(_called(self.training_step, batch))

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.__dict__["inside"], self.__dict__["logged"] = True, {}
        try:
            yield
        finally:
            self.__dict__["inside"] = False

    def _validated(self, batch: object) -> dict[str, Tensor]:
        self.__dict__["collecting"] = True
        try:
            _called(self.validation_step, batch)
        finally:
            self.__dict__["collecting"] = False
        count = samples_of(batch)
        return {name: per_sample(name, value, count) for name, value in self.logged.items()}

    def log(self, name: str, value: object, *_: object, **__: object) -> None:
        """In validation a metric; in training a number beside the loss."""
        if hasattr(value, "compute"):
            refuse(
                f"self.log({name!r}) is given a {type(value).__name__}, which counts over batches",
                "its state would be that of one rank; a metric of a job is a mean over samples",
                f"self.log({name!r}, value)    with the mean over the samples of the batch",
            )
        if self.__dict__.get("collecting"):
            self.logged[name] = value
        elif self.log_outside is not None:
            self.log_outside(name, value)

    def log_dict(self, dictionary: Mapping[str, object], *_: object, **__: object) -> None:
        for name, value in dictionary.items():
            self.log(name, value)

    def print(self, *_: object, **__: object) -> None:
        """Nothing: every rank would."""

    @property
    def trainer(self) -> TrainerFacts:
        """Stands for the Trainer."""
        return self.facts

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))


for _name, _why in UNKNOWN.items():
    setattr(_Steps, _name, property(lambda self, name=_name, why=_why: _unknown(self, name, why)))


def _unknown(module: _Steps, name: str, why: str) -> Any:
    if module.inside:
        refuse(f"a step of {module.own.__name__} uses self.{name}", why)
    if name in ("current_epoch", "global_step", "global_rank", "local_rank"):  # before training, as without a Trainer
        return 0
    raise AttributeError(name)


def _called(step: Callable[..., Any], batch: object) -> Any:
    """A step with its batch, and an index if it wants one."""
    code = getattr(step, "__func__", step).__code__
    return step(batch, BatchIndex()) if code.co_argcount > 2 else step(batch)


def loss_of(returned: object) -> Tensor:
    """What training_step returned: the loss, or a dict with it."""
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = "None, which leaves the batch out" if returned is None else f"a {type(returned).__name__}"
        refuse("training_step returned no loss", f"it returned {told}", "return loss,  or  {'loss': loss}")
    return loss


def samples_of(batch: object) -> int:
    """How many samples a batch has: the first dim of its first tensor."""
    stack: list[object] = [batch]
    while stack:
        one = stack.pop(0)
        if isinstance(one, Tensor) and one.dim():
            return one.shape[0]
        stack = [*(one.values() if isinstance(one, dict) else one if isinstance(one, (tuple, list)) else ()), *stack]
    refuse("a held-out batch has no tensor", "the number of its samples is needed for the mean of a metric")


def per_sample(name: str, value: object, count: int) -> Tensor:
    """What was logged of a batch, as one value for each of its samples: the mean of these is the mean over the samples."""
    value = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if value.numel() not in (1, count):
        refuse(f"self.log({name!r}) is given a tensor of shape {list(value.shape)}", f"the batch has {count} samples")
    return value.detach().reshape(-1).expand(count) if value.numel() == 1 else value.detach().reshape(-1)


def as_model(module: nn.Module, facts: dict[str, Any], log: Callable[..., None] | None) -> None:
    """Make the module's forward its training step. `facts`: what `self.trainer` knows."""
    own = type(module)
    fields = {"own": own, "facts": TrainerFacts(facts), "log_outside": staticmethod(log) if log is not None else None}
    module.__class__ = type(
        own.__name__, (_Steps, own), {**fields, "__module__": own.__module__, "__doc__": own.__doc__}
    )
