"""Numbers to run a model on while its slices are looked for: random weights, short rows of words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.tensor.find.linear_maps import find_maps
from plait.tensors.torch_private import FakeTensor, tree_leaves, tree_map_only

LENGTH = 5
"""Of rows of words."""
LONGER = (17, 65, 257)
"""Words of a row, where it takes so many for the model to take the course that it takes on whole rows."""
LARGE = 1 << 22
"""Numbers in a table of which not every row is drawn."""
LARGE_MODEL = 1 << 26
"""Numbers in a model of which, of blocks that are alike, the first and the last are checked."""


@contextmanager
def random_weights(model: nn.Module) -> Iterator[None]:
    """Random numbers in float64, on the host, in the place of weights: zeros that a constructor chose would prove nothing,
    and a device may have no room for them. Buffers are on the host too.

    Of a large table all rows are alike, and so they are of matrices of maps in a large model: nothing looks at them.
    """
    g = torch.Generator().manual_seed(0)
    maps = {id(p) for m in find_maps(model).values() for p in m.module.parameters()}
    large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL
    before = [(m, n, p, p.data) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    new = {id(p): _drawn(p, g, p.numel() > LARGE or (large and id(p) in maps)) for _, _, p, _ in before}
    hollow = {id(p) for _, _, p, _ in before if p.is_meta or isinstance(p, FakeTensor)}
    try:
        for module, name, p, _ in before:
            if id(p) in hollow:
                setattr(module, name, new[id(p)])
            else:
                p.data = new[id(p)].data
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta or isinstance(buffer, FakeTensor):
                    setattr(module, name, torch.rand(buffer.shape, generator=g).to(buffer.dtype))
                wide = torch.float64 if buffer.is_floating_point() else buffer.dtype
                setattr(module, name, getattr(module, name).to("cpu", wide))
        yield
    finally:
        for module, name, p, data in before:
            if id(p) in hollow:
                setattr(module, name, p)
            else:
                p.data = data


def _drawn(p: nn.Parameter, g: torch.Generator, alike: bool) -> nn.Parameter:
    if not p.is_floating_point():
        return nn.Parameter(p.detach().cpu(), False)
    drawn = torch.randn(p.shape[-1:] if alike else p.shape, generator=g, dtype=torch.float64)
    drawn = drawn / max(1, p.numel() // max(1, len(p))) ** 0.5 if p.dim() > 1 else 1 + drawn / 10
    return nn.Parameter(drawn.expand(p.shape), p.requires_grad)


def short(example: Any, length: int = LENGTH) -> Any:
    """The first few words of each row, where the inputs are rows of words: what holds for them holds for more."""
    return tree_map_only(Tensor, lambda t: t[:, :length] if t.dim() == 2 and not t.is_floating_point() else t, example)


def tries(example: Any) -> list[tuple[Any, bool]]:
    """(inputs, whether maps have numbers) to follow the model on. Long rows only when it cannot run on short ones."""
    shorts = [(short(example, n), False) for n in (LENGTH, *LONGER)]
    size = lambda tree: sum(t.numel() for t in tree_leaves(tree) if isinstance(t, Tensor))  # noqa: E731
    found = [one for k, one in enumerate(shorts) if not k or size(one[0]) != size(shorts[k - 1][0])]
    whole = [] if size(found[-1][0]) == size(example) else [(example, False)]
    return [*found, *whole, (example, True)]
