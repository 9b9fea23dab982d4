"""Slices are found in unmodified models. If the obvious slice is wrong, nothing is sliced."""

import copy
import random
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import jobs
import jobs_pipeline
import jobs_real
import jobs_unlike
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from plait.config.errors import PlaitError
from plait.model.slices import ColumnRowPair, ParameterSlice, Slices
from plait.parallel.tensor.find.dataflow_trace import DisableDropout
from plait.parallel.tensor.find.finder import find_slices
from plait.parallel.tensor.find.linear_maps import find_maps
from plait.parallel.tensor.find.replayed_module import divide_integer
from plait.parallel.tensor.wiring import correct_shape
from plait.tensors import multihead
from plait.tensors.rows import copy_ranges

WIDTH, LENGTH = 24, 5


def run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def slices(model: nn.Module, n: int = 2, inputs: Any = None, **tensor: str) -> Slices:
    make = inputs or (lambda k: torch.randn(k, LENGTH, WIDTH))
    return find_slices(model, make, run, n, {k.replace("__", "."): v for k, v in tensor.items()})


def of_job(make: Callable[[], Any], n: int) -> tuple[nn.Module, Slices]:
    job = make()
    model, data = job.model(), job.data()
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    return model, find_slices(model, lambda k: default_collate([data[i] for i in range(k)])[0], run, n)


def share(model: nn.Module, found: Slices) -> float:
    """The fraction of the weights that is sliced in groups."""
    named = dict(model.named_parameters())
    return sum(named[c.parameter].numel() for g in found.groups for c in g.tp_shards) / sum(
        p.numel() for p in named.values()
    )


def rows(found: Slices) -> set[str]:
    return {g.row for g in found.groups}


def reasons(found: Slices) -> str:
    return "\n".join(f"{name}: {why}" for name, _, why in found.unsliced)


class Small(nn.Module):
    """a → between → b, or a function of the test in place of `forward`."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, width: int = 32, **modules: nn.Module):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        for name, module in modules.items():
            self.add_module(name, module)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return x + self.b(self.between(h))


# — what is right —


def test_a_pair_is_cut_and_the_model_is_left_as_it_was() -> None:
    model = Small(lambda h: h.relu())
    before, state = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    (group,) = slices(model, 4).groups
    assert (group.container, group.columns, group.row, group.resize) == ("", ("a",), "b", False)
    weight, bias, row = group.tp_shards
    assert (
        weight == ParameterSlice("a.weight", 0, tuple(((r * 8, 8),) for r in range(4))) and bias.parameter == "a.bias"
    )
    assert row == ParameterSlice("b.weight", 1, weight.ranges)
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


class Nano(nn.Module):
    """Heads and width are hard-coded in views of the input's own sizes. q, k, v are in one matrix."""

    def __init__(self, heads: int = 4, order: tuple[int, int, int] = (0, 1, 2), layout: str = "parts"):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.order, self.layout = heads, WIDTH, order, layout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        if self.layout == "parts":
            parts = self.c_attn(x).split(self.n_embd, dim=2)
            parts = [p.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for p in parts]
        else:  # q, k, v of a head next to each other
            parts = self.c_attn(x).view(b, t, self.n_head, 3 * (c // self.n_head)).transpose(1, 2).chunk(3, -1)
        q, k, v = (parts[i] for i in self.order)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_sizes_computed_from_the_input(n: int, order: tuple[int, int, int]) -> None:
    (group,) = slices(Nano(order=order), n).groups
    assert group.resize and group.columns == ("c_attn",)
    step = WIDTH // n
    assert group.tp_shards[0].ranges[1] == tuple((p * WIDTH + step, step) for p in range(3))


def test_heads_beside_each_other_are_cut_in_one_piece() -> None:
    (group,) = slices(Nano(layout="heads"), 2).groups
    assert group.tp_shards[0].ranges == (((0, 36),), ((36, 36),))


class Grouped(nn.Module):
    """Fewer heads of keys than of queries, with norms."""

    def __init__(self, heads: int = 8, shared: int = 2, norm: str = ""):
        super().__init__()
        self.d, self.groups = 4, heads // shared
        self.q, self.o = nn.Linear(WIDTH, heads * 4), nn.Linear(heads * 4, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, shared * 4), nn.Linear(WIDTH, shared * 4)
        self.norm = norm
        self.q_norm = nn.RMSNorm({"head": 4, "wide": heads * 4, "": 1}[norm])

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(x)) if self.norm == "wide" else self.q(x)
        q, k, v = (y.unflatten(-1, (-1, self.d)).transpose(1, 2) for y in (q, self.k(x), self.v(x)))
        q = self.q_norm(q) if self.norm == "head" else q
        k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_ranks_share_heads_of_keys() -> None:
    for n, divisors in ((2, {2}), (4, {2, 4}), (8, {4})):  # 2 or 4: one head of keys is broadcast over two
        (group,) = slices(Grouped(), n).groups
        ranges = {cut.parameter: cut.ranges for cut in group.tp_shards}
        each = max(1, n // 2)
        assert ranges["k.weight"] == tuple(((r // each * 4, 4),) for r in range(n))
        assert {i.divisor for i in group.scaled_attributes if i.path == "groups"} <= divisors
    (group,) = slices(Grouped(shared=1), 2).groups  # every rank has the only head of keys
    assert {cut.parameter: cut.ranges for cut in group.tp_shards}["v.bias"] == (((0, 4),), ((0, 4),))


def test_norms_of_heads_are_partial_and_norms_of_everything_keep_it_whole() -> None:
    (group,) = slices(Grouped(norm="head")).groups
    assert group.partial_gradients == ("q_norm.weight",)
    found = slices(Grouped(norm="wide"))
    assert not found.groups and "q" in reasons(found)


class Biased(nn.Module):
    """A bias for each head is passed as an argument and returned again, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = 4

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)), bias


class Stack(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (1, 4, LENGTH, LENGTH)) -> None:
        super().__init__()
        self.bias, self.layers = nn.Parameter(torch.zeros(shape)), nn.ModuleList(Biased() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        for layer in self.layers:
            y, bias = layer(x, bias=bias * 1.0)
            x = x + y
        return x


def test_a_bias_for_each_head_is_cut_where_it_arrives() -> None:
    found = slices(Stack(), 4)
    assert [g.arguments[0].dim for g in found.groups] == [1, 1]
    assert [g.arguments[0].key for g in found.groups] == ["bias", "bias"]
    shared = slices(Stack((LENGTH, LENGTH)), 2)
    assert [g.arguments[0].dim for g in shared.groups] == [None, None]  # one for all heads: not sliced


def convolutions(*modules: nn.Module) -> tuple[nn.Module, Any]:
    return nn.Sequential(*modules), lambda k: torch.randn(k, 4, 6, 6)


def test_convolutions() -> None:
    model, inputs = convolutions(
        nn.Conv2d(4, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 4, 1)
    )
    (group,) = slices(model, 4, inputs).groups
    assert {c.parameter for c in group.tp_shards} == {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight"}
    assert ("2", "groups", 4) in {(i.module, i.path, i.divisor) for i in group.scaled_attributes}
    model, inputs = convolutions(
        nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.ConvTranspose2d(16, 4, 3)
    )
    (group,) = slices(model, 2, inputs).groups
    assert {c.parameter: c.dim for c in group.tp_shards}["3.weight"] == 0
    assert not slices(model, 8, inputs).groups  # two channels in a group of the norm's four
    model, inputs = convolutions(nn.Conv2d(4, 16, 1), nn.GroupNorm(1, 16), nn.Conv2d(16, 4, 1))
    assert not slices(model, 2, inputs).groups


class Gated(nn.Module):
    """in → convolution over time, gates → out, as in models of long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(WIDTH, 3 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, c, y = self.into(x).transpose(1, 2).chunk(3, 1)
        return self.out((c * self.conv(b * y)[..., : x.shape[1]]).transpose(1, 2))


def test_gates_around_a_convolution() -> None:
    (group,) = slices(Gated(), 4).groups
    assert {c.parameter for c in group.tp_shards} >= {"conv.weight", "conv.bias"}


class Mine(nn.Module):
    """A custom linear map, transposed, with its size in an attribute."""

    def __init__(self, into: int, out: int):
        super().__init__()
        self.weight, self.bias, self.size = nn.Parameter(torch.zeros(into, out)), nn.Parameter(torch.zeros(out)), out

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.size)


def test_a_map_is_known_by_what_it_does() -> None:
    model = nn.Sequential(Mine(WIDTH, WIDTH), nn.GELU(), Mine(WIDTH, WIDTH))
    (group,) = slices(model).groups
    assert [c.dim for c in group.tp_shards] == [1, 0, 0] and [i.module for i in group.scaled_attributes] == ["0"]
    scaled = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaled[0].forward = lambda x: x
    assert set(find_maps(scaled)) == {"1"}


def test_features_flipped_between_are_taken_from_the_other_end() -> None:
    (group,) = slices(Small(lambda h: h.flip(-1))).groups
    assert group.tp_shards[0].ranges == (((16, 16),), ((0, 16),))


def test_feature_dropout_and_random_paths() -> None:
    assert rows(slices(Small(lambda h: F.dropout(h.relu_(), 0.5)))) == {"b"}
    _, found = of_job(jobs_unlike.ALL["layer_drop"], 2)
    assert len(found.groups) == 3
    _, found = of_job(jobs_unlike.ALL["drop_inside"], 2)
    assert len(found.groups) == 3


# — what is wrong —


class Double(torch.autograd.Function):
    """Not a torch function, so it is visible only in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> Any:
        return x[0] * 2

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return g[0] * 2


WRONG = {
    "softmax": lambda h: h.softmax(-1),
    "norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "sum": lambda h: h.cumsum(-1),
    "rolled": lambda h: h.roll(1, -1),
    "sorted": lambda h: h.sort(-1).values,
    "largest": lambda h: h * (h == h.amax(-1, keepdim=True)),
    "mean": lambda h: h - h.detach().mean(-1, keepdim=True),
    "first": lambda h: h * h[..., :1].detach(),
    "positions": lambda h: h * torch.arange(h.shape[-1]),
    "size": lambda h: h / h.shape[-1],
    "noise": lambda h: h * torch.rand_like(h),
    "nothing": lambda h: h * 0.0,
    "infinite": lambda h: h / 0.0,
    "half": lambda h: torch.cat([h[..., :16], h[..., :16]], -1),
    "look": lambda h: h if h.sum() > 0 else h + 1,
    "norm over words": lambda h: h / h.norm(),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("n", [2, 4])
def test_what_mixes_features_stays_whole(name: str, n: int) -> None:
    found = slices(Small(WRONG[name]), n)
    assert not found.groups
    assert all(why for _, _, why in found.unsliced)


def leaking(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    model = Small(width=WIDTH, norm=nn.LayerNorm(WIDTH), c=nn.Linear(WIDTH, WIDTH))
    model.scale = nn.Parameter(torch.ones(WIDTH))
    model.forward = MethodType(forward, model)
    return model


def used_around(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) * m.scale) * m.scale


def seen_later(m: Any, x: Tensor) -> Tensor:
    m.kept = m.a(x)
    return m.b(m.kept.relu()) + m.kept.detach().square()


def written(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    h = m.a(x)
    out[:, :2] = h[:, :2]
    return m.b(h) + out


LEAKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "residual": lambda m, x: (h := m.a(x)) + m.b(h.relu()),
    "returned": lambda m, x: ((h := m.a(x)), m.b(h.relu())),
    "another layer": lambda m, x: m.b((h := m.a(x)).relu()) + m.c(h),
    "by a function of its own": lambda m, x: m.b((h := m.a(x)).relu()) + Double.apply(h),
    "the weight itself": lambda m, x: m.b(m.a(x).relu()) + m.a.weight.sum(),
    "the input beside": lambda m, x: m.b(m.a(x) * x),
    "a weight around": used_around,
    "by an attribute": seen_later,
    "written into another": written,
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_reaches_something_else_stays_whole(name: str) -> None:
    found = slices(leaking(LEAKS[name]))
    assert not any("a" in g.columns for g in found.groups)


def test_a_parameter_between_is_cut_with_the_features() -> None:
    (group,) = slices(leaking(lambda m, x: m.b(m.a(x) * m.scale))).groups
    assert ("scale", 0) in {(c.parameter, c.dim) for c in group.tp_shards}


def test_a_tied_weight_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    found = slices(model)
    assert not found.groups and "same weight" in reasons(found)


# — torch's own —


class Mixer(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x, x, x, need_weights=False)[0]


def sliced(model: nn.Module, group: ColumnRowPair, rank: int) -> nn.Module:
    """The model of one rank."""
    local = copy.deepcopy(model)
    for cut in group.tp_shards:
        holder, _, key = cut.parameter.rpartition(".")
        module = local.get_submodule(holder)
        setattr(module, key, nn.Parameter(copy_ranges(getattr(module, key).data, cut.dim, cut.ranges[rank])))
    for integer in group.scaled_attributes:
        divide_integer(local, integer)
    return local


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 6, "vdim": 10}],
    ids=str,
)
def test_packed_attention_of_each_rank_adds_up(options: dict[str, Any], weights: bool) -> None:
    torch.manual_seed(1)
    model = nn.MultiheadAttention(WIDTH, 4, **options).double()
    for p in model.parameters():
        nn.init.normal_(p)
    q = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    k, v = (torch.randn(3, 6, d or WIDTH, dtype=torch.float64) for d in (model.kdim, model.vdim))
    samples, words = (3, 6) if model.batch_first else (6, 3)
    padding = torch.arange(words).expand(samples, -1) > 1 + torch.arange(samples)[:, None] % 2
    masks = [None, torch.ones(words, words, dtype=torch.bool).triu(1), torch.randn(samples * 4, words, words).double()]
    (group,) = find_slices(Wrapped(model), lambda k_: (q, k, v), run, 2).groups
    for mask in masks:
        given = {"attn_mask": mask, "need_weights": weights}
        if mask is None or mask.dtype is torch.bool:
            given["key_padding_mask"] = padding
        want, seen = model(q, k, v, **given)
        parts = [sliced(Wrapped(model), group, rank).mix for rank in range(2)]
        got = [multihead.multihead_forward(part, q, k, v, **given, first_head=2 * r) for r, part in enumerate(parts)]
        bias = 0 if model.out_proj.bias is None else model.out_proj.bias
        torch.testing.assert_close(sum(out for out, _ in got) - bias, want)
        if weights:
            torch.testing.assert_close(torch.stack([w for _, w in got]).mean(0), seen)


class Wrapped(nn.Module):
    def __init__(self, mix: nn.MultiheadAttention):
        super().__init__()
        self.mix = mix

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mix(q, k, v, need_weights=False)[0]


def test_packed_attention_is_cut_by_heads() -> None:
    (group,) = slices(Mixer(batch_first=True), 4).groups
    assert (group.container, group.columns, group.row) == ("mix", ("mix",), "mix.out_proj")
    assert "4 heads, which 8 does not divide" in reasons(slices(Mixer(), 8))
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    assert rows(slices(layer, 2)) == {"self_attn.out_proj", "linear2"}


class Words(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(17, 8, **({"max_norm": 1.0} if how == "norm" else {})), nn.Embedding(9, 8)
        self.head, self.how = nn.Linear(8, 17, bias=False), how
        if how == "tied":
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        if self.how == "used":
            h = h + self.embed.weight.sum(0)
        return self.head(h).log_softmax(-1) if self.how == "changed" else self.head(h)


def test_vocabulary() -> None:
    words = lambda k: torch.randint(0, 17, (k, 4))  # noqa: E731
    for how, expected in {
        "": ("embed", "head"), "tied": ("embed", "head"), "used": ("head",), "norm": ("head",), "changed": ("embed",),
    }.items():  # fmt: skip
        assert slices(Words(how), 2, words).vocabulary == expected, how
    assert "place" in reasons(slices(Words(), 2, words))


# — the job's own slices —


def test_wishes() -> None:
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    assert [(g.columns, g.row) for g in slices(chain).groups] == [(("0",), "1"), (("2",), "3")]
    assert [(g.columns, g.row) for g in slices(chain, **{"0": "whole"}).groups] == [(("1",), "2")]
    assert [(g.columns, g.row) for g in slices(chain, **{"1": "column", "2": "row"}).groups] == [(("1",), "2")]
    assert not slices(chain, **{"*": "whole"}).groups


@pytest.mark.parametrize("wish, said", [({"q": "column"}, "matches no layer"), ({"a": "row"}, "not compute the same")])
def test_wishes_that_cannot_be_met(wish: dict[str, str], said: str) -> None:
    with pytest.raises(PlaitError, match=said) as raised:
        slices(Small(), **wish)
    assert raised.value.codes == ["J021"]


def test_a_wish_is_checked_too() -> None:
    with pytest.raises(PlaitError, match="all features of a"):
        slices(Small(WRONG["softmax"]), a="column", b="row")


# — sizes —


@pytest.mark.parametrize(
    "have, ask, meant",
    [
        ((2, 5, 8), (2, 5, 16), (2, 5, 8)),
        ((2, 5, 8), (2, 5, 4, 4), (2, 5, 2, 4)),
        ((2, 2, 5, 4), (2 * 4, 5, 4), (4, 5, 4)),
        ((3, 5, 2, 2), (3, 5, 8), (3, 5, 4)),
        ((3, 5, 2, 2), (15, 8), (15, 4)),
        ((15, 4), (3, 5, 8), (3, 5, 4)),
        ((15, 4), (3, 5, 2, 4), (3, 5, 1, 4)),
        ((2, 5, 8), (2, 5, -1), (2, 5, -1)),
        ((2, 5, 8), (2, 5, 8), (2, 5, 8)),
    ],
)
def test_sizes_of_the_whole(have: tuple[int, ...], ask: tuple[int, ...], meant: tuple[int, ...]) -> None:
    assert correct_shape(have, ask, 2) == meant


# — public models —

HUGGING = {
    "llama": (0.84, 4), "gemma": (0.92, 2), "gpt2": (0.90, 2), "bert": (0.80, 2), "t5": (0.72, 2), "vit": (0.82, 2),
    "swin": (0.88, 2), "mamba": (0.0, 2), "convnext": (0.61, 4), "whisper": (0.88, 2), "clip_pairs": (0.75, 2),
    "mixtral": (0.18, 2),
}  # fmt: skip
"""The smallest fraction of weights that is sliced in groups, and the number of ranks that divide the heads."""


@pytest.mark.parametrize("name", HUGGING)
def test_hugging_face(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        least, most = HUGGING[name]
        for n in (2, 4)[: most // 2]:
            model, found = of_job(jobs_pipeline.HUGGING[name], n)
            assert share(model, found) >= least - 0.005
            assert found.vocabulary or name in ("gemma", "vit", "swin", "convnext")


@pytest.mark.parametrize("named", (False, True))
def test_a_trial_without_heads_of_keys_fails_and_does_not_end_the_process(named: bool) -> None:
    query, key, value = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 0, 3, 8)
    given = ((query,), {"key": key, "value": value}) if named else ((query, key, value), {})
    with DisableDropout(), pytest.raises(ValueError, match="at least one head"):
        nn.functional.scaled_dot_product_attention(*given[0], **given[1], enable_gqa=True)


@pytest.mark.parametrize("name, least", [("Phi3", 0.88), ("Olmo2", 0.50), ("Qwen3", 0.88)])
def test_numbers_in_a_config_and_norms(name: str, least: float) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, found = of_job(lambda: jobs_real.hugging(lambda: getattr(transformers, f"{name}ForCausalLM")(config)), 2)
    assert share(model, found) >= least - 0.005
    attention = [g for g in found.groups if g.row.endswith("o_proj")]
    assert len(attention) == (0 if name == "Olmo2" else 2)
    if name == "Phi3":
        assert "config.num_attention_heads" in {i.path for i in attention[0].scaled_attributes}
    if name == "Qwen3":
        assert attention[0].partial_gradients == (
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.self_attn.k_norm.weight",
        )


@pytest.mark.parametrize("name", sorted(jobs.ALL | jobs_unlike.ALL))
def test_every_small_job_is_understood(name: str) -> None:
    if name == "stream":
        return
    model, found = of_job((jobs.ALL | jobs_unlike.ALL)[name], 2)
    named = dict(model.named_parameters())
    for group in found.groups:
        for cut in group.tp_shards:
            size = named[cut.parameter].shape[cut.dim]
            assert sorted(i for ranges in cut.ranges for a, b in ranges for i in range(a, a + b)) == [*range(size)]
    if name == "unet":
        assert share(model, found) > 0.9


def test_a_model_without_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 32000, (4, 512))
    found = find_slices(model, lambda k: {"input_ids": ids[:k]}, run, 8)
    assert len(found.groups) == 6 and not found.unsliced and all(p.is_meta for p in model.parameters())
