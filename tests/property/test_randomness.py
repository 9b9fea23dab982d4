"""Random values are pure functions of their position, with the right moments. Tests of changes that must not affect them."""

import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from plait.config.errors import PlaitError
from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.randomness import distributions
from plait.randomness.distributions import make_philox_key
from plait.randomness.keyed import Randomness, seed_host
from plait.randomness.philox import draw_bits

MANY = 200_000


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def drawn(function, n: int = MANY, seed: int = 0, step: int = 0) -> Tensor:
    """Returns `function` of n ones with keyed random numbers."""
    model = Of(function)
    places = sketch_model(model, torch.ones, run_model).places
    with torch.no_grad(), Randomness(seed, places).install(model).forward_pass(step, 0, n):
        return model(torch.ones(n))


@given(st.integers(0, 2**128 - 1), st.integers(0, 3000), st.integers(0, 300))
def test_bits_are_a_function_of_position(philox_key: int, start: int, count: int) -> None:
    whole = draw_bits(philox_key, 0, start + count)
    part = draw_bits(philox_key, start, count)
    assert part.dtype == np.uint32
    assert part.shape == (count,)
    assert np.array_equal(part, whole[start:])


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**60), st.integers(1, 40), st.integers(0, 40))
def test_bits_far_out(philox_key: int, start: int, count: int, cut: int) -> None:
    cut = min(cut, count)
    both = np.concatenate([draw_bits(philox_key, start, cut), draw_bits(philox_key, start + cut, count - cut)])
    assert np.array_equal(both, draw_bits(philox_key, start, count))


def test_keys_are_stable_and_apart() -> None:
    assert make_philox_key("a", 1) == 139430118705874018724117186389042120154
    assert len({make_philox_key(*w) for w in [(1, "a"), ("1", "a"), ("a", 1), (1,), ((1, "a"),), (1, "a", None)]}) == 6
    assert 0 <= make_philox_key() < 2**128


def test_bits_are_fair() -> None:
    words = draw_bits(make_philox_key("fair"), 0, MANY)
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / math.sqrt(32 * MANY)
    counts = np.bincount(words >> 24, minlength=256)
    chi = float(((counts - MANY / 256) ** 2 / (MANY / 256)).sum())
    assert abs(chi - 255) < 4 * math.sqrt(2 * 255)
    assert abs(np.corrcoef(words[:-1], words[1:])[0, 1]) < 4 / math.sqrt(MANY)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4])
@pytest.mark.parametrize("function", [F.dropout, lambda x, p: F.dropout1d(x[:, None, None], p).flatten()])
def test_the_drop_rate_and_the_scale(p: float, function) -> None:
    kept = drawn(lambda x: function(x, p))
    assert abs(float((kept == 0).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / MANY)
    assert torch.equal(kept[kept != 0].unique(), torch.tensor([1 / (1 - p)]))


def test_the_ends_of_p() -> None:
    assert torch.equal(drawn(lambda x: F.dropout(x, 0.0)), torch.ones(MANY))
    assert torch.equal(drawn(lambda x: F.dropout(x, 1.0)), torch.zeros(MANY))
    assert torch.equal(drawn(lambda x: torch.bernoulli(x * 0)), torch.zeros(MANY))
    assert torch.equal(drawn(torch.bernoulli), torch.ones(MANY))


MOMENTS = {  # function -> mean, standard deviation, kurtosis
    "rand": (torch.rand_like, 0.5, math.sqrt(1 / 12), 1.8),
    "uniform_": (lambda x: x.clone().uniform_(-2, 4), 1.0, math.sqrt(36 / 12), 1.8),
    "randn": (torch.randn_like, 0.0, 1.0, 3.0),
    "normal_": (lambda x: x.clone().normal_(3, 2), 3.0, 2.0, 3.0),
    "normal": (lambda x: torch.normal(x * 3, 2.0), 3.0, 2.0, 3.0),
    "exponential_": (lambda x: x.clone().exponential_(4.0), 0.25, 0.25, 9.0),
    "log_normal_": (lambda x: x.clone().log_normal_(0.5, 0.2).log(), 0.5, 0.2, 3.0),
    "geometric_": (lambda x: x.clone().geometric_(0.3), 1 / 0.3, math.sqrt(0.7) / 0.3, 9 + 0.09 / 0.7),
    "randint": (lambda x: torch.randint(10, 20, x.shape).float(), 14.5, math.sqrt(99 / 12), 1.7758),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, math.sqrt(0.21), 1 / 0.21 - 3),
    "AlphaDropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.3, True), 0.0, 1.0, None),
    "gumbel": (lambda x: -x.clone().exponential_().log(), 0.5772157, math.pi / math.sqrt(6), 5.4),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_within_four_sigma(name: str) -> None:
    function, mean, deviation, kurtosis = MOMENTS[name]
    x = drawn(function).double()
    assert abs(float(x.mean()) - mean) < 4 * deviation / math.sqrt(MANY)
    spread = 4.0 if kurtosis is None else kurtosis
    assert abs(float(x.var()) - deviation**2) < 4 * deviation**2 * math.sqrt((spread - 1) / MANY)
    assert torch.isfinite(x).all()


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_seed_and_step_choose_the_mask(seed: int, step: int) -> None:
    masks = [drawn(F.dropout, 64, s, k) for s, k in ((seed, step), (seed, step + 1), (seed ^ 1, step), (seed, step))]
    assert torch.equal(masks[0], masks[3])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_eval_mode_draws_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout2d(0.5))
    randomness = Randomness(0, sketch_model(model, lambda n: torch.ones(n, 2, 3, 3), run_model).places).install(model)
    model.eval()
    with randomness.forward_pass(0, 0, 4):
        assert torch.equal(model(torch.ones(4, 2, 3, 3)), torch.ones(4, 2, 3, 3))
        drawn = {place for place in randomness._calls if place.count("#") > 1}
        assert not drawn


def test_the_host_is_seeded_by_step_alone() -> None:
    def numbers(step: int, first: int, count: int) -> tuple[float, float, float]:
        with Randomness(3, {}).install(nn.Linear(1, 1)).forward_pass(step, first, count):
            return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert numbers(1, 0, 4) == numbers(1, 3, 1) != numbers(2, 0, 4)
    seed_host("a")
    first = random.random(), np.random.rand(), float(torch.rand(1))
    seed_host("a")
    assert first == (random.random(), np.random.rand(), float(torch.rand(1)))


def test_a_device_is_seeded_by_samples_and_stage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random numbers inside a fused kernel differ between ranks and micro-batches, and repeat when the kernel runs again."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)

    def seed(step: int, first: int, stage: int = 0) -> int:
        with Randomness(3, {}).install(nn.Linear(1, 1)).forward_pass(step, first, 4, stage):
            return seeds[-1]

    passes = [(0, 0, 0), (0, 4, 0), (1, 0, 0), (0, 0, 1)]
    assert len({seed(*where) for where in passes}) == len(passes)
    assert seed(1, 4) == seed(1, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warning when inductor is imported
def test_a_compiled_model_has_the_same_mask() -> None:
    model = Of(lambda x: drop(linear(x)))
    model.drop, model.linear = drop, linear = nn.Dropout(0.5), nn.Linear(4, 4)
    randomness = Randomness(0, sketch_model(model, lambda n: torch.ones(n, 4), run_model).places).install(model)

    def masks() -> list[Tensor]:
        found = []
        for step, first in ((0, 0), (1, 8)):
            with randomness.forward_pass(step, first, 8):
                found.append(model(torch.ones(8, 4)) != 0)
        return found

    eager = masks()
    model.compile(backend="aot_eager", dynamic=False)
    assert all(torch.equal(a, b) for a, b in zip(eager, masks(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same_mask(reentrant: bool) -> None:
    gradients = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        block = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
        model = Of(partial(wrap, block))
        model.block = block
        places = sketch_model(model, lambda n: torch.ones(n, 9), run_model).places
        x = torch.ones(8, 9, requires_grad=True)
        randomness = Randomness(0, places).install(model)
        with randomness.forward_pass(0, 0, 8):
            y = model(x)
        with randomness.replay():
            y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_a_direct_call_in_a_checkpointed_function_is_refused() -> None:
    model = Of(lambda x: checkpoint(F.dropout, x, use_reentrant=False))
    with Randomness(0, {"#1#1": 0}).install(model).forward_pass(0, 0, 8), pytest.raises(PlaitError, match="J014"):
        model(torch.ones(8, 9, requires_grad=True))


def test_a_recomputation_without_its_generator_is_refused() -> None:
    block = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
    model = Of(lambda x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False))
    model.block = block
    randomness = Randomness(0, sketch_model(model, lambda n: torch.ones(n, 9), run_model).places).install(model)
    with randomness.forward_pass(0, 0, 8):
        y = model(torch.ones(8, 9, requires_grad=True))
    with randomness.replay(), pytest.raises(PlaitError, match="J014"):
        y.sum().backward()


@pytest.mark.parametrize("function", [lambda x: x * torch.rand(()), lambda x: x + torch.randn([])])
def test_one_number_without_dims(function) -> None:
    assert drawn(function, 4).shape == (4,)


def test_dropout_of_a_number_keeps_its_shape() -> None:
    assert drawn(lambda x: F.dropout(x.sum()), 4).shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    assert float(drawn(lambda x: torch.rand(MANY, dtype=dtype)).max()) < 1.0


class Twice(nn.Module):
    """Calls one dropout layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(x + 1.0) + 1.0)


@pytest.mark.parametrize("p", (0.5, 0.0))
def test_units_that_share_a_graph_draw_numbers_of_their_own(p: float) -> None:
    """The values equal those of uncompiled units, position by position. Includes a unit that is called twice in one graph."""
    plain, compiled = (nn.Sequential(Twice(), Twice()) for _ in range(2))
    places: dict[str, int | None] = {f"{i}.drop#{n}#1": 0 for i in "01" for n in range(1, 5)}
    units, graphs, x = list("01"), list[Any](), torch.ones(6, 40)
    for module in (*plain.modules(), *compiled.modules()):
        if isinstance(module, nn.Dropout):
            module.p = p
    keyed = [Randomness(3, places).install(model) for model in (plain, compiled)]
    keyed[1].prepare_compiled(compiled, units)

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    forward = torch.compile(Twice.forward, backend=keep, fullgraph=True)
    with keyed[0].forward_pass(1, 2, 6):
        expected = [block(x) for block in plain for _ in range(2)]
    with keyed[1].forward_pass(1, 2, 6):
        found = []
        for unit in units:
            for _ in range(2):
                with keyed[1].unit_call(unit):
                    found.append(forward(compiled.get_submodule(unit), x))
    assert all(torch.equal(a, b) for a, b in zip(expected, found)) and len(graphs) == 1
    assert p == 0.0 or len({t.sum().item() for t in found}) > 1
    torch.compiler.reset()


def test_a_mask_that_nobody_can_place_is_refused() -> None:
    """The mask is drawn in a graph, outside of any unit's forward."""
    layer = nn.Dropout(0.5)
    distributions.install_unit_dropout(layer, "drop", {}, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(PlaitError) as caught:
        layer(torch.ones(3))
    assert caught.value.codes == ["J014"]
