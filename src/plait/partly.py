"""Runs on tensors of which small ones are real and large ones are fake."""

from torch import Tensor

from plait.torchseam import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves

SMALL = 1 << 20
"""Bytes of a tensor that is made for real, because code may look at it."""


class PartlyFake(TorchDispatchMode):
    """Small tensors are real, so that code may look at them; large ones, and what comes of them, are fake."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not given or any(isinstance(t, FakeTensor) for t in given):
            with self.fakes:
                result = func(*args, **kwargs)
            if given or any(t.numel() * t.element_size() > SMALL for t in tree_leaves(result) if isinstance(t, Tensor)):
                return result
        return func(*args, **kwargs)
