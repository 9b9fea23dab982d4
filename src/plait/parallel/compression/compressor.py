"""Sums of named tensors over any group of ranks, compressed, with error feedback.

With g the tensor that a rank gives and e its residual of the sum before, x = g + e is what it has to send and C(x) what
it sends. The sum is Σ C(x), and e = x − C(x) stays: nothing is lost, it arrives later. So after any number of sums

    Σ of all sums + Σ of the ranks' residuals = Σ of all that was given

What a sum leaves is taken over by `commit`, and not before: a step that is made again, or left out because it is not
finite, leaves no trace. Nothing here knows what is summed: gradients of copies, or how far the weights of replica groups moved.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.parallel.compression.messages import wide
from plait.parallel.compression.powersgd import first_factor, sum_thin
from plait.parallel.compression.price import compressible
from plait.parallel.compression.rounded import sum_bf16, sum_int8

RESIDUAL, FACTOR = "residual", "factor"


class Compressor:
    """Sums tensors that are named and shaped as those of `like`, as `kind` (bf16, int8 or powersgd) sends them.

    `seed` and `rank` are for powersgd: of the first factors, and how many columns they have. All ranks make it alike.
    """

    def __init__(self, kind: str, like: Mapping[str, Tensor], seed: int = 0, rank: int = 2):
        self.kind = kind
        thin, self.like = kind == "powersgd", dict(like)
        chosen = {n: t for n, t in like.items() if not thin or compressible(tuple(t.shape), rank)}
        self.residuals = {n: torch.zeros_like(t, dtype=wide(t.dtype), requires_grad=False) for n, t in chosen.items()}
        """What this rank has not sent yet, by name."""
        self.first = {n: first_factor(n, t, seed, rank) for n, t in chosen.items()} if thin else {}
        self.factors = dict(self.first)
        """Of powersgd what the next sum begins with: the same on all ranks."""
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    @torch.no_grad()
    def sum(self, given: Mapping[str, Tensor | None], group: ProcessGroup | None) -> dict[str, Tensor]:
        """The sum of each tensor over the ranks of the group, on all of them. They give the same names in the same order;
        None gives nothing, and sends what is left from before."""
        ready = {name: self._ready(name, tensor) for name, tensor in given.items()}
        if self.kind == "powersgd":
            mine = {name: f for name, f in self.factors.items() if name in ready}
            sums, residuals, factors = sum_thin(ready, mine, self.first, group)
        else:
            sums, residuals = (sum_int8 if self.kind == "int8" else sum_bf16)(ready, group)
            factors = {}
        self._next = residuals, factors
        return {name: sums[name].to(self.like[name].dtype) for name in given}

    def _ready(self, name: str, tensor: Tensor | None) -> Tensor:
        """What this rank has to send of a tensor."""
        tensor = torch.zeros_like(self.like[name], requires_grad=False) if tensor is None else tensor
        residual = self.residuals.get(name)
        return tensor.to(wide(tensor.dtype)) if residual is None else residual + tensor

    def forget(self, names: Iterable[str]) -> None:
        """What was summed of these does not count, and leaves nothing."""
        for left in self._next:
            for name in names:
                left.pop(name, None)

    def commit(self) -> None:
        """The last sum counts: take over what it left."""
        residuals, factors = self._next
        self.residuals.update(residuals)
        self.factors.update(factors)
        self._next = {}, {}

    def state(self) -> dict[str, Tensor]:
        """`residual/<name>`, which is this rank's own, and `factor/<name>`, the same on all ranks."""
        residuals = {f"{RESIDUAL}/{name}": t for name, t in self.residuals.items()}
        return residuals | {f"{FACTOR}/{name}": t for name, t in self.factors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state; what is not in it is as before the first sum."""
        for name, t in self.residuals.items():
            self.residuals[name] = state.get(f"{RESIDUAL}/{name}", torch.zeros_like(t)).to(t.dtype)
        for name, t in self.first.items():
            self.factors[name] = state.get(f"{FACTOR}/{name}", t).to(t.dtype)
        self._next = {}, {}
