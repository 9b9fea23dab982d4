"""The names of parameters inside `Job.optimizer`, and groups of parameters by their names.

A job's optimizer is made of a list of parameters, as torch's are. What it does with them may depend on their names: no weight decay
for norms, a lower rate for the backbone, Muon for matrices of layers and AdamW for the rest. `named` gives the names of the
whole model, under every plan, where a rank has parts of tensors, or others in their place: whoever makes a job's optimizer
(the engine, the trials on small stand-ins, the proof) calls `optimizer_of` with names, and `named` finds them by identity.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.phases import JointOptimizer
from plait.launch import one_device
from plait.model.optimizers import train_mode

Named = tuple[str, Any]
"""Name and parameter."""
Choice = str | Callable[[str, Any], bool]
"""A pattern of names, in which * stands for anything, or (name, parameter) -> whether it is meant."""


@dataclass
class _Known:
    """The names of the parameters that an optimizer is being made of, by identity; whether they were asked for."""

    names: dict[int, str]
    asked: bool = False


_KNOWN: ContextVar[_Known | None] = ContextVar("names of parameters", default=None)


def optimizer_of(job: Job, parameters: Mapping[str, Tensor]) -> Any:
    """What `Job.optimizer` makes of those of these parameters, by name, that are trained. They may be stand-ins, or parts. An optimizer
    with two modes is in train mode."""
    make, trained = job.optimizer, {n: p for n, p in parameters.items() if p.requires_grad}
    with naming(parameters), one_device.naming("the job's optimizer"):
        made = make.of(trained) if isinstance(make, JointOptimizer) else make([*trained.values()])
    if type(made).__module__.startswith("torch.distributed"):  # ZeroRedundancyOptimizer and others
        raise one_device.communicates(f"the job's optimizer is a {type(made).__name__}, which communicates by itself")
    if isinstance(made, Optimizer):
        if "defaults" not in vars(made):  # a wrapper that never called Optimizer.__init__ has no hooks
            made.__setstate__({"defaults": {}})
        train_mode(made)
    return made


def asks_for_names(job: Job, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the job's optimizer looks at the names of its parameters, found by making it of these stand-ins."""
    with naming(parameters) as known:
        try:
            job.optimizer([p for p in parameters.values() if p.requires_grad])
        except Exception:  # it may choose by size: what it asked for until then is known
            return known.asked
    return known.asked


@contextmanager
def naming(parameters: Mapping[str, Tensor]) -> Iterator[_Known]:
    """Inside, `named` knows these parameters."""
    known = _Known({id(p): name for name, p in parameters.items()})
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def named(parameters: Iterable[Any]) -> list[Named]:
    """(name, parameter) of the parameters that `Job.optimizer` is given, as `model.named_parameters()` of the whole model has
    them, under every plan.

    >>> optimizer=lambda parameters: torch.optim.AdamW(plait.named(parameters), lr=3e-4)     # doctest: +SKIP

    J040 outside of `Job.optimizer`, and for what is none of its parameters.
    """
    known, given = _KNOWN.get(), list(parameters)
    if known is None or any(id(p) not in known.names for p in given):
        what = "plait.named knows the names of the parameters that Job.optimizer is given, inside it, and no others"
        why = (
            "no optimizer is being made" if known is None else "one of these is another object than those it was given"
        )
        raise PlaitError(
            Problem("J040", what, why=why, fix=("optimizer=lambda parameters: … plait.named(parameters) …",))
        )
    known.asked = True
    return [(known.names[id(p)], p) for p in given]


def parameter_groups(
    parameters: Iterable[Any], groups: Mapping[Choice, Mapping[str, Any]], **rest: Any
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: each parameter in the group of the first choice that means it.

    `groups`: a pattern of names, in which * stands for anything ("*.bias"), or a function (name, parameter) -> bool, and the
    hyperparameters of what it means. `rest`: hyperparameters of the others, which come last.

    >>> optimizer=lambda parameters: torch.optim.AdamW(plait.parameter_groups(      # doctest: +SKIP
    ...     parameters, {"*norm*": {"weight_decay": 0.0}, "*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-3}}), lr=1e-4)

    A group that all of its parameters were taken from by an earlier one is left out. J041 for a choice that means nothing.
    """
    pairs, made = named(parameters), list[dict[str, Any]]()
    choices = [(choice, _meaning(choice)) for choice in groups]
    lost = [choice for choice, means in choices if not any(means(*pair) for pair in pairs)]
    if lost:
        raise PlaitError([_nothing(choice, [name for name, _ in pairs]) for choice in lost])
    taken: dict[int, list[Any]] = {i: [] for i in range(len(choices) + 1)}
    for pair in pairs:
        taken[next((i for i, (_, means) in enumerate(choices) if means(*pair)), len(choices))].append(pair[1])
    for i, hyperparameters in enumerate((*groups.values(), rest)):
        if taken[i]:
            made.append({**hyperparameters, "params": taken[i]})
    return made


def layerwise_rates(
    parameters: Iterable[Any], lr: float, decay: float, layers: str = "*layers.*", **rest: Any
) -> list[dict[str, Any]]:
    """Parameter groups whose learning rate falls from the last layer to the first, by `decay` from each to the one before.

    `layers`: a pattern that ends where a layer's number stands, such as "encoder.layer.*". What is in no layer and comes after the first
    in the order of `model.named_parameters()` (the head) has `lr`, the last of L layers `lr × decay`, the first `lr × decay^L`, and
    what comes before it (embeddings) `lr × decay^(L + 1)`. `rest`: hyperparameters of all groups.

    As in Clark et al. 2020, ELECTRA, and Bao et al. 2021, BEiT. J041 when the pattern means no layer.
    """
    pairs = named(parameters)
    numbers = [_layer(name, layers) for name, _ in pairs]
    found = sorted({n for n in numbers if n is not None})
    if not found:
        raise PlaitError(_nothing(layers, [name for name, _ in pairs]))
    first, depth = next(i for i, n in enumerate(numbers) if n is not None), len(found) + 1
    at: dict[int, list[Any]] = {}
    for i, (number, (_, parameter)) in enumerate(zip(numbers, pairs)):
        place = found.index(number) + 1 if number is not None else depth if i > first else 0
        at.setdefault(place, []).append(parameter)
    return [{**rest, "lr": lr * decay ** (depth - place), "params": at[place]} for place in sorted(at)]


def _layer(name: str, layers: str) -> int | None:
    """The number of the layer that a parameter is of, or None."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdecimal() and fnmatchcase(".".join(words[: i + 1]), layers):
            return int(word)
    return None


def _meaning(choice: Choice) -> Callable[[str, Any], bool]:
    return choice if callable(choice) else lambda name, _: fnmatchcase(name, choice)


def _nothing(choice: Choice, names: Sequence[str]) -> Problem:
    shown = repr(choice) if isinstance(choice, str) else f"the choice {getattr(choice, '__name__', choice)}"
    what = f"{shown} means none of the parameters that are trained"
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    why = f"they are named as model.named_parameters() has them: {some}"
    return Problem("J041", what, why=why, fix=("leave it out", "plait sketch JOB    shows the names of modules"))
