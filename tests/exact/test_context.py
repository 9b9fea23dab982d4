"""Context parallelism of different models equals one device in float64, or the model is rejected with the unit and the reason."""

import dataclasses
from itertools import islice
from typing import Any

import jobs_context
import jobs_odd
import jobs_odd_features
import jobs_real
import jobs_unlike
import pytest
import torch
from jobs import Tokens
from rarely import crossed, every, sampled
from torch import Tensor, nn

from plait.config.errors import PlaitError
from plait.config.job import Evaluate
from plait.config.plan import Plan
from plait.data.batch import make_sketch_batch
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.parallel.context import attention, sequence_finder
from plait.proof.verify import verify
from plait.randomness import distributions
from plait.tensors.rows import Rows

PLANS = (
    "cp=2",
    "cp=2 cp_method=ulysses microbatches=2",
    "cp=3 activation_checkpointing=full",
    "dp=2 cp=2 microbatches=2",
    "cp=2 cp_method=ulysses activation_checkpointing=selective",
    "fsdp=2 cp=2",
    "cp=4",
    "fsdp=2 cp=2 zero_stage=2 cp_method=ulysses microbatches=2 activation_checkpointing=full",
    "dp=2 cp=2 activation_checkpointing=selective offload=optimizer",
)
JOBS = jobs_context.HUGGING | jobs_context.OWN | jobs_context.EXPERTS
BESIDE = (
    ("llama", "tp=2 cp=2 cp_method=ulysses"),
    ("gpt", "tp=2 cp=2 activation_checkpointing=full microbatches=2"),
    ("gpt2", "pp=2 cp=2 microbatches=2"),
    ("unbalanced", "dp=2 ep=2 cp=2"),
    ("balanced", "dp=2 cp=2 activation_checkpointing=full"),
    ("checkpoint", "dp=2 tp=2 cp=2"),
    ("biased", "pp=2 cp=2 microbatches=2 schedule=zb activation_checkpointing=full"),
)
MORE = (
    "tp=2 cp=2",
    "tp=2 cp=2 cp_method=ulysses activation_checkpointing=selective",
    "fsdp=2 tp=2 cp=2 microbatches=2",
    "dp=2 tp=2 cp=2",
    "pp=2 cp=2 microbatches=3 activation_checkpointing=full",
    "pp=2 cp=2 microbatches=2 stages_per_rank=2 schedule=interleaved cp_method=ulysses",
    "pp=2 fsdp=2 cp=2 microbatches=2",
    "pp=2 tp=2 cp=2 microbatches=2",
    "pp=2 cp=2 microbatches=2 schedule=zb activation_checkpointing=full",
)
SPREAD = [(name, PLANS[4 * k % len(PLANS)]) for k, name in enumerate(JOBS)]


def equal(name: str, text: str) -> None:
    plan = Plan.parse(text)
    if name == "balanced":  # its loss is per micro-batch
        plan = dataclasses.replace(plan, microbatches=max(1, 2 * (plan.pp > 1)))
    try:
        verdict = verify(JOBS[name](), plan, steps=3)
    except PlaitError as error:
        if error.codes == ["P041"]:
            assert name in ("first", "mean", "ignored", "lstm", "skip", "second_encoder", "balanced") and plan.pp > 1, (
                error
            )
            return
        if error.codes == ["P024"]:
            assert name == "balanced" and plan.pp > 1, error  # router logits come from several stages
            return
        if error.codes == ["P023"]:
            assert plan.stages_per_rank > 1, error  # few units
            return
        assert error.codes == ["P042"] and plan.cp * plan.tp > 2, error  # short sequences, few heads
        return
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.parametrize("name, text", sampled(3, every(8, SPREAD)))
def test_equal(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(4, JOBS, PLANS))
def test_every_model(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.parametrize("name, text", sampled(2, every(4, BESIDE)))
def test_beside_other_strategies(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(4, JOBS, MORE))
def test_every_model_beside_other_strategies(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.prove
@pytest.mark.parametrize("text", ("dp=2 ep=2 cp=2 cp_method=ulysses", "fsdp=2 ep=2 cp=2 activation_checkpointing=full microbatches=2"))
@pytest.mark.parametrize("name", jobs_context.EXPERTS)
def test_experts(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.parametrize("name", sampled(2, jobs_context.REFUSED))
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    job, words = jobs_context.REFUSED[name]
    with pytest.raises(PlaitError) as caught:
        verify(job(), Plan.parse("cp=2"))
    problem = caught.value.problems[0]
    assert problem.code == "P040" and words in problem.why and problem.fix, caught.value


@pytest.mark.slow
def test_attention_between_units_is_refused() -> None:
    """A single block is a unit only if it is named one, since the model has no similar module."""
    job = dataclasses.replace(
        jobs_context.OWN["plain"](), model=lambda: jobs_context.Model(jobs_context.Attention, blocks=1)
    )
    with pytest.raises(PlaitError) as caught:
        verify(job, Plan.parse("cp=2"))
    assert caught.value.codes == ["P040"] and "between units" in caught.value.problems[0].what, caught.value
    assert verify(dataclasses.replace(job, units=("blocks.*",)), Plan.parse("cp=2"), steps=2).equal


class Dropping(jobs_context.Model):
    """Skips blocks by torch's generator, which dropout in earlier blocks has used, as the library's M2M100 does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if not self.training or torch.rand([]) > 0.4:
                x = block(nn.functional.dropout(x, 0.1, self.training))
        return self.head(x)


@pytest.mark.parametrize("seed", sampled(2, range(4)))
def test_blocks_that_are_left_out_at_random_do_not_depend_on_the_length(seed: int) -> None:
    job = jobs_context.OWN["plain"]()
    torch.manual_seed(seed)
    model, inputs = Dropping(jobs_context.Attention, blocks=6), make_sketch_batch(job.data(), 2)[0]
    found = sequence_finder.find_sequences(
        model, inputs, run_model, sketch_model(model, lambda n: make_sketch_batch(job.data(), n)[0], run_model, ("blocks.*",))
    )
    assert sum(c.has_attention for c in found.calls) >= 1


@pytest.mark.slow
def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(PlaitError) as caught:
        verify(next(iter(jobs_unlike.ALL.values()))(), Plan.parse("cp=2"))
    assert caught.value.codes == ["P040"], caught.value


def test_plans_that_do_not_go_together() -> None:
    with pytest.raises(PlaitError) as caught:
        verify(jobs_context.OWN["plain"](), Plan.parse("cp=2 processes=one"))
    assert set(caught.value.codes) & {"P041", "P050"}, caught.value


@pytest.mark.slow
def test_heads_must_divide_for_ulysses() -> None:
    with pytest.raises(PlaitError) as caught:
        verify(jobs_context.OWN["plain"](), Plan.parse("cp=3 cp_method=ulysses"))
    assert caught.value.codes == ["P042"] and "2 heads" in caught.value.problems[0].what


def exchanged(place: Place) -> dict[str, Any]:
    """Three tensors in Ulysses exchange, together and one by one; the gradient of each, and the number of messages."""
    place.connect(torch.device("cpu"))
    group, sent, real = torch.distributed.group.WORLD, [0], torch.distributed.all_to_all_single

    def counted(*args: Any, **given: Any) -> Any:
        sent[0] += 1
        return real(*args, **given)

    torch.distributed.all_to_all_single = counted
    way, found, counts = attention.HeadExchange(group, Rows.make_zigzag(6, 2)), [], []
    for widths in ((4, 4, 4), (4, 4, 2)):
        torch.manual_seed(place.rank)
        given = [torch.randn(3, 4, 3, width, dtype=torch.float64, requires_grad=True) for width in widths]
        for at_once in (True, False):
            sent[0] = 0
            made = way.exchange_all(given) if at_once else [way.exchange_for_heads(t) for t in given]
            grads = torch.autograd.grad(sum((t**3).sum() for t in made), given)
            found.append([t.tolist() for t in (*made, *grads)])
            counts.append(sent[0])
    return {"same": [found[0] == found[1], found[2] == found[3]], "counts": counts}


def test_ulysses_sends_what_is_alike_in_one_message() -> None:
    for rank in fork.run_ranks(exchanged, 2):
        assert rank == {"same": [True, True], "counts": [2, 6, 6, 6]}


class Ragged(Tokens):
    """Batches of different lengths: a sequence has a different length in each step, the longest of its batch."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        longest = 5 + int(samples[0][0][0]) % 4
        x, y = (torch.stack([s[i][:longest] for s in samples]) for i in (0, 1))
        return x, y.index_fill(1, torch.tensor([0]), 3)


@pytest.mark.prove
def test_lengths_that_change() -> None:
    job = dataclasses.replace(jobs_context.OWN["second_encoder"](), data=Ragged)
    for text in ("cp=2", "cp=2 cp_method=ulysses"):
        verdict = verify(job, Plan.parse(text), steps=4)
        assert verdict.equal, verdict.to_dict()


@pytest.mark.parametrize("context", sampled(2, ("ring", "ulysses")))
def test_evaluation(context: str) -> None:
    """The metrics of the gathered outputs are equal on all ranks."""

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        right = (outputs.argmax(-1) == targets).double().mean(1)
        return {"right": right, "size": outputs.double().square().mean((1, 2))}

    job = jobs_context.OWN["plain"]()
    job = dataclasses.replace(job, evaluate=Evaluate(job.data, metrics))

    def evaluated(plan: str) -> Any:
        def rank(place: Place) -> dict[str, Any]:
            with Engine(job, plan, device="cpu", place=place, cast=torch.float64) as engine:
                return engine.evaluate()

        return fork.run_ranks(rank, Plan.parse(plan).world, fork.Listener(lambda *_: None))

    (one,) = evaluated("dp=1")
    for found in evaluated(f"cp=2 cp_method={context}"):
        assert found.keys() == one.keys() and all(abs(found[k] - one[k]) < 1e-12 for k in one), (one, found)


def test_attention_draws_by_step_where_the_sketch_saw_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernel draws inside: `cp` computes attention itself, and draws by seed, step and sample."""
    monkeypatch.setattr(distributions, "REDRAWN", frozenset())
    job = dataclasses.replace(jobs_real.llama(), seed=11)

    def rank(place: Place) -> list[list[int]]:
        found = []
        with Engine(job, "cp=2 microbatches=2", device="cpu", place=place) as engine:
            for batch in islice(engine.batches(), 2):
                engine.step(batch)
                found.append(engine.rank_model.randomness.where.tolist())
        return found

    for where in fork.run_ranks(rank, 2, fork.Listener(lambda *_: None)):
        assert where == [[11, step, job.batch // 2, job.batch // 2] for step in range(2)]


@pytest.mark.slow
def test_a_wrong_mask_is_seen_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attention.AttentionCall.take_local_mask
    monkeypatch.setattr(attention.AttentionCall, "take_local_mask", lambda self, held: _rolled(rows(self, held)))
    with pytest.raises(PlaitError) as caught:
        verify(jobs_context.OWN["biased"](), Plan.parse("cp=2"), steps=1)
    assert caught.value.codes == ["P040"] and "differs" in caught.value.problems[0].why


def _rolled(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask + 0.1 * torch.randn(mask.shape[-1], dtype=mask.dtype)


@pytest.mark.parametrize("f", sampled(3, [
    lambda x: x * torch.arange(1, x.shape[1] + 1).to(x)[None, :, None],
    lambda x: x * torch.arange(x.shape[1]).type_as(x)[None, :, None],
    lambda x: x / torch.arange(1, x.shape[1] + 1).to(tensor=x)[:, None],
]))  # fmt: skip
def test_a_tensor_that_takes_the_format_of_the_sequence_is_whole(f: Any) -> None:
    """It was once mistaken for this rank's rows of a tensor as long as the sequence."""
    verdict = verify(jobs_odd.between(f), Plan.parse("cp=2"))
    assert verdict.equal, verdict


def test_a_function_of_the_users_own_between_units_is_refused() -> None:
    """It once ran on a rank's rows without a gradient, so the layers before it were silently not trained."""
    with pytest.raises(PlaitError, match="P040") as error:
        verify(jobs_odd.between(jobs_odd_features.Fn.apply), Plan.parse("cp=2"))
    assert "torch.autograd.Function" in str(error.value)


class _Attending(nn.Module):
    """torch's attention, with dropout on the weights that it returns."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        more = {"add_bias_kv": True, "add_zero_attn": True} if added else {}
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2, **more)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.attention(x, x, x)[0])


@pytest.mark.parametrize("plan, added", sampled(3, [
    ("cp=2", False), ("tp=2", False), ("cp=2 cp_method=ulysses", False), ("cp=2", True), ("dp=2 tp=2", False),
    ("cp=2 activation_checkpointing=full", False),
]))  # fmt: skip
def test_attention_that_returns_its_weights_drops_out_the_same(plan: str, added: bool) -> None:
    """torch's function draws its mask differently from F.dropout, which was used for a rank's heads or rows: the result changed silently."""
    verdict = verify(jobs_odd.job(lambda: _Attending(added), "seq"), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict
