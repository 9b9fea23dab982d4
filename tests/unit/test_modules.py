"""A module's forward is wrapped and restored, for any class and forward. Its state is restored after a trial."""

import copy

import torch
from torch import nn

from plait.tensors.module_state import (
    bind_forward,
    replace_parameters,
    restore_attributes,
    restore_forwards,
    restore_module_state,
    save_attributes,
    use_eval_mode,
)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Triple(Double):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * x


def wrap(module: nn.Module) -> None:
    own = bind_forward(module)
    module.forward = lambda x: own(x) + 1.0  # pyrefly: ignore[bad-assignment]


def test_wrapped_twice_the_last_is_outermost() -> None:
    module, x = Double(), torch.ones(())
    wrap(module)
    own = bind_forward(module)
    module.forward = lambda x: own(x) * 10.0  # pyrefly: ignore[bad-assignment]
    assert module(x) == 30.0


def test_the_class_is_that_of_the_call() -> None:
    module = Double()
    wrap(module)
    module.__class__ = Triple
    assert module(torch.ones(())) == 4.0


def test_a_copy_of_the_module_has_a_forward_of_its_own() -> None:
    module = Double()
    module.forward = bind_forward(module)  # pyrefly: ignore[bad-assignment]
    other = copy.deepcopy(module)
    other.factor = 5.0
    assert (module(torch.ones(())), other(torch.ones(()))) == (2.0, 5.0)


def test_forwards_are_taken_back_to_those_that_were_there() -> None:
    plain, wrapped = Double(), Double()
    wrap(wrapped)
    before = wrapped.forward
    with restore_forwards([plain, wrapped]):
        wrap(plain)
        wrap(wrapped)
        assert (plain(torch.ones(())), wrapped(torch.ones(()))) == (3.0, 4.0)
    assert "forward" not in vars(plain)
    assert wrapped.forward is before


class Hooking(nn.Module):
    """Installs a hook in its first forward pass, and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hooked = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.inner.register_forward_hook(lambda module, args, out: None)
            self.hooked = True
        return self.inner(x)


def test_hooks_that_a_trial_installs_do_not_stay() -> None:
    model = Hooking()
    with restore_module_state(model.modules()):
        model(torch.ones(2, 4))
    assert not model.hooked and not model.inner._forward_hooks


class Caching(nn.Module):
    """Stores a cache, counts its calls in a buffer that another module shares, and creates a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.inner = nn.Module()
        self.inner.register_buffer("calls", self.calls)
        self.cache: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        self.cache = x.tolist()
        self.register_buffer("made", x.clone())
        return x + self.inner.calls


def test_attributes_and_buffers_are_those_of_before() -> None:
    model = Caching()
    calls = model.calls
    with restore_module_state(model.modules(), hooks=False):
        assert model(torch.ones(1)) == 2.0  # one copy for both modules
    assert model.cache is None
    assert model.calls is calls and model.inner.calls is calls and calls == 0.0
    assert [name for name, _ in model.named_buffers(remove_duplicate=False)] == ["calls", "inner.calls"]


def test_attributes_alone() -> None:
    model = Caching()
    before = save_attributes(model.modules())
    model(torch.ones(1))
    restore_attributes(before)
    assert model.cache is None and model.calls == 1.0


def test_modes_are_those_of_before() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with use_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    bias, new = model[0].bias, nn.Parameter(torch.zeros(2, 2))
    replace_parameters(model, {id(model[0].weight): new})
    assert model[0].weight is new and model[1].weight is new and model[0].bias is bias
