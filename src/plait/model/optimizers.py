"""Optimizers that need more than a call of `step`: those with two modes, those that stack tensors, and those of torch on a GPU.

*Two modes.* Schedule-free optimizers (Defazio et al. 2024, The Road Less Scheduled) compute gradients at a point between two sequences of
weights; their result is the average sequence. A plain loop calls `optimizer.train()` before training, and `optimizer.eval()`, which puts
the average into the parameters, before it evaluates or saves the weights.

*Stacked tensors.* A Muon that orthogonalizes matrices of one shape together keeps one state for a group of tensors and needs a gradient of
each. A rank has some of the tensors, so both would depend on the plan. If a trial shows that each tensor is updated by its own gradient and
state alone (`parallel/fsdp/optimizer_check.py`), its step is made once for each tensor of this rank, with parameter groups of that tensor.
Its state is then that of one tensor, and goes from plan to plan as any other.

*Kernels on a GPU.* torch's optimizers have an update for each tensor, one in calls for lists of tensors (`foreach`) and one in a single
kernel (`fused`). Left open, torch takes lists, but an update for each tensor where parameters are shards of FSDP2. The fused kernel reads
and writes every number once, takes shards too, and can leave an update out that is not finite without the host's knowing. So it is taken
where the job says neither `fused` nor `foreach`. Its Adam rounds the betas to fp32: measured on an H200, the squares' average after one step
with beta2 = 0.999 is 1.3e-5 smaller than that of the others, and 2.4e-7 larger with 0.95. That is Adam whose beta2 differs by 1.3e-8.
torch's fused SGD makes all momentum of a group in the group's first step. It fails where a parameter gets its first gradient later, and
keeps memory that nobody has written where that step is one that is left out. So momentum begins as zeros here, which is the same where
`dampening` is 0; with another the update is not fused, and one that the job has fused itself is not made to be left out.

Several optimizers as one, such as Muon for the matrices of layers and AdamW for the rest (Jordan et al. 2024).
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.tensors.torch_private import fuse


class _States(ChainMap[Tensor, dict[str, object]]):
    """The states of several optimizers, which are dicts that make what they are asked for."""

    def __getitem__(self, key: Tensor) -> dict[str, object]:
        found = next((state for state in self.maps if key in state), None)
        return self.__missing__(key) if found is None else found[key]


class CombinedOptimizer(Optimizer):
    """Optimizers of different parameters as one, which makes a step of each. It has the parameter groups of all.

    >>> named = plait.named(parameters)                                             # doctest: +SKIP
    >>> layers = {n for n, p in named if n.startswith("layers.") and p.ndim == 2}
    >>> plait.CombinedOptimizer(torch.optim.Muon([p for n, p in named if n in layers], lr=0.02),
    ...                         torch.optim.AdamW([p for n, p in named if n not in layers], lr=3e-4))

    ValueError for a parameter that two of them have.
    """

    def __init__(self, *optimizers: Optimizer):
        self.optimizers = list(optimizers)
        mine = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if len(set(map(id, mine))) < len(mine):
            raise ValueError("a parameter is given to two optimizers")
        super().__init__(mine, {})
        self._take()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each. `closure` is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of each: `{"optimizers": [state_dict, …]}`."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._take()

    def _take(self) -> None:
        """Have the groups and states of all, the objects themselves."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        vars(self)["state"] = _States(*(optimizer.state for optimizer in self.optimizers))


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer, or one that it wraps, has both modes."""
    return bool(_with_modes(optimizer, set()))


def train_mode(optimizer: Optimizer) -> None:
    """Call `train()`: some optimizers are made in the other mode, and refuse to step in it."""
    for each in _with_modes(optimizer, set()):
        each.train()


@torch.no_grad()
def weights_in_eval_mode(optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter, and what it is in eval mode. The optimizer is in train mode again, and its parameters have the same bits as before:
    the way there and back rounds."""
    modes = _with_modes(optimizer, set())
    if not modes:
        return []
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    places = [(p.data, p.detach().clone()) for p in parameters]
    for each in modes:
        each.eval()
    found = [p.detach().clone() for p in parameters]
    for each in modes:
        each.train()
    for p, (place, before) in zip(parameters, places):
        place.copy_(before)
        p.data = place  # an optimizer may have assigned another tensor to it, which a model of shards would not see
    return [*zip(parameters, found)]


@contextmanager
def evaluation_mode(optimizer: Optimizer, written: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, the parameters are those of the optimizer's eval mode, if it has one. `written` is called each time after they were written."""
    swapped = weights_in_eval_mode(optimizer)
    if not swapped:
        yield
        return
    _swap(swapped)
    written()
    try:
        yield
    finally:
        _swap(swapped)
        written()


@torch.no_grad()
def _swap(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, other in pairs:
        held = parameter.detach().clone()
        parameter.copy_(other)
        other.copy_(held)


def wrapped(value: dict[str, object] | Iterable[object]) -> Iterator[Optimizer]:
    """Optimizers among attributes, also in lists and dicts."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, Optimizer):
            yield each
        elif isinstance(each, (list, tuple)) or type(each) is dict:
            yield from wrapped(each)


def _with_modes(optimizer: Optimizer, seen: set[int]) -> list[Any]:
    """The optimizer if it has both modes, else those of the optimizers in it that have."""
    if id(optimizer) in seen:
        return []
    seen.add(id(optimizer))
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        return [optimizer]
    return [found for each in wrapped(vars(optimizer)) for found in _with_modes(each, seen)]


def step_singly(optimizer: Optimizer) -> None:
    """From now on a step of this optimizer is one for each tensor that has a gradient; its hooks run once."""
    inner = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]

    def step(self: Optimizer, closure: object = None) -> None:
        for one in inner:
            own = _without_hooks(type(one).step)
            for _ in _each_alone(one):
                own(one)

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # pyrefly: ignore[bad-assignment]


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch's `profile_hook_step` wrapped, with its other decorators."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


@contextmanager
def _kept(optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Its parameter groups, which are as they were afterwards."""
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    try:
        yield groups
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, lists):
            group["params"] = parameters


def _each_alone(optimizer: Optimizer) -> Iterator[None]:
    """Has the optimizer one tensor at a time, of those that have a gradient."""
    with _kept(optimizer) as groups:
        for group in groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                optimizer.param_groups, group["params"] = [group], [parameter]
                yield


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those of torch's optimizers that have a fused kernel for GPUs."""
OPEN = ("fused", "foreach")
"""What a job says of it; it is no hyperparameter."""


def choose(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Fuse the update of the parameters of a rank on a GPU, where the optimizer can and the job says nothing.

    Ranks that hold none, only placeholders of what others hold, choose alike: what is fused decides when they read their numbers.
    """
    groups = optimizer.param_groups
    if device.type == "cuda" and type(optimizer) in FUSED and not any(g.get(key) is not None for g in groups for key in OPEN):
        held = [p for group in groups for p in group["params"]]
        plain = not any(group.get("differentiable") for group in groups)
        if plain and momentum_begins_at_zero(optimizer) and all(_there(p) or p.is_meta for p in held):
            fuse(optimizer)
    if type(optimizer) is torch.optim.SGD and all(group.get("fused") for group in groups):
        optimizer.register_step_pre_hook(_begin_momentum)


def momentum_begins_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step with momentum of zeros is that without: SGD weighs its first gradient as no other where it has dampening."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    return not (sgd and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups))


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups if momentum_begins_at_zero(optimizer) else ():
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)


def _there(p: nn.Parameter) -> bool:
    return p.device.type == "cuda" and p.is_floating_point()
