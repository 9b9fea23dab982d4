"""The center of the suite: different jobs under each form of data parallelism equal one device, in float64.

Each job is tried under each second plan, so that each plan is tried with half of the jobs; `prove` tries more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import jobs_treacherous
import jobs_unlike
import pytest
import torch
from rarely import crossed, every, sampled
from torch import Tensor, nn

from plait import Job
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.data.batch_norm import sync_batch_norms
from plait.proof.verify import verify

pytestmark = pytest.mark.whole

PLANS = ("dp=2", "dp=3", "dp=4", "dp=2 microbatches=3", "dp=3 microbatches=2", "microbatches=4", "dp=2 processes=one",
         "dp=3 processes=one microbatches=2")  # fmt: skip
INEXACT = {  # by nature: (job, whether the plan has this)
    "batch_norm": lambda plan: plan.microbatches > 1 or plan.processes == "one",
    "branches": lambda plan: plan.processes == "one",
    "odd": lambda plan: plan.microbatches > 1,  # a buffer that counts forward passes
}


@pytest.mark.parametrize(
    "name, text", sampled(5, every(3, [(n, t) for i, n in enumerate(jobs.ALL) for t in PLANS[i % 2 :: 2]]))
)
def test_jobs(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(3, jobs.ALL, PLANS))
def test_every_job(name: str, text: str) -> None:
    equal_or_named(name, text)


def equal_or_named(name: str, text: str) -> None:
    """Equal; or inexact by nature, and named as such."""
    plan = Plan.parse(text)
    if name == "recomputed" and plan.processes == "one":  # threads share torch's global generator
        with pytest.raises(PlaitError, match="J014"):
            verify(jobs.ALL[name](), plan)
        return
    verdict = verify(jobs.ALL[name](), plan)
    assert verdict.forced["clipped"]
    if INEXACT.get(name, lambda plan: False)(plan):
        assert verdict.inexact
        assert verdict.equal or verdict.code == "V010"  # threads that share a generator may be equal by chance
    else:
        assert verdict.equal, verdict.cause
        assert not verdict.inexact


@pytest.mark.slow
def test_gradients_lie_in_memory_as_their_parameters() -> None:
    """Autograd, which adds up micro-batches in place, warns of any other order."""
    assert verify(jobs_unlike.ALL["non_contiguous"](), Plan.parse("dp=2 microbatches=2")).equal


@pytest.mark.slow
def test_twenty_steps_stay_equal() -> None:
    assert verify(jobs.attention(), Plan.parse("dp=2 microbatches=2"), steps=20).equal


@pytest.mark.slow
def test_a_dim_flattened_time_first_is_found() -> None:
    """A dim of batch × time rows is split sample by sample; verify detects a model that puts time first."""

    class TimeFirst(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.stack([x, x + 1]).flatten(0, 1)  # [time, batch, 6] -> [time * batch, 6]
            return self.layer(torch.nn.functional.dropout(rows)).view(2, -1, 1).mean(0)

    verdict = verify(jobs.make(TimeFirst), Plan.parse("dp=2"))
    assert verdict.code == "V005" and not verdict.equal


@pytest.mark.slow
def test_low_precision_is_named_and_its_logic_proved() -> None:
    verdict = verify(jobs.mlp(), Plan.parse("dp=2 precision=bf16"))
    assert verdict.equal
    assert "bf16" in verdict.inexact[0]


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
@pytest.mark.parametrize(
    ("job", "text"),
    [
        (jobs.mlp, "dp=2 compile=true"),
        (jobs.mlp, "compile=true microbatches=2"),
        (jobs.batch_norm, "dp=2 compile=true"),
    ],
)
def test_compiled_equal(job: Callable[[], Job], text: str) -> None:
    assert verify(job(), Plan.parse(text)).equal


@pytest.mark.parametrize("counts, told", (((1, 0), True), ((1, 1), False), ((2, 0), False)))
def test_a_batch_norm_of_one_value_over_all_ranks(counts: tuple[int, int], told: bool) -> None:
    """It is rejected if torch rejects it on one device, on the rank that has the value; other ranks do not check it."""

    def rank(place: Place) -> str:
        group = place.connect(torch.device("cpu"))
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
        sync_batch_norms(model, ["0"], group)
        try:
            model(torch.ones(counts[place.rank], 3))
        except ValueError as error:
            return str(error)
        return ""

    assert [bool(found) for found in fork.run_ranks(rank, 2, fork.Listener(lambda *_: None))] == [told, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
def test_a_compiled_model_with_batch_norms_is_one_graph() -> None:
    """For any local batches: one graph for the first size, one for all others, and the values of the uncompiled model."""

    def rank(place: Place) -> dict[str, Any]:
        import torch._dynamo.utils as dynamo

        dynamo.counters.clear()  # from earlier tests in the process that was forked
        group = place.connect(torch.device("cpu"))
        plain, compiled = (_strided() for _ in range(2))
        for model in (plain, compiled):
            sync_batch_norms(model, ["1", "4"], group)
        run = torch.compile(lambda x: compiled(x), backend="eager", fullgraph=True)
        for step, size in enumerate((4, 3, 5)):
            x = torch.randn(
                size + place.rank, 2, 8, 8, generator=torch.Generator().manual_seed(2 * step + place.rank)
            ).double()
            for forward in (plain, run):
                forward(x).square().sum().backward()
        pairs = list(
            zip([*plain.parameters(), *plain.buffers()], [*compiled.parameters(), *compiled.buffers()], strict=True)
        )
        same = all(torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs)
        return {"same": same, "graphs": dynamo.counters["stats"]["unique_graphs"]}

    assert fork.run_ranks(rank, 2) == [{"same": True, "graphs": 2}] * 2


def _strided() -> nn.Module:
    torch.manual_seed(0)
    conv = lambda i, o: nn.Conv2d(i, o, 3, 2, 1)  # noqa: E731
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    return nn.Sequential(
        conv(2, 3), nn.BatchNorm2d(3), nn.ReLU(), conv(3, 4), nn.BatchNorm2d(4, momentum=None), head
    ).double()


def test_batch_norm_with_a_micro_batch_that_is_empty_everywhere() -> None:
    """Two ranks with two micro-batches each, and three samples in the epoch's last batch: no NaN in the statistics."""

    def train(place: Place) -> dict:
        engine = Engine(
            jobs.make(jobs.batch_norm().model, data=lambda: jobs.Numbers(10), batch=8, steps=4),
            "dp=2 microbatches=2",
            place=place,
        )
        for batch in engine.batches():
            engine.step(batch)
        return {"finite": all(bool(b.isfinite().all()) for b in engine.model.buffers())}

    assert all(r["finite"] for r in fork.run_ranks(train, 2))


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
def test_what_is_verified_compiled_is_compiled() -> None:
    def compiled(place: Place) -> dict:
        import torch._dynamo.utils as dynamo

        dynamo.counters.clear()  # from earlier tests in the process that was forked
        from plait.engine.traffic import Traffic

        engine = Engine(jobs.mlp(), "compile=true", place=place)
        with Traffic(0, Plan()).watch():
            engine.step(next(engine.batches()))
        return {"graphs": dynamo.counters["stats"]["unique_graphs"]}

    assert fork.run_ranks(compiled, 1)[0]["graphs"] >= 1


class Missing(jobs.Numbers):
    """Some inputs are masked by -inf, some targets are unknown (NaN)."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return torch.cat([x[:-1], x.new_tensor([-torch.inf])]), torch.where(torch.tensor(i % 7 == 3), torch.nan, y)


class Masking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.where(x.isfinite(), 0.0))


@pytest.mark.parametrize("text", sampled(2, ("dp=2 microbatches=2", "pp=2 microbatches=2")))
def test_what_is_missing_equals_itself(text: str) -> None:
    """Values in the data that are not finite are no difference between the samples of two sides."""
    known = lambda y: (~y.isnan()).sum()  # noqa: E731
    loss = lambda out, y: (out - y)[~y.isnan()].square().sum() / known(y).clamp(min=1)  # noqa: E731
    job = jobs.make(lambda: nn.Sequential(Masking(6, 8), nn.Tanh(), nn.Linear(8, 1)), Missing, loss)
    assert verify(replace(job, weight=known), Plan.parse(text)).equal


@pytest.mark.parametrize("name", sampled(2, ("hardest", "mixup", "guarded")))
def test_jobs_that_slices_leave_as_they_are(name: str) -> None:
    """A loss that needs more samples than small batches have, a collate that mixes samples at random, and a loss that reads values."""
    assert verify(getattr(jobs_treacherous, name)(), Plan.parse("tp=2")).equal


class Counted:
    """A loss that gives later samples more weight, by an attribute."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return (out - y).square().mean() * (1.0 + 0.1 * self.seen)


class Moving(nn.Module):
    """A loss module that divides by its own moving mean, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = (out - y).square().mean()
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.mean.clone()


@pytest.mark.parametrize(
    ("loss", "plan"), sampled(3, ((Counted, "dp=1 activation_checkpointing=full"), (Moving, "tp=2"), (Moving, "pp=2")))
)
def test_a_proof_leaves_the_state_of_a_loss_as_it_was(loss: Any, plan: str) -> None:
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    verdict = verify(jobs.make(model, loss=loss()), Plan.parse(plan))
    assert verdict.equal, verdict.to_dict()


def wants_three(out: Tensor, y: Tensor) -> Tensor:
    """A mean over samples, for three at least."""
    if len(out) < 3:
        raise ValueError("too few samples")
    return (out - y).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "code"), ((wants_three, ""), (lambda out, y: (out - y).abs().kthvalue(3, 0).values.mean(), "V013"))
)
def test_a_loss_that_wants_more_samples_than_a_part_of_a_small_batch_has(loss: Any, code: str) -> None:
    """Then batches of the job's own size are compared."""
    verdict = verify(jobs.make(lambda: nn.Linear(6, 1), lambda: jobs.Numbers(64), loss, batch=16), Plan.parse("dp=2"))
    assert verdict.equal == (not code) and verdict.code == code, verdict.to_dict()
