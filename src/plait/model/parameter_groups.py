"""Names of parameters inside `Job.optimizer`, and parameter groups by name.

A job's optimizer is created from a list of parameters, like torch's. Its treatment of a parameter may depend on the name: no weight decay
for norms, a lower rate for the backbone, Muon for matrices of layers and AdamW for the rest.

`named` returns the names in the complete model under every plan, although a rank may have shards or placeholders. All code that creates a job's
optimizer (the engine, trials on small stand-ins, the proof) calls `build_optimizer` with names, and `named` finds them by identity.
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
from plait.model.optimizers import set_train_mode

NamedParameter = tuple[str, Any]
"""(name, parameter)."""
Choice = str | Callable[[str, Any], bool]
"""A pattern of names, in which * matches any text, or a function (name, parameter) -> bool."""


@dataclass
class _KnownNames:
    """Names of the parameters of an optimizer under construction, by identity, and whether they were read."""

    names: dict[int, str]
    is_used: bool = False


_KNOWN_NAMES: ContextVar[_KnownNames | None] = ContextVar("names of parameters", default=None)


def build_optimizer(job: Job, parameters: Mapping[str, Tensor]) -> Any:
    """Create the job's optimizer of the trained ones among these parameters, by name. They may be stand-ins or shards.

    An optimizer with two modes is set to train mode.
    """
    make, trained = job.optimizer, {n: p for n, p in parameters.items() if p.requires_grad}
    with provide_names(parameters), one_device.name_job_part("the job's optimizer"):
        made = make.build(trained) if isinstance(make, JointOptimizer) else make([*trained.values()])
    if type(made).__module__.startswith("torch.distributed"):  # ZeroRedundancyOptimizer and others
        raise one_device.communication_error(f"the job's optimizer is a {type(made).__name__}, which communicates by itself")
    if isinstance(made, Optimizer):
        if "defaults" not in vars(made):  # a wrapper that never called Optimizer.__init__ has no hooks
            made.__setstate__({"defaults": {}})
        set_train_mode(made)
    return made


def is_name_dependent(job: Job, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the job's optimizer reads the names of its parameters, found by creating it with these stand-ins."""
    with provide_names(parameters) as known:
        try:
            job.optimizer([p for p in parameters.values() if p.requires_grad])
        except Exception:  # it may select by size; names read before the error count
            return known.is_used
    return known.is_used


@contextmanager
def provide_names(parameters: Mapping[str, Tensor]) -> Iterator[_KnownNames]:
    """Provide the names of these parameters to `named` inside this context."""
    known = _KnownNames({id(p): name for name, p in parameters.items()})
    token = _KNOWN_NAMES.set(known)
    try:
        yield known
    finally:
        _KNOWN_NAMES.reset(token)


def named(parameters: Iterable[Any]) -> list[NamedParameter]:
    """Return (name, parameter) of the parameters given to `Job.optimizer`, as in `model.named_parameters()` of the complete model, under every plan.

    >>> optimizer=lambda parameters: torch.optim.AdamW(plait.named(parameters), lr=3e-4)     # doctest: +SKIP

    Raises J040 outside of `Job.optimizer`, and for objects that are not its parameters.
    """
    known, given = _KNOWN_NAMES.get(), list(parameters)
    if known is None or any(id(p) not in known.names for p in given):
        what = "plait.named was called with an object that is no parameter of Job.optimizer"
        why = (
            "it was called outside of Job.optimizer" if known is None else "a parameter is not one of the objects passed to Job.optimizer"
        )
        raise PlaitError(
            Problem("J040", what, why=why, fix=("optimizer=lambda parameters: … plait.named(parameters) …",))
        )
    known.is_used = True
    return [(known.names[id(p)], p) for p in given]


def parameter_groups(
    parameters: Iterable[Any], groups: Mapping[Choice, Mapping[str, Any]], **rest: Any
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer. Each parameter is in the group of the first choice that matches it.

    `groups`: hyperparameters by choice. A choice is a pattern of names, in which * matches any text ("*.bias"), or a function
    (name, parameter) -> bool. `rest`: hyperparameters of all other parameters, which form the last group.

    >>> optimizer=lambda parameters: torch.optim.AdamW(plait.parameter_groups(      # doctest: +SKIP
    ...     parameters, {"*norm*": {"weight_decay": 0.0}, "*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-3}}), lr=1e-4)

    A group without parameters is omitted, because earlier groups have all its matches. Raises J041 for a choice that matches no parameter.
    """
    pairs, made = named(parameters), list[dict[str, Any]]()
    choices = [(choice, _make_matcher(choice)) for choice in groups]
    lost = [choice for choice, means in choices if not any(means(*pair) for pair in pairs)]
    if lost:
        raise PlaitError([_make_no_match(choice, [name for name, _ in pairs]) for choice in lost])
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
    """Return parameter groups with a learning rate that falls by `decay` per layer, from the last layer to the first.

    `layers`: a pattern that ends at the layer number, such as "encoder.layer.*". Order is that of `model.named_parameters()`. Parameters after
    the layers (the head) have `lr`. The last of L layers has `lr × decay` and the first `lr × decay^L`. Parameters before the layers (embeddings)
    have `lr × decay^(L + 1)`. `rest`: hyperparameters of all groups.

    As in Clark et al. 2020, ELECTRA, and Bao et al. 2021, BEiT. Raises J041 if the pattern matches no layer.
    """
    pairs = named(parameters)
    numbers = [_find_layer(name, layers) for name, _ in pairs]
    found = sorted({n for n in numbers if n is not None})
    if not found:
        raise PlaitError(_make_no_match(layers, [name for name, _ in pairs]))
    first, depth = next(i for i, n in enumerate(numbers) if n is not None), len(found) + 1
    at: dict[int, list[Any]] = {}
    for i, (number, (_, parameter)) in enumerate(zip(numbers, pairs)):
        place = found.index(number) + 1 if number is not None else depth if i > first else 0
        at.setdefault(place, []).append(parameter)
    return [{**rest, "lr": lr * decay ** (depth - place), "params": at[place]} for place in sorted(at)]


def _find_layer(name: str, layers: str) -> int | None:
    """Return the number of a parameter's layer, or None."""
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdecimal() and fnmatchcase(".".join(words[: i + 1]), layers):
            return int(word)
    return None


def _make_matcher(choice: Choice) -> Callable[[str, Any], bool]:
    return choice if callable(choice) else lambda name, _: fnmatchcase(name, choice)


def _make_no_match(choice: Choice, names: Sequence[str]) -> Problem:
    shown = repr(choice) if isinstance(choice, str) else f"the choice {getattr(choice, '__name__', choice)}"
    what = f"{shown} matches no trained parameter"
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    why = f"names are those of model.named_parameters(): {some}"
    return Problem("J041", what, why=why, fix=("remove it", "plait sketch JOB    shows the names of modules"))
