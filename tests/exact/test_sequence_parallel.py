"""Sequence shards between tensor-parallel layers: which units run on them, equality with one device, and bugs that verify must detect."""

from typing import Any

import jobs_pipeline
import jobs_real
import pytest
import torch
from jobs import Tokens, language_loss, make
from rarely import every, sampled
from torch import Tensor, nn

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.data import batch as data
from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.model.slices import Slices
from plait.parallel.tensor import choose_slices
from plait.parallel.tensor.sequence import runtime as partial_sum
from plait.planner.dryrun.dry_run import sketch_weights, trace_first_step
from plait.proof.verify import verify
from plait.randomness.sub_block import LocalRowsRule
from plait.tensors import collectives


class Encoder(nn.Module):
    """Three of torch's own layers; the sequence is dim 0, or code between the layers keeps, scales and writes values."""

    def __init__(self, between: bool = False, conditioned: bool = False):
        super().__init__()
        self.between, self.conditioned = between, conditioned
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=between) for _ in range(3))
        self.embed, self.layers = nn.Embedding(17, 8), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 17)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.between else self.embed(x).transpose(0, 1)
        kept = []
        for i, layer in enumerate(self.layers):
            h = layer(h)
            kept.append(h)
            if self.between and i == 0:
                h = h * 1.5
            if self.between and i == 1:
                h[:, 0] += 1.0
        h = self.norm(h) + sum(kept) if self.between else self.norm(h).transpose(0, 1)
        return self.head(h)


class Dropped(Encoder):
    """Words are scaled, get positions, and pass a dropout before the first layer."""

    def __init__(self) -> None:
        super().__init__(between=True)
        self.positions, self.drop = nn.Parameter(torch.randn(9, 8)), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.positions[: x.shape[1]] + self.embed(x) * 8**0.5)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h)[:, 0:])


class Mixing(nn.Module):
    """Blocks that read an adjacent position outside of any region, or add a learned argument to sequence shards."""

    def __init__(self, argument: bool):
        super().__init__()
        self.argument = argument
        self.embed, self.head, self.shift = nn.Embedding(17, 8), nn.Linear(8, 17), nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([_Block(argument) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, self.shift * 2)
        return self.head(h)


class _Block(nn.Module):
    def __init__(self, argument: bool):
        super().__init__()
        self.argument = argument
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor, shift: Tensor) -> Tensor:
        h = h + shift if self.argument else h + h.roll(1, 1)
        return h + self.down(self.up(self.norm(h)).relu())


class Beside(nn.Module):
    """Two parallel regions; one is added to the other in place, as in Falcon's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ups = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        first, second = (down(up(self.norm(h)).relu()) for up, down in zip(self.ups, self.downs))
        second += first
        return h + second


def words(model: Any) -> Any:
    return make(model, Tokens, language_loss, weight=lambda t: (t != -100).sum())


def short() -> Any:
    """Fewer positions than ranks."""
    return jobs_real.example("stdlib_gpt", depth=2, width=16, heads=4, length=3, dropout=0.1, batch=12)


JOBS = {
    **jobs_real.ALL,
    **jobs_pipeline.LISTED,
    **jobs_pipeline.HARD,
    "encoder": lambda: words(Encoder),
    "between": lambda: words(lambda: Encoder(between=True)),
    "dropped": lambda: words(Dropped),
    "mixing": lambda: words(lambda: Mixing(False)),
    "argument": lambda: words(lambda: Mixing(True)),
    "beside": lambda: words(lambda: nn.Sequential(nn.Embedding(17, 8), Beside(), Beside(), nn.Linear(8, 17))),
    "short": short,
}
PLANS = (
    ("gpt", "tp=2 activation_checkpointing=selective"), ("gpt", "fsdp=2 tp=2"), ("bert", "dp=2 tp=2 microbatches=2"),
    ("vit", "tp=2"), ("encoder", "tp=2"), ("between", "tp=2 activation_checkpointing=full"), ("short", "tp=4"),
    ("mixing", "tp=2"), ("argument", "tp=2"), ("llama_tied", "pp=2 tp=2"),
    ("dropped", "fsdp=2 tp=2"), ("gemma", "tp=2"),
    ("beside", "tp=2"),
    ("llama", "tp=4 activation_checkpointing=full"), ("t5", "tp=2"), ("gpt2", "pp=2 tp=2 microbatches=2"), ("dropped",
        "pp=2 tp=2 activation_checkpointing=full"),
)  # fmt: skip


def found(name: str, plan: str = "tp=2") -> Slices:
    """Return the slices of a job's model."""
    job = JOBS[name]()
    model, samples = job.model(), job.data()
    inputs = lambda n: data.make_sketch_batch(samples, n)[0]  # noqa: E731
    return choose_slices.find_plan_slices(sketch_model(model, inputs, run_model), model, inputs, run_model, job, Plan.parse(plan))


@pytest.mark.parametrize("name, text", sampled(3, every(7, PLANS)))
def test_equal(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text), steps=3)
    assert verdict.equal and not verdict.inexact, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.parametrize(
    "name, units",
    {
        "gpt": ["blocks.0", "blocks.1", "blocks.2", "norm"],
        "encoder": ["layers.0", "layers.1", "layers.2", "norm"],
        "vit": ["vit.layers.0", "vit.layers.1", "vit.layers.2", "vit.layernorm"],
        "digits": [],
    }.items(),
)
def test_units_on_stretches(name: str, units: list[str]) -> None:
    assert [one.unit for one in found(name).sequence_units] == units


class Patches(Encoder):
    """Five positions in front, equal to the number of samples in the search for slices."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :5])


@pytest.mark.parametrize("model", (Encoder, Patches))
def test_the_sequence_in_front_is_not_taken_for_samples(model: Any) -> None:
    job = words(model)
    made, samples = job.model(), job.data()
    inputs = lambda n: data.make_sketch_batch(samples, n)[0]  # noqa: E731
    slices = choose_slices.find_plan_slices(sketch_model(made, inputs, run_model), made, inputs, run_model, job, Plan.parse("tp=2"))
    assert [unit.dim for unit in slices.sequence_units] == [0] * 4


@pytest.mark.slow
def test_a_block_that_is_one_module_sees_the_shape_of_the_whole() -> None:
    assert [one.sees_full_shape for one in found("gpt").sequence_units] == [True, True, True, False]
    assert not any(one.sees_full_shape for one in found("llama").sequence_units)


@pytest.mark.parametrize("name, why", (("mixing", "is not that"), ("argument", "a trained argument")))
def test_what_does_not_work_row_by_row_stays_whole(name: str, why: str) -> None:
    slices = found(name)
    assert not slices.sequence_units
    assert [unit for unit, _ in slices.full_sequence_units] == ["blocks.0", "blocks.1"]
    assert all(why in reason for _, reason in slices.full_sequence_units), slices.full_sequence_units


@pytest.mark.parametrize(
    "name, plan, tables",
    sampled(
        4,
        (
            ("gpt", "tp=2", ["embed"]),
            ("llama", "pp=2 tp=2", ["model.embed_tokens"]),
            ("gpt2", "tp=2", ["transformer.wte"]),
            ("dropped", "tp=2", ["embed"]),
            (
                "t5",
                "tp=2",
                ["encoder.embed_tokens", "decoder.embed_tokens"],
            ),  # their first blocks run unsliced
            ("gpt", "pp=5 tp=2", []),  # the first stage has only the embedding, and sends the sum
            ("bert", "tp=2", []),  # a norm follows in the same unit
        ),
    ),
)
def test_the_sum_of_an_embedding_is_that_of_stretches(name: str, plan: str, tables: list[str]) -> None:
    sketch, _ = sketch_weights(JOBS[name](), Plan.parse(plan))
    assert list(sketch.slices.deferred_sums) == tables


@pytest.mark.parametrize("name", sampled(3, ("gpt", "gpt2", "llama")))
def test_rows_go_from_the_last_unit_to_the_head_as_they_are(name: str) -> None:
    """Also past code that takes all of them: a slice of all rows, a view of the same shape.

    Each of three blocks has two regions. Each region gathers its rows once and reduces them once, in forward and in backward. So
    do the sum of the embedding and the input of the head.
    """
    for sent in trace_first_step(JOBS[name](), Plan.parse("tp=2")):
        assert sent.totals["send"][0] == sent.totals["recv_"][0] == 3 * 2 * 4 + 2 + 2


def test_not_wanted() -> None:
    assert not found("gpt", "tp=2 sequence_parallel=false").sequence_units


def sees(name: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse("tp=2"), steps=2, quiet=True)
    assert verdict.exit_code == DIFFERENT, verdict.to_dict()


@pytest.mark.slow
def test_gradients_from_stretches_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms get one rank's partial gradient."""
    whole = choose_slices.find_plan_slices

    def without(*args: Any, **given: Any) -> Slices:
        from dataclasses import replace

        made = whole(*args, **given)
        return replace(made, sequence_units=tuple(replace(one, partial_gradients=()) for one in made.sequence_units))

    monkeypatch.setattr(choose_slices, "find_plan_slices", without)
    sees("gpt")


@pytest.mark.slow
def test_a_gradient_that_every_rank_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers before the first block get their gradient once per rank."""
    monkeypatch.setattr(collectives, "gather_from_region", collectives.gather_partial)
    sees("between")


@pytest.mark.slow
def test_positions_added_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds the positions to its partial embedding, so the sum has them twice."""
    plain = partial_sum._AddOnFirstRank.forward
    monkeypatch.setattr(
        partial_sum._AddOnFirstRank, "forward", staticmethod(lambda ctx, share, other, first: plain(ctx, share, other, True))
    )
    sees("gpt")


@pytest.mark.slow
def test_positions_get_a_share_of_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replicated parameter has its full gradient on each rank."""
    plain = partial_sum._AddOnFirstRank.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        share, other, _ = plain(ctx, grad)
        return share, other / 2, None

    monkeypatch.setattr(partial_sum._AddOnFirstRank, "backward", staticmethod(backward))
    sees("gpt")


@pytest.mark.slow
def test_a_mask_of_the_first_rows_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalRowsRule.__call__

    def first(self: LocalRowsRule, place: str, dim: int, whole: int | None, local: int) -> Any:
        axis = plain(self, place, dim, whole, local)
        return None if axis is None else (axis[0], ((0, local),))

    monkeypatch.setattr(LocalRowsRule, "__call__", first)
    sees("gpt")
