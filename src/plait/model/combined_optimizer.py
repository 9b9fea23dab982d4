"""Several optimizers as one, such as Muon for the matrices of layers and AdamW for the rest (Jordan et al. 2024)."""

from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


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
