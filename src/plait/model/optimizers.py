"""Optimizers that need more than a call of `step`: those with two modes, those with stacked tensors, and torch's on a GPU.

*Two modes.* Schedule-free optimizers (Defazio et al. 2024, The Road Less Scheduled) compute gradients at a point between two sequences of
weights. Their result is the average sequence. A plain loop calls `optimizer.train()` before training. Before it evaluates or saves weights, it
calls `optimizer.eval()`, which puts the average into the parameters.

*Stacked tensors.* A Muon that orthogonalizes matrices of one shape together keeps one state for a group of tensors and needs a gradient of
each. A rank has some of the tensors, so the result and the state would depend on the plan. A trial checks that each tensor is updated by its own
gradient and state alone (`parallel/fsdp/optimizer_check.py`). Then its step runs once per tensor of this rank, with parameter groups of
that tensor. Its state is then per tensor and moves between plans like any other.

*Kernels on a GPU.* torch's optimizers have an update per tensor, one for lists of tensors (`foreach`), and one in a single kernel
(`fused`). By default, torch uses lists, but an update per tensor for FSDP2 shards. The fused kernel reads and writes every element once, supports
shards, and can skip a non-finite update without a host synchronization. So it is used if the job sets neither `fused` nor `foreach`.

Fused Adam rounds the betas to fp32. Measured on an H200, the average of squares after one step with beta2 = 0.999 is 1.3e-5 smaller than in
the other kernels, and 2.4e-7 larger with 0.95. This equals Adam with beta2 changed by 1.3e-8.

Fused SGD allocates all momentum of a group in the group's first step. It fails if a parameter gets its first gradient later, and it keeps
uninitialized memory if that step is skipped. So momentum starts as zeros here, which is equivalent if `dampening` is 0. With another dampening,
the update is not fused. If the job itself fuses it, its update is never skipped.

`CombinedOptimizer` combines several optimizers, such as Muon for the matrices of layers and AdamW for the rest (Jordan et al. 2024).
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
    """The states of several optimizers. Missing entries are created as by their own dicts."""

    def __getitem__(self, key: Tensor) -> dict[str, object]:
        found = next((state for state in self.maps if key in state), None)
        return self.__missing__(key) if found is None else found[key]


class CombinedOptimizer(Optimizer):
    """Several optimizers of different parameters as one. It has the parameter groups of all, and its step calls theirs.

    >>> named = plait.named(parameters)                                             # doctest: +SKIP
    >>> layers = {n for n, p in named if n.startswith("layers.") and p.ndim == 2}
    >>> plait.CombinedOptimizer(torch.optim.Muon([p for n, p in named if n in layers], lr=0.02),
    ...                         torch.optim.AdamW([p for n, p in named if n not in layers], lr=3e-4))

    Raises ValueError if two of them have the same parameter.
    """

    def __init__(self, *optimizers: Optimizer):
        self.optimizers = list(optimizers)
        mine = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if len(set(map(id, mine))) < len(mine):
            raise ValueError("a parameter is given to two optimizers")
        super().__init__(mine, {})
        self._link_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `step` of each optimizer. `closure` is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all: `{"optimizers": [state_dict, …]}`."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._link_groups()

    def _link_groups(self) -> None:
        """Link the groups and states of all optimizers, without copies."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        vars(self)["state"] = _States(*(optimizer.state for optimizer in self.optimizers))


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer, or one that it wraps, has a train and an eval mode."""
    return bool(_list_with_modes(optimizer, set()))


def set_train_mode(optimizer: Optimizer) -> None:
    """Call `train()`, because some optimizers start in eval mode and reject steps in it."""
    for each in _list_with_modes(optimizer, set()):
        each.train()


@torch.no_grad()
def get_eval_weights(optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
    """Return each parameter with its value in eval mode.

    Afterwards, the optimizer is in train mode and its parameters have their exact old values, since switching back would round.
    """
    modes = _list_with_modes(optimizer, set())
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
        p.data = place  # an optimizer may have assigned a new tensor, which sharded models would not get
    return [*zip(parameters, found)]


@contextmanager
def evaluation_mode(optimizer: Optimizer, on_written: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Give the parameters their eval-mode values inside this context, if the optimizer has modes. `on_written` runs after each change."""
    swapped = get_eval_weights(optimizer)
    if not swapped:
        yield
        return
    _swap(swapped)
    on_written()
    try:
        yield
    finally:
        _swap(swapped)
        on_written()


@torch.no_grad()
def _swap(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, other in pairs:
        held = parameter.detach().clone()
        parameter.copy_(other)
        other.copy_(held)


def iter_optimizers(value: dict[str, object] | Iterable[object]) -> Iterator[Optimizer]:
    """Yield optimizers among attributes, including those in lists and dicts."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, Optimizer):
            yield each
        elif isinstance(each, (list, tuple)) or type(each) is dict:
            yield from iter_optimizers(each)


def _list_with_modes(optimizer: Optimizer, seen: set[int]) -> list[Any]:
    """Return the optimizer if it has both modes, otherwise the wrapped optimizers that have."""
    if id(optimizer) in seen:
        return []
    seen.add(id(optimizer))
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        return [optimizer]
    return [found for each in iter_optimizers(vars(optimizer)) for found in _list_with_modes(each, seen)]


def step_per_tensor(optimizer: Optimizer) -> None:
    """Replace the optimizer's step by one step per tensor with a gradient. Its hooks run once."""
    inner = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]

    def step(self: Optimizer, closure: object = None) -> None:
        for one in inner:
            own = _unwrap_step(type(one).step)
            for _ in _iter_single(one):
                own(one)

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # pyrefly: ignore[bad-assignment]


def _unwrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that torch's `profile_hook_step` wrapped, with its other decorators."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


@contextmanager
def _restore_groups(optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Yield the parameter groups and restore them afterwards."""
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    try:
        yield groups
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, lists):
            group["params"] = parameters


def _iter_single(optimizer: Optimizer) -> Iterator[None]:
    """Reduce the optimizer to one tensor at a time, for each tensor with a gradient."""
    with _restore_groups(optimizer) as groups:
        for group in groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                optimizer.param_groups, group["params"] = [group], [parameter]
                yield


FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers of torch with a fused kernel for GPUs."""
KERNEL_OPTIONS = ("fused", "foreach")
"""Options that select a kernel; they are no hyperparameters."""


def fuse_update(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Use the fused kernel on a GPU if the optimizer has one and the job selects none.

    Ranks with placeholders only select the same kernel, because it determines when ranks read step statistics.
    """
    groups = optimizer.param_groups
    if device.type == "cuda" and type(optimizer) in FUSABLE and not any(g.get(key) is not None for g in groups for key in KERNEL_OPTIONS):
        held = [p for group in groups for p in group["params"]]
        plain = not any(group.get("differentiable") for group in groups)
        if plain and can_zero_momentum(optimizer) and all(_can_fuse(p) or p.is_meta for p in held):
            fuse(optimizer)
    if type(optimizer) is torch.optim.SGD and all(group.get("fused") for group in groups):
        optimizer.register_step_pre_hook(_init_momentum)


def can_zero_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether starting with zero momentum keeps the result. With dampening, SGD weighs its first gradient differently."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    return not (sgd and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups))


def _init_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups if can_zero_momentum(optimizer) else ():
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)


def _can_fuse(p: nn.Parameter) -> bool:
    return p.device.type == "cuda" and p.is_floating_point()
